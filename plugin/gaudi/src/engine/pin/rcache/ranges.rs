//! The pinned ranges of a card, sorted by address, and the order in which they were used.
//!
//! Ranges are whole pages. Two ranges may share one page, as neighbours from `malloc` do, but no more, and
//! none contains another. So their ends are in the same order as their starts, and a lookup checks only the
//! last range that starts at or below the address.
//!
//! With many ranges, a B-tree lookup has a cache miss at each level, 500 ns in all for 65 536 ranges.
//! Programs look up the same addresses again and again, so a hash table remembers where they were found
//! last. Its entries are checked before use, and it is cleared when it gets large.
//!
//! The entries count the copies that use them, not an `Arc` next to each pin, which would be one more cache
//! miss. A range that is removed while copies use it keeps its entry until the last of them has ended.
//!
//! This type knows nothing of devices and locks. An unmap event comes from inside `free`, so
//! [`Ranges::invalidate`] only marks ranges and does not allocate. [`Ranges::sweep`] removes the marked ranges;
//! call it first after an event, because the other methods expect no marked range.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

pub(super) const PAGE: u64 = crate::PAGE_SIZE;

pub(super) struct Ranges<P> {
    /// The other fields contain indices into it.
    entries: Vec<Entry>,
    /// The pins, with the same indices. Separate, because lookups do not read them.
    pins: Vec<Option<P>>,
    /// Entries without a pin.
    free: Vec<u32>,
    by_start: BTreeMap<u64, u32>,
    /// Page of an address → the entry in which it was found last.
    recent: HashMap<u64, u32, BuildHasherDefault<PageHasher>>,
    /// [`Entry::queued`] → entry.
    queue: BTreeMap<u64, u32>,
    /// The marked entries. Its capacity suffices for all entries, so that marking never allocates.
    marked: Vec<u32>,
    /// Counts uses.
    clock: u64,
    /// Number of pins, and their total length.
    size: (usize, u64),
}

struct Entry {
    range: Range<u64>,
    /// Device address of its start.
    base: u64,
    /// When it was used last, by `clock`.
    used: u64,
    /// The value of `used` when it was last put into the queue: a hit does not change the queue.
    /// [`Ranges::evict`] puts entries that were used since then back at their place in the queue.
    queued: u64,
    /// Number of copies that use it.
    users: u32,
    marked: bool,
    /// Whether it is in the map. If not, it is free, or only the copies that still use it need it.
    is_in: bool,
}

/// The result of a lookup: the device address, and the entry, whose `users` was incremented.
pub(super) struct Found {
    pub(super) addr: u64,
    pub(super) at: u32,
}

impl Entry {
    fn contains(&self, wanted: &Range<u64>) -> bool {
        self.is_in && self.range.start <= wanted.start && wanted.end <= self.range.end
    }
}

impl<P> Ranges<P> {
    pub(super) fn new() -> Self {
        Self {
            entries: Vec::new(),
            pins: Vec::new(),
            free: Vec::new(),
            by_start: BTreeMap::new(),
            recent: HashMap::default(),
            queue: BTreeMap::new(),
            marked: Vec::new(),
            clock: 0,
            size: (0, 0),
        }
    }

    /// Marks the ranges that touch `range`. Returns how many were newly marked.
    pub(super) fn invalidate(&mut self, range: &Range<u64>) -> u64 {
        let mut count = 0;
        for (_, &at) in self.by_start.range(..range.end).rev() {
            let entry = &mut self.entries[at as usize];
            if entry.range.end <= range.start {
                break;
            }
            if !entry.marked {
                entry.marked = true;
                self.marked.push(at);
                count += 1;
            }
        }
        count
    }

    /// Removes the marked ranges. Returns the pins that no copy uses.
    pub(super) fn sweep(&mut self) -> Vec<P> {
        let mut marked = std::mem::take(&mut self.marked);
        let pins = marked.drain(..).filter_map(|at| self.remove(at)).collect();
        self.marked = marked;
        pins
    }

    pub(super) fn has_marked(&self) -> bool {
        !self.marked.is_empty()
    }

    /// Finds the range that contains `[addr, addr + len)`. The caller ends the use with [`Ranges::release`].
    pub(super) fn find(&mut self, addr: u64, len: u64) -> Option<Found> {
        debug_assert!(self.marked.is_empty());
        let (page, wanted) = (addr / PAGE, addr..addr.checked_add(len.max(1))?);
        let contains = |at: &u32| self.entries[*at as usize].contains(&wanted);
        let at = match self.recent.get(&page).copied().filter(contains) {
            Some(at) => at,
            None => {
                let at = self.by_start.range(..=addr).next_back().map(|(_, at)| *at);
                let at = at.filter(contains)?;
                if self.recent.len() >= 2 * self.entries.len() {
                    self.recent.clear();
                }
                self.recent.insert(page, at);
                at
            }
        };
        let entry = &mut self.entries[at as usize];
        self.clock += 1;
        entry.used = self.clock;
        entry.users += 1;
        Some(Found { addr: entry.base + (addr - entry.range.start), at })
    }

    /// Adds a user to an entry that has users already.
    pub(super) fn acquire(&mut self, at: u32) {
        self.entries[at as usize].users += 1;
    }

    /// Ends a use. Returns the pin if this was the last use and the range was removed.
    pub(super) fn release(&mut self, at: u32) -> Option<P> {
        let entry = &mut self.entries[at as usize];
        entry.users -= 1;
        if entry.is_in { None } else { self.take_unused(at) }
    }

    /// The ranges that overlap a new one.
    pub(super) fn overlapping(&self, new: &Range<u64>) -> Vec<Range<u64>> {
        let below = self.by_start.range(..new.end).rev();
        let others = below.map(|(_, at)| &self.entries[*at as usize].range);
        let touching = others.take_while(|other| new.start < other.end);
        touching.filter(|other| !may_be_neighbours(other, new)).cloned().collect()
    }

    /// The union of `new` and all ranges that overlap it, and the ranges that are part of it.
    pub(super) fn union(&self, new: &Range<u64>) -> (Range<u64>, Vec<Range<u64>>) {
        let mut union = new.clone();
        loop {
            let parts = self.overlapping(&union);
            let start = parts.iter().map(|part| part.start).fold(union.start, u64::min);
            let end = parts.iter().map(|part| part.end).fold(union.end, u64::max);
            if union == (start..end) {
                return (union, parts);
            }
            union = start..end;
        }
    }

    /// Adds a range that overlaps none, with one user. If not `is_in`, only that user has it: lookups do not find it.
    pub(super) fn insert(&mut self, range: &Range<u64>, base: u64, pin: P, is_in: bool) -> u32 {
        debug_assert!(!is_in || self.overlapping(range).is_empty());
        self.clock += 1;
        let (used, queued) = (self.clock, self.clock);
        self.size.0 += 1;
        self.size.1 += range.end - range.start;
        let range = range.clone();
        let start = range.start;
        let entry = Entry { range, base, used, queued, users: 1, marked: false, is_in };
        let at = match self.free.pop() {
            Some(at) => {
                (self.entries[at as usize], self.pins[at as usize]) = (entry, Some(pin));
                at
            }
            None => {
                self.entries.push(entry);
                self.pins.push(Some(pin));
                self.entries.len() as u32 - 1
            }
        };
        if is_in {
            self.by_start.insert(start, at);
            self.queue.insert(queued, at);
            self.marked.reserve(self.by_start.len());
        }
        at
    }

    /// Removes the range with this start. Returns the pin if no copy uses it.
    pub(super) fn remove_at(&mut self, start: u64) -> Option<P> {
        self.by_start.get(&start).copied().and_then(|at| self.remove(at))
    }

    fn remove(&mut self, at: u32) -> Option<P> {
        let entry = &mut self.entries[at as usize];
        self.by_start.remove(&entry.range.start);
        self.queue.remove(&entry.queued);
        entry.is_in = false;
        self.take_unused(at)
    }

    /// Takes the pin of an entry that was removed, unless copies use it.
    fn take_unused(&mut self, at: u32) -> Option<P> {
        let entry = &self.entries[at as usize];
        if entry.users > 0 {
            return None;
        }
        self.size.0 -= 1;
        self.size.1 -= entry.range.end - entry.range.start;
        self.free.push(at);
        self.pins[at as usize].take()
    }

    /// Removes the least recently used range that no copy is using and that is not in `keep`. Returns its
    /// pin.
    pub(super) fn evict(&mut self, keep: &[Range<u64>]) -> Option<P> {
        let mut from = 0;
        while let Some((&queued, &at)) = self.queue.range(from..).next() {
            from = queued + 1;
            let entry = &mut self.entries[at as usize];
            if entry.used != queued {
                entry.queued = entry.used;
                self.queue.remove(&queued);
                self.queue.insert(entry.queued, at);
            } else if entry.users == 0 && !keep.contains(&entry.range) {
                return self.remove(at);
            }
        }
        None
    }

    /// Removes all ranges. Returns the pins that no copy uses.
    pub(super) fn clear(&mut self) -> Vec<P> {
        self.invalidate(&(0..u64::MAX));
        self.sweep()
    }

    /// The number of pins and their total length, including pins that were removed and are still used.
    pub(super) fn size(&self) -> (usize, u64) {
        self.size
    }

    /// About how many bytes of memory this uses.
    pub(super) fn memory(&self) -> usize {
        // Nodes of a B-tree are about two thirds full.
        self.entries.capacity() * (size_of::<Entry>() + size_of::<Option<P>>())
            + self.by_start.len() * 3 * size_of::<(u64, u32)>()
            + self.recent.capacity() * size_of::<(u64, u32)>()
            + (self.marked.capacity() + self.free.capacity()) * size_of::<u32>()
    }
}

/// No attacker chooses page numbers, so a multiplication spreads them well enough. It costs a tenth of the
/// standard library's hash.
#[derive(Default)]
struct PageHasher(u64);

impl Hasher for PageHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("pages are u64")
    }

    fn write_u64(&mut self, page: u64) {
        self.0 = page.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Whether both can be in the map: they share at most one page, and neither contains the other.
fn may_be_neighbours(one: &Range<u64>, other: &Range<u64>) -> bool {
    let (first, second) = if one.start < other.start { (one, other) } else { (other, one) };
    let ordered = first.start < second.start && first.end < second.end;
    ordered && first.end <= second.start.saturating_add(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rules of the module, implemented on a plain list.
    #[derive(Default)]
    struct Model {
        /// Ranges and the numbers of their pins; the least recently used first.
        ranges: Vec<(Range<u64>, u64)>,
    }

    #[derive(Clone, Debug)]
    enum Step {
        /// Find the range, or pin it with all that overlap; if `hold`, keep a reference, as a copy does.
        Use {
            page: u64,
            offset: u64,
            len: u64,
            hold: bool,
        },
        Invalidate {
            page: u64,
            pages: u64,
        },
        /// A second copy uses a range that a copy uses already.
        Share(usize),
        Release(usize),
        Evict {
            keep_page: u64,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let lengths = prop_oneof![1..PAGE, (1..6_u64).prop_map(|pages| pages * PAGE)];
        prop_oneof![
            6 => (0..24_u64, prop_oneof![Just(0), 0..PAGE], lengths, prop::bool::weighted(0.2))
                .prop_map(|(page, offset, len, hold)| Step::Use { page, offset, len, hold }),
            2 => (0..24_u64, 1..4_u64).prop_map(|(page, pages)| Step::Invalidate { page, pages }),
            1 => any::<usize>().prop_map(Step::Share),
            2 => any::<usize>().prop_map(Step::Release),
            2 => (0..24_u64).prop_map(|keep_page| Step::Evict { keep_page }),
        ]
    }

    impl Model {
        fn position(&self, wanted: impl Fn(&Range<u64>) -> bool) -> Option<usize> {
            self.ranges.iter().position(|(range, _)| wanted(range))
        }

        fn take_touching(&mut self, gone: &Range<u64>) -> Vec<u64> {
            let touches = |range: &Range<u64>| range.start < gone.end && gone.start < range.end;
            let taken = self.ranges.extract_if(.., |(range, _)| touches(range));
            taken.map(|(_, pin)| pin).collect()
        }
    }

    /// The map, its model, and the pins that copies use (entry and number of the pin).
    struct MapAndModel {
        ranges: Ranges<u64>,
        model: Model,
        held: Vec<(u32, u64)>,
        /// Pins that the map returned. It must return each once.
        out: Vec<u64>,
    }

    impl MapAndModel {
        fn is_held(&self, pin: u64) -> bool {
            self.held.iter().any(|(_, held)| *held == pin)
        }

        fn take_out(&mut self, pins: impl IntoIterator<Item = u64>) {
            for pin in pins {
                assert!(!self.is_held(pin), "a copy uses it");
                assert!(!self.out.contains(&pin), "twice");
                self.out.push(pin);
            }
        }

        fn use_range(&mut self, number: u64, addr: u64, len: u64) -> (u32, u64) {
            let wanted = addr..addr + len;
            let own = addr / PAGE * PAGE..wanted.end.next_multiple_of(PAGE);
            let contains = |range: &Range<u64>| range.start <= addr && wanted.end <= range.end;
            let found = self.ranges.find(addr, len);
            assert_eq!(found.is_some(), self.model.position(contains).is_some(), "{wanted:?}");
            if let Some(Found { addr: seen, at }) = found {
                // The base encodes the number of the pin and its start.
                let pin = seen >> 32;
                let place = self
                    .model
                    .position(contains)
                    .into_iter()
                    .chain(self.model.ranges.iter().position(|(_, other)| *other == pin));
                let place = place.last().expect("it is there");
                let used = self.model.ranges.remove(place);
                assert!(contains(&used.0) && used.1 == pin);
                assert_eq!(seen & 0xffff_ffff, addr);
                self.model.ranges.push(used);
                return (at, pin);
            }
            let (union, parts) = self.ranges.union(&own);
            for part in &parts {
                let at = self.model.position(|range| range == part).expect("it is there");
                let (_, pin) = self.model.ranges.remove(at);
                let out = self.ranges.remove_at(part.start);
                assert_eq!(out, (!self.is_held(pin)).then_some(pin));
                self.take_out(out);
            }
            assert!(self.model.position(|range| !may_be_neighbours(range, &union)).is_none());
            let base = number << 32 | union.start;
            let at = self.ranges.insert(&union, base, number, true);
            self.model.ranges.push((union, number));
            (at, number)
        }

        fn release(&mut self, (at, pin): (u32, u64)) {
            let out = self.ranges.release(at);
            let is_in = self.model.ranges.iter().any(|(_, other)| *other == pin);
            assert_eq!(out, (!is_in && !self.is_held(pin)).then_some(pin), "with the last user");
            self.take_out(out);
        }

        fn step(&mut self, number: u64, step: Step) {
            match step {
                Step::Use { page, offset, len, hold } => {
                    let used = self.use_range(number, page * PAGE + offset, len);
                    if hold {
                        self.held.push(used);
                    } else {
                        self.release(used);
                    }
                }
                Step::Invalidate { page, pages } => {
                    let gone = page * PAGE + 7..(page + pages) * PAGE - 7;
                    let capacity = self.ranges.marked.capacity();
                    let count = self.ranges.invalidate(&gone);
                    assert_eq!(self.ranges.marked.capacity(), capacity, "allocated inside `free`");
                    assert_eq!(self.ranges.invalidate(&gone), 0, "once");
                    let lost = self.model.take_touching(&gone);
                    assert_eq!(count, lost.len() as u64);
                    assert_eq!(self.ranges.has_marked(), count > 0);
                    let swept = self.ranges.sweep();
                    assert!(!self.ranges.has_marked());
                    let unused = lost.iter().filter(|pin| !self.is_held(**pin)).count();
                    assert_eq!(swept.len(), unused);
                    assert!(swept.iter().all(|pin| lost.contains(pin)));
                    self.take_out(swept);
                }
                Step::Share(pick) if !self.held.is_empty() => {
                    let used = self.held[pick % self.held.len()];
                    self.ranges.acquire(used.0);
                    self.held.push(used);
                }
                Step::Release(pick) if !self.held.is_empty() => {
                    let used = self.held.swap_remove(pick % self.held.len());
                    self.release(used);
                }
                Step::Share(_) | Step::Release(_) => {}
                Step::Evict { keep_page } => {
                    let touched = |range: &Range<u64>| range.contains(&(keep_page * PAGE));
                    let all = self.model.ranges.iter().map(|(range, _)| range.clone());
                    let keep: Vec<Range<u64>> = all.filter(touched).collect();
                    let oldest = self
                        .model
                        .ranges
                        .iter()
                        .position(|(range, pin)| !keep.contains(range) && !self.is_held(*pin));
                    let oldest = oldest.map(|at| self.model.ranges.remove(at).1);
                    let evicted = self.ranges.evict(&keep);
                    assert_eq!(evicted, oldest, "the oldest idle one");
                    self.take_out(evicted);
                }
            }
            assert_eq!(self.ranges.by_start.len(), self.model.ranges.len());
            assert_eq!(self.ranges.queue.len(), self.model.ranges.len());
            let entry = |at: &u32| self.ranges.entries[*at as usize].range.clone();
            let in_order: Vec<_> = self.ranges.by_start.values().map(entry).collect();
            for pair in in_order.windows(2) {
                assert!(pair[0].start < pair[1].start && pair[0].end < pair[1].end, "{pair:?}");
                assert!(pair[0].end <= pair[1].start + PAGE, "{pair:?} share more than a page");
            }
            let most = (2 * self.ranges.entries.len()).max(1);
            assert!(self.ranges.recent.len() <= most, "the hash table grows");
        }
    }

    fn run(steps: Vec<Step>) {
        let (ranges, model) = (Ranges::new(), Model::default());
        let mut both = MapAndModel { ranges, model, held: Vec::new(), out: Vec::new() };
        for (number, step) in steps.into_iter().enumerate() {
            both.step(number as u64, step);
        }
        let cleared = both.ranges.clear();
        both.model.ranges.clear();
        both.take_out(cleared);
        while let Some(used) = both.held.pop() {
            both.release(used);
        }
        assert_eq!(both.ranges.size(), (0, 0), "all came out");
        assert!(both.ranges.find(0, 1).is_none());
    }

    proptest! {
        #[test]
        fn the_map_holds_what_a_plain_list_holds(steps in prop::collection::vec(step(), 1..80)) {
            run(steps);
        }
    }

    #[test]
    fn the_ends_of_the_address_space_do_no_harm() {
        let mut ranges = Ranges::new();
        let last = u64::MAX - 2 * PAGE + 1..u64::MAX - PAGE + 1;
        ranges.insert(&last, 0, (), true);
        assert!(ranges.find(last.start, 0).is_some() && ranges.find(last.end, 0).is_none());
        assert!(ranges.find(u64::MAX, 1).is_none() && ranges.find(u64::MAX, 2).is_none());
        assert_eq!(ranges.invalidate(&(0..u64::MAX)), 1);
    }

    /// Operators see this number and choose the limit on ranges by it.
    #[test]
    fn its_own_memory_is_some_hundred_bytes_for_each_range() {
        let mut ranges = Ranges::new();
        assert_eq!(ranges.memory(), 0);
        for page in 0..10_000 {
            let at = ranges.insert(&(2 * page * PAGE..(2 * page + 1) * PAGE), 0, 0_u64, true);
            ranges.release(at);
            let found = ranges.find(2 * page * PAGE, 1).expect("it is there");
            ranges.release(found.at);
        }
        let each = ranges.memory() / 10_000;
        assert!((150..400).contains(&each), "{each} bytes");
        ranges.clear();
        let emptied = ranges.memory() / 10_000;
        assert!((100..each).contains(&emptied), "{emptied} bytes");
    }
}
