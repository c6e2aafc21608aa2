//! Host addresses that small copies come back to, which are worth a pin.
//!
//! UCX moves streams and emulated puts through segments of shared memory that it uses over and over
//! and registers with nobody. Only the last address in each place is remembered: what comes back is
//! found in spite of that, and nothing is lost where it is not.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many addresses are remembered.
const PLACES: usize = 256;
/// How often an address must come back. Pinning costs the driver about as much as the CPU needs to
/// copy a segment a few times.
const OFTEN: u64 = 16;
/// The count is below the address: user addresses have at most 56 bits.
const COUNT_BITS: u32 = 8;

/// See the module. Threads that meet here may lose a count: no harm.
#[derive(Debug)]
pub(crate) struct Recurring([AtomicU64; PLACES]);

impl Default for Recurring {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; PLACES])
    }
}

impl Recurring {
    /// Takes note of a copy from or to `addr`; whether it has come back so often that it is worth a
    /// pin. Then it starts anew.
    pub(crate) fn has_earned_pin(&self, addr: usize) -> bool {
        let addr = addr as u64;
        // Fibonacci hashing: segments lie at equal distances.
        let place = (addr >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.ilog2());
        let place = &self.0[place as usize];
        let seen = place.load(Ordering::Relaxed);
        let count =
            if seen >> COUNT_BITS == addr { (seen + 1) & ((1 << COUNT_BITS) - 1) } else { 0 };
        let earned = count >= OFTEN;
        place.store(addr << COUNT_BITS | if earned { 0 } else { count }, Ordering::Relaxed);
        earned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_earns_its_pin_by_coming_back() {
        let recurring = Recurring::default();
        let copies = |addr| (1..).find(|_| recurring.has_earned_pin(addr)).unwrap();
        for addr in [0x7fff_1234_5678, usize::MAX >> COUNT_BITS] {
            assert_eq!(copies(addr), OFTEN + 1);
            assert_eq!(copies(addr), OFTEN, "if the pin was lost");
        }
    }

    #[test]
    fn segments_in_turn_earn_their_pins_and_what_never_comes_back_does_not() {
        let recurring = Recurring::default();
        let segments: Vec<usize> = (0..64).map(|n| 0x7f00_0000_0040 + n * 32_896).collect();
        let mut fresh = 0x5500_0000_0000;
        let mut earned = 0;
        for _ in 0..=OFTEN {
            for &segment in &segments {
                earned += usize::from(recurring.has_earned_pin(segment));
            }
        }
        assert!(earned > segments.len() / 2, "only {earned}: they are in each other's way");
        for _ in 0..100_000 {
            fresh += 4096;
            assert!(!recurring.has_earned_pin(fresh));
        }
    }
}
