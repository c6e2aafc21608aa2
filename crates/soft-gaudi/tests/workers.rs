//! Work that the program leaves to the card: nobody waits for it and nobody looks.

mod driver;

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

/// In a stream, after pauses in which a worker waits for more, and after those that send it to sleep: each
/// time several queues at once. Work that was overlooked once would be so for ever, and the test hang.
#[test]
fn work_is_done_for_those_who_never_look() {
    machine("gaudi2");
    let fd = card();
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

/// As many queues as there can be workers, and each would keep one for ever.
#[test]
fn programs_without_an_end_do_not_keep_others_from_their_turn() {
    machine("gaudi2");
    let fd = card();
    let (_, device) = alloc(fd, 1 << 20);
    let (endless, last) = (&QUEUES[..8], QUEUES[8]);
    // A copy, then a jump to itself: its size, CP_DMA on the upper processor, its address.
    const JUMP: usize = 6;
    let mut programs = vec![vec![0u32; JUMP + 4]; endless.len()];
    let mut sequences = Vec::new();
    for (program, queue) in programs.iter_mut().zip(endless) {
        let size = size_of_val(&program[..]);
        // SAFETY: the words of the vector as bytes.
        let bytes = unsafe { core::slice::from_raw_parts_mut(program.as_mut_ptr().cast(), size) };
        let va = map_host(fd, bytes);
        bytes[..JUMP * 4].copy_from_slice(&gaudi2_copy(device, device + (1 << 19), SIZE as u32));
        program[JUMP..JUMP + 2].copy_from_slice(&[size as u32, 0x0500_0020]);
        program[JUMP + 2..].copy_from_slice(&[va as u32, (va >> 32) as u32]);
        sequences.push(submit(fd, &mut [user_chunk(*queue, va, size)]).unwrap());
    }
    let (mut source, mut target) = (vec![7u8; SIZE], vec![0u8; SIZE]);
    let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
    let buffer = UserBuffer::new(fd, &gaudi2_copy(src, dst, SIZE as u32));
    buffer.submit(last).unwrap();
    arrives(&target, 7);
    for (program, sequence) in programs.iter_mut().zip(sequences) {
        let mut status = 99;
        assert_eq!(hlthunk_wait_for_cs(fd, sequence, 0, &mut status), 0);
        assert_eq!(status, sys::WAIT_BUSY, "it has no end");
        // A jump to nothing.
        // SAFETY: a word of the vector that the card only reads.
        unsafe { AtomicU32::from_ptr(&mut program[JUMP]) }.store(0, Ordering::Relaxed);
        assert_eq!(wait(fd, sequence), (0, sys::WAIT_COMPLETED));
    }
    assert_eq!(hlthunk_close(fd), 0);
}
