//! The registration cache: pins of host memory, kept for the next copy, and refusals to pin.
//!
//! Pinning takes a driver call and work for every page, and programs use the same buffers again and
//! again. So the pins that copies make are cached, in one cache for each open card, and found by
//! address. The difficulty is memory that is unmapped: the program may free a buffer and get other
//! memory at the same address. [`invalidate`] is called for that, from inside `munmap` or `free`.
//!
//! * `table`: the ranges. Lookups take no lock; invalidation may run inside `free`.
//! * `guard`: a copy's reference to a cached pin.
//! * `refusals`: what the driver would not pin; `mappings`: which memory it surely will not.
//! * `roster`: the caches of the process, for [`invalidate`].
//! * `switch`: whether pins are cached at all.
//! * this file: what is cached for how long, and what happens in `fork`.
//!
//! A copy has a reference to the pins it uses: one that is invalidated or evicted meanwhile is unpinned
//! when the last copy that uses it has ended. Invalidated pins are given back when a copy looks
//! something up, an interface makes progress, or a registration ends; a process that does none of
//! these keeps freed memory pinned until the card is closed.
//!
//! Why not UCX's cache (`ucs_rcache_create`): it takes a lock in each lookup and another in its event
//! handler, pins with the lock held, and is private to one copy of UCX. Only the events come from UCX
//! (`uct/src/ucm.rs`).

mod guard;
mod mappings;
mod refusals;
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

use super::{PinError, PinRef, Pinned};
use crate::DeviceAddr;
use crate::backend::HostPin;
pub use crate::options::CacheLimits;
use crate::process::{ForkHandlers, Instance};
use crate::stats::{Counter, Counts};
pub(crate) use guard::CachedPin;
pub(crate) use refusals::{Reason, Refusals};
use roster::Roster;
pub use switch::Watch;
pub(crate) use switch::{SWITCH, Switch};
use table::{Found, Inserted, PAGE, Swept, Table, TableGuard};

/// More cards than a process has open at a time; further ones cache nothing.
const CARDS: usize = 64;

/// The caches of this process. Made with the first cache, so that [`invalidate`] never allocates it.
static CACHES: OnceLock<Roster<Shared, CARDS>> = OnceLock::new();

/// Whether invalidated pins may wait to be unpinned: a hint for [`reclaim`].
static INVALIDATED: AtomicBool = AtomicBool::new(false);

/// Whether a pin was ever refused: spares [`registered`] the list of caches.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Notifies all caches that memory of `[start, start + len)` is about to be unmapped: no copy that starts
/// after this returns uses a pin of it that was made before.
///
/// May be called anywhere, also inside `munmap` or `free`, by any thread: it takes no lock, waits
/// for nobody, allocates and frees nothing, and calls no driver. The pins are given back later, by a
/// thread that copies, or in [`reclaim`].
pub fn invalidate(start: usize, len: usize) {
    let Some(caches) = CACHES.get() else { return };
    let range = start as u64..(start as u64).saturating_add(len as u64);
    caches.for_each(|cache| {
        cache.refusals.invalidate(&range);
        let ranges = cache.table.invalidate(range.start, range.end);
        if ranges > 0 {
            cache.counts.add(Counter::RegCacheInvalidations, ranges);
            INVALIDATED.store(true, Ordering::Relaxed);
        }
    });
}

/// Memory was registered: where unmap events arrive, pinning it may be tried again.
pub(super) fn registered(start: usize, len: usize) {
    if !REFUSED.load(Ordering::Relaxed) || !SWITCH.has_events() {
        return;
    }
    let Some(caches) = CACHES.get() else { return };
    let range = pages(start as u64, len as u64);
    caches.for_each(|cache| cache.refusals.registered(&range));
}

/// Unpins what was invalidated, on all open cards, where no other thread is doing so. Copies do that
/// by themselves; this is for moments when there may be no further copy. One load where there is
/// nothing to do. It may call the driver: not for places that must not wait.
pub fn reclaim() {
    if INVALIDATED.load(Ordering::Relaxed)
        && INVALIDATED.swap(false, Ordering::Relaxed)
        && let Some(caches) = CACHES.get()
    {
        caches.for_each(Shared::reclaim);
    }
}

/// Empties the caches of all cards. Pins that copies are using are given back when these end.
pub(crate) fn clear() {
    if let Some(caches) = CACHES.get() {
        caches.for_each(Shared::clear);
    }
}

/// What a card's cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheInfo {
    /// Ranges that are pinned, with those that were invalidated and not unpinned yet: nobody finds
    /// them, but a copy may still use them.
    pub regions: usize,
    /// Their length together.
    pub bytes: u64,
    /// Bytes that the cache itself takes.
    pub overhead: usize,
}

/// The part of a cache that the roster and [`CachedPin`]s point to.
struct Shared {
    table: Table<HostPin>,
    refusals: Refusals,
    counts: Counts,
    /// The process that pinned. A forked child has a copy of all this, but not the pins.
    made_by: Instance,
}

impl Shared {
    /// Unpins what was invalidated, unless another thread is doing so.
    #[cold]
    fn reclaim(&self) {
        let mut swept = Swept::default();
        let all = match self.table.try_lock() {
            Some(mut table) => table.sweep(&mut swept),
            None => false,
        };
        if !all {
            INVALIDATED.store(true, Ordering::Relaxed);
        }
        self.unpin(swept);
    }

    /// The same, at the price of one load where there is nothing to do.
    #[inline]
    fn reclaim_if_marked(&self) {
        if self.table.has_marked() {
            self.reclaim();
        }
    }

    /// Empties the cache. Pins that copies are using are given back when these end.
    fn clear(&self) {
        self.refusals.invalidate(&(0..u64::MAX));
        let mut swept = Swept::default();
        if !self.table.lock().clear(&mut swept) {
            INVALIDATED.store(true, Ordering::Relaxed);
        }
        self.unpin(swept);
    }

    /// Unpins what came out of the table, with no lock held: that is a driver call.
    fn unpin(&self, swept: Swept<HostPin>) {
        let counts = self.counts;
        counts.subtract(Counter::RegCacheRegions, swept.regions);
        counts.subtract(Counter::RegCacheBytes, swept.bytes);
        counts.add(Counter::RegCacheEvictions, swept.evicted);
        self.drop_pins(swept.values);
    }

    /// Whether there were any.
    fn drop_pins(&self, pins: Vec<HostPin>) -> bool {
        let any = !pins.is_empty();
        if any && self.made_by != Instance::current() {
            // A forked child: the driver would unpin its parent's memory, under the parent's copies.
            std::mem::forget(pins);
        }
        any
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Empty, unless a fork took away the threads that had references.
        let pins = self.table.take_values();
        self.drop_pins(pins);
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// The cached pins of one card.
pub(crate) struct Cache {
    shared: Arc<Shared>,
    /// Its slot in [`CACHES`]. Without one it is not notified of unmapped memory, and caches nothing.
    slot: Option<usize>,
    /// In place of the process's, so that tests do not share it.
    #[cfg(test)]
    switch: OnceLock<&'static Switch>,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl Cache {
    pub(crate) fn new(counts: Counts) -> Self {
        let caches = CACHES.get_or_init(|| {
            FORKS.register();
            Roster::new()
        });
        let shared = Arc::new(Shared {
            table: Table::new(),
            refusals: Refusals::default(),
            counts,
            made_by: Instance::current(),
        });
        // SAFETY: the cache has a count of it until it was removed from the roster.
        let slot = unsafe { caches.insert(Arc::as_ptr(&shared)) };
        Self {
            shared,
            slot,
            #[cfg(test)]
            switch: OnceLock::new(),
        }
    }

    fn switch(&self) -> &Switch {
        #[cfg(test)]
        if let Some(switch) = self.switch.get() {
            return switch;
        }
        &SWITCH
    }

    /// The cached pin that covers `[addr, addr + len)`. Wait-free.
    #[inline]
    pub(super) fn find(&self, addr: usize, len: usize) -> Option<Pinned> {
        if !self.switch().is_wanted() {
            return None;
        }
        self.shared.reclaim_if_marked();
        let found = self.shared.table.find(addr as u64, len as u64)?;
        self.shared.counts.add(Counter::RegCacheHits, 1);
        Some(self.pinned(found, addr))
    }

    /// The address of host memory that is cached as a whole; counts as a copy's lookup does.
    #[inline]
    pub(crate) fn address_of(&self, addr: usize, len: usize) -> Option<DeviceAddr> {
        self.find(addr, len).map(|pinned| pinned.addr)
    }

    /// Whether pins are cached. The first call starts the watch for unmapped memory.
    pub(super) fn is_on(&self) -> bool {
        self.keeps(0)
    }

    /// Whether a pin of this length can be cached.
    pub(super) fn keeps(&self, len: usize) -> bool {
        let bounds = self.slot.and_then(|_| self.switch().bounds());
        bounds.is_some_and(|bounds| len as u64 <= bounds.bytes)
    }

    /// Whether the driver is known to refuse `[start, start + len)`. `pinned`: how many bytes are pinned
    /// on the device.
    pub(super) fn known_refusal(&self, start: u64, len: u64, pinned: u64) -> Option<Reason> {
        let events = self.slot.is_some() && self.switch().has_events();
        self.shared.refusals.find(&pages(start, len), pinned, events)
    }

    /// See [`Refusals::generation`].
    pub(super) fn refusal_generation(&self) -> u64 {
        self.shared.refusals.generation()
    }

    /// Remembers that the driver refused `[start, start + len)`. `pinned` and `generation`: those of
    /// before it was asked.
    pub(super) fn remember_refusal(
        &self,
        (start, len): (u64, u64),
        reason: Reason,
        pinned: u64,
        generation: u64,
    ) {
        self.shared.refusals.insert(&pages(start, len), reason, pinned, generation);
        REFUSED.store(true, Ordering::Relaxed);
    }

    /// Pins, with `pin`, all pages of `whole`, which contains `[addr, addr + len)`, and caches the pin.
    /// `None`: the cache is full.
    pub(super) fn insert(
        &self,
        (addr, len): (usize, usize),
        whole: &Range<usize>,
        pin: impl Fn(u64, u64) -> Result<HostPin, PinError>,
    ) -> Result<Option<Pinned>, PinError> {
        let (addr64, len64) = (addr as u64, len as u64);
        let whole = whole.start as u64..whole.end as u64;
        let counts = self.shared.counts;
        let Some(bounds) = self.slot.and_then(|_| self.switch().bounds()) else {
            return Ok(None);
        };
        let pinned = counts.get(Counter::PinnedBytes);
        let refused = self.known_refusal(whole.start, whole.end - whole.start, pinned);
        if refused == Some(Reason::Unpinnable) {
            // Before others are evicted for it.
            counts.add(Counter::RegCacheMisses, 1);
            return Err(PinError::Refused(Reason::Unpinnable));
        }
        let mut swept = Swept::default();
        let inserted = self.shared.table.insert(
            (addr64, len64),
            &whole,
            bounds,
            &mut swept,
            |range, table, swept| {
                let len = range.end - range.start;
                // Nothing but the pages of the copy itself.
                let needed = addr64 - range.start < PAGE && range.end - (addr64 + len64) < PAGE;
                let pinned =
                    self.pin_or_evict(|| pin(range.start, len), (len, needed), table, swept)?;
                // Under the table's lock: nobody can take it out before it is counted.
                counts.add(Counter::RegCacheRegions, 1);
                counts.add(Counter::RegCacheBytes, len);
                Ok((pinned.addr.0, pinned))
            },
        );
        self.shared.unpin(swept);
        if !self.switch().is_wanted() {
            // Turned off meanwhile, and perhaps cleared before this was inserted.
            self.shared.clear();
        }
        let hit = matches!(inserted, Ok(Inserted::Hit(_)));
        if !matches!(inserted, Err(PinError::Failed(_))) {
            counts.add(if hit { Counter::RegCacheHits } else { Counter::RegCacheMisses }, 1);
        }
        Ok(match inserted? {
            Inserted::Hit(found) | Inserted::New(found) => Some(self.pinned(found, addr)),
            Inserted::Full => None,
        })
    }

    /// Unpins what was invalidated, at the price of one load where there is nothing to do.
    pub(crate) fn reclaim_if_marked(&self) {
        self.shared.reclaim_if_marked();
    }

    /// Pins, and evicts others while the driver is out of memory: perhaps the cache has what is
    /// missing. Evicts one, then two, then four, so that few more leave than must. For more than the
    /// copy itself needs, it evicts only if that much is cached at all: otherwise it could empty the
    /// cache and fail all the same.
    fn pin_or_evict(
        &self,
        pin: impl Fn() -> Result<HostPin, PinError>,
        (len, needed): (u64, bool),
        table: &mut TableGuard<'_, HostPin>,
        swept: &mut Swept<HostPin>,
    ) -> Result<HostPin, PinError> {
        let mut pinned = pin();
        // In the first round only what is marked already.
        let mut batch = 0;
        while matches!(pinned, Err(PinError::Refused(Reason::OutOfMemory))) {
            table.evict_idle(batch, swept);
            let unpinned = self.shared.drop_pins(std::mem::take(&mut swept.values));
            // The table counts the new range already.
            let cached = table.size().1.saturating_sub(len);
            if unpinned {
                pinned = pin();
            } else if batch > 0 {
                break;
            }
            if batch == 0 && !needed && cached < len {
                break;
            }
            batch = (2 * batch).max(1);
        }
        pinned
    }

    /// `addr`, which is in what was found.
    #[inline]
    fn pinned(&self, found: Found<'_, HostPin>, addr: usize) -> Pinned {
        let seen = DeviceAddr(found.base + (addr as u64 - found.start));
        let guard = PinRef::Cached(CachedPin::new(&self.shared, found.range));
        Pinned { addr: seen, guard }
    }

    pub(crate) fn info(&self) -> CacheInfo {
        let (regions, bytes) = self.shared.table.lock().size();
        CacheInfo { regions, bytes, overhead: self.shared.table.memory() }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if let (Some(slot), Some(caches)) = (self.slot, CACHES.get()) {
            caches.remove(slot);
        }
        self.shared.clear();
    }
}

/// The whole pages of a range.
fn pages(start: u64, len: u64) -> Range<u64> {
    let end = start.saturating_add(len);
    start & !(PAGE - 1)..end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

static FORKS: ForkHandlers = ForkHandlers::new(Some(before_fork), in_child);

/// Before a fork: parent and child share all pages until one of them writes, and which of them then
/// keeps the pinned ones depends on the kernel. So no pin made before is used after; UCX does the same.
extern "C" fn before_fork() {
    invalidate(0, usize::MAX);
}

/// In a forked child.
extern "C" fn in_child() {
    if let Some(caches) = CACHES.get() {
        caches.reset_readers();
    }
}
