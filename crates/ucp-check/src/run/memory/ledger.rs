//! The model: which ranges are allocated, and what that makes of any question.

use std::collections::BTreeMap;

/// Live allocations by first address.
#[derive(Clone, Debug, Default)]
pub(super) struct Ledger(BTreeMap<u64, u64>);

impl Ledger {
    /// Notes an allocation; `false` if it touches one that lives.
    pub(super) fn add(&mut self, base: u64, length: usize) -> bool {
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

    /// The allocation that holds all of the range. A range of no bytes is where it begins.
    pub(super) fn holds(&self, address: u64, length: usize) -> Option<(u64, usize)> {
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
    fn ranges_are_held_whole_or_not_at_all() {
        let mut ledger = Ledger::default();
        assert!(ledger.add(100, 10) && ledger.add(110, 5) && ledger.add(90, 10));
        assert_eq!(ledger.holds(100, 10), Some((100, 10)));
        assert_eq!(ledger.holds(109, 1), Some((100, 10)));
        assert_eq!(ledger.holds(109, 2), None);
        assert_eq!(ledger.holds(110, 0), Some((110, 5)));
        assert_eq!(ledger.holds(115, 0), None);
        assert_eq!(ledger.holds(89, 1), None);
        assert_eq!(ledger.holds(100, usize::MAX), None);
        ledger.remove(100);
        assert_eq!(ledger.holds(100, 1), None);
    }

    #[test]
    fn overlaps_are_noticed_from_every_side() {
        for (base, length) in [(95, 6), (100, 1), (105, 1), (109, 9), (90, 40), (u64::MAX, 9)] {
            let mut ledger = Ledger::default();
            assert!(ledger.add(100, 10));
            assert!(!ledger.add(base, length), "{base} {length}");
        }
    }
}
