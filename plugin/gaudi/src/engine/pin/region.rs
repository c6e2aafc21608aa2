//! Registered host memory: recorded here, pinned only when a copy needs it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::{PinError, PinOwner, PinRef, Pinned, ask_driver, pin_region, rcache};
use crate::backend::HostPin;
use crate::{DeviceAddr, DeviceId, Error, Pinning};

/// A range of host memory that will be used for copies, perhaps often.
///
/// Recording opens no device and pins no page. The module `pin` decides which part copies pin, and for
/// how long: pins stay in the registration cache if it is on, otherwise until the region is dropped
/// and the copies that use them have ended.
#[derive(Debug)]
pub struct HostRegion {
    id: u64,
    start: usize,
    len: usize,
    /// The pins of the whole region, at most one per device.
    pins: Mutex<Vec<RegionPin>>,
    /// Bytes of the copies that were started, except small ones.
    copied: AtomicUsize,
    /// Whether it is the engine's own memory, allocated to be pinned.
    is_engines: bool,
}

#[derive(Debug)]
struct RegionPin {
    device_id: DeviceId,
    /// The device owns the pin: see [`Pins`](super::Pins).
    device: Weak<dyn PinOwner>,
    pin: Weak<HostPin>,
}

impl HostRegion {
    /// Records `len` bytes from `ptr`. Drop the region before the memory is freed.
    pub fn record(ptr: *mut u8, len: usize) -> Arc<Self> {
        rcache::registered(ptr as usize, len);
        Self::new(ptr, len, false)
    }

    /// Records the engine's own memory. The first copy pins all of it, also on a framework's card.
    pub(crate) fn of_engine(ptr: *mut u8, len: usize) -> Arc<Self> {
        Self::new(ptr, len, true)
    }

    fn new(ptr: *mut u8, len: usize, is_engines: bool) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            start: ptr as usize,
            len,
            pins: Mutex::default(),
            copied: AtomicUsize::new(0),
            is_engines,
        })
    }

    /// Whether the region is worth pinning for a copy of `len` bytes that could also use bounce slots.
    /// The cost of pinning grows with the length of the region, which may be a program's whole memory: it
    /// pays off when a certain share of the region has been copied.
    pub(super) fn earns_pin(&self, len: usize, pinning: &Pinning) -> bool {
        let copied = self.copied.load(Ordering::Relaxed);
        len > pinning.small && pinning.is_earned(copied.saturating_add(len), self.len)
    }

    /// Counts a copy that was started. Not called for attempts while the device is busy: those are repeated.
    pub(crate) fn count_copy(&self, device: &impl PinOwner, len: usize) {
        if len > device.pins().policy.small {
            self.copied.fetch_add(len, Ordering::Relaxed);
        }
    }

    pub(super) fn is_engines(&self) -> bool {
        self.is_engines
    }

    /// Whether all of `[addr, addr + len)` lies inside.
    pub fn contains(&self, addr: usize, len: usize) -> bool {
        addr >= self.start && len <= self.len && addr - self.start <= self.len - len
    }

    /// First byte.
    pub fn start(&self) -> *mut u8 {
        self.start as *mut u8
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "a length, not a collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.start..self.start.saturating_add(self.len)
    }

    /// Whether the region has a pin of its own on this device at the moment.
    pub(crate) fn has_pin(&self, device: &impl PinOwner) -> bool {
        find(&self.pins(), device).is_some()
    }

    /// See [`HostRegion::prepare`](crate::HostRegion::prepare).
    ///
    /// # Safety
    /// The region's memory must stay allocated as long as the region lives and as long as copies use it.
    pub(crate) unsafe fn pin_now(&self, device: &Arc<impl PinOwner>) -> Result<bool, Error> {
        if device.pins().cache.find(self.start, self.len).is_some() {
            return Ok(true);
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { pin_region(device, &self.range(), self)? }.is_some())
    }

    fn pins(&self) -> MutexGuard<'_, Vec<RegionPin>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device address of `addr`, which lies in this region, if the region has a pin of its own on this device.
    pub(super) fn pinned_at(&self, device: &impl PinOwner, addr: usize) -> Option<Pinned> {
        let pin = find(&self.pins(), device)?;
        Some(self.at(pin, addr))
    }

    /// The device address of `addr`, which lies in this region, by this pin.
    pub(super) fn at(&self, pin: Arc<HostPin>, addr: usize) -> Pinned {
        let seen = DeviceAddr(pin.addr.0 + (addr - self.start) as u64);
        Pinned { addr: seen, guard: PinRef::Owned(pin) }
    }

    /// The region's own pin on this device. Pins the region if there is none.
    ///
    /// # Safety
    /// The region's memory must stay allocated as long as the region lives and as long as copies use the pin.
    pub(super) unsafe fn pin_whole(
        &self,
        device: &Arc<impl PinOwner>,
    ) -> Result<Arc<HostPin>, PinError> {
        let mut pins = self.pins();
        if let Some(pin) = find(&pins, &**device) {
            return Ok(pin);
        }
        pins.retain(|pinned| pinned.device.strong_count() > 0);
        // SAFETY: the caller's promise.
        let pin = Arc::new(unsafe { ask_driver(&**device, self.start as u64, self.len as u64)? });
        pins.push(RegionPin {
            device_id: device.id(),
            device: Arc::downgrade(device) as Weak<_>,
            pin: Arc::downgrade(&pin),
        });
        device.pins().regions().insert(self.id, Arc::clone(&pin));
        Ok(pin)
    }
}

fn find(pins: &[RegionPin], device: &impl PinOwner) -> Option<Arc<HostPin>> {
    pins.iter().find(|pinned| pinned.device_id == device.id())?.pin.upgrade()
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        let pins = self.pins.get_mut().unwrap_or_else(PoisonError::into_inner);
        for pinned in pins.drain(..) {
            // In a forked child the pins belong to the parent: leave them alone.
            if let Some(device) = pinned.device.upgrade().filter(|device| device.is_ours()) {
                let pin = device.pins().regions().remove(&self.id);
                // Unpinning is a driver call: drop the pin while the lock is not held.
                drop(pin);
            }
        }
        // Deregistering often goes with freeing memory: a good moment to unpin what was freed.
        rcache::reclaim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::fake::Fake;

    #[test]
    fn a_region_is_pinned_for_medium_copies_after_a_share_of_it_was_copied() {
        let sixteenth = Pinning { small: 8 << 10, bounce: 64 << 10, earned: 0, share: 16 };
        let small = HostRegion::record(0x1000 as *mut u8, 256 << 10);
        assert!(small.earns_pin(16 << 10, &sixteenth), "a sixteenth at once");
        let large = HostRegion::record(0x1000 as *mut u8, 1 << 30);
        let (_, device) = Fake::device();
        let mut copies = 0;
        while !large.earns_pin(64 << 10, &sixteenth) {
            large.count_copy(&*device, 64 << 10);
            large.count_copy(&*device, 8 << 10);
            copies += 1;
        }
        assert_eq!(copies, 1023);
        assert!(large.earns_pin(64 << 10, &sixteenth), "for good");
        assert!(!large.earns_pin(8 << 10, &sixteenth), "the CPU's part is small");
    }

    #[test]
    fn a_region_contains_its_parts_and_nothing_that_sticks_out() {
        let region = HostRegion::record(0x1000 as *mut u8, 0x100);
        assert!(region.contains(0x1000, 0x100));
        assert!(region.contains(0x10ff, 1));
        assert!(region.contains(0x1100, 0));
        assert!(!region.contains(0x10ff, 2));
        assert!(!region.contains(0xfff, 1));
        assert!(!region.contains(0x1001, usize::MAX));
    }
}
