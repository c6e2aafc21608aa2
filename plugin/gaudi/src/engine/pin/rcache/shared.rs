//! The part of a cache that unmap events change: pinned ranges, refusals, and their locks.
//!
//! `state` is locked for a lookup or a change, never while the driver is called. An unmap event may
//! come while it is locked, even on the thread that has the lock, because that thread may allocate. So
//! [`Shared::invalidate`] only tries the lock, as UCX's own cache does. If it gets the lock, it marks the
//! invalid ranges; otherwise it pushes the event to the queue, and the next thread that takes the lock
//! drains the queue before it reads the state.
//!
//! `pinning` is locked while the driver pins, so that two threads never pin the same range at once; hits
//! do not wait for it. If the range is unmapped meanwhile, [`State::being_pinned`] is cleared.

use std::ops::Range;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use super::super::{PinRef, Pinned};
use super::ranges::{Found, Ranges};
use super::refusals::{Known, Reason, Refusals};
use super::unmapped::UnmapQueue;
use super::{KeptPin, mappings};
use crate::DeviceAddr;
use crate::process::Instance;
use crate::stats::{Counter, Counts};

/// Head of a linked list of caches. None is ever freed, so that unmap events can read the list at any
/// moment: a card that is opened reuses the cache of one that was closed. A forked child has an empty list.
static CACHES: AtomicPtr<Shared> = AtomicPtr::new(null_mut());

/// Whether there may be invalidated pins that must be unpinned: a hint for [`super::reclaim`].
pub(super) static INVALIDATED: AtomicBool = AtomicBool::new(false);

/// All caches of this process.
pub(super) fn caches() -> impl Iterator<Item = &'static Shared> {
    // SAFETY: null, or leaked by `Shared::claim`.
    // Acquire: pairs with the compare_exchange there; otherwise a cache could be read before its fields were written.
    let first = unsafe { CACHES.load(Ordering::Acquire).as_ref() };
    std::iter::successors(first, |cache| cache.next)
}

/// Before a fork: makes sure that no pin made before it is used after it. Takes no lock.
pub(super) fn invalidate_everything() {
    for cache in caches() {
        cache.unmapped.push_everything();
        cache.note_invalidated();
    }
}

/// In a forked child: the pins belong to the parent, and a lock may be held by a thread that does not exist
/// in the child.
pub(super) fn forget_all() {
    CACHES.store(null_mut(), Ordering::Relaxed);
}

/// See the [module](self).
pub(super) struct Shared {
    state: Mutex<State>,
    /// Held while pinning for the cache.
    pub(super) pinning: Mutex<()>,
    /// Unmap events that came while `state` was locked.
    unmapped: UnmapQueue,
    /// Whether there may be something to unpin.
    invalidated: AtomicBool,
    /// The process that made it. A forked child has a copy of this struct, but does not own the pins.
    made_by: Instance,
    /// Whether a card uses this cache.
    pub(super) taken: AtomicBool,
    next: Option<&'static Shared>,
}

pub(super) struct State {
    pub(super) ranges: Ranges<KeptPin>,
    /// The range that the driver is pinning for the cache, if no part of it was unmapped since the call began.
    pub(super) being_pinned: Option<Range<u64>>,
    pub(super) refusals: Refusals,
    /// Counters of the card that uses the cache.
    counts: Option<Counts>,
}

impl State {
    /// Marks what overlaps `range` as invalid. Allocates and frees nothing. Returns whether there is something to unpin.
    fn invalidate(&mut self, range: &Range<u64>) -> bool {
        self.refusals.invalidate(range);
        let mut lost = self.ranges.invalidate(range);
        if self.being_pinned.take_if(|pinned| overlap(pinned, range)).is_some() {
            lost += 1;
        }
        if let Some(counts) = self.counts.filter(|_| lost > 0) {
            counts.add(Counter::RegCacheInvalidations, lost);
        }
        lost > 0
    }

    /// Removes the invalid pins. Drop them after unlocking: dropping unpins, which is a driver call.
    #[must_use]
    pub(super) fn sweep(&mut self) -> Vec<KeptPin> {
        if self.ranges.has_marked() { self.ranges.sweep() } else { Vec::new() }
    }
}

impl Shared {
    pub(super) fn new(next: Option<&'static Self>) -> Self {
        let ranges = Ranges::new();
        let refusals = Refusals::default();
        Self {
            state: Mutex::new(State { ranges, being_pinned: None, refusals, counts: None }),
            pinning: Mutex::default(),
            unmapped: UnmapQueue::new(),
            invalidated: AtomicBool::new(false),
            made_by: Instance::current(),
            taken: AtomicBool::new(true),
            next,
        }
    }

    /// Claims a cache that no card uses, or makes one.
    pub(super) fn claim(counts: Counts) -> &'static Self {
        let free = |cache: &&Self| !cache.taken.swap(true, Ordering::Relaxed);
        let cache = caches().find(free).unwrap_or_else(|| {
            let made = Box::leak(Box::new(Self::new(caches().next())));
            loop {
                let next = made.next.map_or(null_mut(), |next| std::ptr::from_ref(next).cast_mut());
                // Release: pairs with the load in `caches`.
                match CACHES.compare_exchange(next, made, Ordering::Release, Ordering::Relaxed) {
                    Ok(_) => return made,
                    Err(_) => made.next = caches().next(),
                }
            }
        });
        cache.state().counts = Some(counts);
        cache
    }

    /// Locks the state and applies all events whose [`Shared::invalidate`] has returned.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        #[cfg(test)]
        crate::engine::effort::lock();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.unmapped.is_empty() {
            self.catch_up(&mut state);
        }
        state
    }

    /// Locks the state if no thread has the lock. Does not apply queued events.
    fn try_state(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn catch_up(&self, state: &mut State) {
        self.unmapped.drain(|range| _ = state.invalidate(range));
    }

    /// See [`super::invalidate`].
    pub(super) fn invalidate(&self, range: &Range<u64>) {
        let lost = match self.try_state() {
            Some(mut state) => state.invalidate(range),
            None => {
                self.unmapped.push(range);
                true
            }
        };
        if lost {
            self.note_invalidated();
        }
    }

    fn note_invalidated(&self) {
        // Release: these pair with the swaps in the two `reclaim`s. Otherwise `reclaim` could clear a flag but miss the event.
        self.invalidated.store(true, Ordering::Release);
        INVALIDATED.store(true, Ordering::Release);
    }

    /// Unpins invalidated memory. Costs one load if there is none. Does nothing now if the state is locked, perhaps
    /// by this thread: a registration may end while UCX handles an unmap event.
    pub(super) fn reclaim(&self) {
        if self.invalidated.load(Ordering::Relaxed) {
            match self.try_state() {
                Some(mut state) => {
                    self.invalidated.swap(false, Ordering::Acquire);
                    self.catch_up(&mut state);
                    let gone = state.sweep();
                    drop(state);
                    drop(gone);
                }
                None => INVALIDATED.store(true, Ordering::Relaxed),
            }
        }
    }

    /// Empties the cache. Pins that copies are using are released when these copies end.
    pub(super) fn clear(&self) {
        let mut state = self.state();
        state.refusals.invalidate(&(0..u64::MAX));
        state.being_pinned = None;
        let gone = state.ranges.clear();
        drop(state);
        drop(gone);
    }

    /// Whether this process made the cache. If not, it is a forked child, where the lock may be held for ever.
    pub(super) fn is_ours(&self) -> bool {
        self.made_by == Instance::current()
    }

    /// Wraps a found range for a copy.
    pub(super) fn pinned(&'static self, Found { addr, at }: Found) -> Pinned {
        Pinned { addr: DeviceAddr(addr), guard: PinRef::Cached(CachedPin { cache: self, at }) }
    }

    /// Whether the driver is known to refuse `range`. See [`Refusals::find`].
    pub(super) fn find_refusal(
        &self,
        range: &Range<u64>,
        pinned: u64,
        events: bool,
    ) -> Option<Reason> {
        let known = self.state().refusals.find(range, pinned, events);
        match known {
            Known::Nothing => None,
            Known::Refused(reason) => Some(reason),
            Known::LookAgain if mappings::read_only(range).is_some() => Some(Reason::Unpinnable),
            Known::LookAgain => {
                self.state().refusals.forget_mappings(range);
                None
            }
        }
    }

    /// See [`Refusals::insert`].
    pub(super) fn remember_refusal(
        &self,
        range: &Range<u64>,
        reason: Reason,
        pinned: u64,
        generation: u64,
    ) {
        self.state().refusals.insert(range, reason, pinned, generation);
        if reason == Reason::Unpinnable
            && let Some(mapping) = mappings::read_only(range)
        {
            self.state().refusals.is_mapping(range, mapping);
        }
    }
}

/// A counted reference to a cached pin. The memory stays pinned until the last reference is dropped, even if
/// the pin is not in the cache any more.
pub(crate) struct CachedPin {
    cache: &'static Shared,
    at: u32,
}

impl std::fmt::Debug for CachedPin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachedPin").field("at", &self.at).finish_non_exhaustive()
    }
}

impl Clone for CachedPin {
    fn clone(&self) -> Self {
        if self.cache.is_ours() {
            self.cache.state().ranges.acquire(self.at);
        }
        Self { cache: self.cache, at: self.at }
    }
}

impl Drop for CachedPin {
    fn drop(&mut self) {
        if self.cache.is_ours() {
            let unused = self.cache.state().ranges.release(self.at);
            // Unpinning is a driver call: drop it while the lock is not held.
            drop(unused);
        }
    }
}

pub(super) fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
