//! Whether this process caches pins, how many, and whether unmap events arrive.
//!
//! Without unmap events a cached pin would show the device pages that the program has given back
//! long ago. So nothing is cached until the source of the events has started.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::options::CacheLimits;

/// Starts to call [`invalidate`](super::invalidate) for memory that is unmapped; whether it can.
pub type Watch = Box<dyn FnMut() -> bool + Send>;

const OFF: u8 = 0;
/// Wanted; the watch was not started yet.
const WANTED: u8 = 1;
const ON: u8 = 2;

/// See the [module](self).
#[cfg_attr(test, derive(Default))]
pub(crate) struct Switch {
    state: AtomicU8,
    regions: AtomicUsize,
    bytes: AtomicU64,
    watch: Mutex<Option<Watch>>,
}

/// That of this process.
pub(crate) static SWITCH: Switch = Switch {
    state: AtomicU8::new(OFF),
    regions: AtomicUsize::new(0),
    bytes: AtomicU64::new(0),
    watch: Mutex::new(None),
};

impl Switch {
    /// Caches pins from now on. Starts `watch` before the first.
    pub(crate) fn enable(&self, limits: CacheLimits, watch: Watch) {
        let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        self.regions.store(limits.regions, Ordering::Relaxed);
        self.bytes.store(limits.bytes, Ordering::Relaxed);
        *waiting = Some(watch);
        self.state.store(WANTED, Ordering::Relaxed);
    }

    /// Stops caching pins and using cached ones.
    pub(crate) fn off(&self) {
        let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting = None;
        self.state.store(OFF, Ordering::Relaxed);
    }

    /// Whether cached pins may be used.
    pub(crate) fn is_wanted(&self) -> bool {
        self.state.load(Ordering::Relaxed) != OFF
    }

    /// Whether unmap events arrive.
    pub(super) fn has_events(&self) -> bool {
        self.state.load(Ordering::Relaxed) == ON
    }

    /// How much may be cached; `None`: nothing. The first call starts the watch.
    pub(super) fn limits(&self) -> Option<CacheLimits> {
        if self.state.load(Ordering::Acquire) == WANTED {
            let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(mut watch) = waiting.take() {
                let state = if watch() { ON } else { OFF };
                // Release: pairs with the loads in this function. Who sees ON comes after the start
                // of the watch, and so caches no pin whose unmap event could be missed.
                self.state.store(state, Ordering::Release);
            }
        }
        let on = self.state.load(Ordering::Acquire) == ON;
        on.then(|| CacheLimits {
            regions: self.regions.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        })
    }
}
