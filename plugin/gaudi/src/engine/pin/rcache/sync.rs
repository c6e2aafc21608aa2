//! What the queue of unmap events is made of: the model check (`tests/rcache_queue_model.rs`) compiles the
//! same file with loom's types and a queue that is short enough to explore.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Events that fit the queue.
pub(super) const EVENTS: usize = 64;
