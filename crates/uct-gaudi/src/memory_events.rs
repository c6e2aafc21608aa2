//! Telling the engine of host memory that goes away, so that it may keep pins of it.
//!
//! UCX hooks the calls by which memory is unmapped and tells whoever asks. We ask when the first pin
//! is about to be kept, not before: hooking is felt by the whole process, and a program that never
//! uses a Gaudi must not pay for one.
//!
//! Several copies of UCX in a process hook the same calls; to hear it from one of them is enough.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use uct::config::Ternary;
use uct::{Status, Ucx, log};

use crate::settings::Settings;

/// That of UCX's own registration caches.
const PRIORITY: i32 = 1000;

/// Does what ENABLE_RCACHE says, for this process: the domain that was opened last decides.
/// `aloud`: say why not.
pub(crate) fn begin(ucx: &'static Ucx, settings: &Settings, aloud: bool) -> Result<(), Status> {
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
                if aloud {
                    log!(ucx, Error, "UCX_GAUDI_COPY_ENABLE_RCACHE=yes, but {reason}");
                }
                Status::UNSUPPORTED
            })?;
            gaudi::runtime().cache_registrations(settings.rcache_limits, Box::new(|| true));
        }
    }
    Ok(())
}

/// Begins to listen, unless we do already; the error says why there is nothing to hear.
fn watch(ucx: &'static Ucx) -> Result<(), String> {
    static WATCHING: Mutex<bool> = Mutex::new(false);
    let mut watching = WATCHING.lock().unwrap_or_else(PoisonError::into_inner);
    if *watching {
        return Ok(());
    }
    ucx.watch_unmapped(PRIORITY, unmapped).map_err(|status| match status {
        Status::UNSUPPORTED => String::from(
            "UCX's memory events, which tell of memory that is unmapped, are turned off (they need \
             UCX_MEM_EVENTS=y, and an UCX_MEM_MMAP_HOOK_MODE that is not none)",
        ),
        other => format!("UCX cannot hook the calls that unmap memory ({other:?})"),
    })?;
    if !events_arrive() {
        return Err(String::from(
            "UCX does not notice when memory is unmapped in this process (UCX_MEM_MMAP_HOOK_MODE \
             says how it would)",
        ));
    }
    *watching = true;
    Ok(())
}

/// The address that [`events_arrive`] unmaps; zero once it was heard of.
static PROBE: AtomicUsize = AtomicUsize::new(0);

/// Runs inside `munmap`, `free` and the like: see [`uct::Unmapped`].
fn unmapped(start: usize, len: usize) {
    if PROBE.load(Ordering::Relaxed) == start {
        PROBE.store(0, Ordering::Relaxed);
    }
    gaudi::rcache::invalidate(start, len);
}

/// Unmaps a page of our own, to see whether we are told.
fn events_arrive() -> bool {
    const LEN: usize = 4096;
    // SAFETY: a new mapping that nobody else knows.
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
