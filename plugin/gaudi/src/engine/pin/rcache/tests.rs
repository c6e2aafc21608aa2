//! Tests of the cache with copies. The fake hardware keeps using the pages it pinned, whatever the program
//! maps at their address later.

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::refusals::RETRY;
use super::sync::EVENTS;
use super::{Cache, CacheLimits, PinError, Switch, invalidate};
use crate::backend::fake::Fake;
use crate::copy::BOUNCE_LEN;
use crate::process::holds_in_child;
use crate::stats::Counts;
use crate::{Allocation, Device, HostRegion, Segment, Side, Transfer};

const LARGE: usize = 128 * 1024;
const PLENTY: CacheLimits = CacheLimits { regions: 1000, bytes: 1 << 40 };

/// Host memory whose pages can be replaced while a pin keeps the old ones, as with physical pages.
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

    /// Maps other pages at the same address, filled with `byte`, as `munmap` and `mmap` would. Pins keep
    /// the old pages.
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

/// A fake device with a cache of these limits, memory on it, and host memory to copy from.
struct Rig {
    fake: Arc<Fake>,
    device: Arc<Device>,
    target: Allocation,
    host: Pages,
}

impl Rig {
    fn new(limits: CacheLimits, host_len: usize) -> Self {
        let (fake, device) = Fake::device();
        let switch = Box::leak(Box::<Switch>::default());
        switch.enable(limits, Box::new(|| true));
        assert!(device.pins().cache().switch.set(switch).is_ok());
        let target = device.alloc(8 * LARGE as u64, 1).unwrap();
        Self { fake, device, target, host: Pages::new(host_len) }
    }

    fn cache(&self) -> &Cache {
        self.device.pins().cache()
    }

    fn switch(&self) -> &'static Switch {
        self.cache().switch.get().unwrap()
    }

    fn is_cached(&self, offset: usize, len: usize) -> bool {
        self.cache().find(self.host.at(offset) as usize, len).is_some()
    }

    /// Starts a copy to the device.
    fn start(&self, offset: usize, len: usize) -> Transfer {
        self.start_in(&self.target, None, (offset, len))
    }

    fn start_in(
        &self,
        target: &Allocation,
        host_region: Option<&Arc<HostRegion>>,
        (offset, len): (usize, usize),
    ) -> Transfer {
        let (dst, src) = (Side::Device(target.addr()), Side::Host(self.host.at(offset)));
        let segment = Segment { dst, src, len, host_region: host_region.cloned() };
        // SAFETY: tests keep their buffers until the fake hardware is done.
        unsafe { self.device.copy(&[segment]) }.unwrap()
    }

    fn finish(&self, mut transfer: Transfer) {
        self.fake.finish_all();
        assert_eq!(transfer.poll(), Some(Ok(())));
    }

    /// Copies to the device and waits.
    fn copy(&self, offset: usize, len: usize) {
        self.finish(self.start(offset, len));
    }

    /// Copies from memory that is registered as a whole, and waits.
    fn copy_of_region(&self, region: &Arc<HostRegion>, part: (usize, usize)) {
        self.finish(self.start_in(&self.target, Some(region), part));
    }

    /// Copies through bounce buffers and waits. Returns how often the driver was called to pin.
    fn bounce(&self, offset: usize) -> usize {
        let before = (self.fake.pin_calls(), self.fake.pins().len());
        let transfer = self.start(offset, LARGE);
        assert_eq!(self.fake.shape(self.fake.queued()[0]).1, LARGE / BOUNCE_LEN, "in pieces");
        self.finish(transfer);
        assert_eq!(self.fake.pins().len(), before.1);
        self.fake.pin_calls() - before.0
    }

    fn peek(&self) -> Vec<u8> {
        self.fake.peek(self.target.addr(), LARGE)
    }
}

#[test]
fn a_buffer_is_pinned_once_however_often_it_is_copied() {
    let rig = Rig::new(PLENTY, 4 * LARGE);
    for round in 0..10 {
        rig.copy(100, LARGE);
        rig.copy(100 + round, LARGE - round);
        rig.copy(200, 1000);
    }
    let first_page = rig.host.addr as u64;
    assert_eq!(rig.fake.pins(), [(first_page, LARGE + 4096)], "whole pages, once");
    assert_eq!(rig.fake.live_pins(), 1);
    drop((rig.target, rig.device));
    assert_eq!(rig.fake.live_pins(), 0, "the pins go with the card");
}

#[test]
fn new_memory_at_the_same_address_is_pinned_anew() {
    let rig = Rig::new(PLENTY, LARGE);
    rig.host.replace(&rig.fake, 0xaa);
    rig.copy(0, LARGE);
    assert_eq!(rig.peek(), [0xaa; LARGE]);

    // Without an unmap event, the device reads the old pages: this test would notice.
    rig.host.replace(&rig.fake, 0xbb);
    rig.copy(0, LARGE);
    assert_eq!(rig.peek(), [0xaa; LARGE], "the old pages");

    for byte in 0..50 {
        invalidate(rig.host.addr as usize + 4096, 4096);
        rig.host.replace(&rig.fake, byte);
        rig.copy(0, LARGE);
        assert_eq!(rig.peek(), [byte; LARGE]);
    }
    assert_eq!(rig.fake.live_pins(), 1, "nothing piles up");
}

/// With a pin that outlived its pages, a copy would read the old bytes.
#[test]
fn copies_see_new_pages_while_other_threads_invalidate_and_reclaim() {
    let rig = Rig::new(PLENTY, LARGE);
    let (start, stop) = (rig.host.addr as usize, AtomicBool::new(false));
    let device = &rig.device;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                invalidate(start + 8192, 4096);
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
                rig.copy(0, LARGE);
                assert_eq!(rig.peek(), [byte; LARGE]);
            }
        };
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for byte in 0..50 {
                invalidate(start, LARGE);
                rig.host.replace(&rig.fake, byte);
                check(byte);
            }
            // Until invalidations have hit copies often enough.
            while rig.fake.pins().len() < 60 {
                check(49);
            }
        }));
        stop.store(true, Ordering::Relaxed);
        checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    rig.cache().shared.clear();
    assert_eq!((rig.fake.live_pins(), rig.cache().info().regions), (0, 0));
}

/// The thread that has the lock may allocate, and so cause an unmap event.
#[test]
fn an_event_on_the_thread_that_has_the_lock_waits_for_nobody_and_is_not_lost() {
    let rig = Rig::new(PLENTY, 4 * LARGE);
    let events_while_locked = |events: usize| {
        rig.copy(0, LARGE);
        rig.copy(2 * LARGE, LARGE);
        let lock = rig.cache().shared.state();
        for _ in 0..events {
            invalidate(rig.host.addr as usize, 1);
        }
        drop(lock);
        [rig.is_cached(0, LARGE), rig.is_cached(2 * LARGE, LARGE)]
    };
    assert_eq!(events_while_locked(1), [false, true]);
    assert_eq!(events_while_locked(EVENTS), [false, true]);
    assert_eq!(events_while_locked(EVENTS + 1), [false, false], "too many: all is dropped");
    assert_eq!(events_while_locked(2), [false, true], "there is room again");
    assert_eq!(rig.fake.live_pins(), 1);
}

/// This copy is correct, because its memory stays mapped. A later copy that found the pin could be wrong.
#[test]
fn memory_that_is_unmapped_while_it_is_pinned_is_not_kept() {
    let rig = Rig::new(PLENTY, 2 * LARGE);
    let range = rig.host.addr as usize..rig.host.addr as usize + LARGE;
    let pin_while_unmapping = |offset: usize| {
        let pinned = rig.cache().insert((range.start, LARGE), &range, |start, len| {
            invalidate(range.start + offset, 4096);
            let start = std::ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: the memory stays, and nothing uses the pin.
            unsafe { rig.device.backend().pin(start, len as usize) }.map_err(PinError::Failed)
        });
        assert!(pinned.unwrap().is_some());
        rig.is_cached(0, LARGE)
    };
    assert!(!pin_while_unmapping(LARGE - 4096));
    assert_eq!((rig.fake.live_pins(), rig.cache().info().regions), (0, 0));
    assert!(pin_while_unmapping(LARGE), "other memory");
}

#[test]
fn hits_do_not_wait_for_a_thread_that_pins() {
    let rig = Rig::new(PLENTY, 4 * LARGE);
    rig.copy(0, LARGE);
    let other = rig.host.at(2 * LARGE) as usize..rig.host.at(3 * LARGE) as usize;
    let pinned = rig.cache().insert((other.start, LARGE), &other, |start, len| {
        assert!(rig.is_cached(0, LARGE));
        let start = std::ptr::with_exposed_provenance_mut(start as usize);
        // SAFETY: the memory stays, and nothing uses the pin.
        unsafe { rig.device.backend().pin(start, len as usize) }.map_err(PinError::Failed)
    });
    assert!(pinned.unwrap().is_some());
}

#[test]
fn a_running_copy_keeps_the_pages_it_was_started_with() {
    let rig = Rig::new(PLENTY, LARGE);
    let targets = [0, 1].map(|_| rig.device.alloc(LARGE as u64, 1).unwrap());
    rig.host.replace(&rig.fake, 1);
    let mut running = rig.start_in(&targets[0], None, (0, LARGE));
    invalidate(rig.host.addr as usize, LARGE);
    rig.host.replace(&rig.fake, 2);
    let mut next = rig.start_in(&targets[1], None, (0, LARGE));
    assert_eq!(rig.fake.live_pins(), 2, "both copies have theirs");
    rig.fake.finish_all();
    assert_eq!((running.poll(), next.poll()), (Some(Ok(())), Some(Ok(()))));
    assert_eq!(rig.fake.live_pins(), 1, "the old pin went with its last user");
    assert_eq!(rig.fake.peek(targets[0].addr(), LARGE), [1; LARGE]);
    assert_eq!(rig.fake.peek(targets[1].addr(), LARGE), [2; LARGE]);
}

#[test]
fn pins_of_unmapped_memory_are_given_back_without_a_further_copy() {
    let rig = Rig::new(PLENTY, LARGE);
    rig.copy(0, LARGE);
    invalidate(rig.host.addr as usize, LARGE);
    rig.device.progress();
    assert_eq!(rig.fake.live_pins(), 0);
    rig.copy(0, LARGE);
    // Also while the cache is off.
    rig.switch().off();
    invalidate(rig.host.addr as usize, LARGE);
    rig.device.progress();
    assert_eq!(rig.fake.live_pins(), 0);
}

#[test]
fn clearing_gives_back_what_is_idle_now_and_what_is_used_when_its_copy_ends() {
    let rig = Rig::new(PLENTY, 4 * LARGE);
    rig.copy(0, LARGE);
    let mut running = rig.start(2 * LARGE, LARGE);
    rig.switch().off();
    rig.cache().shared.clear();
    assert_eq!((rig.cache().info().regions, rig.fake.live_pins()), (1, 1));
    assert!(!rig.is_cached(2 * LARGE, LARGE), "not for others");
    rig.fake.finish_all();
    assert_eq!(running.poll(), Some(Ok(())));
    assert_eq!((rig.cache().info().regions, rig.fake.live_pins()), (0, 0));
}

#[test]
fn registering_again_finds_the_old_pin() {
    let rig = Rig::new(PLENTY, 16 * LARGE);
    for round in 0..5 {
        let host_region = Some(HostRegion::record(rig.host.addr, rig.host.len));
        let (dst, src) = (Side::Device(rig.target.addr()), Side::Host(rig.host.at(round * LARGE)));
        // SAFETY: the buffer lives until the fake hardware is done.
        let mut transfer =
            unsafe { rig.device.copy(&[Segment { dst, src, len: LARGE, host_region }]) }.unwrap();
        rig.fake.finish_all();
        assert_eq!(transfer.poll(), Some(Ok(())));
    }
    assert_eq!(rig.fake.pins(), [(rig.host.addr as u64, rig.host.len)], "all of the region, once");
}

#[test]
fn a_region_can_be_pinned_before_the_first_copy() {
    let rig = Rig::new(PLENTY, LARGE);
    let prepare = || {
        let region = HostRegion::record(rig.host.addr, rig.host.len);
        // SAFETY: the memory stays until the end.
        unsafe { region.prepare(&rig.device) }
    };
    assert_eq!((prepare(), prepare()), (Ok(true), Ok(true)));
    assert!(rig.is_cached(5, LARGE - 5) && !rig.is_cached(5, LARGE));
    assert_eq!(rig.fake.pins(), [(rig.host.addr as u64, LARGE)]);
    invalidate(rig.host.addr as usize, 1);
    assert!(!rig.is_cached(0, 1));
    rig.fake.refuse_pins(Some(libc::EFAULT));
    assert_eq!(prepare(), Ok(false));
    let calls = rig.fake.pin_calls();
    assert_eq!((prepare(), rig.fake.pin_calls()), (Ok(false), calls), "not tried again");
    rig.switch().off();
    rig.cache().shared.clear();
    rig.fake.refuse_pins(None);
    assert_eq!(prepare(), Ok(true), "by the region itself");
    assert_eq!(rig.fake.live_pins(), 0, "and for as long as that lives");
}

#[test]
fn ranges_that_overlap_become_one_and_ranges_that_touch_do_not() {
    let rig = Rig::new(PLENTY, 3 * LARGE);
    rig.copy(0, LARGE);
    rig.copy(LARGE, LARGE);
    assert_eq!(rig.fake.live_pins(), 2, "they only touch");
    rig.copy(LARGE / 2, 2 * LARGE);
    assert_eq!(rig.fake.pins()[2], (rig.host.addr as u64, 5 * LARGE / 2), "both and the new one");
    assert_eq!(rig.fake.live_pins(), 1);
    rig.copy(0, LARGE);
    rig.copy(LARGE, LARGE);
    rig.copy(LARGE / 2, 2 * LARGE);
    assert_eq!(rig.fake.pins().len(), 3, "all of them hit");
}

/// Buffers from `malloc` share pages. If these were joined, a hundred of them would become one range that is
/// pinned a hundred times.
#[test]
fn buffers_that_share_a_page_with_their_neighbours_stay_apart() {
    let rig = Rig::new(PLENTY, 10 * LARGE);
    let step = LARGE + 16;
    for _ in 0..3 {
        for number in [0, 2, 4, 3, 1, 5, 6] {
            rig.copy(number * step, LARGE);
        }
    }
    assert_eq!(rig.fake.pins().len(), 7);
    assert!(rig.fake.pins().iter().all(|(_, len)| *len == LARGE + 4096 || *len == LARGE));
    // Unmap the page that numbers 1 and 2 share: both are pinned again, the others are not.
    invalidate(rig.host.at(2 * step) as usize & !4095, 4096);
    for number in 0..7 {
        rig.copy(number * step, LARGE);
    }
    assert_eq!(rig.fake.pins().len(), 9);
    assert_eq!(rig.fake.live_pins(), 7);
}

#[test]
fn a_range_whose_union_with_others_is_refused_is_pinned_alone() {
    let rig = Rig::new(PLENTY, 2 * LARGE);
    rig.copy(0, LARGE);
    // Memory of the first range becomes unpinnable, without an event.
    rig.fake.refuse_pins_of(rig.host.addr);
    rig.copy(LARGE / 2, LARGE);
    assert_eq!(rig.fake.pins()[1], ((rig.host.addr as usize + LARGE / 2) as u64, LARGE));
    assert_eq!(rig.fake.live_pins(), 1, "the first was dropped");
}

#[test]
fn the_least_recently_used_ranges_are_evicted() {
    let rig = Rig::new(CacheLimits { regions: 3, bytes: 1 << 40 }, 20 * LARGE);
    let use_buffer = |number: usize| rig.copy(number * 2 * LARGE, LARGE);
    for number in 0..3 {
        use_buffer(number);
    }
    assert_eq!(rig.fake.live_pins(), 3);
    use_buffer(3);
    assert_eq!((rig.fake.live_pins(), rig.fake.pins().len()), (3, 4), "one was evicted");
    // A range that is used all the time is not evicted, however many others come.
    for number in 4..9 {
        use_buffer(3);
        use_buffer(number);
    }
    assert_eq!((rig.fake.live_pins(), rig.fake.pins().len()), (3, 9));
    assert_eq!(rig.cache().info().regions, 3);
}

#[test]
fn the_limit_of_bytes_holds_and_longer_ranges_are_not_kept() {
    let rig = Rig::new(CacheLimits { regions: 1000, bytes: 3 * LARGE as u64 }, 20 * LARGE);
    for number in 0..5 {
        rig.copy(number * 2 * LARGE, LARGE);
        assert!(rig.cache().info().bytes <= 3 * LARGE as u64);
    }
    assert_eq!(rig.fake.live_pins(), 3);
    rig.copy(12 * LARGE, 4 * LARGE);
    assert_eq!(rig.fake.live_pins(), 3, "pinned for its copy only");
    rig.copy(16 * LARGE, 3 * LARGE);
    assert_eq!(rig.fake.live_pins(), 1, "all others were evicted");
}

#[test]
fn ranges_that_running_copies_use_are_not_evicted() {
    let rig = Rig::new(CacheLimits { regions: 2, bytes: 1 << 40 }, 8 * LARGE);
    let running = [0, 1].map(|number| rig.start(number * 2 * LARGE, LARGE));
    let third = rig.start(4 * LARGE, LARGE);
    assert_eq!((rig.cache().info().regions, rig.fake.live_pins()), (2, 3));
    rig.fake.finish_all();
    for mut transfer in running.into_iter().chain([third]) {
        assert_eq!(transfer.poll(), Some(Ok(())));
    }
    assert_eq!(rig.fake.live_pins(), 2, "the third was not kept");
}

#[test]
fn when_pins_run_out_the_cache_evicts_its_own() {
    let rig = Rig::new(PLENTY, 20 * LARGE);
    rig.fake.allow_pins(3);
    for number in 0..9 {
        rig.copy(number * 2 * LARGE, LARGE);
    }
    assert_eq!(rig.fake.pins().len(), 9, "none had to go through bounce buffers");
    assert_eq!(rig.fake.live_pins(), 3, "as few as need be");
}

#[test]
fn a_region_too_large_for_the_cache_is_pinned_in_parts() {
    let rig = Rig::new(CacheLimits { regions: 1000, bytes: 4 * LARGE as u64 }, 16 * LARGE);
    let region = HostRegion::record(rig.host.addr, rig.host.len);
    for number in [1, 1, 5, 1] {
        let part = (number * LARGE + 100, LARGE);
        rig.copy_of_region(&region, part);
        assert!(rig.cache().info().bytes <= 4 * LARGE as u64);
    }
    let part = |number: usize| (rig.host.at(number * LARGE) as u64, LARGE + 4096);
    assert_eq!(rig.fake.pins(), [part(1), part(5)], "and keep it");
    rig.copy_of_region(&region, (0, 8 * LARGE));
    assert_eq!(rig.fake.pins()[2], (rig.host.addr as u64, 8 * LARGE), "a part that is too much is");
    assert_eq!(rig.fake.live_pins(), 2, "pinned for its copy alone");
}

#[test]
fn a_region_that_cannot_be_pinned_whole_is_pinned_in_parts() {
    for keep in [true, false] {
        let rig = Rig::new(PLENTY, 16 * LARGE);
        if !keep {
            rig.switch().off();
        }
        let region = HostRegion::record(rig.host.addr, rig.host.len);
        rig.fake.refuse_pins_of(rig.host.at(9 * LARGE));
        for number in [1, 1, 5] {
            rig.copy_of_region(&region, (number * LARGE, LARGE));
        }
        let part = |number: usize| (rig.host.at(number * LARGE) as u64, LARGE);
        let pins = if keep { vec![part(1), part(5)] } else { vec![part(1), part(1), part(5)] };
        assert_eq!(rig.fake.pin_calls(), pins.len() + 1, "the whole was tried once");
        assert_eq!(rig.fake.pins(), pins);
        assert_eq!(rig.fake.live_pins(), if keep { 2 } else { 0 });
    }
}

#[test]
fn a_region_too_large_to_pin_does_not_empty_the_cache() {
    let rig = Rig::new(PLENTY, 40 * LARGE);
    for number in [0, 2, 4] {
        rig.copy(number * LARGE, LARGE);
    }
    rig.fake.allow_pins_up_to(4 * LARGE);
    rig.fake.allow_pins(4);
    let region = HostRegion::record(rig.host.at(8 * LARGE), 32 * LARGE);
    rig.copy_of_region(&region, (8 * LARGE, LARGE));
    assert_eq!((rig.fake.pins().len(), rig.fake.live_pins()), (4, 4), "its part, and the three");
    rig.copy_of_region(&region, (10 * LARGE, LARGE));
    assert_eq!((rig.fake.pins().len(), rig.fake.live_pins()), (5, 4), "one was evicted");
}

#[test]
fn memory_that_was_refused_is_not_tried_again_until_some_of_it_is_unmapped() {
    let rig = Rig::new(PLENTY, 2 * LARGE);
    rig.copy(0, 8); // pins the bounce buffers
    rig.fake.refuse_pins(Some(libc::EFAULT));
    assert_eq!(rig.bounce(0), 1);
    for _ in 0..2 * RETRY {
        assert_eq!(rig.bounce(0), 0, "the driver said no already");
    }
    assert_eq!(rig.bounce(LARGE), 1, "other memory is tried");
    rig.fake.refuse_pins(None);
    invalidate(rig.host.at(LARGE - 1) as usize, 1);
    rig.copy(0, LARGE);
    assert_eq!(rig.fake.pins()[1..], [(rig.host.addr as u64, LARGE)]);
    assert_eq!(rig.bounce(LARGE), 0, "its memory is the same still");
}

#[test]
fn memory_that_is_unmapped_while_the_driver_refuses_it_is_tried_again() {
    let rig = Rig::new(PLENTY, 2 * LARGE);
    rig.copy(0, 8); // pins the bounce buffers
    rig.fake.refuse_pins(Some(libc::EFAULT));
    rig.fake.unmap_while_refusing(Some((rig.host.addr.cast_const(), LARGE)));
    assert_eq!(rig.bounce(0), 1);
    rig.fake.refuse_pins(None);
    (0..RETRY).for_each(|_| rig.copy(0, LARGE));
    assert_eq!(rig.fake.pins()[1..], [(rig.host.addr as u64, LARGE)]);

    // Unmap events of other memory do not make every copy call the driver.
    rig.fake.refuse_pins(Some(libc::EFAULT));
    let tries = (0..=RETRY).map(|_| rig.bounce(LARGE));
    assert_eq!(tries.sum::<usize>(), 2);
}

#[test]
fn without_a_cache_refused_memory_is_tried_again_now_and_then() {
    let rig = Rig::new(PLENTY, LARGE);
    rig.switch().off();
    rig.copy(0, 8); // pins the bounce buffers
    rig.fake.refuse_pins(Some(libc::EFAULT));
    let tries: usize = (0..=RETRY).map(|_| rig.bounce(0)).sum();
    assert_eq!(tries, 2);
    // Without unmap events, UCX registers for every message.
    let region = HostRegion::record(rig.host.addr, LARGE);
    assert!(!region.is_pinned_for(&rig.device));
    assert_eq!(rig.bounce(0), 0);
}

#[test]
fn a_refusal_for_lack_of_memory_lasts_until_something_is_unpinned() {
    let rig = Rig::new(PLENTY, 4 * LARGE);
    rig.copy(0, 8); // pins the bounce buffers
    let mut running = rig.start(0, LARGE);
    rig.fake.allow_pins(2);
    let calls = rig.fake.pin_calls();
    let second = || drop(rig.start(2 * LARGE, LARGE));
    second();
    second();
    assert_eq!(rig.fake.pin_calls() - calls, 1, "the running copy still has its pin");
    rig.fake.finish_all();
    assert_eq!(running.poll(), Some(Ok(())));
    rig.device.progress();
    rig.copy(2 * LARGE, LARGE);
    assert_eq!(rig.fake.pins().last(), Some(&(rig.host.at(2 * LARGE) as u64, LARGE)));
}

#[test]
fn a_copy_that_pins_for_itself_does_not_end_a_lack_of_memory() {
    const SHORTER: usize = LARGE - 8192;
    let rig = Rig::new(PLENTY, 2 * LARGE);
    rig.switch().off();
    rig.copy(0, 8); // pins the bounce buffers
    rig.fake.allow_pins_up_to(SHORTER);
    assert_eq!(rig.bounce(0), 1);
    for _ in 0..3 {
        rig.copy(LARGE, SHORTER);
        assert_eq!(rig.bounce(0), 0, "no less is pinned than before");
    }
    assert_eq!(rig.fake.pins().len(), 1 + 3);
}

#[test]
fn a_forked_child_leaves_the_pins_of_its_parent_alone() {
    let rig = Rig::new(PLENTY, LARGE);
    let cache = Cache::new(Counts::of(rig.device.info()));
    assert!(cache.switch.set(rig.switch()).is_ok());
    let range = rig.host.addr as usize..rig.host.addr as usize + LARGE;
    let inserted = cache.insert((range.start, LARGE), &range, |start, len| {
        let start = std::ptr::with_exposed_provenance_mut(start as usize);
        // SAFETY: the memory stays, and nothing uses the pin.
        unsafe { rig.device.backend().pin(start, len as usize) }.map_err(PinError::Failed)
    });
    drop(inserted.unwrap().expect("pinned"));
    assert!(cache.find(range.start, LARGE).is_some());
    // The child checks its own copy of the fake driver: the parent's would show the same number.
    assert!(holds_in_child(|| {
        let found = cache.find(range.start, LARGE).is_some();
        drop(cache);
        !found && rig.fake.live_pins() == 1
    }));
}

#[test]
fn a_child_forked_while_a_thread_has_the_lock_does_not_wait_for_it() {
    let rig = Rig::new(PLENTY, LARGE);
    rig.copy(0, LARGE);
    let state = rig.cache().shared.state();
    assert!(holds_in_child(|| {
        // Visits all caches: the child has none.
        super::clear();
        true
    }));
    drop(state);
}

#[test]
fn nothing_is_cached_without_unmap_events_and_the_watch_is_started_once() {
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    let rig = Rig::new(PLENTY, LARGE);
    let switch = rig.switch();
    switch.enable(
        PLENTY,
        Box::new(|| {
            ASKED.fetch_add(1, Ordering::Relaxed);
            false
        }),
    );
    rig.copy(0, 1000);
    assert_eq!(ASKED.load(Ordering::Relaxed), 0, "a small copy needs no pin");
    assert!(switch.is_wanted(), "nothing else is known yet");
    for _ in 0..3 {
        rig.copy(0, LARGE);
        assert_eq!(rig.cache().info().regions, 0);
    }
    assert_eq!(ASKED.load(Ordering::Relaxed), 1);
    assert!(!switch.is_wanted(), "the watch could not begin");
    switch.enable(PLENTY, Box::new(|| true));
    rig.copy(0, LARGE);
    assert_eq!(rig.cache().info().regions, 1);
    switch.off();
    let pins = rig.fake.pins().len();
    rig.copy(0, LARGE);
    assert_eq!(rig.fake.pins().len(), pins + 1, "what is kept is not used any more");
}
