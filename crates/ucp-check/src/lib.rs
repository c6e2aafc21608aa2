//! A verifying UCP client: every operation, every memory pair, every byte.
//!
//! Two layers. [`ucp`] is a small safe binding of UCP's *public* C API, bound at run time, so that
//! one binary runs on any stock UCX (also on several in one process). Everything else is the
//! checker built on it: what a buffer must look like ([`pattern`]), which cases there are
//! ([`matrix`]), how one case runs ([`ops`], [`session`]) and who runs it (the subcommands under
//! [`run`]).
//!
//! Below UCP, [`uct`] binds the memory domains of libuct the same way; `run::memory` checks with it
//! what allocation, detection, dma-bufs and registration promise.
//!
//! Device memory is never dereferenced here: it is filled and read back by `ucp_put`/`ucp_get`.

mod bind;
pub mod buffer;
pub mod control;
pub mod matrix;
pub mod ops;
pub mod pattern;
pub mod report;
pub mod rig;
pub mod run;
pub mod session;
pub mod ucp;
pub mod uct;
pub mod watchdog;
