//! UCP's public API, bound at run time, as owning types.
//!
//! `Ucx` (one loaded libucp) → [`Context`] → [`Worker`] → [`Endpoint`]; [`Region`] is memory mapped
//! in a context, a [`Span`] a part of it. An operation takes spans and returns a [`Request`] that
//! keeps them alive, so memory cannot vanish under UCX even when a request is forgotten.
//! Handles know their thread: a worker that is not in multi-thread mode panics when it is used from
//! another thread than the one that made it.

mod context;
mod endpoint;
mod library;
mod memory;
mod request;
mod sys;
mod worker;

pub use context::{Context, Features};
pub use endpoint::{AmMode, Atomic, Endpoint, EndpointOptions, RemoteKey};
pub use library::Ucx;
pub use memory::{Memory, PackedRegion, Region, Span};
pub use request::{Completion, Request};
pub use worker::{AmMessage, Idle, Waiting, Worker, WorkerOptions};

use std::fmt;

/// The outcome of a UCP call that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status(sys::RawStatus);

impl Status {
    /// A receive buffer was smaller than the message.
    pub const TRUNCATED: Status = Status(sys::ERR_MESSAGE_TRUNCATED);
    /// The request was cancelled by us.
    pub const CANCELED: Status = Status(sys::ERR_CANCELED);
}

/// A failed UCP call: which one, and what UCX says about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The C function, or what was being waited for.
    pub call: &'static str,
    /// The status it ended with.
    pub status: Status,
    text: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.status.0)
    }
}

impl std::error::Error for Error {}

/// What the binding returns.
pub type Result<T> = std::result::Result<T, Error>;
