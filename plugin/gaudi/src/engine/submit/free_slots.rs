//! Which slots of a slab are free: up to 64, taken without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

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
        // Acquire: pairs with the `fetch_or` in `give`. What the last owner did with the slot's memory
        // comes before what the next one does; without it, late writes could hit the new owner's bytes.
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, |free| {
            (free != 0).then(|| free & (free - 1))
        });
        taken.ok().map(u64::trailing_zeros)
    }

    /// Gives a slot back.
    pub(crate) fn release(&self, slot: u32) {
        let before = self.0.fetch_or(1 << slot, Ordering::Release);
        debug_assert_eq!(before & (1 << slot), 0, "slot {slot} given back twice");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_handed_out_once_until_given_back() {
        let slots = FreeSlots::new(3);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), Some(2)]);
        assert_eq!(slots.take(), None);
        slots.release(1);
        assert_eq!(slots.take(), Some(1));
    }

    #[test]
    fn concurrent_threads_never_get_the_same_slot() {
        let slots = FreeSlots::new(64);
        let holders: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5000 {
                        if let Some(slot) = slots.take() {
                            let holders = &holders[slot as usize];
                            assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                            holders.fetch_sub(1, Ordering::SeqCst);
                            slots.release(slot);
                        }
                    }
                });
            }
        });
    }
}
