//! Ranges of addresses and a value for each: found without waiting, invalidated at any moment.
//!
//! This is the part of the cache that threads share. It knows nothing of devices or pins: values are
//! of any type and stay in the table until they are swept out. A lookup returns a counted reference
//! ([`RangeRef`]), which keeps the value, and a number that came with it. The rules:
//!
//! * [`Table::find`] takes no lock and has no loop that another thread could prolong.
//! * [`Table::invalidate`] may run anywhere, also inside `free` with the allocator's lock held: it
//!   takes no lock, allocates and frees nothing, and drops no value. When it has returned, no range
//!   that touches the unmapped memory is found any more. The values come out later, in
//!   [`TableGuard::sweep`], when their last reference was released.
//! * Everything else happens under one lock, which neither of these takes. It is held while a value is
//!   made (a driver call), so that two threads never pin the same range at once.
//!
//! Every page has at most one owner in the tree. A range owns all its pages between the first and the
//! last, and those two only if they were free: buffers from `malloc` share such pages with their
//! neighbours. So a lookup that misses at an address looks at the next page too, and `invalidate` looks
//! at one page more on both sides.
//!
//! **The race to avoid:** a new range replaces an old one while memory of the old one is being
//! unmapped. `invalidate` could mark the old range after it was replaced, and never see the new one,
//! which covers the same memory. So [`TableGuard::begin_insert`] stores the new owner, increments
//! `insertions`, and *then* checks whether an old range was marked; `invalidate` marks, and *then*
//! checks whether `insertions` has changed. A `SeqCst` fence stands between the two steps on each side,
//! so at least one of the threads sees the other's write.

pub(super) mod hints;
mod insert;
mod range;
mod tree;
mod writer;

use core::ops::Range;
use core::ptr::{self, NonNull};

use super::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Mutex, Ordering, fence};
use hints::Hints;
pub(crate) use insert::{Bounds, Inserted};
pub(crate) use range::CachedRange;
use range::LONGEST;
pub(crate) use tree::ADDRESS_BITS;
use tree::{PAGE_BITS, Tree};
pub(crate) use writer::{Swept, TableGuard};

pub(crate) const PAGE: u64 = 1 << PAGE_BITS;

/// What a lookup found: where its range starts, the number that came with the value, a reference.
pub(crate) struct Found<'a, P> {
    pub(crate) start: u64,
    pub(crate) base: u64,
    pub(crate) range: RangeRef<'a, P>,
}

/// A counted reference to a range: the value stays in the table until it is dropped.
pub(crate) struct RangeRef<'a, P> {
    table: &'a Table<P>,
    range: &'a CachedRange,
}

impl<P> RangeRef<'_, P> {
    /// Whether it is of this table.
    pub(crate) fn is_of(&self, table: &Table<P>) -> bool {
        ptr::eq(self.table, table)
    }

    /// The same without the lifetime. [`Table::release`] ends it; the table must last until then.
    pub(crate) fn into_raw(self) -> NonNull<CachedRange> {
        let range = NonNull::from(self.range);
        core::mem::forget(self);
        range
    }
}

impl<P> Drop for RangeRef<'_, P> {
    fn drop(&mut self) {
        self.table.release_range(self.range);
    }
}

/// See the [module](self).
pub(crate) struct Table<P> {
    tree: Tree<CachedRange>,
    /// The cache in front of the tree; null until there are ranges. Replaced as their number grows.
    hints: AtomicPtr<Hints<CachedRange>>,
    /// How often new ranges were stored in the tree.
    insertions: AtomicU64,
    /// Head of the linked list of marked ranges, which still have their values and their pages in the
    /// tree: the index of the first plus one; 0 if there are none.
    marked: AtomicU32,
    /// The last reference to a marked range was released since the last sweep.
    released: AtomicBool,
    /// No range was ever outside these bounds: most memory that is unmapped was never pinned.
    lowest: AtomicU64,
    highest: AtomicU64,
    state: Mutex<State<P>>,
}

/// What the lock protects.
struct State<P> {
    /// All ranges; freed with the table.
    chunks: Vec<NonNull<[CachedRange]>>,
    /// Their values, by index.
    values: Vec<Option<P>>,
    /// Indices of unused ranges.
    unused: Vec<u32>,
    /// Of all sizes so far: a reader may still use an old one. Freed with the table.
    hints: Vec<NonNull<Hints<CachedRange>>>,
    /// Indices of marked ranges that were taken from the list.
    retiring: Vec<u32>,
    /// The range whose value is being made. It is not swept until then, marked or not: whoever makes
    /// the value may sweep and evict meanwhile.
    in_progress: Option<u32>,
    /// Where the next search for something to evict begins.
    clock_hand: usize,
    /// Ranges in use, and their length.
    regions: usize,
    bytes: u64,
}

// SAFETY: the pointers are to ranges that the table owns, used as shared references.
unsafe impl<P: Send> Send for State<P> {}

impl<P> Table<P> {
    pub(crate) fn new() -> Self {
        Self {
            tree: Tree::new(),
            hints: AtomicPtr::new(ptr::null_mut()),
            insertions: AtomicU64::new(0),
            marked: AtomicU32::new(0),
            released: AtomicBool::new(false),
            lowest: AtomicU64::new(u64::MAX),
            highest: AtomicU64::new(0),
            state: Mutex::new(State {
                chunks: Vec::new(),
                values: Vec::new(),
                unused: Vec::new(),
                hints: Vec::new(),
                retiring: Vec::new(),
                in_progress: None,
                clock_hand: 0,
                regions: 0,
                bytes: 0,
            }),
        }
    }

    /// The range that contains all of `[addr, addr + len)`. Wait-free.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Found<'_, P>> {
        let last = addr.checked_add(len.max(1) - 1)?;
        if last >> ADDRESS_BITS != 0 {
            return None;
        }
        let read = |range| {
            let (reference, state) = self.acquire(range);
            let (start, base) = reference.range.read(state, addr, last)?;
            Some(Found { start, base, range: reference })
        };
        let hints = self.hints();
        // SAFETY: hints are of ranges of this table, all of which live as long as it.
        let hint = hints.and_then(|hints| hints.get(addr >> PAGE_BITS)).map(|r| unsafe { &*r });
        hint.and_then(read).or_else(|| {
            let at = |page| self.tree.find(page).and_then(read);
            // Its first page may belong to a neighbour.
            let next = (addr | (PAGE - 1)) + 1;
            let beside = || if next >> ADDRESS_BITS != 0 { None } else { at(next) };
            let found = at(addr).or_else(beside)?;
            if let Some(hints) = hints {
                hints.insert(addr >> PAGE_BITS, found.range.range);
            }
            Some(found)
        })
    }

    fn acquire<'a>(&'a self, range: &'a CachedRange) -> (RangeRef<'a, P>, u64) {
        let state = range.acquire();
        (RangeRef { table: self, range }, state)
    }

    fn release_range(&self, range: &CachedRange) -> bool {
        let last = range.release();
        if last {
            // Release: pairs with the swap in `sweep`, which then sees that the count is zero. A swap
            // and not a store: a store by a second thread would end the release sequence of the
            // first, and its range could be missed.
            self.released.swap(true, Ordering::Release);
        }
        last
    }

    /// One more reference beside one that lasts.
    ///
    /// # Safety
    /// `range` must be from [`RangeRef::into_raw`] of this table, and that reference not be released.
    pub(crate) unsafe fn acquire_again(&self, range: NonNull<CachedRange>) {
        // SAFETY: the caller's promise; ranges live as long as the table.
        unsafe { range.as_ref() }.acquire_again();
    }

    /// Releases a reference. Whether there is now something to [sweep](TableGuard::sweep).
    ///
    /// # Safety
    /// `range` must be from [`RangeRef::into_raw`] of this table; each reference is released once.
    pub(crate) unsafe fn release(&self, range: NonNull<CachedRange>) -> bool {
        // SAFETY: the caller's promise; ranges live as long as the table.
        self.release_range(unsafe { range.as_ref() })
    }

    fn hints(&self) -> Option<&Hints<CachedRange>> {
        // SAFETY: all that were ever stored here live as long as the table.
        unsafe { self.hints.load(Ordering::Acquire).as_ref() }
    }

    /// Memory of `[start, end)` is about to be unmapped: no range that touches it is found any more.
    /// Returns how many ranges that were. See the [module](self) for where this may be called.
    pub(crate) fn invalidate(&self, start: u64, end: u64) -> u64 {
        let (lowest, highest) =
            (self.lowest.load(Ordering::Relaxed), self.highest.load(Ordering::Relaxed));
        if start >= end || end <= lowest || highest <= start {
            return 0;
        }
        let range = start..end;
        let around = start.saturating_sub(PAGE).max(lowest)..end.saturating_add(PAGE).min(highest);
        let mut marked = 0;
        loop {
            let insertions = self.insertions.load(Ordering::Acquire);
            let mut last = ptr::null();
            self.tree.for_each_in(&around, &mut |found| {
                let again = ptr::eq(last, found);
                last = found;
                if again {
                    return;
                }
                let (_reference, state) = self.acquire(found);
                if found.mark_if_touched(state, &range) {
                    self.push_marked(found);
                    marked += 1;
                }
            });
            // Pairs with the fence in `begin_insert`: see "the race to avoid".
            fence(Ordering::SeqCst);
            if self.insertions.load(Ordering::Relaxed) == insertions {
                return marked;
            }
        }
    }

    /// Whether there is something for [`TableGuard::sweep`] to do.
    pub(crate) fn has_marked(&self) -> bool {
        self.marked.load(Ordering::Relaxed) != 0 || self.released.load(Ordering::Relaxed)
    }

    /// For whoever set a range's first mark.
    fn push_marked(&self, range: &CachedRange) {
        let mut next = self.marked.load(Ordering::Relaxed);
        loop {
            range.next.store(next, Ordering::Relaxed);
            let new = range.index + 1;
            // Release: pairs with the swap in `sweep`, which then reads `next`.
            match self.marked.compare_exchange(next, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// All values, marked or not: for the sole owner of the table, at its end.
    pub(crate) fn take_values(&mut self) -> Vec<P> {
        self.lock().state.values.iter_mut().filter_map(Option::take).collect()
    }

    /// The right to change the table.
    pub(crate) fn lock(&self) -> TableGuard<'_, P> {
        // A panic while a value is made leaves at worst a range that is never ready.
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        TableGuard { table: self, state }
    }

    /// The same if no other thread has it.
    pub(crate) fn try_lock(&self) -> Option<TableGuard<'_, P>> {
        let state = self.state.try_lock().ok()?;
        Some(TableGuard { table: self, state })
    }

    /// Bytes that the table itself takes.
    pub(crate) fn memory(&self) -> usize {
        let table = self.lock();
        // SAFETY: they live as long as the table.
        let hints = table.state.hints.iter().map(|hints| unsafe { hints.as_ref() }.memory());
        let hints: usize = hints.sum();
        let ranges = table.capacity() * (size_of::<CachedRange>() + size_of::<Option<P>>());
        size_of::<Self>() + self.tree.memory() + hints + ranges
    }
}

impl<P> Drop for Table<P> {
    fn drop(&mut self) {
        let mut table = self.lock();
        let (chunks, hints) =
            (core::mem::take(&mut table.state.chunks), core::mem::take(&mut table.state.hints));
        for chunk in chunks {
            // SAFETY: made from a box, and nobody has a reference into it any more.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
        for hints in hints {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(hints.as_ptr()) });
        }
    }
}

/// Whole pages around a range; none where it is beyond what the table can hold.
fn pages(range: &Range<u64>) -> Option<Range<u64>> {
    let end = range.end.checked_next_multiple_of(PAGE)?;
    let start = range.start & !(PAGE - 1);
    let fits = start < end && end <= 1 << ADDRESS_BITS && end - start <= LONGEST;
    fits.then_some(start..end)
}

/// The pages that a range of these pages must own: all between the first and the last, or all of
/// them where there is none between.
fn inner(pages: &Range<u64>) -> Range<u64> {
    let inner = pages.start + PAGE..pages.end - PAGE;
    if inner.start < inner.end { inner } else { pages.clone() }
}
