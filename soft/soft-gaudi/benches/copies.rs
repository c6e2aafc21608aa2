//! How fast the software card is, each figure beside the floor it is measured against, in the same
//! run: a system call, a futex round trip between threads, memcpy over the same memory.
//!
//! With `SOFT_GAUDI_MODEL` bandwidths stand beside the modelled link's.
//!
//! `cargo bench -p soft-gaudi` prints a table; `-- --json FILE` writes it as well.

#[path = "../tests/driver/mod.rs"]
mod driver;

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use driver::*;
use soft_gaudi::api::*;
use soft_gaudi::config::{self, Model};

struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
    floor: f64,
    target: Option<f64>,
}

impl Figure {
    /// How the value stands to the floor; larger is better for rates, smaller for times.
    fn ratio(&self) -> f64 {
        self.value / self.floor
    }

    fn met(&self) -> Option<bool> {
        let rate = self.unit == "GB/s";
        self.target.map(|t| if rate { self.ratio() >= t } else { self.ratio() <= t })
    }
}

/// Median of several runs of `work`, in seconds.
fn median(runs: usize, mut work: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}

fn system_call() -> f64 {
    let call = |_| {
        // SAFETY: getppid has no preconditions.
        black_box(unsafe { libc::getppid() });
    };
    median(9, || (0..10_000).for_each(call)) / 10_000.0
}

fn futex(word: &AtomicU32, op: i32, value: u32) {
    // SAFETY: the word outlives the call; no timeout.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, 0) };
}

/// There and back between two threads that sleep in futexes.
fn futex_round_trip() -> f64 {
    const ROUNDS: u32 = 2000;
    let turn = AtomicU32::new(0);
    let play = |me: u32, rounds: u32| {
        for _ in 0..rounds {
            while turn.load(Ordering::Acquire) != me {
                futex(&turn, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 1 - me);
            }
            turn.store(1 - me, Ordering::Release);
            futex(&turn, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| play(1, 5 * ROUNDS));
        median(5, || play(0, ROUNDS)) / f64::from(ROUNDS)
    })
}

/// Memory that starts at a page, touched.
fn pages(len: usize) -> &'static mut [u8] {
    // SAFETY: a fresh mapping, never unmapped, aliased by nobody.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let memory = libc::mmap(core::ptr::null_mut(), len, protection, flags, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        let memory = core::slice::from_raw_parts_mut(memory.cast::<u8>(), len);
        memory.fill(1);
        memory
    }
}

struct Bench {
    fd: i32,
    figures: Vec<Figure>,
    model: Option<Model>,
}

impl Bench {
    fn latency(&mut self) {
        let (call, trip) = (system_call(), futex_round_trip());
        let (_, device) = alloc(self.fd, 1);
        let memory = pages(4096);
        let host = map_host(self.fd, memory);
        let buffer = UserBuffer::new(self.fd, &gaudi2_copy(host, device, 8));
        let time = median(9, || {
            for _ in 0..1000 {
                let seq = buffer.submit(0).unwrap();
                assert_eq!(wait(self.fd, seq), (0, 0));
            }
        }) / 1000.0;
        let us = |name: &str, floor: f64, target| Figure {
            name: name.to_owned(),
            value: time * 1e6,
            unit: "us",
            floor: floor * 1e6,
            target,
        };
        self.figures.push(us("8 B submit+wait / system call", call, None));
        self.figures.push(us("8 B submit+wait / futex round trip", trip, Some(1.0)));
    }

    /// Copies host → device over a working set, and memcpy over one of the same size.
    fn bandwidth(&mut self, size: usize, set: usize, label: &str) {
        let pieces = set / size;
        let (handle, device) = alloc(self.fd, set as u64);
        let source = pages(set);
        let target = pages(set);
        let host = map_host(self.fd, source);
        let packets: Vec<u8> = (0..pieces)
            .flat_map(|n| {
                let at = (n * size) as u64;
                gaudi2_copy(host + at, device + at, size as u32)
            })
            .collect();
        let buffer = UserBuffer::new(self.fd, &packets);
        let fd = self.fd;
        let piece =
            |n: usize| submit(fd, &mut [user_chunk(0, buffer.va + (n * 24) as u64, 24)]).unwrap();
        let slow = self.model.map_or(1, |model| model.slow as usize);
        let rounds = ((512 << 20) / set / slow).clamp(1, 64);
        let memcpy = |target: &mut [u8], source: &[u8]| {
            for _ in 0..rounds {
                for (to, from) in target.chunks_exact_mut(size).zip(source.chunks_exact(size)) {
                    to.copy_from_slice(from);
                    black_box(&to);
                }
            }
        };
        let one_at_a_time = || {
            for n in 0..pieces * rounds {
                assert_eq!(wait(fd, piece(n % pieces)), (0, 0));
            }
        };
        let pipelined = || {
            let mut seqs = std::collections::VecDeque::new();
            for n in 0..pieces * rounds {
                if seqs.len() == 16 {
                    assert_eq!(wait(fd, seqs.pop_front().unwrap()), (0, 0));
                }
                seqs.push_back(piece(n % pieces));
            }
            for seq in seqs {
                assert_eq!(wait(fd, seq), (0, 0));
            }
        };
        // Touch everything once, then take turns, so that drift hits all alike.
        memcpy(target, source);
        pipelined();
        let (mut floor, mut single, mut pipe) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..5 {
            floor.push(median(1, || memcpy(target, source)));
            single.push(median(1, one_at_a_time));
            pipe.push(median(1, pipelined));
        }
        let bytes = (pieces * size * rounds) as f64;
        let rate = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            bytes / times[times.len() / 2] / 1e9
        };
        // With a model the link is what copies are measured against.
        let link = |model: Model| model.to_device as f64 / model.slow as f64 / 1e3;
        let floor = self.model.map_or(rate(&mut floor), link);
        let goal = (size >= 1 << 20).then_some(0.8);
        for (how, value, target) in
            [("one at a time", rate(&mut single), None), ("16 outstanding", rate(&mut pipe), goal)]
        {
            let name = format!("{} KiB, {how}, {label}", size >> 10);
            self.figures.push(Figure { name, value, unit: "GB/s", floor, target });
        }
        assert_eq!(hlthunk_memory_unmap(self.fd, host), 0);
        assert_eq!(hlthunk_memory_unmap(self.fd, device), 0);
        assert_eq!(hlthunk_device_memory_free(self.fd, handle), 0);
    }
}

fn json(figures: &[Figure]) -> String {
    let line = |f: &Figure| {
        let option = |text: Option<String>| text.unwrap_or_else(|| "null".to_owned());
        format!(
            r#"{{"name": "{}", "value": {:.3}, "unit": "{}", "floor": {:.3}, "ratio": {:.3}, "target": {}, "met": {}}}"#,
            f.name,
            f.value,
            f.unit,
            f.floor,
            f.ratio(),
            option(f.target.map(|t| t.to_string())),
            option(f.met().map(|m| m.to_string())),
        )
    };
    format!("[{}]\n", figures.iter().map(line).collect::<Vec<_>>().join(",\n "))
}

fn main() {
    // The card's own speed; with SOFT_GAUDI_LENIENT= the kernel's, which copies to and from pinned pages.
    let lenient = std::env::var("SOFT_GAUDI_LENIENT");
    let lenient = lenient.as_deref().unwrap_or("ordered,unpinned");
    machine_with("gaudi2", &[("SOFT_GAUDI_LENIENT", lenient)]);
    let fd = open(0);
    assert!(fd >= 0, "cannot open the card: {fd}");
    let mut bench =
        Bench { fd, figures: Vec::new(), model: config::config().and_then(|config| config.model) };
    bench.latency();
    bench.bandwidth(64 << 10, 8 << 20, "8 MiB set");
    bench.bandwidth(1 << 20, 8 << 20, "8 MiB set");
    bench.bandwidth(64 << 10, 256 << 20, "256 MiB set");
    bench.bandwidth(1 << 20, 256 << 20, "256 MiB set");
    bench.bandwidth(64 << 20, 256 << 20, "256 MiB set");
    hlthunk_close(fd);
    println!("{:<44} {:>9} {:>5} {:>9} {:>6} {:>6}", "", "value", "", "floor", "ratio", "target");
    for f in &bench.figures {
        let verdict = match (f.target, f.met()) {
            (Some(target), Some(true)) => format!("{target:>6} met"),
            (Some(target), _) => format!("{target:>6} MISSED"),
            (None, _) => String::new(),
        };
        let (value, floor, ratio) = (f.value, f.floor, f.ratio());
        println!("{:<44} {value:>9.2} {:>5} {floor:>9.2} {ratio:>6.2} {verdict}", f.name, f.unit);
    }
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|a| a == "--json") {
        let path = arguments.get(at + 1).expect("--json wants a file");
        std::fs::write(path, json(&bench.figures)).expect("cannot write the file");
    }
}
