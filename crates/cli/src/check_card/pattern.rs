//! Which copies are tried, and what memory must look like afterwards. Pure functions.
//!
//! A batch of copies works on an image of many slots, one copy in each. Source and destination lie anywhere
//! modulo 128 in the slot, and all bytes around the destination are guards. Each byte to arrive differs from
//! what was there before, so that one that did not arrive is seen.

/// Bytes of a slot, of an image, and slots in it.
pub(super) const SLOT: usize = 8192;
pub(super) const SLOTS: usize = 256;
pub(super) const IMAGE: usize = SLOT * SLOTS;
/// Where in a slot copies at offset 0 begin: guards lie in front, too.
const BEGIN: usize = 256;
/// The longest copy that is tried.
const LONGEST: u32 = 4097;
/// Wrong copies that are described; more are counted.
const DESCRIBED: usize = 4;

/// One copy: its length, and where it begins modulo 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) len: u32,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl Case {
    /// Where its source begins in the image.
    pub(super) fn source(self, slot: usize) -> usize {
        slot * SLOT + BEGIN + self.from as usize
    }

    /// Where its destination begins in the image.
    pub(super) fn destination(self, slot: usize) -> usize {
        slot * SLOT + BEGIN + self.to as usize
    }
}

/// All lengths at all offsets, or the ones around powers of two at some offsets.
pub(super) fn cases(thorough: bool) -> Vec<Case> {
    let (lengths, offsets): (Vec<u32>, Vec<u32>) = if thorough {
        ((1..=LONGEST).collect(), (0..128).collect())
    } else {
        let around = (4..=12).flat_map(|power| [-1, 0, 1].map(|by: i32| (1 << power) + by));
        let lengths = (1..=9).chain(around.map(|len| len as u32));
        (lengths.collect(), vec![0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 63, 64, 65, 96, 127])
    };
    let case = |len: u32, to: u32| Case { len, from: (to * 61 + len) % 128, to };
    lengths.iter().flat_map(|&len| offsets.iter().map(move |&to| case(len, to))).collect()
}

/// Memory for a batch.
#[derive(Debug)]
pub(super) struct Images {
    /// The memory that is copied from.
    pub(super) source: Vec<u8>,
    /// The memory that is copied to, before.
    pub(super) before: Vec<u8>,
    /// The memory that is copied to, afterwards.
    pub(super) after: Vec<u8>,
}

impl Images {
    pub(super) fn new(batch: &[Case], seed: u64) -> Self {
        let mut source = noise(seed);
        let before = noise(seed ^ 0x5eed);
        let mut after = before.clone();
        for (slot, case) in batch.iter().enumerate() {
            let (from, to, len) = (case.source(slot), case.destination(slot), case.len as usize);
            for at in 0..len {
                if source[from + at] == before[to + at] {
                    source[from + at] ^= 0xff;
                }
            }
            after[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        Self { source, before, after }
    }

    /// For fills with `byte`: what was there before differs from it everywhere.
    pub(super) fn for_fills(batch: &[Case], byte: u8, seed: u64) -> Self {
        let mut before = noise(seed);
        before.iter_mut().filter(|there| **there == byte).for_each(|there| *there = !byte);
        let mut after = before.clone();
        for (slot, case) in batch.iter().enumerate() {
            let to = case.destination(slot);
            after[to..to + case.len as usize].fill(byte);
        }
        Self { source: Vec::new(), before, after }
    }
}

/// An image of bytes without a pattern.
fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut image = vec![0; IMAGE];
    for word in image.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    image
}

/// What is wrong with copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) copies: usize,
    pub(super) examples: Vec<String>,
}

impl Wrong {
    /// Compares every byte, guards included.
    pub(super) fn add(&mut self, what: &str, batch: &[Case], after: &[u8], got: &[u8]) {
        if after == got {
            return;
        }
        for slot in 0..SLOTS {
            let range = slot * SLOT..(slot + 1) * SLOT;
            let differ = |at: &usize| after[*at] != got[*at];
            let Some(first) = range.clone().find(differ) else { continue };
            self.copies += 1;
            if self.examples.len() == DESCRIBED {
                continue;
            }
            let count = range.filter(differ).count();
            self.examples.push(match batch.get(slot) {
                Some(case) => {
                    let at = first as i64 - case.destination(slot) as i64;
                    let place = if at < 0 {
                        format!("guard byte {} in front of it", -at)
                    } else if at >= i64::from(case.len) {
                        format!("guard byte {} behind it", at - i64::from(case.len) + 1)
                    } else {
                        format!("byte {at}")
                    };
                    format!(
                        "{what} of {} B, offsets {} → {}: {place} is {:#04x} instead of {:#04x}, {count} wrong",
                        case.len, case.from, case.to, got[first], after[first]
                    )
                }
                None => format!("{what}: {count} bytes wrong in a slot without a copy"),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_cover_all_lengths_and_offsets_and_stay_in_their_slot() {
        let all = cases(true);
        assert_eq!(all.len(), 4097 * 128);
        let thin = cases(false);
        assert!(thin.len() < 1000 && thin.iter().all(|case| all.contains(case)), "{}", thin.len());
        for case in all.iter().chain(&thin) {
            assert!(case.from < 128 && case.to < 128);
            assert!(case.source(0).max(case.destination(0)) + (case.len as usize) < SLOT - 128);
        }
        let froms: std::collections::BTreeSet<u32> = all.iter().map(|case| case.from).collect();
        assert_eq!(froms.len(), 128);
    }

    #[test]
    fn every_wrong_byte_is_seen_in_payload_and_guards() {
        let batch = &cases(false)[100..103];
        let images = Images::new(batch, 7);
        let judge = |got: &[u8]| {
            let mut wrong = Wrong::default();
            wrong.add("copy", batch, &images.after, got);
            wrong
        };
        assert_eq!(judge(&images.after), Wrong::default());
        assert_eq!(judge(&images.before).copies, 3, "nothing arrived");
        let (slot, case) = (1, batch[1]);
        let (start, len) = (case.destination(slot), case.len as usize);
        for (at, words) in [
            (start - 1, "guard byte 1 in front"),
            (start, "byte 0 is"),
            (start + len - 1, "is"),
            (start + len, "guard byte 1 behind"),
            ((slot + 1) * SLOT - 1, "behind"),
        ] {
            let mut got = images.after.clone();
            got[at] ^= 1;
            let wrong = judge(&got);
            assert_eq!(wrong.copies, 1);
            assert!(wrong.examples[0].contains(words), "{wrong:?}");
        }
        let mut got = images.after.clone();
        got[5 * SLOT] ^= 1;
        assert!(judge(&got).examples[0].contains("without a copy"));
    }

    #[test]
    fn no_byte_that_arrives_looks_like_what_was_there() {
        let batch = &cases(false)[..SLOTS];
        let images = Images::new(batch, 1);
        let fills = Images::for_fills(batch, 0, 1);
        for (slot, case) in batch.iter().enumerate() {
            for at in case.destination(slot)..case.destination(slot) + case.len as usize {
                assert_ne!(images.before[at], images.after[at]);
                assert_ne!(fills.before[at], fills.after[at]);
            }
        }
    }
}
