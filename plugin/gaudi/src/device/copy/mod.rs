//! Copies between host and device memory by the device's DMA engines.
//!
//! The life of a copy:
//!
//! 1. [`located`]: each end is found to be host or device memory, once; what was found is passed on, and device
//!    memory is looked up again only by steps that had to wait.
//! 2. [`route`]: decides how the bytes travel: short, direct, bounced or staged. One table, in its first
//!    lines.
//! 3. [`blocking`] does what its caller waits for, and submits a small copy itself; [`transfer`] submits all
//!    others step by step, and blocks only where its caller asks it to wait.
//! 4. [`submit`](crate::submit) has what each card does of it.
//!
//! What the DMA engines do not take as it is goes through [`unaligned`].

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
