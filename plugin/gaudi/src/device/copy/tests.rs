//! Copies on fake hardware. The test decides what it does and when, and so produces orders and failures that
//! are rare on a real device.

use std::sync::Arc;

use crate::backend::fake::{BUDGET, Fake, MOVES};
use crate::{
    Allocation, Device, DeviceAddr, Direction, ErrorKind, HostRegion, Segment, Side, SubmitError,
    Transfer,
};

const LARGE: usize = super::BOUNCE_LEN + 1;

fn to_device(target: &Allocation, host: &[u8]) -> Segment {
    let src = Side::Host(host.as_ptr().cast_mut());
    Segment { dst: Side::Device(target.addr()), src, len: host.len(), host_region: None }
}

fn to_host(host: &mut [u8], source: &Allocation) -> Segment {
    let dst = Side::Host(host.as_mut_ptr());
    Segment { dst, src: Side::Device(source.addr()), len: host.len(), host_region: None }
}

fn start(device: &Arc<Device>, segment: Segment) -> Result<Transfer, SubmitError> {
    // SAFETY: tests keep their buffers until the fake hardware is done.
    unsafe { device.copy(&[segment]) }
}

#[test]
fn nothing_is_done_before_the_hardware_does_it() {
    let (fake, device) = Fake::device();
    let target = device.alloc(10, 1).unwrap();
    let mut transfer = start(&device, to_device(&target, b"0123456789")).unwrap();
    for _ in 0..3 {
        assert_eq!(transfer.poll(), None);
    }
    assert_eq!(fake.peek(target.addr(), 10), [0; 10]);
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert_eq!(transfer.poll(), Some(Ok(())), "the answer stays");
    assert_eq!(fake.peek(target.addr(), 10), b"0123456789");
    assert_eq!(fake.noticed(), 1);
}

#[test]
fn permits_are_counted_from_the_oldest_unfinished_submission() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [7; 8];
    let mut transfers: Vec<Transfer> = Vec::new();
    for _ in 0..BUDGET {
        transfers.push(start(&device, to_device(&target, &host)).unwrap());
    }
    let busy = || matches!(start(&device, to_device(&target, &host)), Err(SubmitError::Busy));
    assert!(busy());
    // Finishing the newer ones does not help: the driver's window starts at the oldest.
    for &sequence in &fake.queued()[1..] {
        fake.finish(sequence);
    }
    assert!(busy());
    fake.finish(fake.queued()[0]);
    transfers.push(start(&device, to_device(&target, &host)).unwrap());
    fake.finish_all();
    assert!(transfers.iter_mut().all(|transfer| transfer.poll() == Some(Ok(()))));
}

#[test]
fn a_copy_refused_as_busy_leaves_no_pin() {
    let (fake, device) = Fake::device();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = vec![1; LARGE];
    let transfers: Vec<_> =
        (0..BUDGET).map(|_| start(&device, to_device(&target, &host)).unwrap()).collect();
    assert_eq!(fake.live_pins(), BUDGET as usize);
    assert!(matches!(start(&device, to_device(&target, &host)), Err(SubmitError::Busy)));
    assert_eq!(fake.live_pins(), BUDGET as usize);
    drop(transfers);
    fake.finish_all();
    device.progress();
    assert_eq!(fake.live_pins(), 0);
}

#[test]
fn a_copy_tried_again_and_again_is_counted_once_for_its_region() {
    let (fake, device) = Fake::device();
    let target = device.alloc(1 << 20, 1).unwrap();
    let host = vec![1; 1 << 20];
    // The hardware uses one bounce slot, and the test takes the others. Permits are free.
    let _busy = start(&device, to_device(&target, &host[..8])).unwrap();
    let pool = device.bounce().unwrap();
    let slots: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert!(device.can_submit());
    // The region earns a pin when a sixteenth of it was copied.
    let region = HostRegion::record(host.as_ptr().cast_mut(), host.len());
    let host_region = Some(Arc::clone(&region));
    let copy = Segment { host_region, ..to_device(&target, &host[..32 << 10]) };
    for _ in 0..10 {
        assert!(matches!(start(&device, copy.clone()), Err(SubmitError::Busy)));
    }
    drop(slots);
    for is_pinned in [false, true] {
        let mut transfer = start(&device, copy.clone()).unwrap();
        assert_eq!(region.is_pinned_for(&device), is_pinned);
        fake.finish_all();
        assert_eq!(transfer.poll(), Some(Ok(())));
    }
}

#[test]
fn a_dropped_transfer_keeps_its_pin_until_the_hardware_is_done() {
    let (fake, device) = Fake::device();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = vec![3; LARGE];
    drop(start(&device, to_device(&target, &host)).unwrap());
    assert_eq!(device.progress(), 1);
    assert_eq!(fake.live_pins(), 1, "the device may still read it");
    fake.finish_all();
    assert_eq!(device.progress(), 0);
    assert_eq!(fake.live_pins(), 0);
    assert_eq!(fake.peek(target.addr(), LARGE), host);
}

#[test]
fn a_dropped_read_writes_nothing_to_the_host_afterwards() {
    let (fake, device) = Fake::device();
    let source = device.alloc(16, 1).unwrap();
    fake.poke(source.addr(), &[9; 16]);
    let mut host = [1; 16];
    drop(start(&device, to_host(&mut host, &source)).unwrap());
    fake.finish_all();
    device.drain().unwrap();
    assert_eq!(host, [1; 16], "small reads end in a bounce slot, which is not emptied");
}

#[test]
fn a_region_dropped_in_flight_is_unpinned_only_afterwards() {
    let (fake, device) = Fake::device();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = vec![5; LARGE];
    let region = HostRegion::record(host.as_ptr().cast_mut(), LARGE);
    let mut segment = to_device(&target, &host);
    segment.host_region = Some(Arc::clone(&region));
    let mut transfer = start(&device, segment).unwrap();
    drop(region);
    assert_eq!(fake.live_pins(), 1);
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert_eq!(fake.live_pins(), 0);
}

#[test]
fn freeing_memory_waits_for_the_copies_that_use_it() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let unrelated = device.alloc(8, 1).unwrap();
    let host = [7; 8];
    let transfer = start(&device, to_device(&target, &host)).unwrap();
    drop(unrelated);
    assert_eq!(fake.queued().len(), 1, "memory that no copy uses is freed at once");
    std::thread::scope(|scope| {
        let freeing = scope.spawn(move || drop(target));
        for _ in 0..100 {
            assert_eq!(device.memory().allocations, 1, "not free while it is written");
            std::thread::yield_now();
        }
        fake.finish_all();
        freeing.join().unwrap();
    });
    assert_eq!(device.memory().allocations, 0);
    drop(transfer);
}

#[test]
fn pieces_whose_memory_is_freed_before_they_start_are_not_submitted() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [7; 8];
    let segments: Vec<Segment> =
        (0..MOVES * BUDGET as usize + 1).map(|_| to_device(&target, &host)).collect();
    // SAFETY: the buffer lives until the fake hardware is done.
    let mut transfer = unsafe { device.copy(&segments) }.unwrap();
    fake.finish_all();
    drop(target);
    let error = transfer.poll().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidParams, "{error}");
    assert_eq!(fake.submitted(), BUDGET, "the last piece was not submitted");
}

#[test]
fn segments_are_batched_by_direction() {
    let (fake, device) = Fake::device();
    let target = device.alloc(4096, 1).unwrap();
    let host = [1; 64];
    let segments: Vec<Segment> = (0..MOVES + 2).map(|_| to_device(&target, &host)).collect();
    // SAFETY: the buffer lives until the fake hardware is done.
    let mut transfer = unsafe { device.copy(&segments) }.unwrap();
    let shapes: Vec<_> = fake.queued().iter().map(|&sequence| fake.shape(sequence)).collect();
    assert_eq!(shapes, [(Direction::HostToDevice, MOVES), (Direction::HostToDevice, 2)]);
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
}

#[test]
fn a_transfer_that_needs_more_permits_goes_on_as_they_are_returned() {
    let (fake, device) = Fake::device();
    let count = MOVES * BUDGET as usize * 2 + 3;
    let target = device.alloc(8, 1).unwrap();
    let host = [4; 8];
    let segments: Vec<Segment> = (0..count).map(|_| to_device(&target, &host)).collect();
    // SAFETY: the buffer lives until the fake hardware is done.
    let mut transfer = unsafe { device.copy(&segments) }.unwrap();
    let mut rounds = 0;
    while transfer.poll().is_none() {
        assert!(fake.queued().len() <= BUDGET as usize);
        fake.finish_all();
        rounds += 1;
    }
    assert_eq!(rounds, 3);
    assert_eq!(fake.noticed(), count.div_ceil(MOVES) as u64);
}

#[test]
fn a_failure_is_reported_when_all_submissions_of_the_transfer_have_ended() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [4; 8];
    let segments: Vec<Segment> = (0..10 * MOVES).map(|_| to_device(&target, &host)).collect();
    // SAFETY: the buffer lives until the fake hardware is done.
    let mut transfer = unsafe { device.copy(&segments) }.unwrap();
    let queued = fake.queued();
    assert_eq!(queued.len(), BUDGET as usize);
    fake.fail(queued[1], libc::EIO);
    assert_eq!(transfer.poll(), None, "others still use the buffer");
    assert_eq!(fake.queued().len(), BUDGET as usize - 1, "nothing new is started");
    fake.finish_all();
    let error = transfer.poll().unwrap().unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::DmaFailed, Some(libc::EIO)));
    assert!(error.is_device_lost() && device.is_lost());
    assert!(error.device().is_some_and(|name| name.contains("fa4e")), "{error}");
    assert_eq!(fake.noticed(), BUDGET);
}

#[test]
fn a_refused_submission_returns_its_permit_and_pins() {
    let (fake, device) = Fake::device();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = vec![1; LARGE];
    fake.refuse_submissions(Some(libc::EINVAL));
    for _ in 0..2 * BUDGET {
        let Err(SubmitError::Failed(error)) = start(&device, to_device(&target, &host)) else {
            panic!("refused");
        };
        assert_eq!(error.errno(), Some(libc::EINVAL));
    }
    assert_eq!(fake.live_pins(), 0);
    fake.refuse_submissions(None);
    let mut transfer = start(&device, to_device(&target, &host)).unwrap();
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
}

#[test]
fn unpinnable_memory_is_bounced_and_a_lost_device_is_an_error() {
    let (fake, device) = Fake::device();
    // Pins the bounce slots.
    let warm_up = device.alloc(1, 1).unwrap();
    let mut transfer = start(&device, to_device(&warm_up, b"x")).unwrap();
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));

    let len = 3 * LARGE;
    let source = device.alloc(len as u64, 1).unwrap();
    let bytes: Vec<u8> = (0..len).map(|at| (at * 31 / 7) as u8).collect();
    fake.poke(source.addr(), &bytes);
    let mut host = vec![0; len];
    fake.refuse_pins(Some(libc::EFAULT));
    let mut transfer = start(&device, to_host(&mut host, &source)).unwrap();
    while transfer.poll().is_none() {
        fake.finish_all();
    }
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert_eq!(host, bytes);

    fake.refuse_pins(Some(libc::EBUSY));
    let mut other = vec![0; len];
    let Err(SubmitError::Failed(error)) = start(&device, to_host(&mut other, &source)) else {
        panic!("a device in reset is no reason to try another way");
    };
    assert!(error.is_device_lost(), "{error}");
}

#[test]
fn copies_between_two_cards_are_double_buffered_and_arrive() {
    let (one_fake, one) = Fake::device();
    let (two_fake, two) = Fake::device();
    let len = (3 << 20) + 17;
    let bytes: Vec<u8> = (0..len).map(|at| (at * 13 / 5) as u8).collect();
    let source = one.alloc(len as u64, 1).unwrap();
    one_fake.poke(source.addr(), &bytes);
    let target = two.alloc(len as u64, 1).unwrap();
    let (dst, src) = (Side::Device(target.addr()), Side::Device(source.addr()));
    let segment = Segment { dst, src, len, host_region: None };
    let mut transfer = start(&two, segment).unwrap();
    assert!(one_fake.queued().len() > 1, "several pieces are under way at once");
    // The first half of one piece and the second half of another overlap.
    let mut overlapped = false;
    while transfer.poll().is_none() {
        overlapped |= !one_fake.queued().is_empty() && !two_fake.queued().is_empty();
        two_fake.finish_all();
        if let Some(&first) = one_fake.queued().first() {
            one_fake.finish(first);
        }
    }
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert!(overlapped);
    assert_eq!(two_fake.peek(target.addr(), len), bytes);
}

#[test]
fn a_failure_between_two_cards_ends_the_transfer() {
    let (one_fake, one) = Fake::device();
    let (two_fake, two) = Fake::device();
    let len = 3 << 20;
    let (source, target) = (one.alloc(len, 1).unwrap(), two.alloc(len, 1).unwrap());
    let (dst, src) = (Side::Device(target.addr()), Side::Device(source.addr()));
    let segment = Segment { dst, src, len: len as usize, host_region: None };
    let mut transfer = start(&two, segment).unwrap();
    let queued = one_fake.queued();
    one_fake.fail(queued[0], libc::EIO);
    assert_eq!(transfer.poll(), None, "the other first halves still run");
    // They succeed, but the transfer must not wait for their second halves.
    one_fake.finish_all();
    assert_eq!(transfer.poll().unwrap().unwrap_err().kind(), ErrorKind::DmaFailed);
    assert!(two_fake.queued().is_empty());
}

#[test]
fn closing_a_device_waits_for_its_hardware() {
    let (fake, device) = Fake::device();
    let target = device.alloc(LARGE as u64, 1).unwrap();
    let host = vec![8; LARGE];
    drop(start(&device, to_device(&target, &host)).unwrap());
    std::thread::scope(|scope| {
        let closing = scope.spawn(move || {
            drop(target);
            drop(device);
        });
        while !closing.is_finished() {
            fake.finish_all();
            std::thread::yield_now();
        }
    });
    assert_eq!(fake.live_pins(), 0);
    assert_eq!(fake.noticed(), 1);
}

#[test]
fn a_fill_is_one_packet_of_device_work() {
    let (fake, device) = Fake::device();
    let target = device.alloc(100, 1).unwrap();
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| device.fill(DeviceAddr(target.addr().0 + 1), 98, 0xab));
        while !filling.is_finished() {
            fake.finish_all();
            std::thread::yield_now();
        }
        filling.join().unwrap().unwrap();
    });
    let mut expected = [0xab; 100];
    (expected[0], expected[99]) = (0, 0);
    assert_eq!(fake.peek(target.addr(), 100), expected);
}
