//! The command stream of a software Gaudi: in the command processor alone, and on a whole card.

use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_int};

use hl_thunk::sys;
use soft_gaudi::api::*;
use soft_gaudi::asic::{Generation, bus_id};
use soft_gaudi::packet::{self, LinDma};
use soft_gaudi::processor::{Bus, Fault, Pause, Processor, Program};

/// Bytes of memory behind [`Toy`].
const MEMORY: usize = 8 << 10;

/// A card with little memory, and with fences that open after a while.
struct Toy {
    memory: RefCell<Vec<u8>>,
    fences: Cell<u8>,
    accesses: Cell<u32>,
}

impl Toy {
    fn range(&self, addr: u64, len: u64) -> Result<std::ops::Range<usize>, Fault> {
        self.accesses.set(self.accesses.get() + 1);
        let end = addr.checked_add(len).filter(|end| *end <= MEMORY as u64);
        end.map(|end| addr as usize..end as usize).ok_or(Fault::Page { addr })
    }
}

impl Bus for Toy {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(addr, into.len() as u64)?;
        into.copy_from_slice(&self.memory.borrow()[range]);
        Ok(())
    }
    fn dma(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault> {
        assert!(done + len <= u64::from(dma.size), "more than the packet says");
        let to = self.range(dma.dst.wrapping_add(done), len)?;
        let mut memory = self.memory.borrow_mut();
        if dma.memset {
            memory[to].fill(dma.src as u8);
        } else {
            let from = self.range(dma.src.wrapping_add(done), len)?;
            memory.copy_within(from, to.start);
        }
        Ok(())
    }
    fn write(&self, addr: u64, value: u32) -> Result<(), Fault> {
        let range = self.range(addr, 4)?;
        self.memory.borrow_mut()[range].copy_from_slice(&value.to_le_bytes());
        Ok(())
    }
    fn write_own(&self, offset: u16, _value: u32) -> Result<(), Fault> {
        if offset < 0x1000 {
            Ok(())
        } else {
            Err(Fault::Razwi { addr: offset.into(), write: true })
        }
    }
    fn message_base(&self, base: u8) -> u64 {
        u64::from(base) * 0x400
    }
    fn pass_fence(&self, _lower: bool, _id: u8, _target: u8, _decrement: u8) -> bool {
        self.fences.set(self.fences.get().wrapping_add(1));
        self.fences.get().is_multiple_of(3)
    }
    fn raise_fence(&self, _lower: bool, _id: u8, _increment: u8) {}
    fn time(&self) -> u32 {
        7
    }
    fn stopped(&self) -> bool {
        // A buffer may execute itself for ever.
        self.accesses.get() > 10_000
    }
}

/// The first byte chooses the card and where the program is; the rest is memory, which begins with the program.
pub(crate) fn packets(bytes: &[u8]) {
    let Some((how, program)) = bytes.split_first() else { return };
    let generation = match how % 3 {
        0 => Generation::Gaudi1,
        1 => Generation::Gaudi2,
        _ => Generation::Gaudi3,
    };
    if let Ok(packet) = packet::decode(generation, program) {
        assert!(packet.len as usize <= program.len() && packet.len > 0);
    }
    let mut memory = program.to_vec();
    memory.resize(MEMORY, 0);
    let bus = Toy { memory: RefCell::new(memory), fences: Cell::new(0), accesses: Cell::new(0) };
    let mut processor = Processor::new(generation);
    let size = program.len().min(MEMORY) as u32;
    processor.start(match how & 0x80 {
        0 => Program::Copied(program[..size as usize].into()),
        _ => Program::At { addr: 0, size },
    });
    for _ in 0..200 {
        match processor.run(&bus, &mut 4096) {
            Ok(Pause::Done | Pause::Stopped) | Err(_) => break,
            Ok(Pause::Blocked | Pause::Spent | Pause::Arbitrate(_)) => {}
        }
    }
}

/// Host memory. The card may use the middle.
#[repr(C, align(4096))]
struct Host {
    before: [u8; 8 << 10],
    mapped: [u8; 32 << 10],
    behind: [u8; 8 << 10],
}

/// The content beforehand.
const POISON: u8 = 0x5a;

/// The only card of a separate machine.
fn open_card() -> c_int {
    let variables = [
        ("SOFT_GAUDI_CS_TIMEOUT", "30"),
        ("SOFT_GAUDI_RESET_KILL", "no"),
        ("SOFT_GAUDI_LENIENT", "edma-fetch,instant-close"),
        ("SOFT_GAUDI_HBM", "1536m"),
        ("SOFT_GAUDI_DEVICES", "1"),
    ];
    soft_gaudi::testing::set_up("gaudi2", &variables);
    let name = CString::new(bus_id(0)).expect("no zeros");
    // After a reset, opening fails for a moment.
    for _ in 0..5000 {
        let fd = hlthunk_open(sys::DEVICE_DONT_CARE, name.as_ptr());
        if fd >= 0 {
            return fd;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    panic!("the card does not open again");
}

/// Two bytes choose the queue, and the start in the rest. The rest is a command buffer, in which eight bytes with a
/// highest byte of 0xf0 to 0xf3 stand for an address that exists.
pub(crate) fn command_stream(bytes: &[u8]) {
    let [queue, start, ref program @ ..] = *bytes else { return };
    let mut program = program[..program.len().min(8 << 10) & !7].to_vec();
    if program.is_empty() {
        return;
    }
    let fd = open_card();
    let mut memory = Box::new(Host {
        before: [POISON; 8 << 10],
        mapped: [POISON; 32 << 10],
        behind: [POISON; 8 << 10],
    });
    let host = hlthunk_host_memory_map(fd, memory.mapped.as_mut_ptr().cast(), 0, 32 << 10);
    assert_ne!(host, 0, "host memory is mapped");
    let handle = hlthunk_device_memory_alloc(fd, 1, 0, true, false);
    let device = hlthunk_device_memory_map(fd, handle, 0);
    assert_ne!(device, 0, "device memory is mapped");
    let places = [host, device, 0x1000_ffff_fd00_0000, 0x1000_007f_fc10_0000];
    for word in program.as_chunks_mut::<8>().0 {
        if let 0xf0..=0xf3 = word[7] {
            let offset = u64::from_le_bytes(*word) & 0xffff;
            *word = (places[usize::from(word[7] & 3)] + offset).to_le_bytes();
        }
    }
    memory.mapped[..program.len()].copy_from_slice(&program);
    let start = u64::from(start) * 8 % program.len() as u64;
    let mut chunk = sys::CsChunk {
        cb_handle: host + start,
        queue_index: [0, 1, 4, 8, 84][usize::from(queue) % 5],
        cb_size: program.len() as u32 - start as u32,
        cs_chunk_flags: sys::CS_CHUNK_USER_ALLOC_CB,
        ..Default::default()
    };
    let input = sys::CsIn {
        chunks_restore: core::ptr::null_mut(),
        chunks_execute: (&raw mut chunk).cast(),
        num_chunks_restore: 0,
        num_chunks_execute: 1,
        flags: 0,
    };
    let mut out = sys::CsOut::default();
    if hlthunk_command_submission(fd, (&raw const input).cast(), (&raw mut out).cast()) == 0 {
        let mut status = 99;
        let rc = hlthunk_wait_for_cs(fd, out.seq, 20_000_000, &mut status);
        assert_ne!((rc, status), (0, 1), "a submission outlives its timeout");
    }
    hlthunk_close(fd);
    let around = memory.before.iter().chain(&memory.behind);
    assert!(around.copied().all(|byte| byte == POISON), "memory was written that is not mapped");
}
