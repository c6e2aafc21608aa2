//! Which slots of a slab are free: up to 64, taken without a lock.
//!
//! `tests/free_slots_model.rs` compiles this file with loom's atomics.

use super::sync::{AtomicU64, Ordering};

/// Up to 64 slots; a set bit is a free one.
#[derive(Debug)]
pub(crate) struct FreeSlots(AtomicU64);

impl FreeSlots {
    /// Slots `0..count`, all free.
    pub(crate) fn new(count: u32) -> Self {
        assert!((1..=64).contains(&count));
        Self(AtomicU64::new(u64::MAX >> (64 - count)))
    }

    /// Takes the lowest free slot.
    pub(crate) fn take(&self) -> Option<u32> {
        // Acquire: pairs with the `fetch_or` in `release`. The previous owner's accesses to the slot's memory
        // happen before the new owner's; without the pair, late writes could overwrite the new owner's bytes.
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| {
            (free != 0).then(|| free & (free - 1))
        });
        taken.ok().map(u64::trailing_zeros)
    }

    /// Returns a slot.
    pub(crate) fn release(&self, slot: u32) {
        let before = self.0.fetch_or(1 << slot, Ordering::Release);
        debug_assert_eq!(before & (1 << slot), 0, "slot {slot} given back twice");
    }
}
