//! UCT's API, bound at run time, as far as memory needs it: components, memory domains, allocated and
//! registered memory, remote keys, and a copier that moves bytes through a copy transport.
//!
//! [`Uct`] (the libuct under one loaded libucp) → [`Domain`] → [`Memory`], [`Registration`], [`Key`];
//! a [`Copier`] belongs to one thread, everything else may be used by several at once, as UCX allows.

mod copier;
mod domain;
pub mod estimate;
mod library;
mod memory;
mod sys;

pub use copier::{Copier, Piece, Ticket, Way};
pub use domain::{Attributes, Domain, MemoryTypes};
pub use library::Uct;
pub use memory::{Answer, Key, Memory, Registration};
pub(crate) use sys::Raw;

use std::fmt;

/// A failed call of UCT: which one, and what UCX says about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The C function.
    pub call: &'static str,
    /// The status it ended with.
    pub status: Status,
    text: String,
}

/// A status other than success.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status(pub i8);

impl Status {
    /// Out of memory.
    pub const NO_MEMORY: Status = Status(-4);
    /// The arguments make no sense.
    pub const INVALID_PARAM: Status = Status(-5);
    /// The range is not memory of the kind it was said to be.
    pub const INVALID_ADDR: Status = Status(-7);
    /// `UCS_ERR_UNREACHABLE`
    pub const UNREACHABLE: Status = Status(-6);
    /// There is no such thing.
    pub const NO_ELEM: Status = Status(-12);
    /// The device is taken.
    pub const BUSY: Status = Status(-15);
    /// Not memory of this domain.
    pub const OUT_OF_RANGE: Status = Status(-19);
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.status.0)
    }
}

impl std::error::Error for Error {}

/// What the binding returns.
pub type Result<T> = std::result::Result<T, Error>;
