//! The one registration with `pthread_atfork`, and everything that is called from it.
//!
//! Handlers run between `fork`'s two halves, in a process of any state: they take no lock, allocate
//! nothing, and only make system calls, by rustix, which needs no libc for them. UCX hooks libc's `mmap`
//! and its like: its hooks take locks, and in a child nobody is left to release them. Each handler does
//! nothing where its part of the engine is unused.

use std::sync::atomic::{AtomicBool, Ordering};

use super::close_on_fork;
use crate::{rcache, stats};

/// In the parent, before the fork, in this order.
const BEFORE: [fn(); 1] = [rcache::before_fork];

/// In the child, in this order.
const IN_CHILD: [fn(); 3] = [close_on_fork::in_child, stats::in_child, rcache::in_child];

/// Has the handlers run at every fork from now on. Whoever adds state that one of them must clean up
/// calls this first; only the first call does something.
///
/// Children that the C library does not make (a bare `clone`) run no handlers: they keep their
/// parent's descriptors, but still know that they are children ([`super::Instance`]).
pub(crate) fn watch_forks() {
    // Not a `Once`: a child forked while another thread is inside would wait for that thread for ever.
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if !REGISTERED.load(Ordering::Relaxed) && !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handlers may run at any time, and the plugin is never unloaded.
        unsafe { libc::pthread_atfork(Some(before), None, Some(in_child)) };
    }
}

extern "C" fn before() {
    BEFORE.iter().for_each(|run| run());
}

extern "C" fn in_child() {
    IN_CHILD.iter().for_each(|run| run());
}

#[cfg(test)]
pub(crate) mod tests {
    /// Forks, and has the child run `child`; whether it returned `true` there.
    pub(crate) fn holds_in_child(child: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs the closure, which takes no lock that another thread may hold.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let code = if child() { 0 } else { 1 };
            // SAFETY: ends the process, without the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status == 0
    }
}
