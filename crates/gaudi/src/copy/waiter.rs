//! Who is woken when a submission ends, and the thread that sees to it.
//!
//! Each notifier is notified once, by whoever finds that a submission has ended. While there are any, a thread
//! sleeps in the driver, so that someone finds it. It is started when the first notifier comes: programs
//! that never sleep have no such thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::engine::Engine;
use crate::process::{Notifier, thread};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// There may be notifiers: spares the lock where nobody sleeps.
    any: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    notifiers: Vec<Arc<Notifier>>,
    thread: Option<JoinHandle<()>>,
    stopped: bool,
}

impl Waiter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the notifier notified once, by the next [`Waiter::notify`]. `false` if there is no thread to see
    /// to it.
    pub(super) fn add(&self, engine: &Arc<Engine>, notifier: &Arc<Notifier>) -> bool {
        let mut state = self.state();
        if state.thread.is_none() && !state.stopped {
            state.thread = start(engine);
        }
        let minded = state.thread.is_some();
        if !state.notifiers.iter().any(|other| Arc::ptr_eq(other, notifier)) {
            state.notifiers.push(Arc::clone(notifier));
        }
        self.any.store(true, Ordering::Relaxed);
        drop(state);
        self.changed.notify_one();
        minded
    }

    /// Takes a notifier back.
    pub(super) fn remove(&self, notifier: &Arc<Notifier>) {
        self.state().notifiers.retain(|other| !Arc::ptr_eq(other, notifier));
    }

    /// Whether there may be notifiers. To be asked under the lock of the record, when something was taken
    /// off it: who adds a notifier looks at the record afterwards, under the same lock, and finds it gone
    /// if we come too early to see the notifier.
    pub(super) fn has_notifiers(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Notifies all, after something has ended and everyone can see it.
    pub(super) fn notify(&self) {
        let notifiers = {
            let mut state = self.state();
            self.any.store(false, Ordering::Relaxed);
            std::mem::take(&mut state.notifiers)
        };
        notifiers.iter().for_each(|notifier| notifier.notify());
    }

    /// Waits for the first notifier; `false` when it is time to go.
    fn wait_for_work(&self) -> bool {
        let idle = |state: &mut State| state.notifiers.is_empty() && !state.stopped;
        let state = self.changed.wait_while(self.state(), idle);
        !state.unwrap_or_else(PoisonError::into_inner).stopped
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        let thread = {
            let mut state = self.state();
            state.stopped = true;
            state.thread.take()
        };
        self.changed.notify_one();
        // The last handle of a device may go on the thread itself, with what a submission held.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// `None` where the system has no thread for us.
fn start(engine: &Arc<Engine>) -> Option<JoinHandle<()>> {
    let engine = Arc::clone(engine);
    thread::spawn("gaudi-waiter", move || work(&engine)).ok()
}

fn work(engine: &Engine) {
    while engine.waiter().wait_for_work() {
        if !engine.sleep_until_something_ends() {
            // Nothing is in flight, so nothing will end: who sleeps all the same had better look.
            engine.waiter().notify();
        }
    }
}
