//! Pinned memory of our own, in slots: what host buffers travel through that are too small to be
//! worth pinning, or cannot be pinned.

use std::sync::Arc;

use hl_thunk::HostPages;

use crate::backend::HostPin;
use crate::error::Phase;
use crate::slots::Slots;
use crate::{Device, DeviceAddr, Error, HostRegion};

/// Slots of one size in one block of pinned memory.
#[derive(Debug)]
pub(crate) struct Ring {
    // Unpinned before the pages go: fields drop in order.
    region: Arc<HostRegion>,
    pages: HostPages,
    slot_len: usize,
    slots: Slots,
}

impl Ring {
    /// `count` slots (at most 64) of `slot_len` bytes. Pinned at first use.
    pub(crate) fn new(slot_len: usize, count: u32) -> Result<Arc<Self>, Error> {
        let pages = HostPages::new(slot_len * count as usize).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::ENOMEM);
            Error::os(Phase::Use, "making bounce buffers", "mmap", errno)
        })?;
        let region = HostRegion::record(pages.as_ptr(), pages.len());
        Ok(Arc::new(Self { region, pages, slot_len, slots: Slots::new(count) }))
    }

    /// A free slot, if there is one.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Arc<Slot>> {
        let index = self.slots.take()?;
        Some(Arc::new(Slot { ring: Arc::clone(self), index }))
    }

    pub(crate) fn slot_len(&self) -> usize {
        self.slot_len
    }
}

/// A slot; free again when the last holder lets go.
#[derive(Debug)]
pub(crate) struct Slot {
    ring: Arc<Ring>,
    index: u32,
}

impl Slot {
    fn offset(&self) -> usize {
        self.index as usize * self.ring.slot_len
    }

    /// First byte. Valid for the ring's slot length, by whoever the slot's holders agree on.
    pub(crate) fn ptr(&self) -> *mut u8 {
        // SAFETY: every slot lies inside the pages.
        unsafe { self.ring.pages.as_ptr().add(self.offset()) }
    }

    /// Where `device` sees the first byte.
    pub(crate) fn pin(&self, device: &Arc<Device>) -> Result<(DeviceAddr, Arc<HostPin>), Error> {
        // SAFETY: whoever uses the pin holds the slot, and so the pages.
        let pinned = unsafe { self.ring.region.pin(device, self.ptr() as usize)? };
        pinned.ok_or_else(|| {
            Error::os(
                Phase::Use,
                "pinning a bounce buffer",
                "hlthunk_host_memory_map",
                libc::ENOMEM,
            )
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.ring.slots.give(self.index);
    }
}
