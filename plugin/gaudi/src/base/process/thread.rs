//! Threads of the engine's own, which must not disturb the program they are in.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Enough for what runs here, also in the driver library. Small, because a program that locks all its
/// memory (`mlockall`) pays for the whole stack.
const STACK: usize = 512 << 10;

/// A thread's own faults: blocked, they would end the process past every handler.
const FAULTS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Starts a thread that takes none of the program's signals.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // A thread inherits the mask of the one that starts it.
    let _blocked = BlockedSignals::new();
    Builder::new().name(name.to_owned()).stack_size(STACK).spawn(run)
}

/// A thread that is started when it is first needed, and runs for ever.
#[derive(Debug, Default)]
pub(crate) struct OnDemand(Mutex<bool>);

impl OnDemand {
    /// Starts it if it does not run. After an error it is tried again the next time.
    pub(crate) fn ensure(&self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !*runs {
            spawn(name, run)?;
            *runs = true;
        }
        Ok(())
    }
}

/// All signals but faults blocked on this thread, until dropped.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn new() -> Self {
        // SAFETY: sigsets are plain data, for which all zeroes is a value, and live across the calls.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            for fault in FAULTS {
                libc::sigdelset(&raw mut all, fault);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        let before = &raw const self.before;
        // SAFETY: the mask that was in place.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_blocked(signal: libc::c_int) -> bool {
        // SAFETY: as above; a null set changes nothing.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
            libc::sigismember(&raw const mask, signal) == 1
        }
    }

    #[test]
    fn the_thread_has_signals_blocked_but_faults_and_its_starter_keeps_its_mask() {
        let before = [libc::SIGINT, libc::SIGALRM, libc::SIGSEGV].map(is_blocked);
        let (send, receive) = std::sync::mpsc::channel();
        let thread = spawn("gaudi-test", move || {
            let program = [libc::SIGINT, libc::SIGALRM, libc::SIGUSR1, libc::SIGCHLD];
            send.send((program.map(is_blocked), FAULTS.map(is_blocked))).unwrap();
        });
        thread.unwrap().join().unwrap();
        assert_eq!(receive.recv().unwrap(), ([true; 4], [false; FAULTS.len()]));
        assert_eq!([libc::SIGINT, libc::SIGALRM, libc::SIGSEGV].map(is_blocked), before);
    }
}
