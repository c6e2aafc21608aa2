//! Host memory that was registered: recorded here, pinned for a device only when a DMA needs it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::backend::HostPin;
use crate::{Device, DeviceAddr, DeviceId, Error, rcache};

/// A range of host memory that will be used for copies, perhaps often.
///
/// Recording costs nothing: no device is opened, no page is pinned. The first large copy that uses
/// the region on a device pins all of it for that device; if that cannot be, or is more than the
/// registration cache may keep, copies pin what they need of it. Where registrations are cached, the pin
/// stays in the cache, for this region or the next one over the same memory; where they are not,
/// dropping the last handle unpins it, once the copies that use it are done.
#[derive(Debug)]
pub struct HostRegion {
    id: u64,
    start: usize,
    len: usize,
    pins: Mutex<Vec<Pinned>>,
    /// Bytes of medium-sized copies that went through bounce slots, see [`HostRegion::earns_pin`].
    bounced: AtomicUsize,
    /// All of it at once could not be pinned, see [`HostRegion::pin_in_parts`].
    in_parts: AtomicBool,
}

/// A region is worth pinning when this part of its length was copied without.
const EARNING_SHARE: usize = 16;

#[derive(Debug)]
struct Pinned {
    device_id: DeviceId,
    /// The device holds the pin; a registration must not hold the card.
    device: Weak<Device>,
    /// `None`: this memory cannot be pinned; copies go through bounce buffers.
    pin: Option<Weak<HostPin>>,
}

impl HostRegion {
    /// Records `len` bytes from `ptr`. Drop the region before the memory goes away.
    pub fn record(ptr: *mut u8, len: usize) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self {
            id,
            start: ptr as usize,
            len,
            pins: Mutex::default(),
            bounced: AtomicUsize::new(0),
            in_parts: AtomicBool::new(false),
        })
    }

    /// Whether the region is worth pinning for one more copy that a bounce slot would do as well.
    /// Pinning costs by the length of the region, which may be a program's whole memory: it pays
    /// when a fair share of it was copied.
    pub(crate) fn earns_pin(&self, len: usize) -> bool {
        let before = self.bounced.fetch_add(len, Ordering::Relaxed);
        before.saturating_add(len) >= self.len / EARNING_SHARE
    }

    /// Takes note that all of it at once cannot be pinned, or is more than may be kept: from now on
    /// copies pin what they need.
    pub(crate) fn pin_in_parts(&self) {
        self.in_parts.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_pinned_in_parts(&self) -> bool {
        self.in_parts.load(Ordering::Relaxed)
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

    /// All addresses of it.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start.saturating_add(self.len)
    }

    /// Whether a device has it pinned for this registration at the moment.
    pub fn is_pinned_for(&self, device: &Device) -> bool {
        let pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        let here = pins.iter().find(|pinned| pinned.device_id == device.id());
        here.is_some_and(|pinned| pinned.pin.as_ref().is_some_and(|pin| pin.strong_count() > 0))
    }

    /// Has the device pin the region now and not at the first copy; whether it can be pinned.
    ///
    /// # Safety
    /// The region's memory must be there, and stay as long as the region or copies from it do.
    pub unsafe fn prepare(&self, device: &Arc<Device>) -> Result<bool, Error> {
        let cache = device.registrations();
        if cache.find(self.start, self.len).is_some() {
            return Ok(true);
        }
        if cache.keeps(self.len) {
            // SAFETY: the caller's promise.
            let pinned = unsafe { cache.pin(device, (self.start, self.len), self.range())? };
            return Ok(pinned.is_some());
        }
        // SAFETY: as above.
        Ok(unsafe { self.pin(device, self.start)? }.is_some())
    }

    /// Where the device sees `addr`, pinning the region if it was not yet. `None`: it cannot be
    /// pinned.
    ///
    /// # Safety
    /// The region's memory must stay allocated as long as copies use the pin.
    pub(crate) unsafe fn pin(
        &self,
        device: &Arc<Device>,
        addr: usize,
    ) -> Result<Option<(DeviceAddr, Arc<HostPin>)>, Error> {
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        let known = pins.iter().position(|pinned| pinned.device_id == device.id());
        let pin = match known.map(|at| &pins[at].pin) {
            Some(None) => return Ok(None),
            Some(Some(pin)) => pin.upgrade(),
            None => None,
        };
        let pin = match pin {
            Some(pin) => pin,
            None => {
                pins.retain(|pinned| pinned.device.strong_count() > 0);
                // SAFETY: the caller keeps the memory.
                let made = unsafe { device.pin(self.start as *mut u8, self.len) };
                let pin = match made {
                    Ok(pin) => Some(Arc::new(pin)),
                    Err(error) if cannot_be_pinned(&error) => None,
                    Err(error) => return Err(error),
                };
                pins.push(Pinned {
                    device_id: device.id(),
                    device: Arc::downgrade(device),
                    pin: pin.as_ref().map(Arc::downgrade),
                });
                let Some(pin) = pin else { return Ok(None) };
                device.keep_pin(self.id, Arc::clone(&pin));
                pin
            }
        };
        Ok(Some((DeviceAddr(pin.addr.0 + (addr - self.start) as u64), pin)))
    }
}

impl Drop for HostRegion {
    fn drop(&mut self) {
        let pins = self.pins.get_mut().unwrap_or_else(PoisonError::into_inner);
        for pinned in pins.drain(..) {
            if let Some(device) = pinned.device.upgrade() {
                device.forget_pin(self.id);
            }
        }
        // Who is done with memory often frees it next, or has freed other memory just before.
        rcache::tidy();
    }
}

/// Whether pinning failed for a reason that lies in the memory (read-only, a file on disk, locked
/// memory used up) and not in the device: then a copy through a bounce buffer still works.
pub(crate) fn cannot_be_pinned(error: &Error) -> bool {
    matches!(error.errno(), Some(libc::EFAULT | libc::EINVAL | libc::ENOMEM | libc::EOPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_pinned_for_medium_copies_when_they_have_earned_it() {
        let small = HostRegion::record(0x1000 as *mut u8, 256 << 10);
        assert!(small.earns_pin(16 << 10), "a sixteenth at once");
        let large = HostRegion::record(0x1000 as *mut u8, 1 << 30);
        let copies = (0..).take_while(|_| !large.earns_pin(64 << 10)).count();
        assert_eq!(copies, 1023);
        assert!(large.earns_pin(64 << 10), "for good");
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
