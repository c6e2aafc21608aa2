//! Pinned memory of the engine, in slots. Host buffers that are too small to be worth pinning, or that
//! cannot be pinned, are copied through it.
//!
//! Two kinds: a [`SlotPool`] hands out free slots to any caller (bounce buffers, staging between devices);
//! [`PermitSlots`] has one slot for each permit to submit, so that a short copy that has a permit need not
//! allocate a slot as well.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hl_thunk::HostPages;

use super::free_slots::FreeSlots;
use crate::backend::{BOUNCE_LEN, HostPin, SLOTS};
use crate::error::Phase;
use crate::pin::{PinOwner, pin_slab};
use crate::{DeviceAddr, Error, HostRegion};

/// Slots of one size in one block of pages. Pinned at first use, for each device that uses it.
#[derive(Debug)]
struct Slab {
    // Declared before `pages`: fields drop in order, and the region must be unpinned before its pages are unmapped.
    region: Arc<HostRegion>,
    pages: HostPages,
    slot_len: usize,
}

impl Slab {
    fn new(slot_len: usize, count: u32) -> Result<Self, Error> {
        let pages = HostPages::new(slot_len * count as usize).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::ENOMEM);
            Error::os(Phase::Use, "making bounce buffers", "mmap", errno)
        })?;
        let region = HostRegion::record(pages.as_ptr(), pages.len());
        Ok(Self { region, pages, slot_len })
    }

    fn offset(&self, index: u32) -> usize {
        let offset = index as usize * self.slot_len;
        assert!(offset < self.pages.len(), "no slot {index}");
        offset
    }

    fn ptr(&self, index: u32) -> *mut u8 {
        // SAFETY: every slot lies inside the pages.
        unsafe { self.pages.as_ptr().add(self.offset(index)) }
    }

    /// The device address of the first slot, and the pin that covers all slots.
    fn pin(&self, device: &Arc<impl PinOwner>) -> Result<(DeviceAddr, Arc<HostPin>), Error> {
        // SAFETY: the region is dropped before the pages. A copy that uses the pin holds a slot, and so keeps
        // the slab alive.
        unsafe { pin_slab(device, &self.region) }
    }
}

/// One slot for each permit, see [`SubmitPermit::slot`](super::engine::SubmitPermit::slot).
#[derive(Debug)]
pub(crate) struct PermitSlots {
    slab: Slab,
    /// Device address of the first slot. The device owns the pin.
    first: DeviceAddr,
}

impl PermitSlots {
    /// Allocates the slots and pins them for this device.
    pub(crate) fn new(device: &Arc<impl PinOwner>) -> Result<Self, Error> {
        let slab = Slab::new(BOUNCE_LEN, SLOTS)?;
        let (first, _kept_by_the_device) = slab.pin(device)?;
        Ok(Self { slab, first })
    }

    /// A slot's host address and device address.
    pub(crate) fn slot(&self, index: u32) -> (*mut u8, DeviceAddr) {
        (self.slab.ptr(index), DeviceAddr(self.first.0 + self.slab.offset(index) as u64))
    }
}

/// Slots that any caller may take.
#[derive(Debug)]
pub(crate) struct SlotPool {
    slab: Slab,
    free: FreeSlots,
    /// Slots that the hardware is using.
    in_flight: AtomicU32,
}

impl SlotPool {
    /// `count` slots (at most 64) of `slot_len` bytes.
    pub(crate) fn new(slot_len: usize, count: u32) -> Result<Arc<Self>, Error> {
        let slab = Slab::new(slot_len, count)?;
        Ok(Arc::new(Self { slab, free: FreeSlots::new(count), in_flight: AtomicU32::new(0) }))
    }

    /// A free slot, if there is one.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Arc<Slot>> {
        let index = self.free.take()?;
        Some(Arc::new(Slot { pool: Arc::clone(self), index }))
    }

    /// Whether the hardware is using no slot. If no slot is free either, all of them belong to transfers
    /// whose owners have yet to poll.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) == 0
    }

    pub(crate) fn slot_len(&self) -> usize {
        self.slab.slot_len
    }
}

/// A slot of a pool; returned to the pool when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    pool: Arc<SlotPool>,
    index: u32,
}

impl Slot {
    /// First byte. Valid for the pool's slot length.
    pub(crate) fn ptr(&self) -> *mut u8 {
        self.pool.slab.ptr(self.index)
    }

    /// The device address of the first byte, and the pin.
    pub(crate) fn pin(
        &self,
        device: &Arc<impl PinOwner>,
    ) -> Result<(DeviceAddr, Arc<HostPin>), Error> {
        let (first, pin) = self.pool.slab.pin(device)?;
        Ok((DeviceAddr(first.0 + self.pool.slab.offset(self.index) as u64), pin))
    }

    /// A reference to keep while the hardware uses the slot.
    pub(crate) fn in_flight(self: &Arc<Self>) -> SlotInFlight {
        self.pool.in_flight.fetch_add(1, Ordering::AcqRel);
        SlotInFlight { slot: Arc::clone(self) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.pool.free.release(self.index);
    }
}

/// A slot that the hardware is using.
#[derive(Debug)]
pub(crate) struct SlotInFlight {
    slot: Arc<Slot>,
}

impl Drop for SlotInFlight {
    fn drop(&mut self) {
        self.slot.pool.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}
