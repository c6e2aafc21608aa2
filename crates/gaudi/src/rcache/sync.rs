//! What the lock-free parts are made of, in one place: the model check (`tests/rcache_model.rs`)
//! compiles the same files with loom's types and with a tree that is small enough to explore.

pub(super) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(super) use std::sync::{Mutex, MutexGuard};

pub(super) use std::thread::yield_now;

/// Bits of the address that each level of the tree decides: as a processor's page tables.
pub(super) const FANOUT_BITS: u32 = 9;
/// Entries are made this many at a time.
pub(super) const CHUNK: usize = 256;

/// A place that is reached through shared references, with rules of its own for who may.
#[derive(Debug, Default)]
pub(super) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(super) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Looks at the value. Whoever dereferences the pointer answers for nobody writing meanwhile.
    pub(super) fn with<R>(&self, look: impl FnOnce(*const T) -> R) -> R {
        look(self.0.get())
    }

    /// Changes the value. Whoever dereferences the pointer answers for being alone.
    pub(super) fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
        change(self.0.get())
    }
}
