//! Host memory that the driver refused to pin.
//!
//! A driver logs an error for every refused pin, and the copy then uses bounce buffers anyway. So these
//! pins are not tried again:
//!
//! * If the refused range touches a read-only mapping: no range that touches this mapping. The driver pins for
//!   writing, so it refuses every part of the mapping. [`mappings`](super::mappings) finds the mapping.
//! * If the memory was of another kind (not mapped, of a device, of a file that cannot be pinned), or memory for
//!   the pin ran out: no range that contains the refused one. Its parts may still be pinned.
//!
//! A refusal is forgotten
//!
//! * when part of its range is unmapped, or the process forks ([`super::invalidate`]), or the cache is
//!   turned off;
//! * when part of its range is registered ([`super::registered`]), while unmap events are on. Without
//!   them UCX has no cache of registrations either and registers for every message: then a
//!   registration means nothing;
//! * when [`SLOTS`] newer refusals have come;
//! * if memory had run out: when less is pinned on this device than at the refusal. A copy that pins only
//!   for itself and unpins does not change that.
//!
//! There is no event when `mprotect` makes memory writable, when other programs free memory, or, without unmap events,
//! when memory is unmapped. So every [`RETRY`]th request checks again. For a read-only mapping it reads the process's
//! mappings, which logs no error. Otherwise it calls the driver, unless events are on and memory had not run out.
//! A read-only mapping is also checked again when it is registered. It is not forgotten then, because a program may
//! register each of its tensors.
//!
//! While the driver refuses a range, another thread may unmap it and map other memory there; `invalidate`
//! then finds no refusal to forget yet. So a refusal is *unconfirmed* if any invalidation came between the
//! call of the driver and the entry here. An unconfirmed refusal is forgotten after [`RETRY`] requests. It
//! is entered all the same: otherwise, in a program that often unmaps other memory, every request would
//! call the driver again, and each would log an error.
//!
//! All of this is done under the cache's lock, except reading the mappings, which takes long: the caller
//! does that when [`Refusals::find`] and [`Refusals::insert`] require it.

use std::ops::Range;

use super::shared::overlap;
use crate::Error;

/// How many refusals are remembered for each device. A model's weights may come in a hundred read-only files.
pub(super) const SLOTS: usize = 256;
/// One request in this many checks whether a refusal still holds. See the module for when.
pub(super) const RETRY: u32 = 256;

/// Why the driver refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The memory itself: not mapped, read-only, or of a kind that cannot be pinned.
    Unpinnable,
    /// Out of memory for the pin, or too much is pinned.
    OutOfMemory,
}

impl Reason {
    /// `None` if the cause is the device, not the memory.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        match error.errno()? {
            libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP => Some(Self::Unpinnable),
            libc::ENOMEM => Some(Self::OutOfMemory),
            _ => None,
        }
    }
}

/// What is known about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    Nothing,
    Refused(Reason),
    /// It touches a mapping that was read-only. The caller reads the mappings: if none is read-only any more,
    /// it calls [`Refusals::forget_mappings`]; otherwise the range is refused.
    LookAgain,
}

/// The refused ranges of one device. See the module.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// Oldest first.
    refused: Vec<Refusal>,
    /// Counts the invalidations.
    generation: u64,
}

#[derive(Debug)]
struct Refusal {
    range: Range<u64>,
    reason: Reason,
    /// Whether the range is a read-only mapping: any part of it is refused.
    mapping: bool,
    /// How many bytes were pinned on the device at the refusal.
    pinned: u64,
    /// Number of requests since the refusal.
    asked: u32,
    /// Memory was invalidated while the driver refused, perhaps this range.
    unconfirmed: bool,
}

impl Refusal {
    fn concerns(&self, range: &Range<u64>) -> bool {
        let contained = range.start <= self.range.start && self.range.end <= range.end;
        contained || self.mapping && overlap(&self.range, range)
    }
}

impl Refusals {
    /// Whether `range` is known to be refused, and why. `pinned`: as in [`Refusals::insert`].
    /// `events`: whether unmap events arrive.
    pub(super) fn find(&mut self, range: &Range<u64>, pinned: u64, events: bool) -> Known {
        while let Some(at) = self.refused.iter().position(|refusal| refusal.concerns(range)) {
            let refusal = &mut self.refused[at];
            refusal.asked = refusal.asked.wrapping_add(1);
            let retry = refusal.asked.is_multiple_of(RETRY);
            let holds = match refusal.reason {
                _ if refusal.mapping && retry => return Known::LookAgain,
                _ if refusal.mapping => true,
                Reason::OutOfMemory => !retry && pinned >= refusal.pinned,
                Reason::Unpinnable => !retry || events && !refusal.unconfirmed,
            };
            if holds {
                return Known::Refused(refusal.reason);
            }
            self.refused.remove(at);
        }
        Known::Nothing
    }

    /// Read this before the driver is called, and pass it to [`Refusals::insert`].
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Remembers that `range`, whole pages, was refused while `pinned` bytes were pinned on the device.
    /// `generation`: the value from before the driver was called. If the reason is `Unpinnable` and `range` touches
    /// a read-only mapping, the caller calls [`Refusals::is_mapping`] next.
    pub(super) fn insert(
        &mut self,
        range: &Range<u64>,
        reason: Reason,
        pinned: u64,
        generation: u64,
    ) {
        self.refused.retain(|refusal| refusal.range != *range);
        if self.refused.len() == SLOTS {
            self.refused.remove(0);
        }
        let unconfirmed = self.generation != generation;
        let (range, mapping, asked) = (range.clone(), false, 0);
        self.refused.push(Refusal { range, reason, mapping, pinned, asked, unconfirmed });
    }

    /// Records that `range`, just refused, touches this read-only mapping. If the mapping was invalidated after
    /// the caller found it, that is missed here; a later request notices.
    pub(super) fn is_mapping(&mut self, range: &Range<u64>, mapping: Range<u64>) {
        if let Some(refusal) = self.refused.iter_mut().find(|refusal| refusal.range == *range) {
            (refusal.range, refusal.mapping) = (mapping, true);
        }
    }

    /// Forgets the read-only mappings that `range` touches: nothing in it is read-only any more.
    pub(super) fn forget_mappings(&mut self, range: &Range<u64>) {
        self.refused.retain(|refusal| !(refusal.mapping && overlap(&refusal.range, range)));
    }

    /// Forgets the refusals that `range` touches, because it is unmapped. Allocates and frees nothing.
    pub(super) fn invalidate(&mut self, range: &Range<u64>) {
        self.generation += 1;
        self.refused.retain(|refusal| !overlap(&refusal.range, range));
    }

    /// Forgets the refusals that `range` touches, because it was registered. For a mapping, the next request checks again.
    pub(super) fn registered(&mut self, range: &Range<u64>) {
        self.generation += 1;
        self.refused.retain(|refusal| refusal.mapping || !overlap(&refusal.range, range));
        for refusal in self.refused.iter_mut().filter(|other| overlap(&other.range, range)) {
            refusal.asked = RETRY - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shared::Shared;
    use super::*;
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    const EVENTS: bool = true;

    fn refused<const N: usize>(ranges: [(u64, u64); N]) -> Shared {
        let cache = Shared::new(None);
        for (start, end) in ranges {
            cache.remember_refusal(&(start..end), Reason::Unpinnable, 0, 0);
        }
        cache
    }

    #[test]
    fn a_range_is_refused_if_it_contains_a_refused_one_and_its_parts_are_not() {
        let cache = refused([(0x2000, 0x4000)]);
        let find = |range| cache.find_refusal(&range, 0, EVENTS);
        assert_eq!(find(0x2000..0x4000), Some(Reason::Unpinnable));
        assert_eq!(find(0x1000..0x5000), Some(Reason::Unpinnable));
        assert_eq!(find(0x2000..0x3000), None, "the other page may be the bad one");
        assert_eq!(find(0x1000..0x3000), None);
        assert_eq!(find(0x4000..0x5000), None);
    }

    #[test]
    fn an_unmapped_byte_forgets_the_refusals_it_touches() {
        let cache = refused([(0x2000, 0x4000), (0x6000, 0x8000)]);
        cache.state().refusals.invalidate(&(0x3fff..0x6000));
        assert_eq!(cache.find_refusal(&(0x2000..0x4000), 0, EVENTS), None);
        assert_eq!(cache.find_refusal(&(0x6000..0x8000), 0, EVENTS), Some(Reason::Unpinnable));
    }

    #[test]
    fn a_lack_of_memory_is_forgotten_when_less_is_pinned_and_after_some_requests() {
        let range = 0x2000..0x4000;
        let cache = Shared::new(None);
        let find = |pinned| cache.find_refusal(&range, pinned, EVENTS);
        cache.remember_refusal(&range, Reason::OutOfMemory, 7, 0);
        assert_eq!([find(7), find(8), find(7)], [Some(Reason::OutOfMemory); 3]);
        assert_eq!(find(6), None);
        cache.remember_refusal(&range, Reason::OutOfMemory, 7, 0);
        assert!((1..RETRY).all(|_| find(7).is_some()));
        assert_eq!(find(7), None, "others may have freed memory");
    }

    #[test]
    fn without_events_one_request_in_many_is_tried_again() {
        let cache = refused([(0x2000, 0x4000)]);
        let tried = (0..2 * RETRY).filter(|_| {
            let tried = cache.find_refusal(&(0x2000..0x4000), 0, false).is_none();
            if tried {
                cache.remember_refusal(&(0x2000..0x4000), Reason::Unpinnable, 0, 0);
            }
            tried
        });
        assert_eq!(tried.count(), 2);
    }

    #[test]
    fn a_refusal_that_an_invalidation_overlapped_is_forgotten_after_some_requests() {
        let range = 0x2000..0x4000;
        let cache = Shared::new(None);
        let before = cache.state().refusals.generation();
        cache.state().refusals.invalidate(&range);
        cache.remember_refusal(&range, Reason::Unpinnable, 0, before);
        let find = || cache.find_refusal(&range, 0, EVENTS);
        assert!((1..RETRY).all(|_| find() == Some(Reason::Unpinnable)));
        assert_eq!([find(), find()], [None; 2], "forgotten: a copy may look more than once");
        let now = cache.state().refusals.generation();
        cache.remember_refusal(&range, Reason::Unpinnable, 0, now);
        assert!((0..=2 * RETRY).all(|_| find() == Some(Reason::Unpinnable)), "confirmed now");
    }

    #[test]
    fn the_oldest_refusal_makes_room_and_one_range_takes_one_slot() {
        let range = |number: u64| number * 0x1000..(number + 1) * 0x1000;
        let cache = refused([(0x1000, 0x2000), (0x1000, 0x2000)]);
        (2..=SLOTS as u64)
            .for_each(|n| cache.remember_refusal(&range(n), Reason::Unpinnable, 0, 0));
        assert!(cache.find_refusal(&range(1), 0, EVENTS).is_some(), "the table is just full");
        cache.remember_refusal(&range(1000), Reason::Unpinnable, 0, 0);
        assert!(cache.find_refusal(&range(1), 0, EVENTS).is_none());
        assert!(cache.find_refusal(&range(1000), 0, EVENTS).is_some());
        cache.state().refusals.invalidate(&range(9));
        cache.remember_refusal(&range(1001), Reason::Unpinnable, 0, 0);
        assert!(cache.find_refusal(&range(2), 0, EVENTS).is_some(), "a free slot is taken first");
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
            // SAFETY: this memory is unused.
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
        let cache = Shared::new(None);
        cache.remember_refusal(&mapped.pages(0..5), Reason::Unpinnable, 0, 0);
        let is_refused = |pages| cache.find_refusal(&mapped.pages(pages), 0, EVENTS).is_some();
        assert!([4..5, 7..8, 4..8, 3..5, 7..9, 0..12].into_iter().all(is_refused));
        assert!(![0..4, 8..12].into_iter().any(is_refused));
        // A program may register each tensor of a file.
        cache.state().refusals.registered(&mapped.pages(5..6));
        assert!(is_refused(6..7) && is_refused(5..6));
        cache.state().refusals.invalidate(&mapped.pages(5..6));
        assert!(!is_refused(6..7), "other memory may be there now");
    }

    #[test]
    fn a_mapping_that_becomes_writable_is_tried_again_when_registered_and_after_some_requests() {
        let mapped = Mapped::new();
        let cache = Shared::new(None);
        cache.remember_refusal(&mapped.pages(4..8), Reason::Unpinnable, 0, 0);
        for events in [true, false] {
            let refused = |_| cache.find_refusal(&mapped.pages(5..6), 0, events).is_some();
            assert!((0..2 * RETRY).all(refused), "it is read-only still");
        }
        mapped.protect(4..8, MprotectFlags::READ | MprotectFlags::WRITE);
        let find = || cache.find_refusal(&mapped.pages(5..6), 0, EVENTS);
        assert!((1..RETRY).all(|_| find().is_some()));
        assert_eq!([find(), find()], [None; 2]);

        mapped.protect(4..8, MprotectFlags::READ);
        cache.remember_refusal(&mapped.pages(4..8), Reason::Unpinnable, 0, 0);
        assert!(find().is_some());
        mapped.protect(4..8, MprotectFlags::READ | MprotectFlags::WRITE);
        cache.state().refusals.registered(&mapped.pages(5..6));
        assert_eq!(find(), None, "at once");
    }
}
