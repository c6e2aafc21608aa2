//! The table that tells Gaudi addresses from others: immutable, swapped as a whole, read without
//! waiting.
//!
//! A tree over the address itself, down to 4 KiB: a lookup takes a handful of steps and touches
//! hardly more memory than the answer, however many allocations there are. A place that belongs to
//! one allocation entirely says so and ends the search, so that large allocations need few places. A
//! change copies two nodes and a leaf on its way down, and the short list of gigabytes in use.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use crate::DeviceId;

/// No two allocations share an aligned piece of this size: the unit of the pool and of the driver.
/// Sizes are in bits of the address.
const UNIT_BITS: u32 = 12;
/// What a leaf stands for: 256 units.
const LEAF_BITS: u32 = UNIT_BITS + 8;
/// Places of a node.
const NODE_BITS: u32 = 5;
/// What a place of the root stands for: two nodes above the leaves.
const ROOT_BITS: u32 = LEAF_BITS + 2 * NODE_BITS;

/// A live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) device: DeviceId,
}

/// The same, with a length that cannot be zero, which keeps a leaf small.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    base: u64,
    len: NonZeroU64,
    device: DeviceId,
}

impl Tenant {
    /// First and last address of all units it touches.
    fn units(&self) -> (u64, u64) {
        let mask = (1 << UNIT_BITS) - 1;
        (self.base & !mask, self.base.saturating_add(self.len.get() - 1) | mask)
    }
}

/// What a piece of the address space belongs to.
#[derive(Clone, Debug)]
enum Place {
    /// Nobody.
    Free,
    /// One tenant, all of it.
    Tenant(Tenant),
    /// Several; larger than a leaf.
    Node(Arc<Node>),
    /// Several; as large as a leaf.
    Leaf(Arc<Leaf>),
}

type Node = [Place; 1 << NODE_BITS];
/// The tenant of each unit. Copied as plain bytes: most changes change little else.
type Leaf = [Option<Tenant>; LEAF_UNITS];
const LEAF_UNITS: usize = 1 << (LEAF_BITS - UNIT_BITS);

impl Place {
    /// This place, which starts at `start` and has `1 << bits` bytes, with `[first, last]` given to
    /// `tenant`, or freed.
    fn with(&self, start: u64, bits: u32, first: u64, last: u64, tenant: Option<Tenant>) -> Place {
        let end = start + ((1 << bits) - 1);
        if first <= start && end <= last {
            return tenant.map_or(Place::Free, Place::Tenant);
        }
        let (first, last) = (first.max(start), last.min(end));
        if bits == LEAF_BITS {
            let mut leaf = match self {
                Place::Leaf(leaf) => Arc::clone(leaf),
                Place::Tenant(whole) => Arc::new([Some(*whole); LEAF_UNITS]),
                Place::Free | Place::Node(_) => Arc::new([None; LEAF_UNITS]),
            };
            let at = |addr: u64| ((addr - start) >> UNIT_BITS) as usize;
            let units = Arc::make_mut(&mut leaf);
            units[at(first)..=at(last)].fill(tenant);
            let free = units.iter().all(Option::is_none);
            return if free { Place::Free } else { Place::Leaf(leaf) };
        }
        let mut node = match self {
            Place::Node(node) => Arc::clone(node),
            whole => Arc::new(std::array::from_fn(|_| whole.clone())),
        };
        let bits = bits - NODE_BITS;
        let at = |addr: u64| ((addr - start) >> bits) as usize;
        let parts = Arc::make_mut(&mut node);
        for (number, part) in (at(first)..).zip(&mut parts[at(first)..=at(last)]) {
            let part_start = start + ((number as u64) << bits);
            *part = part.with(part_start, bits, first, last, tenant);
        }
        let free = parts.iter().all(|part| matches!(part, Place::Free));
        if free { Place::Free } else { Place::Node(node) }
    }
}

/// All tenants at one time.
#[derive(Clone, Debug, Default)]
struct Snapshot {
    /// Pieces of `1 << ROOT_BITS` bytes by their number; those with nobody in them are left out.
    root: Vec<(u64, Place)>,
}

impl Snapshot {
    /// The tenant of the unit that `addr` lies in.
    fn at(&self, addr: u64) -> Option<&Tenant> {
        let at = self.root.binary_search_by_key(&(addr >> ROOT_BITS), |(piece, _)| *piece).ok()?;
        let mut place = &self.root[at].1;
        let mut bits = ROOT_BITS;
        loop {
            match place {
                Place::Free => return None,
                Place::Tenant(tenant) => return Some(tenant),
                Place::Leaf(leaf) => {
                    return leaf[(addr >> UNIT_BITS) as usize % leaf.len()].as_ref();
                }
                Place::Node(node) => {
                    bits -= NODE_BITS;
                    place = &node[(addr >> bits) as usize % node.len()];
                }
            }
        }
    }

    /// The tenant gets its units, or loses them.
    fn with(&self, tenant: Tenant, is_there: bool) -> Self {
        let mut next = self.clone();
        let (first, last) = tenant.units();
        for piece in first >> ROOT_BITS..=last >> ROOT_BITS {
            let known = next.root.binary_search_by_key(&piece, |(piece, _)| *piece);
            let old = known.map_or(&Place::Free, |at| &next.root[at].1);
            let start = piece << ROOT_BITS;
            let place = old.with(start, ROOT_BITS, first, last, is_there.then_some(tenant));
            match (known, place) {
                (Ok(at), Place::Free) => drop(next.root.remove(at)),
                (Ok(at), place) => next.root[at].1 = place,
                (Err(_), Place::Free) => {}
                (Err(at), place) => next.root.insert(at, (piece, place)),
            }
        }
        next
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
        let tenant = snapshot.at(addr)?;
        let (base, size, device) = (tenant.base, tenant.len.get(), tenant.device);
        let offset = addr.checked_sub(base)?;
        (offset < size && len <= size - offset).then_some(Entry { base, len: size, device })
    }

    /// Adds an allocation. It must not share a unit of 4 KiB with another; an empty one is nowhere.
    pub(crate) fn insert(&self, entry: Entry) {
        let Some(len) = NonZeroU64::new(entry.len) else { return };
        let tenant = Tenant { base: entry.base, len, device: entry.device };
        self.lowest.fetch_min(entry.base, Ordering::Relaxed);
        self.highest.fetch_max(entry.base + entry.len, Ordering::Relaxed);
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let next = self.current.load().with(tenant, true);
        self.current.store(Arc::new(next));
    }

    /// Removes the allocation that starts at `base`, if there is one.
    pub(crate) fn remove(&self, base: u64) {
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let current = self.current.load();
        let tenant = current.at(base).filter(|tenant| tenant.base == base);
        if let Some(&tenant) = tenant {
            self.current.store(Arc::new(current.with(tenant, false)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const UNIT: u64 = 1 << UNIT_BITS;

    /// Every address of `[first, last]` that some node could get wrong: the ends of what is asked
    /// about, and of all tenants.
    fn check(table: &Table, model: &BTreeMap<u64, (u64, DeviceId)>, probes: &[(u64, u64)]) {
        let ends = model.iter().flat_map(|(&base, &(len, _))| {
            let end = base + len;
            [
                (base, len),
                (base, len + 1),
                (end - 1, 1),
                (end, 0),
                (base - 1, 1),
                (base + len / 2, 1),
            ]
        });
        for (addr, len) in ends.chain(probes.iter().copied()) {
            let expected = model.range(..=addr).next_back().and_then(|(&base, &(size, device))| {
                let inside = addr < base + size && addr + len <= base + size;
                inside.then_some(Entry { base, len: size, device })
            });
            assert_eq!(table.find(addr, len), expected, "{len} bytes at {addr:#x}");
        }
    }

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
            check(&table, &model, &probes);
        }

        /// Tenants of all sizes, up to many gigabytes, one behind the other with or without gaps.
        #[test]
        fn tenants_of_all_sizes_lie_side_by_side(
            start in (1..1_u64 << 50).prop_map(|unit| unit * UNIT),
            sizes in prop::collection::vec((0..36_u32, any::<u64>(), 0..3_u64), 1..60),
            removed in prop::collection::vec(any::<usize>(), 0..60),
            probes in prop::collection::vec((any::<u64>(), 0..1_u64 << 40), 50)
        ) {
            let table = Table::default();
            let mut model = BTreeMap::new();
            let mut base = start;
            for (number, (magnitude, random, gap)) in sizes.into_iter().enumerate() {
                let len = (1 << magnitude) + random % (1 << magnitude);
                let device = DeviceId(number as u32);
                table.insert(Entry { base, len, device });
                model.insert(base, (len, device));
                base += len.next_multiple_of(UNIT) + gap * UNIT;
            }
            let probes: Vec<(u64, u64)> =
                probes.into_iter().map(|(at, len)| (start + at % (base - start), len)).collect();
            check(&table, &model, &probes);
            for pick in removed {
                let Some(&base) = model.keys().nth(pick % model.len().max(1)) else { break };
                table.remove(base + 1);
                table.remove(base);
                model.remove(&base);
            }
            check(&table, &model, &probes);
            for base in model.into_keys() {
                table.remove(base);
            }
            prop_assert!(table.current.load().root.is_empty(), "nothing is left behind");
        }
    }

    #[test]
    fn a_large_tenant_needs_few_places() {
        let table = Table::default();
        table.insert(Entry { base: 3 << 30, len: 96 << 30, device: DeviceId(0) });
        let snapshot = table.current.load();
        assert_eq!(snapshot.root.len(), 96);
        assert!(snapshot.root.iter().all(|(_, place)| matches!(place, Place::Tenant(_))));
        assert!(table.find((99 << 30) - 1, 1).is_some() && table.find(99 << 30, 0).is_none());
    }

    #[test]
    fn an_empty_tenant_is_nowhere() {
        let table = Table::default();
        table.insert(Entry { base: UNIT, len: 0, device: DeviceId(0) });
        assert_eq!(table.find(UNIT, 0), None);
        table.remove(UNIT);
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
