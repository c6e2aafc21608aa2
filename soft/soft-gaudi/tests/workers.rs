//! Work that no thread of the program waits or polls for.

mod driver;

use core::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

/// Too large to be done by the submitting call.
const SIZE: usize = 128 << 10;

/// One queue of each engine that copies.
const QUEUES: [u32; 9] = [0, 8, 12, 48, 52, 84, 88, 120, 124];

/// Spins until the last byte of a copy has this value, without asking the library.
fn arrives(target: &[u8], value: u8) {
    // SAFETY: a byte of a live slice, which the card writes meanwhile.
    while unsafe { target.as_ptr().add(SIZE - 1).read_volatile() } != value {
        std::thread::yield_now();
    }
}

/// In a stream, after short pauses, and after pauses in which workers go to sleep: each
/// time several queues at once. If a worker missed work once, the test would hang.
#[test]
fn work_is_done_when_the_program_neither_waits_nor_polls() {
    let fd = card_of("gaudi2");
    let mut source = vec![0u8; SIZE];
    let src = map_host(fd, &mut source);
    let mut targets = vec![vec![0u8; SIZE]; QUEUES.len()];
    let buffers: Vec<UserBuffer> = targets
        .iter_mut()
        .map(|target| UserBuffer::new(fd, &gaudi2_copy(src, map_host(fd, target), SIZE as u32)))
        .collect();
    for round in 1..=400u32 {
        let value = round as u8;
        // SAFETY: inside the vector; no copy is under way.
        unsafe { source.as_mut_ptr().add(SIZE - 1).write_volatile(value) };
        for (buffer, queue) in buffers.iter().zip(QUEUES) {
            buffer.submit(queue).unwrap();
        }
        targets.iter().for_each(|target| arrives(target, value));
        std::thread::sleep(match round % 8 {
            0 => Duration::from_millis(5),
            1 | 2 => Duration::from_micros(200),
            _ => Duration::ZERO,
        });
    }
    assert_eq!(hlthunk_close(fd), 0);
}

/// Programs that copy and then jump to themselves, on one queue each.
struct Endless {
    fd: c_int,
    programs: Vec<Vec<u32>>,
    sequences: Vec<u64>,
}

impl Endless {
    /// Where the jump is: a size, CP_DMA on the upper processor, an address.
    const JUMP: usize = 6;

    fn start(fd: c_int, queues: &[u32]) -> Self {
        let (_, device) = alloc(fd, 1 << 20);
        let mut programs = vec![vec![0u32; Self::JUMP + 4]; queues.len()];
        let mut sequences = Vec::new();
        for (program, queue) in programs.iter_mut().zip(queues) {
            let size = size_of_val(&program[..]);
            // SAFETY: the words of the vector as bytes.
            let bytes =
                unsafe { core::slice::from_raw_parts_mut(program.as_mut_ptr().cast(), size) };
            let va = map_host(fd, bytes);
            let copy = gaudi2_copy(device, device + (1 << 19), SIZE as u32);
            bytes[..Self::JUMP * 4].copy_from_slice(&copy);
            program[Self::JUMP..Self::JUMP + 2].copy_from_slice(&[size as u32, 0x0500_0020]);
            program[Self::JUMP + 2..].copy_from_slice(&[va as u32, (va >> 32) as u32]);
            sequences.push(submit(fd, &mut [user_chunk(*queue, va, size)]).unwrap());
        }
        Self { fd, programs, sequences }
    }

    /// Has them jump to nothing, and waits.
    fn end(mut self) {
        for (program, sequence) in self.programs.iter_mut().zip(self.sequences) {
            let mut status = 99;
            assert_eq!(hlthunk_wait_for_cs(self.fd, sequence, 0, &mut status), 0);
            assert_eq!(status, sys::WAIT_BUSY, "it has no end");
            // SAFETY: a word of the vector that the card only reads.
            unsafe { AtomicU32::from_ptr(&mut program[Self::JUMP]) }.store(0, Ordering::Relaxed);
            assert_eq!(wait(self.fd, sequence), (0, sys::WAIT_COMPLETED));
        }
    }
}

/// As many queues as there can be workers, and each would keep one busy without end.
#[test]
fn endless_programs_do_not_starve_other_queues() {
    let fd = card_of("gaudi2");
    let endless = Endless::start(fd, &QUEUES[..8]);
    let (mut source, mut target) = (vec![7u8; SIZE], vec![0u8; SIZE]);
    let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
    let buffer = UserBuffer::new(fd, &gaudi2_copy(src, dst, SIZE as u32));
    buffer.submit(QUEUES[8]).unwrap();
    arrives(&target, 7);
    endless.end();
    assert_eq!(hlthunk_close(fd), 0);
}

/// A closed card's descriptors are closed at once, however busy the workers are.
#[test]
fn closing_a_card_frees_its_descriptors_while_workers_are_busy() {
    machine("gaudi2");
    let (fd, index) = (card(), fresh_index());
    let endless = Endless::start(fd, &QUEUES[..8]);
    let (mut source, mut target) = (vec![7u8; SIZE], vec![0u8; SIZE]);
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = descriptors();
    let mut most = 0;
    for _ in 0..30 {
        let other = open(index);
        assert!(other >= 0, "open: {other}");
        let (src, dst) = (map_host(other, &mut source), map_host(other, &mut target));
        let buffer = UserBuffer::new(other, &gaudi2_copy(src, dst, SIZE as u32));
        // Done by the thread that waits; the workers have not reached it.
        assert_eq!(wait(other, buffer.submit(QUEUES[0]).unwrap()), (0, sys::WAIT_COMPLETED));
        assert_eq!(hlthunk_close(other), 0);
        most = most.max(descriptors().saturating_sub(before));
    }
    // A worker that has just taken one of them drops it a moment later; other tests of this program have
    // their cards.
    assert!(most < 15, "{most} descriptors of closed cards");
    endless.end();
    assert_eq!(hlthunk_close(fd), 0);
}
