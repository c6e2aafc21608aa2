//! The packets of a command buffer, decoded from their bytes.
//!
//! Written from the specification, independently of the encoders in `hl-thunk`, so that a mistake
//! in either shows as a disagreement. Pure and total: any bytes give a packet or a reason.

use crate::asic::Generation;

/// What a packet has the command processor do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields bear the names of the specification")]
pub enum Command {
    /// Write to a register of the queue's own engine.
    Wreg32 { offset: u16, value: u32 },
    /// Copy or fill memory.
    LinDma(LinDma),
    /// Write 32 bits to an address.
    MsgLong { addr: u64, value: Message },
    /// Write 32 bits to an offset from one of four bases.
    MsgShort { base: u8, offset: u16, value: Message },
    /// Wait until a counter of the queue reaches `target`, then take `decrement` off.
    Fence { id: u8, target: u8, decrement: u8 },
    /// Run the packets at an address.
    CpDma { addr: u64, size: u32, upper: bool },
    /// Load predicates or scalars, and perhaps execute the scalars as a packet.
    LoadAndExe(LoadAndExe),
    /// Execute the table entry that an index in memory selects (Gaudi2).
    CbList { index: u64, table: u64, long_entries: bool },
    /// Ask for, or give up, the arbiter.
    ArbPoint { priority: u32, release: bool },
    /// Wait some cycles, then add to a fence counter.
    Wait { cycles: u32, id: u8, increment: u8 },
    /// Loop in the buffer.
    Repeat { outer: bool, start: bool, count: u16 },
    /// Write by the driver: completion, interrupt.
    MsgProt { addr: u64, value: u32 },
    /// Write many registers.
    WregBulk { offset: u16, words: u16 },
    /// Nothing.
    Nop,
    /// Halt the queue.
    Stop,
    /// Writes of the embedded cores; of no consequence here.
    Other(u8),
}

/// What a message writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// This value.
    Value(u32),
    /// The device's time.
    Timestamp,
}

/// A linear DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinDma {
    /// Bytes.
    pub size: u32,
    /// Source address, or the pattern of a fill.
    pub src: u64,
    /// Destination address.
    pub dst: u64,
    /// Fill instead of copy.
    pub memset: bool,
    /// Byte swap: log2 of the unit (0 none, 1: 16 bit, 2: 32 bit, 3: 64 bit).
    pub swap: u8,
    /// Write to the engine's write-completion address when done.
    pub completion: bool,
}

/// See [`Command::LoadAndExe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields bear the names of the specification")]
pub struct LoadAndExe {
    pub addr: u64,
    /// Scalars rather than predicates.
    pub scalars: bool,
    /// Predicates come as a bit mask (Gaudi2).
    pub packed: bool,
    pub load: bool,
    pub execute: bool,
    /// Only the upper half of the scalars.
    pub upper: bool,
}

/// A packet: what to do, when, and how long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields bear the names of the specification")]
pub struct Packet {
    pub command: Command,
    /// Skipped when this predicate is 0; predicate 0 is always true.
    pub predicate: u8,
    /// Wait for the queue's earlier DMA.
    pub engine_barrier: bool,
    pub len: u32,
}

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The buffer ends inside it.
    Truncated,
    /// The command processor has no such opcode.
    UnknownOpcode(u8),
}

/// Bytes that are always enough for [`decode`], except for the registers of a bulk write.
pub const MAX_FIXED: usize = 24;

mod opcode {
    pub(super) const WREG_32: u8 = 1;
    pub(super) const WREG_BULK: u8 = 2;
    pub(super) const MSG_LONG: u8 = 3;
    pub(super) const MSG_SHORT: u8 = 4;
    pub(super) const CP_DMA: u8 = 5;
    pub(super) const REPEAT: u8 = 6;
    pub(super) const MSG_PROT: u8 = 7;
    pub(super) const FENCE: u8 = 8;
    pub(super) const LIN_DMA: u8 = 9;
    pub(super) const NOP: u8 = 0xa;
    pub(super) const STOP: u8 = 0xb;
    pub(super) const ARB_POINT: u8 = 0xc;
    pub(super) const WAIT: u8 = 0xd;
    pub(super) const CB_LIST: u8 = 0xe;
    pub(super) const LOAD_AND_EXE: u8 = 0xf;
    pub(super) const WRITE_ARC_STREAM: u8 = 0x10;
    pub(super) const WREG_64_SHORT: u8 = 0x12;
    pub(super) const WREG_64_LONG: u8 = 0x13;
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, Malformed> {
    let word = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
    word.map(u32::from_le_bytes).ok_or(Malformed::Truncated)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, Malformed> {
    let word = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    word.map(u64::from_le_bytes).ok_or(Malformed::Truncated)
}

fn bit(word: u32, n: u32) -> bool {
    word >> n & 1 != 0
}

fn message(value: u32, ctl: u32) -> Message {
    if ctl >> 20 & 3 == 1 { Message::Timestamp } else { Message::Value(value) }
}

/// Decodes the packet at the start of `bytes`.
pub fn decode(generation: Generation, bytes: &[u8]) -> Result<Packet, Malformed> {
    let first = u32_at(bytes, 0)?;
    let ctl = u32_at(bytes, 4)?;
    let gaudi1 = generation == Generation::Gaudi1;
    let opcode = (ctl >> 24 & 0x1f) as u8;
    let mut predicate = (ctl & 0x1f) as u8;
    let (command, len) = match opcode {
        opcode::WREG_32 => {
            (Command::Wreg32 { offset: (ctl >> 8 & 0xffff) as u16, value: first }, 8)
        }
        opcode::WREG_BULK => {
            let words = (first & 0xffff) as u16;
            let offset = (ctl >> 8 & 0xffff) as u16;
            (Command::WregBulk { offset, words }, 8 + 8 * u32::from(words))
        }
        opcode::MSG_LONG => {
            (Command::MsgLong { addr: u64_at(bytes, 8)?, value: message(first, ctl) }, 16)
        }
        opcode::MSG_SHORT => {
            predicate = 0;
            let base = (ctl >> 22 & 3) as u8;
            let offset = (ctl & 0xffff) as u16;
            (Command::MsgShort { base, offset, value: message(first, ctl) }, 8)
        }
        opcode::CP_DMA => {
            let upper = !gaudi1 && bit(ctl, 5);
            (Command::CpDma { addr: u64_at(bytes, 8)?, size: first, upper }, 16)
        }
        opcode::REPEAT => {
            let count = (first >> 16) as u16;
            (Command::Repeat { start: bit(first, 0), outer: bit(first, 1), count }, 8)
        }
        opcode::MSG_PROT => (Command::MsgProt { addr: u64_at(bytes, 8)?, value: first }, 16),
        opcode::FENCE => {
            let fence = Command::Fence {
                id: (first >> 30) as u8,
                target: (first >> 16 & 0xff) as u8,
                decrement: (first & 0xf) as u8,
            };
            (fence, 8)
        }
        opcode::LIN_DMA => {
            predicate = 0;
            let dst = u64_at(bytes, 16)?;
            let dma = LinDma {
                size: first,
                src: u64_at(bytes, 8)?,
                dst: if gaudi1 { dst & 0x00ff_ffff_ffff_ffff } else { dst },
                memset: bit(ctl, 4),
                swap: if gaudi1 { 0 } else { (ctl >> 1 & 3) as u8 },
                completion: bit(ctl, 0),
            };
            (Command::LinDma(dma), 24)
        }
        opcode::NOP => {
            predicate = 0;
            (Command::Nop, 8)
        }
        opcode::STOP => (Command::Stop, 8),
        opcode::ARB_POINT => {
            let priority = first & if gaudi1 { 0xff } else { 0xff_ffff };
            (Command::ArbPoint { priority, release: bit(first, 31) }, 8)
        }
        opcode::WAIT => {
            let wait = Command::Wait {
                cycles: first & 0xff_ffff,
                increment: (first >> 24 & 0xf) as u8,
                id: (first >> 28 & 3) as u8,
            };
            (wait, 8)
        }
        opcode::CB_LIST if !gaudi1 => {
            let index = u64_at(bytes, 8)?;
            let table = u64_at(bytes, 16)?;
            (Command::CbList { index, table, long_entries: bit(ctl, 5) }, 24)
        }
        opcode::LOAD_AND_EXE => {
            let load = LoadAndExe {
                addr: u64_at(bytes, 8)?,
                scalars: bit(first, 0),
                packed: !gaudi1 && bit(first, 1),
                load: bit(first, 8),
                execute: bit(first, 9),
                upper: bit(first, 10),
            };
            (Command::LoadAndExe(load), 16)
        }
        opcode::WRITE_ARC_STREAM | opcode::WREG_64_SHORT if !gaudi1 => (Command::Other(opcode), 8),
        opcode::WREG_64_LONG if !gaudi1 => (Command::Other(opcode), 16),
        other => return Err(Malformed::UnknownOpcode(other)),
    };
    if (bytes.len() as u64) < u64::from(len) {
        return Err(Malformed::Truncated);
    }
    Ok(Packet { command, predicate, engine_barrier: bit(ctl, 29), len })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Words in the order they lie in memory, as bytes.
    fn bytes(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    #[test]
    fn golden_gaudi1_copy() {
        let words = [0x40, 0xc900_0008, 0x0020_0123, 0x0001_0000, 0x2000_0000, 0xab00_0000];
        let packet = decode(Generation::Gaudi1, &bytes(&words)).unwrap();
        let dma = LinDma {
            size: 0x40,
            src: 0x0001_0000_0020_0123,
            // The top byte is a context id, not address.
            dst: 0x2000_0000,
            memset: false,
            swap: 0,
            completion: false,
        };
        assert_eq!(packet.command, Command::LinDma(dma));
        assert_eq!((packet.len, packet.predicate, packet.engine_barrier), (24, 0, false));
    }

    #[test]
    fn golden_gaudi2_copy_memset_and_swap() {
        let dma = |ctl| {
            let words = [0xffff_ffff, ctl, 0x0020_0000, 0xfff0_0001, 0, 0x1001_0018];
            match decode(Generation::Gaudi2, &bytes(&words)).unwrap() {
                Packet { command: Command::LinDma(dma), engine_barrier, len: 24, .. } => {
                    (dma, engine_barrier)
                }
                other => panic!("{other:?}"),
            }
        };
        let (copy, barrier) = dma(0x8900_0000);
        assert_eq!((copy.size, copy.memset, copy.swap, barrier), (u32::MAX, false, 0, false));
        assert_eq!((copy.src, copy.dst), (0xfff0_0001_0020_0000, 0x1001_0018_0000_0000));
        assert!(dma(0xa900_0000).1);
        assert!(dma(0x8900_0010).0.memset);
        assert!(dma(0x2900_0011).0.completion);
        assert_eq!(dma(0x8900_0002).0.swap, 1);
        assert_eq!(dma(0x8900_0004).0.swap, 2);
        assert_eq!(dma(0x8900_0006).0.swap, 3);
    }

    #[test]
    fn golden_messages_fences_and_nop() {
        let one = |words: &[u32]| decode(Generation::Gaudi2, &bytes(words)).unwrap();
        assert_eq!(one(&[0, 0x0a00_0000]).command, Command::Nop);
        let long = one(&[0x1234, 0x8300_0000, 0x1000, 0xfff0_0000]);
        let addr = 0xfff0_0000_0000_1000;
        assert_eq!(long.command, Command::MsgLong { addr, value: Message::Value(0x1234) });
        let stamp = one(&[0, 0x8310_0000, 0x1000, 0]);
        assert!(matches!(stamp.command, Command::MsgLong { value: Message::Timestamp, .. }));
        // SOB 5 of base 1: add 3.
        let short = one(&[0x8000_0003, 0x8440_0014]);
        let value = Message::Value(0x8000_0003);
        assert_eq!(short.command, Command::MsgShort { base: 1, offset: 0x14, value });
        let fence = one(&[0x8001_0001, 0x8800_0000]);
        assert_eq!(fence.command, Command::Fence { id: 2, target: 1, decrement: 1 });
        let lower = one(&[0x180, 0x0500_0000, 0, 0x1000]);
        let addr = 0x0000_1000_0000_0000;
        assert_eq!(lower.command, Command::CpDma { addr, size: 0x180, upper: false });
    }

    #[test]
    fn gaudi2_only_packets_are_unknown_to_gaudi1() {
        let list = bytes(&[0, 0x0e00_0000, 0, 0, 0, 0]);
        assert_eq!(decode(Generation::Gaudi1, &list), Err(Malformed::UnknownOpcode(0xe)));
        assert!(decode(Generation::Gaudi2, &list).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_within_their_length(
            data in prop::collection::vec(any::<u8>(), 0..40), gaudi1 in any::<bool>()
        ) {
            let generation = if gaudi1 { Generation::Gaudi1 } else { Generation::Gaudi2 };
            if let Ok(packet) = decode(generation, &data) {
                prop_assert!(packet.len as usize <= data.len());
                prop_assert!(packet.len >= 8 && packet.len % 8 == 0);
            }
        }
    }
}
