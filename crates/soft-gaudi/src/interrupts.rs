//! Interrupts of the card that a program waits for: a counter in memory has reached a value.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// A time to be noted when a counter reaches its target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) interrupt: u32,
    /// Where the counter is in this process.
    pub(crate) counter: usize,
    pub(crate) target: u64,
    /// Where the time goes.
    pub(crate) note: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Counts interrupts; waiters look again when it changes.
    raised: u64,
    registrations: Vec<Registration>,
}

/// Waiters and registrations of one context.
#[derive(Debug, Default)]
pub(crate) struct Interrupts {
    state: Mutex<State>,
    raised: Condvar,
}

impl Interrupts {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// An interrupt: wakes waiters and hands out the registrations that `reached` says are due.
    pub(crate) fn raise(
        &self,
        interrupt: u32,
        reached: impl Fn(&Registration) -> bool,
    ) -> Vec<Registration> {
        let mut state = self.lock();
        state.raised += 1;
        let due = |r: &Registration| r.interrupt == interrupt && reached(r);
        let (done, left) = state.registrations.iter().partition(|r| due(r));
        state.registrations = left;
        drop(state);
        self.raised.notify_all();
        done
    }

    /// Notes a registration.
    pub(crate) fn register(&self, registration: Registration) {
        let mut state = self.lock();
        // The driver lets a new registration for the same place replace the old one.
        state.registrations.retain(|r| r.note != registration.note);
        state.registrations.push(registration);
    }

    /// Waits until `reached`, looking again at every interrupt; false when time is up.
    pub(crate) fn wait(&self, until: Option<Instant>, reached: impl Fn() -> bool) -> bool {
        let mut state = self.lock();
        loop {
            if reached() {
                return true;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(left) if left.is_zero() => return false,
                Some(left) => {
                    let waited = self.raised.wait_timeout(state, left);
                    waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                }
                None => self.raised.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
            };
        }
    }

    /// Wakes everyone, for the end of the card.
    pub(crate) fn wake(&self) {
        drop(self.lock());
        self.raised.notify_all();
    }
}
