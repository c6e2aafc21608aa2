//! A guess at what the processor's caches hold: memory that a card of this process has touched
//! lately, counted in bytes that have gone through them since.
//!
//! A copy to memory that is not in the caches is faster past them: an ordinary store would first
//! read each line that it is going to overwrite. A copy to memory that is there, and may be read
//! from there next, is faster through them. The guess costs some loads and stores per 64 KiB and
//! decides nothing but the instructions a copy is made of, so it may be wrong. (Copies onto themselves
//! always go through the caches: only that way goes strictly forward.)

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory is remembered in pieces of this size.
const GRANULE_SHIFT: u32 = 16;
/// Smaller copies always go through the caches.
const LEAST: usize = 1 << GRANULE_SHIFT;
/// Pieces that are remembered: many more than a cache holds, since two that share a slot forget each
/// other.
const SLOTS: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 14;
/// Where the processor does not say how large its last cache is.
const USUAL_CACHE: u64 = 32 << 20;

/// See the module.
pub(crate) struct Caches {
    /// Pieces that were read or written so far, also past the caches.
    clock: AtomicU64,
    /// Pieces that may go through before one that came earlier is taken to be gone.
    capacity: u32,
    /// The number of a piece of memory, and the clock when it was last touched.
    slots: [AtomicU64; SLOTS],
}

impl Caches {
    fn new(capacity: u32) -> Self {
        Self { clock: AtomicU64::new(0), capacity, slots: [const { AtomicU64::new(0) }; SLOTS] }
    }

    /// Those of this machine. Half of the last one counts: others use it, too.
    pub(crate) fn here() -> &'static Self {
        static HERE: OnceLock<Caches> = OnceLock::new();
        HERE.get_or_init(|| {
            // SAFETY: no preconditions.
            let last = unsafe { libc::sysconf(libc::_SC_LEVEL3_CACHE_SIZE) };
            let last = u64::try_from(last).ok().filter(|size| *size != 0).unwrap_or(USUAL_CACHE);
            Self::new(((last / 2) >> GRANULE_SHIFT).min(u64::from(u32::MAX)) as u32)
        })
    }

    fn slot(&self, piece: u64) -> &AtomicU64 {
        // Fibonacci hashing: neighbours spread over all slots.
        &self.slots[(piece.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SLOT_BITS)) as usize]
    }

    fn holds(&self, piece: u64, now: u64) -> bool {
        let entry = self.slot(piece).load(Ordering::Relaxed);
        // A piece's number has 32 bits to itself: addresses of programs have 47 or, rarely, 56.
        entry >> 32 == piece & 0xffff_ffff
            && (now as u32).wrapping_sub(entry as u32) <= self.capacity
    }

    /// Whether a copy that is to be made now should go past the caches.
    pub(crate) fn pass_by(&self, dst: usize, src: usize, len: usize) -> bool {
        if len < LEAST {
            return false;
        }
        let overlap = dst.abs_diff(src) < len;
        let [dst, src] = [dst, src].map(|addr| addr as u64 >> GRANULE_SHIFT);
        let now = self.clock.load(Ordering::Relaxed);
        // Its first piece speaks for all of it.
        let cold = !self.holds(dst, now);
        // Pieces in which 64 KiB of it begin: of one that it only ends in, the rest may never have
        // been touched.
        let count = (len >> GRANULE_SHIFT) as u64;
        for piece in (src..src + count).chain(dst..dst + count) {
            self.slot(piece).store(piece << 32 | now & 0xffff_ffff, Ordering::Relaxed);
        }
        // Others may count at the same time: what is lost does not matter.
        self.clock.store(now + 2 * count, Ordering::Relaxed);
        cold && !overlap
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB_64: usize = 64 << 10;
    const HERE: usize = 0x7f12_3456_7000;
    const THERE: usize = 0x7e00_0000_0000;

    /// Copies all of a set, piece by piece; how many pieces went past.
    fn pass(caches: &Caches, set: usize, size: usize) -> usize {
        pass_to(caches, THERE, set, size)
    }

    fn pass_to(caches: &Caches, to: usize, set: usize, size: usize) -> usize {
        (0..set / size).filter(|n| caches.pass_by(to + n * size, HERE + n * size, size)).count()
    }

    #[test]
    fn what_fits_goes_through_the_caches_from_the_second_time_on() {
        let caches = Caches::new(256);
        assert_eq!(pass(&caches, 8 << 20, KIB_64), 128, "nothing was there");
        // Slots that two pieces share forget one of them.
        assert!(pass(&caches, 8 << 20, KIB_64) < 7);
        assert!(pass(&caches, 8 << 20, 1 << 20) < 2);
    }

    #[test]
    fn what_does_not_fit_goes_past_each_time() {
        let caches = Caches::new(256);
        for size in [KIB_64, 256 << 10, 1 << 20] {
            // Neighbours that share a piece must not speak for each other.
            for offset in [0, 0x1000, 0xd000, 0x801] {
                let past = pass_to(&caches, THERE + offset, 64 << 20, size);
                assert_eq!(past, (64 << 20) / size);
            }
        }
    }

    #[test]
    fn what_was_just_read_is_there_to_be_written() {
        let caches = Caches::new(256);
        assert!(caches.pass_by(THERE, HERE, KIB_64));
        assert!(!caches.pass_by(HERE, THERE + KIB_64, KIB_64));
    }

    #[test]
    fn copies_onto_themselves_go_strictly_forward() {
        let caches = Caches::new(256);
        assert!(!caches.pass_by(HERE - 64, HERE, KIB_64));
        assert!(!caches.pass_by(THERE + KIB_64 - 1, THERE, KIB_64));
        assert!(caches.pass_by(HERE + (1 << 30), HERE + (1 << 30) + KIB_64, KIB_64));
    }

    #[test]
    fn little_is_not_worth_the_question() {
        let caches = Caches::new(256);
        assert!(!caches.pass_by(THERE, HERE, KIB_64 - 1));
        assert!(!caches.pass_by(THERE, HERE, 0));
    }

    proptest::proptest! {
        #[test]
        fn any_place_and_length_will_do(dst: u32, src: u32, len in 0..64usize << 20) {
            let place = |at: u32| at as usize * 0x7fff;
            let past = Caches::here().pass_by(place(dst), place(src), len);
            proptest::prop_assert!(len >= LEAST || !past);
        }
    }
}
