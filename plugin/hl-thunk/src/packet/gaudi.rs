//! Packets of the first generation.

use super::{
    ENGINE_BARRIER, LIN_DMA_LEN, LinDma, MESSAGE_BARRIER, OPCODE_LIN_DMA, OPCODE_SHIFT, pack,
};

/// The transfer is linear, not strided.
const LINEAR: u32 = 1 << 3;
const MEMSET: u32 = 1 << 4;
/// Must be set on this generation.
const REGISTER_BARRIER: u32 = 1 << 30;
/// The destination field holds this many bits of address; a context id follows.
const DST_BITS: u32 = 56;

/// A linear DMA packet; `None` if the destination does not fit its 56-bit field.
pub fn lin_dma(dma: LinDma) -> Option<[u8; LIN_DMA_LEN]> {
    let (len, src, dst) = dma.fields();
    if dst >> DST_BITS != 0 {
        return None;
    }
    let memset = if matches!(dma, LinDma::Fill { .. }) { MEMSET } else { 0 };
    let opcode = OPCODE_LIN_DMA << OPCODE_SHIFT;
    let ctl = opcode | ENGINE_BARRIER | REGISTER_BARRIER | MESSAGE_BARRIER | LINEAR | memset;
    Some(pack(len, ctl, src, dst))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceAddr;
    use crate::packet::gaudi2::tests::{bits, word};
    use proptest::prelude::*;

    #[test]
    fn golden_bytes_of_a_copy() {
        // ctl 0xE9000008: the word SynapseAI Core uses.
        let packet = lin_dma(LinDma::Copy {
            src: DeviceAddr(0x1_0000_0020_0123),
            dst: DeviceAddr(0x2000_0000),
            len: 0x0102_0304,
        });
        let golden = [
            0x04, 0x03, 0x02, 0x01, 0x08, 0x00, 0x00, 0xe9, 0x23, 0x01, 0x20, 0x00, 0x00, 0x00,
            0x01, 0x00, 0x00, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x00,
        ];
        assert_eq!(packet, Some(golden));
    }

    #[test]
    fn golden_bytes_of_a_fill() {
        // ctl 0xE9000018.
        let packet = lin_dma(LinDma::Fill { dst: DeviceAddr(0x2000_0010), len: 7, byte: 0xa5 });
        let golden = [
            0x07, 0x00, 0x00, 0x00, 0x18, 0x00, 0x00, 0xe9, 0xa5, 0xa5, 0xa5, 0xa5, 0xa5, 0xa5,
            0xa5, 0xa5, 0x10, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x00,
        ];
        assert_eq!(packet, Some(golden));
    }

    #[test]
    fn a_destination_beyond_56_bits_is_refused() {
        let dma = LinDma::Copy { src: DeviceAddr(0), dst: DeviceAddr(1 << 56), len: 1 };
        assert_eq!(lin_dma(dma), None);
    }

    proptest! {
        #[test]
        fn every_field_is_where_the_specification_has_it(
            src in any::<u64>(), dst in 0..1_u64 << 56, len in any::<u32>()
        ) {
            let packet =
                lin_dma(LinDma::Copy { src: DeviceAddr(src), dst: DeviceAddr(dst), len }).unwrap();
            let ctl = word(&packet, 4);
            prop_assert_eq!(word(&packet, 0), len);
            prop_assert_eq!(bits(ctl, 28, 24), 9, "opcode");
            prop_assert_eq!(bits(ctl, 29, 29), 1, "engine barrier");
            prop_assert_eq!(bits(ctl, 30, 30), 1, "register barrier");
            prop_assert_eq!(bits(ctl, 31, 31), 1, "message barrier");
            prop_assert_eq!(bits(ctl, 3, 3), 1, "linear");
            prop_assert_eq!(bits(ctl, 2, 0), 0, "write completion, transpose, data type");
            prop_assert_eq!(bits(ctl, 4, 4), 0, "memset");
            prop_assert_eq!(bits(ctl, 23, 5), 0, "compression, reserved, context id");
            prop_assert_eq!(u64::from(word(&packet, 8)) | u64::from(word(&packet, 12)) << 32, src);
            prop_assert_eq!(u64::from(word(&packet, 16)) | u64::from(word(&packet, 20)) << 32, dst);
        }
    }
}
