//! The bytes of a DMA engine's packets, per generation. Pure functions.
//!
//! The layouts are the vendor's; the tests hold them against bytes written down independently and
//! against a second, bit-by-bit reading of the specification.

use crate::{DeviceAddr, Generation, PAGE_SIZE};

/// Bytes of a linear DMA packet, on every generation that has them.
pub const LIN_DMA_LEN: usize = 24;
/// Most bytes one packet of [`split`] moves: below the 32-bit limit of the length field, and a
/// multiple of the device's cache line so that the next piece starts aligned.
pub const MAX_PIECE: u64 = (1 << 32) - 128;

/// A packet that does nothing, the same on every generation that has packets.
pub const NOP: [u8; 8] = [0, 0, 0, 0, 0, 0, 0, 0x0a];

const OPCODE_SHIFT: u32 = 24;
const OPCODE_LIN_DMA: u32 = 0x9;
/// The engine finishes earlier work before it goes on.
const ENGINE_BARRIER: u32 = 1 << 29;
/// Messages that follow wait for this packet's writes.
const MESSAGE_BARRIER: u32 = 1 << 31;
/// Must be set on the first generation, and means something else on the second.
const REGISTER_BARRIER: u32 = 1 << 30;
const MEMSET: u32 = 1 << 4;
/// The transfer is linear, not strided: first generation.
const LINEAR: u32 = 1 << 3;
/// The destination field of the first generation holds this many bits of address; a context id follows.
const DST_BITS: u32 = 56;

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
    /// The packet, with the conservative barriers (engine and message) set.
    ///
    /// `None` where the generation has no such packet, or the address does not fit its field. Whether the engine takes
    /// the length and the addresses is for the caller to see to ([`DmaRule`]).
    pub fn encode(self, generation: Generation) -> Option<[u8; LIN_DMA_LEN]> {
        let (len, src, dst) = self.fields();
        let memset = if matches!(self, LinDma::Fill { .. }) { MEMSET } else { 0 };
        let ctl = (OPCODE_LIN_DMA << OPCODE_SHIFT) | ENGINE_BARRIER | MESSAGE_BARRIER | memset;
        match generation {
            Generation::Gaudi if dst >> DST_BITS != 0 => None,
            Generation::Gaudi => Some(pack(len, ctl | REGISTER_BARRIER | LINEAR, src, dst)),
            Generation::Gaudi2 => Some(pack(len, ctl, src, dst)),
            Generation::Gaudi3 => None,
        }
    }

    /// Length, source field and destination of the packet. For a fill the source field carries the
    /// value, repeated to 64 bits so that it does not matter how wide the engine reads it.
    fn fields(self) -> (u32, u64, u64) {
        match self {
            LinDma::Copy { src, dst, len } => (len, src.0, dst.0),
            LinDma::Fill { dst, len, byte } => (len, u64::from_ne_bytes([byte; 8]), dst.0),
        }
    }
}

/// Which lengths and addresses the DMA engines take. This is the only place that says so: a rule that is
/// learned on a card is written down in [`DmaRule::of`], and the copying code emulates what breaks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaRule {
    /// Lengths are multiples of this power of two.
    pub len: u32,
    /// Device addresses, also those of mapped host memory, are multiples of this power of two.
    pub addr: u64,
}

impl DmaRule {
    /// Anything goes, as far as is known. The packet has a length in bytes and no field for an alignment;
    /// but the vendor's own tests begin at 1 KiB, so odd lengths and addresses are an assumption.
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

    /// What is a multiple of this, address and length, keeps to it.
    pub fn unit(self) -> u64 {
        self.addr.max(self.len.into())
    }

    /// Whether a packet keeps to it.
    pub fn permits(self, dma: LinDma) -> bool {
        let (len, addrs) = match dma {
            LinDma::Copy { src, dst, len } => (len, [src, dst]),
            LinDma::Fill { dst, len, .. } => (len, [dst, dst]),
        };
        let aligned = |addr: DeviceAddr| addr.0.is_multiple_of(self.addr);
        len.is_multiple_of(self.len) && addrs.into_iter().all(aligned)
    }
}

fn pack(tsize: u32, ctl: u32, src: u64, dst: u64) -> [u8; LIN_DMA_LEN] {
    let mut packet = [0; LIN_DMA_LEN];
    packet[0..4].copy_from_slice(&tsize.to_le_bytes());
    packet[4..8].copy_from_slice(&ctl.to_le_bytes());
    packet[8..16].copy_from_slice(&src.to_le_bytes());
    packet[16..24].copy_from_slice(&dst.to_le_bytes());
    packet
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

    /// The first word of control is the one SynapseAI Core uses.
    #[test]
    fn golden_bytes() {
        for (generation, dma, golden) in [
            (
                Generation::Gaudi,
                copy(0x1_0000_0020_0123, 0x2000_0000, 0x0102_0304),
                "04030201080000e923012000000001000000002000000000",
            ),
            (
                Generation::Gaudi,
                fill(0x2000_0010, 7, 0xa5),
                "07000000180000e9a5a5a5a5a5a5a5a51000002000000000",
            ),
            (
                Generation::Gaudi2,
                copy(0xfff0_0001_0020_0abc, 0x1001_5000_3000_0000, 0xffff_ff80),
                "80ffffff000000a9bc0a20000100f0ff0000003000500110",
            ),
            (
                Generation::Gaudi2,
                fill(0x1001_5000_3000_0001, 3, 0x5a),
                "03000000100000a95a5a5a5a5a5a5a5a0100003000500110",
            ),
        ] {
            let packet = dma.encode(generation).expect("a packet");
            let hex: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, golden, "{generation} {dma:?}");
        }
    }

    #[test]
    fn gaudi3_has_no_packets_and_gaudi_no_destination_beyond_56_bits() {
        assert_eq!(copy(0, 0, 1).encode(Generation::Gaudi3), None);
        assert_eq!(copy(0, 1 << 56, 1).encode(Generation::Gaudi), None);
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
    fn nothing_is_split_into_nothing() {
        assert_eq!(split(0).count(), 0);
    }

    proptest! {
        #[test]
        fn every_field_is_where_the_specification_has_it(
            src in any::<u64>(), dst in 0..1_u64 << 56, len in any::<u32>()
        ) {
            for (generation, first) in [(Generation::Gaudi, 1), (Generation::Gaudi2, 0)] {
                let packet = copy(src, dst, len).encode(generation).unwrap();
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
