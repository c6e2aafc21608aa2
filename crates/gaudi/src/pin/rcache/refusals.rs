//! Host memory that the driver would not pin.
//!
//! A driver logs an error for every refused pin, and the copy goes through bounce buffers anyway. So
//! a range is not tried again while it contains a refused one. A refusal is forgotten
//!
//! * when memory of it is unmapped, or the process forks ([`super::invalidate`]), or the cache is
//!   turned off;
//! * when memory of it is registered ([`super::registered`]), while unmap events are on. Without
//!   them UCX has no cache of registrations either and registers for every message: then
//!   registering says nothing, and instead every [`RETRY`]th request is tried;
//! * when [`SLOTS`] newer ones have come;
//! * if memory had run out: when anything was unpinned on this device.
//!
//! While the driver refuses a range, another thread may unmap it and map other memory there:
//! `invalidate` finds nothing to forget yet. So a refusal is *unconfirmed* if any invalidation came
//! between the request to the driver and its entry here, and is forgotten after [`RETRY`] requests. It
//! is entered all the same: a program that often unmaps other memory would otherwise have every
//! request refused anew, with an error line each.
//!
//! Not forgotten when `mprotect` makes memory writable: there is no event for that.
//!
//! Readers take no lock and `invalidate` may run inside `free`. The fields of a slot are not read as
//! a unit, so a reader may combine an old start with a new end. What follows is a wrong answer for
//! one copy: it bounces, or it tries a pin that is refused again. Both are correct copies.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use crate::Error;

/// Refusals that are remembered for each device.
pub(super) const SLOTS: usize = 64;
/// Without unmap events, one request in this many is tried again; as is an unconfirmed refusal.
pub(super) const RETRY: u32 = 256;

/// Why the driver refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The memory itself: not mapped, read-only, or of a kind that cannot be pinned.
    Unpinnable,
    /// No memory for the pin, or too much is pinned.
    OutOfMemory,
}

impl Reason {
    /// `None` if the reason does not lie in the memory, but in the device.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        match error.errno()? {
            libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP => Some(Self::Unpinnable),
            libc::ENOMEM => Some(Self::OutOfMemory),
            _ => None,
        }
    }
}

/// The refused ranges of one device. See the module.
#[derive(Debug)]
pub(crate) struct Refusals {
    slots: [Slot; SLOTS],
    /// Whether there may be any.
    any: AtomicBool,
    /// The slot that the next refusal replaces. Held while a slot is written.
    next: Mutex<usize>,
    /// Counts the calls of [`Refusals::invalidate`].
    generation: AtomicU64,
}

#[derive(Debug, Default)]
struct Slot {
    start: AtomicU64,
    /// 0: the slot is free.
    end: AtomicU64,
    /// The reason is [`Reason::OutOfMemory`].
    out_of_memory: AtomicBool,
    /// How many unpins the device had seen when it refused.
    unpins: AtomicU64,
    /// Requests since the refusal.
    asked: AtomicU32,
    /// Something was invalidated while the driver refused: perhaps this range.
    unconfirmed: AtomicBool,
}

impl Default for Refusals {
    fn default() -> Self {
        let slots = std::array::from_fn(|_| Slot::default());
        let generation = AtomicU64::new(0);
        Self { slots, any: AtomicBool::new(false), next: Mutex::default(), generation }
    }
}

impl Refusals {
    /// Whether `range` is known to be refused, and why. `unpins`: as in [`Refusals::insert`].
    /// `events`: whether unmap events arrive.
    pub(super) fn find(&self, range: &Range<u64>, unpins: u64, events: bool) -> Option<Reason> {
        self.slots_if_any().find_map(|slot| {
            let refused = slot.range();
            if refused.is_empty() || refused.start < range.start || range.end < refused.end {
                return None;
            }
            if slot.out_of_memory.load(Ordering::Relaxed) {
                return (slot.unpins.load(Ordering::Relaxed) == unpins)
                    .then_some(Reason::OutOfMemory);
            }
            let asked = slot.asked.fetch_add(1, Ordering::Relaxed);
            let retry = asked % RETRY == RETRY - 1;
            if retry && slot.unconfirmed.load(Ordering::Relaxed) {
                slot.end.store(0, Ordering::Relaxed);
                return None;
            }
            (events || !retry).then_some(Reason::Unpinnable)
        })
    }

    /// To be read before the driver is asked, for [`Refusals::insert`].
    pub(super) fn generation(&self) -> u64 {
        // Acquire: the driver is asked after this load. Otherwise it could look at the memory first,
        // and the load could then count an invalidation of what it saw as an earlier one.
        self.generation.load(Ordering::Acquire)
    }

    /// Remembers that `range` was refused when `unpins` pins of the device had been given back.
    /// `generation`: that of before the driver was asked.
    pub(super) fn insert(&self, range: &Range<u64>, reason: Reason, unpins: u64, generation: u64) {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.slots.iter().position(|slot| slot.range() == *range);
        let at = known.unwrap_or_else(|| {
            let at = *next;
            *next = (at + 1) % SLOTS;
            at
        });
        let slot = &self.slots[at];
        slot.end.store(0, Ordering::Relaxed);
        slot.start.store(range.start, Ordering::Relaxed);
        slot.out_of_memory.store(reason == Reason::OutOfMemory, Ordering::Relaxed);
        slot.unpins.store(unpins, Ordering::Relaxed);
        slot.asked.store(0, Ordering::Relaxed);
        slot.unconfirmed.store(true, Ordering::Relaxed);
        // Release: pairs with the load in `Slot::range`, so that a reader who finds this range finds
        // the fields above as well. Without it, it could take an old reason for the new one.
        slot.end.store(range.end, Ordering::Release);
        self.any.store(true, Ordering::Relaxed);
        // Pairs with the fence in `invalidate`: either the load below sees the new generation, or
        // `invalidate` sees the range that was just stored. Without the fences it could be neither, and
        // a refusal of memory that is gone would stay.
        fence(Ordering::SeqCst);
        if self.generation.load(Ordering::Relaxed) == generation {
            slot.unconfirmed.store(false, Ordering::Relaxed);
        }
    }

    /// Forgets what `range` touches. Takes no lock and allocates nothing.
    pub(super) fn invalidate(&self, range: &Range<u64>) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `insert`.
        fence(Ordering::SeqCst);
        for slot in self.slots_if_any() {
            let refused = slot.range();
            if refused.start < range.end && range.start < refused.end {
                slot.end.store(0, Ordering::Relaxed);
            }
        }
    }

    fn slots_if_any(&self) -> impl Iterator<Item = &Slot> {
        let slots = if self.any.load(Ordering::Relaxed) { &self.slots[..] } else { &[] };
        slots.iter()
    }
}

impl Slot {
    fn range(&self) -> Range<u64> {
        let end = self.end.load(Ordering::Acquire);
        self.start.load(Ordering::Relaxed)..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: bool = true;

    fn refused<const N: usize>(ranges: [(u64, u64); N]) -> Refusals {
        let refusals = Refusals::default();
        for (start, end) in ranges {
            refusals.insert(&(start..end), Reason::Unpinnable, 0, 0);
        }
        refusals
    }

    #[test]
    fn a_range_is_refused_if_it_contains_a_refused_one_and_its_parts_are_not() {
        let refusals = refused([(0x2000, 0x4000)]);
        let find = |range| refusals.find(&range, 0, EVENTS);
        assert_eq!(find(0x2000..0x4000), Some(Reason::Unpinnable));
        assert_eq!(find(0x1000..0x5000), Some(Reason::Unpinnable));
        assert_eq!(find(0x2000..0x3000), None, "the other page may be the bad one");
        assert_eq!(find(0x1000..0x3000), None);
        assert_eq!(find(0x4000..0x5000), None);
    }

    #[test]
    fn an_unmapped_byte_forgets_the_refusals_it_touches() {
        let refusals = refused([(0x2000, 0x4000), (0x6000, 0x8000)]);
        refusals.invalidate(&(0x3fff..0x6000));
        assert_eq!(refusals.find(&(0x2000..0x4000), 0, EVENTS), None);
        assert_eq!(refusals.find(&(0x6000..0x8000), 0, EVENTS), Some(Reason::Unpinnable));
    }

    #[test]
    fn a_lack_of_memory_is_forgotten_when_something_was_unpinned() {
        let refusals = Refusals::default();
        refusals.insert(&(0x2000..0x4000), Reason::OutOfMemory, 7, 0);
        assert_eq!(refusals.find(&(0x2000..0x4000), 7, EVENTS), Some(Reason::OutOfMemory));
        assert_eq!(refusals.find(&(0x2000..0x4000), 8, EVENTS), None);
    }

    #[test]
    fn without_events_one_request_in_many_is_tried_again() {
        let refusals = refused([(0x2000, 0x4000)]);
        let tried = (0..2 * RETRY).filter(|_| refusals.find(&(0x2000..0x4000), 0, false).is_none());
        assert_eq!(tried.count(), 2);
    }

    #[test]
    fn a_refusal_that_an_invalidation_overlapped_is_forgotten_after_some_requests() {
        let range = 0x2000..0x4000;
        let refusals = Refusals::default();
        let before = refusals.generation();
        refusals.invalidate(&range);
        refusals.insert(&range, Reason::Unpinnable, 0, before);
        let find = || refusals.find(&range, 0, EVENTS);
        assert!((1..RETRY).all(|_| find() == Some(Reason::Unpinnable)));
        assert_eq!([find(), find()], [None; 2], "forgotten: a copy may look more than once");
        refusals.insert(&range, Reason::Unpinnable, 0, refusals.generation());
        assert!((0..=2 * RETRY).all(|_| find() == Some(Reason::Unpinnable)), "confirmed now");
    }

    #[test]
    fn the_oldest_refusal_makes_room_and_one_range_takes_one_slot() {
        let range = |number: u64| number * 0x1000..(number + 1) * 0x1000;
        let refusals = refused([(0x1000, 0x2000), (0x1000, 0x2000)]);
        (2..=SLOTS as u64).for_each(|n| refusals.insert(&range(n), Reason::Unpinnable, 0, 0));
        assert!(refusals.find(&range(1), 0, EVENTS).is_some(), "the table is just full");
        refusals.insert(&range(100), Reason::Unpinnable, 0, 0);
        assert!(refusals.find(&range(1), 0, EVENTS).is_none());
        assert!(refusals.find(&range(100), 0, EVENTS).is_some());
    }
}
