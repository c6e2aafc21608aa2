//! Ranges of addresses and what is kept for each: found without waiting, taken back at any moment.
//!
//! This is the part of the cache where threads meet. It knows nothing of devices or pins: values are
//! of any type that can be cloned. The rules:
//!
//! * [`Table::find`] takes no lock and has no loop that another thread could prolong.
//! * [`Table::invalidate`] may run anywhere, also inside `free` with the allocator's lock held: it
//!   takes no lock, allocates and frees nothing, and drops no value. When it has returned, no value
//!   with memory of that range is found any more. Values come out later, in [`Writing::sweep`].
//! * Everything else happens under one lock, which nobody of the above needs. It is held while a
//!   value is made (a driver call), so the same range is never pinned by two threads at once.
//!
//! Every page has at most one owner in the tree. An entry owns all pages between its first and its
//! last; those two only if they were free, because buffers from `malloc` share such pages with their
//! neighbours. So whoever looks for an entry by an address looks at the next page too, and whoever
//! looks for all entries with a page looks at both pages beside it.
//!
//! What the table must not lose: a new range may swallow an old one whose memory is just going away.
//! [`Writing::claim`] puts the new entry in the place of the old ones, *then* looks whether one of
//! them was lost; `invalidate` marks what it finds, *then* looks whether new entries came. In every
//! order of events one of the two sees the other.

mod entry;
mod insert;
mod tree;

use core::ops::Range;
use core::ptr::{self, NonNull};

use super::sync::{AtomicPtr, AtomicU64, CHUNK, Mutex, MutexGuard, Ordering, fence};
use entry::{DROPPED, Entry};
pub(crate) use insert::{Bounds, Inserted, Value};
pub(crate) use tree::ADDRESS_BITS;
use tree::{PAGE_BITS, Tree};

pub(crate) const PAGE: u64 = 1 << PAGE_BITS;

/// Something found: the start of its range, and the value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found<P> {
    pub(crate) start: u64,
    pub(crate) value: P,
}

/// See the [module](self).
pub(crate) struct Table<P> {
    tree: Tree<Entry<P>>,
    /// Counts the times that new entries took their places in the tree.
    arrivals: AtomicU64,
    /// Marked entries, linked: they still have their values and their places in the tree.
    marked: AtomicPtr<Entry<P>>,
    /// No entry was ever outside: most memory that comes and goes is none of ours.
    lowest: AtomicU64,
    highest: AtomicU64,
    writer: Mutex<Writer<P>>,
}

/// What the lock protects.
struct Writer<P> {
    /// All entries there are; freed with the table.
    chunks: Vec<NonNull<[Entry<P>]>>,
    unused: Vec<NonNull<Entry<P>>>,
    /// Marked, and taken from the list.
    retiring: Vec<NonNull<Entry<P>>>,
    /// The entry whose value is just being made. It stays what it is until then, marked or not:
    /// whoever makes the value may sweep and evict meanwhile.
    claimed: Option<NonNull<Entry<P>>>,
    /// Where the next search for something to evict begins.
    hand: usize,
    /// Entries with a range, and the length of these.
    regions: usize,
    bytes: u64,
}

// SAFETY: the pointers are to entries that the table owns, used as shared references.
unsafe impl<P: Send + Sync> Send for Writer<P> {}

impl<P> Table<P> {
    pub(crate) fn new() -> Self {
        Self {
            tree: Tree::new(),
            arrivals: AtomicU64::new(0),
            marked: AtomicPtr::new(ptr::null_mut()),
            lowest: AtomicU64::new(u64::MAX),
            highest: AtomicU64::new(0),
            writer: Mutex::new(Writer {
                chunks: Vec::new(),
                unused: Vec::new(),
                retiring: Vec::new(),
                claimed: None,
                hand: 0,
                regions: 0,
                bytes: 0,
            }),
        }
    }

    /// The value whose range holds all of `[addr, addr + len)`. Wait-free.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Found<P>>
    where
        P: Clone,
    {
        let last = addr.checked_add(len.max(1) - 1)?;
        if last >> ADDRESS_BITS != 0 {
            return None;
        }
        let at = |page: u64| self.tree.find(page)?.read(addr, last);
        let (start, value) = at(addr).or_else(|| {
            // Its first page may belong to a neighbour.
            let next = (addr | (PAGE - 1)) + 1;
            if next >> ADDRESS_BITS != 0 { None } else { at(next) }
        })?;
        Some(Found { start, value })
    }

    /// Memory of `[start, end)` is about to go: what has a part of it is not found any more. Returns
    /// how many ranges that were. See the [module](self) for where this may be called.
    pub(crate) fn invalidate(&self, start: u64, end: u64) -> u64 {
        let (lowest, highest) =
            (self.lowest.load(Ordering::Relaxed), self.highest.load(Ordering::Relaxed));
        if start >= end || end <= lowest || highest <= start {
            return 0;
        }
        let range = start..end;
        let around = start.saturating_sub(PAGE).max(lowest)..end.saturating_add(PAGE).min(highest);
        let mut lost = 0;
        loop {
            let arrivals = self.arrivals.load(Ordering::Acquire);
            let mut last = ptr::null();
            self.tree.visit(&around, &mut |entry| {
                let again = ptr::eq(last, entry);
                last = entry;
                if !again && entry.lose(&range) {
                    self.list_marked(entry);
                    lost += 1;
                }
            });
            // An entry that came meanwhile may have swallowed one that was found here before it was
            // marked. Either we see it now, or it sees the mark: compare `Writing::claim`.
            fence(Ordering::SeqCst);
            if self.arrivals.load(Ordering::Relaxed) == arrivals {
                return lost;
            }
        }
    }

    /// Whether there is something for [`Writing::sweep`] to do.
    pub(crate) fn has_marked(&self) -> bool {
        !self.marked.load(Ordering::Relaxed).is_null()
    }

    /// For whoever set an entry's first mark.
    fn list_marked(&self, entry: &Entry<P>) {
        let entry: *const Entry<P> = entry;
        let mut next = self.marked.load(Ordering::Relaxed);
        loop {
            // SAFETY: an entry of this table.
            unsafe { &*entry }.next.store(next, Ordering::Relaxed);
            let new = entry.cast_mut();
            match self.marked.compare_exchange(next, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// The right to change the table.
    pub(crate) fn lock(&self) -> Writing<'_, P> {
        // A panic while pinning leaves the table in order: at worst an entry that is never ready.
        let writer = self.writer.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Writing { table: self, writer }
    }

    /// The same if nobody has it.
    pub(crate) fn try_lock(&self) -> Option<Writing<'_, P>> {
        let writer = self.writer.try_lock().ok()?;
        Some(Writing { table: self, writer })
    }

    /// Bytes that the table itself takes.
    pub(crate) fn memory(&self) -> usize {
        let chunks = self.lock().writer.chunks.len();
        size_of::<Self>() + self.tree.memory() + chunks * CHUNK * size_of::<Entry<P>>()
    }
}

impl<P> Drop for Table<P> {
    fn drop(&mut self) {
        let chunks = core::mem::take(&mut self.lock().writer.chunks);
        for chunk in chunks {
            // SAFETY: made from a box, and nobody has the table any more.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
    }
}

/// The table, with the right to change it.
pub(crate) struct Writing<'a, P> {
    table: &'a Table<P>,
    writer: MutexGuard<'a, Writer<P>>,
}

/// What came out of the table. Dropping the values may be slow: do it without the lock.
#[derive(Debug)]
pub(crate) struct Swept<P> {
    pub(crate) values: Vec<P>,
    /// Ranges that came out with a value, and their length.
    pub(crate) regions: u64,
    pub(crate) bytes: u64,
    /// How many of them had to make room.
    pub(crate) evicted: u64,
}

impl<P> Default for Swept<P> {
    fn default() -> Self {
        Self { values: Vec::new(), regions: 0, bytes: 0, evicted: 0 }
    }
}

/// Whole pages around a range; none where it is beyond what the table can hold.
fn pages(range: &Range<u64>) -> Option<Range<u64>> {
    let end = range.end.checked_next_multiple_of(PAGE)?;
    let start = range.start & !(PAGE - 1);
    (start < end && end <= 1 << ADDRESS_BITS).then_some(start..end)
}

/// The pages that an entry with these pages must own: all between the first and the last, or all
/// where there is none between.
fn inner(pages: &Range<u64>) -> Range<u64> {
    let inner = pages.start + PAGE..pages.end - PAGE;
    if inner.start < inner.end { inner } else { pages.clone() }
}

impl<'a, P> Writing<'a, P> {
    /// Ranges in the table, and their length, with those that are marked but not swept.
    pub(crate) fn size(&self) -> (usize, u64) {
        (self.writer.regions, self.writer.bytes)
    }

    /// Takes marked entries out, except those where someone is looking just now, and the one whose
    /// value is being made. Whether none is left.
    pub(crate) fn sweep(&mut self, swept: &mut Swept<P>) -> bool {
        let mut next = self.table.marked.swap(ptr::null_mut(), Ordering::Acquire);
        while let Some(entry) = NonNull::new(next) {
            // SAFETY: an entry of this table.
            next = unsafe { entry.as_ref() }.next.load(Ordering::Relaxed);
            self.writer.retiring.push(entry);
        }
        let mut at = 0;
        while let Some(&pointer) = self.writer.retiring.get(at) {
            if self.writer.claimed == Some(pointer) {
                at += 1;
                continue;
            }
            // SAFETY: an entry of this table, which outlives the borrow of it.
            let entry = unsafe { pointer.as_ref() };
            let range = entry.range();
            // SAFETY: the range is one that `claim` gave, and the lock is held.
            unsafe { self.table.tree.take(&range, entry) };
            // SAFETY: the lock is held.
            let Some(value) = (unsafe { entry.retire() }) else {
                at += 1;
                continue;
            };
            if let Some(value) = value {
                swept.values.push(value);
                swept.regions += 1;
                swept.bytes += range.end - range.start;
            }
            self.writer.retiring.swap_remove(at);
            self.writer.unused.push(pointer);
            self.writer.regions -= 1;
            self.writer.bytes -= range.end - range.start;
        }
        self.writer.retiring.is_empty()
    }

    /// The ready entries that own a page of `range`, by address.
    fn overlapping(&self, range: &Range<u64>) -> Vec<&'a Entry<P>> {
        let mut found: Vec<&'a Entry<P>> = Vec::new();
        self.table.tree.visit(range, &mut |entry| {
            // SAFETY: entries live as long as the table.
            let entry = unsafe { &*ptr::from_ref(entry) };
            if found.last().is_none_or(|last| !ptr::eq(*last, entry)) && entry.is_valid() {
                found.push(entry);
            }
        });
        found
    }

    /// Gives an entry up.
    fn drop_entry(&self, entry: &Entry<P>) {
        if entry.mark(DROPPED) {
            self.table.list_marked(entry);
        }
    }

    /// A new entry for `range`, of whole pages, which must hold all of the ranges of `swallowed`; it
    /// takes their places. Nobody else may own a page of its [`inner`] ones. It is not found until it
    /// is [filled](Entry::fill), nor swept before [`Writing::settle`]. `None`: memory of one of those
    /// is just going away, so the range is not what it was; none of them is left.
    fn claim(&mut self, range: &Range<u64>, swallowed: &[&Entry<P>]) -> Option<&'a Entry<P>> {
        let entry = self.unused_entry();
        entry.begin(range);
        self.writer.regions += 1;
        self.writer.bytes += range.end - range.start;
        let table = self.table;
        table.lowest.fetch_min(range.start, Ordering::Relaxed);
        table.highest.fetch_max(range.end, Ordering::Relaxed);
        // SAFETY: the range is of whole pages within the tree, the entry lives as long as the table,
        // and the lock is held.
        unsafe {
            table.tree.give(range, entry, |owner| {
                owner.is_none_or(|owner| swallowed.iter().any(|old| ptr::eq(*old, owner)))
            });
            // Also where an entry that is marked, and not swept yet, is in the way.
            table.tree.give(&inner(range), entry, |_| true);
        }
        table.arrivals.fetch_add(1, Ordering::Release);
        // Whoever marks a swallowed entry from here on sees the arrival: compare `invalidate`.
        fence(Ordering::SeqCst);
        let lost = swallowed.iter().any(|old| old.is_gone());
        for old in swallowed {
            self.drop_entry(old);
        }
        if lost {
            self.drop_entry(entry);
            return None;
        }
        self.writer.claimed = Some(NonNull::from(entry));
        Some(entry)
    }

    /// The claimed entry got its value, or was given up: from now on it may be swept.
    fn settle(&mut self) {
        self.writer.claimed = None;
    }

    fn unused_entry(&mut self) -> &'a Entry<P> {
        let pointer = self.writer.unused.pop().unwrap_or_else(|| {
            let chunk: Box<[Entry<P>]> = (0..CHUNK).map(|_| Entry::unused()).collect();
            // SAFETY: a box is never null.
            let chunk = unsafe { NonNull::new_unchecked(Box::into_raw(chunk)) };
            self.writer.chunks.push(chunk);
            // SAFETY: just made, and kept until the table goes.
            let entries = unsafe { chunk.as_ref() };
            let mut new = entries.iter().map(NonNull::from);
            let first = new.next();
            self.writer.unused.extend(new);
            first.unwrap_or_else(|| unreachable!("a chunk has entries"))
        });
        // SAFETY: entries live as long as the table.
        unsafe { &*pointer.as_ptr() }
    }

    /// The entry at this place among all there are, used or not.
    fn nth(&self, place: usize) -> Option<&'a Entry<P>> {
        let chunk = self.writer.chunks.get(place / CHUNK)?;
        // SAFETY: chunks live as long as the table.
        unsafe { &*chunk.as_ptr() }.get(place % CHUNK)
    }

    /// How many entries there are, used or not.
    fn places(&self) -> usize {
        self.writer.chunks.len() * CHUNK
    }
}
