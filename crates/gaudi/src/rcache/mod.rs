//! The registration cache: host memory that was pinned for a card stays pinned, for the next copy.
//!
//! Pinning takes a driver call and work for every page, and programs use the same buffers again and
//! again. So the pins that copies make are kept, in one cache for each open card, and found by
//! address. What makes that hard is memory that goes away: the program may free a buffer, and get
//! other memory at the same address, without telling anyone here.
//!
//! * `table` (threads meet here): lookups that never wait, invalidation that may run inside `free`.
//! * `held`: what a copy has of a pin.
//! * `roster`: which caches there are, for whoever has no right to wait.
//! * `switch`: whether pins are kept at all.
//! * this file: what pins are, what they cost, what happens in `fork`.
//!
//! A copy holds the pins it uses: a pin that leaves the cache meanwhile is given back when the last
//! copy that uses it has ended.
//!
//! Memory that cannot be pinned is not remembered: pinning is tried again each time. A refusal costs
//! far less than the copy through bounce buffers that follows, and what was read-only or too much
//! a moment ago may be pinnable now; no event would tell.

mod held;
mod roster;
mod switch;
mod sync;
mod table;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::backend::HostPin;
use crate::host::cannot_be_pinned;
use crate::process::{Instance, watch_forks};
use crate::stats::{Counter, Counts};
use crate::{Device, DeviceAddr, Error, runtime};
pub(crate) use held::{Held, Pin};
use roster::Roster;
pub(crate) use switch::Switch;
pub use switch::{CacheLimits, Watch};
use table::{Found, Inserted, PAGE, Swept, Table, Writing};

/// More cards than a process has open at a time; further ones keep nothing.
const CARDS: usize = 64;

/// The caches of this process. Made before the first one, so that [`invalidate`] never makes it.
static CACHES: OnceLock<Roster<Shared, CARDS>> = OnceLock::new();

/// Whether pins of memory that went away may wait to be given back: a hint for [`tidy`].
static LOST: AtomicBool = AtomicBool::new(false);

/// Tells all caches that memory of `[start, start + len)` is about to go away: no copy that starts
/// after this returns uses a pin of it that was made before.
///
/// May be called anywhere, also inside `munmap` or `free`, by any thread: it takes no lock, waits
/// for nobody, allocates and frees nothing, and calls no driver. The pins are given back later, by a
/// thread that copies, or in [`tidy`].
pub fn invalidate(start: usize, len: usize) {
    let Some(caches) = CACHES.get() else { return };
    let end = (start as u64).saturating_add(len as u64);
    caches.each(|cache| {
        let lost = cache.table.invalidate(start as u64, end);
        if lost > 0 {
            cache.counts.add(Counter::RegCacheInvalidations, lost);
            LOST.store(true, Ordering::Relaxed);
        }
    });
}

/// Gives back the pins of memory that went away, of all open cards, where no other thread is at it.
/// Copies do that by themselves; this is for moments when there may be no further copy. One load
/// where there is nothing to do. Not for places where one may not wait: unpinning is a driver call.
pub fn tidy() {
    if LOST.load(Ordering::Relaxed)
        && LOST.swap(false, Ordering::Relaxed)
        && let Some(caches) = CACHES.get()
    {
        caches.each(Shared::tidy);
    }
}

/// Gives all pins back that any card keeps; those that copies are using, when these end.
pub(crate) fn clear() {
    if let Some(caches) = CACHES.get() {
        caches.each(Shared::clear);
    }
}

/// What a card's cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheInfo {
    /// Ranges that are kept, with those that were invalidated and not given back yet: nobody finds
    /// them, but a copy may still use them.
    pub regions: usize,
    /// Their length together.
    pub bytes: u64,
    /// Bytes that the cache itself takes.
    pub overhead: usize,
}

/// What others reach.
struct Shared {
    table: Table<HostPin>,
    counts: Counts,
    /// The process that pinned. A forked child has a copy of all this, but not the pins.
    made_by: Instance,
}

impl Shared {
    /// Gives back what was invalidated, unless another thread is at it.
    #[cold]
    fn tidy(&self) {
        let mut swept = Swept::default();
        let all = match self.table.try_lock() {
            Some(mut writing) => writing.sweep(&mut swept),
            None => false,
        };
        if !all {
            LOST.store(true, Ordering::Relaxed);
        }
        self.release(swept);
    }

    /// The same, at the price of one load where there is nothing to do.
    fn tidy_if_lost(&self) {
        if self.table.has_marked() {
            self.tidy();
        }
    }

    /// Gives everything back; what copies are using, when they end.
    fn clear(&self) {
        let mut swept = Swept::default();
        if !self.table.lock().clear(&mut swept) {
            LOST.store(true, Ordering::Relaxed);
        }
        self.release(swept);
    }

    /// Gives back what came out of the table, with no lock held: unpinning is a driver call.
    fn release(&self, swept: Swept<HostPin>) {
        let counts = self.counts;
        counts.subtract(Counter::RegCacheRegions, swept.regions);
        counts.subtract(Counter::RegCacheBytes, swept.bytes);
        counts.add(Counter::RegCacheEvictions, swept.evicted);
        self.drop_values(swept.values);
    }

    /// Whether there were any.
    fn drop_values(&self, values: Vec<HostPin>) -> bool {
        let any = !values.is_empty();
        if any && self.made_by != Instance::current() {
            // The driver would take these for the parent's, and unpin under its copies.
            std::mem::forget(values);
        }
        any
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nothing, unless a fork took those away who would have left.
        let values = self.table.take_values();
        self.drop_values(values);
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// The kept pins of one card.
pub(crate) struct Cache {
    shared: Arc<Shared>,
    /// On the list of those who hear of memory that goes. Nothing is kept without.
    place: Option<usize>,
    /// In place of the process's, so that tests do not meet.
    #[cfg(test)]
    switch: OnceLock<&'static Switch>,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Cache {
    pub(crate) fn new(counts: Counts) -> Self {
        let caches = CACHES.get_or_init(|| {
            watch_forks();
            Roster::new()
        });
        let shared = Arc::new(Shared { table: Table::new(), counts, made_by: Instance::current() });
        // SAFETY: the cache has a count of it until it has left the list.
        let place = unsafe { caches.enter(Arc::as_ptr(&shared)) };
        Self {
            shared,
            place,
            #[cfg(test)]
            switch: OnceLock::new(),
        }
    }

    fn switch(&self) -> &Switch {
        #[cfg(test)]
        if let Some(switch) = self.switch.get() {
            return switch;
        }
        runtime().rcache()
    }

    /// Where the device sees host memory that is pinned already, and the pin. Wait-free.
    pub(crate) fn find(&self, addr: usize, len: usize) -> Option<(DeviceAddr, Pin)> {
        if !self.switch().is_wanted() {
            return None;
        }
        self.shared.tidy_if_lost();
        let found = self.shared.table.find(addr as u64, len as u64)?;
        self.shared.counts.add(Counter::RegCacheHits, 1);
        Some(self.at(found, addr))
    }

    /// Whether a pin of this length can be kept.
    pub(crate) fn keeps(&self, len: usize) -> bool {
        let bounds = self.place.and_then(|_| self.switch().bounds());
        bounds.is_some_and(|bounds| len as u64 <= bounds.bytes)
    }

    /// The same for memory that was not found: pins all pages of `whole`, which holds the memory,
    /// and keeps the pin. `None`: it cannot be pinned.
    ///
    /// # Safety
    /// The memory must stay allocated as long as the copy that uses the pin lasts.
    pub(crate) unsafe fn pin(
        &self,
        device: &Device,
        (addr, len): (usize, usize),
        whole: Range<usize>,
    ) -> Result<Option<(DeviceAddr, Pin)>, Error> {
        let counts = self.shared.counts;
        // SAFETY: the caller's promise; pages are there as long as a byte of them is.
        let pin = |start: u64, len: u64| unsafe { device.pin(start as *mut u8, len as usize) };
        let (addr64, len64) = (addr as u64, len as u64);
        let mut swept = Swept::default();
        let whole = whole.start as u64..whole.end as u64;
        let made = match self.place.and_then(|_| self.switch().bounds()) {
            None => Ok(Inserted::NoRoom),
            Some(bounds) => {
                let table = &self.shared.table;
                table.insert((addr64, len64), &whole, bounds, &mut swept, |range, others, swept| {
                    let len = range.end - range.start;
                    let pin = || pin(range.start, len);
                    // Nothing but the pages of the copy itself.
                    let needed = addr64 - range.start < PAGE && range.end - (addr64 + len64) < PAGE;
                    let pinned = self.pin_or_evict(pin, (len, needed), others, swept)?;
                    // Under the table's lock: nobody can take it out again before it is counted.
                    counts.add(Counter::RegCacheRegions, 1);
                    counts.add(Counter::RegCacheBytes, len);
                    Ok((pinned.addr.0, pinned))
                })
            }
        };
        self.shared.release(swept);
        if !self.switch().is_wanted() {
            // Turned off meanwhile, and perhaps cleared before this came in.
            self.shared.clear();
        }
        match made {
            Ok(Inserted::Hit(found)) => {
                counts.add(Counter::RegCacheHits, 1);
                Ok(Some(self.at(found, addr)))
            }
            Ok(Inserted::Made(found)) => {
                counts.add(Counter::RegCacheMisses, 1);
                Ok(Some(self.at(found, addr)))
            }
            Ok(Inserted::NoRoom) => {
                counts.add(Counter::RegCacheMisses, 1);
                match pin(addr64, len64) {
                    Ok(pin) => Ok(Some((pin.addr, Pin::Own(Arc::new(pin))))),
                    Err(error) if cannot_be_pinned(&error) => Ok(None),
                    Err(error) => Err(error),
                }
            }
            Err(error) if cannot_be_pinned(&error) => {
                counts.add(Counter::RegCacheMisses, 1);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Gives back what was invalidated, at the price of one load where there is nothing to do.
    pub(crate) fn tidy_if_lost(&self) {
        self.shared.tidy_if_lost();
    }

    /// Pins, and has others leave where pins have run out: perhaps what is kept is what is missing.
    /// As few as will do, about: more at a time each time. For more than a copy needs, only if that
    /// much is kept at all: it could empty the cache in vain.
    fn pin_or_evict(
        &self,
        pin: impl Fn() -> Result<HostPin, Error>,
        (len, needed): (u64, bool),
        others: &mut Writing<'_, HostPin>,
        swept: &mut Swept<HostPin>,
    ) -> Result<HostPin, Error> {
        let mut pinned = pin();
        // At first those that wait to leave, and nobody else.
        let mut batch = 0;
        while pinned.as_ref().is_err_and(|error| error.errno() == Some(libc::ENOMEM)) {
            others.evict_idle(batch, swept);
            let gave_back = self.shared.drop_values(std::mem::take(&mut swept.values));
            // The new range is on the books already.
            let kept = others.size().1.saturating_sub(len);
            if gave_back {
                pinned = pin();
            } else if batch > 0 {
                break;
            }
            if batch == 0 && !needed && kept < len {
                break;
            }
            batch = (2 * batch).max(1);
        }
        pinned
    }

    /// Where the device sees `addr` in what was found.
    fn at(&self, found: Found<'_, HostPin>, addr: usize) -> (DeviceAddr, Pin) {
        let seen = DeviceAddr(found.base + (addr as u64 - found.start));
        (seen, Pin::Cached(Held::new(&self.shared, found.visit)))
    }

    pub(crate) fn info(&self) -> CacheInfo {
        let (regions, bytes) = self.shared.table.lock().size();
        CacheInfo { regions, bytes, overhead: self.shared.table.memory() }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if let (Some(place), Some(caches)) = (self.place, CACHES.get()) {
            caches.leave(place);
        }
        self.shared.clear();
    }
}

/// Before a fork: the child and the parent share all pages until one writes, and it depends on the
/// kernel who then keeps the pinned ones. So nothing that was pinned before is used after; UCX does
/// the same.
pub(crate) fn before_fork() {
    invalidate(0, usize::MAX);
}

/// In a forked child.
pub(crate) fn in_child() {
    if let Some(caches) = CACHES.get() {
        caches.forget_tellers();
    }
}
