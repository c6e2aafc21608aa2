//! A counted reference to a pin in the registration cache.

use std::ptr::NonNull;
use std::sync::Arc;

use super::Shared;
use super::table::{CachedRange, RangeRef};
use crate::backend::HostPin;

/// Keeps a cached pin alive until it is dropped, whether the pin is still in the cache or not, and
/// whether the device is still open or not.
///
/// The count is in the cache's entry, which a lookup reads anyway. A count beside the pin would be one
/// more cache line to wait for.
#[derive(Debug)]
pub(crate) struct CachedPin {
    cache: Arc<Shared>,
    range: NonNull<CachedRange>,
}

// SAFETY: the range is shared by all threads anyway, and is made of atomics.
unsafe impl Send for CachedPin {}
// SAFETY: as above.
unsafe impl Sync for CachedPin {}

impl CachedPin {
    /// # Panics
    /// If the reference is to another cache's table: releasing it here would be unsound.
    #[inline]
    pub(super) fn new(cache: &Arc<Shared>, range: RangeRef<'_, HostPin>) -> Self {
        assert!(range.is_of(&cache.table));
        Self { cache: Arc::clone(cache), range: range.into_raw() }
    }
}

impl Clone for CachedPin {
    fn clone(&self) -> Self {
        // SAFETY: `new` checked that the range is of this table, and our own reference lasts.
        unsafe { self.cache.table.acquire_again(self.range) };
        Self { cache: Arc::clone(&self.cache), range: self.range }
    }
}

impl Drop for CachedPin {
    fn drop(&mut self) {
        // SAFETY: `new` checked that the range is of this table; each reference is released once.
        if unsafe { self.cache.table.release(self.range) } {
            self.cache.reclaim();
        }
    }
}
