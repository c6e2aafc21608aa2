//! What a copy holds while the hardware uses host memory: a pin of the cache's, or one of its own.

use std::ptr::NonNull;
use std::sync::Arc;

use super::Shared;
use super::table::{Entry, Visit};
use crate::backend::HostPin;

/// Keeps host memory pinned.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "held, not looked at")]
pub(crate) enum Pin {
    Cached(Held),
    Own(Arc<HostPin>),
}

/// A pin in a cache that stays until this is dropped, in the cache or not, the card open or not.
///
/// The count of those who have it is in the cache's entry, where a lookup is anyway: a count beside
/// the pin would be one more line of memory to wait for.
#[derive(Debug)]
pub(crate) struct Held {
    cache: Arc<Shared>,
    entry: NonNull<Entry>,
}

// SAFETY: the entry is shared by all threads anyway, and is made of atomics.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    /// `visit` must be of this cache's table.
    pub(super) fn new(cache: &Arc<Shared>, visit: Visit<'_, HostPin>) -> Self {
        debug_assert!(visit.is_of(&cache.table));
        Self { cache: Arc::clone(cache), entry: visit.into_raw() }
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        // SAFETY: of this table, as whoever made it promised, and our own visit lasts.
        unsafe { self.cache.table.enter_with(self.entry) };
        Self { cache: Arc::clone(&self.cache), entry: self.entry }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: as above; ends here, once.
        if unsafe { self.cache.table.leave(self.entry) } {
            self.cache.tidy();
        }
    }
}
