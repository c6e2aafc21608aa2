//! The expected value of every byte of a buffer: seeded patterns, guards, and the comparison.
//!
//! Pure functions. A byte is a function of a key and its offset. Keys are unique per message, so bytes of an earlier
//! message, of a neighbour or at a wrong offset are detected. An [`Image`] describes a whole allocation: guard, body,
//! guard. Guards (and a body not yet received) are "poison", which is a separate pattern.

use std::fmt;

/// The well-known splitmix64 step: cheap, and neighbouring inputs give unrelated outputs.
pub fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Writes the bytes `offset..` of the pattern `key`.
pub fn fill(key: u64, offset: usize, to: &mut [u8]) {
    let key = mix(key);
    let head = (8 - offset % 8) % 8;
    let (head, rest) = to.split_at_mut(head.min(to.len()));
    for (i, byte) in head.iter_mut().enumerate() {
        *byte = word(key, offset + i).to_le_bytes()[(offset + i) % 8];
    }
    let start = offset + head.len();
    for (i, chunk) in rest.chunks_mut(8).enumerate() {
        let bytes = word(key, start + 8 * i).to_le_bytes();
        chunk.copy_from_slice(&bytes[..chunk.len()]);
    }
}

fn word(mixed_key: u64, offset: usize) -> u64 {
    mix(mixed_key ^ (offset / 8) as u64)
}

/// A part of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// In front of the message: must never change.
    GuardBefore,
    Body,
    /// The part of the body that a shorter message must leave alone.
    Unreceived,
    /// Behind the message: must never change.
    GuardAfter,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::GuardBefore => "guard before the message violated",
            Part::Body => "message wrong",
            Part::Unreceived => "bytes beyond the received length touched",
            Part::GuardAfter => "guard behind the message violated",
        })
    }
}

/// How an allocation is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Guard bytes in front; also the offset of the body.
    pub before: usize,
    pub body: usize,
    pub after: usize,
}

/// Guard bytes on either side: a page, so that a copy rounded up to pages is caught, too.
pub const GUARD: usize = 4096;
/// The body may start up to this many bytes after the guard's nominal end.
const SHIFT: usize = 64;

impl Layout {
    /// Size of an allocation that fits any layout of `body` bytes.
    pub const fn allocation(body: usize) -> usize {
        GUARD + SHIFT + body + GUARD
    }

    /// The layout of case number `case`: the offset is odd and changes from case to case.
    pub fn new(body: usize, case: u64) -> Layout {
        let shift = (mix(case) as usize % SHIFT) | 1;
        Layout { before: GUARD + shift, body, after: GUARD + SHIFT - shift }
    }

    /// The layout with the body at the start of a page, if the allocation begins at one.
    pub fn aligned(body: usize) -> Layout {
        Layout { before: GUARD, body, after: GUARD + SHIFT }
    }

    pub fn total(&self) -> usize {
        self.before + self.body + self.after
    }
}

/// The bytes an allocation must hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    segments: Vec<Segment>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Segment {
    part: Part,
    /// Offset of its first byte in the pattern.
    start: usize,
    length: usize,
    /// `None`: the bytes may be anything.
    key: Option<u64>,
}

impl Image {
    /// A message between guards.
    pub fn message(layout: Layout, poison: u64, message: u64) -> Image {
        Image::new(layout, poison, layout.body, Some(message))
    }

    /// Nothing received yet: poison everywhere.
    pub fn poisoned(layout: Layout, poison: u64) -> Image {
        Image::new(layout, poison, 0, None)
    }

    /// After a receive that was too small: its first `received` bytes may be anything, the rest is
    /// untouched.
    pub fn truncated(layout: Layout, poison: u64, received: usize) -> Image {
        Image::new(layout, poison, received, None)
    }

    fn new(layout: Layout, poison: u64, received: usize, message: Option<u64>) -> Image {
        let segment = |part, start, length, key| Segment { part, start, length, key };
        // Each poisoned part has its own key, so that bytes moved from one part to another are detected.
        let poison = |n: u64| Some(mix(poison).wrapping_add(n));
        let segments = vec![
            segment(Part::GuardBefore, 0, layout.before, poison(1)),
            segment(Part::Body, 0, received, message),
            segment(Part::Unreceived, received, layout.body - received, poison(2)),
            segment(Part::GuardAfter, 0, layout.after, poison(3)),
        ];
        Image { segments }
    }

    pub fn total(&self) -> usize {
        self.segments.iter().map(|segment| segment.length).sum()
    }

    /// Hands the image to `put` in blocks (offset in the allocation, bytes), without bytes that may be anything.
    pub fn write(&self, mut put: impl FnMut(usize, &[u8])) {
        let mut bytes = [0; BLOCK];
        for (segment, start) in self.placed() {
            let Some(key) = segment.key else { continue };
            for (at, length) in blocks(segment.length) {
                let bytes = &mut bytes[..length];
                fill(key, segment.start + at, bytes);
                put(start + at, bytes);
            }
        }
    }

    /// Compares every byte of the allocation, which `get` reads in blocks. Reports the first difference, and how many
    /// there are in the same part.
    pub fn verify(&self, mut get: impl FnMut(usize, &mut [u8])) -> Result<(), Mismatch> {
        let (mut expected, mut actual) = ([0; BLOCK], [0; BLOCK]);
        for (segment, start) in self.placed() {
            let Some(key) = segment.key else { continue };
            let mut found: Option<Mismatch> = None;
            for (at, length) in blocks(segment.length) {
                let (expected, actual) = (&mut expected[..length], &mut actual[..length]);
                let offset = segment.start + at;
                fill(key, offset, expected);
                get(start + at, actual);
                if expected != actual {
                    note(&mut found, segment.part, offset, expected, actual);
                }
            }
            if let Some(found) = found {
                return Err(found);
            }
        }
        Ok(())
    }

    /// Segments and their offsets in the allocation.
    fn placed(&self) -> impl Iterator<Item = (&Segment, usize)> {
        self.segments.iter().scan(0, |at, segment| {
            let start = *at;
            *at += segment.length;
            Some((segment, start))
        })
    }
}

/// Bytes compared at a time: two such blocks fit the first-level cache.
const BLOCK: usize = 8192;

fn blocks(length: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..length).step_by(BLOCK).map(move |at| (at, BLOCK.min(length - at)))
}

fn note(found: &mut Option<Mismatch>, part: Part, at: usize, expected: &[u8], actual: &[u8]) {
    for (i, (&expected, &got)) in expected.iter().zip(actual).enumerate() {
        if expected != got {
            let first = Mismatch { part, offset: at + i, expected, got, differing: 0 };
            found.get_or_insert(first).differing += 1;
        }
    }
}

/// The first wrong byte.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    pub part: Part,
    /// Offset from the start of that part; for unreceived bytes from the start of the message.
    pub offset: usize,
    pub expected: u8,
    pub got: u8,
    pub differing: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: first at offset {}, expected {:#04x}, got {:#04x}, {} bytes differ",
            self.part, self.offset, self.expected, self.got, self.differing
        )
    }
}

/// Cuts `length` into `pieces` (at most) pieces of odd, seeded lengths.
pub fn cuts(length: usize, pieces: usize, seed: u64) -> Vec<usize> {
    let mut left = length;
    let mut cuts = Vec::with_capacity(pieces);
    for n in (1..=pieces).rev() {
        // From a seventh of the fair share to nearly twice as much.
        let share = left / n;
        let random = mix(seed.wrapping_add(n as u64)) as usize;
        let cut = if n == 1 { left } else { (share / 7 + random % (2 * share + 1)) | 1 };
        let cut = cut.min(left);
        cuts.push(cut);
        left -= cut;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(image: &Image, layout: Layout) -> Vec<u8> {
        assert_eq!(image.total(), layout.total());
        let mut bytes = vec![0; layout.total()];
        image.write(|at, block| bytes[at..at + block.len()].copy_from_slice(block));
        bytes
    }

    fn verify(image: &Image, bytes: &[u8]) -> Result<(), Mismatch> {
        image.verify(|at, block| block.copy_from_slice(&bytes[at..at + block.len()]))
    }

    proptest! {
        #[test]
        fn a_pattern_does_not_depend_on_how_it_is_written(
            key: u64, start in 0usize..40, length in 0usize..100, split in 0usize..100
        ) {
            let mut whole = vec![0; length];
            fill(key, start, &mut whole);
            let mut parts = vec![0; length];
            let split = split.min(length);
            fill(key, start, &mut parts[..split]);
            fill(key, start + split, &mut parts[split..]);
            prop_assert_eq!(whole, parts);
        }

        #[test]
        fn what_was_written_verifies(body in 0usize..20_000, case: u64, poison: u64, key: u64) {
            let layout = Layout::new(body, case);
            prop_assert_eq!(layout.total(), Layout::allocation(body));
            prop_assert_eq!(layout.before % 2, 1);
            for image in [
                Image::message(layout, poison, key),
                Image::poisoned(layout, poison),
                Image::truncated(layout, poison, body / 2),
            ] {
                prop_assert_eq!(verify(&image, &written(&image, layout)), Ok(()));
            }
        }

        /// Tests the verifier itself: it finds a changed byte at any offset.
        #[test]
        fn a_single_changed_byte_is_found(body in 0usize..20_000, at: u64, flip in 1u8.., key: u64) {
            let layout = Layout::new(body, 3);
            let image = Image::message(layout, 5, key);
            let mut bytes = written(&image, layout);
            let at = at as usize % bytes.len();
            bytes[at] ^= flip;
            let (part, offset) = if at < layout.before {
                (Part::GuardBefore, at)
            } else if at < layout.before + body {
                (Part::Body, at - layout.before)
            } else {
                (Part::GuardAfter, at - layout.before - body)
            };
            let expected = bytes[at] ^ flip;
            let found = Mismatch { part, offset, expected, got: bytes[at], differing: 1 };
            prop_assert_eq!(verify(&image, &bytes), Err(found));
        }

        #[test]
        fn cuts_cover_everything(length in 0usize..100_000, pieces in 1usize..20, seed: u64) {
            let cuts = cuts(length, pieces, seed);
            prop_assert!(cuts.len() <= pieces);
            prop_assert_eq!(cuts.iter().sum::<usize>(), length);
        }
    }

    #[test]
    fn an_old_message_does_not_pass_for_a_new_one() {
        let layout = Layout::new(64, 1);
        let old = written(&Image::message(layout, 5, 1), layout);
        let found = verify(&Image::message(layout, 5, 2), &old).unwrap_err();
        assert_eq!(found.part, Part::Body);
        assert!(found.differing > 48, "{found}");
    }

    #[test]
    fn a_shifted_message_does_not_pass() {
        let layout = Layout::new(64, 1);
        let image = Image::message(layout, 5, 1);
        let mut bytes = written(&image, layout);
        bytes.copy_within(layout.before..layout.before + 56, layout.before + 8);
        let found = verify(&image, &bytes).unwrap_err();
        assert!((8..16).contains(&found.offset) && found.differing > 48, "{found}");
    }

    #[test]
    fn a_truncated_receive_must_not_write_beyond_its_length() {
        let layout = Layout::new(100, 1);
        let image = Image::truncated(layout, 5, 50);
        let mut bytes = written(&Image::poisoned(layout, 5), layout);
        bytes[layout.before..layout.before + 50].fill(0xab);
        assert_eq!(verify(&image, &bytes), Ok(()));
        bytes[layout.before + 50] ^= 1;
        let found = verify(&image, &bytes).unwrap_err();
        assert_eq!((found.part, found.offset), (Part::Unreceived, 50));
    }

    #[test]
    fn a_mismatch_reads_like_a_sentence() {
        let layout = Layout::new(8, 1);
        let image = Image::message(layout, 5, 1);
        let mut bytes = written(&image, layout);
        bytes[layout.before + 8] ^= 0xff;
        let text = verify(&image, &bytes).unwrap_err().to_string();
        assert!(text.starts_with("guard behind the message violated: first at offset 0"), "{text}");
    }
}
