//! The registration cache: keeps pins of host memory for the next copy, and remembers refusals to pin.
//!
//! Pinning takes a driver call and work for every page, and programs use the same buffers again and
//! again. So the pins that copies make are cached, in one cache for each open card, and found by
//! address. The difficulty is memory that is unmapped: the program may free a buffer and get other
//! memory at the same address. So UCX's hooks call [`invalidate`] from inside `munmap` or `free`.
//!
//! * `ranges`: the pinned ranges, sorted by address.
//! * `unmapped`: unmap events that came while the cache was locked.
//! * `refusals`: memory that the driver refused to pin; `mappings`: memory that it is certain to refuse.
//! * `shared`: ranges and refusals under their lock, where unmap events reach them.
//! * `switch`: whether pins are cached at all.
//! * this file: which pins are cached for how long, and what happens in `fork`.
//!
//! A copy has a reference to the pins it uses: a pin that is invalidated or evicted meanwhile is unpinned
//! when the last copy that uses it has ended. Invalidated pins are released when a copy looks up a
//! pin, an interface makes progress, or a registration ends; a process that does none of these keeps
//! freed memory pinned until the card is closed.
//!
//! A range that overlaps cached ranges is pinned together with them, as one range: overlapping buffers then
//! share it instead of evicting each other. If the union is too large or cannot be pinned, the new range is
//! pinned alone and the others are dropped. At the limits the least recently used ranges are evicted, but never
//! one that a copy is using; if all are in use, the new range is not kept.
//!
//! Why not UCX's cache (`ucs_rcache_create`): it pins with its lock held, and is private to one copy of
//! UCX. Only the unmap events come from UCX (`uct/src/ucm.rs`).

mod mappings;
mod ranges;
mod refusals;
mod shared;
mod switch;
mod sync;
#[cfg(test)]
mod tests;
mod unmapped;

use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{PinError, Pinned};
use crate::DeviceAddr;
use crate::backend::HostPin;
pub use crate::options::CacheLimits;
use crate::process::{ForkHandlers, ProcessBound};
use crate::stats::{Counter, Counts};
use ranges::{Found, PAGE, Ranges};
pub(crate) use refusals::Reason;
pub(crate) use shared::CachedPin;
use shared::{INVALIDATED, Shared, caches};
pub use switch::Watch;
pub(crate) use switch::{SWITCH, Switch};

/// Whether a pin was ever refused. If not, [`registered`] need not visit the caches.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// Notifies all caches that memory of `[start, start + len)` is about to be unmapped. A copy that starts
/// after this returns does not use a pin of that memory that was made before.
///
/// May be called anywhere, also inside `munmap` or `free`, by any thread: it waits for no lock,
/// allocates and frees nothing, and does not call the driver. The pins are released later, by a
/// thread that copies, or in [`reclaim`].
pub fn invalidate(start: usize, len: usize) {
    let range = start as u64..(start as u64).saturating_add(len as u64);
    if !range.is_empty() {
        caches().for_each(|cache| cache.invalidate(&range));
    }
}

/// Memory was registered: if unmap events arrive, pinning it may be tried again.
pub(super) fn registered(start: usize, len: usize) {
    if !REFUSED.load(Ordering::Relaxed) || !SWITCH.has_events() {
        return;
    }
    let range = pages(start as u64, len as u64);
    caches().for_each(|cache| cache.state().refusals.registered(&range));
}

/// Unpins invalidated memory on all open cards, except where a thread has the cache's lock. Copies do that
/// by themselves; this is for a process that may not copy again. Costs one load if there is nothing to
/// do. It may call the driver: do not call it where waiting is not allowed.
pub fn reclaim() {
    if INVALIDATED.load(Ordering::Relaxed) && INVALIDATED.swap(false, Ordering::Acquire) {
        caches().for_each(Shared::reclaim);
    }
}

/// Empties the caches of all cards. Pins that copies are using are released when these copies end.
pub(crate) fn clear() {
    caches().for_each(Shared::clear);
}

static FORKS: ForkHandlers = ForkHandlers::new(Some(before_fork), in_child);

/// Before a fork. Parent and child share all pages until one of them writes, and the kernel decides which of
/// them then keeps the pinned pages. So no pin made before the fork is used after it; UCX does the same.
extern "C" fn before_fork() {
    shared::invalidate_everything();
}

/// In a forked child, which does not own its parent's pins.
extern "C" fn in_child() {
    shared::forget_all();
}

/// The contents of a card's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheInfo {
    /// Ranges that are pinned, including those that were invalidated and not unpinned yet: lookups do
    /// not find these, but a copy may still use them.
    pub regions: usize,
    /// Their total length.
    pub bytes: u64,
    /// About how many bytes the cache itself takes.
    pub overhead: usize,
}

/// A pin that is or was in the cache. Dropping it unpins; the statistics count it until then.
struct KeptPin {
    /// Bound to its process: if a forked child dropped it, the driver would unpin memory that the parent's copies use.
    _pin: ProcessBound<HostPin>,
    len: u64,
    counts: Counts,
}

impl KeptPin {
    fn new(pin: HostPin, len: u64, counts: Counts) -> Self {
        counts.add(Counter::RegCacheRegions, 1);
        counts.add(Counter::RegCacheBytes, len);
        Self { _pin: ProcessBound::new(pin), len, counts }
    }
}

impl Drop for KeptPin {
    fn drop(&mut self) {
        self.counts.subtract(Counter::RegCacheRegions, 1);
        self.counts.subtract(Counter::RegCacheBytes, self.len);
    }
}

/// The cached pins of one card.
pub(crate) struct Cache {
    shared: &'static Shared,
    counts: Counts,
    /// Used in place of [`SWITCH`], so that tests do not share one.
    #[cfg(test)]
    pub(crate) switch: std::sync::OnceLock<&'static Switch>,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}

impl Cache {
    pub(crate) fn new(counts: Counts) -> Self {
        FORKS.register();
        Self {
            shared: Shared::claim(counts),
            counts,
            #[cfg(test)]
            switch: std::sync::OnceLock::new(),
        }
    }

    fn switch(&self) -> &Switch {
        #[cfg(test)]
        if let Some(switch) = self.switch.get() {
            return switch;
        }
        &SWITCH
    }

    /// The cached pin that covers `[addr, addr + len)`.
    pub(super) fn find(&self, addr: usize, len: usize) -> Option<Pinned> {
        if !self.switch().is_wanted() || !self.shared.is_ours() {
            return None;
        }
        let mut state = self.shared.state();
        let gone = state.sweep();
        let found = state.ranges.find(addr as u64, len as u64);
        drop(state);
        drop(gone);
        let found = found?;
        self.counts.add(Counter::RegCacheHits, 1);
        Some(self.shared.pinned(found))
    }

    /// The device address of host memory, if one cached pin covers all of it. Counted like a copy's lookup.
    pub(crate) fn address_of(&self, addr: usize, len: usize) -> Option<DeviceAddr> {
        self.find(addr, len).map(|pinned| pinned.addr)
    }

    /// Whether pins are cached. The first call starts the watch for unmapped memory.
    pub(super) fn is_on(&self) -> bool {
        self.keeps(0)
    }

    /// Whether a pin of this length can be cached.
    pub(super) fn keeps(&self, len: usize) -> bool {
        self.switch().limits().is_some_and(|limits| len as u64 <= limits.bytes)
    }

    /// Whether the driver is known to refuse `[start, start + len)`. `pinned`: the number of bytes that are
    /// pinned on the device.
    pub(super) fn known_refusal(&self, start: u64, len: u64, pinned: u64) -> Option<Reason> {
        self.shared.find_refusal(&pages(start, len), pinned, self.switch().has_events())
    }

    /// Read this before the driver is called, and pass it to [`Cache::remember_refusal`].
    pub(super) fn refusal_generation(&self) -> u64 {
        self.shared.state().refusals.generation()
    }

    /// Remembers that the driver refused `[start, start + len)`. `pinned` and `generation`: the values from
    /// before the driver was called.
    pub(super) fn remember_refusal(
        &self,
        (start, len): (u64, u64),
        reason: Reason,
        pinned: u64,
        generation: u64,
    ) {
        self.shared.remember_refusal(&pages(start, len), reason, pinned, generation);
        REFUSED.store(true, Ordering::Relaxed);
    }

    /// Calls `pin` for all pages of `whole`, which contains `[addr, addr + len)`, and caches the pin.
    /// `None`: the cache is full.
    pub(super) fn insert(
        &self,
        (addr, len): (usize, usize),
        whole: &Range<usize>,
        pin: impl Fn(u64, u64) -> Result<HostPin, PinError>,
    ) -> Result<Option<Pinned>, PinError> {
        let (wanted, counts) = ((addr as u64, len as u64), self.counts);
        let Some(limits) = self.switch().limits() else { return Ok(None) };
        let pinned = counts.get(Counter::PinnedBytes);
        let refused = self.known_refusal(whole.start as u64, whole.len() as u64, pinned);
        if refused == Some(Reason::Unpinnable) {
            // Return before other ranges are evicted for it.
            counts.add(Counter::RegCacheMisses, 1);
            return Err(PinError::Refused(Reason::Unpinnable));
        }
        let whole = pages(whole.start as u64, whole.len() as u64);
        let mut hit = false;
        let found = self.find_or_pin(wanted, &whole, limits, &mut hit, pin);
        if !self.switch().is_wanted() {
            // The cache was turned off meanwhile, and perhaps cleared before this pin was inserted.
            self.shared.clear();
        }
        if !matches!(found, Err(PinError::Failed(_))) {
            counts.add(if hit { Counter::RegCacheHits } else { Counter::RegCacheMisses }, 1);
        }
        found
    }

    /// See [`Cache::insert`]. Sets `hit` if another thread has pinned the range first.
    fn find_or_pin(
        &self,
        wanted: (u64, u64),
        whole: &Range<u64>,
        limits: CacheLimits,
        hit: &mut bool,
        pin: impl Fn(u64, u64) -> Result<HostPin, PinError>,
    ) -> Result<Option<Pinned>, PinError> {
        if wanted.0.checked_add(wanted.1).is_none_or(|end| end > whole.end) {
            // The range ends in the last page of the address space, which is never mapped.
            return Ok(None);
        }
        let _pinning = self.shared.pinning.lock().unwrap_or_else(PoisonError::into_inner);
        let mut alone = false;
        loop {
            let mut state = self.shared.state();
            let mut gone = state.sweep();
            if let Some(found) = state.ranges.find(wanted.0, wanted.1) {
                *hit = true;
                drop(state);
                return Ok(Some(self.shared.pinned(found)));
            }
            let (mut range, mut replaced) = state.ranges.union(whole);
            if alone || length(&range) > limits.bytes {
                (range, replaced) = (whole.clone(), state.ranges.overlapping(whole));
            }
            if !has_room(&state.ranges, &range, &replaced, limits) {
                let evicted = state.ranges.evict(&replaced);
                drop(state);
                if evicted.is_none() && gone.is_empty() {
                    return Ok(None);
                }
                self.counts.add(Counter::RegCacheEvictions, u64::from(evicted.is_some()));
                continue;
            }
            gone.extend(replaced.iter().filter_map(|old| state.ranges.remove_at(old.start)));
            state.being_pinned = Some(range.clone());
            drop(state);
            drop(gone);

            let pinned = self.pin_or_evict(wanted, &range, &pin);
            let mut state = self.shared.state();
            // If it was unmapped meanwhile, the pin is for this copy only.
            let is_mapped = state.being_pinned.take().is_some();
            match pinned {
                Ok(pin) => {
                    let base = pin.addr.0;
                    let addr = base + (wanted.0 - range.start);
                    // A neighbour may have been unmapped meanwhile: the other methods expect no marked range.
                    let gone = state.sweep();
                    let pin = KeptPin::new(pin, length(&range), self.counts);
                    let at = state.ranges.insert(&range, base, pin, is_mapped);
                    drop(state);
                    drop(gone);
                    return Ok(Some(self.shared.pinned(Found { addr, at })));
                }
                Err(error) if replaced.is_empty() => return Err(error),
                Err(_) => alone = true,
            }
        }
    }

    /// Pins. While the driver is out of memory, evicts other ranges, because the cache may hold the missing
    /// memory. Evicts one, then two, then four, so that few more are evicted than necessary. If `range` is
    /// more than the copy itself needs, evicts only if at least that much is cached: otherwise it could empty
    /// the cache and fail all the same.
    fn pin_or_evict(
        &self,
        (addr, len): (u64, u64),
        range: &Range<u64>,
        pin: impl Fn(u64, u64) -> Result<HostPin, PinError>,
    ) -> Result<HostPin, PinError> {
        // Whether the range is only the pages of the copy itself.
        let needed = *range == pages(addr, len);
        let pin = || pin(range.start, length(range));
        let mut pinned = pin();
        // The first round evicts nothing: it only unpins ranges that are marked already.
        let mut batch = 0;
        while matches!(pinned, Err(PinError::Refused(Reason::OutOfMemory))) {
            let mut state = self.shared.state();
            let mut gone = state.sweep();
            let evicted = (0..batch).map_while(|_| state.ranges.evict(&[]));
            let before = gone.len();
            gone.extend(evicted);
            let cached = state.ranges.size().1;
            drop(state);
            let evicted = (gone.len() - before) as u64;
            self.counts.add(Counter::RegCacheEvictions, evicted);
            let unpinned = !gone.is_empty();
            drop(gone);
            if unpinned {
                pinned = pin();
            } else if batch > 0 {
                break;
            }
            if batch == 0 && !needed && cached < length(range) {
                break;
            }
            batch = (2 * batch).max(1);
        }
        pinned
    }

    /// Unpins invalidated memory. Costs one load if there is nothing to do.
    pub(crate) fn reclaim(&self) {
        self.shared.reclaim();
    }

    pub(crate) fn info(&self) -> CacheInfo {
        let state = self.shared.state();
        let (regions, bytes) = state.ranges.size();
        CacheInfo { regions, bytes, overhead: size_of::<Shared>() + state.ranges.memory() }
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if self.shared.is_ours() {
            self.shared.clear();
            // Relaxed: the next card locks `state`, and so sees everything done here under that lock.
            self.shared.taken.store(false, Ordering::Relaxed);
        }
    }
}

/// Whether `range` fits into the limits once the ranges that it replaces are removed.
fn has_room(
    ranges: &Ranges<KeptPin>,
    range: &Range<u64>,
    replaced: &[Range<u64>],
    limits: CacheLimits,
) -> bool {
    let (regions, bytes) = ranges.size();
    let freed: u64 = replaced.iter().map(length).sum();
    let bytes = bytes.saturating_sub(freed).saturating_add(length(range));
    regions.saturating_sub(replaced.len()) < limits.regions && bytes <= limits.bytes
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// The range extended to whole pages.
fn pages(start: u64, len: u64) -> Range<u64> {
    let end = start.saturating_add(len);
    start & !(PAGE - 1)..end.checked_next_multiple_of(PAGE).unwrap_or(!(PAGE - 1))
}
