//! Threads of the engine's own, which must not disturb the program they are in.

use std::io;

/// Starts a thread that takes none of the program's signals and little memory.
pub(super) fn start(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let _blocked = Blocked::new();
    let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10);
    builder.spawn(run).map(drop)
}

/// All signals blocked on this thread, until dropped; a thread started meanwhile keeps it so.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn new() -> Self {
        // SAFETY: plain memory; all zeroes is a value.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: both live across the calls.
        unsafe {
            libc::sigfillset(&raw mut all);
            // A thread's own faults: blocked, they would end the process past every handler.
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
                libc::sigdelset(&raw mut all, fault);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        }
        Self(before)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set that `new` was given.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
        };
    }
}
