//! Unmap events that came while the cache was locked: a bounded queue that can be filled from inside
//! `free`.
//!
//! Any thread pushes, at any moment: it takes no lock and allocates nothing. One thread at a time
//! drains: the one that has the cache's lock. Where the queue is full, the event is replaced by a flag: all
//! memory is taken to be unmapped.
//!
//! What the cache relies on: an event whose [`push`](UnmapQueue::push) has returned is seen by every
//! `drain` that begins later. A thread that was interrupted in the middle of its push must not hide the
//! events behind it. So `drain` takes what is complete, in whatever order, and `head` moves on when
//! the oldest is taken.

use core::ops::Range;

use super::sync::{AtomicBool, AtomicU64, EVENTS, Ordering};

/// In place of an event's end: nothing was stored here yet; it was drained. No mapping ends there.
const EMPTY: u64 = 0;
const DRAINED: u64 = 1;

pub(super) struct UnmapQueue {
    /// Counts events. Those from `head` to `tail` are in the queue, or about to be stored.
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
            // Acquire: pairs with the store in `drain`; the place that is used again is empty.
            let head = self.head.load(Ordering::Acquire);
            match tail.checked_sub(head) {
                // Others were faster, and their events are drained already.
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
        // Release: pairs with the load in `drain`, which then reads this start and not an old one.
        event.end.store(range.end.max(DRAINED + 1), Ordering::Release);
    }

    /// An event for all memory.
    pub(super) fn push_everything(&self) {
        // An exchange, as in `drain`: it is before that one, which then sees it, or after it.
        self.everything.swap(true, Ordering::AcqRel);
    }

    pub(super) fn is_empty(&self) -> bool {
        let [head, tail] = [&self.head, &self.tail].map(|at| at.load(Ordering::Relaxed));
        head == tail && !self.everything.load(Ordering::Relaxed)
    }

    /// Takes the events out. One thread at a time, which the cache's lock sees to.
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
        // Release: pairs with the load in `push`.
        self.head.store(head, Ordering::Release);
    }

    fn event(&self, at: u64) -> &Event {
        &self.events[at as usize % EVENTS]
    }
}
