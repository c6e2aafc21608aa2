//! The part of a cache that unmap events reach: what is pinned, what was refused, and the locks.
//!
//! `state` is held for a lookup or a change, never while the driver is called. An unmap event may
//! come in the middle of that, even on the same thread: the thread with the lock may allocate. So
//! [`Shared::invalidate`] only tries the lock, as UCX's own cache does. If it gets it, it marks what is
//! invalid; otherwise the event goes into the queue, and the next thread to take the lock drains the queue
//! before it looks at anything.
//!
//! `pinning` is held while the driver pins, so that two threads never pin the same range at once; hits
//! do not wait for it. What is unmapped meanwhile is no longer in [`State::being_pinned`].

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

/// The first of a list of caches. None is ever freed, so that unmap events can read the list at any
/// moment: the next card uses the cache of one that was closed. A forked child has an empty list.
static CACHES: AtomicPtr<Shared> = AtomicPtr::new(null_mut());

/// Whether invalidated pins may wait to be unpinned: a hint for [`super::reclaim`].
pub(super) static INVALIDATED: AtomicBool = AtomicBool::new(false);

/// All caches of this process.
pub(super) fn caches() -> impl Iterator<Item = &'static Shared> {
    // SAFETY: null, or leaked by `Shared::claim`.
    // Acquire: pairs with the exchange there; the cache is seen as it was made.
    let first = unsafe { CACHES.load(Ordering::Acquire).as_ref() };
    std::iter::successors(first, |cache| cache.next)
}

/// Before a fork: no pin made before is used after. Takes no lock.
pub(super) fn invalidate_everything() {
    for cache in caches() {
        cache.unmapped.push_everything();
        cache.note_invalidated();
    }
}

/// In a forked child: the pins are its parent's, and a lock may be held by a thread that does not
/// exist here.
pub(super) fn forget_all() {
    CACHES.store(null_mut(), Ordering::Relaxed);
}

/// See the [module](self).
pub(super) struct Shared {
    state: Mutex<State>,
    /// Held while pinning for the cache.
    pub(super) pinning: Mutex<()>,
    /// For events that find `state` locked.
    unmapped: UnmapQueue,
    /// Whether there may be something to unpin.
    invalidated: AtomicBool,
    /// The process that pins. A forked child has a copy of all this, but not the pins.
    made_by: Instance,
    /// Whether a card uses it.
    pub(super) taken: AtomicBool,
    next: Option<&'static Shared>,
}

pub(super) struct State {
    pub(super) ranges: Ranges<KeptPin>,
    /// What the driver was asked to pin for the cache, if none of it was unmapped since.
    pub(super) being_pinned: Option<Range<u64>>,
    pub(super) refusals: Refusals,
    /// Of the card that uses the cache.
    counts: Option<Counts>,
}

impl State {
    /// Allocates and frees nothing. Whether there is something to unpin now.
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

    /// Takes out what is invalid: to be dropped, which unpins, without the lock.
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

    /// A cache that no card uses.
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

    /// The lock, with all events taken in whose [`Shared::invalidate`] has returned.
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        #[cfg(test)]
        crate::engine::effort::lock();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.unmapped.is_empty() {
            self.catch_up(&mut state);
        }
        state
    }

    /// The same, if it is free.
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
        // Release: pair with the exchanges in `reclaim`. A thread that takes the hint sees the event.
        self.invalidated.store(true, Ordering::Release);
        INVALIDATED.store(true, Ordering::Release);
    }

    /// Unpins what was invalidated, at the price of one load where there is nothing. Not while another
    /// thread has the lock, or this one: a registration may end where UCX handles an unmap event.
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

    /// Empties the cache. Pins that copies are using are given back when these end.
    pub(super) fn clear(&self) {
        let mut state = self.state();
        state.refusals.invalidate(&(0..u64::MAX));
        state.being_pinned = None;
        let gone = state.ranges.clear();
        drop(state);
        drop(gone);
    }

    /// Whether this is not a forked child, where the lock may be held for ever.
    pub(super) fn is_ours(&self) -> bool {
        self.made_by == Instance::current()
    }

    /// For a copy.
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

/// A copy's use of a cached pin. The pin stays until the last of them is dropped, whether it is still in
/// the cache or not.
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
            // Unpinning is a driver call: not under the lock.
            drop(unused);
        }
    }
}

pub(super) fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}
