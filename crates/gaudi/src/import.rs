//! Memory of another device, or of another process's device, made visible to this one.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::backend::HostPin;
use crate::{Device, DeviceAddr, Error};

/// A dma-buf mapped for a device. Its addresses can be either side of that device's copies, and
/// mean nothing to any other device.
///
/// It keeps the device open. Dropping waits for copies of this process that still use it.
#[derive(Debug)]
pub struct Import {
    device: Arc<Device>,
    pin: HostPin,
    len: u64,
}

impl Import {
    /// Maps the first `len` bytes of `dmabuf`.
    pub(crate) fn new(
        device: &Arc<Device>,
        dmabuf: BorrowedFd<'_>,
        len: u64,
    ) -> Result<Self, Error> {
        let pin = device.map_dmabuf(dmabuf, len)?;
        Ok(Self { device: Arc::clone(device), pin, len })
    }

    /// Where the device sees its first byte.
    pub fn addr(&self) -> DeviceAddr {
        self.pin.addr
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The device it was mapped for.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // Unmapped right after this, when the pin goes.
        self.device.forget_import(self.pin.addr, self.len);
    }
}
