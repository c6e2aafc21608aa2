//! Small changes of an input, for runs without coverage: less thorough than libFuzzer, but for any toolchain.

use fastrand::Rng;

/// Longest result.
const MAX: usize = 16 << 10;
/// Numbers at limits.
const INTERESTING: [u64; 9] =
    [0, 1, 0x7f, 0xff, 0x7fff, 0xffff_ffff, 0x8000_0000, u64::MAX, 1 << 63];

/// One input with some changes, sometimes with a part of another.
pub fn mutated(rng: &mut Rng, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = rng.choice(inputs).cloned().unwrap_or_default();
    for _ in 0..=rng.u8(..6) {
        let len = bytes.len();
        let at = rng.usize(..=len);
        let end = rng.usize(at..=len.min(at + 32));
        match rng.u8(..7) {
            0 if at < len => bytes[at] ^= 1 << rng.u8(..8),
            1 if at < len => bytes[at] = rng.u8(..),
            2 => drop(bytes.drain(at..end)),
            3 => bytes.insert(at, rng.u8(..)),
            4 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            5 => {
                let number = INTERESTING[rng.usize(..INTERESTING.len())].to_le_bytes();
                let width = 1 << rng.u8(..4);
                bytes.splice(at..len.min(at + width), number[..width].iter().copied());
            }
            _ => {
                let other = rng.choice(inputs).map_or(&[][..], Vec::as_slice);
                let from = rng.usize(..=other.len());
                let to = rng.usize(from..=other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
        }
    }
    bytes.truncate(MAX);
    bytes
}
