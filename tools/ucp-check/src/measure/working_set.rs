//! Memory that the caches cannot hold: how much of it a copy of a given size has to rotate through.

use std::path::Path;

/// Copies in flight at the same time.
pub(super) const OUTSTANDING: usize = 16;
/// Where the kernel does not say how large the last-level cache is.
const USUAL_CACHE: usize = 64 << 20;
/// The parts of a set, on the host and on the device, for both sides of a copy.
const PARTS: usize = 4;

/// How to go through memory with copies of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rotation {
    /// Bytes of a copy.
    pub(super) size: usize,
    /// Different slots, on each side.
    pub(super) slots: usize,
    /// Copies in flight at the same time, all in different slots.
    pub(super) outstanding: usize,
}

impl Rotation {
    /// A rotation through more than four times `cache` on each side, and at least so much that all
    /// copies in flight have slots of their own; less if that is more than `most` bytes.
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

/// Bytes of the last-level cache of the first processor.
pub(super) fn last_level_cache() -> usize {
    let folder = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let caches = (0..8).filter_map(|index| {
        let read = |file: &str| {
            std::fs::read_to_string(folder.join(format!("index{index}")).join(file)).ok()
        };
        let level: u32 = read("level")?.trim().parse().ok()?;
        Some((level, bytes(read("size")?.trim())?))
    });
    caches.max().map_or(USUAL_CACHE, |(_, size)| size)
}

/// A size as the kernel writes it: `32K`, `48M`.
fn bytes(text: &str) -> Option<usize> {
    let (number, shift) = match text.split_at_checked(text.len().checked_sub(1)?)? {
        (number, "K") => (number, 10),
        (number, "M") => (number, 20),
        _ => (text, 0),
    };
    number.parse::<usize>().ok()?.checked_shl(shift)
}

/// Bytes of memory that may be used: half of what the kernel says is available.
pub(super) fn usable_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = text.lines().find_map(|line| {
        line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse::<usize>().ok()
    });
    available.map_or(1 << 30, |kib| kib / 2 * 1024)
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

    #[test]
    fn sizes_are_read_as_the_kernel_writes_them() {
        assert_eq!(bytes("48K"), Some(48 << 10));
        assert_eq!(bytes("49152K"), Some(48 << 20));
        assert_eq!(bytes("2M"), Some(2 << 20));
        assert_eq!(bytes("512"), Some(512));
        assert_eq!(bytes(""), None);
        assert_eq!(bytes("many"), None);
        assert!(last_level_cache() > 0 && usable_memory() > 0);
    }
}
