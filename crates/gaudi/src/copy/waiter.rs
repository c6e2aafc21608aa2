//! Who is woken when a submission ends, and the thread that sees to it.
//!
//! Bells are rung once, by whoever finds that a submission has ended. While there are any, a thread
//! sleeps in the driver, so that someone finds it. It is started when the first bell comes: programs
//! that never sleep have no such thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::engine::Engine;
use crate::bell::Bell;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    /// There may be bells: spares the lock where nobody sleeps.
    any: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    bells: Vec<Arc<Bell>>,
    thread: Option<JoinHandle<()>>,
    stopped: bool,
}

impl Waiter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the bell rung once, by the next [`Waiter::ring`]. `false` if there is no thread to see
    /// to it.
    pub(super) fn add(&self, engine: &Arc<Engine>, bell: &Arc<Bell>) -> bool {
        let mut state = self.state();
        if state.thread.is_none() && !state.stopped {
            state.thread = start(engine);
        }
        let minded = state.thread.is_some();
        if !state.bells.iter().any(|other| Arc::ptr_eq(other, bell)) {
            state.bells.push(Arc::clone(bell));
        }
        self.any.store(true, Ordering::Relaxed);
        drop(state);
        self.changed.notify_one();
        minded
    }

    /// Takes a bell back.
    pub(super) fn remove(&self, bell: &Arc<Bell>) {
        self.state().bells.retain(|other| !Arc::ptr_eq(other, bell));
    }

    /// Whether there may be bells. To be asked under the lock of the record, when something was taken
    /// off it: who adds a bell looks at the record afterwards, under the same lock, and finds it gone
    /// if we come too early to see the bell.
    pub(super) fn has_bells(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Rings all bells, after something has ended and everyone can see it.
    pub(super) fn ring(&self) {
        let bells = {
            let mut state = self.state();
            self.any.store(false, Ordering::Relaxed);
            std::mem::take(&mut state.bells)
        };
        bells.iter().for_each(|bell| bell.ring());
    }

    /// Waits for the first bell; `false` when it is time to go.
    fn wait_for_work(&self) -> bool {
        let idle = |state: &mut State| state.bells.is_empty() && !state.stopped;
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
    let thread = std::thread::Builder::new().name("gaudi-waiter".to_owned());
    // The program's signals are not for this thread; masks are inherited, so set it around.
    let before = block_signals();
    let started = thread.spawn(move || work(&engine));
    // SAFETY: restores the mask that was in place.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    started.ok()
}

fn work(engine: &Engine) {
    while engine.waiter().wait_for_work() {
        if !engine.sleep_until_something_ends() {
            // Nothing is in flight, so nothing will end: who sleeps all the same had better look.
            engine.waiter().ring();
        }
    }
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: sigsets are plain data, initialised by the calls. Faults stay deliverable.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT] {
            libc::sigdelset(&mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        before
    }
}
