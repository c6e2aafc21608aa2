//! The atomics and the capacity of the queue of unmap events. The model check (`tests/rcache_queue_model.rs`)
//! compiles the queue with loom's types and with a capacity that is small enough to explore.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Capacity of the queue, in events.
pub(super) const EVENTS: usize = 64;
