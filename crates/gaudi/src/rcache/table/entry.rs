//! One range in the table, and the word that says who may touch it.
//!
//! An entry is never freed while the table lives, only used again. So whoever finds one, even by a
//! slot that was read long ago, can look at its state, and the state tells whether it is still what
//! was looked for:
//!
//! * `READY`: the range and what belongs to it are set.
//! * `GONE`: memory of the range went away. `DROPPED`: the table gave it up (evicted, replaced).
//!   With either the entry is *marked*: nobody is given it any more, for good.
//! * `HIDDEN`: nobody is given it from now on, but it is not marked yet: a larger range is taking its
//!   place.
//! * `USED`: found since the last round of eviction.
//! * The rest counts visitors: those who were given the entry, until they have done what they wanted
//!   it for (a copy), and those who only look, for a few instructions. One who came before the mark
//!   relies on the range; so an entry is used again, and its value taken out of the table, only when
//!   it is marked and has no visitor. Those who come after the mark look at nothing.

use core::ops::Range;

use super::super::sync::{AtomicU32, AtomicU64, Ordering};
use super::PAGE;

const READY: u64 = 1 << 63;
/// Memory of the range went away.
const GONE: u64 = 1 << 62;
/// The table gave the range up.
pub(super) const DROPPED: u64 = 1 << 61;
const HIDDEN: u64 = 1 << 60;
const USED: u64 = 1 << 59;
const MARKED: u64 = GONE | DROPPED;
const VISITORS: u64 = (1 << 32) - 1;

/// The pages of a range in one word: the first, and below it how many in this many bits.
const COUNT_BITS: u32 = 28;
/// No range is longer.
pub(super) const LONGEST: u64 = ((1 << COUNT_BITS) - 1) * PAGE;

/// All that a lookup reads, in half a cache line, and nothing else: with many ranges most of a lookup
/// is waiting for this, and the fewer bytes there are of it the nearer to the processor they stay.
#[repr(align(32))]
pub(crate) struct Entry {
    state: AtomicU64,
    pages: AtomicU64,
    /// What the maker of the value gave with it: where the first byte of the range is seen.
    base: AtomicU64,
    /// Which of the table's entries this is; never changes.
    pub(super) place: u32,
    /// The next in the list of marked entries: see `Table::list_marked`.
    pub(super) next: AtomicU32,
}

impl Entry {
    pub(super) fn unused(place: u32) -> Self {
        Self {
            state: AtomicU64::new(0),
            pages: AtomicU64::new(0),
            base: AtomicU64::new(0),
            place,
            next: AtomicU32::new(0),
        }
    }

    /// Counts a visitor in; the state that it finds. It must leave again.
    pub(super) fn enter(&self) -> u64 {
        // Acquire: sees what was written before the entry was made ready.
        self.state.fetch_add(1, Ordering::Acquire)
    }

    /// Counts a visitor in beside another one, who was given the entry.
    pub(super) fn enter_with(&self) {
        self.state.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a visitor out; whether it was the last of a marked entry, which may be swept now.
    pub(super) fn leave(&self) -> bool {
        // What was read in here was read before whoever uses the entry again sees this.
        let before = self.state.fetch_sub(1, Ordering::Release);
        before & MARKED != 0 && before & VISITORS == 1
    }

    /// For a visitor who found this state: start and base, if the entry was ready then and not marked
    /// nor hidden, and holds `[first, last]`. It stays like that until the visitor leaves.
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

    /// For a visitor who found this state: marks the entry `GONE` if it has memory of `range`; whether
    /// it was the first mark.
    pub(super) fn lose(&self, state: u64, range: &Range<u64>) -> bool {
        let own = self.range();
        // An unused entry has an empty range.
        let touched = own.start < range.end && range.start < own.end;
        state & MARKED == 0 && touched && self.mark(GONE)
    }

    /// Marks it; whether it was the first mark. For a visitor, or the holder of the table's lock.
    pub(super) fn mark(&self, mark: u64) -> bool {
        self.state.fetch_or(mark, Ordering::AcqRel) & MARKED == 0
    }

    /// Nobody who looks for it now finds it; memory of it may still go, and marks it then. For the
    /// holder of the table's lock, who marks it next.
    pub(super) fn hide(&self) {
        self.state.fetch_or(HIDDEN, Ordering::AcqRel);
    }

    /// Whether memory of it went away.
    pub(super) fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) & GONE != 0
    }

    /// Whether it may be given out.
    pub(super) fn is_valid(&self) -> bool {
        self.state.load(Ordering::Acquire) & (READY | MARKED) == READY
    }

    /// Whether nobody has it at the moment.
    pub(super) fn is_idle(&self) -> bool {
        self.state.load(Ordering::Relaxed) & VISITORS == 0
    }

    pub(super) fn range(&self) -> Range<u64> {
        let pages = self.pages.load(Ordering::Relaxed);
        let start = (pages >> COUNT_BITS) * PAGE;
        start..start + (pages & ((1 << COUNT_BITS) - 1)) * PAGE
    }

    /// For an unused entry: which pages it will stand for. Only for the holder of the table's lock.
    pub(super) fn begin(&self, range: &Range<u64>) {
        let count = (range.end - range.start) / PAGE;
        debug_assert!(count < 1 << COUNT_BITS, "the start is in the bits above");
        self.pages.store(((range.start / PAGE) << COUNT_BITS) | count, Ordering::Relaxed);
    }

    /// Makes the entry ready; a mark that it got meanwhile stays. Only for the holder of the table's
    /// lock, once after [`Entry::begin`].
    pub(super) fn fill(&self, base: u64) {
        self.base.store(base, Ordering::Relaxed);
        self.state.fetch_or(READY, Ordering::Release);
    }

    /// Whether it was found since this was last asked. A new one was not: found again it has earned
    /// its place, until then it is the first to leave.
    pub(super) fn take_used(&self) -> bool {
        self.state.fetch_and(!USED, Ordering::Relaxed) & USED != 0
    }

    /// Makes a marked entry unused, unless there is a visitor; whether it did. Only for the holder of
    /// the table's lock.
    pub(super) fn retire(&self) -> bool {
        // Acquire: after the last look of those who have left.
        let state = self.state.load(Ordering::Acquire);
        if state & MARKED == 0 || state & VISITORS != 0 {
            return false;
        }
        // Before the marks go: nothing to lose here for those who come late.
        self.pages.store(0, Ordering::Relaxed);
        self.state.fetch_and(!(READY | MARKED | HIDDEN | USED), Ordering::Release);
        true
    }
}
