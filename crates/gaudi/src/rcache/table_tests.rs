//! The table against a model of what it should hold, over any sequence of what can happen to it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::table::{Bounds, Found, Inserted, Swept, Table, Value};

const PAGE: u64 = 4096;
/// The model's world: this many pages, spread over all levels of the tree.
const PAGES: u64 = 40;

/// Pages side by side, and far apart: at borders of 2 MiB, of 1 GiB and beyond.
fn address(page: u64) -> u64 {
    let near = page * PAGE;
    let base = match page * 4 / PAGES {
        0 => 0x5555_0000_0000,
        1 => 0x7f00_001f_0000 - (PAGES / 4) * PAGE,
        _ => 0x7fff_3ff0_0000 - (PAGES / 2) * PAGE,
    };
    base + near
}

/// When it was made, and for which range.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pin(Arc<(usize, Range<u64>)>);

impl Value for Pin {
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A copy of these bytes: from a page and a place in it, that many more.
    Get {
        page: u64,
        offset: u64,
        len: u64,
        hold: bool,
    },
    Invalidate {
        page: u64,
        pages: u64,
    },
    /// A copy that was running ends.
    Release(usize),
    Sweep,
    EvictIdle,
    /// From now on this page cannot be pinned; or all can.
    Refuse(Option<u64>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let get = (0..PAGES, 0..PAGE, 1..3 * PAGE, any::<bool>())
        .prop_map(|(page, offset, len, hold)| Step::Get { page, offset, len, hold });
    let step = prop_oneof![
        8 => get,
        3 => (0..PAGES, 1..4_u64).prop_map(|(page, pages)| Step::Invalidate { page, pages }),
        3 => any::<usize>().prop_map(Step::Release),
        1 => Just(Step::Sweep),
        1 => prop::bool::weighted(0.1).prop_map(|all| if all { Step::EvictIdle } else { Step::Sweep }),
        1 => prop::option::of(0..PAGES).prop_map(Step::Refuse),
    ];
    prop::collection::vec(step, 1..200)
}

/// The table, and beside it what it should be.
struct Beside {
    table: Table<Pin>,
    bounds: Bounds,
    now: usize,
    /// When memory of a page last went away.
    lost: BTreeMap<u64, usize>,
    held: Vec<Found<Pin>>,
    /// What the table holds, if it never has to evict: start and end.
    ranges: BTreeMap<u64, u64>,
    refused: Option<u64>,
    made: usize,
    came_out: usize,
}

impl Beside {
    fn new(bounds: Bounds) -> Self {
        Self {
            table: Table::new(),
            bounds,
            now: 0,
            lost: BTreeMap::new(),
            held: Vec::new(),
            ranges: BTreeMap::new(),
            refused: None,
            made: 0,
            came_out: 0,
        }
    }

    fn swept(&mut self, swept: Swept<Pin>) {
        self.came_out += swept.values.len();
        assert_eq!(swept.values.len() as u64, swept.regions);
    }

    /// What is found is for the memory that is there now.
    fn check(&self, found: &Found<Pin>, addr: u64, len: u64) {
        let (made, range) = &*found.value.0;
        assert_eq!(found.start, range.start);
        assert!(range.start <= addr && addr + len <= range.end, "{addr:#x} in {range:x?}");
        for page in (range.start..range.end).step_by(PAGE as usize) {
            let lost = self.lost.get(&page).copied().unwrap_or(0);
            assert!(lost < *made, "{page:#x} went away after it was pinned");
        }
    }

    fn overlaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let all = self.ranges.iter().map(|(&start, &end)| start..end);
        all.filter(|other| other.start < range.end && range.start < other.end).collect()
    }

    fn get(&mut self, addr: u64, len: u64, hold: bool, exact: bool) -> bool {
        let expected = self.overlaps(&(addr..addr + len));
        let hit = expected.iter().any(|range| range.start <= addr && addr + len <= range.end);
        let mut swept = Swept::default();
        let (now, refused) = (self.now, self.refused);
        let mut made = Vec::new();
        let inserted = self.table.insert(
            (addr, len),
            &(addr..addr + len),
            self.bounds,
            &mut swept,
            |range, _, _| {
                if refused.is_some_and(|page| range.contains(&page)) {
                    return Err(());
                }
                made.push(range.clone());
                Ok(Pin(Arc::new((now, range.clone()))))
            },
        );
        self.made += made.len();
        self.swept(swept);
        let own = addr & !(PAGE - 1)..(addr + len).next_multiple_of(PAGE);
        let others = self.overlaps(&own);
        if !hit {
            for other in &others {
                self.ranges.remove(&other.start);
            }
        }
        let was_hit = matches!(inserted, Ok(Inserted::Hit(_)));
        match inserted {
            Ok(Inserted::Hit(found) | Inserted::Made(found)) => {
                self.check(&found, addr, len);
                if !was_hit {
                    let (_, range) = &*found.value.0;
                    let union = others.iter().fold(own.clone(), |all, other| {
                        all.start.min(other.start)..all.end.max(other.end)
                    });
                    assert!(range.start <= own.start && own.end <= range.end, "{range:x?}");
                    if exact && refused.is_none_or(|page| !union.contains(&page)) {
                        assert_eq!(*range, union, "with all it overlaps");
                    }
                    self.ranges.insert(range.start, range.end);
                }
                if hold {
                    self.held.push(found);
                }
            }
            Ok(Inserted::NoRoom) => assert!(made.is_empty()),
            Err(()) => assert!(refused.is_some_and(|page| own.contains(&page))),
        }
        hit == was_hit
    }

    fn invalidate(&mut self, range: &Range<u64>, exact: bool) {
        for page in (range.start..range.end).step_by(PAGE as usize) {
            self.lost.insert(page, self.now);
        }
        let gone = self.overlaps(range);
        let lost = self.table.invalidate(range.start, range.end);
        assert!(!exact || lost as usize == gone.len());
        for other in gone {
            self.ranges.remove(&other.start);
        }
    }

    fn find_all(&self) {
        for page in 0..PAGES {
            let addr = address(page) + 17;
            if let Some(found) = self.table.find(addr, 1) {
                self.check(&found, addr, 1);
            }
        }
    }

    fn run(&mut self, steps: Vec<Step>, exact: bool) {
        for step in steps {
            self.now += 1;
            match step {
                Step::Get { page, offset, len, hold } => {
                    let as_expected = self.get(address(page) + offset, len, hold, exact);
                    assert!(as_expected || !exact, "a hit that is none, or the reverse");
                }
                Step::Invalidate { page, pages } => {
                    self.invalidate(&(address(page)..address(page) + pages * PAGE), exact);
                }
                Step::Release(_) if self.held.is_empty() => {}
                Step::Release(pick) => {
                    let pick = pick % self.held.len();
                    self.held.swap_remove(pick);
                }
                Step::Sweep => {
                    let mut swept = Swept::default();
                    self.table.lock().sweep(&mut swept);
                    self.swept(swept);
                }
                Step::EvictIdle if exact => {}
                Step::EvictIdle => {
                    let mut swept = Swept::default();
                    self.table.lock().evict_idle(&mut swept);
                    self.swept(swept);
                }
                Step::Refuse(page) => self.refused = page.map(address),
            }
            self.find_all();
            let (regions, bytes) = self.table.lock().size();
            assert!(self.bounds.regions >= regions || self.table.has_marked());
            assert!(self.bounds.bytes >= bytes || self.table.has_marked());
        }
        if exact {
            let found = (0..PAGES).filter_map(|page| self.table.find(address(page), 1));
            let mut found: Vec<(u64, u64)> =
                found.map(|found| (found.start, found.value.0.1.end)).collect();
            found.dedup();
            let all: Vec<(u64, u64)> =
                self.ranges.iter().map(|(&start, &end)| (start, end)).collect();
            for range in found {
                assert!(all.contains(&range), "{range:x?} should not be there");
            }
            for range in &self.ranges {
                let found = self.table.find(*range.0, range.1 - range.0);
                assert!(found.is_some(), "{range:x?} should be there");
            }
        }
        let mut swept = Swept::default();
        self.table.lock().clear(&mut swept);
        self.swept(swept);
        assert_eq!(self.made, self.came_out, "all that was made comes out, once");
        assert_eq!(self.table.lock().size(), (0, 0));
        assert!((0..PAGES).all(|page| self.table.find(address(page), 1).is_none()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn without_bounds_the_table_holds_exactly_what_the_model_does(steps in steps()) {
        Beside::new(Bounds { regions: usize::MAX, bytes: u64::MAX >> 1 }).run(steps, true);
    }

    #[test]
    fn with_bounds_it_never_holds_more_nor_memory_that_went_away(
        steps in steps(), regions in 1..6_usize, pages in 1..12_u64
    ) {
        Beside::new(Bounds { regions, bytes: pages * PAGE }).run(steps, false);
    }
}

#[test]
fn large_ranges_take_few_nodes_and_addresses_beyond_the_tree_are_not_kept() {
    let table = Table::<Pin>::new();
    let bounds = Bounds { regions: 10, bytes: u64::MAX };
    let empty = table.memory();
    let get = |range: &Range<u64>| {
        let mut swept = Swept::default();
        let wanted = (range.start, range.end - range.start);
        let pin = Pin(Arc::new((0, range.clone())));
        table.insert(wanted, range, bounds, &mut swept, |_, _, _| Ok::<_, ()>(pin.clone()))
    };
    let large = 3 << 30..103 << 30;
    assert!(matches!(get(&large), Ok(Inserted::Made(_))));
    assert!(table.find((103 << 30) - 1, 1).is_some() && table.find(103 << 30, 1).is_none());
    assert!(table.find((2 << 30) - 1, 2).is_none());
    assert!(table.memory() - empty < 32 << 10, "{} bytes", table.memory() - empty);
    let beyond = (1 << 48) - 4096..(1 << 48) + 4096;
    assert!(matches!(get(&beyond), Ok(Inserted::NoRoom)));
    assert!(table.find(u64::MAX, 1).is_none() && table.find(u64::MAX, 2).is_none());
    assert_eq!(table.invalidate(0, u64::MAX), 1);
}
