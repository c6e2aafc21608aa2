//! One cached range, and the word of state that says who may use it.
//!
//! A `CachedRange` is never freed while the table lives, only reused. So a thread that finds one, even
//! by a pointer that it read long ago, can load its state, and the state tells whether the range is
//! still what it was looking for:
//!
//! * `READY`: the range and its value are set.
//! * `GONE`: memory of the range was unmapped. `DROPPED`: the table gave the range up (evicted,
//!   replaced). With either, the range is *marked*: no lookup returns it any more.
//! * `HIDDEN`: no lookup returns it, but it is not marked yet: a larger range is replacing it.
//! * `USED`: found since the last round of eviction.
//! * The lower half is a reference count: of copies that use the value, and of threads that inspect
//!   the range for a few instructions. A range is reused, and its value taken out of the table, only
//!   when it is marked and the count is zero. A reference that is taken after the mark gives no right
//!   to the value.

use core::ops::Range;

use super::super::sync::{AtomicU32, AtomicU64, Ordering};
use super::PAGE;

const READY: u64 = 1 << 63;
/// Memory of the range was unmapped.
const GONE: u64 = 1 << 62;
/// The table gave the range up.
pub(super) const DROPPED: u64 = 1 << 61;
const HIDDEN: u64 = 1 << 60;
const USED: u64 = 1 << 59;
const MARKED: u64 = GONE | DROPPED;
const REFERENCES: u64 = (1 << 32) - 1;

/// The pages of a range in one word: the first page, and in this many lower bits their number.
const COUNT_BITS: u32 = 28;
/// No range is longer.
pub(super) const LONGEST: u64 = ((1 << COUNT_BITS) - 1) * PAGE;

/// All that a lookup reads, in half a cache line. With many ranges most of a lookup is the wait for
/// this line; the smaller it is, the more of them stay in the near caches.
#[repr(align(32))]
pub(crate) struct CachedRange {
    state: AtomicU64,
    pages: AtomicU64,
    /// A number that came with the value: the device address of the first byte.
    base: AtomicU64,
    /// Its index among the table's ranges; never changes.
    pub(super) index: u32,
    /// The next in the list of marked ranges: see `Table::push_marked`.
    pub(super) next: AtomicU32,
}

impl CachedRange {
    pub(super) fn unused(index: u32) -> Self {
        Self {
            state: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            base: AtomicU64::new(0),
            index,
            next: AtomicU32::new(0),
        }
    }

    /// Takes a reference; the state before. It must be released.
    pub(super) fn acquire(&self) -> u64 {
        // Acquire: pairs with the `fetch_or` in `publish`. Who sees READY sees the pages and the base
        // that belong to it; without it, it could use the address of the range's previous tenant.
        self.state.fetch_add(1, Ordering::Acquire)
    }

    /// Takes one more reference, for the owner of another one.
    pub(super) fn acquire_again(&self) {
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases a reference; whether it was the last one of a marked range, which may be swept now.
    pub(super) fn release(&self) -> bool {
        // Release: pairs with the load in `retire`. What was read under this reference was read before
        // the range is reused; without it, a late read could see the next range's pages.
        let before = self.state.fetch_sub(1, Ordering::Release);
        before & MARKED != 0 && before & REFERENCES == 1
    }

    /// For a caller whose `acquire` returned `state`: start and base, if the range was ready then,
    /// neither marked nor hidden, and contains `[first, last]`. They stay valid until `release`.
    pub(super) fn read(&self, state: u64, first: u64, last: u64) -> Option<(u64, u64)> {
        if state & (READY | MARKED | HIDDEN) != READY {
            return None;
        }
        let range = self.range();
        if first < range.start || range.end <= last {
            return None;
        }
        if state & USED == 0 {
            self.state.fetch_or(USED, Ordering::Relaxed);
        }
        Some((range.start, self.base.load(Ordering::Relaxed)))
    }

    /// For a caller whose `acquire` returned `state`: marks the range `GONE` if it touches `unmapped`;
    /// whether that was the first mark.
    pub(super) fn mark_if_touched(&self, state: u64, unmapped: &Range<u64>) -> bool {
        let own = self.range();
        // An unused one is empty.
        let touched = own.start < unmapped.end && unmapped.start < own.end;
        state & MARKED == 0 && touched && self.mark(GONE)
    }

    /// Marks it; whether that was the first mark. For the owner of a reference or of the table's lock.
    pub(super) fn mark(&self, mark: u64) -> bool {
        self.state.fetch_or(mark, Ordering::AcqRel) & MARKED == 0
    }

    /// Hides it from lookups. It can still be marked by an unmap event. For the owner of the table's
    /// lock, who marks it next.
    pub(super) fn hide(&self) {
        self.state.fetch_or(HIDDEN, Ordering::AcqRel);
    }

    /// Whether memory of it was unmapped.
    pub(super) fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) & GONE != 0
    }

    /// Whether lookups may return it.
    pub(super) fn is_valid(&self) -> bool {
        self.state.load(Ordering::Acquire) & (READY | MARKED) == READY
    }

    /// Whether nobody has a reference at the moment.
    pub(super) fn is_idle(&self) -> bool {
        self.state.load(Ordering::Relaxed) & REFERENCES == 0
    }

    pub(super) fn range(&self) -> Range<u64> {
        let pages = self.pages.load(Ordering::Relaxed);
        let start = (pages >> COUNT_BITS) * PAGE;
        start..start + (pages & ((1 << COUNT_BITS) - 1)) * PAGE
    }

    /// Sets the pages of an unused one. For the owner of the table's lock.
    pub(super) fn set_pages(&self, range: &Range<u64>) {
        let count = (range.end - range.start) / PAGE;
        debug_assert!(count < 1 << COUNT_BITS, "the start is in the bits above");
        self.pages.store(((range.start / PAGE) << COUNT_BITS) | count, Ordering::Relaxed);
    }

    /// Makes it ready; a mark that it got meanwhile stays. For the owner of the table's lock, once
    /// after [`CachedRange::set_pages`].
    pub(super) fn publish(&self, base: u64) {
        self.base.store(base, Ordering::Relaxed);
        // Release: pairs with `acquire`.
        self.state.fetch_or(READY, Ordering::Release);
    }

    /// Whether it was found since the last call. A new range was not: it is the first to be evicted
    /// until it is found again.
    pub(super) fn take_used(&self) -> bool {
        self.state.fetch_and(!USED, Ordering::Relaxed) & USED != 0
    }

    /// Makes a marked range without references unused; whether it did. For the owner of the table's
    /// lock.
    pub(super) fn retire(&self) -> bool {
        // Acquire: pairs with `release`.
        let state = self.state.load(Ordering::Acquire);
        if state & MARKED == 0 || state & REFERENCES != 0 {
            return false;
        }
        // Before the marks go: a thread that comes late finds an empty range and marks nothing.
        self.pages.store(0, Ordering::Relaxed);
        self.state.fetch_and(!(READY | MARKED | HIDDEN | USED), Ordering::Release);
        true
    }
}
