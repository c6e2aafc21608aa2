//! Submissions to one card, through its back end. Every copy uses this module.
//!
//! [`engine`] grants [`permits`] to submit, records each [`submission`] in flight, and has the [`waiter`] wake
//! sleepers when one ends. [`peer_writes`] makes the driver flush what other devices wrote before a submission
//! uses exported memory.
//!
//! [`slab`] is the pinned memory that small or unpinnable host buffers are copied through; [`host_copy`] does
//! the CPU's part of such a copy.

pub(crate) mod engine;
mod free_slots;
pub(crate) mod host_copy;
mod peer_writes;
mod permits;
pub(crate) mod slab;
pub(crate) mod submission;
mod waiter;

/// The atomics of [`free_slots`]. Its model check replaces them with loom's.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}
