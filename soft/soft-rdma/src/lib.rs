//! An HCA in software: a drop-in `libibverbs.so.1`.
//!
//! Programs that use InfiniBand verbs load it in place of rdma-core's library. Everything above the
//! C interface is real; everything below is here. `docs/software-rdma.md` says what it does, what it
//! does not, and how to use it.
//!
//! From the outside in: [`abi`] has the C structures, `api` the C functions; `hca` is the device
//! (regions, queues, queue pairs) and knows neither C nor sockets; `wire` are the messages between
//! processes, `link` the sockets and the thread behind them; `node` is what processes of one node
//! share, `fabric` what LIDs, GIDs and queue pair numbers mean; `placement` and `sysfs` say where the
//! devices sit in the machine, `ports` counts what went through them.

pub mod api;
mod config;
mod fabric;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod hca;
mod link;
mod node;
mod placement;
mod ports;
mod stats;
mod sysfs;
mod wire;

pub use verbs_abi as abi;
