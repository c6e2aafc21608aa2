//! Submissions to one card, on its back end: what every copy needs of it.
//!
//! [`engine`] gives out [`permits`] to submit, records what the hardware is doing ([`submission`]), and has
//! sleepers woken when it is done ([`waiter`]). [`peer_writes`] lets the driver flush what other devices wrote
//! before a submission uses exported memory.
//!
//! [`slab`] is the pinned memory that small or unpinnable host buffers go through, [`host_copy`] the CPU's
//! part of that.

pub(crate) mod engine;
mod free_slots;
pub(crate) mod host_copy;
mod peer_writes;
mod permits;
pub(crate) mod slab;
pub(crate) mod submission;
mod waiter;

/// What [`free_slots`] is made of, for its model check to replace.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU64, Ordering};
}
