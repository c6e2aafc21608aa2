//! Copies between host and device memory by the device's DMA engines.
//!
//! The life of a copy:
//!
//! 1. [`located`]: each end is found to be host or device memory; the device memory that was found is
//!    passed on, and looked up again only by steps that had to wait.
//! 2. [`route`]: decides how the bytes travel: short, direct, bounced or staged. One table, in its first
//!    lines.
//! 3. [`blocking`] does what its caller waits for, and submits a small copy itself; [`transfer`] submits all
//!    others step by step, and blocks only where its caller asks it to wait.
//! 4. [`engine`] gives out [`permits`] to submit, records what the hardware is doing ([`submission`]),
//!    and has sleepers woken when it is done ([`waiter`]).
//!
//! [`peer_writes`] has the driver flush what other devices wrote before a copy uses exported memory.
//!
//! What the DMA engines do not take as it is goes through [`unaligned`].
//!
//! [`slab`] is the pinned memory that small or unpinnable host buffers go through, [`host_copy`] the CPU's
//! part of that.

mod blocking;
#[cfg(test)]
mod blocking_tests;
pub(crate) mod engine;
mod free_slots;
mod host_copy;
pub(crate) mod located;
mod peer_writes;
mod permits;
#[cfg(test)]
mod reaping_tests;
mod route;
#[cfg(test)]
mod schedule_tests;
pub(crate) mod slab;
#[cfg(test)]
mod split_tests;
pub(crate) mod submission;
#[cfg(test)]
mod tests;
mod transfer;
pub(crate) mod unaligned;
mod waiter;
#[cfg(test)]
mod waiter_tests;

use std::sync::Arc;

pub(crate) use blocking::copy_and_wait;
pub use located::USER_SPACE_END;
pub use transfer::Transfer;

pub(crate) use crate::backend::{BOUNCE_LEN, SLOTS};
use crate::{DeviceAddr, Error, HostRegion};

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Host memory.
    Host(*mut u8),
    /// Device memory: of the device that copies, or of another open device of this process.
    Device(DeviceAddr),
}

/// One contiguous piece of a copy. The two sides must not overlap.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Where to.
    pub dst: Side,
    /// Where from.
    pub src: Side,
    /// Bytes; zero is allowed and does nothing.
    pub len: usize,
    /// The registration of the host side, if it has one.
    pub host_region: Option<Arc<HostRegion>>,
}

/// Why a copy was not started.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The device has as much work as it can take. Progress (poll a transfer, or
    /// [`Device::progress`](crate::Device::progress)) and try again.
    #[error("the device has as many copies in flight as it can take")]
    Busy,
    /// It will not work.
    #[error(transparent)]
    Failed(#[from] Error),
}
