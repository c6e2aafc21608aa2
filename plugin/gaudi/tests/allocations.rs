//! How often a copy calls the allocator.

mod machine;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use gaudi::{Device, HostRegion, Segment, Side, runtime};

/// Counts what this thread asks for. The driver library has an allocator of its own.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's, which is only counted in addition.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as for this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as for this function.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of the hundredth call, by when everything that is made once has been made.
fn steady(mut call: impl FnMut()) -> usize {
    (0..99).for_each(|_| call());
    let before = COUNT.get();
    call();
    COUNT.get() - before
}

fn copy(device: &Arc<Device>, segment: &Segment) {
    // SAFETY: the memory lives until the copy has ended, which is waited for.
    let mut transfer = unsafe { device.copy(std::slice::from_ref(segment)) }.expect("room");
    while transfer.poll().is_none() {}
}

#[test]
fn a_short_copy_allocates_nothing() {
    machine::set_up("gaudi2");
    let device = machine::fresh();
    let target = device.alloc(64 << 10, 1).expect("memory");
    let mut host = vec![7_u8; 64 << 10];
    let (there, here) = (target.addr().0, host.as_mut_ptr() as u64);
    for len in [1, 8, 8 << 10, 64 << 10] {
        // SAFETY: the buffer lives across the calls.
        let put = || unsafe { runtime().copy(there, here, len) }.unwrap().unwrap();
        assert_eq!(steady(put), 0, "put of {len}");
        // SAFETY: as above.
        let get = || unsafe { runtime().copy(here, there, len) }.unwrap().unwrap();
        assert_eq!(steady(get), 0, "get of {len}");
    }
}

#[test]
fn a_transfer_allocates_its_submission_and_its_slot() {
    machine::set_up("gaudi2");
    let device = machine::fresh();
    let target = device.alloc(1 << 20, 1).expect("memory");
    let mut host = vec![7_u8; 1 << 20];
    let region = HostRegion::record(host.as_mut_ptr(), host.len());
    let (there, here) = (Side::Device(target.addr()), Side::Host(host.as_mut_ptr()));
    let segment = |len, host_region| Segment { dst: there, src: here, len, host_region };
    let within = Side::Device(gaudi::DeviceAddr(target.addr().0 + (1 << 19)));

    let pinned = segment(1 << 20, Some(region));
    assert_eq!(steady(|| copy(&device, &pinned)), 1, "pinned");
    let across = Segment { src: within, ..segment(1 << 19, None) };
    assert_eq!(steady(|| copy(&device, &across)), 1, "within the card");
    // The submission and the slot.
    assert_eq!(steady(|| copy(&device, &segment(8, None))), 2, "through a bounce slot");
}
