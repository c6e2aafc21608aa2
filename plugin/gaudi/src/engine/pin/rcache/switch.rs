//! Whether this process caches pins, how many, and whether unmap events arrive.
//!
//! Without unmap events, the device would use a cached pin of pages that the program freed long ago.
//! So nothing is cached until the source of the events has started.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::options::CacheLimits;

/// Starts the calls of [`invalidate`](super::invalidate) for memory that is unmapped. Returns whether that worked.
pub type Watch = Box<dyn FnMut() -> bool + Send>;

const OFF: u8 = 0;
/// Enabled, but the watch was not started yet.
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

/// The switch of this process.
pub(crate) static SWITCH: Switch = Switch {
    state: AtomicU8::new(OFF),
    regions: AtomicUsize::new(0),
    bytes: AtomicU64::new(0),
    watch: Mutex::new(None),
};

impl Switch {
    /// Caches pins from now on. `watch` is started before the first pin is cached.
    pub(crate) fn enable(&self, limits: CacheLimits, watch: Watch) {
        let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        self.regions.store(limits.regions, Ordering::Relaxed);
        self.bytes.store(limits.bytes, Ordering::Relaxed);
        *waiting = Some(watch);
        self.state.store(WANTED, Ordering::Relaxed);
    }

    /// Stops caching pins, and stops using cached pins.
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

    /// The limits of the cache; `None`: nothing may be cached. The first call starts the watch.
    pub(super) fn limits(&self) -> Option<CacheLimits> {
        if self.state.load(Ordering::Acquire) == WANTED {
            let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(mut watch) = waiting.take() {
                let state = if watch() { ON } else { OFF };
                // Release: pairs with the loads in this function. A thread that reads ON runs after the start of
                // the watch. Without the pair it could cache a pin before that, and its unmap event would be missed.
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
