//! Forked children: what they may do with their parent's cards (nothing), what becomes of the objects
//! they inherit, and when they have cards of their own.

mod machine;
mod peer;

use std::os::fd::{FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use gaudi::share::RemoteKey;
use gaudi::{
    Device, DeviceAddr, DeviceChoice, Error, ErrorKind, HostRegion, Segment, Side, SubmitError,
    runtime,
};
use machine::{alone, assert_same, open, pattern, read, write};
use peer::Peer;

/// A child of this process.
struct Child {
    pid: i32,
    /// Closed to let it go on.
    go: Option<OwnedFd>,
}

impl Child {
    /// Forks. The child runs `run`, then waits for [`Child::succeeds`]; a panic is its failure.
    fn new(run: impl FnOnce()) -> Self {
        // SAFETY: the child runs the closure and ends; other threads of the test hold no lock of it.
        Self::made_by(|| unsafe { libc::fork() }, run)
    }

    fn made_by(fork: impl FnOnce() -> i32, run: impl FnOnce()) -> Self {
        let (mut done, mut go) = ([0; 2], [0; 2]);
        // SAFETY: space for two descriptors each.
        unsafe {
            assert_eq!((libc::pipe(done.as_mut_ptr()), libc::pipe(go.as_mut_ptr())), (0, 0));
        }
        let pid = fork();
        assert!(pid >= 0);
        if pid == 0 {
            let passed = catch_unwind(AssertUnwindSafe(run)).is_ok();
            // SAFETY: open descriptors, a byte each; ends the process without its parent's handlers.
            unsafe {
                libc::close(go[1]);
                libc::close(done[0]);
                libc::write(done[1], [0_u8].as_ptr().cast(), 1);
                libc::read(go[0], [0_u8].as_mut_ptr().cast(), 1);
                libc::_exit(if passed { 0 } else { 1 });
            }
        }
        // SAFETY: a byte from an open descriptor; these ends are ours.
        let go = unsafe {
            libc::close(done[1]);
            libc::close(go[0]);
            libc::read(done[0], [0_u8].as_mut_ptr().cast(), 1);
            libc::close(done[0]);
            OwnedFd::from_raw_fd(go[1])
        };
        Self { pid, go: Some(go) }
    }

    /// Lets it end; whether it ran without a panic.
    fn succeeds(mut self) -> bool {
        drop(self.go.take());
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(self.pid, &raw mut status, 0) }, self.pid);
        status == 0
    }
}

/// It was refused because this is a child.
#[track_caller]
fn assert_refused<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.to_string().contains("forked"), "{error}");
}

/// Everything that needs the parent's card.
fn use_parents_card(device: &Arc<Device>, at: DeviceAddr) {
    assert_refused(device.alloc(4096, 1));
    assert_refused(device.fill(at, 16, 1));
    assert_refused(device.export(at, 16));
    assert_refused(device.export_alone(at, 16));
    assert_refused(device.share(at, 16).map(drop));
    assert_refused(device.drain());
    for len in [8, 1 << 20] {
        let mut host = vec![7_u8; len];
        let (card, ours) = (Side::Device(at), Side::Host(host.as_mut_ptr()));
        for (dst, src) in [(card, ours), (ours, card)] {
            // SAFETY: the host memory lives across the calls.
            unsafe {
                assert_refused(device.copy_blocking(dst, src, len));
                match device.copy(&[Segment { dst, src, len, host_region: None }]) {
                    Err(SubmitError::Failed(error)) => assert_refused::<()>(Err(error)),
                    other => panic!("{other:?}"),
                }
            }
        }
        // SAFETY: as above.
        assert_refused(unsafe { runtime().copy(at.0, host.as_ptr() as u64, len) }.expect("found"));
        assert!(host.iter().all(|byte| *byte == 7), "nothing was copied");
    }
    assert_refused(runtime().open(&DeviceChoice::Any));
    assert_refused(runtime().open(&DeviceChoice::Index(1)));
}

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

#[test]
fn a_child_is_refused_its_parents_card_and_what_it_drops_stays_there() {
    alone!(2);
    let device = open(0);
    let memory = device.alloc(2 << 20, 1).unwrap();
    let at = memory.addr();
    let bytes = pattern(2 << 20, 1);
    write(&device, at, &bytes);
    let registered = bytes.clone();
    let region = HostRegion::record(registered.as_ptr().cast_mut(), registered.len());
    // SAFETY: the memory is there as long as the region is.
    assert!(unsafe { region.prepare(&device) }.unwrap());
    let exported = device.export(at, 4096).unwrap();
    let shared = device.share(at, 4096).unwrap();
    let src = Side::Host(registered.as_ptr().cast_mut());
    let segment = Segment {
        dst: Side::Device(at),
        src,
        len: registered.len(),
        host_region: Some(Arc::clone(&region)),
    };
    // SAFETY: the memory lives until the transfer is waited for.
    let mut transfer = unsafe { device.copy(&[segment]) }.unwrap();
    let mut inherited = Some((memory, region, exported, shared, device));
    let child = Child::new(|| {
        let (memory, region, exported, shared, device) = inherited.take().unwrap();
        use_parents_card(&device, at);
        assert_eq!(device.progress(), 0);
        drop((exported, shared, region, memory));
        drop(device);
        assert!(runtime().take_drop_errors().is_empty());
        assert_refused(runtime().open(&DeviceChoice::Any));
    });
    transfer.wait().unwrap();
    assert!(child.succeeds());
    let (memory, region, exported, shared, device) = inherited.take().unwrap();
    assert_same(&read(&device, at, bytes.len()), &bytes, "after the child");
    drop((exported, shared, region, memory));
    device.alloc(1, 1).unwrap();
    drop(device);
    assert!(runtime().take_drop_errors().is_empty());
}

#[test]
fn an_inherited_transfer_fails_in_the_child_and_ends_in_the_parent() {
    alone!(1);
    let device = open(0);
    let memory = device.alloc(8 << 20, 1).unwrap();
    let bytes = pattern(8 << 20, 3);
    let segment = |at: usize, len| Segment {
        dst: Side::Device(DeviceAddr(memory.addr().0 + at as u64)),
        src: Side::Host(bytes[at..].as_ptr().cast_mut()),
        len,
        host_region: None,
    };
    // Through bounce slots and pinned.
    // SAFETY: the bytes live until the transfers are waited for.
    let mut transfers = [segment(0, 1000), segment(4096, (8 << 20) - 4096)]
        .map(|segment| unsafe { device.copy(&[segment]) }.unwrap());
    let child = Child::new(|| {
        // What had ended before the fork is known to have.
        for transfer in &mut transfers {
            if let Err(error) = transfer.wait() {
                assert_refused::<()>(Err(error));
            }
        }
    });
    assert!(child.succeeds());
    transfers.iter_mut().for_each(|transfer| transfer.wait().unwrap());
    assert_same(&read(&device, memory.addr(), 1000), &bytes[..1000], "bounced");
    let pinned = DeviceAddr(memory.addr().0 + 4096);
    assert_same(&read(&device, pinned, (8 << 20) - 4096), &bytes[4096..], "pinned");
}

#[test]
fn a_child_is_refused_a_peers_memory_that_its_parent_has_open() {
    alone!(2);
    let mut peer = Peer::on_card(1);
    let key = RemoteKey::parse(&peer.share(1, 4096, 1)).unwrap();
    let device = open(0);
    let mut inherited = Some(key.open(&device).unwrap());
    let child = Child::new(|| {
        assert_refused(key.open(&device));
        drop(inherited.take());
    });
    assert!(child.succeeds());
    assert!(key.open(&device).is_ok());
}

#[test]
fn a_child_does_not_keep_its_parents_card_busy() {
    alone!(1);
    let device = open(0);
    let memory = device.alloc(1 << 20, 1).unwrap();
    write(&device, memory.addr(), &pattern(1 << 20, 4));
    // The engine keeps a dma-buf of the page, and one for peers; we keep nothing.
    drop(device.export(memory.addr(), 4096).unwrap());
    let share = device.share(memory.addr(), 4096).unwrap();
    let child = Child::new(|| {});
    drop((share, memory, device));
    let again = open(0);
    let memory = again.alloc(1 << 20, 1).unwrap();
    assert!(child.succeeds());
    drop(memory);
}

#[test]
fn a_child_made_by_a_bare_clone_is_refused_too() {
    alone!(2);
    let device = open(0);
    let memory = device.alloc(2 << 20, 1).unwrap();
    let bytes = pattern(5000, 5);
    write(&device, memory.addr(), &bytes);
    let at = memory.addr();
    let mut inherited = Some((memory, device));
    // SAFETY: a fork without handlers.
    let clone = || unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
    let child = Child::made_by(clone, || {
        let (memory, device) = inherited.take().unwrap();
        use_parents_card(&device, at);
        drop((memory, device));
    });
    assert!(child.succeeds());
    let (_memory, device) = inherited.take().unwrap();
    assert_same(&read(&device, at, bytes.len()), &bytes, "after the child");
}

/// Opens a card and checks that copies arrive.
fn use_own_card(choice: &DeviceChoice) {
    let device = runtime().open(choice).unwrap();
    let memory = device.alloc(100_000, 1).unwrap();
    for len in [5000, 100_000] {
        let bytes = pattern(len, 6);
        write(&device, memory.addr(), &bytes);
        assert_same(&read(&device, memory.addr(), len), &bytes, "own card");
    }
    let (dmabuf, _) = device.export_alone(memory.addr(), 4096).unwrap();
    drop(dmabuf);
    assert!(stats_reader::read(std::process::id()).is_ok(), "counters of its own");
}

#[test]
fn a_child_forked_before_a_card_was_opened_uses_cards_as_its_parent_does() {
    alone!(2);
    // The driver library is loaded, cards are known.
    assert_eq!(runtime().discover().unwrap().len(), 2);
    let child = Child::new(|| use_own_card(&DeviceChoice::Any));
    use_own_card(&DeviceChoice::Any);
    assert!(child.succeeds());
    // And again, now that the parent has used and closed one.
    let child = Child::new(|| use_own_card(&DeviceChoice::Any));
    use_own_card(&DeviceChoice::Any);
    assert!(child.succeeds());
}

#[test]
fn a_child_forked_while_a_thread_waits_for_a_card_opens_one_itself() {
    alone!(2, ("SOFT_GAUDI_FAULTS", "yes"));
    assert_eq!(runtime().discover().unwrap().len(), 2);
    machine::faults("hlthunk_open fail:EAGAIN times=0");
    let (waits, waiting) = std::sync::mpsc::channel();
    runtime().on_wait(move |line| waits.send(line.to_owned()).unwrap());
    let waiter = std::thread::spawn(|| runtime().open(&DeviceChoice::Index(0)));
    assert!(waiting.recv().unwrap().contains("in reset"));
    let child = Child::new(|| {
        // SAFETY: ends the child, should it hang.
        unsafe { libc::alarm(20) };
        machine::faults("");
        use_own_card(&DeviceChoice::Index(1));
    });
    assert!(child.succeeds());
    drop(waiter.join().unwrap().unwrap());
}
