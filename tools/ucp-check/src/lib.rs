//! A UCP client that verifies (every operation, every memory pair, every byte) and measures.
//!
//! [`ucx`] loads a stock UCX at run time, so that one binary runs on any UCX (also on several in one process). [`ucp`]
//! and [`uct`] are small safe bindings of the APIs that it needs. The rest is the checker: the expected content of a
//! buffer ([`pattern`], [`message`]), the table of cases ([`matrix`]), how one case runs ([`ops`], [`session`]) and the
//! subcommands that run them, which [`verify`] or [`measure`].
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
