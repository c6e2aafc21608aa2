//! Wakes sleepers when a submission ends. Owns a thread that notices the end if no other thread polls.
//!
//! The thread that completes a submission notifies each notifier once. While there are notifiers, the waiter
//! thread sleeps in the driver, so that at least one thread notices the end. It starts with the first notifier:
//! programs that never sleep have no such thread.
//!
//! **Why no wake-up is lost:** a sleeper adds its notifier and *then* locks the record (`Engine::in_flight`) to
//! see whether something is still in flight. A thread that completes a submission removes it under that
//! lock, and checks for notifiers *before* it unlocks. Whichever of the two takes the lock second sees
//! what the other did: the sleeper finds the submission gone, or the other thread finds the notifier.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::engine::Engine;
use crate::process::{Notifier, thread};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// Whether there may be notifiers. If not, a completion skips the lock of `state`.
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

    /// Whether there may be notifiers. Call it with the record locked, see the module. Relaxed: that lock
    /// orders this load with the store in `add`.
    pub(super) fn has_notifiers(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Notifies and removes all notifiers. Call it when the end of a submission is visible to all threads.
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
        // The waiter thread itself may drop the last reference to a device, with a submission's guards. It must
        // not join itself.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// `None` if the thread cannot be created.
fn start(engine: &Arc<Engine>) -> Option<JoinHandle<()>> {
    let engine = Arc::clone(engine);
    thread::spawn("gaudi-waiter", move || work(&engine)).ok()
}

fn work(engine: &Engine) {
    while engine.waiter().wait_for_work() {
        if !engine.wait_for_any() {
            // Nothing is in flight, so no completion will notify: wake the sleepers so that they check again.
            engine.waiter().notify();
        }
    }
}
