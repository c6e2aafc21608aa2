//! Synapse in software: a drop-in `libSynapse.so` on the software Gaudi.
//!
//! It has the part of Synapse's C interface that moves memory: devices, memory, host mappings, streams, events, copies;
//! no graphs. It behaves as the real library is known to, including the surprising parts: one device per process,
//! device ids that are ignored, host mappings without reference counts, status codes. Calls that only a framework may
//! make are counted by the software Gaudi, and end the process if the plugin makes one: see
//! `docs/design/software-synapse.md`.
//!
//! `api` has the C functions; `process` is what a process has one of; `device` is the acquired card; `stream` runs copies.

#[path = "../../soft-scal/src/thunk.rs"]
#[macro_use]
mod thunk;

mod api;
mod device;
mod hostmap;
mod process;
mod scal;
mod status;
mod stream;
pub use api::*;
