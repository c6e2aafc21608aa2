//! Ranges of addresses and what is kept for each: found without waiting, taken back at any moment.
//!
//! This is the part of the cache where threads meet. It knows nothing of devices or pins: values are
//! of any type, and stay in the table until they come out for good. Whoever looks for a range is
//! given a [`Visit`] instead, during which the value stays, and a number that was given with it.
//! The rules:
//!
//! * [`Table::find`] takes no lock and has no loop that another thread could prolong.
//! * [`Table::invalidate`] may run anywhere, also inside `free` with the allocator's lock held: it
//!   takes no lock, allocates and frees nothing, and drops no value. When it has returned, no value
//!   with memory of that range is found any more. Values come out later, in [`Writing::sweep`], when
//!   those who found them before have left.
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
pub(super) mod hints;
mod insert;
mod tree;

use core::ops::Range;
use core::ptr::{self, NonNull};

use super::sync::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, CHUNK, Mutex, MutexGuard, Ordering, fence,
};
pub(crate) use entry::Entry;
use entry::{DROPPED, LONGEST};
use hints::Hints;
pub(crate) use insert::{Bounds, Inserted};
pub(crate) use tree::ADDRESS_BITS;
use tree::{PAGE_BITS, Tree};

pub(crate) const PAGE: u64 = 1 << PAGE_BITS;

/// Something found: the start of its range, and what was given with the value.
pub(crate) struct Found<'a, P> {
    pub(crate) start: u64,
    pub(crate) base: u64,
    pub(crate) visit: Visit<'a, P>,
}

/// The right to use what was found: the value stays in the table until this is dropped.
pub(crate) struct Visit<'a, P> {
    table: &'a Table<P>,
    entry: &'a Entry,
}

impl<P> Visit<'_, P> {
    /// Whether it is of this table.
    pub(crate) fn is_of(&self, table: &Table<P>) -> bool {
        ptr::eq(self.table, table)
    }

    /// The same, for someone who sees to it that the table stays; [`Table::leave`] ends it.
    pub(crate) fn into_raw(self) -> NonNull<Entry> {
        let entry = NonNull::from(self.entry);
        core::mem::forget(self);
        entry
    }
}

impl<P> Drop for Visit<'_, P> {
    fn drop(&mut self) {
        self.table.count_out(self.entry);
    }
}

/// See the [module](self).
pub(crate) struct Table<P> {
    tree: Tree<Entry>,
    /// The short way to entries; null until there are some. Made anew as they grow in number.
    hints: AtomicPtr<Hints<Entry>>,
    /// Counts the times that new entries took their places in the tree.
    arrivals: AtomicU64,
    /// Marked entries, linked: they still have their values and their places in the tree. One more
    /// than the place of the first; 0: none.
    marked: AtomicU32,
    /// A marked entry lost its last visitor.
    left: AtomicBool,
    /// No entry was ever outside: most memory that comes and goes is none of ours.
    lowest: AtomicU64,
    highest: AtomicU64,
    writer: Mutex<Writer<P>>,
}

/// What the lock protects.
struct Writer<P> {
    /// All entries there are; freed with the table.
    chunks: Vec<NonNull<[Entry]>>,
    /// What belongs to each.
    values: Vec<Option<P>>,
    /// Places of entries.
    unused: Vec<u32>,
    /// Of all sizes there were: a reader may still have an old one. Freed with the table.
    hints: Vec<NonNull<Hints<Entry>>>,
    /// Places of entries that are marked, and taken from the list.
    retiring: Vec<u32>,
    /// The entry whose value is just being made. It stays what it is until then, marked or not:
    /// whoever makes the value may sweep and evict meanwhile.
    claimed: Option<u32>,
    /// Where the next search for something to evict begins.
    hand: usize,
    /// Entries with a range, and the length of these.
    regions: usize,
    bytes: u64,
}

// SAFETY: the pointers are to entries that the table owns, used as shared references.
unsafe impl<P: Send> Send for Writer<P> {}

impl<P> Table<P> {
    pub(crate) fn new() -> Self {
        Self {
            tree: Tree::new(),
            hints: AtomicPtr::new(ptr::null_mut()),
            arrivals: AtomicU64::new(0),
            marked: AtomicU32::new(0),
            left: AtomicBool::new(false),
            lowest: AtomicU64::new(u64::MAX),
            highest: AtomicU64::new(0),
            writer: Mutex::new(Writer {
                chunks: Vec::new(),
                values: Vec::new(),
                unused: Vec::new(),
                hints: Vec::new(),
                retiring: Vec::new(),
                claimed: None,
                hand: 0,
                regions: 0,
                bytes: 0,
            }),
        }
    }

    /// The entry whose range holds all of `[addr, addr + len)`. Wait-free.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Found<'_, P>> {
        let last = addr.checked_add(len.max(1) - 1)?;
        if last >> ADDRESS_BITS != 0 {
            return None;
        }
        let read = |entry| {
            let (visit, state) = self.enter(entry);
            let (start, base) = visit.entry.read(state, addr, last)?;
            Some(Found { start, base, visit })
        };
        let hints = self.hints();
        // SAFETY: an entry of this table, all of which live as long as it.
        let noted = hints.and_then(|hints| hints.get(addr >> PAGE_BITS)).map(|e| unsafe { &*e });
        noted.and_then(read).or_else(|| {
            let at = |page| self.tree.find(page).and_then(read);
            // Its first page may belong to a neighbour.
            let next = (addr | (PAGE - 1)) + 1;
            let beside = || if next >> ADDRESS_BITS != 0 { None } else { at(next) };
            let found = at(addr).or_else(beside)?;
            if let Some(hints) = hints {
                hints.note(addr >> PAGE_BITS, found.visit.entry);
            }
            Some(found)
        })
    }

    fn enter<'a>(&'a self, entry: &'a Entry) -> (Visit<'a, P>, u64) {
        let state = entry.enter();
        (Visit { table: self, entry }, state)
    }

    fn count_out(&self, entry: &Entry) -> bool {
        let last = entry.leave();
        if last {
            // Release: whoever takes note of this sees that the visitor has left; also if others say
            // the same next, therefore not a store, which would hide this one from them.
            self.left.swap(true, Ordering::Release);
        }
        last
    }

    /// One more visit, beside one that lasts.
    ///
    /// # Safety
    /// The entry must be from [`Visit::into_raw`] of this table, and that visit not have ended.
    pub(crate) unsafe fn enter_with(&self, entry: NonNull<Entry>) {
        // SAFETY: the caller's promise; entries live as long as the table.
        unsafe { entry.as_ref() }.enter_with();
    }

    /// Ends a visit. Whether there is now something to [sweep](Writing::sweep).
    ///
    /// # Safety
    /// The entry must be from [`Visit::into_raw`] of this table, and each visit ends once.
    pub(crate) unsafe fn leave(&self, entry: NonNull<Entry>) -> bool {
        // SAFETY: the caller's promise; entries live as long as the table.
        self.count_out(unsafe { entry.as_ref() })
    }

    fn hints(&self) -> Option<&Hints<Entry>> {
        // SAFETY: those that ever were here stay as long as the table.
        unsafe { self.hints.load(Ordering::Acquire).as_ref() }
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
                if again {
                    return;
                }
                let (_visit, state) = self.enter(entry);
                if entry.lose(state, &range) {
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
        self.marked.load(Ordering::Relaxed) != 0 || self.left.load(Ordering::Relaxed)
    }

    /// For whoever set an entry's first mark.
    fn list_marked(&self, entry: &Entry) {
        let mut next = self.marked.load(Ordering::Relaxed);
        loop {
            entry.next.store(next, Ordering::Relaxed);
            let new = entry.place + 1;
            match self.marked.compare_exchange(next, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(other) => next = other,
            }
        }
    }

    /// All values, however they are marked: for whoever has the table alone, at its end.
    pub(crate) fn take_values(&mut self) -> Vec<P> {
        self.lock().writer.values.iter_mut().filter_map(Option::take).collect()
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
        let writing = self.lock();
        // SAFETY: they stay as long as the table.
        let hints = writing.writer.hints.iter().map(|hints| unsafe { hints.as_ref() }.memory());
        let hints: usize = hints.sum();
        let entries = writing.places() * (size_of::<Entry>() + size_of::<Option<P>>());
        size_of::<Self>() + self.tree.memory() + hints + entries
    }
}

impl<P> Drop for Table<P> {
    fn drop(&mut self) {
        let mut writing = self.lock();
        let (chunks, hints) = (
            core::mem::take(&mut writing.writer.chunks),
            core::mem::take(&mut writing.writer.hints),
        );
        for chunk in chunks {
            // SAFETY: made from a box, and nobody has the table any more.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
        for hints in hints {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(hints.as_ptr()) });
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
    let fits = start < end && end <= 1 << ADDRESS_BITS && end - start <= LONGEST;
    fits.then_some(start..end)
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

    /// Takes marked entries out, except those that someone has or looks at just now, and the one
    /// whose value is being made. Whether none is left.
    pub(crate) fn sweep(&mut self, swept: &mut Swept<P>) -> bool {
        // Acquire: sees that those have left who said so. Who leaves later says so again.
        self.table.left.swap(false, Ordering::Acquire);
        let mut next = self.table.marked.swap(0, Ordering::Acquire);
        while let Some(place) = next.checked_sub(1) {
            next = self.entry(place).next.load(Ordering::Relaxed);
            self.writer.retiring.push(place);
        }
        let mut at = 0;
        while let Some(&place) = self.writer.retiring.get(at) {
            if self.writer.claimed == Some(place) {
                at += 1;
                continue;
            }
            let entry = self.entry(place);
            let range = entry.range();
            // SAFETY: the range is one that `claim` gave, and the lock is held.
            unsafe { self.table.tree.take(&range, entry) };
            if !entry.retire() {
                at += 1;
                continue;
            }
            if let Some(value) = self.writer.values[place as usize].take() {
                swept.values.push(value);
                swept.regions += 1;
                swept.bytes += range.end - range.start;
            }
            self.writer.retiring.swap_remove(at);
            self.writer.unused.push(place);
            self.writer.regions -= 1;
            self.writer.bytes -= range.end - range.start;
        }
        self.writer.retiring.is_empty()
    }

    /// The ready entries that own a page of `range`, by address.
    fn overlapping(&self, range: &Range<u64>) -> Vec<&'a Entry> {
        let mut found: Vec<&'a Entry> = Vec::new();
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
    fn drop_entry(&self, entry: &Entry) {
        if entry.mark(DROPPED) {
            self.table.list_marked(entry);
        }
    }

    /// A new entry for `range`, of whole pages, which must hold all of the ranges of `swallowed`; it
    /// takes their places. Nobody else may own a page of its [`inner`] ones. It is not found until it
    /// is [filled](Entry::fill), nor swept before [`Writing::settle`]. `None`: memory of one of those
    /// is just going away, so the range is not what it was; none of them is left.
    fn claim(&mut self, range: &Range<u64>, swallowed: &[&Entry]) -> Option<&'a Entry> {
        let entry = self.unused_entry();
        entry.begin(range);
        self.writer.regions += 1;
        self.writer.bytes += range.end - range.start;
        let table = self.table;
        table.lowest.fetch_min(range.start, Ordering::Relaxed);
        table.highest.fetch_max(range.end, Ordering::Relaxed);
        // Who has a hint must not find them once `invalidate` cannot.
        swallowed.iter().for_each(|old| old.hide());
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
        self.writer.claimed = Some(entry.place);
        Some(entry)
    }

    /// Gives the claimed entry its value, and has the caller visit it.
    fn fill(&mut self, entry: &'a Entry, base: u64, value: P) -> Visit<'a, P> {
        self.writer.values[entry.place as usize] = Some(value);
        entry.fill(base);
        self.table.enter(entry).0
    }

    /// The claimed entry got its value, or was given up: from now on it may be swept.
    fn settle(&mut self) {
        self.writer.claimed = None;
    }

    fn unused_entry(&mut self) -> &'a Entry {
        let place = self.writer.unused.pop().unwrap_or_else(|| {
            let first = self.places() as u32;
            let places = first..first + CHUNK as u32;
            let chunk: Box<[Entry]> = places.clone().map(Entry::unused).collect();
            // SAFETY: a box is never null.
            let chunk = unsafe { NonNull::new_unchecked(Box::into_raw(chunk)) };
            self.writer.chunks.push(chunk);
            self.writer.values.extend(places.clone().map(|_| None));
            self.writer.unused.extend(places.skip(1));
            self.widen_hints();
            first
        });
        self.entry(place)
    }

    /// Has room for as many hints as there are entries, at least. Old ones are learned again.
    fn widen_hints(&mut self) {
        let places = self.places();
        if self.table.hints().is_none_or(|hints| hints.room() < places) {
            // SAFETY: a box is never null.
            let hints =
                unsafe { NonNull::new_unchecked(Box::into_raw(Box::new(Hints::new(places)))) };
            self.writer.hints.push(hints);
            self.table.hints.store(hints.as_ptr(), Ordering::Release);
        }
    }

    /// The entry at this place among all there are, used or not.
    fn entry(&self, place: u32) -> &'a Entry {
        let (chunk, at) = (place as usize / CHUNK, place as usize % CHUNK);
        // SAFETY: chunks live as long as the table.
        let chunk = unsafe { &*self.writer.chunks[chunk].as_ptr() };
        &chunk[at]
    }

    /// How many entries there are, used or not.
    fn places(&self) -> usize {
        self.writer.chunks.len() * CHUNK
    }
}
