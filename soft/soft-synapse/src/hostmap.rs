//! Host memory that is mapped for the device: by exact start, without reference counts. Pure bookkeeping.

use std::collections::BTreeMap;

/// One mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMap {
    pub(crate) len: u64,
    /// Device address of the first byte.
    pub(crate) va: u64,
    /// Memory of `synHostMalloc`: bytes mapped in this process.
    pub(crate) owned: Option<usize>,
    /// The plugin mapped it.
    pub(crate) guest: bool,
}

/// How memory to be mapped overlaps with existing mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overlap {
    /// Mapped already: nothing is added.
    Inside,
    /// Begins in a mapping and is longer.
    Beginning,
    /// Its first byte is in no mapping.
    None,
}

/// All mappings, by host address.
#[derive(Debug, Default)]
pub(crate) struct HostMaps(pub(crate) BTreeMap<u64, HostMap>);

impl HostMaps {
    pub(crate) fn overlap(&self, ptr: u64, len: u64) -> Overlap {
        if self.translate(ptr, len).is_some() {
            Overlap::Inside
        } else if self.translate(ptr, 1).is_some() {
            Overlap::Beginning
        } else {
            Overlap::None
        }
    }

    /// The device address of host memory that lies completely inside one mapping.
    pub(crate) fn translate(&self, ptr: u64, len: u64) -> Option<u64> {
        let end = ptr.checked_add(len)?;
        // Mappings may overlap: one that begins below a mapped address is allowed.
        let (start, map) =
            self.0.range(..=ptr).rev().find(|(start, map)| end <= **start + map.len)?;
        Some(map.va + (ptr - start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_must_lie_inside_one_mapping() {
        let map = |len, va| HostMap { len, va, owned: None, guest: false };
        let maps = HostMaps(BTreeMap::from([(100, map(50, 1000)), (150, map(50, 5000))]));
        assert_eq!(maps.translate(110, 40), Some(1010));
        assert_eq!(maps.translate(150, 1), Some(5000));
        assert_eq!(maps.translate(140, 20), None);
        assert_eq!(maps.translate(99, 2), None);
        assert_eq!(maps.translate(u64::MAX, 2), None);
        assert_eq!(maps.overlap(100, 50), Overlap::Inside);
        assert_eq!(maps.overlap(120, 90), Overlap::Beginning);
        assert_eq!(maps.overlap(90, 20), Overlap::None);
    }

    #[test]
    fn a_mapping_that_begins_earlier_and_reaches_further_is_found_behind_a_shorter_one() {
        let map = |len, va| HostMap { len, va, owned: None, guest: false };
        let maps = HostMaps(BTreeMap::from([(100, map(100, 1000)), (110, map(10, 5000))]));
        assert_eq!(maps.translate(115, 50), Some(1015));
    }
}
