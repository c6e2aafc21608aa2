//! Copies on the software Gaudi2, every byte checked, with poisoned surroundings.

mod machine;
mod poison;

use std::sync::Arc;

use gaudi::{Device, DeviceAddr, ErrorKind, HostRegion, Segment, Side, SubmitError, runtime};
use machine::{assert_same, fresh, pattern, read, write};
use poison::{MARGIN, POISON, at, framed, poisoned};

/// Around the interesting borders: one packet, the bounce slot (64 KiB), pinned, several slots.
const SIZES: [usize; 14] =
    [1, 2, 7, 8, 63, 127, 129, 4095, 4097, 65535, 65536, 65537, 1_000_003, (5 << 20) + 13];

fn setup() -> Arc<Device> {
    machine::set_up("gaudi2");
    fresh()
}

fn segment(dst: Side, src: Side, len: usize) -> Segment {
    Segment { dst, src, len, host_region: None }
}

#[test]
fn copies_by_address_detect_host_and_device_memory() {
    let device = setup();
    for (round, len) in SIZES.into_iter().enumerate() {
        let offset = 1 + 37 * round % MARGIN;
        let (one, two) = (poisoned(&device, len), poisoned(&device, len));
        let sent = pattern(len, round as u64);
        let mut back = vec![POISON; len];
        let (there, on) = (at(&one, offset).0, at(&two, offset).0);
        // SAFETY: the buffers live across the calls, and nothing else uses them.
        unsafe {
            runtime().copy(there, sent.as_ptr() as u64, len).unwrap().unwrap();
            runtime().copy(on, there, len).unwrap().unwrap();
            runtime().copy(back.as_mut_ptr() as u64, on, len).unwrap().unwrap();
        }
        assert_same(&back, &sent, "there, across and back");
        for allocation in [&one, &two] {
            let whole = read(&device, allocation.addr(), len + 2 * MARGIN);
            assert_same(&whole, &framed(&sent, offset), "nothing outside it");
        }
    }
}

#[test]
fn addresses_that_no_gaudi_can_copy_are_refused() {
    let device = setup();
    let target = device.alloc(64, 1).unwrap();
    let (addr, mut host) = (target.addr().0, [0_u8; 128]);
    let [low, high] = [0, 64].map(|offset| host[offset..].as_mut_ptr() as u64);
    // SAFETY: the buffer lives across the calls.
    unsafe {
        assert!(runtime().copy(low, high, 64).is_none(), "both are host memory");
        assert!(runtime().copy(addr, high, 65).is_none(), "longer than the allocation");
        let beside = device.alloc(64, 1).unwrap();
        let straddling = beside.addr().0 + 60;
        let error = runtime().copy(addr, straddling, 8).unwrap().unwrap_err();
        assert!(error.to_string().contains("was given as host memory"), "{error}");
        drop(beside);
        let error = runtime().copy(addr, straddling, 8).unwrap().unwrap_err();
        assert!(error.to_string().contains("device memory that was freed"), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidParams);
        let error = runtime().copy(addr, 0, 8).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidParams);
        runtime().copy(addr, low, 0).unwrap().unwrap();
    }
}

/// A freed device address is not found, and could be taken for a host pointer: that must be an error, not
/// a fault.
#[test]
fn a_freed_device_address_taken_for_a_host_pointer_is_refused() {
    let device = setup();
    let live = poisoned(&device, 4096);
    let freed = device.alloc(8192, 1).unwrap();
    let stale = Side::Host(std::ptr::without_provenance_mut(freed.addr().0 as usize));
    drop(freed);
    for len in [1, 8, 4096] {
        // SAFETY: that the host side is no memory is what is tested; it is not touched.
        let error = unsafe { device.copy_blocking(Side::Device(live.addr()), stale, len) };
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidParams);
        let segments = [segment(stale, Side::Device(live.addr()), len)];
        // SAFETY: as above.
        let refused = unsafe { device.copy(&segments) };
        assert!(matches!(refused, Err(SubmitError::Failed(_))), "{refused:?}");
    }
}

#[test]
fn between_two_devices_of_one_process() {
    let (one, two) = (setup(), fresh());
    for (round, len) in [1, 4097, 1 << 20, (1 << 20) + 1, (19 << 20) + 5].into_iter().enumerate() {
        let source = poisoned(&one, len);
        let target = poisoned(&two, len);
        let bytes = pattern(len, round as u64);
        write(&one, at(&source, 9), &bytes);
        let (dst, src) = (Side::Device(at(&target, 17)), Side::Device(at(&source, 9)));
        // Whichever of them is asked, the bytes arrive.
        for asked in [&one, &two] {
            write(&two, target.addr(), &vec![POISON; len + 2 * MARGIN]);
            // SAFETY: no host memory is involved.
            unsafe { asked.copy_blocking(dst, src, len) }.unwrap();
            let whole = read(&two, target.addr(), len + 2 * MARGIN);
            assert_same(&whole, &framed(&bytes, 17), "copied across");
        }
    }
}

#[test]
fn one_transfer_may_touch_several_devices() {
    let (one, two) = (setup(), fresh());
    let bytes = pattern(200_000, 1);
    let (a, b) = (poisoned(&one, 150_100), poisoned(&two, 200_000));
    let host = Side::Host(bytes.as_ptr().cast_mut());
    let segments = [
        segment(Side::Device(at(&a, 1)), host, 100),
        segment(Side::Device(at(&b, 2)), host, 200_000),
        segment(Side::Device(at(&a, 101)), host, 150_000),
    ];
    // SAFETY: `bytes` lives until the transfer has finished, and is only read.
    unsafe { one.copy(&segments) }.unwrap().wait().unwrap();
    let mut on_a = bytes[..100].to_vec();
    on_a.extend_from_slice(&bytes[..150_000]);
    let whole = read(&one, a.addr(), on_a.len() + 2 * MARGIN);
    assert_same(&whole, &framed(&on_a, 1), "on the first");
    let whole = read(&two, b.addr(), 200_000 + 2 * MARGIN);
    assert_same(&whole, &framed(&bytes, 2), "on the second");
}

#[test]
fn fill_sets_exactly_the_range() {
    let device = setup();
    for (round, len) in SIZES.into_iter().enumerate() {
        let offset = 1 + 13 * round % MARGIN;
        let target = poisoned(&device, len);
        device.fill(at(&target, offset), len as u64, round as u8).unwrap();
        let whole = read(&device, target.addr(), len + 2 * MARGIN);
        assert_same(&whole, &framed(&vec![round as u8; len], offset), "filled");
    }
}

#[test]
fn an_asynchronous_copy_of_many_segments_both_ways() {
    let device = setup();
    let lens: Vec<usize> = (0..400).map(|at| 1 + (at * 977) % 9000).chain([200_000]).collect();
    let sent: Vec<Vec<u8>> = lens.iter().map(|&len| pattern(len, len as u64)).collect();
    let target = device.alloc(lens.iter().sum::<usize>() as u64, 1).unwrap();
    let mut segments = Vec::new();
    let mut offset = 0;
    for bytes in &sent {
        let host = Side::Host(bytes.as_ptr().cast_mut());
        segments.push(segment(Side::Device(at(&target, offset)), host, bytes.len()));
        offset += bytes.len();
    }
    // SAFETY: `sent` lives until the transfer has finished, and is only read.
    let mut transfer = unsafe { device.copy(&segments) }.unwrap();
    while transfer.poll().is_none() {}
    assert!(transfer.poll().unwrap().is_ok(), "the answer stays");

    let mut received: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    for (segment, bytes) in segments.iter_mut().zip(&mut received) {
        segment.src = segment.dst;
        segment.dst = Side::Host(bytes.as_mut_ptr());
    }
    // SAFETY: `received` lives until the transfer has finished and nothing touches it.
    let mut transfer = unsafe { device.copy(&segments) }.unwrap();
    transfer.wait().unwrap();
    for (received, sent) in received.iter().zip(&sent) {
        assert_same(received, sent, "received");
    }
}

/// Fewer than may be in flight. Each needs a bounce slot of its own until it is done; `SOFT_GAUDI_LATENCY` shows it.
#[test]
fn small_copies_in_flight_together_keep_their_bytes() {
    const LEN: usize = 4096;
    let device = setup();
    let sent: Vec<Vec<u8>> = (0..24).map(|seed| pattern(LEN, seed)).collect();
    let mut received = vec![vec![0; LEN]; sent.len()];
    let target = device.alloc((sent.len() * LEN) as u64, 1).unwrap();
    let there = |number: usize| Side::Device(at(&target, number * LEN));
    let all_at_once = |segments: Vec<Segment>| {
        // SAFETY: the buffers of the test live until the transfers have finished, and nothing touches them.
        let copy = |segment| unsafe { device.copy(&[segment]) }.unwrap();
        let mut transfers: Vec<_> = segments.into_iter().map(copy).collect();
        transfers.iter_mut().for_each(|transfer| transfer.wait().unwrap());
    };
    let down = |(number, bytes): (usize, &Vec<u8>)| {
        segment(there(number), Side::Host(bytes.as_ptr().cast_mut()), LEN)
    };
    all_at_once(sent.iter().enumerate().map(down).collect());
    let up = |(number, bytes): (usize, &mut Vec<u8>)| {
        segment(Side::Host(bytes.as_mut_ptr()), there(number), LEN)
    };
    all_at_once(received.iter_mut().enumerate().map(up).collect());
    assert!(received == sent);
}

#[test]
fn a_registered_region_is_pinned_once_and_unpinned_when_dropped() {
    let device = setup();
    let mut host = pattern(1 << 20, 5);
    let target = device.alloc(1 << 20, 1).unwrap();
    let region = HostRegion::record(host.as_mut_ptr(), host.len());
    assert!(!region.is_pinned_for(&device), "recording pins nothing");
    let copy = |offset: usize, len: usize| {
        let source = Side::Host(region.start().wrapping_add(offset));
        let mut segment = segment(Side::Device(at(&target, offset)), source, len);
        segment.host_region = Some(Arc::clone(&region));
        // SAFETY: the buffer lives until the transfer has finished.
        unsafe { device.copy(&[segment]) }.unwrap().wait().unwrap();
    };
    copy(0, 300_000);
    assert!(region.is_pinned_for(&device));
    copy(300_000, 7);
    copy(300_007, (1 << 20) - 300_007);
    assert_same(&read(&device, target.addr(), 1 << 20), &host, "by region");
    drop(region);
}

#[test]
fn dropping_the_device_drops_its_pins_though_regions_live_on() {
    let device = setup();
    let index = device.info().index;
    let mut host = pattern(1 << 20, 5);
    let region = HostRegion::record(host.as_mut_ptr(), host.len());
    let use_region = |device: &Arc<Device>| {
        let target = device.alloc(1 << 20, 1).unwrap();
        let mut segment =
            segment(Side::Device(target.addr()), Side::Host(region.start()), region.len());
        segment.host_region = Some(Arc::clone(&region));
        // SAFETY: the buffer lives until the transfer has finished.
        unsafe { device.copy(&[segment]) }.unwrap().wait().unwrap();
        assert_same(&read(device, target.addr(), 1 << 20), &host, "by region");
    };
    use_region(&device);
    drop(device);
    assert!(runtime().devices().iter().all(|device| device.info().index != index), "closed");
    let again = machine::open(index);
    assert!(!region.is_pinned_for(&again));
    use_region(&again);
}

/// Memory that exists but may not be written, as a file's text or a constant is.
struct ReadOnly {
    start: *mut u8,
    len: usize,
}

impl ReadOnly {
    fn new(bytes: &[u8]) -> Self {
        // SAFETY: a new private mapping, filled before it is made read-only.
        unsafe {
            let start = libc::mmap(
                std::ptr::null_mut(),
                bytes.len(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.cast(), bytes.len());
            assert_eq!(libc::mprotect(start, bytes.len(), libc::PROT_READ), 0);
            Self { start: start.cast(), len: bytes.len() }
        }
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[test]
fn memory_that_cannot_be_pinned_is_copied_in_pieces() {
    let device = setup();
    let len = 5_000_001;
    let bytes = pattern(len, 3);
    let source = ReadOnly::new(&bytes);
    let target = poisoned(&device, len);
    let (dst, src) = (Side::Device(at(&target, 21)), Side::Host(source.start));
    // SAFETY: the mapping lives across the call.
    unsafe { device.copy_blocking(dst, src, len) }.unwrap();
    let whole = read(&device, target.addr(), len + 2 * MARGIN);
    assert_same(&whole, &framed(&bytes, 21), "from read-only memory");

    let region = HostRegion::record(source.start, len);
    for _ in 0..2 {
        let mut segment = segment(dst, src, len);
        segment.host_region = Some(Arc::clone(&region));
        // SAFETY: the mapping lives until the transfer has finished.
        unsafe { device.copy(&[segment]) }.unwrap().wait().unwrap();
        assert!(!region.is_pinned_for(&device));
    }
}

#[test]
fn a_read_only_destination_is_an_error_and_no_signal() {
    let device = setup();
    let len = 1 << 20;
    let target = ReadOnly::new(&vec![POISON; len]);
    let source = poisoned(&device, len);
    // SAFETY: the mapping lives across the call; the engine finds out that it cannot be written.
    let error =
        unsafe { device.copy_blocking(Side::Host(target.start), Side::Device(source.addr()), len) };
    let error = error.unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::InvalidParams, Some(libc::EFAULT)));
    assert!(error.to_string().contains("not writable"), "{error}");
}

#[test]
fn a_device_without_permits_answers_busy_and_recovers() {
    let device = setup();
    let len = 256 << 10;
    let host = pattern(len, 11);
    let target = device.alloc(128 * len as u64, 1).unwrap();
    let mut transfers = Vec::new();
    let mut refused = 0;
    for slot in 0..128 {
        let host = Side::Host(host.as_ptr().cast_mut());
        let piece = segment(Side::Device(at(&target, slot * len)), host, len);
        loop {
            // SAFETY: `host` lives until all transfers have finished.
            match unsafe { device.copy(std::slice::from_ref(&piece)) } {
                Ok(transfer) => break transfers.push(transfer),
                Err(SubmitError::Busy) => {
                    refused += 1;
                    device.progress();
                    std::thread::yield_now();
                }
                Err(SubmitError::Failed(error)) => panic!("{error}"),
            }
        }
    }
    for transfer in &mut transfers {
        transfer.wait().unwrap();
    }
    assert_eq!(device.progress(), 0);
    println!("refused {refused} times");
    for slot in 0..128 {
        assert_same(&read(&device, at(&target, slot * len), len), &host, "after waiting");
    }
}

/// There are 64 slots; a worker that starts reads and never progresses must not keep them.
#[test]
fn finished_copies_that_nobody_polls_return_their_bounce_slots() {
    let device = setup();
    let source = device.alloc(4096, 1).unwrap();
    let bytes = pattern(4096, 1);
    write(&device, source.addr(), &bytes);
    let mut buffers = vec![vec![0; 4096]; 200];
    let mut transfers = Vec::new();
    for buffer in &mut buffers {
        let dst = Side::Host(buffer.as_mut_ptr());
        let piece = segment(dst, Side::Device(source.addr()), 4096);
        loop {
            // SAFETY: the buffers live until the transfers have finished.
            match unsafe { device.copy(std::slice::from_ref(&piece)) } {
                Ok(transfer) => break transfers.push(transfer),
                // Until the card has done something; what was started is not polled.
                Err(SubmitError::Busy) => std::thread::yield_now(),
                Err(SubmitError::Failed(error)) => panic!("{error}"),
            }
        }
    }
    assert_same(&read(&device, source.addr(), 4096), &bytes, "read meanwhile");
    for transfer in &mut transfers {
        transfer.wait().unwrap();
    }
    for buffer in &buffers {
        assert_same(buffer, &bytes, "read before");
    }
}

#[test]
fn a_dropped_transfer_leaves_nothing_behind() {
    let device = setup();
    let bytes = pattern(1 << 20, 2);
    let target = device.alloc(1 << 20, 1).unwrap();
    for round in 0..200 {
        let len = if round % 2 == 0 { 1 << 20 } else { 5000 };
        let host = Side::Host(bytes.as_ptr().cast_mut());
        // SAFETY: `bytes` lives until the device is idle, and is only read.
        match unsafe { device.copy(&[segment(Side::Device(target.addr()), host, len)]) } {
            Ok(transfer) => drop(transfer),
            Err(SubmitError::Busy) => drop(device.progress()),
            Err(SubmitError::Failed(error)) => panic!("{error}"),
        }
    }
    // Freeing waits for the copies that still write there.
    drop(target);
    device.drain().unwrap();
    assert_eq!(device.progress(), 0);
}

#[test]
fn invalid_copies_are_refused_with_the_reason() {
    let device = setup();
    let target = device.alloc(1000, 1).unwrap();
    let mut host = [0_u8; 16];
    let host_side = Side::Host(host.as_mut_ptr());
    let copy = |dst, src, len| {
        // SAFETY: every one of these is refused before memory is touched.
        unsafe { device.copy_blocking(dst, src, len) }.unwrap_err()
    };
    let error = copy(host_side, host_side, 16);
    assert!(error.is_unsupported(), "{error}");
    for (dst, src, len) in [
        (Side::Device(at(&target, 992)), host_side, 16),
        (Side::Device(DeviceAddr(0x1234)), host_side, 16),
        (host_side, Side::Device(DeviceAddr(target.addr().0 - 1)), 16),
        (Side::Device(target.addr()), Side::Host(std::ptr::null_mut()), 16),
        (Side::Device(target.addr()), Side::Host(target.addr().0 as *mut u8), 16),
    ] {
        let error = copy(dst, src, len);
        assert_eq!(error.kind(), ErrorKind::InvalidParams, "{error}");
        assert!(error.device().is_some(), "{error}");
    }
    // Nothing to copy is not an error, wherever it points.
    // SAFETY: no memory is touched.
    unsafe { device.copy_blocking(Side::Device(DeviceAddr(1)), host_side, 0) }.unwrap();
}
