//! Device memory on the software Gaudi2: allocation, detection, windows and exports.

mod machine;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};

use gaudi::{
    Allocation, Device, DeviceAddr, DeviceChoice, ErrorKind, ExportCall, WindowEvent, runtime,
};
use machine::{Footprint, alone, assert_same, driver_page, fresh, pattern, write};
use soft_gaudi::dmabuf::Exported;

fn setup() -> Arc<Device> {
    machine::set_up("gaudi2");
    fresh()
}

/// Bytes of an exported dma-buf, read without any part of the engine.
fn read_export(export: &Exported, mut offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len);
    for range in export.ranges() {
        let take = range.len.saturating_sub(offset).min((len - bytes.len()) as u64);
        if take > 0 {
            // SAFETY: inside the mapped range; the test does not write at the same time.
            let part = unsafe {
                std::slice::from_raw_parts(range.ptr.add(offset as usize), take as usize)
            };
            bytes.extend_from_slice(part);
        }
        offset = offset.saturating_sub(range.len);
    }
    bytes
}

#[test]
fn small_allocations_share_the_drivers_page_but_no_4k_page() {
    let device = setup();
    let tenants: Vec<Allocation> = (0..1000).map(|at| device.alloc(1 + at, 1).unwrap()).collect();
    assert_eq!(device.memory().reserved, driver_page());
    assert_eq!(device.memory().allocations, 1000);
    let mut pages: Vec<u64> = tenants.iter().map(|tenant| tenant.addr().0 >> 12).collect();
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages.len(), 1000);
    drop(tenants);
    let memory = device.memory();
    assert_eq!((memory.used, memory.allocations), (0, 0));
    assert_eq!(memory.reserved, driver_page(), "one page is kept for the next tenant");
}

#[test]
fn pages_return_to_the_driver_and_a_full_card_is_out_of_memory() {
    let device = setup();
    let total = device.memory().total;
    let all = device.alloc(total, 1).unwrap();
    assert_eq!(device.memory().reserved, total);
    let error = device.alloc(1, 1).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::OutOfMemory, Some(libc::ENOMEM)));
    assert!(error.to_string().contains("free device memory"), "{error}");
    drop(all);
    assert_eq!(device.memory().reserved, 0, "more than a page is not kept");

    // The spare page must not keep an allocation from succeeding that needs all pages.
    drop(device.alloc(1, 1).unwrap());
    assert_eq!(device.memory().reserved, driver_page());
    device.alloc(total, 1).unwrap();

    for (len, align) in [(0, 1), (1, 3), (1, 0)] {
        assert_eq!(device.alloc(len, align).unwrap_err().kind(), ErrorKind::InvalidParams);
    }
    for len in [total + 1, u64::MAX] {
        assert_eq!(device.alloc(len, 1).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}

#[test]
fn addresses_between_two_pages_in_use_can_be_used_again() {
    let device = setup();
    let mut pages: Vec<_> = (0..4).map(|_| device.alloc(driver_page(), 1).unwrap()).collect();
    // The kept spare first, then the hole.
    drop(pages.remove(3));
    drop(pages.remove(1));
    let reserved = device.memory().reserved;
    assert_eq!(reserved, 3 * driver_page());
    let more: Vec<_> = (0..3).map(|_| device.alloc(driver_page(), 1).unwrap()).collect();
    assert_eq!(device.memory().reserved, 5 * driver_page());
    drop((pages, more));
}

#[test]
fn observers_are_notified_of_a_window_before_its_first_address_and_of_its_end() {
    let device = setup();
    let index = device.info().index;
    type Notified = Arc<Mutex<Vec<(bool, u64, u64)>>>;
    let subscribe = |late: bool| {
        let notified = Notified::default();
        let record = Arc::clone(&notified);
        runtime().subscribe(Box::new(move |event| {
            let (opened, window) = match event {
                WindowEvent::Opened(window) => (true, window),
                WindowEvent::Retired(window) => (false, window),
                other => panic!("the application mapped nothing: {other:?}"),
            };
            if window.info.index == index {
                // Calling back is allowed. No address is live yet, or any more.
                let device = runtime().device(window.device);
                let live = device.map_or(0, |device| device.memory().allocations);
                assert!(live == 0 || late, "notified before the first address");
                record.lock().unwrap().push((opened, window.start.0, window.len));
            }
        }));
        notified
    };
    let early = subscribe(false);
    assert!(early.lock().unwrap().is_empty(), "an open card without memory has no window yet");
    let allocation = device.alloc(1, 1 << 20).unwrap();
    let window = device.window().clone();
    let opened = (true, window.start.0, window.len);
    assert_eq!(*early.lock().unwrap(), [opened]);
    assert!(window.range().contains(&allocation.addr().0));
    let late = subscribe(true);
    assert_eq!(*late.lock().unwrap(), [opened]);
    let another = device.alloc(1, 1).unwrap();
    assert_eq!(early.lock().unwrap().len(), 1, "notified once");
    drop((allocation, another, device));
    let retired = (false, window.start.0, window.len);
    assert_eq!(*early.lock().unwrap(), [opened, retired]);

    let again = machine::open(index);
    let _allocation = again.alloc(1, 1).unwrap();
    assert_eq!(again.window().start, window.start, "the same card has the same window");
    assert_eq!(*late.lock().unwrap(), [opened, retired, opened]);
}

#[test]
fn a_card_is_shared_in_the_process_and_closed_with_the_last_handle() {
    let device = setup();
    let index = device.info().index;
    let same = machine::open(index);
    assert!(Arc::ptr_eq(&device, &same));
    let by_bus = runtime().open(&DeviceChoice::Bus(device.info().bus_id.clone())).unwrap();
    assert!(Arc::ptr_eq(&device, &by_bus));
    let allocation = device.alloc(100, 1).unwrap();
    let id = device.id();
    drop((device, same, by_bus));
    assert!(runtime().device(id).is_some(), "an allocation keeps the card");
    drop(allocation);
    assert!(runtime().device(id).is_none(), "closed");
    assert_ne!(machine::open(index).id(), id, "a new opening is a new device");
}

#[test]
fn threads_that_open_and_close_one_card_never_find_it_busy() {
    machine::set_up("gaudi2");
    let index = { fresh().info().index };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                for _ in 0..20 {
                    let device = machine::open(index);
                    drop(device.alloc(1, 1).unwrap());
                }
            });
        }
    });
}

#[test]
fn an_export_reaches_the_right_bytes_at_its_offset() {
    let device = setup();
    let _before = device.alloc(10_000, 1).unwrap();
    let allocation = device.alloc(100_000, 1).unwrap();
    let bytes = pattern(100_000, 7);
    write(&device, allocation.addr(), &bytes);
    for (start, len) in [(0, 100_000), (1, 1), (4095, 70_001), (99_999, 1)] {
        let addr = DeviceAddr(allocation.addr().0 + start as u64);
        let (fd, offset) = device.export(addr, len as u64).unwrap();
        // SAFETY: a plain question about an open descriptor.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        let export = Exported::from_fd(fd.as_fd()).unwrap();
        assert_eq!(export.size(), driver_page(), "tenants share the page's export");
        assert_same(&read_export(&export, offset, len), &bytes[start..start + len], "shared");

        let (fd, offset) = device.export_alone(addr, len as u64).unwrap();
        let export = Exported::from_fd(fd.as_fd()).unwrap();
        let rounded = ((start + len).next_multiple_of(4096) - start / 4096 * 4096) as u64;
        assert_eq!(export.size(), rounded, "not a byte more than the 4 KiB pages");
        assert_same(&read_export(&export, offset, len), &bytes[start..start + len], "alone");
    }
    for (addr, len) in [(allocation.addr().0 - 1, 2), (allocation.addr().0, 100_001), (4096, 1)] {
        let error = device.export(DeviceAddr(addr), len).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidParams, "{error}");
    }
}

#[test]
fn either_driver_call_exports_the_same_bytes() {
    let device = setup();
    let allocation = device.alloc(5000, 1).unwrap();
    let bytes = pattern(5000, 3);
    write(&device, allocation.addr(), &bytes);
    for call in [ExportCall::Mapped, ExportCall::Whole] {
        let (fd, offset) = device.export_with(allocation.addr(), 5000, Some(call)).unwrap();
        let export = Exported::from_fd(fd.as_fd()).unwrap();
        assert_same(&read_export(&export, offset, 5000), &bytes, "exported");
    }
}

#[test]
fn a_page_that_is_still_exported_stays_usable() {
    let device = setup();
    let large = device.alloc(2 * driver_page(), 1).unwrap();
    let (fd, _) = device.export(large.addr(), 1).unwrap();
    drop(large);
    let reserved = device.memory().reserved;
    assert_eq!(reserved, 2 * driver_page(), "the driver is not asked to take it back");
    let again = device.alloc(2 * driver_page(), 1).unwrap();
    assert_eq!(device.memory().reserved, reserved, "the same pages are used again");
    drop(again);
    assert_eq!(device.memory().reserved, reserved);
    let error = device.alloc(device.memory().total, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    drop(fd);
    // Where memory is short, the driver is asked.
    device.alloc(device.memory().total, 1).unwrap();
}

#[test]
fn closing_a_card_whose_memory_is_still_exported_is_no_failure() {
    // Failures are of the whole process: this test must not share it.
    alone!(1);
    let device = setup();
    let index = device.info().index;
    let allocation = device.alloc(10_000, 1).unwrap();
    let bytes = pattern(10_000, 7);
    write(&device, allocation.addr(), &bytes);
    let (abroad, _) = device.export_alone(allocation.addr(), allocation.len()).unwrap();
    drop((allocation, device));
    assert_eq!(runtime().take_drop_errors(), [], "a peer may be slower than we");
    // The peer's bytes are the driver's to keep, and the card with them.
    let kept = Exported::from_fd(abroad.as_fd()).unwrap();
    assert_same(&read_export(&kept, 0, bytes.len()), &bytes, "what a peer still has open");
    drop(kept);
    let busy = runtime().open(&DeviceChoice::Index(index)).unwrap_err();
    assert_eq!(busy.errno(), Some(libc::EBUSY), "{busy}");
    drop(abroad);
    machine::open(index);
}

#[test]
fn cycles_of_allocation_copy_and_export_leave_nothing_behind() {
    // Counts are of the whole process: this test must not share it.
    alone!(1);
    let device = setup();
    let bytes = pattern(200_000, 1);
    let cycle = |round: usize| {
        let len = 1 + (round * 7919) % bytes.len();
        let allocation = device.alloc(len as u64, 1).unwrap();
        write(&device, allocation.addr(), &bytes[..len]);
        let shared = device.export(allocation.addr(), len as u64).unwrap();
        let alone = device.export_alone(allocation.addr(), len as u64).unwrap();
        drop(allocation);
        drop((shared, alone));
    };
    // Everything that is made once and kept is there after a few rounds.
    (0..50).for_each(cycle);
    let (before, memory) = (Footprint::now(), device.memory());
    (0..2000).for_each(cycle);
    before.assert_flat("allocation, copy and export");
    assert_eq!(device.memory(), memory);

    let index = device.info().index;
    drop(device);
    let reopen = || {
        let device = machine::open(index);
        let allocation = device.alloc(100_000, 1).unwrap();
        write(&device, allocation.addr(), &bytes[..100_000]);
    };
    (0..3).for_each(|_| reopen());
    let before = Footprint::now();
    (0..40).for_each(|_| reopen());
    before.assert_flat("open and close");
    assert_eq!(runtime().take_drop_errors(), [], "the driver had nothing to complain about");
}
