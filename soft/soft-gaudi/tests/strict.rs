//! Settings that make the software card as strict as a real one, each in a process of its own.

mod driver;

use core::ffi::c_void;
use std::time::{Duration, Instant};

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;
use soft_gaudi::testing;

/// Runs the rest of a test in a process of its own, on a machine of its own, with these settings.
macro_rules! in_own_process {
    ($($setting:expr),*) => {
        if testing::is_child() {
            machine("gaudi2");
        } else {
            fn here() {}
            return testing::run_alone(std::any::type_name_of_val(&here), &[$($setting),*]);
        }
    };
}

#[test]
fn with_a_latency_even_small_work_is_done_after_the_submission_has_returned() {
    // The longest possible: the test must poll before it is over, also on a busy machine.
    in_own_process!(("SOFT_GAUDI_LATENCY", "1000000"));
    let fd = open(0);
    let mut memory = vec![0u8; 64];
    memory[..32].fill(7);
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    let first = buffer.submit(0).unwrap();
    assert_eq!(poll(fd, first, 0), sys::WAIT_BUSY);
    assert_eq!(memory[32..], [0; 32], "nothing was moved yet");
    // Behind it in the same queue, and in another one.
    let others = [buffer.submit(0).unwrap(), buffer.submit(1).unwrap()];
    for sequence in [first].into_iter().chain(others) {
        assert_eq!(wait(fd, sequence), (0, 0));
    }
    assert_eq!(memory, [7; 64]);
    assert_eq!(hlthunk_close(fd), 0);
}

#[test]
fn ends_are_reported_late_and_in_any_order() {
    // The longest possible: on a busy machine the test must poll several times before all are over.
    in_own_process!(("SOFT_GAUDI_LENIENT", ""), ("SOFT_GAUDI_JITTER", "1000000,7"));
    let fd = open(0);
    let mut memory = pattern(64, 1);
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    let mut open: Vec<u64> = (0..48).map(|n| buffer.submit([0, 1, 4][n % 3]).unwrap()).collect();
    let mut ended = Vec::new();
    while !open.is_empty() {
        open.retain(|sequence| {
            let busy = poll(fd, *sequence, 0) == sys::WAIT_BUSY;
            if !busy {
                ended.push(*sequence);
            }
            busy
        });
    }
    assert_eq!(memory[..32], memory[32..]);
    assert!(!ended.is_sorted(), "{ended:?}");
    for queue in 0..3 {
        let of_queue: Vec<u64> = ended.iter().copied().filter(|n| (n - 1) % 3 == queue).collect();
        assert!(!of_queue.is_sorted(), "one queue: {of_queue:?}");
    }
}

/// Does something that takes at least this long.
fn takes_us<T>(us: u64, what: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = what();
    assert!(begun.elapsed() >= Duration::from_micros(us));
    done
}

#[test]
fn a_modelled_card_takes_at_least_the_modelled_time_and_says_that_it_is_modelled() {
    if !testing::is_child() {
        fn here() {}
        let settings = [("SOFT_GAUDI_MODEL", "gaudi2,slow=10"), ("SOFT_GAUDI_CLOSE_TIME", "0")];
        let text = testing::output_alone(std::any::type_name_of_val(&here), &settings);
        assert!(text.contains("times are modelled (gaudi2, 10 times slower)"), "{text}");
        return;
    }
    machine("gaudi2");
    let fd = open(0);
    // 250 µs for the MMU, ten times slower: device memory, an import, host memory with its 256 pages of 0.25 µs.
    let (handle, device) = takes_us(2500, || alloc(fd, 1));
    let dmabuf = export(fd, device, 4096, 0);
    let peer = open(1);
    let imported = takes_us(2500, || import(peer, dmabuf, 4096).unwrap());
    takes_us(2500, || assert_eq!(hlthunk_memory_unmap(peer, imported), 0));
    hlthunk_close(peer);
    // SAFETY: a descriptor of this test.
    unsafe { libc::close(dmabuf) };
    takes_us(2500, || assert_eq!(hlthunk_memory_unmap(fd, device), 0));
    assert_eq!(hlthunk_device_memory_free(fd, handle), 0);
    let (_, device) = alloc(fd, 1);
    let mut memory = pattern(1 << 20, 1);
    let host = takes_us(3140, || map_host(fd, &mut memory));
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, device, 1 << 20));
    let begun = Instant::now();
    let sequences: Vec<u64> = [0, 1, 4].map(|queue| buffer.submit(queue).unwrap()).to_vec();
    sequences.iter().for_each(|sequence| assert_eq!(wait(fd, *sequence), (0, 0)));
    // Three times 1 MiB at 26 GB/s on one link, 5 µs before and 20 µs after.
    assert!(begun.elapsed() >= Duration::from_micros(10 * (5 + 3 * 40 + 20)));
    takes_us(3140, || assert_eq!(hlthunk_memory_unmap(fd, host), 0));
    drop(buffer);
}

#[test]
fn refusals_and_timeouts_that_the_kernel_logs_are_recorded() {
    in_own_process!(("SOFT_GAUDI_LENIENT", ""), ("SOFT_GAUDI_CS_TIMEOUT", "300"));
    let fd = open(0);
    let (handle, device) = alloc(fd, 1);
    assert_eq!(hlthunk_host_memory_map(fd, 16 as *mut c_void, 0, 4096), 0);
    assert_eq!(hlthunk_memory_unmap(fd, 0), -libc::EINVAL);
    assert_eq!(hlthunk_device_memory_free(fd, handle), -libc::EINVAL, "it is mapped");
    assert_eq!(hlthunk_device_memory_alloc(fd, u64::MAX, 0, true, false), 0);
    let dmabuf = export(fd, device, 4096, 0);
    assert!(dmabuf >= 0, "{dmabuf}");
    assert_eq!(hlthunk_memory_unmap(fd, device), -libc::EINVAL, "it is exported");
    let buffer = UserBuffer::new(fd, &gaudi2_copy(device, device + 32, 32));
    assert_eq!(buffer.submit(2), Err(-libc::EINVAL), "a queue of the embedded cores");
    // An EDMA queue cannot fetch it and hangs.
    let stuck = buffer.submit(8).unwrap();
    assert_eq!(wait(fd, stuck), (-libc::ETIMEDOUT, sys::WAIT_TIMEDOUT));
    assert_eq!(buffer.submit(2), Err(-libc::EBUSY), "not logged");
    let log = std::fs::read_to_string(machine_file("kernel.log")).unwrap();
    let calls: Vec<&str> = log.lines().map(|line| line.split(' ').nth(1).unwrap()).collect();
    assert_eq!(calls, ["pin", "unmap", "free", "alloc", "unmap", "submission", "timeout"], "{log}");
    drop(buffer);
}

#[test]
fn edma_hangs_when_it_fetches_its_packets_from_host_memory() {
    in_own_process!(("SOFT_GAUDI_LENIENT", ""), ("SOFT_GAUDI_CS_TIMEOUT", "300"));
    let fd = open(0);
    let (_, device) = alloc(fd, 1);
    let mut source = pattern(4096, 1);
    let mut target = vec![0u8; 4096];
    let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
    // The engine may access host memory; only its packets must be in the card's.
    let mut packets = gaudi2_copy(src, dst, 4096);
    let program = map_host(fd, &mut packets);
    assert_eq!(run(fd, 0, &gaudi2_copy(program, device, 24)), (0, sys::WAIT_COMPLETED));
    let seq = submit(fd, &mut [user_chunk(8, device, 24)]).unwrap();
    assert_eq!(wait(fd, seq), (0, sys::WAIT_COMPLETED));
    assert_eq!(source, target);
    // From host memory it is accepted, and hangs.
    let seq = submit(fd, &mut [user_chunk(8, program, 24)]).unwrap();
    assert_eq!(wait(fd, seq), (-libc::ETIMEDOUT, sys::WAIT_TIMEDOUT));
    assert_eq!(hlthunk_get_device_status_info(fd), 1);
}

const LEN: usize = 300 << 10;

fn mmap(at: *mut c_void, protection: i32, flags: i32) -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: a fresh mapping, or one in the place of memory that only the card uses.
    let memory = unsafe { libc::mmap(at, LEN, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    memory
}

/// Fresh memory full of this value, and where the card sees it.
fn filled(fd: i32, value: u8) -> (*mut c_void, u64) {
    let memory = mmap(core::ptr::null_mut(), libc::PROT_READ | libc::PROT_WRITE, 0);
    // SAFETY: the mapping just made.
    unsafe { memory.cast::<u8>().write_bytes(value, LEN) };
    (memory, hlthunk_host_memory_map(fd, memory, 0, LEN as u64))
}

/// All bytes of it, which must be the same.
fn only_value(memory: *mut c_void) -> u8 {
    // SAFETY: a mapping of this length.
    let bytes = unsafe { core::slice::from_raw_parts(memory.cast::<u8>(), LEN) };
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// A forked child that has stopped. It has our output open, so it must not outlive us.
struct Stopped(i32);

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: our own child, which nobody else waits for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, core::ptr::null_mut(), 0);
        }
    }
}

/// Why the kernel pins nothing for the card here.
fn why_no_pins() -> Option<String> {
    let mut parameters = [0u8; 120];
    // SAFETY: a structure of zeros of the size that the call expects.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if ring < 0 {
        return Some(format!("no io_uring ({})", std::io::Error::last_os_error()));
    }
    let mut locked = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the descriptor just made; a structure of our own.
    unsafe {
        libc::close(ring as i32);
        libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut locked);
    }
    let too_little = !rustix::process::geteuid().is_root() && locked.rlim_cur < 8 << 20;
    too_little.then(|| format!("RLIMIT_MEMLOCK is {} bytes", locked.rlim_cur))
}

/// The addresses get other pages, in three ways: the card goes on with those that it was given.
#[test]
fn a_card_keeps_the_pages_it_was_given_when_their_addresses_get_others() {
    if let Some(why) = why_no_pins() {
        return println!("skipped: {why}");
    }
    in_own_process!(("SOFT_GAUDI_LENIENT", ""));
    let fd = open(0);
    let (_, device) = alloc(fd, 1);
    let replace: [fn(*mut c_void); 3] = [
        |memory| {
            mmap(memory, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED);
        },
        |memory| unsafe {
            // SAFETY: the memory of the test.
            assert_eq!(libc::madvise(memory, LEN, libc::MADV_DONTNEED), 0);
        },
        |memory| unsafe {
            // SAFETY: as above; the pages move to a place of their own.
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let to = mmap(core::ptr::null_mut(), libc::PROT_NONE, 0);
            assert_eq!(libc::mremap(memory, LEN, LEN, flags, to), to);
            mmap(memory, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED);
        },
    ];
    for replace in replace {
        let (memory, stale) = filled(fd, 7);
        replace(memory);
        // SAFETY: mapped again by `replace`.
        unsafe { memory.cast::<u8>().write_bytes(9, LEN) };
        // What the card reads are the old bytes, and what it writes is not seen.
        assert_eq!(run(fd, 0, &gaudi2_copy(stale, device, LEN as u32)), (0, 0));
        let (seen, target) = filled(fd, 0);
        assert_eq!(run(fd, 0, &gaudi2_copy(device, target, LEN as u32)), (0, 0));
        assert_eq!(only_value(seen), 7);
        assert_eq!(run(fd, 0, &gaudi2_copy(device, stale, LEN as u32)), (0, 0));
        assert_eq!(run(fd, 0, &gaudi2_copy(target, stale, LEN as u32)), (0, 0));
        assert_eq!(only_value(memory), 9);
        // Mapped again, it is the new pages.
        assert_eq!(hlthunk_memory_unmap(fd, stale), 0);
        let again = hlthunk_host_memory_map(fd, memory, 0, LEN as u64);
        assert_eq!(run(fd, 0, &gaudi2_copy(again, target, LEN as u32)), (0, 0));
        assert_eq!(only_value(seen), 9);
    }
    assert_eq!(hlthunk_close(fd), 0);
}

/// After a fork both processes have the same pages until one of them writes. Pinned pages stay the parent's.
#[test]
fn after_a_fork_the_card_sees_what_the_parent_writes_and_not_what_the_child_writes() {
    if let Some(why) = why_no_pins() {
        return println!("skipped: {why}");
    }
    in_own_process!(("SOFT_GAUDI_LENIENT", ""));
    let fd = open(0);
    let (_, device) = alloc(fd, 1);
    let (memory, host) = filled(fd, 7);
    let (seen, target) = filled(fd, 0);
    let read_by_card = || {
        assert_eq!(run(fd, 0, &gaudi2_copy(host, device, LEN as u32)), (0, 0));
        assert_eq!(run(fd, 0, &gaudi2_copy(device, target, LEN as u32)), (0, 0));
        only_value(seen)
    };
    // SAFETY: the child writes memory of the test and stops until it is killed.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            memory.cast::<u8>().write_bytes(5, LEN);
            libc::raise(libc::SIGSTOP);
            libc::_exit(0);
        }
    }
    let child = Stopped(child);
    let mut status = 0;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child.0, &mut status, libc::WUNTRACED) }, child.0);
    assert!(libc::WIFSTOPPED(status), "{status:#x}");
    assert_eq!(read_by_card(), 7, "not what the child wrote");
    // SAFETY: the memory of the test.
    unsafe { memory.cast::<u8>().write_bytes(9, LEN) };
    assert_eq!(read_by_card(), 9, "the parent has kept the pages of the pin");
    drop(child);
    assert_eq!(hlthunk_close(fd), 0);
}

/// Without pins memory that is gone is a device fault, not a crash.
#[test]
fn without_pins_memory_that_vanished_is_a_device_fault() {
    in_own_process!(("SOFT_GAUDI_LENIENT", "unpinned"));
    let fd = open(0);
    let (_, device) = alloc(fd, 1);
    let (memory, host) = filled(fd, 7);
    mmap(memory, libc::PROT_NONE, libc::MAP_FIXED);
    let copied = run(fd, 0, &gaudi2_copy(host, device, LEN as u32));
    assert_eq!(copied, (-libc::EIO, sys::WAIT_ABORTED));
}

#[test]
fn a_card_with_five_stacks_of_hbm_has_smaller_pages_and_one_engine_less() {
    in_own_process!(("SOFT_GAUDI_HBM_STACKS", "5"), ("SOFT_GAUDI_LENIENT", "edma-fetch"));
    const PAGE: u64 = 640 << 20;
    let fd = open(0);
    let info = hw_info(fd);
    assert_eq!((info.dram_page_size, info.dram_size), (PAGE, 127 * PAGE));
    assert_eq!((info.dram_base_address, info.edma_enabled_mask), (0x1001_0014_0000_0000, 0x7f));
    let (_, first) = alloc(fd, 1);
    let (_, second) = alloc(fd, PAGE + 1);
    assert_eq!((first, second), (0x1001_0014_0000_0000, 0x1001_0014_0000_0000 + PAGE));
    let mut source = pattern(10_000, 1);
    let mut target = vec![0u8; 10_000];
    let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
    let edge = second + PAGE - 5000;
    let mut packets = gaudi2_copy(src, edge, 10_000);
    packets.extend(after_barrier(gaudi2_copy(edge, dst, 10_000)));
    assert_eq!(run(fd, 1, &packets), (0, sys::WAIT_COMPLETED));
    assert_eq!(source, target);
    let buffer = UserBuffer::new(fd, &packets);
    assert_eq!(buffer.submit(124), Err(-libc::EINVAL), "the binned engine");
    assert_eq!(wait(fd, buffer.submit(120).unwrap()), (0, sys::WAIT_COMPLETED));
    drop(buffer);
}

const CLOSE_MS: u64 = 30;

#[test]
fn opens_give_eagain_while_a_card_is_being_closed() {
    in_own_process!(("SOFT_GAUDI_CLOSE_TIME", &CLOSE_MS.to_string()));
    let mut again = 0;
    // Each round is one chance to meet the moment between the end of the ownership and the release.
    for _ in 0..20 {
        let fd = open(0);
        let began = std::time::Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(hlthunk_close(fd), 0));
            let mut is_closing = false;
            let opened = loop {
                match open(0) {
                    opened if opened >= 0 => break opened,
                    errno if errno == -libc::EAGAIN => is_closing = true,
                    errno => assert_eq!((errno, is_closing), (-libc::EBUSY, false)),
                }
                std::thread::yield_now();
            };
            // A thread that did not run meanwhile sees no EAGAIN, but no thread gets the card early.
            assert!(
                began.elapsed().as_millis() >= CLOSE_MS.into(),
                "opened while it was being closed"
            );
            again += u32::from(is_closing);
            hlthunk_close(opened);
        });
    }
    assert_ne!(again, 0, "no round met the close");
}

/// What other processes of the next test do; in a normal run there is nothing to do.
#[test]
fn child() {
    match child_role().as_ref().map(|(role, _)| role.as_str()) {
        Some("hold") => hold(),
        Some("release for ever") => release_for_ever(),
        _ => {}
    }
}

fn hold() {
    let parent = parent();
    send(&parent, open(0).into());
    wait_for_end(&parent);
}

fn release_for_ever() {
    // SAFETY: the library reads it at its first call, which `open` is.
    unsafe { std::env::set_var("SOFT_GAUDI_CLOSE_TIME", "3600000") };
    open(0);
}

/// Nobody closes the card: it is released all the same before it is opened again.
#[test]
fn a_card_that_was_not_closed_is_released_by_the_next_open_while_others_give_eagain() {
    in_own_process!(("SOFT_GAUDI_CLOSE_TIME", &CLOSE_MS.to_string()));
    let open_again = || takes_us(1000 * CLOSE_MS, || open(0));
    let mut exits = Child::start("hold", 0);
    assert!(exits.receive_number() >= 0);
    exits.finish();
    let fd = open_again();
    // SAFETY: a descriptor of this test.
    assert_eq!(unsafe { libc::close(fd) }, 0);
    hlthunk_close(open_again());

    let mut killed = Child::start("hold", 0);
    assert!(killed.receive_number() >= 0);
    killed.kill();
    // Another process makes up for the release, and is killed meanwhile.
    let opens = open_stats(0).open_counter;
    let releasing = Child::start("release for ever", 0);
    let stats = loop {
        match open_stats(0) {
            stats if stats.compute_ctx_in_release == 1 || stats.open_counter > opens => {
                break stats;
            }
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    assert_eq!((stats.open_counter, open(0)), (opens, -libc::EAGAIN));
    releasing.kill();
    hlthunk_close(open_again());
}

#[test]
fn memory_that_was_never_written_reads_as_noise_and_what_is_written_stays() {
    in_own_process!(("SOFT_GAUDI_HBM", "768m"));
    let fd = open(0);
    let (handle, va) = alloc(fd, 1);
    let distinct = |bytes: &[u8]| bytes.iter().collect::<std::collections::HashSet<_>>().len();
    let fresh = get(fd, va, 20_000);
    assert!(distinct(&fresh) > 200, "{:x?}", &fresh[..64]);
    // A part of a page, and whole pages: nothing beside them changes.
    for (at, len) in [(5_000, 3), (8_192, 8_192), (1 << 20, 4_096), (3 << 20, 100_001)] {
        let (before, bytes) = (get(fd, va + at - 4_096, len + 8_192), pattern(len, at));
        put(fd, va + at, &bytes);
        let after = get(fd, va + at - 4_096, len + 8_192);
        assert!(after[4_096..4_096 + len] == bytes, "{at}");
        assert!(after[..4_096] == before[..4_096], "{at}: in front of it");
        assert!(after[4_096 + len..] == before[4_096 + len..], "{at}: behind it");
        assert!(distinct(&after[..4_096]) > 200, "{at}");
    }
    // Freed and allocated again it is not what it was.
    put(fd, va, &[7; 20_000]);
    assert_eq!(hlthunk_memory_unmap(fd, va), 0);
    assert_eq!(hlthunk_device_memory_free(fd, handle), 0);
    let (_, again) = alloc(fd, 1);
    assert_eq!(again, va, "the only page");
    assert!(distinct(&get(fd, again, 20_000)) > 200);
}

#[test]
fn what_another_device_writes_to_memory_that_was_never_written_stays() {
    in_own_process!();
    let fd = open(0);
    let (_, va) = alloc(fd, 1);
    let dmabuf = export_fd(fd, va, 1 << 20, 0);
    let exported =
        soft_gaudi::dmabuf::Exported::from_fd(std::os::fd::AsFd::as_fd(&dmabuf)).unwrap();
    // SAFETY: inside the exported range, which nobody else uses.
    unsafe { exported.ranges()[0].ptr.add(100).write_bytes(9, 50) };
    assert_eq!(get(fd, va + 100, 50), [9; 50]);
}

/// How often a card was reset.
fn resets(index: i32) -> u32 {
    let control = hlthunk_open_control(index, core::ptr::null());
    let mut counts = [0; 2];
    assert_eq!(hlthunk_get_reset_count_info(control, &mut counts), 0);
    hlthunk_close(control);
    counts[0]
}

#[test]
fn a_card_that_is_closed_with_work_in_flight_is_reset() {
    in_own_process!(("SOFT_GAUDI_LATENCY", "1000000"));
    let log = || std::fs::read_to_string(machine_file("kernel.log")).unwrap_or_default();
    let fd = open(0);
    let mut memory = vec![0u8; 64];
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    let sequence = buffer.submit(0).unwrap();
    assert_eq!(wait(fd, sequence), (0, 0));
    assert_eq!(hlthunk_close(fd), 0);
    assert_eq!((resets(0), &*log()), (0, ""), "nothing was in flight");
    let fd = open(0);
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    buffer.submit(0).unwrap();
    assert_eq!(hlthunk_close(fd), 0);
    assert_eq!((resets(0), &*log()), (1, "accel0 in-use 0\n"));
    // It is free, and works.
    let fd = open(0);
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    assert_eq!(wait(fd, buffer.submit(0).unwrap()), (0, 0));
    assert_eq!(hlthunk_close(fd), 0);
    assert_eq!(resets(0), 1);
}

#[test]
fn memory_that_the_bar_does_not_cover_is_not_exported() {
    // The driver's page and one more.
    in_own_process!(("SOFT_GAUDI_HBM", "3g"), ("SOFT_GAUDI_BAR", "1536m"));
    let fd = open(0);
    let (_, near) = alloc(fd, 1);
    let (_, far) = alloc(fd, 1);
    drop(export_fd(fd, near, 4096, 0));
    assert_eq!(export(fd, far, 4096, 0), -libc::EINVAL);
    // All of a mapping has to be covered.
    let (_, both) = alloc(fd, (768 << 20) + 1);
    assert_eq!(export(fd, both, 4096, 0), -libc::EINVAL);
}
