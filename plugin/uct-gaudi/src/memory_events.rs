//! Notifies the engine of host memory that is unmapped, so that it may keep such memory pinned.
//!
//! UCX hooks the calls by which memory is unmapped, and calls handlers. Ours is set when the first pin
//! is about to be kept, not before (but with ENABLE_RCACHE=yes when a domain is opened): hooks affect
//! the whole process, and a program that never uses a Gaudi must not pay for one.
//!
//! Several copies of UCX in a process hook the same calls; a handler in one of them is enough.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use uct::config::Ternary;
use uct::{Status, Ucx, log};

use crate::settings::Settings;

/// The priority of UCX's own registration caches.
const PRIORITY: i32 = 1000;

/// Applies ENABLE_RCACHE to this process: the domain that was opened last decides. `log_errors`: log
/// why it fails.
pub(crate) fn begin(
    ucx: &'static Ucx,
    settings: &Settings,
    log_errors: bool,
) -> Result<(), Status> {
    match settings.rcache {
        Ternary::No => gaudi::runtime().stop_caching_registrations(),
        Ternary::Try => gaudi::runtime().cache_registrations(
            settings.rcache_limits,
            Box::new(move || {
                let watching = watch(ucx);
                if let Err(reason) = &watching {
                    log!(ucx, Info, "pinned host memory is not kept: {reason}");
                }
                watching.is_ok()
            }),
        ),
        Ternary::Yes => {
            watch(ucx).map_err(|reason| {
                if log_errors {
                    log!(ucx, Error, "UCX_GAUDI_COPY_ENABLE_RCACHE=yes, but {reason}");
                }
                Status::UNSUPPORTED
            })?;
            gaudi::runtime().cache_registrations(settings.rcache_limits, Box::new(|| true));
        }
    }
    Ok(())
}

/// Sets a handler for unmapped memory, unless one works already; the error says why none does.
fn watch(ucx: &'static Ucx) -> Result<(), String> {
    static WATCH: Mutex<Watch> = Mutex::new(Watch { handlers: Vec::new(), works: false });
    let mut watch = WATCH.lock().unwrap_or_else(PoisonError::into_inner);
    let set = || ucx.watch_unmapped(PRIORITY, unmapped);
    watch.begin(core::ptr::from_ref(ucx).addr(), set, events_arrive)
}

/// Our handlers for unmapped memory, and whether one of them is called.
struct Watch {
    /// Copies of UCX that have our handler. It is never removed: one that is not called does no harm.
    /// It must be set only once in a copy, which would call it as often as it was set.
    handlers: Vec<usize>,
    works: bool,
}

impl Watch {
    /// `set` sets our handler in the copy of UCX that `ucx` identifies; `probe` says whether it is called.
    fn begin(
        &mut self,
        ucx: usize,
        set: impl FnOnce() -> Result<(), Status>,
        probe: impl FnOnce() -> bool,
    ) -> Result<(), String> {
        if self.works {
            return Ok(());
        }
        if !self.handlers.contains(&ucx) {
            set().map_err(|status| match status {
                Status::UNSUPPORTED => String::from(
                    "UCX's memory events, which report memory that is unmapped, are turned off \
                     (they need UCX_MEM_EVENTS=y, and an UCX_MEM_MMAP_HOOK_MODE that is not none)",
                ),
                other => format!("UCX cannot hook the calls that unmap memory ({other:?})"),
            })?;
            self.handlers.push(ucx);
        }
        self.works = probe();
        if !self.works {
            return Err(String::from(
                "UCX does not notice when memory is unmapped in this process \
                 (UCX_MEM_MMAP_HOOK_MODE says how it would)",
            ));
        }
        Ok(())
    }
}

/// The address that [`events_arrive`] unmaps; zero once that was reported.
static PROBE: AtomicUsize = AtomicUsize::new(0);

/// Runs inside `munmap`, `free` and the like: see [`uct::Unmapped`].
fn unmapped(start: usize, len: usize) {
    if PROBE.load(Ordering::Relaxed) == start {
        PROBE.store(0, Ordering::Relaxed);
    }
    gaudi::rcache::invalidate(start, len);
}

/// Unmaps a page of our own, to see whether that is reported.
fn events_arrive() -> bool {
    const LEN: usize = gaudi::PAGE_SIZE as usize;
    // SAFETY: a new mapping that is not shared yet.
    let page = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(null_mut(), LEN, libc::PROT_NONE, flags, -1, 0)
    };
    if page == libc::MAP_FAILED {
        return false;
    }
    PROBE.store(page.addr(), Ordering::Relaxed);
    // SAFETY: our own mapping. This is the C library's function, which is what UCX hooks.
    unsafe { libc::munmap(page, LEN) };
    PROBE.swap(0, Ordering::Relaxed) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn each_copy_of_ucx_gets_one_handler_however_often_it_is_tried() {
        let mut watch = Watch { handlers: Vec::new(), works: false };
        let calls = Cell::new(0);
        let set = || {
            calls.set(calls.get() + 1);
            Ok(())
        };
        let refuse = || Err(Status::UNSUPPORTED);
        assert!(watch.begin(1, refuse, || true).unwrap_err().contains("UCX_MEM_EVENTS"));
        for _ in 0..3 {
            assert!(watch.begin(1, set, || false).is_err());
        }
        assert_eq!(calls.get(), 1, "refused at first, then set once");
        assert!(watch.begin(2, set, || false).is_err());
        assert_eq!(calls.get(), 2, "another copy may work");
        assert!(watch.begin(1, set, || true).is_ok());
        assert!(watch.begin(3, set, || panic!("known already")).is_ok());
        assert_eq!(calls.get(), 2);
    }
}
