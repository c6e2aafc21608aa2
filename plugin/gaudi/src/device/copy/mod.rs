//! Copies between host and device memory by the device's DMA engines.
//!
//! The stages of a copy:
//!
//! 1. [`located`] looks up each end once: is it host or device memory? Later stages use the result; only steps
//!    that had to wait look up their device memory again.
//! 2. [`route`] decides how the bytes travel: short, direct, bounced or staged. Its first lines have the
//!    table.
//! 3. [`blocking`] runs copies that the caller waits for, and submits small ones itself; [`transfer`] submits all
//!    others step by step, and blocks only when the caller calls [`Transfer::wait`].
//! 4. [`submit`](crate::submit) runs the part of each card.
//!
//! [`unaligned`] makes the copies whose lengths or addresses the DMA engines do not accept.

mod blocking;
#[cfg(test)]
mod blocking_tests;
#[cfg(test)]
mod effort_tests;
pub(crate) mod located;
#[cfg(test)]
mod reaping_tests;
mod route;
#[cfg(test)]
mod schedule_tests;
#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod tests;
mod transfer;
pub(crate) mod unaligned;
#[cfg(test)]
mod waiter_tests;

use std::sync::Arc;

pub use located::{Place, USER_SPACE_END};
pub use transfer::Transfer;

pub(crate) use crate::backend::BOUNCE_LEN;
use crate::{DeviceAddr, Error, HostRegion};

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Host memory.
    Host(*mut u8),
    /// Device memory: of the device that copies, or of another open device of this process.
    Device(DeviceAddr),
    /// Memory that was looked up already.
    Found(Place),
}

/// One contiguous piece of a copy. The two sides must not overlap.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Destination.
    pub dst: Side,
    /// Source.
    pub src: Side,
    /// Length in bytes; zero is allowed and does nothing.
    pub len: usize,
    /// The registration of the host side, if it has one.
    pub host_region: Option<Arc<HostRegion>>,
}

/// Why a copy was not started.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The device has as many copies in flight as it can take. Make progress (poll a transfer, or call
    /// [`Device::progress`](crate::Device::progress)) and try again.
    #[error("the device has as many copies in flight as it can take")]
    Busy,
    /// The copy failed; trying again does not help.
    #[error(transparent)]
    Failed(#[from] Error),
}
