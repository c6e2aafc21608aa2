//! Sleeping until copies are done, on the software Gaudi. The waiter's thread exists only once a device
//! has had a sleeper. One test: it counts the threads of the process.

mod machine;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gaudi::{DeviceAddr, Notifier, Segment, Side};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Threads of this process by this name.
fn waiters() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name.trim() == "gaudi-waiter")).count()
}

#[test]
fn a_sleeper_is_woken_by_a_thread_that_exists_only_while_needed() {
    machine::set_up("gaudi2");
    // A card that takes its time, so that there is something to sleep for.
    // SAFETY: the only test of this program; the card is not open yet.
    unsafe { std::env::set_var("SOFT_GAUDI_LATENCY", "300000") };
    let device = machine::fresh();
    let len = 4 << 20;
    let target = device.alloc(len as u64, 1).unwrap();
    let sent: Vec<u8> = (0..len).map(|at| (at * 7 / 3) as u8).collect();
    let mut back = vec![0; len];
    let there = Side::Device(DeviceAddr(target.addr().0));
    let notifier = Arc::new(Notifier::new().unwrap());
    let copy = |dst, src, sleep: bool| {
        let segment = Segment { dst, src, len, host_region: None };
        // SAFETY: both buffers live to the end of the test, and the transfer is waited for.
        let mut transfer = unsafe { device.copy(&[segment]) }.unwrap();
        let mut slept = 0;
        loop {
            notifier.clear();
            if let Some(outcome) = transfer.poll() {
                outcome.unwrap();
                return slept;
            }
            let armed = sleep && transfer.notify_when_done(&notifier);
            if armed && !transfer.has_news() {
                let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
                let woken =
                    poll(&mut [PollFd::new(&*notifier, PollFlags::IN)], Some(&limit)).unwrap();
                assert_eq!(woken, 1, "asleep for ever");
                slept += 1;
            }
        }
    };
    let here = Side::Host(sent.as_ptr().cast_mut());
    copy(there, here, false);
    assert_eq!(waiters(), 0, "no thread has slept yet");
    let slept = copy(there, here, true);
    assert!(slept <= 2, "one copy, woken {slept} times");
    copy(Side::Host(back.as_mut_ptr()), there, true);
    assert_eq!(waiters(), 1);
    assert!(back == sent);
    drop(target);
    drop(device);
    // A thread that was joined may be on the kernel's list for a moment still.
    let deadline = Instant::now() + Duration::from_secs(30);
    while waiters() > 0 {
        assert!(Instant::now() < deadline, "it does not end with the device");
        std::thread::sleep(Duration::from_millis(1));
    }
}
