//! Settings that make the software card as strict as a real one, each in a process of its own.

mod driver;

use core::ffi::c_void;
use std::process::Command;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

/// Runs a role of `child` in another process with these settings.
fn passes(role: &str, settings: &[(&str, &str)]) {
    let node = format!("test-strict-{}-{}", std::process::id(), role.replace(' ', "-"));
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env("SOFT_GAUDI_NODE", &node)
        .env("SOFT_GAUDI_TEST_CHILD", format!("{role} 0"))
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let user = rustix::process::geteuid().as_raw();
    let _ = std::fs::remove_dir_all(format!("/dev/shm/soft-gaudi-{user}/{node}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{role}: {}\n{text}", output.status);
}

#[test]
fn child() {
    let Some((role, _)) = child_role() else { return };
    machine("gaudi2");
    match role.as_str() {
        "edma" => edma(),
        "five hbm" => five_hbm(),
        "close" => close(),
        "stale" => stale_pins(),
        "vanished" => vanished(),
        other => panic!("no such role: {other}"),
    }
}

fn edma() {
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
    hlthunk_close(fd);
}

#[test]
fn edma_hangs_when_it_fetches_its_packets_from_host_memory() {
    passes("edma", &[("SOFT_GAUDI_KIND", ""), ("SOFT_GAUDI_CS_TIMEOUT", "300")]);
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

/// The addresses get other pages, in three ways: the card goes on with those that it was given.
fn stale_pins() {
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

#[test]
fn a_card_keeps_the_pages_it_was_given_when_their_addresses_get_others() {
    let mut parameters = [0u8; 120];
    // SAFETY: a structure of zeros of the size that the call expects.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if ring < 0 {
        return println!("skipped: no io_uring ({})", std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor just made.
    unsafe { libc::close(ring as i32) };
    passes("stale", &[("SOFT_GAUDI_KIND", "")]);
}

/// Without pins memory that is gone is a device fault, not a crash.
fn vanished() {
    let fd = open(0);
    let (_, device) = alloc(fd, 1);
    let (memory, host) = filled(fd, 7);
    mmap(memory, libc::PROT_NONE, libc::MAP_FIXED);
    let copied = run(fd, 0, &gaudi2_copy(host, device, LEN as u32));
    assert_eq!(copied, (-libc::EIO, sys::WAIT_ABORTED));
    hlthunk_close(fd);
}

#[test]
fn without_pins_memory_that_vanished_is_a_device_fault() {
    passes("vanished", &[("SOFT_GAUDI_KIND", "unpinned")]);
}

fn five_hbm() {
    const PAGE: u64 = 640 << 20;
    let fd = open(0);
    // SAFETY: plain data.
    let mut info: sys::HwIpInfo = unsafe { core::mem::zeroed() };
    assert_eq!(hlthunk_get_hw_ip_info(fd, (&raw mut info).cast()), 0);
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
    packets.extend(gaudi2_copy(edge, dst, 10_000));
    assert_eq!(run(fd, 1, &packets), (0, sys::WAIT_COMPLETED));
    assert_eq!(source, target);
    let buffer = UserBuffer::new(fd, &packets);
    assert_eq!(buffer.submit(124), Err(-libc::EINVAL), "the binned engine");
    assert_eq!(wait(fd, buffer.submit(120).unwrap()), (0, sys::WAIT_COMPLETED));
    drop(buffer);
    hlthunk_close(fd);
}

#[test]
fn a_card_with_five_stacks_of_hbm_has_smaller_pages_and_one_engine_less() {
    passes("five hbm", &[("SOFT_GAUDI_SHAPE", "5"), ("SOFT_GAUDI_KIND", "edma-fetch")]);
}

fn close() {
    // Each round is one chance to meet the moment between the end of the ownership and the release.
    for _ in 0..20 {
        let fd = open(0);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(hlthunk_close(fd), 0));
            let mut again = false;
            let opened = loop {
                match open(0) {
                    opened if opened >= 0 => break opened,
                    errno if errno == -libc::EAGAIN => again = true,
                    errno => assert_eq!((errno, again), (-libc::EBUSY, false)),
                }
                std::thread::yield_now();
            };
            assert!(again, "opened while it was being closed");
            hlthunk_close(opened);
        });
    }
}

#[test]
fn opens_give_eagain_while_a_card_is_being_closed() {
    passes("close", &[("SOFT_GAUDI_CLOSE_TIME", "30")]);
}
