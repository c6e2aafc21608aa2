//! Whether this process keeps pins, how many, and who tells it of memory that goes away.
//!
//! Without someone who tells, a kept pin would show the device pages that the program has given back
//! long ago. So nothing is kept until the one who promised to tell has begun to.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::table::Bounds;

/// How many pins of host memory a card may keep for later copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Most ranges.
    pub regions: usize,
    /// Most bytes, of all ranges together.
    pub bytes: u64,
}

/// Begins to call [`invalidate`](super::invalidate) for memory that goes away; whether it can.
pub type Watch = Box<dyn FnMut() -> bool + Send>;

const OFF: u8 = 0;
/// Wanted, but nobody watches yet.
const WANTED: u8 = 1;
const ON: u8 = 2;

/// See the [module](self).
#[derive(Default)]
pub(crate) struct Switch {
    state: AtomicU8,
    regions: AtomicUsize,
    bytes: AtomicU64,
    watch: Mutex<Option<Watch>>,
}

impl Switch {
    /// Pins may be kept from now on, once `watch` says so: it is asked before the first is.
    pub(crate) fn want(&self, limits: CacheLimits, watch: Watch) {
        let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        self.regions.store(limits.regions, Ordering::Relaxed);
        self.bytes.store(limits.bytes, Ordering::Relaxed);
        *waiting = Some(watch);
        self.state.store(WANTED, Ordering::Relaxed);
    }

    /// No pin is kept from now on, nor are those used that are.
    pub(crate) fn off(&self) {
        let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        *waiting = None;
        self.state.store(OFF, Ordering::Relaxed);
    }

    /// Whether pins that are kept may be used.
    pub(crate) fn is_wanted(&self) -> bool {
        self.state.load(Ordering::Relaxed) != OFF
    }

    /// How many pins may be kept; `None`: none at all. Has the watch begin the first time.
    pub(super) fn bounds(&self) -> Option<Bounds> {
        if self.state.load(Ordering::Acquire) == WANTED {
            let mut waiting = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(mut watch) = waiting.take() {
                let state = if watch() { ON } else { OFF };
                self.state.store(state, Ordering::Release);
            }
        }
        let on = self.state.load(Ordering::Acquire) == ON;
        on.then(|| Bounds {
            regions: self.regions.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        })
    }
}
