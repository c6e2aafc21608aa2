//! Changes to the table, under its lock: new ranges, and sweeping out marked ones.

use core::ops::Range;
use core::ptr::{self, NonNull};

use super::super::sync::{CHUNK, MutexGuard, Ordering, fence};
use super::hints::Hints;
use super::range::DROPPED;
use super::{CachedRange, RangeRef, State, Table, inner};

/// The table, locked.
pub(crate) struct TableGuard<'a, P> {
    pub(super) table: &'a Table<P>,
    pub(super) state: MutexGuard<'a, State<P>>,
}

/// What came out of the table. Dropping the values may be slow: do it without the lock.
#[derive(Debug)]
pub(crate) struct Swept<P> {
    pub(crate) values: Vec<P>,
    /// Ranges that came out with a value, and their length.
    pub(crate) regions: u64,
    pub(crate) bytes: u64,
    /// How many ranges were evicted.
    pub(crate) evicted: u64,
}

impl<P> Default for Swept<P> {
    fn default() -> Self {
        Self { values: Vec::new(), regions: 0, bytes: 0, evicted: 0 }
    }
}

impl<'a, P> TableGuard<'a, P> {
    /// Ranges in the table, and their length, with those that are marked but not swept.
    pub(crate) fn size(&self) -> (usize, u64) {
        (self.state.regions, self.state.bytes)
    }

    /// Takes marked ranges out, except those with references and the one whose value is being made.
    /// Whether none is left.
    pub(crate) fn sweep(&mut self, swept: &mut Swept<P>) -> bool {
        // Acquire: pairs with the swap in `release_range`. A count that was zero when `released` was
        // set is seen as zero below; a later release sets it again.
        self.table.released.swap(false, Ordering::Acquire);
        // Acquire: pairs with the exchange in `push_marked`, for `next`.
        let mut next = self.table.marked.swap(0, Ordering::Acquire);
        while let Some(index) = next.checked_sub(1) {
            next = self.range_at(index).next.load(Ordering::Relaxed);
            self.state.retiring.push(index);
        }
        let mut at = 0;
        while let Some(&index) = self.state.retiring.get(at) {
            if self.state.in_progress == Some(index) {
                at += 1;
                continue;
            }
            let marked = self.range_at(index);
            let range = marked.range();
            // SAFETY: `begin_insert` assigned this range, and the lock is held.
            unsafe { self.table.tree.unassign(&range, marked) };
            if !marked.retire() {
                at += 1;
                continue;
            }
            if let Some(value) = self.state.values[index as usize].take() {
                swept.values.push(value);
                swept.regions += 1;
                swept.bytes += range.end - range.start;
            }
            self.state.retiring.swap_remove(at);
            self.state.unused.push(index);
            self.state.regions -= 1;
            self.state.bytes -= range.end - range.start;
        }
        self.state.retiring.is_empty()
    }

    /// The ready ranges that own a page of `range`, by address.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> Vec<&'a CachedRange> {
        let mut found: Vec<&'a CachedRange> = Vec::new();
        self.table.tree.for_each_in(range, &mut |other| {
            // SAFETY: ranges live as long as the table.
            let other = unsafe { &*ptr::from_ref(other) };
            if found.last().is_none_or(|last| !ptr::eq(*last, other)) && other.is_valid() {
                found.push(other);
            }
        });
        found
    }

    /// Marks a range, so that it is swept.
    pub(super) fn drop_range(&self, range: &CachedRange) {
        if range.mark(DROPPED) {
            self.table.push_marked(range);
        }
    }

    /// A new range for `pages`, which must contain those of `replaced` and takes their place in the
    /// tree. Nobody else may own one of its [`inner`] pages. It is not found before
    /// [`TableGuard::finish_insert`], nor swept before that or [`TableGuard::cancel_insert`]. `None`:
    /// memory of one of `replaced` is being unmapped; all of them were dropped.
    pub(super) fn begin_insert(
        &mut self,
        pages: &Range<u64>,
        replaced: &[&CachedRange],
    ) -> Option<&'a CachedRange> {
        let new = self.unused_range();
        new.set_pages(pages);
        self.state.regions += 1;
        self.state.bytes += pages.end - pages.start;
        let table = self.table;
        table.lowest.fetch_min(pages.start, Ordering::Relaxed);
        table.highest.fetch_max(pages.end, Ordering::Relaxed);
        // A hint leads to them even when the tree no longer does, where `invalidate` looks.
        replaced.iter().for_each(|old| old.hide());
        // SAFETY: the range is of whole pages within the tree, `new` lives as long as the table, and
        // the lock is held.
        unsafe {
            table.tree.assign(pages, new, |owner| {
                owner.is_none_or(|owner| replaced.iter().any(|old| ptr::eq(*old, owner)))
            });
            // Also where a marked range, which was not swept yet, is in the way.
            table.tree.assign(&inner(pages), new, |_| true);
        }
        table.insertions.fetch_add(1, Ordering::Release);
        // Pairs with the fence in `invalidate`: see "the race to avoid" in the module above.
        fence(Ordering::SeqCst);
        let gone = replaced.iter().any(|old| old.is_gone());
        for old in replaced {
            self.drop_range(old);
        }
        if gone {
            self.drop_range(new);
            return None;
        }
        self.state.in_progress = Some(new.index);
        Some(new)
    }

    /// Stores the value of the new range, and returns a reference to it.
    pub(super) fn finish_insert(
        &mut self,
        new: &'a CachedRange,
        base: u64,
        value: P,
    ) -> RangeRef<'a, P> {
        self.state.values[new.index as usize] = Some(value);
        new.publish(base);
        self.state.in_progress = None;
        self.table.acquire(new).0
    }

    /// Gives the new range up: there is no value for it.
    pub(super) fn cancel_insert(&mut self, new: &CachedRange) {
        self.drop_range(new);
        self.state.in_progress = None;
    }

    fn unused_range(&mut self) -> &'a CachedRange {
        let index = self.state.unused.pop().unwrap_or_else(|| {
            let first = self.capacity() as u32;
            let indices = first..first + CHUNK as u32;
            let chunk: Box<[CachedRange]> = indices.clone().map(CachedRange::unused).collect();
            // SAFETY: a box is never null.
            let chunk = unsafe { NonNull::new_unchecked(Box::into_raw(chunk)) };
            self.state.chunks.push(chunk);
            self.state.values.extend(indices.clone().map(|_| None));
            self.state.unused.extend(indices.skip(1));
            self.grow_hints();
            first
        });
        self.range_at(index)
    }

    /// Makes the capacity of the hints at least that of the table. The new ones start empty.
    fn grow_hints(&mut self) {
        let capacity = self.capacity();
        if self.table.hints().is_none_or(|hints| hints.capacity() < capacity) {
            // SAFETY: a box is never null.
            let hints =
                unsafe { NonNull::new_unchecked(Box::into_raw(Box::new(Hints::new(capacity)))) };
            self.state.hints.push(hints);
            self.table.hints.store(hints.as_ptr(), Ordering::Release);
        }
    }

    /// The range with this index, used or not.
    pub(super) fn range_at(&self, index: u32) -> &'a CachedRange {
        let (chunk, at) = (index as usize / CHUNK, index as usize % CHUNK);
        // SAFETY: chunks live as long as the table.
        let chunk = unsafe { &*self.state.chunks[chunk].as_ptr() };
        &chunk[at]
    }

    /// How many ranges were allocated, used or not.
    pub(super) fn capacity(&self) -> usize {
        self.state.chunks.len() * CHUNK
    }
}
