//! Packets of the second generation.

use super::{
    ENGINE_BARRIER, LIN_DMA_LEN, LinDma, MESSAGE_BARRIER, OPCODE_LIN_DMA, OPCODE_SHIFT, pack,
};

const MEMSET: u32 = 1 << 4;

/// A linear DMA packet. Bit 30, which the first generation demands, means something else here and
/// stays clear; there is no linear bit.
pub fn lin_dma(dma: LinDma) -> [u8; LIN_DMA_LEN] {
    let (len, src, dst) = dma.fields();
    let memset = if matches!(dma, LinDma::Fill { .. }) { MEMSET } else { 0 };
    let ctl = (OPCODE_LIN_DMA << OPCODE_SHIFT) | ENGINE_BARRIER | MESSAGE_BARRIER | memset;
    pack(len, ctl, src, dst)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::DeviceAddr;
    use proptest::prelude::*;

    /// The little-endian word at `offset`, read byte by byte.
    pub(in crate::packet) fn word(packet: &[u8], offset: usize) -> u32 {
        (0..4).map(|byte| u32::from(packet[offset + byte]) << (8 * byte)).sum()
    }

    /// Bits `high` to `low` of a word, as specifications write them.
    pub(in crate::packet) fn bits(word: u32, high: u32, low: u32) -> u32 {
        (low..=high).map(|bit| ((word >> bit) & 1) << (bit - low)).sum()
    }

    #[test]
    fn golden_bytes_of_a_copy() {
        // ctl 0xA9000000.
        let packet = lin_dma(LinDma::Copy {
            src: DeviceAddr(0xfff0_0001_0020_0abc),
            dst: DeviceAddr(0x1001_5000_3000_0000),
            len: 0xffff_ff80,
        });
        let golden = [
            0x80, 0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0xa9, 0xbc, 0x0a, 0x20, 0x00, 0x01, 0x00,
            0xf0, 0xff, 0x00, 0x00, 0x00, 0x30, 0x00, 0x50, 0x01, 0x10,
        ];
        assert_eq!(packet, golden);
    }

    #[test]
    fn golden_bytes_of_a_fill() {
        // ctl 0xA9000010.
        let dst = DeviceAddr(0x1001_5000_3000_0001);
        let packet = lin_dma(LinDma::Fill { dst, len: 3, byte: 0x5a });
        let golden = [
            0x03, 0x00, 0x00, 0x00, 0x10, 0x00, 0x00, 0xa9, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a, 0x5a,
            0x5a, 0x5a, 0x01, 0x00, 0x00, 0x30, 0x00, 0x50, 0x01, 0x10,
        ];
        assert_eq!(packet, golden);
    }

    proptest! {
        #[test]
        fn every_field_is_where_the_specification_has_it(
            src in any::<u64>(), dst in any::<u64>(), len in any::<u32>()
        ) {
            let packet = lin_dma(LinDma::Copy { src: DeviceAddr(src), dst: DeviceAddr(dst), len });
            let ctl = word(&packet, 4);
            prop_assert_eq!(word(&packet, 0), len);
            prop_assert_eq!(bits(ctl, 28, 24), 9, "opcode");
            prop_assert_eq!(bits(ctl, 29, 29), 1, "engine barrier");
            prop_assert_eq!(bits(ctl, 30, 30), 0, "swtc");
            prop_assert_eq!(bits(ctl, 31, 31), 1, "message barrier");
            prop_assert_eq!(bits(ctl, 23, 0), 0, "no conversion, memset, completion or context");
            prop_assert_eq!(u64::from(word(&packet, 8)) | u64::from(word(&packet, 12)) << 32, src);
            prop_assert_eq!(u64::from(word(&packet, 16)) | u64::from(word(&packet, 20)) << 32, dst);
        }
    }
}
