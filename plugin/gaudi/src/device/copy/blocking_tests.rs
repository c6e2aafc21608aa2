//! Short copies on hardware that completes them late: each has a slot of its own, and returns its permit
//! when it ends.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{BOUNCE_LEN, Side};
use crate::backend::fake::Fake;
use crate::{Device, DeviceAddr, Notifier, Segment};

/// A timeout that only a failing test reaches.
const LONG: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
const LEN: usize = 100;

fn put(device: &Arc<Device>, to: DeviceAddr, bytes: &[u8]) {
    let host = Side::Host(bytes.as_ptr().cast_mut());
    // SAFETY: the bytes live across the call and are only read.
    unsafe { device.copy_blocking(Side::Device(to), host, bytes.len()) }.unwrap();
}

fn get(device: &Arc<Device>, from: DeviceAddr) -> [u8; LEN] {
    let mut bytes = [0xee; LEN];
    // SAFETY: the bytes live across the call and nothing else uses them.
    unsafe { device.copy_blocking(Side::Host(bytes.as_mut_ptr()), Side::Device(from), LEN) }
        .unwrap();
    bytes
}

fn wait_for_queued(fake: &Fake, count: usize) {
    while fake.queued().len() < count {
        std::thread::yield_now();
    }
}

/// The hardware runs the copies in reverse order: if two of them shared a slot, the first one's bytes would be
/// overwritten by then. (The fake card checks the slots of their packets.)
#[test]
fn short_copies_of_several_threads_do_not_share_a_slot() {
    const THREADS: usize = 3;
    let (fake, device) = Fake::device();
    let memory = device.alloc((THREADS * LEN) as u64, 1).unwrap();
    let at = |n: usize| DeviceAddr(memory.addr().0 + (n * LEN) as u64);
    let bytes = |n: usize| [n as u8 + 1; LEN];
    let finish_backwards = || {
        wait_for_queued(&fake, THREADS);
        fake.queued().into_iter().rev().for_each(|sequence| fake.finish(sequence));
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|n| {
            drop(scope.spawn({
                let device = &device;
                move || put(device, at(n), &bytes(n))
            }))
        });
        finish_backwards();
    });
    for n in 0..THREADS {
        assert_eq!(fake.peek(at(n), LEN), bytes(n));
    }
    std::thread::scope(|scope| {
        let got: Vec<_> = (0..THREADS)
            .map(|n| {
                let device = &device;
                scope.spawn(move || get(device, at(n)))
            })
            .collect();
        finish_backwards();
        for (n, got) in got.into_iter().enumerate() {
            assert_eq!(got.join().unwrap(), bytes(n));
        }
    });
    assert_eq!(device.engine().free_slots(), crate::backend::SLOTS);
}

/// A short copy is not recorded, so only the thread that waits for it can notify.
#[test]
fn a_sleeper_without_a_permit_is_woken_by_the_end_of_a_short_copy() {
    let (fake, device) = Fake::device();
    let memory = device.alloc(2 * LEN as u64, 1).unwrap();
    let (small, large) = (memory.addr(), DeviceAddr(memory.addr().0 + LEN as u64));
    let host = [7; LEN];
    let notifier = Arc::new(Notifier::new().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| put(&device, small, &[9; LEN]));
        wait_for_queued(&fake, 1);
        let src = Side::Host(host.as_ptr().cast_mut());
        let segment = Segment { dst: Side::Device(large), src, len: LEN, host_region: None };
        // SAFETY: the bytes outlive the transfers.
        let start = || unsafe { device.copy(std::slice::from_ref(&segment)) };
        let mut others = Vec::new();
        while device.can_submit() {
            others.push(start());
        }
        let sleeps = device.notify_on_completion(&notifier) && !device.can_submit();
        fake.finish(1);
        let woken = poll(&mut [PollFd::new(&*notifier, PollFlags::IN)], Some(&LONG)).unwrap() > 0;
        fake.finish_all();
        assert!(sleeps && others.iter().all(Result::is_ok), "{others:?}");
        assert!(woken, "asleep although there is a permit");
    });
    assert_eq!(fake.peek(small, LEN), [9; LEN]);
    const { assert!(LEN <= BOUNCE_LEN) };
}
