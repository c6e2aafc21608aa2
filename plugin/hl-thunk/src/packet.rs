//! The bytes of a DMA engine's packets, per generation. Pure functions.
//!
//! The layouts are the vendor's; the tests hold them against bytes written down independently and
//! against a second, bit-by-bit reading of the specification.

use std::ops::Range;

use crate::{DeviceAddr, Generation, PAGE_SIZE};

/// Bytes of a linear DMA packet, on every generation that has them.
pub const LIN_DMA_LEN: usize = 24;
/// Most bytes one packet of [`split`] moves: below the 32-bit limit of the length field, and a
/// multiple of the device's cache line so that the next piece starts aligned.
pub const MAX_PIECE: u64 = (1 << 32) - 128;

/// A packet that does nothing, the same on every generation that has packets.
pub const NOP: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0x0a];

/// The opcode, in its place.
const LIN_DMA: u32 = 0x9 << 24;
/// The packet waits until the engine has done the earlier ones: it drains in between.
const ENGINE_BARRIER: u32 = 1 << 29;
/// The packet waits for earlier messages.
const MESSAGE_BARRIER: u32 = 1 << 31;
/// Must be set on the first generation, and means something else on the second.
const REGISTER_BARRIER: u32 = 1 << 30;
const MEMSET: u32 = 1 << 4;
/// The transfer is linear, not strided: first generation.
const LINEAR: u32 = 1 << 3;
/// The destination field of the first generation holds this many bits of address; a context id follows.
const DST_BITS: u32 = 56;

/// The control bits of a generation's packets. Every resulting control word is one that the vendor's own code submits:
///
/// | | any packet | the first of a submission | one that must wait for an earlier one |
/// |---|---|---|---|
/// | Gaudi | `c9000008`: tests of hl-thunk, the kernel | `e9000008`: SynapseAI Core | the same |
/// | Gaudi2 | `09000000`: SCAL | `a9000000`: SynapseAI Core | `29000000`: the kernel |
///
/// On the modelled card, in a submission of 64, a block of 4 KiB takes 1.17 µs with a barrier in every
/// packet, and 0.20 without; a block of 45 KiB takes 2.84 and 1.91.
struct ControlBits {
    every: u32,
    first: u32,
    ordered: u32,
}

const GAUDI: ControlBits = ControlBits {
    every: LIN_DMA | LINEAR | REGISTER_BARRIER | MESSAGE_BARRIER,
    first: ENGINE_BARRIER,
    ordered: ENGINE_BARRIER,
};
const GAUDI2: ControlBits = ControlBits {
    every: LIN_DMA,
    first: ENGINE_BARRIER | MESSAGE_BARRIER,
    ordered: ENGINE_BARRIER,
};

/// One linear DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinDma {
    /// Copies `len` bytes.
    Copy {
        /// Where from.
        src: DeviceAddr,
        /// Where to.
        dst: DeviceAddr,
        /// Bytes.
        len: u32,
    },
    /// Sets `len` bytes to `byte`.
    Fill {
        /// Where.
        dst: DeviceAddr,
        /// Bytes.
        len: u32,
        /// The value.
        byte: u8,
    },
}

impl LinDma {
    /// The packet, which follows `earlier` in the same submission. The engine works on several packets at a time. So a packet
    /// gets a barrier if it accesses what an earlier one writes, or writes what an earlier one reads; so does the first.
    ///
    /// `None` if the generation has no such packet, or the address does not fit its field. The caller
    /// must check that the engine takes the length and the addresses ([`DmaRule`]).
    pub fn encode(self, generation: Generation, earlier: &[LinDma]) -> Option<[u8; LIN_DMA_LEN]> {
        let bits = match generation {
            Generation::Gaudi => GAUDI,
            Generation::Gaudi2 => GAUDI2,
            Generation::Gaudi3 => return None,
        };
        let barriers = match earlier {
            [] => bits.first,
            _ if earlier.iter().any(|other| self.must_follow(*other)) => bits.ordered,
            _ => 0,
        };
        // The value of a fill is in the source field, repeated, so that the width of the engine's read does not matter.
        let (len, kind, src, dst) = match self {
            LinDma::Copy { src, dst, len } => (len, 0, src.0, dst.0),
            LinDma::Fill { dst, len, byte } => (len, MEMSET, u64::from_ne_bytes([byte; 8]), dst.0),
        };
        if generation == Generation::Gaudi && dst >> DST_BITS != 0 {
            return None;
        }
        let mut packet = [0; LIN_DMA_LEN];
        packet[0..4].copy_from_slice(&len.to_le_bytes());
        packet[4..8].copy_from_slice(&(bits.every | barriers | kind).to_le_bytes());
        packet[8..16].copy_from_slice(&src.to_le_bytes());
        packet[16..24].copy_from_slice(&dst.to_le_bytes());
        Some(packet)
    }

    /// Whether the order of the two matters: one of them writes what the other reads or writes.
    fn must_follow(self, earlier: LinDma) -> bool {
        let (reads, writes) = self.ranges();
        let (read, written) = earlier.ranges();
        let overlap =
            |one: &Range<u64>, other: &Range<u64>| one.start < other.end && other.start < one.end;
        overlap(&writes, &written) || overlap(&reads, &written) || overlap(&writes, &read)
    }

    /// What it reads, which is nothing for a fill, and what it writes.
    fn ranges(self) -> (Range<u64>, Range<u64>) {
        let range = |at: DeviceAddr, len: u32| at.0..at.0.saturating_add(len.into());
        match self {
            LinDma::Copy { src, dst, len } => (range(src, len), range(dst, len)),
            LinDma::Fill { dst, len, .. } => (0..0, range(dst, len)),
        }
    }
}

/// Which lengths and addresses the DMA engines take. Defined only here: a rule that is found on a card
/// goes into [`DmaRule::of`]. The copying code emulates copies that break it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRule {
    /// Lengths are multiples of this power of two.
    pub len: u32,
    /// Device addresses, also those of mapped host memory, are multiples of this power of two.
    pub addr: u64,
}

impl DmaRule {
    /// No restriction is known. The packet has a length in bytes and no field for an alignment; but the
    /// vendor's own tests begin at 1 KiB, so that odd lengths and addresses work is an assumption.
    ///
    /// A software card may have a rule, which it says in the version of its library (`…+dma=LEN,ADDR`).
    pub fn of(_generation: Generation, library: Option<&str>) -> Self {
        let announced = library.and_then(|version| {
            let (_, rule) = version.split_once("+dma=")?;
            let (len, addr) = rule.split('+').next()?.split_once(',')?;
            Some(DmaRule { len: len.parse().ok()?, addr: addr.parse().ok()? })
        });
        let sound = |rule: &DmaRule| {
            rule.len.is_power_of_two() && rule.addr.is_power_of_two() && rule.unit() <= PAGE_SIZE
        };
        announced.filter(sound).unwrap_or(DmaRule { len: 1, addr: 1 })
    }

    /// Addresses and lengths that are multiples of this obey the rule.
    pub fn unit(self) -> u64 {
        self.addr.max(self.len.into())
    }

    /// Whether a packet obeys the rule.
    pub fn permits(self, dma: LinDma) -> bool {
        let (len, addrs) = match dma {
            LinDma::Copy { src, dst, len } => (len, [src, dst]),
            LinDma::Fill { dst, len, .. } => (len, [dst, dst]),
        };
        let aligned = |addr: DeviceAddr| addr.0.is_multiple_of(self.addr);
        len.is_multiple_of(self.len) && addrs.into_iter().all(aligned)
    }
}

/// Cuts a transfer of `len` bytes into pieces that fit a packet: offset and length of each.
pub fn split(len: u64) -> impl Iterator<Item = (u64, u32)> {
    (0..len.div_ceil(MAX_PIECE)).map(move |piece| {
        let offset = piece * MAX_PIECE;
        (offset, (len - offset).min(MAX_PIECE) as u32)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn copy(src: u64, dst: u64, len: u32) -> LinDma {
        LinDma::Copy { src: DeviceAddr(src), dst: DeviceAddr(dst), len }
    }

    fn fill(dst: u64, len: u32, byte: u8) -> LinDma {
        LinDma::Fill { dst: DeviceAddr(dst), len, byte }
    }

    /// The packets of one submission, in words.
    fn submission(generation: Generation, moves: &[LinDma]) -> Vec<[u32; 6]> {
        let packet = |(at, dma): (usize, &LinDma)| {
            let packet = dma.encode(generation, &moves[..at]).expect("a packet");
            std::array::from_fn(|at| word(&packet, 4 * at))
        };
        moves.iter().enumerate().map(packet).collect()
    }

    /// The control words are those of SynapseAI Core, which submits packets one by one.
    #[test]
    fn golden_words_of_one_packet() {
        for (generation, dma, golden) in [
            (
                Generation::Gaudi,
                copy(0x1_0000_0020_0123, 0x2000_0000, 0x0102_0304),
                [0x0102_0304, 0xe900_0008, 0x0020_0123, 0x1_0000, 0x2000_0000, 0],
            ),
            (
                Generation::Gaudi,
                fill(0x2000_0010, 7, 0xa5),
                [7, 0xe900_0018, 0xa5a5_a5a5, 0xa5a5_a5a5, 0x2000_0010, 0],
            ),
            (
                Generation::Gaudi2,
                copy(0xfff0_0001_0020_0abc, 0x1001_5000_3000_0000, 0xffff_ff80),
                [0xffff_ff80, 0xa900_0000, 0x0020_0abc, 0xfff0_0001, 0x3000_0000, 0x1001_5000],
            ),
            (
                Generation::Gaudi2,
                fill(0x1001_5000_3000_0001, 3, 0x5a),
                [3, 0xa900_0010, 0x5a5a_5a5a, 0x5a5a_5a5a, 0x3000_0001, 0x1001_5000],
            ),
        ] {
            assert_eq!(submission(generation, &[dma]), [golden], "{generation} {dma:?}");
        }
    }

    /// What SCAL submits to a Gaudi2 at every start, to queue 4: `warmupHbmTlb` fills all HBM in pieces of 2 GiB,
    /// `DeviceDmaBuffer::commit` collects copies from host memory. `submitQmanWkld` writes them one behind the other,
    /// without barriers. Ours are the same words but for the barriers of the first packet.
    #[test]
    fn golden_submissions_of_scal() {
        const GIB: u64 = 1 << 30;
        let hbm = 0x1001_0500_0000_0000;
        let warmup: Vec<_> = [0, 2, 4]
            .map(|gib| fill(hbm + gib * GIB, if gib == 4 { 0x3fff_f000 } else { 2 << 30 }, 0))
            .into();
        let images = [
            copy(0xfff0_0000_0000_0000, hbm, 0x8000),
            copy(0xfff0_0000_0020_0000, hbm + 0x8000, 0x50),
        ];
        for (moves, scal) in [
            (
                &warmup[..],
                &[
                    [0x8000_0000, 0x0900_0010, 0, 0, 0, 0x1001_0500],
                    [0x8000_0000, 0x0900_0010, 0, 0, 0x8000_0000, 0x1001_0500],
                    [0x3fff_f000, 0x0900_0010, 0, 0, 0, 0x1001_0501],
                ][..],
            ),
            (
                &images,
                &[
                    [0x8000, 0x0900_0000, 0, 0xfff0_0000, 0, 0x1001_0500],
                    [0x50, 0x0900_0000, 0x20_0000, 0xfff0_0000, 0x8000, 0x1001_0500],
                ],
            ),
        ] {
            let mut ours = submission(Generation::Gaudi2, moves);
            assert_eq!(ours[0][1] & 0xa000_0000, 0xa000_0000, "barriers of the first");
            ours[0][1] &= !0xa000_0000;
            assert_eq!(ours, scal);
        }
    }

    /// Tests of hl-thunk chain packets of Gaudi like this.
    #[test]
    fn later_packets_have_an_engine_barrier_only_where_they_must_follow() {
        let (a, b, c) = (0x1000, 0x2000, 0x3000);
        let first = copy(a, b, 0x100);
        for (next, must_follow) in [
            (copy(c, c + 0x100, 0x100), false),
            (copy(a, c, 0x100), false),
            (copy(a + 0x80, b + 0x100, 0x80), false),
            (copy(c, b + 0xff, 1), true),
            (copy(b + 0xff, c, 1), true),
            (copy(c, a + 0xff, 1), true),
            (fill(b, 1, 0), true),
            (fill(a, 1, 0), true),
            (fill(b + 0x100, 0x100, 0), false),
            (fill(b - 0x80, 0x80, 0), false),
            (copy(u64::MAX - 1, c, 2), false),
        ] {
            for (generation, free, ordered) in [
                (Generation::Gaudi, 0xc900_0008, 0xe900_0008),
                (Generation::Gaudi2, 0x0900_0000, 0x2900_0000),
            ] {
                // Not the one in front of it, but an older one.
                let between = copy(0x10_0000, 0x20_0000, 0x100);
                let words = submission(generation, &[first, between, next]);
                assert_eq!(words[1][1], free);
                let expected = if must_follow { ordered } else { free };
                assert_eq!(words[2][1] & !MEMSET, expected, "{generation} {next:?}");
            }
        }
    }

    #[test]
    fn gaudi3_has_no_packets_and_gaudi_no_destination_beyond_56_bits() {
        assert_eq!(copy(0, 0, 1).encode(Generation::Gaudi3, &[]), None);
        assert_eq!(copy(0, 1 << 56, 1).encode(Generation::Gaudi, &[]), None);
    }

    /// The little-endian word at `offset`, read byte by byte.
    fn word(packet: &[u8], offset: usize) -> u32 {
        (0..4).map(|byte| u32::from(packet[offset + byte]) << (8 * byte)).sum()
    }

    /// Bits `high` to `low` of a word, as specifications write them.
    fn bits(word: u32, high: u32, low: u32) -> u32 {
        (low..=high).map(|bit| ((word >> bit) & 1) << (bit - low)).sum()
    }

    #[test]
    fn a_stricter_rule_refuses_odd_lengths_and_addresses() {
        let rule = DmaRule { len: 4, addr: 128 };
        assert!(rule.permits(copy(0x1000, 0x1080, 12)));
        for dma in [copy(0x1001, 0x1080, 12), copy(0x1000, 0x1081, 12), copy(0x1000, 0x1080, 13)] {
            assert!(!rule.permits(dma), "{dma:?}");
        }
        assert!(!rule.permits(fill(0x1000, 3, 0)));
    }

    #[test]
    fn no_rule_is_known_but_a_software_cards_own() {
        let of = |version| DmaRule::of(Generation::Gaudi2, version);
        let none = DmaRule { len: 1, addr: 1 };
        assert_eq!(of(None), none);
        assert_eq!(of(Some("1.10.0-soft-gaudi-0.1.0+gaudi2,slow=40")), none);
        let rule = of(Some("1.10.0-soft-gaudi-0.1.0+dma=4,128+gaudi2,slow=40"));
        assert_eq!((rule, rule.unit()), (DmaRule { len: 4, addr: 128 }, 128));
        assert_eq!(of(Some("x+dma=3,128")), none, "no power of two");
    }

    #[test]
    fn a_piece_is_as_long_as_the_field_permits() {
        let pieces = |len| split(len).count();
        assert_eq!([0, 1, 0xffff_ff80, 0xffff_ff81].map(pieces), [0, 1, 1, 2]);
    }

    proptest! {
        #[test]
        fn every_field_is_where_the_specification_has_it(
            src in any::<u64>(), dst in 0..1_u64 << 56, len in any::<u32>()
        ) {
            for (generation, first) in [(Generation::Gaudi, 1), (Generation::Gaudi2, 0)] {
                let packet = copy(src, dst, len).encode(generation, &[]).unwrap();
                let (long, ctl) = (|at| u64::from(word(&packet, at)), word(&packet, 4));
                prop_assert_eq!(word(&packet, 0), len);
                prop_assert_eq!(bits(ctl, 28, 24), 9, "opcode");
                prop_assert_eq!(bits(ctl, 29, 29), 1, "engine barrier");
                prop_assert_eq!(bits(ctl, 30, 30), first, "register barrier, or swtc");
                prop_assert_eq!(bits(ctl, 31, 31), 1, "message barrier");
                prop_assert_eq!(bits(ctl, 3, 3), first, "linear");
                prop_assert_eq!(bits(ctl, 2, 0), 0, "write completion, transpose, data type");
                prop_assert_eq!(bits(ctl, 23, 4), 0, "memset, compression, context id");
                prop_assert_eq!(long(8) | long(12) << 32, src);
                prop_assert_eq!(long(16) | long(20) << 32, dst);
            }
        }

        #[test]
        fn pieces_cover_the_transfer_in_order_without_gap(
            len in prop_oneof![0..4096_u64, MAX_PIECE - 200..MAX_PIECE + 200, 0..1_u64 << 40]
        ) {
            let mut next = 0;
            for (offset, piece) in split(len) {
                prop_assert_eq!(offset, next);
                prop_assert_eq!(offset % 128, 0);
                prop_assert!(piece > 0);
                next += u64::from(piece);
            }
            prop_assert_eq!(next, len);
        }
    }
}
