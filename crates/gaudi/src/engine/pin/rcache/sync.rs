//! What the lock-free parts are made of, in one place: the model check (`tests/rcache_model.rs`)
//! compiles the same files with loom's types and with a tree that is small enough to explore.

pub(super) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(super) use std::sync::{Mutex, MutexGuard};

pub(super) use std::thread::yield_now;

/// Bits of the address that each level of the tree decides: as a processor's page tables.
pub(super) const FANOUT_BITS: u32 = 9;
/// Hints beside each other in a cache line.
pub(super) const WAYS: usize = 8;
/// Entries are made this many at a time.
pub(super) const CHUNK: usize = 256;
