//! The driver contract of a Gaudi1: physical DRAM addresses, parsed kernel command buffers.

mod driver;

use driver::*;
use hl_thunk::sys::{self, CsChunk};
use soft_gaudi::api::*;

/// `struct hlthunk_wait_multi_cs_in`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct WaitMultiCsIn {
    seq: *const u64,
    timeout_us: u64,
    seq_len: u32,
}

/// `struct hlthunk_wait_multi_cs_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct WaitMultiCsOut {
    status: u32,
    seq_set: u32,
    completed: u8,
}

const DRAM: u64 = 0x2000_0000;

/// A kernel command buffer with these packets, mapped, filled and unmapped again.
fn buffer(fd: i32, packets: &[u8]) -> u64 {
    let mut handle = 0;
    assert_eq!(hlthunk_request_command_buffer(fd, packets.len() as u32, &mut handle), 0);
    let len = packets.len();
    let mapped = map_handle(fd, handle, len);
    // SAFETY: writes within the mapping, which nothing else uses.
    unsafe {
        core::ptr::copy_nonoverlapping(packets.as_ptr(), mapped.cast(), len);
        libc::munmap(mapped, len);
    }
    handle
}

fn chunk(queue: u32, handle: u64, size: usize) -> CsChunk {
    let (cb_handle, queue_index, cb_size) = (handle, queue, size as u32);
    CsChunk { cb_handle, queue_index, cb_size, ..CsChunk::default() }
}

fn submit_packets(fd: i32, queue: u32, packets: &[u8]) -> Result<u64, i32> {
    let handle = buffer(fd, packets);
    let seq = submit(fd, &mut [chunk(queue, handle, packets.len())]);
    // The driver has its own copy.
    assert_eq!(hlthunk_destroy_command_buffer(fd, handle), 0);
    seq
}

#[test]
fn identity_and_memory_are_those_of_a_gaudi1() {
    let fd = card_of("gaudi1");
    let info = hw_info(fd);
    assert_eq!(info.device_id, sys::PCI_ID_GAUDI);
    assert_eq!((info.dram_base_address, info.dram_size), (DRAM, 0x7_e000_0000));
    // Only accounting.
    assert_eq!(hlthunk_device_memory_alloc(fd, 4096, 0, true, true), 0);
    let mut usage = sys::DramUsageInfo::default();
    assert_eq!(hlthunk_get_dram_usage(fd, (&raw mut usage).cast()), 0);
    assert_eq!(usage.ctx_dram_mem, 4096);
    assert_eq!(hlthunk_device_memory_map(fd, 0, 0), 0);
    assert_eq!(errno(), libc::EINVAL);
    let mut handle = 0;
    assert_eq!(hlthunk_request_mapped_command_buffer(fd, 64, &mut handle), -libc::ENOMEM);
    let mut memory = vec![0u8; 3 * 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let va = map_host(fd, &mut memory[skip + 9..skip + 20]);
    assert_eq!(va, 0x1_0000_0020_0009);
}

#[test]
fn copies_go_through_parsed_buffers() {
    let fd = card_of("gaudi1");
    for size in [1usize, 8, 4097, 300_001] {
        let mut source = pattern(size, size as u64);
        let mut target = vec![0x5au8; size + 64];
        let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
        let place = DRAM + 0x1003;
        let down = submit_packets(fd, 0, &gaudi1_copy(src, place, size as u32)).unwrap();
        assert_eq!(wait(fd, down), (0, sys::WAIT_COMPLETED));
        let up = submit_packets(fd, 5, &gaudi1_copy(place, dst + 32, size as u32)).unwrap();
        assert_eq!(wait(fd, up), (0, sys::WAIT_COMPLETED));
        assert_eq!(&target[32..32 + size], &source[..]);
        assert!(target[..32].iter().chain(&target[32 + size..]).all(|b| *b == 0x5a));
        hlthunk_memory_unmap(fd, src);
        hlthunk_memory_unmap(fd, dst);
    }
}

#[test]
fn forbidden_and_broken_packets_are_refused_at_submission() {
    let fd = card_of("gaudi1");
    let words = |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|w| w.to_le_bytes()).collect() };
    let cases = [
        (words(&[0, 0x0b00_0000]), -libc::EPERM),
        (words(&[0, 0x0700_0000, 0, 0]), -libc::EPERM),
        (words(&[0, 0x0500_0000, 0, 0]), -libc::EPERM),
        (words(&[0, 0x0d00_0000]), -libc::EINVAL),
        (words(&[0, 0x1f00_0000]), -libc::EINVAL),
        (words(&[16, 0xc900_0008, 0, 0]), -libc::EINVAL),
    ];
    for (packets, expected) in cases {
        assert_eq!(submit_packets(fd, 0, &packets), Err(expected), "{packets:x?}");
    }
    let nop = words(&[0, 0x0a00_0000]);
    assert!(submit_packets(fd, 0, &nop).is_ok());
    assert_eq!(submit_packets(fd, 8, &nop), Err(-libc::EINVAL));
    // Only internal queues: nothing would complete it.
    let mut memory = nop.clone();
    let va = map_host(fd, &mut memory);
    assert_eq!(submit(fd, &mut [chunk(9, va, 8)]), Err(-libc::EINVAL));
    let handle = buffer(fd, &nop);
    assert_eq!(submit(fd, &mut [chunk(0, handle, 4097)]), Err(-libc::EINVAL));
    assert_eq!(submit(fd, &mut [chunk(0, handle + 4096, 8)]), Err(-libc::EINVAL));
    let seq = submit(fd, &mut [chunk(9, va, 8), chunk(0, handle, 8)]).unwrap();
    assert_eq!(wait(fd, seq), (0, sys::WAIT_COMPLETED));
}

#[test]
fn physical_ranges_are_exported_without_a_mapping() {
    let fd = card_of("gaudi1");
    for (addr, size) in [(0, 4096), (DRAM - 4096, 8192), (DRAM, 100), (DRAM + 0x7_e000_0000, 4096)]
    {
        assert_eq!(hlthunk_device_memory_export_dmabuf_fd(fd, addr, size, 0), -libc::EINVAL);
    }
    let dmabuf = hlthunk_device_memory_export_dmabuf_fd(fd, DRAM + 8192, 4096, 0);
    assert!(dmabuf >= 0);
    // SAFETY: a descriptor of this test.
    unsafe { libc::close(dmabuf) };
}

fn nop() -> Vec<u8> {
    vec![0, 0, 0, 0, 0, 0, 0, 0x0a]
}

fn staged(fd: i32, sequence: u64, queue: u32, handle: u64, flags: u32) -> Result<u64, i32> {
    let mut chunks = [chunk(queue, handle, 8)];
    submit_by(&mut chunks, flags, |input, out| {
        hlthunk_staged_command_submission(fd, sequence, input.cast(), out.cast())
    })
}

#[test]
fn a_staged_submission_ends_with_its_last_part() {
    let fd = card_of("gaudi1");
    let handle = buffer(fd, &nop());
    let first = staged(fd, 0, 0, handle, 0x40 | 0x80).unwrap();
    assert_eq!(poll(fd, first, 1000), sys::WAIT_BUSY);
    assert_eq!(staged(fd, first, 1, handle, 0x40), Ok(first));
    assert_eq!(staged(fd, first + 1000, 1, handle, 0x40), Err(-libc::EINVAL));
    assert_eq!(poll(fd, first, 0), sys::WAIT_BUSY);
    assert_eq!(staged(fd, first, 4, handle, 0x40 | 0x100), Ok(first));
    assert_eq!(wait(fd, first), (0, sys::WAIT_COMPLETED));
    // Closed: no further parts.
    assert_eq!(staged(fd, first, 4, handle, 0x40), Err(-libc::EINVAL));
}

#[test]
fn a_multi_wait_returns_which_submissions_have_ended() {
    let fd = card_of("gaudi1");
    let handle = buffer(fd, &nop());
    let open_end = staged(fd, 0, 0, handle, 0x40 | 0x80).unwrap();
    let done = submit_packets(fd, 4, &nop()).unwrap();
    let seqs = [open_end, done];
    let wait_multi = |seq_len, timeout_us| {
        let input = WaitMultiCsIn { seq: seqs.as_ptr(), timeout_us, seq_len };
        let mut out = WaitMultiCsOut::default();
        match hlthunk_wait_for_multi_cs(fd, (&raw const input).cast(), (&raw mut out).cast()) {
            0 => Ok((out.status, out.seq_set, out.completed)),
            error => Err(error),
        }
    };
    assert_eq!(wait_multi(2, 1_000_000), Ok((sys::WAIT_COMPLETED, 0b10, 1)));
    assert_eq!(wait_multi(1, 1000), Ok((sys::WAIT_BUSY, 0, 0)));
    assert_eq!(wait_multi(33, 1000), Err(-libc::EINVAL));
    staged(fd, open_end, 0, handle, 0x40 | 0x100).unwrap();
    assert_eq!(wait(fd, open_end), (0, sys::WAIT_COMPLETED));
}

#[test]
fn a_copy_may_be_larger_than_a_queue_runs_at_once_and_the_buffer_is_the_drivers() {
    let fd = card_of("gaudi1");
    let size = 20 << 20;
    let mut source = pattern(size, 77);
    let mut target = vec![0u8; size];
    let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
    let mut packets = gaudi1_copy(src, DRAM, size as u32);
    packets.extend(after_barrier(gaudi1_copy(DRAM, dst, size as u32)));
    let seq = submit_packets(fd, 0, &packets).unwrap();
    assert_eq!(wait(fd, seq), (0, sys::WAIT_COMPLETED));
    assert_eq!(source, target);
}
