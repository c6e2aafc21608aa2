//! A UCP client that verifies (every operation, every memory pair, every byte) and measures.
//!
//! [`ucx`] loads a stock UCX at run time, so that one binary runs on any (also on several in one process);
//! [`ucp`] and [`uct`] are small safe bindings of what is needed of its APIs. The rest is the checker: what a
//! buffer must look like ([`pattern`], [`message`]), which cases there are ([`matrix`]), how one case runs
//! ([`ops`], [`session`]) and who runs it: the subcommands, which [`verify`] or [`measure`].
//!
//! Device memory is never dereferenced here: Gaudi memory is filled and read back by `ucp_put`/`ucp_get`,
//! CUDA memory by its driver ([`cuda`]).
#![allow(
    missing_docs,
    reason = "for this workspace's tests only; a name that says it all has no comment"
)]

pub mod buffer;
pub mod client;
pub mod control;
pub mod cuda;
pub mod framework;
pub mod matrix;
pub mod measure;
pub mod message;
pub mod ops;
pub mod pattern;
pub mod processes;
pub mod report;
pub mod session;
pub mod ucp;
pub mod uct;
pub mod ucx;
pub mod verify;
pub mod watchdog;
