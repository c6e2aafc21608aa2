//! The table that tells Gaudi addresses from others: immutable, swapped as a whole, read without
//! waiting.
//!
//! Live allocations are kept sorted in leaves of at most [`LEAF`] entries. A change copies one leaf
//! and the list of leaves, never all entries, so that it stays cheap with tens of thousands of
//! allocations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use crate::DeviceId;

/// Most entries of a leaf.
const LEAF: usize = 512;

/// A live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) device: DeviceId,
}

#[derive(Clone, Debug, Default)]
struct Snapshot {
    /// First address of each leaf, for the search.
    firsts: Vec<u64>,
    /// Never empty, sorted, disjoint.
    leaves: Vec<Arc<[Entry]>>,
}

impl Snapshot {
    /// The entry with the greatest base at or below `addr`.
    fn below(&self, addr: u64) -> Option<&Entry> {
        let leaf = self.firsts.partition_point(|&first| first <= addr).checked_sub(1)?;
        let entries = &self.leaves[leaf];
        let at = entries.partition_point(|entry| entry.base <= addr).checked_sub(1)?;
        Some(&entries[at])
    }

    fn inserted(&self, entry: Entry) -> Self {
        let mut next = self.clone();
        let place = self.firsts.partition_point(|&first| first <= entry.base).saturating_sub(1);
        let Some(old) = self.leaves.get(place) else {
            next.put(0..0, &[entry]);
            return next;
        };
        let mut entries = old.to_vec();
        let at = entries.partition_point(|other| other.base < entry.base);
        entries.insert(at, entry);
        next.put(place..place + 1, &entries);
        next
    }

    fn removed(&self, base: u64) -> Self {
        let mut next = self.clone();
        let place = self.firsts.partition_point(|&first| first <= base).saturating_sub(1);
        let Some(old) = self.leaves.get(place) else { return next };
        let mut entries: Vec<Entry> =
            old.iter().copied().filter(|entry| entry.base != base).collect();
        // Leaves that shrank join their neighbour, so that few allocations never need many leaves.
        match self.leaves.get(place + 1) {
            Some(neighbour) if entries.len() + neighbour.len() <= LEAF / 2 => {
                entries.extend_from_slice(neighbour);
                next.put(place..place + 2, &entries);
            }
            _ => next.put(place..place + 1, &entries),
        }
        next
    }

    /// Replaces a range of leaves by `entries`, in two leaves if one would be too large.
    fn put(&mut self, range: std::ops::Range<usize>, entries: &[Entry]) {
        let size = if entries.len() > LEAF { LEAF / 2 } else { LEAF };
        let leaves: Vec<Arc<[Entry]>> = entries.chunks(size).map(Arc::from).collect();
        let firsts: Vec<u64> = leaves.iter().map(|leaf| leaf[0].base).collect();
        self.firsts.splice(range.clone(), firsts);
        self.leaves.splice(range, leaves);
    }
}

/// All live allocations of the process.
#[derive(Debug)]
pub(crate) struct Table {
    /// No allocation was ever below `lowest` or ended above `highest`: most pointers of a program
    /// are host memory and need no search.
    lowest: AtomicU64,
    highest: AtomicU64,
    current: ArcSwap<Snapshot>,
    /// Held while a new snapshot is made; readers never look at it.
    writer: Mutex<()>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            lowest: AtomicU64::new(u64::MAX),
            highest: AtomicU64::new(0),
            current: ArcSwap::default(),
            writer: Mutex::default(),
        }
    }
}

impl Table {
    /// The live allocation that holds all of `[addr, addr + len)`.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<Entry> {
        // Whoever has an address got it after the bounds were set, and passed it on with an order
        // of its own.
        if addr < self.lowest.load(Ordering::Relaxed)
            || addr >= self.highest.load(Ordering::Relaxed)
        {
            return None;
        }
        let snapshot = self.current.load();
        let entry = snapshot.below(addr)?;
        let offset = addr - entry.base;
        (offset < entry.len && len <= entry.len - offset).then_some(*entry)
    }

    pub(crate) fn insert(&self, entry: Entry) {
        self.lowest.fetch_min(entry.base, Ordering::Relaxed);
        self.highest.fetch_max(entry.base + entry.len, Ordering::Relaxed);
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.current.load().inserted(entry);
        self.current.store(Arc::new(next));
    }

    pub(crate) fn remove(&self, base: u64) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.current.load().removed(base);
        self.current.store(Arc::new(next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const UNIT: u64 = 1 << 12;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn the_table_agrees_with_a_map_over_any_sequence(
            steps in prop::collection::vec((0..1500_u64, 1..2 * UNIT, prop::bool::weighted(0.8)), 1..2500),
            probes in prop::collection::vec((0..1502 * 2 * UNIT, 0..3 * UNIT), 100)
        ) {
            let table = Table::default();
            let mut model = BTreeMap::new();
            for (slot, len, insert) in steps {
                let base = (1 + slot) * 2 * UNIT;
                if insert && !model.contains_key(&base) {
                    table.insert(Entry { base, len, device: DeviceId(slot as u32) });
                    model.insert(base, (len, DeviceId(slot as u32)));
                } else if !insert {
                    table.remove(base);
                    model.remove(&base);
                }
            }
            for (addr, len) in probes {
                let expected = model.range(..=addr).next_back().and_then(|(&base, &(size, device))| {
                    let inside = addr < base + size && addr + len <= base + size;
                    inside.then_some(Entry { base, len: size, device })
                });
                prop_assert_eq!(table.find(addr, len), expected);
            }
            let snapshot = table.current.load();
            prop_assert!(snapshot.leaves.iter().all(|leaf| !leaf.is_empty() && leaf.len() <= LEAF));
            prop_assert_eq!(snapshot.leaves.iter().map(|leaf| leaf.len()).sum::<usize>(), model.len());
        }
    }

    #[test]
    fn ranges_that_straddle_an_end_are_not_found() {
        let table = Table::default();
        table.insert(Entry { base: 4096, len: 100, device: DeviceId(1) });
        table.insert(Entry { base: 8192, len: 4096, device: DeviceId(1) });
        assert!(table.find(4096, 100).is_some());
        assert!(table.find(4195, 1).is_some());
        assert!(table.find(4195, 0).is_some());
        assert!(table.find(4195, 2).is_none(), "beyond the end");
        assert!(table.find(4196, 0).is_none(), "the byte after");
        assert!(table.find(4095, 2).is_none(), "before the start");
        assert!(table.find(4096, u64::MAX).is_none(), "a length that wraps");
        assert!(table.find(8192 - 10, 20).is_none(), "into the next");
        assert!(table.find(u64::MAX, usize::MAX as u64).is_none());
    }

    #[test]
    fn readers_never_see_a_half_made_table() {
        let table = Table::default();
        table.insert(Entry { base: UNIT, len: UNIT, device: DeviceId(0) });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..2000_u64 {
                    let base = (2 + round % 300) * UNIT;
                    table.insert(Entry { base, len: UNIT, device: DeviceId(1) });
                    table.remove(base);
                }
            });
            for _ in 0..2000 {
                assert!(table.find(UNIT, UNIT).is_some());
            }
        });
    }
}
