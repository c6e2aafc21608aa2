//! Feeds arbitrary command buffers to the command processor, through the driver's C functions:
//! `cargo run --release -p soft-gaudi --example fuzz_packets -- 600` for ten minutes.
//!
//! It must not crash, hang beyond the submission timeout, or touch memory that was not mapped for
//! the card: guard pages surround everything, and memory beside the mappings is checked. Buffers
//! are random, but mostly made of valid opcodes and of addresses that exist, so that they get far.
//! Prints the seed of each round; a second argument repeats one.

#[path = "../tests/driver/mod.rs"]
mod driver;

use std::time::{Duration, Instant};

use driver::*;
use soft_gaudi::api::*;

/// A small generator of its own, so that a seed means the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Memory with pages around it that nobody may touch.
fn guarded_memory(len: usize) -> &'static mut [u8] {
    // SAFETY: a fresh mapping, never unmapped, aliased by nobody but the card.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let null = core::ptr::null_mut();
        let all = libc::mmap(null, len + 8192, libc::PROT_NONE, flags, -1, 0);
        assert_ne!(all, libc::MAP_FAILED);
        let inside = all.cast::<u8>().add(4096);
        assert_eq!(libc::mprotect(inside.cast(), len, libc::PROT_READ | libc::PROT_WRITE), 0);
        core::slice::from_raw_parts_mut(inside, len)
    }
}

fn address(random: &mut Random, places: &[u64]) -> u64 {
    let place = places[random.below(places.len() as u64) as usize];
    match random.below(8) {
        0 => random.next(),
        1 => place.wrapping_add(random.below(1 << 20)).wrapping_sub(1 << 19),
        _ => place + random.below(8192),
    }
}

fn packet(random: &mut Random, places: &[u64]) -> Vec<u8> {
    const OPCODES: [u32; 16] = [1, 3, 3, 4, 4, 5, 8, 9, 9, 9, 9, 0xa, 0xc, 0xd, 0xe, 0xf];
    let opcode = match random.below(16) {
        0 => random.below(32) as u32,
        n => OPCODES[n as usize],
    };
    let first = match opcode {
        9 => random.below(16384) as u32,
        5 => (random.below(64) * 8) as u32,
        _ => random.next() as u32,
    };
    let low = match random.below(3) {
        0 => random.next() as u32 & 0x00ff_ffff,
        1 => random.below(64) as u32 * 4,
        _ => 0,
    };
    let ctl = opcode << 24 | low | (random.below(8) as u32) << 29;
    let len = match opcode {
        9 | 0xe => 24,
        3 | 5 | 7 | 0xf | 0x13 => 16,
        _ => 8,
    };
    let mut bytes = [first.to_le_bytes(), ctl.to_le_bytes()].concat();
    while bytes.len() < len {
        bytes.extend_from_slice(&address(random, places).to_le_bytes());
    }
    bytes
}

fn round(fd: i32, seed: u64) {
    let mut random = Random(seed | 1);
    let memory = guarded_memory(64 << 10);
    // The card may use the middle; the rest is in the same pages' neighbours and must stay.
    memory.fill(0x5a);
    let middle = &mut memory[16 << 10..48 << 10];
    let host = hlthunk_host_memory_map(fd, middle.as_mut_ptr().cast(), 0, 32 << 10);
    assert_ne!(host, 0);
    let (_, device) = alloc(fd, 1);
    let cfg = 0x1000_007f_f800_0000u64;
    let places = [
        host,
        host + 24576,
        device,
        0x1000_ffff_fd00_0000,
        cfg + 0x410_0000,
        cfg + 0x410_8000,
        cfg + 0x411_e050,
        cfg + 0x4c8_a290,
    ];
    let mut program = Vec::new();
    while program.len() < 8192 {
        program.extend(packet(&mut random, &places));
    }
    program.truncate(8192);
    memory[16 << 10..24 << 10].copy_from_slice(&program);
    let mut seqs = Vec::new();
    for _ in 0..4 {
        let queue = [0, 1, 4, 8, 84][random.below(5) as usize];
        let start = random.below(512) * 8;
        let size = 8 + random.below(4096 / 8) * 8;
        match submit(fd, &mut [user_chunk(queue, host + start, size as usize)]) {
            Ok(seq) => seqs.push(seq),
            Err(error) => assert_eq!(error, -libc::EBUSY),
        }
    }
    let mut status = 0;
    for seq in seqs {
        let rc = hlthunk_wait_for_cs(fd, seq, 5_000_000, &mut status);
        assert!([0, -libc::EIO, -libc::ETIMEDOUT, -libc::EBUSY].contains(&rc), "{rc}");
        assert_ne!((rc, status), (0, 1), "a submission outlived its timeout");
    }
    assert!(memory[..16 << 10].iter().all(|b| *b == 0x5a), "written before the mapping");
    assert!(memory[48 << 10..].iter().all(|b| *b == 0x5a), "written after the mapping");
    // SAFETY: the whole of what `guarded_memory` mapped; the card is closed by then.
    let forget = |memory: &mut [u8]| unsafe {
        libc::munmap(memory.as_mut_ptr().sub(4096).cast(), memory.len() + 8192)
    };
    hlthunk_close(fd);
    forget(memory);
}

fn main() {
    let variables = [
        ("SOFT_GAUDI_CS_TIMEOUT", "50"),
        ("SOFT_GAUDI_LENIENT", "edma-fetch"),
        ("SOFT_GAUDI_HBM", "1536m"),
    ];
    machine_with("gaudi2", &variables);
    let argument = |n: usize| std::env::args().nth(n).and_then(|text| text.parse::<u64>().ok());
    let limit = Duration::from_secs(argument(1).unwrap_or(10));
    let start = Instant::now();
    let mut rounds = 0u64;
    loop {
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let seed = argument(2).unwrap_or(clock.map_or(1, |d| d.as_nanos() as u64) ^ rounds << 32);
        eprintln!("round {rounds}, seed {seed}");
        let fd = open(0);
        assert!(fd >= 0, "open: {fd}");
        round(fd, seed);
        rounds += 1;
        if start.elapsed() >= limit || argument(2).is_some() {
            break;
        }
    }
    println!("{rounds} rounds without a fault of ours");
}
