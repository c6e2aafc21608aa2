//! Host memory that the driver would not pin.
//!
//! A driver logs an error for every refused pin, and the copy goes through bounce buffers anyway. So
//! the same is not tried again:
//!
//! * A read-only mapping: nothing that touches it. The driver pins for writing, so that all of
//!   the mapping is refused, in whatever pieces it is copied. Which mapping it is says [`mappings`].
//! * Other memory (not mapped, of a device, of a file that cannot be pinned), or too little memory for
//!   the pin: no range that contains the refused one. Its parts may be fine.
//!
//! A refusal is forgotten
//!
//! * when memory of it is unmapped, or the process forks ([`super::invalidate`]), or the cache is
//!   turned off;
//! * when memory of it is registered ([`super::registered`]), while unmap events are on. Without
//!   them UCX has no cache of registrations either and registers for every message: then
//!   registering says nothing;
//! * when [`SLOTS`] newer ones have come;
//! * if memory had run out: when less is pinned on this device than then. A copy that pins for itself alone
//!   and unpins does not change that.
//!
//! Nobody says when `mprotect` makes memory writable, when other programs free memory, or, without events, when
//! memory is unmapped. So every [`RETRY`]th request looks again: at the process's mappings if it was a read-only one,
//! which the kernel logs nothing of; otherwise the driver is asked, unless events are on and memory had not run out.
//! A read-only mapping is looked at again when it is registered, too, and not forgotten: a program may register each of
//! its tensors.
//!
//! While the driver refuses a range, another thread may unmap it and map other memory there:
//! `invalidate` finds nothing to forget yet. So a refusal is *unconfirmed* if any invalidation came
//! between the request to the driver and its entry here, and is forgotten after [`RETRY`] requests. It
//! is entered all the same: a program that often unmaps other memory would otherwise have every
//! request refused anew, with an error line each.
//!
//! Readers take no lock and `invalidate` may run inside `free`. The fields of a slot are not read as
//! a unit, so a reader may combine an old start with a new end. What follows is a wrong answer for
//! one copy: it bounces, or it tries a pin that is refused again. Both are correct copies.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use super::mappings;
use crate::Error;

/// Refusals that are remembered for each device. A model's weights may come in a hundred read-only files.
pub(super) const SLOTS: usize = 256;
/// One request in this many looks whether a refusal still holds. See the module for which.
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
    /// Counts the calls of [`Refusals::for_touched`].
    generation: AtomicU64,
}

#[derive(Debug, Default)]
struct Slot {
    start: AtomicU64,
    /// 0: the slot is free.
    end: AtomicU64,
    /// The reason is [`Reason::OutOfMemory`].
    out_of_memory: AtomicBool,
    /// The range is a read-only mapping: any part of it is refused.
    mapping: AtomicBool,
    /// How many bytes were pinned on the device when it refused.
    pinned: AtomicU64,
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
    /// Whether `range` is known to be refused, and why. `pinned`: as in [`Refusals::insert`].
    /// `events`: whether unmap events arrive.
    pub(super) fn find(&self, range: &Range<u64>, pinned: u64, events: bool) -> Option<Reason> {
        self.slots_if_any().find_map(|slot| {
            let refused = slot.range();
            let mapping = slot.mapping.load(Ordering::Relaxed);
            let contained = range.start <= refused.start && refused.end <= range.end;
            if refused.is_empty() || !(contained || mapping && overlap(&refused, range)) {
                return None;
            }
            let out_of_memory = slot.out_of_memory.load(Ordering::Relaxed);
            let retry = slot.asked.fetch_add(1, Ordering::Relaxed) % RETRY == RETRY - 1;
            let holds = if mapping {
                !retry || mappings::read_only(range).is_some()
            } else if out_of_memory {
                !retry && pinned >= slot.pinned.load(Ordering::Relaxed)
            } else {
                !retry || events && !slot.unconfirmed.load(Ordering::Relaxed)
            };
            if !holds {
                slot.end.store(0, Ordering::Relaxed);
                return None;
            }
            Some(if out_of_memory { Reason::OutOfMemory } else { Reason::Unpinnable })
        })
    }

    /// To be read before the driver is asked, for [`Refusals::insert`].
    pub(super) fn generation(&self) -> u64 {
        // Acquire: the driver is asked after this load. Otherwise it could look at the memory first,
        // and the load could then count an invalidation of what it saw as an earlier one.
        self.generation.load(Ordering::Acquire)
    }

    /// Remembers that `range`, whole pages, was refused when so many bytes were `pinned` on the device.
    /// `generation`: that of before the driver was asked.
    pub(super) fn insert(&self, range: &Range<u64>, reason: Reason, pinned: u64, generation: u64) {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let position = |wanted: &dyn Fn(Range<u64>) -> bool| {
            self.slots.iter().position(|slot| wanted(slot.range()))
        };
        let known = position(&|refused| refused == *range);
        let at = known.or_else(|| position(&|refused| refused.end == 0)).unwrap_or_else(|| {
            let at = *next;
            *next = (at + 1) % SLOTS;
            at
        });
        let slot = &self.slots[at];
        slot.end.store(0, Ordering::Relaxed);
        slot.start.store(range.start, Ordering::Relaxed);
        slot.out_of_memory.store(reason == Reason::OutOfMemory, Ordering::Relaxed);
        slot.mapping.store(false, Ordering::Relaxed);
        slot.pinned.store(pinned, Ordering::Relaxed);
        slot.asked.store(0, Ordering::Relaxed);
        slot.unconfirmed.store(true, Ordering::Relaxed);
        // Release: pairs with the load in `Slot::range`, so that a reader who finds this range finds
        // the fields above as well. Without it, it could take an old reason for the new one.
        slot.end.store(range.end, Ordering::Release);
        self.any.store(true, Ordering::Relaxed);
        // Pairs with the fence in `for_touched`: either the load below sees the new generation, or
        // `for_touched` sees the range that was just stored. Without the fences it could be neither, and
        // a refusal of memory that is gone would stay.
        fence(Ordering::SeqCst);
        if self.generation.load(Ordering::Relaxed) == generation {
            slot.unconfirmed.store(false, Ordering::Relaxed);
        }
        // Only now, because it takes long. An invalidation meanwhile is missed, which a later request notices.
        if reason == Reason::Unpinnable
            && let Some(mapping) = mappings::read_only(range)
        {
            slot.end.store(0, Ordering::Relaxed);
            slot.start.store(mapping.start, Ordering::Relaxed);
            slot.mapping.store(true, Ordering::Relaxed);
            // Release: as above.
            slot.end.store(mapping.end, Ordering::Release);
        }
    }

    /// Forgets what `range` touches: it is unmapped. Takes no lock and allocates nothing.
    pub(super) fn invalidate(&self, range: &Range<u64>) {
        self.for_touched(range, |slot| slot.end.store(0, Ordering::Relaxed));
    }

    /// Forgets what `range` touches, or has the next request look at it again: it was registered.
    pub(super) fn registered(&self, range: &Range<u64>) {
        self.for_touched(range, |slot| {
            if slot.mapping.load(Ordering::Relaxed) {
                slot.asked.store(RETRY - 1, Ordering::Relaxed);
            } else {
                slot.end.store(0, Ordering::Relaxed);
            }
        });
    }

    fn for_touched(&self, range: &Range<u64>, act: impl Fn(&Slot)) {
        self.generation.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `insert`.
        fence(Ordering::SeqCst);
        for slot in self.slots_if_any() {
            if overlap(&slot.range(), range) {
                act(slot);
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

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

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
    fn a_lack_of_memory_is_forgotten_when_less_is_pinned_and_after_some_requests() {
        let range = 0x2000..0x4000;
        let refusals = Refusals::default();
        let find = |pinned| refusals.find(&range, pinned, EVENTS);
        refusals.insert(&range, Reason::OutOfMemory, 7, 0);
        assert_eq!([find(7), find(8), find(7)], [Some(Reason::OutOfMemory); 3]);
        assert_eq!(find(6), None);
        refusals.insert(&range, Reason::OutOfMemory, 7, 0);
        assert!((1..RETRY).all(|_| find(7).is_some()));
        assert_eq!(find(7), None, "others may have freed memory");
    }

    #[test]
    fn without_events_one_request_in_many_is_tried_again() {
        let refusals = refused([(0x2000, 0x4000)]);
        let tried = (0..2 * RETRY).filter(|_| {
            let tried = refusals.find(&(0x2000..0x4000), 0, false).is_none();
            if tried {
                refusals.insert(&(0x2000..0x4000), Reason::Unpinnable, 0, 0);
            }
            tried
        });
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
        refusals.insert(&range(1000), Reason::Unpinnable, 0, 0);
        assert!(refusals.find(&range(1), 0, EVENTS).is_none());
        assert!(refusals.find(&range(1000), 0, EVENTS).is_some());
        refusals.invalidate(&range(9));
        refusals.insert(&range(1001), Reason::Unpinnable, 0, 0);
        assert!(refusals.find(&range(2), 0, EVENTS).is_some(), "a free slot is taken first");
    }

    /// Three mappings in a row of four pages each, the middle one read-only.
    struct Mapped(u64);

    impl Mapped {
        const PAGE: u64 = 4096;

        fn new() -> Self {
            let (len, access) = (12 * Self::PAGE as usize, ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: a fresh mapping.
            let at =
                unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
            let mapped = Self(at.unwrap() as u64);
            mapped.protect(4..8, MprotectFlags::READ);
            mapped
        }

        fn pages(&self, pages: Range<u64>) -> Range<u64> {
            self.0 + pages.start * Self::PAGE..self.0 + pages.end * Self::PAGE
        }

        fn protect(&self, pages: Range<u64>, access: MprotectFlags) {
            let range = self.pages(pages);
            let len = (range.end - range.start) as usize;
            // SAFETY: nobody uses this memory.
            unsafe { mprotect(range.start as *mut _, len, access) }.unwrap();
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: our own mapping.
            unsafe { munmap(self.0 as *mut _, 12 * Self::PAGE as usize) }.unwrap();
        }
    }

    #[test]
    fn whatever_touches_a_refused_read_only_mapping_is_refused_and_its_neighbours_are_not() {
        let mapped = Mapped::new();
        let refusals = Refusals::default();
        refusals.insert(&mapped.pages(0..5), Reason::Unpinnable, 0, 0);
        let is_refused = |pages| refusals.find(&mapped.pages(pages), 0, EVENTS).is_some();
        assert!([4..5, 7..8, 4..8, 3..5, 7..9, 0..12].into_iter().all(is_refused));
        assert!(![0..4, 8..12].into_iter().any(is_refused));
        // Each tensor of a file may be registered.
        refusals.registered(&mapped.pages(5..6));
        assert!(is_refused(6..7) && is_refused(5..6));
        refusals.invalidate(&mapped.pages(5..6));
        assert!(!is_refused(6..7), "other memory may be there now");
    }

    #[test]
    fn a_mapping_that_becomes_writable_is_tried_again_when_registered_and_after_some_requests() {
        let mapped = Mapped::new();
        let refusals = Refusals::default();
        refusals.insert(&mapped.pages(4..8), Reason::Unpinnable, 0, 0);
        for events in [true, false] {
            let refused = |_| refusals.find(&mapped.pages(5..6), 0, events).is_some();
            assert!((0..2 * RETRY).all(refused), "it is read-only still");
        }
        mapped.protect(4..8, MprotectFlags::READ | MprotectFlags::WRITE);
        let find = || refusals.find(&mapped.pages(5..6), 0, EVENTS);
        assert!((1..RETRY).all(|_| find().is_some()));
        assert_eq!([find(), find()], [None; 2]);

        mapped.protect(4..8, MprotectFlags::READ);
        refusals.insert(&mapped.pages(4..8), Reason::Unpinnable, 0, 0);
        assert!(find().is_some());
        mapped.protect(4..8, MprotectFlags::READ | MprotectFlags::WRITE);
        refusals.registered(&mapped.pages(5..6));
        assert_eq!(find(), None, "at once");
    }
}
