//! Pinned memory of our own, in slots: what host buffers travel through that are too small to be
//! worth pinning, or cannot be pinned.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use hl_thunk::HostPages;

use crate::backend::HostPin;
use crate::error::Phase;
use crate::pin::pin_slab;
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
    /// Slots that the hardware is using.
    flying: AtomicU32,
    /// Where the device whose ring this is sees the first slot, once it was asked for.
    home: OnceLock<DeviceAddr>,
}

impl Ring {
    /// `count` slots (at most 64) of `slot_len` bytes. Pinned at first use.
    pub(crate) fn new(slot_len: usize, count: u32) -> Result<Arc<Self>, Error> {
        let pages = HostPages::new(slot_len * count as usize).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::ENOMEM);
            Error::os(Phase::Use, "making bounce buffers", "mmap", errno)
        })?;
        let region = HostRegion::record(pages.as_ptr(), pages.len());
        Ok(Arc::new(Self {
            region,
            pages,
            slot_len,
            slots: Slots::new(count),
            flying: AtomicU32::new(0),
            home: OnceLock::new(),
        }))
    }

    /// A free slot, if there is one.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Arc<Slot>> {
        let index = self.slots.take()?;
        Some(Arc::new(Slot { ring: Arc::clone(self), index }))
    }

    /// Whether the hardware uses none of the slots. If none is free either, they are all with
    /// transfers that have something to do, and only those who poll them can free them.
    pub(crate) fn is_parked(&self) -> bool {
        self.flying.load(Ordering::Acquire) == 0
    }

    /// A slot of a ring whose slots are told apart by others: where it is, and where the device whose
    /// ring this is sees it. The pin stays with the device.
    pub(crate) fn own_slot(
        &self,
        device: &Arc<Device>,
        index: u32,
    ) -> Result<(*mut u8, DeviceAddr), Error> {
        let offset = u64::from(index) * self.slot_len as u64;
        let first = match self.home.get() {
            Some(first) => first.0,
            None => {
                let (addr, _kept_by_the_device) = self.pin(device, index)?;
                self.home.get_or_init(|| DeviceAddr(addr.0 - offset)).0
            }
        };
        Ok((self.slot_ptr(index), DeviceAddr(first + offset)))
    }

    fn pin(&self, device: &Arc<Device>, index: u32) -> Result<(DeviceAddr, Arc<HostPin>), Error> {
        // SAFETY: whoever uses the pin holds the slot, and so the pages.
        let (first, pin) = unsafe { pin_slab(device, &self.region)? };
        Ok((DeviceAddr(first.0 + u64::from(index) * self.slot_len as u64), pin))
    }

    fn slot_ptr(&self, index: u32) -> *mut u8 {
        debug_assert!((index as usize) < self.pages.len() / self.slot_len);
        // SAFETY: every slot lies inside the pages.
        unsafe { self.pages.as_ptr().add(index as usize * self.slot_len) }
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
    /// First byte. Valid for the ring's slot length, by whoever the slot's holders agree on.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ring.slot_ptr(self.index)
    }

    /// The slot as the hardware uses it: kept, and counted as such.
    pub(crate) fn fly(self: &Arc<Self>) -> Arc<FlyingSlot> {
        self.ring.flying.fetch_add(1, Ordering::AcqRel);
        Arc::new(FlyingSlot { slot: Arc::clone(self) })
    }

    /// Where `device` sees the first byte.
    pub(crate) fn pin(&self, device: &Arc<Device>) -> Result<(DeviceAddr, Arc<HostPin>), Error> {
        self.ring.pin(device, self.index)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.ring.slots.give(self.index);
    }
}

/// A slot that the hardware is using.
#[derive(Debug)]
pub(crate) struct FlyingSlot {
    slot: Arc<Slot>,
}

impl Drop for FlyingSlot {
    fn drop(&mut self) {
        self.slot.ring.flying.fetch_sub(1, Ordering::AcqRel);
    }
}
