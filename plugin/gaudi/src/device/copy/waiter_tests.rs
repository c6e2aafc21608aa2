//! Sleeping until the hardware is done: arm, check again, sleep. No wake-up may be lost.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::backend::fake::{BUDGET, Fake};
use crate::{Allocation, Device, Notifier, Segment, Side, Transfer};

/// A timeout that only a failing test reaches.
const LONG: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
const NOT_AT_ALL: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

fn is_readable(notifier: &Notifier, limit: Timespec) -> bool {
    poll(&mut [PollFd::new(notifier, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

fn start(device: &Arc<Device>, target: &Allocation, host: &[u8]) -> Transfer {
    let src = Side::Host(host.as_ptr().cast_mut());
    let dst = Side::Device(target.addr());
    let segment = Segment { dst, src, len: host.len(), host_region: None };
    // SAFETY: tests keep their buffers until the fake hardware is done.
    unsafe { device.copy(&[segment]) }.unwrap()
}

#[test]
fn a_notifier_is_notified_when_the_hardware_is_done_and_not_before() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let notifier = Arc::new(Notifier::new().unwrap());
    let mut transfer = start(&device, &target, &host);
    assert!(transfer.notify_when_done(&notifier));
    assert_eq!(transfer.poll(), None);
    assert!(!is_readable(&notifier, NOT_AT_ALL));
    fake.finish_all();
    assert!(is_readable(&notifier, LONG), "no thread polls: the waiter has to find it");
    assert_eq!(transfer.poll(), Some(Ok(())));
    // It notifies only once: a copy that ends now does not.
    notifier.clear();
    let mut other = start(&device, &target, &host);
    fake.finish_all();
    assert_eq!(other.poll(), Some(Ok(())));
    assert!(!is_readable(&notifier, NOT_AT_ALL));
}

#[test]
fn a_failure_notifies_as_well() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let notifier = Arc::new(Notifier::new().unwrap());
    let mut transfer = start(&device, &target, &host);
    assert!(transfer.notify_when_done(&notifier));
    fake.fail(fake.queued()[0], libc::EIO);
    assert!(is_readable(&notifier, LONG));
    assert!(transfer.poll().unwrap().is_err());
}

#[test]
fn with_nothing_in_flight_no_notification_is_promised() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let notifier = Arc::new(Notifier::new().unwrap());
    assert!(!device.notify_on_completion(&notifier));
    let mut transfer = start(&device, &target, &host);
    fake.finish_all();
    assert_eq!(device.progress(), 0);
    assert!(!transfer.notify_when_done(&notifier), "it has ended: look, do not sleep");
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert!(!is_readable(&notifier, NOT_AT_ALL));
}

/// The hardware finishes while a thread is about to sleep; other threads may notice that first.
#[test]
fn no_wake_up_is_lost_whichever_thread_completes() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let notifier = Arc::new(Notifier::new().unwrap());
    for round in 0..400 {
        let mut transfer = start(&device, &target, &host);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..round % 20 {
                    std::hint::spin_loop();
                }
                fake.finish_all();
            });
            if round % 3 == 0 {
                scope.spawn(|| device.progress());
            }
            loop {
                notifier.clear();
                if let Some(outcome) = transfer.poll() {
                    outcome.unwrap();
                    break;
                }
                let sleep = transfer.notify_when_done(&notifier) && !transfer.has_news();
                assert!(!sleep || is_readable(&notifier, LONG), "round {round}: asleep for ever");
            }
        });
    }
}

/// Between two cards, the second half starts on a card that had no notifier before.
#[test]
fn a_transfer_over_two_cards_wakes_its_sleeper_at_every_step() {
    let (one_fake, one) = Fake::device();
    let (two_fake, two) = Fake::device();
    let len = 3 << 20;
    let (source, target) = (one.alloc(len, 1).unwrap(), two.alloc(len, 1).unwrap());
    let (dst, src) = (Side::Device(target.addr()), Side::Device(source.addr()));
    let segment = Segment { dst, src, len: len as usize, host_region: None };
    // SAFETY: no host memory of ours.
    let mut transfer = unsafe { two.copy(&[segment]) }.unwrap();
    let notifier = Arc::new(Notifier::new().unwrap());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                one_fake.finish_all();
                two_fake.finish_all();
                std::thread::yield_now();
            }
        });
        loop {
            notifier.clear();
            if let Some(outcome) = transfer.poll() {
                outcome.unwrap();
                break;
            }
            let sleep = transfer.notify_when_done(&notifier) && !transfer.has_news();
            assert!(!sleep || is_readable(&notifier, LONG), "asleep for ever");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// If no permit is free, the end of another thread's copy wakes the sleeper.
#[test]
fn a_sleeper_without_a_permit_is_woken_when_one_is_returned() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let others: Vec<Transfer> = (0..BUDGET).map(|_| start(&device, &target, &host)).collect();
    assert!(!device.can_submit());
    let notifier = Arc::new(Notifier::new().unwrap());
    assert!(device.notify_on_completion(&notifier) && !device.can_submit());
    fake.finish(fake.queued()[0]);
    assert!(is_readable(&notifier, LONG));
    assert!(device.can_submit());
    fake.finish_all();
    drop(others);
}

/// A copy that another thread submits on another lane meanwhile may end first, and nothing would notice it.
#[test]
fn the_only_lane_at_work_is_not_slept_for_longer_than_one_of_several() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let mut transfer = start(&device, &target, &host);
    assert!(device.engine().wait_for_any(), "something is in flight");
    device.engine().wait_for_oldest();
    fake.finish_all();
    assert_eq!(transfer.poll(), Some(Ok(())));
    assert!(fake.longest_wait_us() <= 1000, "{} us", fake.longest_wait_us());
}

#[test]
fn several_sleepers_are_all_woken_by_lanes_in_any_order() {
    let (fake, device) = Fake::device();
    let target = device.alloc(8, 1).unwrap();
    let host = [5; 8];
    let mut sleepers: Vec<(Transfer, Arc<Notifier>)> = (0..3)
        .map(|_| {
            let transfer = start(&device, &target, &host);
            let notifier = Arc::new(Notifier::new().unwrap());
            assert!(transfer.notify_when_done(&notifier));
            (transfer, notifier)
        })
        .collect();
    // Finish the newest first: the waiter does not sleep for that one.
    let newest = *fake.queued().last().unwrap();
    fake.finish(newest);
    for (_, notifier) in &sleepers {
        assert!(is_readable(notifier, LONG));
    }
    let done: Vec<bool> =
        sleepers.iter_mut().map(|(transfer, _)| transfer.poll().is_some()).collect();
    assert_eq!(done, [false, false, true]);
    fake.finish_all();
    assert!(sleepers.iter_mut().all(|(transfer, _)| transfer.poll() == Some(Ok(()))));
}
