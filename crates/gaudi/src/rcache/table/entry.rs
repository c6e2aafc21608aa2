//! One range in the table, and the word that says who may touch it.
//!
//! An entry is never freed while the table lives, only used again. So whoever finds one, even by a
//! slot that was read long ago, can look at its state, and the state tells whether it is still what
//! was looked for:
//!
//! * `READY`: the range and the value are set.
//! * `GONE`: memory of the range went away. `DROPPED`: the table gave it up (evicted, replaced).
//!   With either the entry is *marked*: nobody is given its value any more, for good.
//! * The rest counts visitors, who are inside for a few instructions. One who came before the mark
//!   may look at the value; so the value is taken out only when the entry is marked and has no
//!   visitor. Those who come after the mark look at nothing.

use core::ops::Range;

use super::super::sync::{AtomicBool, AtomicPtr, AtomicU64, Ordering, UnsafeCell};

const READY: u64 = 1 << 63;
/// Memory of the range went away.
const GONE: u64 = 1 << 62;
/// The table gave the range up.
pub(super) const DROPPED: u64 = 1 << 61;
const MARKED: u64 = GONE | DROPPED;
const VISITORS: u64 = (1 << 32) - 1;

/// A cache line of its own: most of a lookup is waiting for it.
#[repr(align(64))]
pub(crate) struct Entry<P> {
    state: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    value: UnsafeCell<Option<P>>,
    /// Found since the last round of eviction.
    used: AtomicBool,
    /// The next in the list of marked entries.
    pub(super) next: AtomicPtr<Entry<P>>,
}

// SAFETY: the value is reached by the rules above only: cloned by visitors (shared) while it stands,
// written and taken by the holder of the table's lock while no visitor may look.
unsafe impl<P: Send + Sync> Sync for Entry<P> {}
// SAFETY: a value may move to another thread with its entry.
unsafe impl<P: Send> Send for Entry<P> {}

/// Someone inside.
struct Visit<'a, P> {
    entry: &'a Entry<P>,
    /// The state on entering.
    state: u64,
}

impl<P> Drop for Visit<'_, P> {
    fn drop(&mut self) {
        // What was read in here was read before whoever takes the value sees this.
        self.entry.state.fetch_sub(1, Ordering::Release);
    }
}

impl<P> Entry<P> {
    pub(super) fn unused() -> Self {
        Self {
            state: AtomicU64::new(0),
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            value: UnsafeCell::new(None),
            used: AtomicBool::new(false),
            next: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    fn visit(&self) -> Visit<'_, P> {
        // Acquire: sees what was written before the entry was made ready.
        Visit { entry: self, state: self.state.fetch_add(1, Ordering::Acquire) }
    }

    /// Start and value, if it is ready, not marked, and holds `[first, last]`. Never waits.
    pub(super) fn read(&self, first: u64, last: u64) -> Option<(u64, P)>
    where
        P: Clone,
    {
        let visit = self.visit();
        if visit.state & (READY | MARKED) != READY {
            return None;
        }
        // The entry stays what it is until the visit ends.
        let range = self.range();
        if first < range.start || range.end <= last {
            return None;
        }
        // SAFETY: ready and not marked when the visit began, so nobody writes until it ends.
        let value = self.value.with(|value| unsafe { (*value).clone() })?;
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        Some((range.start, value))
    }

    /// Marks it `GONE` if it has memory of `range`; whether it was the first mark. Never waits.
    pub(super) fn lose(&self, range: &Range<u64>) -> bool {
        let visit = self.visit();
        let own = self.range();
        // An unused entry has an empty range. One that is just being made for another range may be
        // hit by mistake (its bounds are two words): it is then used once and not kept.
        let touched = own.start < range.end && range.start < own.end;
        visit.state & MARKED == 0 && touched && self.mark(GONE)
    }

    /// Marks it; whether it was the first mark. For a visitor, or the holder of the table's lock.
    pub(super) fn mark(&self, mark: u64) -> bool {
        self.state.fetch_or(mark, Ordering::AcqRel) & MARKED == 0
    }

    /// Whether memory of it went away.
    pub(super) fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) & GONE != 0
    }

    /// Whether it has a value that may be given out.
    pub(super) fn is_valid(&self) -> bool {
        self.state.load(Ordering::Acquire) & (READY | MARKED) == READY
    }

    pub(super) fn range(&self) -> Range<u64> {
        self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed)
    }

    /// For an unused entry: what it will stand for. Only for the holder of the table's lock.
    pub(super) fn begin(&self, range: &Range<u64>) {
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        // Found again it has earned its place; until then it is the first to leave.
        self.used.store(false, Ordering::Relaxed);
    }

    /// Sets the value and makes the entry ready; a mark that it got meanwhile stays.
    ///
    /// # Safety
    /// Only for the holder of the table's lock, once after [`Entry::begin`].
    pub(super) unsafe fn fill(&self, value: P) {
        // SAFETY: not ready, so no visitor looks; and the lock keeps everyone else away.
        self.value.with_mut(|place| unsafe { *place = Some(value) });
        self.state.fetch_or(READY, Ordering::Release);
    }

    /// The value, for as long as `look` takes.
    ///
    /// # Safety
    /// Only for the holder of the table's lock, who alone writes it.
    pub(super) unsafe fn look<R>(&self, look: impl FnOnce(Option<&P>) -> R) -> R {
        // SAFETY: the caller's promise; visitors only read.
        self.value.with(|value| look(unsafe { (*value).as_ref() }))
    }

    /// Whether it was found since this was last asked.
    pub(super) fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
    }

    /// Takes the value of a marked entry and makes the entry unused, unless there is a visitor.
    ///
    /// # Safety
    /// Only for the holder of the table's lock.
    pub(super) unsafe fn retire(&self) -> Option<Option<P>> {
        // Acquire: after the last look of those who have left.
        let state = self.state.load(Ordering::Acquire);
        if state & MARKED == 0 || state & VISITORS != 0 {
            return None;
        }
        // SAFETY: marked, so those who come look at nothing; and those who could have left.
        let value = self.value.with_mut(|place| unsafe { (*place).take() });
        // Before the marks go: nothing to lose here for those who come late.
        self.start.store(0, Ordering::Relaxed);
        self.end.store(0, Ordering::Relaxed);
        self.state.fetch_and(!(READY | MARKED), Ordering::Release);
        Some(value)
    }
}
