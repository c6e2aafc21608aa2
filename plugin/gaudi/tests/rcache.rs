//! The registration cache on the software Gaudi: memory that is mapped and unmapped, from several
//! threads. Every byte is compared, and nothing stays pinned.

mod machine;

use std::os::unix::process::CommandExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaudi::rcache::{self, CacheLimits};
use gaudi::{Device, HostRegion, Segment, Side};
use machine::{Footprint, assert_same, pattern};

const SIZE: usize = 256 << 10;

/// A card with a cache, one test at a time: a fork, say, is felt by all cards of the process.
fn fresh() -> (MutexGuard<'static, ()>, Arc<Device>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    machine::set_up("gaudi2");
    // For all tests of this program: code that unmaps memory calls `invalidate`.
    let limits = CacheLimits { regions: 64, bytes: 1 << 30 };
    gaudi::runtime().cache_registrations(limits, Box::new(|| true));
    (alone, machine::fresh())
}

/// Counters of the card.
fn counter(device: &Device, name: &str) -> u64 {
    let page = stats_reader::read(std::process::id()).expect("our own page");
    let card = page.card(device.info().bus_id.as_str());
    card.and_then(|card| card.get(name)).unwrap_or_else(|| panic!("no counter {name}"))
}

/// A mapping at a given address that calls `invalidate` when it is unmapped.
struct Mapping(*mut u8);

impl Mapping {
    fn new(at: *mut u8) -> Self {
        let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED_NOREPLACE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: nothing is there.
        let start = unsafe { libc::mmap(at.cast(), SIZE, access, flags, -1, 0) };
        assert!(start != libc::MAP_FAILED && (at.is_null() || start == at.cast()));
        Self(start.cast())
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, and ours.
        unsafe { std::slice::from_raw_parts_mut(self.0, SIZE) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        rcache::invalidate(self.0 as usize, SIZE);
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.0.cast(), SIZE) };
    }
}

fn put(device: &Arc<Device>, to: gaudi::DeviceAddr, from: &[u8], region: Option<Arc<HostRegion>>) {
    let (dst, src) = (Side::Device(to), Side::Host(from.as_ptr().cast_mut()));
    let segment = Segment { dst, src, len: from.len(), host_region: region };
    let mut transfer = loop {
        // SAFETY: the buffer lives until the copy has ended, which is waited for.
        match unsafe { device.copy(std::slice::from_ref(&segment)) } {
            Ok(transfer) => break transfer,
            Err(gaudi::SubmitError::Busy) => std::thread::yield_now(),
            Err(gaudi::SubmitError::Failed(error)) => panic!("{error}"),
        }
    };
    transfer.wait().expect("copied");
}

/// Reads from the device, into memory that is about to be freed.
fn read(device: &Arc<Device>, from: gaudi::DeviceAddr, len: usize) -> Vec<u8> {
    let bytes = machine::read(device, from, len);
    rcache::invalidate(bytes.as_ptr() as usize, len);
    bytes
}

#[test]
fn ten_thousand_mappings_at_one_address_leave_nothing_pinned() {
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    let place = Mapping::new(null_mut()).0;
    let cycle = |number: u64| {
        let mut mapping = Mapping::new(place);
        let host = mapping.bytes();
        host[..8].copy_from_slice(&number.to_ne_bytes());
        host[SIZE - 8..].copy_from_slice(&number.to_ne_bytes());
        let region = number.is_multiple_of(2).then(|| HostRegion::record(host.as_mut_ptr(), SIZE));
        put(&device, target.addr(), host, region);
        if number.is_multiple_of(100) {
            assert_same(&read(&device, target.addr(), SIZE), host, "new memory, old address");
        }
    };
    (0..100).for_each(cycle);
    let before = Footprint::now();
    (100..10_000).for_each(cycle);
    before.assert_flat("10 000 mappings");
    assert!(counter(&device, "reg_cache_invalidations") >= 10_000);
    assert!(counter(&device, "reg_cache_misses") >= 10_000);
    let held = counter(&device, "pins") - counter(&device, "unpins");
    assert!(held <= 3, "{held} pins are left: one of a buffer, and the bounce buffers'");
    assert!(device.registration_cache().regions <= 1);
}

/// Gives the address of a mapping other pages: mapped over, moved away, or discarded.
fn replace_pages(way: usize, at: *mut u8) {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the caller's own mapping; nothing else is touched.
    let done = unsafe {
        if way == 1 {
            let to = libc::mmap(null_mut(), SIZE, libc::PROT_NONE, flags, -1, 0);
            let moved = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            assert_eq!(libc::mremap(at.cast(), SIZE, SIZE, moved, to), to);
        }
        match way {
            2 => libc::madvise(at.cast(), SIZE, libc::MADV_DONTNEED) == 0,
            _ => libc::mmap(at.cast(), SIZE, access, flags | libc::MAP_FIXED, -1, 0) == at.cast(),
        }
    };
    assert!(done, "way {way}");
}

/// Printed for each way in which the card got the new pages although the cache was not told.
const UNNOTICED: &str = "the new pages were copied without an event";
/// What the software card prints where the kernel pins nothing for it.
const NO_PINS: &str = "soft-gaudi: the kernel does not pin";

/// Runs the test below in a process of its own, perhaps without io_uring, which pins the pages. Returns what it
/// printed.
fn replaced_pages(refuse: &'static [libc::c_long]) -> std::io::Result<String> {
    let test = "replaced_pages_are_copied_after_the_event_and_old_ones_without_it";
    let mut command = machine::child(test);
    if !refuse.is_empty() {
        // SAFETY: system calls only, in a process that has one thread.
        unsafe { command.pre_exec(|| machine::refuse(refuse)) };
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Ok(text.into_owned())
}

/// Unmap events exist because of what the driver does with a stale pin.
#[test]
fn replaced_pages_are_copied_after_the_event_and_old_ones_without_it() {
    if !machine::is_child() {
        let text = replaced_pages(&[]).expect("it starts");
        match text.lines().find(|line| line.contains(NO_PINS)) {
            Some(line) => println!("skipped: {line}"),
            None => assert!(!text.contains(UNNOTICED), "{text}"),
        }
        return;
    }
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    for way in 0..3 {
        let mut mapping = Mapping::new(null_mut());
        mapping.bytes().copy_from_slice(&pattern(SIZE, 1));
        put(&device, target.addr(), mapping.bytes(), None);
        for told in [true, false] {
            if told {
                rcache::invalidate(mapping.0 as usize, SIZE);
            }
            replace_pages(way, mapping.0);
            mapping.bytes().copy_from_slice(&pattern(SIZE, 2 + u64::from(told)));
            put(&device, target.addr(), mapping.bytes(), None);
            let seen = read(&device, target.addr(), SIZE);
            if told {
                assert_same(&seen, mapping.bytes(), "new pages");
            } else if seen == mapping.bytes() {
                println!("way {way}: {UNNOTICED}");
            } else {
                assert_same(&seen, &pattern(SIZE, 3), "a stale pin: the pages before");
            }
        }
    }
}

/// A program that unmaps memory under a copy harms nobody: the card has the old pages until it is done with them.
#[test]
fn memory_that_is_unmapped_under_a_copy_and_mapped_anew_is_not_the_copys() {
    if !machine::is_child() {
        let test = "memory_that_is_unmapped_under_a_copy_and_mapped_anew_is_not_the_copys";
        let output = machine::child(test).env("SOFT_GAUDI_FAULTS", "yes").output();
        let output = output.expect("it starts");
        let said =
            [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
        if said[1].contains(NO_PINS) {
            println!("skipped: the kernel pins nothing for the software card here");
            return;
        }
        assert!(output.status.success() && said[0].contains("1 passed"), "{said:?}");
        return;
    }
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    let mut mapping = Mapping::new(null_mut());
    mapping.bytes().copy_from_slice(&pattern(SIZE, 1));
    let (host, at) = (Side::Host(mapping.0), mapping.0);
    let memory = Side::Device(target.addr());
    for (dst, src, seed) in [(memory, host, 2), (host, memory, 3)] {
        machine::faults("transfer slow:3000");
        let segment = Segment { dst, src, len: SIZE, host_region: None };
        // SAFETY: not kept, and that is the test: the card has pinned the pages.
        let mut transfer = unsafe { device.copy(&[segment]) }.expect("a first copy");
        drop(mapping);
        mapping = Mapping::new(at);
        mapping.bytes().copy_from_slice(&pattern(SIZE, seed));
        assert!(transfer.poll().is_none(), "the copy was over before the memory was gone");
        transfer.wait().expect("it goes on with the old pages");
        assert_same(mapping.bytes(), &pattern(SIZE, seed), "another mapping at that address");
        assert_same(&read(&device, target.addr(), SIZE), &pattern(SIZE, 1), "the card's memory");
    }
}

#[test]
fn a_card_for_which_the_kernel_pins_nothing_says_so_and_copies_what_is_mapped() {
    let text = match replaced_pages(&[libc::SYS_io_uring_setup]) {
        Ok(text) => text,
        Err(error) => return println!("skipped: no seccomp filter ({error})"),
    };
    assert_eq!(text.matches(NO_PINS).count(), 1, "once: {text}");
    assert!(text.contains("SOFT_GAUDI_LENIENT=unpinned"), "{text}");
    assert_eq!(text.matches(UNNOTICED).count(), 3, "{text}");
}

#[test]
fn copies_are_right_while_another_thread_invalidates_what_they_use() {
    let (_alone, device) = fresh();
    let stop = AtomicBool::new(false);
    let lost_before = counter(&device, "reg_cache_invalidations");
    let reads = AtomicU64::new(0);
    // Reads give the buffers up that they make; what was lost beyond that, copies were about to use.
    let have_met = || {
        let lost = counter(&device, "reg_cache_invalidations") - lost_before;
        lost > reads.load(Ordering::Relaxed) + 20
    };
    let buffers: Vec<Vec<u8>> = (0..4).map(|seed| pattern(SIZE + 100, seed + 1)).collect();
    let ranges: Vec<(usize, usize)> =
        buffers.iter().map(|buffer| (buffer.as_ptr() as usize, buffer.len())).collect();
    std::thread::scope(|scope| {
        // The memory stays mapped; the events must not harm those who copy it.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for &(start, len) in &ranges {
                    rcache::invalidate(start + len / 2, 4096);
                }
                std::thread::yield_now();
            }
        });
        let copying: Vec<_> = (0..2)
            .map(|thread| {
                let (device, buffers, reads, have_met) = (&device, &buffers, &reads, &have_met);
                scope.spawn(move || {
                    let target = device.alloc(SIZE as u64, 1).expect("memory");
                    let more = |round: &usize| *round < 300 || !have_met();
                    for round in (0..10_000).take_while(more) {
                        let round = round % 300;
                        let buffer = &buffers[(round + thread) % buffers.len()];
                        let part = &buffer[round % 100..][..SIZE - round];
                        put(device, target.addr(), part, None);
                        reads.fetch_add(1, Ordering::Relaxed);
                        assert_same(&read(device, target.addr(), part.len()), part, "copied");
                    }
                })
            })
            .collect();
        for thread in copying {
            thread.join().expect("a thread that copies");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(have_met(), "the threads did not meet");
    rcache::invalidate(0, usize::MAX);
    let mut one = Mapping::new(null_mut());
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    put(&device, target.addr(), one.bytes(), None);
    assert_eq!(device.registration_cache().regions, 1, "all others were given back");
    let held = counter(&device, "pins") - counter(&device, "unpins");
    assert!(held <= 3, "{held} pins are left");
}

#[test]
fn with_more_buffers_than_the_cache_may_keep_copies_are_right() {
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    let mut buffers: Vec<Mapping> = (0..100).map(|_| Mapping::new(null_mut())).collect();
    for round in 0..3_u64 {
        for (number, buffer) in buffers.iter_mut().enumerate() {
            let host = buffer.bytes();
            host[..8].copy_from_slice(&(round << 32 | number as u64).to_ne_bytes());
            put(&device, target.addr(), host, None);
            assert_same(&read(&device, target.addr(), 8), &host[..8], "evicted or not");
            assert!(device.registration_cache().regions <= 64);
        }
    }
    assert!(counter(&device, "reg_cache_evictions") >= 36);
    assert_eq!(counter(&device, "reg_cache_regions"), 64);
    assert_eq!(counter(&device, "reg_cache_bytes"), 64 * SIZE as u64);
}

#[test]
fn read_only_memory_is_refused_once_and_tried_again_when_it_is_registered() {
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    let mut host = Mapping::new(null_mut());
    host.bytes().copy_from_slice(&pattern(SIZE, 5));
    put(&device, target.addr(), &host.bytes()[..8], None); // pins the bounce buffers
    let protect = |host: &Mapping, access| {
        // SAFETY: our own mapping, not written to meanwhile.
        assert_eq!(unsafe { libc::mprotect(host.0.cast(), SIZE, access) }, 0);
    };
    protect(&host, libc::PROT_READ);
    let refused = || counter(&device, "pins_refused");
    let before = refused();
    for _ in 0..10 {
        // SAFETY: mapped, and read only.
        let bytes = unsafe { std::slice::from_raw_parts(host.0, SIZE) };
        put(&device, target.addr(), bytes, None);
        assert_same(&machine::read(&device, target.addr(), 8), &bytes[..8], "bounced");
    }
    assert_eq!(refused() - before, 1, "the driver was asked once");
    protect(&host, libc::PROT_READ | libc::PROT_WRITE);
    let region = HostRegion::record(host.0, SIZE);
    put(&device, target.addr(), host.bytes(), Some(region));
    assert_eq!(refused() - before, 1);
    assert!(device.cached_at(host.0, SIZE).is_some(), "pinned, now that it can be");
}

#[test]
fn after_a_fork_the_parent_pins_anew() {
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    let mut host = Mapping::new(null_mut());
    put(&device, target.addr(), host.bytes(), None);
    put(&device, target.addr(), host.bytes(), None);
    let before = (counter(&device, "reg_cache_misses"), counter(&device, "pins"));
    // SAFETY: the child ends at once, with nothing of ours run.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0);
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    host.bytes().copy_from_slice(&pattern(SIZE, 77));
    put(&device, target.addr(), host.bytes(), None);
    // Before reading back, which pins memory of its own.
    let after = (counter(&device, "reg_cache_misses"), counter(&device, "pins"));
    assert_eq!(after, (before.0 + 1, before.1 + 1), "the pin from before was used");
    assert_same(&read(&device, target.addr(), SIZE), host.bytes(), "after the fork");
}

#[test]
fn nothing_stays_pinned_for_memory_that_was_freed_or_a_cache_that_was_turned_off() {
    let (_alone, device) = fresh();
    let target = device.alloc(SIZE as u64, 1).expect("memory");
    let held = || counter(&device, "pins") - counter(&device, "unpins");
    let put_from = |host: &mut Mapping| put(&device, target.addr(), host.bytes(), None);
    let mut stays = Mapping::new(null_mut());
    put_from(&mut stays);
    let with_one = held();
    let mut goes = Mapping::new(null_mut());
    put_from(&mut goes);
    assert_eq!(held(), with_one + 1);
    drop(goes);
    assert_eq!(held(), with_one + 1, "nothing is unpinned inside `munmap`");
    // A registration that has nothing to do with it ends.
    drop(HostRegion::record(stays.0, SIZE));
    assert_eq!(held(), with_one, "the pin of what was freed went");
    gaudi::runtime().stop_caching_registrations();
    assert_eq!((held(), device.registration_cache().regions), (with_one - 1, 0));
    assert_eq!(counter(&device, "reg_cache_regions"), 0);
}
