//! Sockets between processes, and the thread that serves them.
//!
//! A process listens at a Unix socket (and at a TCP port if there are other nodes). A process that has
//! requests for it connects; requests go one way on such a connection, responses the other. So two
//! processes that send to each other have two connections, and never agree on who opens one.

pub(crate) mod connection;
mod control;
pub(crate) mod descriptor;
pub(crate) mod engine;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod input;
mod output;
