//! Ctrl-C while it is measured: noted, and looked at between and during the runs.

use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on SIGINT and SIGTERM do not end the tool but are noted; what is returned says whether one came.
pub(super) fn watch() -> fn() -> bool {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler stores to an atomic, which is allowed in a signal handler.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
    || INTERRUPTED.load(Ordering::Relaxed)
}
