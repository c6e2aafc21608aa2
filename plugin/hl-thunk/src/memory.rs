//! Device memory, and the device's view of host memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::check;
use crate::{Device, DeviceAddr, Error};

/// Device memory from the driver's allocator. It has no address until it is mapped.
#[derive(Debug)]
pub struct DeviceMemory {
    device: Device,
    handle: u64,
    /// Whether it is left to the driver because a dma-buf keeps it: freed with the dma-buf and the device.
    left: AtomicBool,
}

impl DeviceMemory {
    /// Allocates `size` bytes; the driver rounds up to its page ([`HwIpInfo::dram_page_size`],
    /// 768 MiB on a Gaudi2).
    ///
    /// Where the device has no MMU for its memory the driver allocates nothing and the call fails
    /// with `EOPNOTSUPP`: addresses are physical and the owner of the card divides them up.
    ///
    /// [`HwIpInfo::dram_page_size`]: crate::sys::HwIpInfo::dram_page_size
    pub fn alloc(device: &Device, size: u64) -> Result<Arc<Self>, Error> {
        let call = "hlthunk_device_memory_alloc";
        if !device.generation().has_dram_mmu() {
            return Err(Error::new(call, libc::EOPNOTSUPP));
        }
        // SAFETY: plain numbers on an open fd. Default page size, any pages, not shared:
        // a device has one context.
        let handle = check(call, || unsafe {
            device.symbols().hlthunk_device_memory_alloc(device.raw_fd(), size, 0, false, false)
        })?;
        Ok(Arc::new(Self { device: device.clone(), handle, left: AtomicBool::new(false) }))
    }

    /// Maps it. The driver takes `hint` if it is free and aligned as the device needs it, and otherwise
    /// any address: compare the result.
    pub fn map(self: &Arc<Self>, hint: Option<DeviceAddr>) -> Result<DeviceMapping, Error> {
        let hint = hint.map_or(0, |addr| addr.0);
        // SAFETY: plain numbers on an open fd; the handle is live.
        let addr = check("hlthunk_device_memory_map", || unsafe {
            self.device.symbols().hlthunk_device_memory_map(self.device.raw_fd(), self.handle, hint)
        })?;
        let (memory, addr) = (Arc::clone(self), DeviceAddr(addr));
        Ok(DeviceMapping { memory, addr, unmapped: false, exported: AtomicBool::new(false) })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if !self.left.load(Ordering::Relaxed) {
            // SAFETY: the handle is ours; mappings hold this object, so none is left.
            self.device.give_back("hlthunk_device_memory_free", |symbols, fd| unsafe {
                symbols.hlthunk_device_memory_free(fd, self.handle)
            });
        }
    }
}

/// Device memory at a device address.
#[derive(Debug)]
pub struct DeviceMapping {
    memory: Arc<DeviceMemory>,
    addr: DeviceAddr,
    unmapped: bool,
    /// Whether a dma-buf was made of it.
    exported: AtomicBool,
}

impl DeviceMapping {
    /// First address.
    pub fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.memory.device
    }

    /// Whether a dma-buf was ever made of it, which may be open still: then the driver refuses to unmap it,
    /// and writes that into the kernel log.
    pub fn was_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    pub(crate) fn mark_exported(&self) {
        self.exported.store(true, Ordering::Relaxed);
    }

    /// Unmaps it. Fails with `EINVAL`, and gives the mapping back, while a dma-buf exported from it
    /// is open anywhere.
    pub fn unmap(mut self) -> Result<(), (Self, Error)> {
        // SAFETY: plain numbers on an open fd; the mapping is ours.
        let unmapped = check(UNMAP, || unsafe {
            let device = self.device();
            device.symbols().hlthunk_memory_unmap(device.raw_fd(), self.addr.0)
        });
        self.unmapped = unmapped.is_ok();
        unmapped.map(drop).map_err(|error| (self, error))
    }

    /// Releases it because the device is about to be closed. If it was ever exported, it is left to the driver,
    /// which unmaps it when the dma-bufs and the device are closed. On a card that was opened elsewhere it
    /// would stay mapped, so there it is unmapped anyway, and a failure is recorded like all others.
    pub fn leave(mut self) {
        if self.was_exported() && self.device().is_own_opening() {
            self.unmapped = true;
            self.memory.left.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        if !self.unmapped {
            unmap(self.device(), self.addr);
        }
    }
}

const UNMAP: &str = "hlthunk_memory_unmap";

/// Unmaps in a `drop`.
fn unmap(device: &Device, addr: DeviceAddr) {
    // SAFETY: plain numbers on an open fd; the caller owns the mapping at this address.
    device.give_back(UNMAP, |symbols, fd| unsafe { symbols.hlthunk_memory_unmap(fd, addr.0) });
}

/// Memory that is not the device's, mapped for it.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) device: Device,
    pub(crate) addr: DeviceAddr,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmap(&self.device, self.addr);
    }
}

/// Host memory pinned and mapped for a device.
#[derive(Debug)]
pub struct HostMapping(Mapped);

impl HostMapping {
    /// Pins `len` bytes from `ptr` and maps them. Neither needs to be aligned; the address keeps
    /// the pointer's place in its page.
    ///
    /// `EFAULT`: not (all) mapped, or not writable: pages are always pinned for writing.
    ///
    /// # Safety
    /// The memory must stay allocated as long as the mapping lives and the device may use it:
    /// copies read and write it behind the compiler's back.
    pub unsafe fn new(device: &Device, ptr: *mut u8, len: u64) -> Result<Self, Error> {
        // SAFETY: the driver checks the range before it pins it.
        let addr = check("hlthunk_host_memory_map", || unsafe {
            device.symbols().hlthunk_host_memory_map(device.raw_fd(), ptr.cast(), 0, len)
        })?;
        Ok(Self(Mapped { device: device.clone(), addr: DeviceAddr(addr) }))
    }

    /// Where the device sees the first byte.
    pub fn addr(&self) -> DeviceAddr {
        self.0.addr
    }
}
