//! What runs inside `fork`, registered by those parts of the engine that need it.
//!
//! Handlers run in the middle of `fork`, in a process of any state: they take no lock, allocate nothing, and only
//! make system calls. They make them by rustix, without libc: UCX hooks libc's `mmap` and similar functions, its
//! hooks take locks, and the child has no thread that would release them. A handler does nothing where its part of
//! the engine is unused, and none depends on another.

use std::sync::atomic::{AtomicBool, Ordering};

/// The handlers of one part of the engine.
#[derive(Debug)]
pub(crate) struct ForkHandlers {
    /// In the parent, before the fork.
    before: Option<unsafe extern "C" fn()>,
    in_child: unsafe extern "C" fn(),
    // Not a `Once`: a child forked while another thread is inside would wait for that thread for ever.
    registered: AtomicBool,
}

impl ForkHandlers {
    pub(crate) const fn new(
        before: Option<unsafe extern "C" fn()>,
        in_child: unsafe extern "C" fn(),
    ) -> Self {
        Self { before, in_child, registered: AtomicBool::new(false) }
    }

    /// Runs the handlers at every fork from now on. Code that adds state which one of them must clean up
    /// calls this first; only the first call does something.
    ///
    /// Children that the C library does not make (a bare `clone`) run no handlers: they keep their
    /// parent's descriptors, but still know that they are children ([`super::Instance`]).
    pub(crate) fn register(&self) {
        let registered = &self.registered;
        if !registered.load(Ordering::Relaxed) && !registered.swap(true, Ordering::Relaxed) {
            // SAFETY: the handlers may run at any time, and the plugin is never unloaded.
            unsafe { libc::pthread_atfork(self.before, None, Some(self.in_child)) };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    /// Forks, and runs `child` in the child; whether it returned `true`.
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
