//! Interrupts of the card that a program waits for: a counter in memory has reached a value.
//!
//! An interrupt wakes exactly the waiters whose counter has reached its target; thousands may wait.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

use rustix::io::Errno;

use crate::guarded;

/// A 64-bit counter somewhere in this process, and the value waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CounterTarget {
    pub(crate) counter: usize,
    pub(crate) target: u64,
}

impl CounterTarget {
    /// Whether the counter is there; `EFAULT` if its memory is gone.
    pub(crate) fn reached(&self) -> Result<bool, Errno> {
        let mut value = 0u64;
        // SAFETY: the destination is ours; a bad source comes back as an error.
        unsafe { guarded::copy((&raw mut value).cast(), self.counter as *const u8, 8) }
            .map_err(|_| Errno::FAULT)?;
        Ok(value >= self.target)
    }
}

/// A timestamp to be stored when a counter reaches its target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) goal: CounterTarget,
    /// Where the timestamp is stored.
    pub(crate) timestamp_at: usize,
}

#[derive(Debug)]
struct Waiter {
    goal: CounterTarget,
    woken: Condvar,
}

#[derive(Debug, Default)]
struct Line {
    waiters: Vec<Arc<Waiter>>,
    registrations: Vec<Registration>,
}

#[derive(Debug, Default)]
struct State {
    /// By interrupt id.
    lines: HashMap<u32, Line>,
    closed: bool,
}

/// Waiters and registrations of one context.
#[derive(Debug, Default)]
pub(crate) struct Interrupts {
    state: Mutex<State>,
}

/// Ids for "any completion queue" and "any decoder": raised with every interrupt.
pub(crate) const ANY: [u32; 2] = [0xfff, 0xffe];

impl Interrupts {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Raises an interrupt: wakes the waiters whose counter has reached its target; returns the registrations that are due.
    pub(crate) fn raise(&self, interrupt: u32) -> Vec<Registration> {
        let mut state = self.lock();
        let mut due = Vec::new();
        for id in [interrupt, ANY[0], ANY[1]] {
            let Some(line) = state.lines.get_mut(&id) else { continue };
            line.registrations.retain(|registration| {
                let reached = registration.goal.reached() != Ok(false);
                if reached {
                    due.push(*registration);
                }
                !reached
            });
            // A waiter whose memory is gone is woken too, and returns the error.
            line.waiters.retain(|waiter| {
                let reached = waiter.goal.reached() != Ok(false);
                if reached {
                    waiter.woken.notify_one();
                }
                !reached
            });
        }
        due
    }

    /// Adds a registration.
    pub(crate) fn register(&self, interrupt: u32, registration: Registration) {
        let mut state = self.lock();
        let line = state.lines.entry(interrupt).or_default();
        // In the driver, too, a registration replaces an earlier one for the same address.
        line.registrations.retain(|r| r.timestamp_at != registration.timestamp_at);
        line.registrations.push(registration);
    }

    /// Waits until a counter reaches its target; false on timeout or when the card is gone.
    pub(crate) fn wait(
        &self,
        interrupt: u32,
        goal: CounterTarget,
        until: Option<Instant>,
    ) -> Result<bool, Errno> {
        let waiter = Arc::new(Waiter { goal, woken: Condvar::new() });
        let mut state = self.lock();
        loop {
            if goal.reached()? {
                return Ok(true);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if state.closed || left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
            state.lines.entry(interrupt).or_default().waiters.push(waiter.clone());
            state = match left {
                Some(left) => {
                    let waited = waiter.woken.wait_timeout(state, left);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
                None => waiter.woken.wait(state).unwrap_or_else(|p| p.into_inner()),
            };
            if let Some(line) = state.lines.get_mut(&interrupt) {
                line.waiters.retain(|other| !Arc::ptr_eq(other, &waiter));
            }
        }
    }

    /// Wakes everyone for good: the card is gone.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for line in state.lines.values() {
            line.waiters.iter().for_each(|waiter| waiter.woken.notify_one());
        }
    }
}
