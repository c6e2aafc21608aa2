//! Waking sleepers when a submission ends, and the thread that does it if no other thread polls.
//!
//! A notifier is notified once, by the thread that completes a submission. While there are notifiers, a
//! thread sleeps in the driver, so that some thread does. It starts with the first notifier: programs
//! that never sleep have no such thread.
//!
//! **Why no wake-up is lost:** a sleeper adds its notifier and *then* takes the lock of the record to see
//! whether something is still in flight. A thread that completes a submission removes it under that
//! lock, and asks for notifiers *before* it unlocks. Whichever of the two takes the lock second sees
//! what the other did: the sleeper finds the submission gone, or the other thread finds the notifier.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::engine::Engine;
use crate::process::{Notifier, thread};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// There may be notifiers: saves the lock if no thread sleeps.
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

    /// Adds a notifier for the next [`Waiter::notify`]. `false` if the thread could not be started.
    pub(super) fn add(&self, engine: &Arc<Engine>, notifier: &Arc<Notifier>) -> bool {
        let mut state = self.state();
        if state.thread.is_none() && !state.stopped {
            state.thread = start(engine);
        }
        let has_thread = state.thread.is_some();
        if !state.notifiers.iter().any(|other| Arc::ptr_eq(other, notifier)) {
            state.notifiers.push(Arc::clone(notifier));
        }
        self.any.store(true, Ordering::Relaxed);
        drop(state);
        self.changed.notify_one();
        has_thread
    }

    /// Removes a notifier.
    pub(super) fn remove(&self, notifier: &Arc<Notifier>) {
        self.state().notifiers.retain(|other| !Arc::ptr_eq(other, notifier));
    }

    /// Whether there may be notifiers. Call it under the lock of the record, see the module. Relaxed: that
    /// lock orders it with the store in `add`.
    pub(super) fn has_notifiers(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Notifies all. Call it when the end of a submission is visible to all threads.
    pub(super) fn notify(&self) {
        let notifiers = {
            let mut state = self.state();
            self.any.store(false, Ordering::Relaxed);
            std::mem::take(&mut state.notifiers)
        };
        notifiers.iter().for_each(|notifier| notifier.notify());
    }

    /// Waits for the first notifier; `false` when the thread must end.
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
        // The last reference to a device may be dropped on the thread itself, with a submission's
        // guards.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// `None` if the system refuses a thread.
fn start(engine: &Arc<Engine>) -> Option<JoinHandle<()>> {
    let engine = Arc::clone(engine);
    thread::spawn("gaudi-waiter", move || work(&engine)).ok()
}

fn work(engine: &Engine) {
    while engine.waiter().wait_for_work() {
        if !engine.wait_for_any() {
            // Nothing is in flight, so nothing will end: sleepers must look for themselves.
            engine.waiter().notify();
        }
    }
}
