//! The registration cache's queue of unmap events, run by loom in every order of events that matters.
//!
//! The file is the library's own, compiled a second time with loom's atomics and two places.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    pub(crate) const EVENTS: usize = 2;
}

#[path = "../src/engine/pin/rcache/unmapped.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model uses part of it")]
mod unmapped;

use std::ops::Range;

use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;
use unmapped::UnmapQueue;

/// What the cache is: the queue, and under its lock what was drained from it.
struct Model {
    queue: UnmapQueue,
    drained: Mutex<Vec<Range<u64>>>,
}

impl Model {
    fn drain(&self) -> MutexGuard<'_, Vec<Range<u64>>> {
        let mut drained = self.drained.lock().unwrap();
        if !self.queue.is_empty() {
            self.queue.drain(|range| drained.push(range.clone()));
        }
        drained
    }

    /// An event, and the look-up after it: it must know of the event.
    fn unmap(&self, event: u64) {
        let event = event * 100..event * 100 + 10;
        self.queue.push(&event);
        let drained = self.drain();
        let everything = |range: &Range<u64>| *range == (0..u64::MAX);
        assert!(drained.iter().any(|range| *range == event || everything(range)), "{drained:?}");
        for range in drained.iter().filter(|range| !everything(range)) {
            assert_eq!(range.start + 10, range.end, "parts of two events");
            assert_eq!(drained.iter().filter(|other| *other == range).count(), 1, "drained twice");
        }
    }
}

fn run(threads: &'static [&'static [u64]]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(2));
    model.check(move || {
        let shared = Arc::new(Model { queue: UnmapQueue::new(), drained: Mutex::default() });
        let unmap = |shared: &Model, events: &[u64]| events.iter().for_each(|at| shared.unmap(*at));
        let spawn = |events: &'static [u64]| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || unmap(&shared, events))
        };
        let others: Vec<_> = threads[1..].iter().map(|events| spawn(events)).collect();
        unmap(&shared, threads[0]);
        others.into_iter().for_each(|thread| thread.join().unwrap());
        drop(shared.drain());
        assert!(shared.queue.is_empty(), "nothing stays behind");
    });
}

#[test]
fn whoever_looks_after_an_event_knows_of_it_while_another_thread_pushes() {
    run(&[&[1, 2], &[3]]);
}

#[test]
fn places_are_used_again_and_a_full_queue_unmaps_everything() {
    run(&[&[1, 2, 3], &[4]]);
}

#[test]
fn three_threads_that_unmap_at_once_lose_nothing() {
    run(&[&[1], &[2], &[3]]);
}
