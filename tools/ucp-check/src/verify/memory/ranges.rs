//! The model: which ranges are allocated, and the expected answer to any query.

use std::collections::BTreeMap;

/// Live allocations by first address.
#[derive(Clone, Debug, Default)]
pub(super) struct LiveRanges(BTreeMap<u64, u64>);

impl LiveRanges {
    /// Adds an allocation; `false` if it overlaps a live one.
    pub(super) fn add(&mut self, (base, length): (u64, usize)) -> bool {
        let Some(end) = base.checked_add(length as u64) else { return false };
        let below = self.0.range(..end).next_back();
        let free = below.is_none_or(|(&other, &length)| other + length <= base);
        self.0.insert(base, length as u64);
        free && length > 0
    }

    /// Forgets one.
    pub(super) fn remove(&mut self, base: u64) {
        self.0.remove(&base);
    }

    /// The allocation that contains the whole range. An empty range counts as its first address.
    pub(super) fn containing(&self, address: u64, length: usize) -> Option<(u64, usize)> {
        let (&base, &size) = self.0.range(..=address).next_back()?;
        let offset = address - base;
        let inside = offset < size && length as u64 <= size - offset;
        inside.then_some((base, size as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_contained_whole_or_not_at_all() {
        let mut live = LiveRanges::default();
        assert!(live.add((100, 10)) && live.add((110, 5)) && live.add((90, 10)));
        for (address, length, found) in [
            (100, 10, Some((100, 10))),
            (109, 1, Some((100, 10))),
            (109, 2, None),
            (110, 0, Some((110, 5))),
            (115, 0, None),
            (89, 1, None),
            (100, usize::MAX, None),
        ] {
            assert_eq!(live.containing(address, length), found, "{address} {length}");
        }
        live.remove(100);
        assert_eq!(live.containing(100, 1), None);
    }

    #[test]
    fn overlaps_are_noticed_from_every_side() {
        for other in [(95, 6), (100, 1), (105, 1), (109, 9), (90, 40), (u64::MAX, 9)] {
            let mut live = LiveRanges::default();
            assert!(live.add((100, 10)) && !live.add(other), "{other:?}");
        }
    }
}
