//! Device memory that someone holds, and how it is found again by address.

use std::sync::Arc;

use crate::{Device, DeviceAddr, DeviceId};

/// Device memory owned by the holder; dropping it frees it.
///
/// It keeps its device open. Dropping waits for copies of this process that still use the memory.
#[derive(Debug)]
pub struct Allocation {
    device: Arc<Device>,
    addr: DeviceAddr,
    len: u64,
}

impl Allocation {
    /// First address.
    pub fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// Length in bytes, as asked for.
    #[allow(clippy::len_without_is_empty, reason = "there are no empty allocations")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The device it lies on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

/// What an address turned out to be: part of a live allocation.
#[derive(Clone, Debug)]
pub struct Location {
    /// The open device.
    pub device: DeviceId,
    /// First address of the allocation.
    pub base: DeviceAddr,
    /// Length of the allocation.
    pub length: u64,
    /// Where in the allocation the address lies.
    pub offset: u64,
}

impl Location {
    /// The device, unless it is being closed right now.
    pub fn device(&self) -> Option<Arc<Device>> {
        crate::runtime().device(self.device)
    }
}
