//! Faults on demand, and what a program sees of them.

mod driver;

use std::os::fd::{AsRawFd, OwnedFd};

use driver::*;
use hl_thunk::sys;
use rustix::pipe::PipeFlags;
use soft_gaudi::api::*;

/// `struct hlthunk_event_record_cs_timeout`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct CsTimeoutRecord {
    timestamp: i64,
    seq: u64,
}

fn inject(rules: &str) {
    std::fs::write(machine_file("faults"), rules).unwrap();
}

fn remaining_rules() -> String {
    std::fs::read_to_string(machine_file("faults")).unwrap()
}

/// A card with faults switched on; rules are for the whole machine, so one test at a time.
fn card_with_faults() -> (i32, std::sync::MutexGuard<'static, ()>) {
    let guard = exclusive();
    machine_with("gaudi2", &[("SOFT_GAUDI_FAULTS", "yes"), ("SOFT_GAUDI_CS_TIMEOUT", "300")]);
    let fd = card();
    inject("");
    (fd, guard)
}

fn nop(fd: i32) -> UserBuffer {
    UserBuffer::new(fd, &[0, 0, 0, 0, 0, 0, 0, 0x0a])
}

#[test]
fn calls_fail_as_the_rule_says_and_the_rule_is_used_up() {
    let (fd, _guard) = card_with_faults();
    inject("hlthunk_device_memory_alloc fail:ENOMEM after=1\nhlthunk_close fail:EIO times=0\n");
    let first = hlthunk_device_memory_alloc(fd, 1, 0, false, false);
    assert_ne!(first, 0);
    assert_eq!(hlthunk_device_memory_alloc(fd, 1, 0, false, false), 0);
    assert_eq!(errno(), libc::ENOMEM);
    assert_ne!(hlthunk_device_memory_alloc(fd, 1, 0, false, false), 0);
    assert_eq!(remaining_rules(), "hlthunk_close fail:EIO after=0 times=0\n");
    assert_eq!(hlthunk_close(fd), -1);
    inject("");
    assert_eq!(hlthunk_close(fd), 0);
}

#[test]
fn a_failing_transfer_aborts_its_submission() {
    let (fd, _guard) = card_with_faults();
    let mut memory = vec![0u8; 64];
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    assert_eq!(wait(fd, buffer.submit(0).unwrap()), (0, 0));
    inject("transfer fail:EIO\n");
    assert_eq!(wait(fd, buffer.submit(0).unwrap()), (-libc::EIO, sys::WAIT_ABORTED));
    assert_eq!(remaining_rules(), "");
}

fn replace_stderr(by: &OwnedFd) {
    // SAFETY: both are open; whoever uses standard error does so by its number.
    assert_ne!(unsafe { libc::dup2(by.as_raw_fd(), libc::STDERR_FILENO) }, -1);
}

/// Blocks what writes to standard error until the answer is dropped.
struct BlockedStderr {
    saved: OwnedFd,
    reader: std::fs::File,
}

impl BlockedStderr {
    fn new() -> Self {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::NONBLOCK).unwrap();
        while rustix::io::write(&writer, &[b' '; 4096]).is_ok() {}
        for end in [&reader, &writer] {
            rustix::fs::fcntl_setfl(end, rustix::fs::OFlags::empty()).unwrap();
        }
        let saved = rustix::io::dup(std::io::stderr()).unwrap();
        replace_stderr(&writer);
        Self { saved, reader: reader.into() }
    }
}

impl Drop for BlockedStderr {
    fn drop(&mut self) {
        // Whoever is in a write ends it when there is room, and then nobody has the other end.
        let mut reader = self.reader.try_clone().unwrap();
        let drain = std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
        replace_stderr(&self.saved);
        drain.join().unwrap().unwrap();
    }
}

#[test]
fn a_submission_whose_transfer_failed_is_not_completed_by_another_thread_before_the_reset() {
    let (fd, _guard) = card_with_faults();
    let mut memory = vec![0u8; 1 << 20];
    let half = memory.len() / 2;
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + half as u64, half as u32));
    inject("transfer fail:EIO\n");
    // A worker of the card is kept between the fault and the reset: it says that the card is reset.
    let blocked = BlockedStderr::new();
    let sequence = buffer.submit(0).unwrap();
    while !remaining_rules().is_empty() {
        std::thread::yield_now();
    }
    let release = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(blocked);
    });
    let waited = wait(fd, sequence);
    release.join().unwrap();
    assert_ne!(waited, (0, 0));
    assert!(memory[half..].iter().all(|byte| *byte == 0));
}

/// The second of two equal copies is carried out as well: its source may have changed in between.
#[test]
fn an_identical_consecutive_copy_is_executed_again() {
    let (fd, _guard) = card_with_faults();
    let mut memory = vec![0u8; 64];
    let host = map_host(fd, &mut memory);
    let copy = gaudi2_copy(host, host + 32, 32);
    let buffer = UserBuffer::new(fd, &[copy.clone(), copy].concat());
    inject("transfer fail:EIO after=1\n");
    assert_eq!(wait(fd, buffer.submit(0).unwrap()), (-libc::EIO, sys::WAIT_ABORTED));
    assert_eq!(remaining_rules(), "");
}

#[test]
fn a_hanging_submission_times_out_and_signals_the_notifier() {
    let (fd, _guard) = card_with_faults();
    let notifier = hlthunk_notifier_create(fd);
    assert!(notifier >= 0);
    assert_eq!(hlthunk_notifier_create(fd), -libc::EINVAL);
    let buffer = nop(fd);
    inject("submission hang\n");
    let stuck = buffer.submit(0).unwrap();
    let behind = buffer.submit(0).unwrap();
    assert_eq!(poll(fd, stuck, 0), sys::WAIT_BUSY);
    // No thread waits for the submission: a worker checks the timeout.
    let (mut events, mut count) = (0, 0);
    assert_eq!(hlthunk_notifier_recv(fd, notifier, &mut events, &mut count, 0, 20_000), 0);
    assert_eq!((events, count), (1 << 3 | 1 << 2, 1));
    assert_eq!(wait(fd, stuck), (-libc::ETIMEDOUT, sys::WAIT_TIMEDOUT));
    assert_eq!(wait(fd, behind), (-libc::EIO, sys::WAIT_ABORTED));
    let mut record = CsTimeoutRecord::default();
    assert_eq!(hlthunk_get_event_record(fd, 1, (&raw mut record).cast()), 0);
    assert_eq!(record.seq, stuck);
    assert_eq!(hlthunk_notifier_release(fd, notifier), 0);
}

/// As the driver with SKIP_RESET_ON_TIMEOUT (0x400): recorded, logged and announced once; in flight until the close.
/// The driver also logs the end of each such submission, as an error, although it came in time.
#[test]
fn a_hanging_submission_that_spares_the_card_stays_in_flight() {
    let (fd, _guard) = card_with_faults();
    let log = machine_file("kernel.log");
    let count = |what| std::fs::read_to_string(&log).unwrap_or_default().matches(what).count();
    let lines = || [count(" timeout 110\n"), count(" ended 0\n")];
    let [timeouts, ends] = lines();
    let notifier = hlthunk_notifier_create(fd);
    let buffer = nop(fd);
    inject("submission hang\n");
    let mut chunk = [user_chunk(0, buffer.va, 8)];
    let stuck = submit_flagged(fd, &mut chunk, 0x400).unwrap();
    let (mut events, mut count) = (0, 0);
    assert_eq!(hlthunk_notifier_recv(fd, notifier, &mut events, &mut count, 0, 20_000), 0);
    assert_eq!((events, count), (1 << 3, 1), "a timeout and no reset");
    let mut record = CsTimeoutRecord::default();
    assert_eq!(hlthunk_get_event_record(fd, 1, (&raw mut record).cast()), 0);
    assert_eq!(record.seq, stuck);
    for _ in 0..3 {
        assert_eq!(wait(fd, buffer.submit(4).unwrap()), (0, sys::WAIT_COMPLETED), "another queue");
        assert_eq!(poll(fd, stuck, 200_000), sys::WAIT_BUSY);
    }
    assert_eq!(lines(), [timeouts + 1, ends]);
    let mut chunk = [user_chunk(4, buffer.va, 8)];
    let in_time = submit_flagged(fd, &mut chunk, 0x400).unwrap();
    assert_eq!(wait(fd, in_time), (0, sys::WAIT_COMPLETED));
    assert_eq!(lines(), [timeouts + 1, ends + 1]);
    assert_eq!(hlthunk_notifier_release(fd, notifier), 0);
    drop(buffer);
    assert_eq!(hlthunk_close(fd), 0);
}

#[test]
fn a_late_submission_ends_after_others() {
    let (fd, _guard) = card_with_faults();
    let buffer = nop(fd);
    inject("submission late:2\n");
    let late = buffer.submit(0).unwrap();
    for _ in 0..2 {
        assert_eq!(poll(fd, late, 0), sys::WAIT_BUSY);
        assert_eq!(wait(fd, buffer.submit(4).unwrap()), (0, sys::WAIT_COMPLETED));
    }
    assert_eq!(wait(fd, late), (0, sys::WAIT_COMPLETED));
}

#[test]
fn after_reset_calls_give_ebusy_and_after_removal_enodev() {
    let (fd, _guard) = card_with_faults();
    let mut bus = [0i8; 13];
    assert_eq!(hlthunk_get_pci_bus_id_from_fd(fd, bus.as_mut_ptr(), 13), 0);
    inject("hlthunk_memory_unmap reset\n");
    assert_eq!(hlthunk_memory_unmap(fd, 0x1234), -libc::EBUSY);
    assert!(hlthunk_get_device_status_info(fd) > 0, "it can be asked what it is in");
    assert_eq!(hlthunk_close(fd), 0);
    let fd = hlthunk_open(sys::DEVICE_DONT_CARE, bus.as_ptr());
    assert!(fd >= 0);
    inject("hlthunk_memory_unmap remove\n");
    assert_eq!(hlthunk_memory_unmap(fd, 0x1234), -libc::ENODEV);
    assert_eq!(hlthunk_device_memory_alloc(fd, 1, 0, false, false), 0);
    assert_eq!(errno(), libc::ENODEV);
    assert_eq!(hlthunk_get_device_status_info(fd), -libc::ENODEV);
    hlthunk_close(fd);
    assert_eq!(hlthunk_open(sys::DEVICE_DONT_CARE, bus.as_ptr()), -libc::ENODEV);
}
