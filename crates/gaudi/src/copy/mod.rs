//! Copies between host and device memory by the device's DMA engines.
//!
//! [`plan`] decides how each segment travels, [`transfer`] carries a plan out step by step without
//! ever blocking, [`engine`] keeps count of what the hardware is doing ([`budget`]), of what it needs
//! meanwhile ([`flight`]) and of who sleeps until it is done ([`waiter`]), [`ring`] is the pinned
//! memory that small or unpinnable host buffers go through, with the help of the CPU
//! ([`host_copy`]), and [`short`] is the quick way for small copies that are waited for.

mod budget;
pub(crate) mod engine;
pub(crate) mod flight;
mod host_copy;
mod plan;
#[cfg(test)]
mod reaping_tests;
pub(crate) mod ring;
#[cfg(test)]
mod schedule_tests;
pub(crate) mod short;
#[cfg(test)]
mod short_tests;
#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod tests;
mod transfer;
mod waiter;
#[cfg(test)]
mod waiter_tests;

use std::sync::Arc;

pub(crate) use budget::SLOTS;
pub(crate) use plan::BOUNCE_LEN;
pub use transfer::Transfer;

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
    /// The registration of the host side, if it has one. Without it a large host side is pinned
    /// for this copy alone.
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
