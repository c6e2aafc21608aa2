//! The soak's random numbers: pure, and the same for the same seed.

use crate::pattern::mix;

/// A sequence of random numbers.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64, thread: u64) -> Random {
        Random(mix(seed ^ mix(thread)))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// 0 … `end` - 1.
    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// 0 … `max`, each power of two as likely as the next: small sizes are where the protocols are, large
    /// ones where the bytes are.
    pub(super) fn size(&mut self, max: usize) -> usize {
        let powers = (usize::BITS - max.leading_zeros()) as usize;
        let size = match self.below(powers + 1) {
            0 => 0,
            power => (1 << (power - 1)) + self.below(1 << (power - 1)),
        };
        size.min(max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_reach_both_ends_and_every_power_between() {
        let mut random = Random::new(1, 2);
        let sizes: Vec<usize> = (0..10_000).map(|_| random.size(1000)).collect();
        assert!(sizes.iter().all(|&size| size <= 1000));
        assert!(sizes.contains(&0) && sizes.contains(&1000));
        for power in 0..10 {
            assert!(sizes.iter().any(|size| (1 << power..2 << power).contains(size)), "2^{power}");
        }
    }

    #[test]
    fn threads_have_other_numbers_and_a_seed_always_the_same() {
        let numbers = |seed, thread| -> Vec<u64> {
            let mut random = Random::new(seed, thread);
            (0..8).map(|_| random.next()).collect()
        };
        assert_eq!(numbers(1, 0), numbers(1, 0));
        assert_ne!(numbers(1, 0), numbers(1, 1));
        assert_ne!(numbers(1, 0), numbers(2, 0));
    }
}
