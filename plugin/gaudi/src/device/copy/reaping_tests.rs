//! Transfers that are not polled: other transfers must still get their permits, slots and pins.

use std::sync::Arc;

use crate::backend::fake::{BUDGET, Fake, MOVES};
use crate::{Allocation, Device, DeviceAddr, Segment, Side, SubmitError, Transfer};

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 17 + at / 251) as u8).collect()
}

fn to_host(host: &mut [u8], source: &Allocation) -> Segment {
    let dst = Side::Host(host.as_mut_ptr());
    Segment { dst, src: Side::Device(source.addr()), len: host.len(), host_region: None }
}

fn start(device: &Arc<Device>, segments: &[Segment]) -> Result<Transfer, SubmitError> {
    // SAFETY: tests keep their buffers until the fake hardware is done.
    unsafe { device.copy(segments) }
}

/// As many reads of one byte as the device accepts at once.
fn reads_that_use_all_permits(
    device: &Arc<Device>,
    source: &Allocation,
    host: &mut [u8],
) -> Transfer {
    let segments: Vec<Segment> = (0..MOVES * BUDGET as usize)
        .map(|at| {
            let src = Side::Device(DeviceAddr(source.addr().0 + at as u64));
            let dst = Side::Host(host.as_mut_ptr().wrapping_add(at));
            Segment { dst, src, len: 1, host_region: None }
        })
        .collect();
    start(device, &segments).unwrap()
}

#[test]
fn ended_reads_that_nobody_polls_return_permits_and_slots() {
    let (fake, device) = Fake::device();
    let len = MOVES * BUDGET as usize;
    let source = device.alloc(len as u64, 1).unwrap();
    let sent = pattern(len, 1);
    fake.poke(source.addr(), &sent);
    let mut forgotten = vec![0; len];
    let mut unpolled = reads_that_use_all_permits(&device, &source, &mut forgotten);
    assert_eq!(fake.queued().len(), BUDGET as usize);
    fake.finish_all();

    let mut host = [0; 8];
    let mut other = start(&device, &[to_host(&mut host, &source)]).expect("a permit");
    fake.finish_all();
    assert_eq!(other.poll(), Some(Ok(())));
    assert_eq!(host, sent[..8]);
    assert_eq!(forgotten, sent, "and its bytes were copied out of the slots");
    assert_eq!(unpolled.poll(), Some(Ok(())));
}

#[test]
fn many_reads_that_nobody_polls_do_not_use_up_the_slots() {
    let (fake, device) = Fake::device();
    let len = MOVES * BUDGET as usize;
    let source = device.alloc(len as u64, 1).unwrap();
    let mut forgotten = vec![vec![0; len]; 8];
    // If slots were not returned, this would need far more than the pool has.
    let transfers: Vec<Transfer> = forgotten
        .iter_mut()
        .map(|host| {
            let transfer = reads_that_use_all_permits(&device, &source, host);
            fake.finish_all();
            transfer
        })
        .collect();
    assert_eq!(fake.submitted(), 8 * BUDGET, "none of them had to wait");
    drop(transfers);
}

#[test]
fn staging_slots_of_transfers_that_nobody_polls_are_replaced() {
    let (one_fake, one) = Fake::device();
    let (two_fake, two) = Fake::device();
    // Four pieces in flight at a time, and eight slots between two cards.
    let len = (BUDGET as usize) << 20;
    let (source, target) = (one.alloc(len as u64, 1).unwrap(), two.alloc(len as u64, 1).unwrap());
    let bytes = pattern(len, 3);
    one_fake.poke(source.addr(), &bytes);
    let across = Segment {
        dst: Side::Device(target.addr()),
        src: Side::Device(source.addr()),
        len,
        host_region: None,
    };
    let halfway = || {
        let transfer = start(&two, std::slice::from_ref(&across)).unwrap();
        assert_eq!(one_fake.queued().len(), BUDGET as usize);
        one_fake.finish_all();
        assert_eq!(one.progress(), 0);
        transfer
    };
    let mut parked = [halfway(), halfway()];
    assert!(two_fake.queued().is_empty(), "their second halves wait to be polled");

    let mut other = start(&two, std::slice::from_ref(&across)).expect("a slot of its own");
    while other.poll().is_none() {
        one_fake.finish_all();
        two_fake.finish_all();
    }
    assert_eq!(other.poll(), Some(Ok(())));
    assert!(two_fake.peek(target.addr(), len) == bytes);
    for transfer in &mut parked {
        while transfer.poll().is_none() {
            two_fake.finish_all();
        }
        assert_eq!(transfer.poll(), Some(Ok(())));
    }
}

#[test]
fn a_read_dropped_while_another_thread_reaps_it_leaves_the_host_alone_afterwards() {
    let (fake, device) = Fake::device();
    let source = device.alloc(4096, 1).unwrap();
    fake.poke(source.addr(), &[9; 4096]);
    for _ in 0..200 {
        let mut host = vec![1; 4096];
        let transfer = start(&device, &[to_host(&mut host, &source)]).unwrap();
        fake.finish_all();
        std::thread::scope(|scope| {
            let reaping = scope.spawn(|| device.progress());
            drop(transfer);
            // From here on nothing else may write the bytes.
            let seen = host.clone();
            reaping.join().unwrap();
            assert!(seen == host, "written after the transfer was dropped");
        });
    }
}

#[test]
fn only_the_oldest_submission_of_a_lane_is_polled() {
    let (fake, device) = Fake::device();
    fake.use_one_lane();
    let target = device.alloc(8, 1).unwrap();
    let host = [7_u8; 8];
    let write = Segment {
        dst: Side::Device(target.addr()),
        src: Side::Host(host.as_ptr().cast_mut()),
        len: 8,
        host_region: None,
    };
    let mut transfers: Vec<Transfer> =
        (0..3).map(|_| start(&device, std::slice::from_ref(&write)).unwrap()).collect();
    let before = fake.polls();
    assert!(transfers.iter_mut().all(|transfer| transfer.poll().is_none()));
    assert_eq!(fake.polls() - before, 1, "one poll of the oldest serves all");
    fake.finish_all();
    assert!(transfers.iter_mut().all(|transfer| transfer.poll() == Some(Ok(()))));
    assert_eq!(fake.polls() - before, 4);
}

#[test]
fn a_finished_copy_is_seen_though_nobody_polls_older_ones() {
    let (fake, device) = Fake::device();
    fake.use_one_lane();
    let source = device.alloc(8, 1).unwrap();
    fake.poke(source.addr(), b"gaudi 2!");
    let mut hosts = [[0_u8; 8]; 4];
    let mut transfers: Vec<Transfer> = hosts
        .iter_mut()
        .map(|host| start(&device, &[to_host(host, &source)]).expect("a permit"))
        .collect();
    let mut last = transfers.pop().unwrap();
    // The first is dropped; the second and the third are not polled.
    drop(transfers.remove(0));
    assert_eq!(last.poll(), None);
    fake.finish(fake.queued()[0]);
    assert_eq!(last.poll(), None, "one of four has ended");
    fake.finish_all();
    assert_eq!(last.poll(), Some(Ok(())));
    assert_eq!(fake.noticed(), 4, "who polls completes older ones");
    assert_eq!(device.progress(), 0);
    drop((last, transfers));
    assert_eq!(hosts, [[0; 8], *b"gaudi 2!", *b"gaudi 2!", *b"gaudi 2!"], "but not after a drop");
}

#[test]
fn younger_submissions_share_the_polls_of_the_oldest() {
    let (fake, device) = Fake::device();
    fake.use_one_lane();
    let source = device.alloc(8, 1).unwrap();
    let mut hosts = [[0_u8; 8]; 4];
    let mut transfers: Vec<Transfer> = hosts
        .iter_mut()
        .map(|host| start(&device, &[to_host(host, &source)]).expect("a permit"))
        .collect();
    let before = fake.polls();
    for _ in 0..10 {
        assert!(transfers[1..].iter_mut().all(|transfer| transfer.poll().is_none()));
    }
    assert_eq!(fake.polls() - before, 10, "one in each round");
    fake.finish_all();
    let seen = [transfers[3].poll(), transfers[3].poll()];
    assert_eq!(seen[1], Some(Ok(())), "another's poll is relied on once");
}

/// The driver reports ends from a work queue with several workers, so the ends of one hardware queue may be
/// reported in any order.
#[test]
fn the_ends_of_one_queue_may_be_reported_in_any_order() {
    for order in [[3, 2, 1], [2, 3, 1], [3, 1, 2]] {
        let (fake, device) = Fake::device();
        fake.use_one_lane();
        let source = device.alloc(24, 1).unwrap();
        let sent = pattern(24, 5);
        fake.poke(source.addr(), &sent);
        let mut hosts = [[0; 8]; 3];
        let mut transfers: Vec<Option<Transfer>> = (0..3)
            .map(|at| {
                let src = Side::Device(DeviceAddr(source.addr().0 + 8 * at as u64));
                let dst = Side::Host(hosts[at].as_mut_ptr());
                start(&device, &[Segment { dst, src, len: 8, host_region: None }]).ok()
            })
            .collect();
        for (done, sequence) in order.into_iter().enumerate() {
            fake.finish(sequence);
            device.progress();
            for unfinished in fake.queued() {
                let transfer = transfers[unfinished as usize - 1].as_mut().unwrap();
                assert_eq!(transfer.poll(), None, "{unfinished} has not ended");
            }
            // Waiting for a copy that has ended does not wait for older ones.
            let mut ended = transfers[sequence as usize - 1].take().unwrap();
            assert_eq!(ended.wait(), Ok(()), "{sequence} is number {done} of {order:?}");
        }
        for (at, host) in hosts.iter().enumerate() {
            assert_eq!(host, &sent[8 * at..8 * at + 8]);
        }
        assert_eq!(device.progress(), 0);
    }
}
