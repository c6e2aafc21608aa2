//! The lock-free parts of the registration cache, run by loom in every order of events that matters:
//! all interleavings of a few threads (with a bound on how often one is interrupted) and all values
//! that the memory model lets a load see.
//!
//! The files are those of the library, compiled a second time with loom's atomics and with a tree of
//! sixteen pages. `LOOM_MAX_PREEMPTIONS=4` explores further than the usual two; see CONTRIBUTING.md.

#[path = "../src/engine/pin/rcache/roster.rs"]
#[allow(dead_code, reason = "a part of the library; the models use a part of that")]
mod roster;
#[path = "../src/engine/pin/rcache/table/mod.rs"]
#[allow(dead_code, reason = "a part of the library; the models use a part of that")]
mod table;

/// What `src/pin/rcache/sync.rs` is in the library.
mod sync {
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread::yield_now;

    pub(crate) const FANOUT_BITS: u32 = 1;
    pub(crate) const WAYS: usize = 1;
    pub(crate) const CHUNK: usize = 2;
}

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use loom::sync::Arc as Shared;
use loom::thread;
use table::{Bounds, Found, Inserted, Swept, Table};

const PAGE: u64 = 4096;
const PLENTY: Bounds = Bounds { regions: 100, bytes: 1 << 40 };

/// Something that may be used until it has come out of the table. Loom sees to it that whoever uses
/// it and whoever gives it back never meet.
#[derive(Clone)]
struct Pin(Arc<Live>);

struct Live(loom::cell::UnsafeCell<bool>);

impl Pin {
    fn new() -> Self {
        Self(Arc::new(Live(loom::cell::UnsafeCell::new(true))))
    }

    fn is_live(&self) -> bool {
        // SAFETY: as loom checks.
        self.0.0.with(|live| unsafe { *live })
    }

    fn give_back(&self) {
        assert!(self.is_live(), "given back twice");
        // SAFETY: as loom checks.
        self.0.0.with_mut(|live| unsafe { *live = false });
    }
}

// SAFETY: that threads never meet in the cell is what loom checks here.
unsafe impl Sync for Live {}
// SAFETY: as above.
unsafe impl Send for Live {}

fn pages(first: u64, end: u64) -> Range<u64> {
    first * PAGE..end * PAGE
}

/// What is given with a value: the pages it was made for.
fn base(range: &Range<u64>) -> u64 {
    range.start << 32 | range.end
}

/// Finds the pages or pins them.
fn get<'a>(table: &'a Table<Pin>, range: &Range<u64>, bounds: Bounds) -> Option<Found<'a, Pin>> {
    let mut swept = Swept::default();
    let wanted = (range.start, range.end - range.start);
    let Ok(made) = table.insert(wanted, range, bounds, &mut swept, |range, _, _| {
        Ok::<_, Infallible>((base(range), Pin::new()))
    });
    swept.values.iter().for_each(Pin::give_back);
    match made {
        Inserted::Hit(found) | Inserted::New(found) => {
            assert_right(&found, range);
            Some(found)
        }
        Inserted::Full => None,
    }
}

fn find<'a>(table: &'a Table<Pin>, range: &Range<u64>) -> Option<Found<'a, Pin>> {
    let found = table.find(range.start, range.end - range.start)?;
    assert_right(&found, range);
    Some(found)
}

/// What was found is whole, and is for the pages that were asked for.
#[track_caller]
fn assert_right(found: &Found<'_, Pin>, wanted: &Range<u64>) {
    let pinned = found.base >> 32..found.base & 0xffff_ffff;
    assert_eq!(found.start, pinned.start, "a start and a pin that do not belong together");
    assert!(pinned.start <= wanted.start && wanted.end <= pinned.end, "{wanted:?} in {pinned:?}");
}

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.max_branches = 100_000;
    if model.preemption_bound.is_none() {
        model.preemption_bound = Some(2);
    }
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    model.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        check();
    });
    let runs = runs.load(Ordering::Relaxed);
    println!("{runs} orders of events");
    assert!(runs > 1, "the threads did not meet");
}

#[test]
fn an_invalidated_range_is_never_found_again() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        let buffer = pages(1, 3);
        get(&table, &buffer, PLENTY);
        let looking = {
            let (table, buffer) = (Shared::clone(&table), buffer.clone());
            thread::spawn(move || drop(find(&table, &buffer)))
        };
        let sweeping = {
            let table = Shared::clone(&table);
            thread::spawn(move || table.lock().sweep(&mut Swept::default()))
        };
        table.invalidate(2 * PAGE, 3 * PAGE);
        assert!(find(&table, &buffer).is_none());
        looking.join().unwrap();
        sweeping.join().unwrap();
        assert!(find(&table, &buffer).is_none());
    });
}

#[test]
fn a_range_that_replaces_an_invalidated_one_is_not_found() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        get(&table, &pages(0, 2), PLENTY);
        // Its place is noted now: there is more than one way to it.
        assert!(find(&table, &pages(0, 1)).is_some());
        let growing = {
            let table = Shared::clone(&table);
            // Overlaps the first in page 1, which stays; page 0 goes.
            thread::spawn(move || drop(get(&table, &pages(1, 3), PLENTY)))
        };
        table.invalidate(0, PAGE);
        assert!(find(&table, &pages(0, 1)).is_none(), "right after the event");
        growing.join().unwrap();
        assert!(find(&table, &pages(0, 1)).is_none(), "later");
    });
}

#[test]
fn unmapping_the_end_of_a_replaced_range_invalidates_the_new_one() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        // The first and the last page of a range may belong to a neighbour: page 4 does.
        get(&table, &pages(4, 8), PLENTY);
        get(&table, &pages(1, 5), PLENTY);
        let growing = {
            let table = Shared::clone(&table);
            // Takes both in.
            thread::spawn(move || drop(get(&table, &pages(3, 7), PLENTY)))
        };
        table.invalidate(PAGE, 2 * PAGE);
        assert!(find(&table, &pages(1, 5)).is_none(), "right after the event");
        growing.join().unwrap();
        assert!(find(&table, &pages(1, 5)).is_none(), "later");
        assert!(find(&table, &pages(3, 7)).is_some());
        table.invalidate(4 * PAGE, 5 * PAGE);
        assert!(find(&table, &pages(4, 8)).is_none() && find(&table, &pages(3, 5)).is_none());
    });
}

#[test]
fn a_reused_range_is_not_taken_for_the_old_one() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        let one = Bounds { regions: 1, bytes: 1 << 40 };
        get(&table, &pages(0, 1), one);
        let looking = {
            let table = Shared::clone(&table);
            // `find` checks that a pin is for the pages that were asked for.
            thread::spawn(move || drop(find(&table, &pages(0, 1))))
        };
        let telling = {
            let table = Shared::clone(&table);
            thread::spawn(move || table.invalidate(0, PAGE))
        };
        // Evicts the first, unless someone has it, and may get its entry.
        if get(&table, &pages(4, 5), one).is_some() {
            assert!(find(&table, &pages(0, 1)).is_none());
        }
        looking.join().unwrap();
        telling.join().unwrap();
        // An entry may be lost to a late teller, but never for good.
        get(&table, &pages(4, 5), one);
        assert!(find(&table, &pages(4, 5)).is_some());
    });
}

#[test]
fn a_range_that_is_invalidated_while_it_is_made_is_not_reused_for_another() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        let telling = {
            let table = Shared::clone(&table);
            thread::spawn(move || table.invalidate(PAGE, 2 * PAGE))
        };
        // Each pin is refused once: whoever makes it evicts what is idle and tries again.
        let get = |range: Range<u64>| {
            let mut swept = Swept::default();
            let wanted = (range.start, PAGE);
            let Ok(made) =
                table.insert(wanted, &range, PLENTY, &mut swept, |range, others, swept| {
                    others.evict_idle(usize::MAX, swept);
                    assert!(table.find(range.start, PAGE).is_none(), "found before it is made");
                    Ok::<_, Infallible>((base(range), Pin::new()))
                });
            let (Inserted::Hit(found) | Inserted::New(found)) = made else { panic!("no room") };
            assert_right(&found, &range);
            assert_eq!(swept.values.len() as u64, swept.regions);
            swept.regions
        };
        let mut came_out = get(pages(1, 2));
        came_out += get(pages(4, 5));
        find(&table, &pages(4, 5));
        telling.join().unwrap();
        let mut swept = Swept::default();
        table.lock().clear(&mut swept);
        assert_eq!(came_out + swept.regions, 2, "each came out once");
        assert_eq!(table.lock().size(), (0, 0));
    });
}

#[test]
fn every_value_is_swept_exactly_once() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        get(&table, &pages(0, 2), PLENTY);
        let telling = {
            let table = Shared::clone(&table);
            thread::spawn(move || table.invalidate(PAGE, 2 * PAGE))
        };
        let lost = table.invalidate(0, PAGE);
        let mut swept = Swept::default();
        table.lock().sweep(&mut swept);
        let both = lost + telling.join().unwrap();
        assert_eq!(both, 1, "one of the two was first");
        table.lock().sweep(&mut swept);
        assert_eq!((swept.values.len(), swept.regions, swept.bytes), (1, 1, 2 * PAGE));
        assert_eq!(table.lock().size(), (0, 0));
    });
}

#[test]
fn two_threads_that_miss_share_one_pin() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        let other = {
            let table = Shared::clone(&table);
            thread::spawn(move || drop(get(&table, &pages(1, 2), PLENTY).expect("room")))
        };
        get(&table, &pages(1, 2), PLENTY).expect("room");
        other.join().unwrap();
        assert_eq!(table.lock().size(), (1, PAGE));
    });
}

#[test]
fn a_value_is_swept_after_its_last_reference_was_released_and_not_before() {
    model(|| {
        let table = Shared::new(Table::<Pin>::new());
        let (range, pin) = (pages(1, 2), Pin::new());
        let Ok(made) = table.insert(
            (range.start, PAGE),
            &range,
            PLENTY,
            &mut Swept::default(),
            |range, _, _| Ok::<_, Infallible>((base(range), pin.clone())),
        );
        drop(made);
        let copying = {
            let (table, range, pin) = (Shared::clone(&table), range.clone(), pin.clone());
            thread::spawn(move || {
                if let Some(found) = find(&table, &range) {
                    let entry = found.range.into_raw();
                    // A copy of two parts.
                    // SAFETY: the first reference lasts, and both are released once.
                    unsafe { table.acquire_again(entry) };
                    assert!(pin.is_live());
                    // SAFETY: as above.
                    unsafe { table.release(entry) };
                    assert!(pin.is_live());
                    // SAFETY: as above.
                    unsafe { table.release(entry) };
                }
            })
        };
        table.invalidate(range.start, range.end);
        let mut swept = Swept::default();
        table.lock().sweep(&mut swept);
        swept.values.iter().for_each(Pin::give_back);
        copying.join().unwrap();
        if swept.values.is_empty() {
            assert!(table.has_marked(), "nobody would know that the last reference was released");
            table.lock().sweep(&mut swept);
            swept.values.iter().for_each(Pin::give_back);
        }
        assert!(!pin.is_live());
        assert_eq!(table.lock().size(), (0, 0));
    });
}

#[test]
fn a_removed_item_of_the_roster_is_not_used_any_more() {
    struct Item(loom::cell::UnsafeCell<u32>);
    // SAFETY: that two threads never meet in the cell is what loom checks here.
    unsafe impl Sync for Item {}
    // SAFETY: as above.
    unsafe impl Send for Item {}
    model(|| {
        let roster = Shared::new(roster::Roster::<Item, 2>::new());
        let item = Shared::new(Item(loom::cell::UnsafeCell::new(1)));
        // SAFETY: the item outlives its stay.
        let place = unsafe { roster.insert(&raw const *item) }.expect("a place");
        let telling = {
            let roster = Shared::clone(&roster);
            thread::spawn(move || {
                // SAFETY: as loom checks.
                roster.for_each(|item| item.0.with(|value| assert_eq!(unsafe { *value }, 1)));
            })
        };
        roster.remove(place);
        // SAFETY: as loom checks.
        item.0.with_mut(|value| unsafe { *value = 2 });
        telling.join().unwrap();
    });
}
