//! The table against a model, over random sequences of operations.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;

use proptest::prelude::*;

use super::table::hints::Hints;
use super::table::{Bounds, CachedRange, Found, Inserted, Swept, Table};

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
struct Pin {
    made: usize,
    range: Range<u64>,
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
    let get = (0..PAGES, 0..PAGE, 1..7 * PAGE, any::<bool>())
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

/// What the table should hold: ranges by number, and the owner of every page.
#[derive(Default)]
struct Model {
    ranges: BTreeMap<usize, Range<u64>>,
    owners: BTreeMap<u64, usize>,
}

impl Model {
    fn contains(&self, addr: u64, len: u64) -> bool {
        let first = addr & !(PAGE - 1);
        [first, first + PAGE].iter().any(|page| {
            let range = self.owners.get(page).map(|owner| &self.ranges[owner]);
            range.is_some_and(|range| range.start <= addr && addr + len <= range.end)
        })
    }

    /// Those that own a page between the first and the last of `range`, or of all where there is
    /// none between.
    fn in_the_way(&self, range: &Range<u64>) -> Vec<usize> {
        let inner = inner(range);
        let mut owners: Vec<usize> = self.owners.range(inner).map(|(_, &owner)| owner).collect();
        owners.sort_unstable();
        owners.dedup();
        owners
    }

    fn remove(&mut self, number: usize) {
        self.ranges.remove(&number);
        self.owners.retain(|_, owner| *owner != number);
    }

    fn insert(&mut self, number: usize, range: &Range<u64>) {
        self.ranges.insert(number, range.clone());
        for page in (range.start..range.end).step_by(PAGE as usize) {
            if inner(range).contains(&page) {
                self.owners.insert(page, number);
            } else {
                self.owners.entry(page).or_insert(number);
            }
        }
    }

    fn lose(&mut self, range: &Range<u64>) -> usize {
        let touched = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        let all = self.ranges.iter().filter(|(_, other)| touched(other));
        let lost: Vec<usize> = all.map(|(&number, _)| number).collect();
        for &number in &lost {
            self.remove(number);
        }
        lost.len()
    }
}

fn inner(pages: &Range<u64>) -> Range<u64> {
    if pages.end - pages.start > 2 * PAGE {
        pages.start + PAGE..pages.end - PAGE
    } else {
        pages.clone()
    }
}

/// The table, and beside it what it should be.
struct Beside {
    table: Table<usize>,
    /// By their numbers.
    pins: RefCell<Vec<Pin>>,
    bounds: Bounds,
    now: usize,
    /// When memory of a page last went away.
    lost: BTreeMap<u64, usize>,
    /// Numbers of pins that copies use.
    held: Vec<(usize, NonNull<CachedRange>)>,
    /// Only for a table that never has to evict.
    model: Option<Model>,
    refused: Option<u64>,
    came_out: Cell<usize>,
}

impl Beside {
    fn new(bounds: Bounds, model: Option<Model>) -> Self {
        Self {
            table: Table::new(),
            pins: RefCell::default(),
            bounds,
            now: 0,
            lost: BTreeMap::new(),
            held: Vec::new(),
            model,
            refused: None,
            came_out: Cell::default(),
        }
    }

    fn swept(&self, swept: Swept<usize>) {
        self.came_out.set(self.came_out.get() + swept.values.len());
        assert_eq!(swept.values.len() as u64, swept.regions);
        let used = |number: &usize| self.held.iter().any(|(held, _)| held == number);
        assert!(!swept.values.iter().any(used), "came out while a copy uses it");
    }

    /// What is found is for the memory that is there now.
    fn check(&self, found: &Found<'_, usize>, addr: u64, len: u64) {
        let Pin { made, range } = self.pins.borrow()[found.base as usize].clone();
        assert_eq!(found.start, range.start);
        assert!(range.start <= addr && addr + len <= range.end, "{addr:#x} in {range:x?}");
        for page in (range.start..range.end).step_by(PAGE as usize) {
            let lost = self.lost.get(&page).copied().unwrap_or(0);
            assert!(lost < made, "{page:#x} went away after it was pinned");
        }
    }

    fn get(&mut self, addr: u64, len: u64, hold: bool) {
        let mut swept = Swept::default();
        let (now, refused) = (self.now, self.refused);
        let refuses = |range: &Range<u64>| refused.is_some_and(|page| range.contains(&page));
        let before = self.pins.borrow().len();
        let bounds = self.bounds;
        let whole = addr..addr + len;
        let inserted = self.table.insert((addr, len), &whole, bounds, &mut swept, |range, _, _| {
            if refuses(range) {
                return Err(());
            }
            let mut pins = self.pins.borrow_mut();
            let number = pins.len();
            pins.push(Pin { made: now, range: range.clone() });
            Ok((number as u64, number))
        });
        let own = addr & !(PAGE - 1)..(addr + len).next_multiple_of(PAGE);
        if let Some(model) = &mut self.model {
            let is_hit = matches!(inserted, Ok(Inserted::Hit(_)));
            assert_eq!(is_hit, model.contains(addr, len), "a hit");
            if !is_hit {
                let others = model.in_the_way(&own);
                let union = others.iter().fold(own.clone(), |all, other| {
                    let other = &model.ranges[other];
                    all.start.min(other.start)..all.end.max(other.end)
                });
                for other in others {
                    model.remove(other);
                }
                let range = if refuses(&union) { own.clone() } else { union };
                if let Ok(Inserted::New(found)) = &inserted {
                    assert_eq!(
                        self.pins.borrow()[found.base as usize].range,
                        range,
                        "the range that was made"
                    );
                    model.insert(now, &range);
                }
            }
        }
        match inserted {
            Ok(Inserted::Hit(found) | Inserted::New(found)) => {
                self.check(&found, addr, len);
                assert!(self.table.find(addr, len).is_some(), "it is found from now on");
                if hold {
                    self.held.push((found.base as usize, found.range.into_raw()));
                }
            }
            Ok(Inserted::Full) => {
                assert!(self.pins.borrow().len() == before && self.model.is_none());
            }
            Err(()) => assert!(refuses(&own)),
        }
        self.swept(swept);
    }

    fn invalidate(&mut self, range: &Range<u64>) {
        for page in (range.start..range.end).step_by(PAGE as usize) {
            self.lost.insert(page, self.now);
        }
        let lost = self.table.invalidate(range.start, range.end);
        if let Some(model) = &mut self.model {
            assert_eq!(lost as usize, model.lose(range), "ranges that were lost");
        }
    }

    /// Every page is found or not, as it should be.
    fn find_all(&self) {
        for page in 0..PAGES {
            let addr = address(page) + 17;
            let found = self.table.find(addr, PAGE);
            if let Some(found) = &found {
                self.check(found, addr, PAGE);
            }
            if let Some(model) = &self.model {
                assert_eq!(found.is_some(), model.contains(addr, PAGE), "{addr:#x}");
            }
        }
        for range in self.model.iter().flat_map(|model| model.ranges.values()) {
            let found = self.table.find(range.start, range.end - range.start);
            assert!(found.is_some(), "{range:x?} should be there, whole");
        }
    }

    /// A copy ends.
    fn release(&mut self, pick: usize) {
        let (number, entry) = self.held.swap_remove(pick);
        // SAFETY: a reference of this table, which is released here, once.
        let last = unsafe { self.table.release(entry) };
        if last {
            let still = self.held.iter().any(|(held, _)| *held == number);
            assert!(!still && self.table.has_marked(), "someone can sweep now");
        }
    }

    fn run(&mut self, steps: Vec<Step>) {
        for step in steps {
            self.now += 1;
            match step {
                Step::Get { page, offset, len, hold } => {
                    self.get(address(page) + offset, len, hold);
                }
                Step::Invalidate { page, pages } => {
                    self.invalidate(&(address(page)..address(page) + pages * PAGE));
                }
                Step::Release(_) if self.held.is_empty() => {}
                Step::Release(pick) => {
                    self.release(pick % self.held.len());
                }
                Step::EvictIdle if self.model.is_none() => {
                    let mut swept = Swept::default();
                    self.table.lock().evict_idle(usize::MAX, &mut swept);
                    self.swept(swept);
                }
                Step::Sweep | Step::EvictIdle => {
                    let mut swept = Swept::default();
                    self.table.lock().sweep(&mut swept);
                    self.swept(swept);
                }
                Step::Refuse(page) => self.refused = page.map(address),
            }
            self.find_all();
            let (regions, bytes) = self.table.lock().size();
            // What is in use stays, also if its memory went away.
            let length = |number: usize| {
                let range = &self.pins.borrow()[number].range;
                range.end - range.start
            };
            let used: u64 = self.held.iter().map(|(held, _)| length(*held)).sum();
            let bounds = self.bounds;
            assert!(bounds.regions + self.held.len() >= regions || self.table.has_marked());
            assert!(bounds.bytes + used >= bytes || self.table.has_marked());
        }
        while !self.held.is_empty() {
            self.release(0);
        }
        let mut swept = Swept::default();
        self.table.lock().clear(&mut swept);
        self.swept(swept);
        assert_eq!(
            self.pins.borrow().len(),
            self.came_out.get(),
            "all that was made comes out, once"
        );
        assert_eq!(self.table.lock().size(), (0, 0));
        assert!((0..PAGES).all(|page| self.table.find(address(page), 1).is_none()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn without_bounds_the_table_holds_exactly_what_the_model_does(steps in steps()) {
        let bounds = Bounds { regions: usize::MAX >> 1, bytes: u64::MAX >> 1 };
        Beside::new(bounds, Some(Model::default())).run(steps);
    }

    #[test]
    fn with_bounds_it_never_holds_more_nor_memory_that_went_away(
        steps in steps(), regions in 1..6_usize, pages in 1..12_u64
    ) {
        Beside::new(Bounds { regions, bytes: pages * PAGE }, None).run(steps);
    }
}

#[test]
fn large_ranges_take_few_nodes_and_addresses_beyond_the_tree_are_not_kept() {
    let table = Table::<()>::new();
    let bounds = Bounds { regions: 10, bytes: u64::MAX };
    let empty = table.memory();
    let get = |range: &Range<u64>| {
        let mut swept = Swept::default();
        let wanted = (range.start, range.end - range.start);
        table.insert(wanted, range, bounds, &mut swept, |_, _, _| Ok::<_, ()>((0, ())))
    };
    let large = 3 << 30..103 << 30;
    assert!(matches!(get(&large), Ok(Inserted::New(_))));
    assert!(table.find((103 << 30) - 1, 1).is_some() && table.find(103 << 30, 1).is_none());
    assert!(table.find((2 << 30) - 1, 2).is_none());
    assert!(table.memory() - empty < 32 << 10, "{} bytes", table.memory() - empty);
    let beyond = (1 << 48) - 4096..(1 << 48) + 4096;
    assert!(matches!(get(&beyond), Ok(Inserted::Full)));
    let longest = 0..1 << 41;
    assert!(matches!(get(&longest), Ok(Inserted::Full)));
    assert!(table.find(u64::MAX, 1).is_none() && table.find(u64::MAX, 2).is_none());
    assert_eq!(table.invalidate(0, u64::MAX), 1);
}

#[test]
fn ranges_that_would_be_too_long_together_are_not_joined() {
    const GIB: u64 = 1 << 30;
    let table = Table::<()>::new();
    let bounds = Bounds { regions: 10, bytes: u64::MAX };
    for start in [16 << 40, (16 << 40) + 500 * GIB] {
        let range = start..start + 600 * GIB;
        let mut swept = Swept::default();
        let made = table.insert((range.end - 1, 1), &range, bounds, &mut swept, |range, _, _| {
            Ok::<_, ()>((range.start, ()))
        });
        let Ok(Inserted::New(found)) = made else { panic!("not made at {start:#x}") };
        assert_eq!(found.start, start);
    }
    assert!(table.find(16 << 40, 1).is_none(), "the first was evicted for the second");
    let last = table.find((16 << 40) + 1099 * GIB, GIB).unwrap();
    assert_eq!(last.base, (16 << 40) + 500 * GIB);
    drop(last);
    assert_eq!(table.invalidate((16 << 40) + 900 * GIB, (16 << 40) + 901 * GIB), 1);
}

/// Whoever makes a value may evict others for it; memory may be unmapped at that moment, too.
#[test]
fn a_range_that_is_invalidated_while_its_value_is_made_is_not_reused_before_it_is_swept() {
    let table = Table::<u64>::new();
    let bounds = Bounds { regions: 10, bytes: 1 << 30 };
    let range = |page: u64| address(page)..address(page) + PAGE;
    let mut swept = Swept::default();
    let mut get = |page: u64, lose: bool| {
        let made = table.insert(
            (address(page), PAGE),
            &range(page),
            bounds,
            &mut swept,
            |range, others, swept| {
                if lose {
                    assert_eq!(table.invalidate(range.start, range.end), 1);
                }
                others.evict_idle(usize::MAX, swept);
                assert!(table.find(range.start, PAGE).is_none(), "found before it is made");
                Ok::<_, ()>((range.start, range.start))
            },
        );
        let Ok(Inserted::New(found)) = made else { panic!("not made") };
        assert_eq!((found.start, found.base), (address(page), address(page)));
    };
    get(3, true);
    assert!(table.find(address(3), PAGE).is_none(), "its memory went away");
    for page in [5, 7] {
        get(page, false);
        let found = table.find(address(page), PAGE).expect("kept");
        assert_eq!(found.base, address(page));
    }
    table.lock().clear(&mut swept);
    assert_eq!((swept.values.len(), swept.regions), (3, 3), "each came out once");
    assert_eq!(table.lock().size(), (0, 0));
}

#[test]
fn a_hint_is_found_and_a_later_one_replaces_it() {
    let (entries, hints) = ([1_u64, 2], Hints::new(64));
    assert_eq!(hints.get(7), None);
    hints.insert(7, &entries[0]);
    assert_eq!(hints.get(7), Some(&raw const entries[0]));
    hints.insert(7, &entries[1]);
    assert_eq!(hints.get(7), Some(&raw const entries[1]));
}

#[test]
fn hints_for_as_many_pages_as_the_capacity_are_mostly_found() {
    let entries: Vec<u64> = (0..4096).collect();
    let hints = Hints::new(entries.len());
    assert_eq!(hints.capacity(), entries.len());
    // As far apart as buffers are, not side by side.
    let page = |number: u64| 0x7_f000_0000 + number * 32;
    for entry in &entries {
        hints.insert(page(*entry), entry);
    }
    let is_found = |entry: &&u64| hints.get(page(**entry)) == Some(std::ptr::from_ref(*entry));
    let found = entries.iter().filter(is_found).count();
    assert!(found > entries.len() * 3 / 4, "{found} of {}", entries.len());
}
