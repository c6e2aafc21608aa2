//! Copies between host and device memory by the device's DMA engines.

use std::sync::Arc;

use crate::{DeviceAddr, Error, HostRegion};

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Host memory.
    Host(*mut u8),
    /// Device memory: of the device that copies, or of another open device of this process.
    Device(DeviceAddr),
}

/// One contiguous piece of a copy.
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

/// A copy under way.
///
/// Dropping it before it has finished lets go of the host side's bytes: nothing is written to host
/// memory by the CPU any more, what the hardware was already told to do runs to its end, and
/// everything it needs is kept until then.
#[derive(Debug)]
#[must_use = "a copy that nobody polls is never known to be complete"]
pub struct Transfer {
    _private: (),
}

impl Transfer {
    /// Whether the copy has finished, and how. Never blocks. After the first `Some` the answer
    /// stays the same.
    pub fn poll(&mut self) -> Option<Result<(), Error>> {
        Some(Ok(()))
    }

    /// Waits until the copy has finished.
    pub fn wait(&mut self) -> Result<(), Error> {
        Ok(())
    }
}
