//! The first generation on the software Gaudi: physical addresses, kernel command buffers, one card
//! per process.

mod machine;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaudi::{Device, DeviceAddr, DeviceChoice, Generation, Options, Side, runtime};
use machine::{assert_same, pattern, read, write};
use soft_gaudi::dmabuf::Exported;

/// Only one card at a time may be open in a process of this generation.
fn setup() -> (MutexGuard<'static, ()>, Arc<Device>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    machine::set_up("gaudi1");
    (guard, machine::open(0))
}

/// Whether registers may be mapped.
fn permit_registers(permitted: bool) {
    runtime().configure(Options { register_access: Some(permitted), ..Options::default() });
}

#[test]
fn copies_at_odd_sizes_in_all_directions() {
    let (_guard, device) = setup();
    assert_eq!(device.info().generation, Generation::Gaudi);
    for (round, len) in [1, 129, 65536, 65537, 3_000_001].into_iter().enumerate() {
        let bytes = pattern(len, round as u64);
        let source = device.alloc(len as u64 + 100, 1).unwrap();
        let target = device.alloc(len as u64 + 100, 1).unwrap();
        device.fill(target.addr(), target.len(), 0xee).unwrap();
        write(&device, DeviceAddr(source.addr().0 + 3), &bytes);
        let dst = Side::Device(DeviceAddr(target.addr().0 + 7));
        let src = Side::Device(DeviceAddr(source.addr().0 + 3));
        // SAFETY: no host memory is involved.
        unsafe { device.copy_blocking(dst, src, len) }.unwrap();
        let mut expected = vec![0xee; len + 100];
        expected[7..7 + len].copy_from_slice(&bytes);
        assert_same(&read(&device, target.addr(), len + 100), &expected, "copied");
    }
}

#[test]
fn no_host_pointer_can_equal_a_device_address() {
    let (_guard, device) = setup();
    let allocation = device.alloc(1 << 20, 1).unwrap();
    let addr = allocation.addr().0;
    assert!(device.window().range().contains(&addr));
    assert_eq!(device.memory().reserved, device.memory().total, "the pool is the allocator");
    let map_there = || {
        // SAFETY: no-replace: touches no existing mapping.
        unsafe {
            libc::mmap(
                addr as *mut _,
                4096,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        }
    };
    assert_eq!(map_there(), libc::MAP_FAILED);
    drop((allocation, device));
    assert_eq!(map_there() as u64, addr, "free again when the card is closed");
    // SAFETY: the mapping just made.
    unsafe { libc::munmap(addr as *mut _, 4096) };
}

#[test]
fn a_second_card_is_refused_with_the_reason() {
    let (_guard, _device) = setup();
    let error = runtime().open(&DeviceChoice::Index(1)).unwrap_err();
    assert!(
        error.is_unsupported() && error.to_string().contains("one first-generation"),
        "{error}"
    );
}

#[test]
fn exports_have_the_right_bytes() {
    let (_guard, device) = setup();
    let allocation = device.alloc(50_000, 1).unwrap();
    let bytes = pattern(50_000, 4);
    write(&device, allocation.addr(), &bytes);
    let addr = DeviceAddr(allocation.addr().0 + 5000);
    for (fd, offset) in [device.export(addr, 100).unwrap(), device.export_alone(addr, 100).unwrap()]
    {
        let export = Exported::from_fd(fd.as_fd()).unwrap();
        let [range] = export.ranges() else { panic!("physical memory is one range") };
        // SAFETY: inside the mapped range; not written to meanwhile.
        let found = unsafe { std::slice::from_raw_parts(range.ptr.add(offset as usize), 100) };
        assert_same(found, &bytes[5000..5100], "exported");
    }
}

#[test]
fn the_driver_maps_no_register_block_of_this_generation() {
    let (_guard, device) = setup();
    permit_registers(true);
    let refused = device.map_block(DeviceAddr(0x7f_fc00_0000)).unwrap_err();
    permit_registers(false);
    assert_eq!(refused.errno(), Some(libc::EPERM), "{refused}");
    assert_eq!(refused.kind(), gaudi::ErrorKind::PermissionDenied, "{refused}");
}

#[test]
fn a_card_of_the_application_cannot_be_lent() {
    let (_guard, device) = setup();
    let bus_id = device.info().bus_id.clone();
    drop(device);
    let library = hl_thunk::Library::load().unwrap();
    let card = hl_thunk::Device::open(&library, bus_id.as_str()).unwrap();
    let refused = runtime().lend(card.as_fd()).unwrap_err();
    assert!(refused.is_unsupported() && refused.to_string().contains("allocator"), "{refused}");
}
