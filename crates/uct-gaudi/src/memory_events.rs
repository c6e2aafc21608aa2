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
    static LISTENING: Mutex<Listening> = Mutex::new(Listening { asked: Vec::new(), heard: false });
    let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
    let ask = || ucx.watch_unmapped(PRIORITY, unmapped);
    listening.begin(core::ptr::from_ref(ucx).addr(), ask, events_arrive)
}

/// Whom we asked to tell us, and whether someone does.
struct Listening {
    /// Copies of UCX that have our handler. There is no need to take it back: one that says nothing
    /// does no harm; but each would call it as often as it was given.
    asked: Vec<usize>,
    heard: bool,
}

impl Listening {
    /// `ask` gives our handler to the copy of UCX of this name; `try_out` says whether we are told.
    fn begin(
        &mut self,
        ucx: usize,
        ask: impl FnOnce() -> Result<(), Status>,
        try_out: impl FnOnce() -> bool,
    ) -> Result<(), String> {
        if self.heard {
            return Ok(());
        }
        if !self.asked.contains(&ucx) {
            ask().map_err(|status| match status {
                Status::UNSUPPORTED => String::from(
                    "UCX's memory events, which tell of memory that is unmapped, are turned off \
                     (they need UCX_MEM_EVENTS=y, and an UCX_MEM_MMAP_HOOK_MODE that is not none)",
                ),
                other => format!("UCX cannot hook the calls that unmap memory ({other:?})"),
            })?;
            self.asked.push(ucx);
        }
        self.heard = try_out();
        if !self.heard {
            return Err(String::from(
                "UCX does not notice when memory is unmapped in this process \
                 (UCX_MEM_MMAP_HOOK_MODE says how it would)",
            ));
        }
        Ok(())
    }
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
    const LEN: usize = gaudi::PAGE_SIZE as usize;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn each_copy_of_ucx_gets_one_handler_however_often_it_is_tried() {
        let mut listening = Listening { asked: Vec::new(), heard: false };
        let asked = Cell::new(0);
        let ask = || {
            asked.set(asked.get() + 1);
            Ok(())
        };
        let refuse = || Err(Status::UNSUPPORTED);
        assert!(listening.begin(1, refuse, || true).unwrap_err().contains("UCX_MEM_EVENTS"));
        for _ in 0..3 {
            assert!(listening.begin(1, ask, || false).is_err());
        }
        assert_eq!(asked.get(), 1, "refused at first, then asked once");
        assert!(listening.begin(2, ask, || false).is_err());
        assert_eq!(asked.get(), 2, "another copy may be able to tell");
        assert!(listening.begin(1, ask, || true).is_ok());
        assert!(listening.begin(3, ask, || panic!("known already")).is_ok());
        assert_eq!(asked.get(), 2);
    }
}
