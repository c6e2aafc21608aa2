//! Which copies to try, and the expected memory afterwards. Pure functions.
//!
//! A batch of copies works on an image made of slots, with one copy in each. Source and destination have any offset
//! modulo 128 in the slot, and all bytes around the destination are guards. Each byte to arrive differs from the byte
//! before, so that a missing one is detected.
//!
//! All copies of a batch have the same alignments. The most aligned ones come first: if a card refuses some, the
//! batches before show its rule.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

/// Bytes of a slot, of the largest image, and slots in it.
pub(super) const SLOT: usize = 8192;
pub(super) const SLOTS: usize = 256;
pub(super) const IMAGE: usize = SLOT * SLOTS;
/// Offset in a slot at which copies with offset 0 begin: there are guards in front, too.
const BEGIN: usize = 256;
/// The longest copy that is tried.
const LONGEST: u32 = 4097;
/// How many wrong copies are described in words.
const DESCRIBED: usize = 4;
/// How many wrong copies of a kind are listed in the data.
const LISTED: usize = 256;

/// One copy: its length, and its offsets modulo 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) len: u32,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The largest powers of two, up to 128, that divide both addresses of a copy and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Alignment {
    addresses: u32,
    lengths: u32,
}

impl Case {
    /// Offset of its source in the image.
    pub(super) fn source(self, slot: usize) -> usize {
        slot * SLOT + BEGIN + self.from as usize
    }

    /// Offset of its destination in the image.
    pub(super) fn destination(self, slot: usize) -> usize {
        slot * SLOT + BEGIN + self.to as usize
    }

    fn alignment(self) -> Alignment {
        let unit = |number: u32| 1 << number.trailing_zeros().min(7);
        Alignment { addresses: unit(self.from | self.to), lengths: unit(self.len) }
    }
}

/// Copies that were submitted together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch<'a> {
    pub(super) what: &'static str,
    pub(super) queue: u32,
    pub(super) cases: &'a [Case],
}

impl Batch<'_> {
    fn alignment(&self) -> Alignment {
        self.cases.first().copied().map_or(Alignment { addresses: 1, lengths: 1 }, Case::alignment)
    }

    /// All its copies, for programs: length, and both offsets modulo 128.
    pub(super) fn data(&self) -> Value {
        let Alignment { addresses, lengths } = self.alignment();
        let copies: Vec<_> = self.cases.iter().map(|case| [case.len, case.from, case.to]).collect();
        json!({
            "what": self.what, "queue": self.queue, "addresses_multiple_of": addresses,
            "lengths_multiple_of": lengths, "len_from_to": copies,
        })
    }
}

impl fmt::Display for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Alignment { addresses, lengths } = self.alignment();
        let lens = || self.cases.iter().map(|case| case.len);
        let (shortest, longest) = (lens().min().unwrap_or(0), lens().max().unwrap_or(0));
        let count = self.cases.len();
        write!(
            f,
            "{} on queue {}, one of {count} of {shortest} to {longest} B, addresses that are multiples of {addresses}, \
             lengths of {lengths}",
            self.what, self.queue
        )
    }
}

/// All lengths at all offsets, or lengths around powers of two at some offsets; the most aligned first.
pub(super) fn batches(thorough: bool) -> Vec<Vec<Case>> {
    let cases = cases(thorough);
    let alike = cases.chunk_by(|a, b| a.alignment() == b.alignment());
    alike.flat_map(|alike| alike.chunks(SLOTS)).map(<[Case]>::to_vec).collect()
}

fn cases(thorough: bool) -> Vec<Case> {
    let (lengths, offsets): (Vec<u32>, Vec<u32>) = if thorough {
        ((1..=LONGEST).collect(), (0..128).collect())
    } else {
        let around = (4..=12).flat_map(|power| [-1, 0, 1].map(|by: i32| (1 << power) + by));
        let lengths = (1..=9).chain(around.map(|len| len as u32));
        (lengths.collect(), vec![0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 63, 64, 65, 96, 127])
    };
    let mut cases = Vec::new();
    for &len in &lengths {
        let alike = [0, 64, 32, 16, 8, 4, 2].map(|to| Case { len, from: to, to });
        let others = offsets.iter().map(|&to| Case { len, from: (to * 61 + len) % 128, to });
        cases.extend(alike.into_iter().chain(others));
    }
    cases.sort_by_key(|case| (Reverse(case.alignment()), case.len, case.to, case.from));
    cases.dedup();
    cases
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
        let slots = slots(batch);
        let mut source = noise(seed, slots);
        let before = noise(seed ^ 0x5eed, slots);
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

    /// Memory for fills with `byte`: the bytes before all differ from it.
    pub(super) fn for_fills(batch: &[Case], byte: u8, seed: u64) -> Self {
        let mut before = noise(seed, slots(batch));
        before.iter_mut().filter(|there| **there == byte).for_each(|there| *there = !byte);
        let mut after = before.clone();
        for (slot, case) in batch.iter().enumerate() {
            let to = case.destination(slot);
            after[to..to + case.len as usize].fill(byte);
        }
        Self { source: Vec::new(), before, after }
    }
}

/// One slot per copy, plus one behind them if there is space.
fn slots(batch: &[Case]) -> usize {
    (batch.len() + 1).min(SLOTS)
}

/// An image of random bytes.
pub(super) fn noise(seed: u64, slots: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut image = vec![0; slots * SLOT];
    for word in image.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    image
}

/// The mistakes of copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mismatches {
    pub(super) copies: usize,
    pub(super) examples: Vec<String>,
    kinds: BTreeMap<(&'static str, u32, Alignment), Kind>,
}

/// Copies of one direction, queue and alignment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Kind {
    tried: usize,
    wrong: usize,
    listed: Vec<[u32; 3]>,
}

impl Mismatches {
    /// The kinds of copies with mistakes, for programs.
    pub(super) fn kinds(&self) -> Value {
        let wrong = self.kinds.iter().filter(|(_, kind)| kind.wrong > 0);
        let row = |((what, queue, alignment), kind): (&(&str, u32, Alignment), &Kind)| {
            json!({
                "what": what, "queue": queue, "addresses_multiple_of": alignment.addresses,
                "lengths_multiple_of": alignment.lengths, "tried": kind.tried, "wrong": kind.wrong,
                "len_from_to": kind.listed,
            })
        };
        wrong.map(row).collect()
    }

    /// Compares every byte, guards included.
    pub(super) fn add(&mut self, batch: Batch<'_>, after: &[u8], got: &[u8]) {
        let Batch { what, queue, cases } = batch;
        let kind = self.kinds.entry((what, queue, batch.alignment())).or_default();
        kind.tried += cases.len();
        if after == got {
            return;
        }
        for slot in 0..after.len() / SLOT {
            let range = slot * SLOT..(slot + 1) * SLOT;
            let differ = |at: &usize| after[*at] != got[*at];
            let Some(first) = range.clone().find(differ) else { continue };
            self.copies += 1;
            kind.wrong += 1;
            if let Some(case) = cases.get(slot)
                && kind.listed.len() < LISTED
            {
                kind.listed.push([case.len, case.from, case.to]);
            }
            if self.examples.len() == DESCRIBED {
                continue;
            }
            let count = range.filter(differ).count();
            self.examples.push(match cases.get(slot) {
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
                        "{what} of {} B on queue {queue}, offsets {} → {}: {place} is {:#04x} instead of {:#04x}, {count} wrong",
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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn cases_cover_all_lengths_and_offsets_and_stay_in_their_slot() {
        let (all, thin) = (cases(true), cases(false));
        let places = |cases: &[Case]| -> BTreeSet<(u32, u32)> {
            cases.iter().map(|case| (case.len, case.to)).collect()
        };
        assert_eq!(places(&all).len(), 4097 * 128);
        assert!(thin.len() < 1000 && places(&thin).is_subset(&places(&all)), "{}", thin.len());
        for case in all.iter().chain(&thin) {
            assert!(case.from < 128 && case.to < 128);
            assert!(case.source(0).max(case.destination(0)) + (case.len as usize) < SLOT - 128);
        }
        let froms: BTreeSet<u32> = all.iter().map(|case| case.from).collect();
        assert_eq!(froms.len(), 128);
    }

    #[test]
    fn batches_hold_all_cases_of_every_alignment_most_aligned_first() {
        let batches = batches(false);
        assert_eq!(batches.concat(), cases(false));
        let alignments: Vec<Alignment> = batches.iter().map(|batch| batch[0].alignment()).collect();
        for (batch, alignment) in batches.iter().zip(&alignments) {
            assert!(batch.len() <= SLOTS);
            assert!(batch.iter().all(|case| case.alignment() == *alignment));
        }
        assert!(alignments.is_sorted_by_key(Reverse));
        let mut seen = alignments;
        seen.dedup();
        assert_eq!(seen.len(), 8 * 8, "a rule for addresses can be told from one for lengths");
    }

    #[test]
    fn every_wrong_byte_is_seen_in_payload_and_guards() {
        let batches = batches(false);
        let cases = &batches[batches.len() - 1][..3];
        let batch = Batch { what: "copy", queue: 4, cases };
        let images = Images::new(cases, 7);
        let judge = |got: &[u8]| {
            let mut wrong = Mismatches::default();
            wrong.add(batch, &images.after, got);
            wrong
        };
        assert_eq!(judge(&images.after).kinds(), json!([]));
        let nothing_arrived = judge(&images.before);
        assert_eq!(nothing_arrived.copies, 3);
        let kind = &nothing_arrived.kinds()[0];
        assert_eq!(
            (&kind["queue"], &kind["tried"], &kind["wrong"]),
            (&json!(4), &json!(3), &json!(3))
        );
        assert_eq!(kind["len_from_to"], batch.data()["len_from_to"]);
        let (slot, case) = (1, cases[1]);
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
        got[3 * SLOT] ^= 1;
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
