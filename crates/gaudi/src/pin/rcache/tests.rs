//! The cache under copies, on fake hardware that keeps using the pages it pinned, whatever the program
//! maps at their address later.

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::refusals::RETRY;
use super::{Cache, CacheLimits, PinError, Switch, invalidate};
use crate::backend::fake::Fake;
use crate::copy::BOUNCE_LEN;
use crate::process::holds_in_child;
use crate::stats::Counts;
use crate::{Allocation, Device, HostRegion, Segment, Side, Transfer};

const LARGE: usize = 128 * 1024;
const PLENTY: CacheLimits = CacheLimits { regions: 1000, bytes: 1 << 40 };

/// A fake device whose pins are kept within these limits.
fn device(limits: CacheLimits) -> (Arc<Fake>, Arc<Device>) {
    let (fake, device) = Fake::device();
    let switch = Box::leak(Box::<Switch>::default());
    switch.want(limits, Box::new(|| true));
    assert!(device.pins().cache().switch.set(switch).is_ok());
    (fake, device)
}

/// Memory with pages that have an address of their own, as if they were physical.
struct Pages {
    addr: *mut u8,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Self {
        // SAFETY: a new mapping.
        let addr = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE)
        };
        Self { addr: addr.unwrap().cast(), len }
    }

    /// Other pages at the same address, full of `byte`: as `munmap` and `mmap` give a program. The
    /// old ones stay for whoever pinned them.
    fn replace(&self, fake: &Fake, byte: u8) {
        let file = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, self.len as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, leaked; and one in the place of ours.
        let elsewhere = unsafe {
            let at = self.addr.cast();
            let fixed = MapFlags::SHARED | MapFlags::FIXED;
            rustix::mm::mmap(at, self.len, access, fixed, &file, 0).unwrap();
            rustix::mm::mmap(null_mut(), self.len, access, MapFlags::SHARED, &file, 0).unwrap()
        };
        fake.pages_are_at(self.addr, self.len, elsewhere.cast());
        // SAFETY: our own memory.
        unsafe { self.addr.write_bytes(byte, self.len) };
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.addr.wrapping_add(offset)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { rustix::mm::munmap(self.addr.cast(), self.len) }.unwrap();
    }
}

fn start(device: &Arc<Device>, target: &Allocation, from: *mut u8, len: usize) -> Transfer {
    let (dst, src) = (Side::Device(target.addr()), Side::Host(from));
    // SAFETY: tests keep their buffers until the fake hardware is done.
    unsafe { device.copy(&[Segment { dst, src, len, host_region: None }]) }.unwrap()
}

/// A copy to the device, done.
fn copy(fake: &Fake, device: &Arc<Device>, target: &Allocation, from: *mut u8, len: usize) {
    let mut transfer = start(device, target, from, len);
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
}

#[test]
fn a_buffer_is_pinned_once_however_often_it_is_copied() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(4 * LARGE);
    for round in 0..10 {
        copy(&fake, &device, &target, host.at(100), LARGE);
        copy(&fake, &device, &target, host.at(100 + round), LARGE - round);
        copy(&fake, &device, &target, host.at(200), 1000);
    }
    let first_page = host.addr as u64;
    assert_eq!(fake.pins(), [(first_page, LARGE + 4096)], "whole pages, once");
    assert_eq!(fake.live_pins(), 1);
    drop((target, device));
    assert_eq!(fake.live_pins(), 0, "the pins go with the card");
}

#[test]
fn new_memory_at_the_same_address_is_pinned_anew() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(LARGE);
    host.replace(&fake, 0xaa);
    copy(&fake, &device, &target, host.addr, LARGE);
    assert_eq!(fake.peek(target.addr(), LARGE), [0xaa; LARGE]);

    // This is what goes wrong without an unmap event: the test would notice.
    host.replace(&fake, 0xbb);
    copy(&fake, &device, &target, host.addr, LARGE);
    assert_eq!(fake.peek(target.addr(), LARGE), [0xaa; LARGE], "the old pages");

    for byte in 0..50 {
        invalidate(host.addr as usize + 4096, 4096);
        host.replace(&fake, byte);
        copy(&fake, &device, &target, host.addr, LARGE);
        assert_eq!(fake.peek(target.addr(), LARGE), [byte; LARGE]);
    }
    assert_eq!(fake.live_pins(), 1, "nothing piles up");
}

/// A pin that outlived its pages would show the old bytes.
#[test]
fn copies_see_new_pages_while_other_threads_invalidate_and_reclaim() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(LARGE);
    let (start, stop) = (host.addr as usize, AtomicBool::new(false));
    let lost = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let table = &device.pins().cache().shared.table;
                let (start, end) = (start as u64 + 8192, start as u64 + 12288);
                lost.fetch_add(table.invalidate(start, end), Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                device.progress();
                std::thread::yield_now();
            }
        });
        let check = |byte: u8| {
            for _ in 0..20 {
                copy(&fake, &device, &target, host.addr, LARGE);
                assert_eq!(fake.peek(target.addr(), LARGE), [byte; LARGE]);
            }
        };
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for byte in 0..50 {
                invalidate(start, LARGE);
                host.replace(&fake, byte);
                check(byte);
            }
            // Until the threads have met.
            while lost.load(Ordering::Relaxed) < 10 {
                check(49);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    device.pins().cache().shared.clear();
    assert_eq!((fake.live_pins(), device.registration_cache().regions), (0, 0));
}

#[test]
fn a_running_copy_keeps_the_pages_it_was_started_with() {
    let (fake, device) = device(PLENTY);
    let targets = [0, 1].map(|_| device.alloc(LARGE as u64, 1).unwrap());
    let host = Pages::new(LARGE);
    host.replace(&fake, 1);
    let mut running = start(&device, &targets[0], host.addr, LARGE);
    invalidate(host.addr as usize, LARGE);
    host.replace(&fake, 2);
    let mut next = start(&device, &targets[1], host.addr, LARGE);
    assert_eq!(fake.live_pins(), 2, "both copies have theirs");
    fake.finish_all();
    assert_eq!((running.poll(), next.poll()), (Some(Ok(())), Some(Ok(()))));
    assert_eq!(fake.live_pins(), 1, "the old pin went with its last user");
    assert_eq!(fake.peek(targets[0].addr(), LARGE), [1; LARGE]);
    assert_eq!(fake.peek(targets[1].addr(), LARGE), [2; LARGE]);
}

#[test]
fn pins_of_unmapped_memory_are_given_back_without_a_further_copy() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(LARGE);
    copy(&fake, &device, &target, host.addr, LARGE);
    invalidate(host.addr as usize, LARGE);
    device.progress();
    assert_eq!(fake.live_pins(), 0);
    copy(&fake, &device, &target, host.addr, LARGE);
    // Also while pins are not kept any more.
    device.pins().cache().switch.get().unwrap().off();
    invalidate(host.addr as usize, LARGE);
    device.progress();
    assert_eq!(fake.live_pins(), 0);
}

#[test]
fn clearing_gives_back_what_is_idle_now_and_what_is_used_when_its_copy_ends() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(4 * LARGE);
    copy(&fake, &device, &target, host.addr, LARGE);
    let mut running = start(&device, &target, host.at(2 * LARGE), LARGE);
    device.pins().cache().switch.get().unwrap().off();
    device.pins().cache().shared.clear();
    assert_eq!((device.registration_cache().regions, fake.live_pins()), (1, 1));
    assert!(!device.is_cached(host.at(2 * LARGE), LARGE), "not for others");
    fake.finish_all();
    assert_eq!(running.poll(), Some(Ok(())));
    assert_eq!((device.registration_cache().regions, fake.live_pins()), (0, 0));
}

#[test]
fn registering_again_finds_the_old_pin() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(16 * LARGE);
    for round in 0..5 {
        let host_region = Some(HostRegion::record(host.addr, host.len));
        let (dst, src) = (Side::Device(target.addr()), Side::Host(host.at(round * LARGE)));
        // SAFETY: the buffer lives until the fake hardware is done.
        let mut transfer =
            unsafe { device.copy(&[Segment { dst, src, len: LARGE, host_region }]) }.unwrap();
        fake.finish_all();
        assert_eq!(transfer.poll(), Some(Ok(())));
    }
    assert_eq!(fake.pins(), [(host.addr as u64, host.len)], "all of the region, once");
}

#[test]
fn a_region_can_be_pinned_before_the_first_copy() {
    let (fake, device) = device(PLENTY);
    let host = Pages::new(LARGE);
    let prepare = || {
        let region = HostRegion::record(host.addr, host.len);
        // SAFETY: the memory stays until the end.
        unsafe { region.prepare(&device) }
    };
    assert_eq!((prepare(), prepare()), (Ok(true), Ok(true)));
    assert!(device.is_cached(host.at(5), LARGE - 5) && !device.is_cached(host.at(5), LARGE));
    assert_eq!(fake.pins(), [(host.addr as u64, LARGE)]);
    invalidate(host.addr as usize, 1);
    assert!(!device.is_cached(host.addr, 1));
    fake.refuse_pins(Some(libc::EFAULT));
    assert_eq!(prepare(), Ok(false));
    let calls = fake.pin_calls();
    assert_eq!((prepare(), fake.pin_calls()), (Ok(false), calls), "not tried again");
    device.pins().cache().switch.get().unwrap().off();
    device.pins().cache().shared.clear();
    fake.refuse_pins(None);
    assert_eq!(prepare(), Ok(true), "by the region itself");
    assert_eq!(fake.live_pins(), 0, "and for as long as that lives");
}

#[test]
fn ranges_that_overlap_become_one_and_ranges_that_touch_do_not() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(3 * LARGE as u64, 1).unwrap();
    let host = Pages::new(3 * LARGE);
    copy(&fake, &device, &target, host.addr, LARGE);
    copy(&fake, &device, &target, host.at(LARGE), LARGE);
    assert_eq!(fake.live_pins(), 2, "they only touch");
    copy(&fake, &device, &target, host.at(LARGE / 2), 2 * LARGE);
    assert_eq!(fake.pins()[2], (host.addr as u64, 5 * LARGE / 2), "both and the new one");
    assert_eq!(fake.live_pins(), 1);
    copy(&fake, &device, &target, host.addr, LARGE);
    copy(&fake, &device, &target, host.at(LARGE), LARGE);
    copy(&fake, &device, &target, host.at(LARGE / 2), 2 * LARGE);
    assert_eq!(fake.pins().len(), 3, "all of them hit");
}

/// As buffers from `malloc` do: were these joined, a hundred of them would become one, pinned a
/// hundred times over.
#[test]
fn buffers_that_share_a_page_with_their_neighbours_stay_apart() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(10 * LARGE);
    let step = LARGE + 16;
    for _ in 0..3 {
        for number in [0, 2, 4, 3, 1, 5, 6] {
            copy(&fake, &device, &target, host.at(number * step), LARGE);
        }
    }
    assert_eq!(fake.pins().len(), 7);
    assert!(fake.pins().iter().all(|(_, len)| *len == LARGE + 4096 || *len == LARGE));
    // The page that numbers 1 and 2 share goes: both are pinned anew, the others are not.
    invalidate(host.at(2 * step) as usize & !4095, 4096);
    for number in 0..7 {
        copy(&fake, &device, &target, host.at(number * step), LARGE);
    }
    assert_eq!(fake.pins().len(), 9);
    assert_eq!(fake.live_pins(), 7);
}

#[test]
fn a_range_whose_union_with_others_is_refused_is_pinned_alone() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(2 * LARGE as u64, 1).unwrap();
    let host = Pages::new(2 * LARGE);
    copy(&fake, &device, &target, host.addr, LARGE);
    // Memory of the first range becomes unpinnable, without an event.
    fake.refuse_pins_of(host.addr);
    copy(&fake, &device, &target, host.at(LARGE / 2), LARGE);
    assert_eq!(fake.pins()[1], ((host.addr as usize + LARGE / 2) as u64, LARGE));
    assert_eq!(fake.live_pins(), 1, "the first was dropped");
}

#[test]
fn the_least_recently_used_ranges_are_evicted() {
    let (fake, device) = device(CacheLimits { regions: 3, bytes: 1 << 40 });
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(20 * LARGE);
    let use_buffer =
        |number: usize| copy(&fake, &device, &target, host.at(number * 2 * LARGE), LARGE);
    for number in 0..3 {
        use_buffer(number);
    }
    assert_eq!(fake.live_pins(), 3);
    use_buffer(3);
    assert_eq!((fake.live_pins(), fake.pins().len()), (3, 4), "one was evicted");
    // One that is used all the time stays, however many others come.
    for number in 4..9 {
        use_buffer(3);
        use_buffer(number);
    }
    assert_eq!((fake.live_pins(), fake.pins().len()), (3, 9));
    assert_eq!(device.registration_cache().regions, 3);
}

#[test]
fn the_limit_of_bytes_holds_and_longer_ranges_are_not_kept() {
    let (fake, device) = device(CacheLimits { regions: 1000, bytes: 3 * LARGE as u64 });
    let target = device.alloc(8 * LARGE as u64, 1).unwrap();
    let host = Pages::new(20 * LARGE);
    for number in 0..5 {
        copy(&fake, &device, &target, host.at(number * 2 * LARGE), LARGE);
        assert!(device.registration_cache().bytes <= 3 * LARGE as u64);
    }
    assert_eq!(fake.live_pins(), 3);
    copy(&fake, &device, &target, host.at(12 * LARGE), 4 * LARGE);
    assert_eq!(fake.live_pins(), 3, "pinned for its copy only");
    copy(&fake, &device, &target, host.at(16 * LARGE), 3 * LARGE);
    assert_eq!(fake.live_pins(), 1, "all others were evicted");
}

#[test]
fn ranges_that_running_copies_use_are_not_evicted() {
    let (fake, device) = device(CacheLimits { regions: 2, bytes: 1 << 40 });
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(8 * LARGE);
    let running = [0, 1].map(|number| start(&device, &target, host.at(number * 2 * LARGE), LARGE));
    let third = start(&device, &target, host.at(4 * LARGE), LARGE);
    assert_eq!((device.registration_cache().regions, fake.live_pins()), (2, 3));
    fake.finish_all();
    for mut transfer in running.into_iter().chain([third]) {
        assert_eq!(transfer.poll(), Some(Ok(())));
    }
    assert_eq!(fake.live_pins(), 2, "the third was not kept");
}

#[test]
fn when_pins_run_out_the_cache_evicts_its_own() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(20 * LARGE);
    fake.allow_pins(3);
    for number in 0..9 {
        copy(&fake, &device, &target, host.at(number * 2 * LARGE), LARGE);
    }
    assert_eq!(fake.pins().len(), 9, "none had to go through bounce buffers");
    assert_eq!(fake.live_pins(), 3, "as few as need be");
}

/// A copy of `len` bytes at `offset` of memory that is registered as a whole.
fn copy_of_region(
    (fake, device): (&Fake, &Arc<Device>),
    target: &Allocation,
    region: &Arc<HostRegion>,
    (offset, len): (usize, usize),
) {
    let (dst, src) = (Side::Device(target.addr()), Side::Host(region.start().wrapping_add(offset)));
    let segment = Segment { dst, src, len, host_region: Some(Arc::clone(region)) };
    // SAFETY: the buffer lives until the fake hardware is done.
    let mut transfer = unsafe { device.copy(&[segment]) }.unwrap();
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
}

#[test]
fn a_region_too_large_for_the_cache_is_pinned_in_parts() {
    let (fake, device) = device(CacheLimits { regions: 1000, bytes: 4 * LARGE as u64 });
    let target = device.alloc(8 * LARGE as u64, 1).unwrap();
    let host = Pages::new(16 * LARGE);
    let region = HostRegion::record(host.addr, host.len);
    for number in [1, 1, 5, 1] {
        let part = (number * LARGE + 100, LARGE);
        copy_of_region((&fake, &device), &target, &region, part);
        assert!(device.registration_cache().bytes <= 4 * LARGE as u64);
    }
    let part = |number: usize| (host.at(number * LARGE) as u64, LARGE + 4096);
    assert_eq!(fake.pins(), [part(1), part(5)], "and keep it");
    copy_of_region((&fake, &device), &target, &region, (0, 8 * LARGE));
    assert_eq!(fake.pins()[2], (host.addr as u64, 8 * LARGE), "a part that is too much is");
    assert_eq!(fake.live_pins(), 2, "pinned for its copy alone");
}

#[test]
fn a_region_that_cannot_be_pinned_whole_is_pinned_in_parts() {
    for keep in [true, false] {
        let (fake, device) = device(PLENTY);
        if !keep {
            device.pins().cache().switch.get().unwrap().off();
        }
        let target = device.alloc(LARGE as u64, 1).unwrap();
        let host = Pages::new(16 * LARGE);
        let region = HostRegion::record(host.addr, host.len);
        fake.refuse_pins_of(host.at(9 * LARGE));
        for number in [1, 1, 5] {
            copy_of_region((&fake, &device), &target, &region, (number * LARGE, LARGE));
        }
        let part = |number: usize| (host.at(number * LARGE) as u64, LARGE);
        let pins = if keep { vec![part(1), part(5)] } else { vec![part(1), part(1), part(5)] };
        assert_eq!(fake.pin_calls(), pins.len() + 1, "the whole was tried once");
        assert_eq!(fake.pins(), pins);
        assert_eq!(fake.live_pins(), if keep { 2 } else { 0 });
    }
}

#[test]
fn a_region_too_large_to_pin_does_not_empty_the_cache() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(40 * LARGE);
    for number in [0, 2, 4] {
        copy(&fake, &device, &target, host.at(number * LARGE), LARGE);
    }
    fake.allow_pins_up_to(4 * LARGE);
    fake.allow_pins(4);
    let region = HostRegion::record(host.at(8 * LARGE), 32 * LARGE);
    copy_of_region((&fake, &device), &target, &region, (0, LARGE));
    assert_eq!((fake.pins().len(), fake.live_pins()), (4, 4), "its part, and the three");
    copy_of_region((&fake, &device), &target, &region, (2 * LARGE, LARGE));
    assert_eq!((fake.pins().len(), fake.live_pins()), (5, 4), "one was evicted");
}

/// Copies `len` bytes to the device through bounce buffers; how many pins the driver was asked for.
fn bounce(fake: &Fake, device: &Arc<Device>, target: &Allocation, from: *mut u8) -> usize {
    let before = (fake.pin_calls(), fake.pins().len());
    let mut transfer = start(device, target, from, LARGE);
    assert_eq!(fake.shape(fake.queued()[0]).1, LARGE / BOUNCE_LEN, "in pieces");
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert_eq!(fake.pins().len(), before.1);
    fake.pin_calls() - before.0
}

#[test]
fn memory_that_was_refused_is_not_tried_again_until_some_of_it_is_unmapped() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(2 * LARGE);
    copy(&fake, &device, &target, host.addr, 8); // pins the bounce buffers
    fake.refuse_pins(Some(libc::EFAULT));
    assert_eq!(bounce(&fake, &device, &target, host.addr), 1);
    for _ in 0..2 * RETRY {
        assert_eq!(bounce(&fake, &device, &target, host.addr), 0, "the driver said no already");
    }
    assert_eq!(bounce(&fake, &device, &target, host.at(LARGE)), 1, "other memory is tried");
    fake.refuse_pins(None);
    invalidate(host.at(LARGE - 1) as usize, 1);
    copy(&fake, &device, &target, host.addr, LARGE);
    assert_eq!(fake.pins()[1..], [(host.addr as u64, LARGE)]);
    assert_eq!(bounce(&fake, &device, &target, host.at(LARGE)), 0, "its memory is the same still");
}

#[test]
fn memory_that_is_unmapped_while_the_driver_refuses_it_is_tried_again() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(2 * LARGE);
    copy(&fake, &device, &target, host.addr, 8); // pins the bounce buffers
    fake.refuse_pins(Some(libc::EFAULT));
    fake.unmap_while_refusing(Some((host.addr.cast_const(), LARGE)));
    assert_eq!(bounce(&fake, &device, &target, host.addr), 1);
    fake.refuse_pins(None);
    (0..RETRY).for_each(|_| copy(&fake, &device, &target, host.addr, LARGE));
    assert_eq!(fake.pins()[1..], [(host.addr as u64, LARGE)]);

    // Other memory that is unmapped all the time does not have every copy ask the driver.
    fake.refuse_pins(Some(libc::EFAULT));
    let tries = (0..=RETRY).map(|_| bounce(&fake, &device, &target, host.at(LARGE)));
    assert_eq!(tries.sum::<usize>(), 2);
}

#[test]
fn without_a_cache_refused_memory_is_tried_again_now_and_then() {
    let (fake, device) = device(PLENTY);
    device.pins().cache().switch.get().unwrap().off();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(LARGE);
    copy(&fake, &device, &target, host.addr, 8); // pins the bounce buffers
    fake.refuse_pins(Some(libc::EFAULT));
    let tries: usize = (0..=RETRY).map(|_| bounce(&fake, &device, &target, host.addr)).sum();
    assert_eq!(tries, 2);
    // A registration per message is what UCX does without unmap events.
    let region = HostRegion::record(host.addr, LARGE);
    assert!(!region.is_pinned_for(&device));
    assert_eq!(bounce(&fake, &device, &target, host.addr), 0);
}

#[test]
fn a_refusal_for_lack_of_memory_lasts_until_something_is_unpinned() {
    let (fake, device) = device(PLENTY);
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(4 * LARGE);
    copy(&fake, &device, &target, host.addr, 8); // pins the bounce buffers
    let mut running = start(&device, &target, host.addr, LARGE);
    fake.allow_pins(2);
    let calls = fake.pin_calls();
    let second = || drop(start(&device, &target, host.at(2 * LARGE), LARGE));
    second();
    second();
    assert_eq!(fake.pin_calls() - calls, 1, "the running copy still has its pin");
    fake.finish_all();
    assert_eq!(running.poll(), Some(Ok(())));
    device.progress();
    copy(&fake, &device, &target, host.at(2 * LARGE), LARGE);
    assert_eq!(fake.pins().last(), Some(&(host.at(2 * LARGE) as u64, LARGE)));
}

#[test]
fn a_forked_child_leaves_the_pins_of_its_parent_alone() {
    let (fake, device) = device(PLENTY);
    let host = Pages::new(LARGE);
    let cache = Cache::new(Counts::of(device.info()));
    assert!(cache.switch.set(device.pins().cache().switch.get().unwrap()).is_ok());
    let range = host.addr as usize..host.addr as usize + LARGE;
    let inserted = cache.insert((range.start, LARGE), &range, |start, len| {
        let start = std::ptr::with_exposed_provenance_mut(start as usize);
        // SAFETY: the memory stays, and nothing uses the pin.
        unsafe { device.backend().pin(start, len as usize) }.map_err(PinError::Failed)
    });
    drop(inserted.unwrap().expect("pinned"));
    assert!(cache.find(range.start, LARGE).is_some());
    // The child counts in its own copy of the fake driver: its parent's would count the same.
    assert!(holds_in_child(|| {
        let found = cache.find(range.start, LARGE).is_some();
        drop(cache);
        !found && fake.live_pins() == 1
    }));
}

#[test]
fn nothing_is_cached_without_unmap_events_and_the_watch_is_started_once() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let (fake, device) = device(PLENTY);
    let switch = device.pins().cache().switch.get().unwrap();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = Pages::new(LARGE);
    switch.want(
        PLENTY,
        Box::new(|| {
            ASKED.fetch_add(1, Ordering::Relaxed);
            false
        }),
    );
    copy(&fake, &device, &target, host.addr, 1000);
    assert_eq!(ASKED.load(Ordering::Relaxed), 0, "a small copy needs no pin");
    assert!(switch.is_wanted(), "nothing else is known yet");
    for _ in 0..3 {
        copy(&fake, &device, &target, host.addr, LARGE);
        assert_eq!(device.registration_cache().regions, 0);
    }
    assert_eq!(ASKED.load(Ordering::Relaxed), 1);
    assert!(!switch.is_wanted(), "the watch could not begin");
    switch.want(PLENTY, Box::new(|| true));
    copy(&fake, &device, &target, host.addr, LARGE);
    assert_eq!(device.registration_cache().regions, 1);
    switch.off();
    let pins = fake.pins().len();
    copy(&fake, &device, &target, host.addr, LARGE);
    assert_eq!(fake.pins().len(), pins + 1, "what is kept is not used any more");
}
