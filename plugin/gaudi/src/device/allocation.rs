//! Allocated device memory.

use std::sync::Arc;

use crate::{Device, DeviceAddr};

/// Device memory. Dropping it frees it.
///
/// It keeps its device open. Dropping waits for copies of this process that still use the memory.
#[derive(Debug)]
pub struct Allocation {
    device: Arc<Device>,
    addr: DeviceAddr,
    len: u64,
}

impl Allocation {
    pub(crate) fn new(device: Arc<Device>, addr: DeviceAddr, len: u64) -> Self {
        Self { device, addr, len }
    }

    /// First address.
    pub fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// Length in bytes, as requested.
    #[allow(clippy::len_without_is_empty, reason = "there are no empty allocations")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The device it lies on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.free(self.addr, self.len);
    }
}
