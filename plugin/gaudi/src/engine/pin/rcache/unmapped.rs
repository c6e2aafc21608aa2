//! Unmap events that came while the cache was locked: a bounded queue that threads can push to from inside
//! `free`.
//!
//! Any thread may push at any moment: a push takes no lock and allocates nothing. One thread at a time
//! drains: the one that has the cache's lock. If the queue is full, a push sets a flag instead, which means
//! that all memory was unmapped.
//!
//! The cache relies on this: every `drain` that begins after a [`push`](UnmapQueue::push) has returned sees
//! that event. A thread that is interrupted in the middle of its push must not hide the events behind its
//! own. So `drain` takes every complete event, whatever is in front of it, and `head` advances only when
//! the oldest event was taken.

use core::ops::Range;

use super::sync::{AtomicBool, AtomicU64, EVENTS, Ordering};

/// Special values of an event's end: nothing was stored here yet, and drained. No mapping ends at these addresses.
const EMPTY: u64 = 0;
const DRAINED: u64 = 1;

pub(super) struct UnmapQueue {
    /// Counts events. Events `head..tail` are in the queue, or are being stored.
    tail: AtomicU64,
    head: AtomicU64,
    everything: AtomicBool,
    events: [Event; EVENTS],
}

struct Event {
    start: AtomicU64,
    end: AtomicU64,
}

impl UnmapQueue {
    pub(super) fn new() -> Self {
        let event = |_| Event { start: AtomicU64::new(0), end: AtomicU64::new(EMPTY) };
        Self {
            tail: AtomicU64::new(0),
            head: AtomicU64::new(0),
            everything: AtomicBool::new(false),
            events: core::array::from_fn(event),
        }
    }

    pub(super) fn push(&self, range: &Range<u64>) {
        let mut tail = self.tail.load(Ordering::Relaxed);
        loop {
            // Acquire: pairs with the store to `head` in `drain`. Without it, `drain`'s reset of the slot could erase our event.
            let head = self.head.load(Ordering::Acquire);
            match tail.checked_sub(head) {
                // Other threads have pushed since `tail` was read, and their events are drained already.
                None => tail = self.tail.load(Ordering::Relaxed),
                Some(length) if length >= EVENTS as u64 => return self.push_everything(),
                Some(_) => {
                    let (relaxed, next) = (Ordering::Relaxed, tail + 1);
                    match self.tail.compare_exchange(tail, next, relaxed, relaxed) {
                        Ok(_) => break,
                        Err(other) => tail = other,
                    }
                }
            }
        }
        let event = self.event(tail);
        event.start.store(range.start, Ordering::Relaxed);
        // Release: pairs with the load of `end` in `drain`, which then reads this start and not an old event's.
        event.end.store(range.end.max(DRAINED + 1), Ordering::Release);
    }

    /// An event for all memory.
    pub(super) fn push_everything(&self) {
        // A swap, as in `drain`: swaps of one atomic are ordered, so the next `drain` sees the flag.
        self.everything.swap(true, Ordering::AcqRel);
    }

    pub(super) fn is_empty(&self) -> bool {
        let [head, tail] = [&self.head, &self.tail].map(|at| at.load(Ordering::Relaxed));
        head == tail && !self.everything.load(Ordering::Relaxed)
    }

    /// Takes the events out. Only one thread at a time may call it; the cache's lock ensures that.
    pub(super) fn drain(&self, mut take: impl FnMut(&Range<u64>)) {
        if self.everything.swap(false, Ordering::AcqRel) {
            take(&(0..u64::MAX));
        }
        let (mut head, tail) =
            (self.head.load(Ordering::Relaxed), self.tail.load(Ordering::Relaxed));
        for at in head..tail {
            let event = self.event(at);
            let end = event.end.load(Ordering::Acquire);
            if end > DRAINED {
                take(&(event.start.load(Ordering::Relaxed)..end));
                event.end.store(DRAINED, Ordering::Relaxed);
            }
        }
        while head < tail && self.event(head).end.load(Ordering::Relaxed) == DRAINED {
            self.event(head).end.store(EMPTY, Ordering::Relaxed);
            head += 1;
        }
        // Release: pairs with the load of `head` in `push`.
        self.head.store(head, Ordering::Release);
    }

    fn event(&self, at: u64) -> &Event {
        &self.events[at as usize % EVENTS]
    }
}
