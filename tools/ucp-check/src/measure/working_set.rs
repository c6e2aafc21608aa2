//! Working sets that exceed the caches: how much memory copies of a given size must rotate through.

use crate::matrix::size;
use procfs::{Current, Meminfo};

/// Copies in flight at the same time.
pub(super) const OUTSTANDING: usize = 16;
/// Assumed size of the last-level cache if the kernel does not report it.
const USUAL_CACHE: usize = 64 << 20;
/// Buffers of a set: on the host and on the device, for both sides of a copy.
const PARTS: usize = 4;

/// How copies of one size go through memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rotation {
    /// Bytes of a copy.
    pub(super) size: usize,
    /// Number of different slots on each side.
    pub(super) slots: usize,
    /// Copies in flight at the same time, all in different slots.
    pub(super) outstanding: usize,
}

impl Rotation {
    /// A rotation through more than four times `cache` on each side, with at least one slot for each copy in flight;
    /// less if that exceeds `most` bytes.
    pub(super) fn new(size: usize, cache: usize, most: usize) -> Self {
        let wanted = (4 * cache / size + 1).max(OUTSTANDING);
        let slots = wanted.min((most / PARTS / size).max(1));
        Self { size, slots, outstanding: OUTSTANDING.min(slots) }
    }

    /// Bytes of one side.
    pub(super) fn bytes(&self) -> usize {
        self.size * self.slots
    }
}

/// Bytes of the last-level cache of the first processor, which is the largest one.
pub(super) fn last_level_cache() -> usize {
    let read = |index| {
        let file = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
        size(std::fs::read_to_string(file).ok()?.trim()).ok()
    };
    (0..8).filter_map(read).max().unwrap_or(USUAL_CACHE)
}

/// Bytes of memory that may be used: half of what the kernel reports as available.
pub(super) fn usable_memory() -> usize {
    let available = Meminfo::current().ok().and_then(|memory| memory.mem_available);
    available.map_or(1 << 30, |bytes| bytes as usize / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotation_is_more_than_the_cache_and_copies_do_not_meet() {
        let small = Rotation::new(64 << 10, 48 << 20, usize::MAX);
        assert!(small.bytes() > 4 * (48 << 20));
        assert_eq!(small.outstanding, 16);
        let large = Rotation::new(64 << 20, 48 << 20, usize::MAX);
        assert_eq!((large.slots, large.outstanding), (16, 16));
    }

    #[test]
    fn little_memory_means_fewer_slots_and_never_none() {
        let tight = Rotation::new(64 << 20, 48 << 20, 1 << 30);
        assert_eq!((tight.slots, tight.outstanding), (4, 4));
        assert_eq!(Rotation::new(64 << 20, 48 << 20, 0).slots, 1);
    }
}
