//! Counters seen from outside: by another process, after a fork, through something that is no page;
//! and what is counted when things go wrong.

mod machine;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::sync::Arc;

use gaudi::{Device, DeviceAddr, ErrorKind, HostRegion, Segment, Side, runtime};
use machine::{Footprint, alone, faults, fresh, read, write};
use stats_reader::{Malformed, ReadError, Snapshot};

fn myself() -> u32 {
    std::process::id()
}

fn of(device: &Device, name: &str) -> u64 {
    let snapshot = stats_reader::read(myself()).unwrap();
    let card = snapshot.card(device.info().bus_id.as_str()).expect("a card that was opened");
    card.get(name).unwrap_or_else(|| panic!("no counter {name}"))
}

/// Not a test of its own: copies as standard input says, a byte a round, until it ends.
#[test]
#[ignore = "run by another test as a process of its own"]
fn copy_when_told() {
    machine::set_up("gaudi2");
    let device = fresh();
    let memory = device.alloc(4096, 1).unwrap();
    println!("\nREADY {}", device.info().bus_id);
    for _ in std::io::stdin().lock().bytes().map_while(Result::ok) {
        write(&device, memory.addr(), &[7; 1000]);
        println!("\nCOPIED");
    }
}

struct Copier {
    child: Child,
    lines: Box<dyn Iterator<Item = String>>,
    bus_id: String,
}

impl Copier {
    fn start() -> Self {
        machine::set_up("gaudi2");
        let mut command = machine::child("copy_when_told");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut lines = Box::new(lines);
        let ready = lines.find(|line| line.starts_with("READY")).expect("it says so");
        let bus_id = ready.split_whitespace().nth(1).unwrap().to_owned();
        Self { child, lines, bus_id }
    }

    fn copy(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        self.lines.find(|line| line == "COPIED").expect("it says so");
    }

    fn read(&self) -> Snapshot {
        stats_reader::read(self.child.id()).unwrap()
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn another_process_reads_while_the_first_copies() {
    let mut copier = Copier::start();
    assert_eq!(copier.read().get("h2d_operations"), Some(0));
    for round in 1..=5 {
        copier.copy();
        let snapshot = copier.read();
        assert_eq!(snapshot.pid, copier.child.id());
        let card = snapshot.card(&copier.bus_id).expect("its card");
        assert_eq!(card.get("h2d_operations"), Some(round));
        assert_eq!(card.get("h2d_bytes"), Some(1000 * round));
        assert_eq!(card.get("in_flight"), Some(0));
        assert_eq!(snapshot.get("h2d_bytes"), Some(1000 * round));
    }
    let table = copier.read().to_string();
    assert!(table.contains(&copier.bus_id) && table.contains("h2d_bytes"), "{table}");
    let pid = copier.child.id();
    drop(copier);
    let error = stats_reader::read(pid).unwrap_err();
    assert!(matches!(error, ReadError::NoProcess(gone) if gone == pid), "{error}");
    assert!(error.to_string().contains("does not exist"), "{error}");
}

#[test]
fn a_process_without_a_card_has_no_page() {
    alone!(64);
    let mut host = vec![0_u8; 1 << 20];
    drop(HostRegion::record(host.as_mut_ptr(), host.len()));
    runtime().discover().unwrap();
    let error = stats_reader::read(myself()).unwrap_err();
    assert!(matches!(error, ReadError::NoPage(_)), "{error}");
    let device = fresh();
    assert_eq!(gaudi::stats::why_unreadable(), None);
    let page = stats_reader::read(myself()).unwrap();
    let names: Vec<&str> = page.other.iter().map(|(about, _)| about.name.as_str()).collect();
    assert_eq!(names, gaudi::stats::NAMES);
    let bus_id = device.info().bus_id.clone();
    assert_eq!((of(&device, "opens"), of(&device, "open")), (1, 1));
    drop(device);
    let closed = stats_reader::read(myself()).unwrap();
    let card = closed.card(bus_id.as_str()).expect("still listed");
    assert_eq!((card.get("opens"), card.get("open")), (Some(1), Some(0)));
    let again = machine::open(0);
    assert_eq!((of(&again, "opens"), of(&again, "open")), (2, 1));
    assert_eq!(stats_reader::read(myself()).unwrap().cards.len(), 1, "one slot a card");
}

#[test]
fn a_forked_child_does_not_count_into_its_parents_page() {
    alone!(64);
    let device = fresh();
    let mut go = [0; 2];
    let mut done = [0; 2];
    // SAFETY: room for two descriptors each.
    unsafe {
        assert_eq!((libc::pipe(go.as_mut_ptr()), libc::pipe(done.as_mut_ptr())), (0, 0));
    }
    let before = of(&device, "failures_permission_denied");
    // SAFETY: the child only does what it does here, then leaves without cleaning up.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // Counted, in the child: what it may not do.
        let refused = device.alloc(1, 1).is_err();
        let mut byte = [u8::from(refused)];
        // SAFETY: a byte each, on open descriptors.
        unsafe {
            // So that reading ends should the parent fail.
            libc::close(go[1]);
            libc::write(done[1], byte.as_ptr().cast(), 1);
            libc::read(go[0], byte.as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
    }
    let mut byte = [0_u8];
    // SAFETY: a byte, on an open descriptor.
    let got = unsafe { libc::read(done[0], byte.as_mut_ptr().cast(), 1) };
    assert_eq!((got, byte), (1, [1]), "the child counted");
    assert_eq!(of(&device, "failures_permission_denied"), before, "not here");
    let error = stats_reader::read(child as u32).unwrap_err();
    let inherited = matches!(error, ReadError::Inherited { owner, .. } if owner == myself());
    assert!(inherited, "{error}");
    // SAFETY: as above; and the child is ours to wait for.
    unsafe {
        libc::write(go[1], byte.as_ptr().cast(), 1);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    let before = of(&device, "failures_out_of_memory");
    device.alloc(u64::MAX, 1).unwrap_err();
    assert_eq!(of(&device, "failures_out_of_memory"), before + 1, "the parent goes on");
}

#[test]
fn something_with_the_pages_name_is_refused_with_the_reason() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    alone!(64);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let refused = || match stats_reader::read(myself()).unwrap_err() {
        ReadError::Malformed { source, .. } => source,
        other => panic!("{other}"),
    };
    let file = memfd_create("ucx-gaudi-stats", flags).unwrap();
    assert_eq!(refused(), Malformed::NotSealed, "empty");
    ftruncate(&file, 4096).unwrap();
    assert_eq!(refused(), Malformed::NotSealed, "could shrink while it is read");
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    assert_eq!(refused(), Malformed::NotAPage);
    rustix::io::pwrite(&file, b"ucxgstat\x09\0\0\0", 0).unwrap();
    assert_eq!(refused(), Malformed::Version(9));
    rustix::io::pwrite(&file, b"ucxgstat\x01\0\0\0", 0).unwrap();
    assert_eq!(refused(), Malformed::Size { found: 4096, said: 0 });
    ftruncate(&file, 2 << 20).unwrap();
    assert_eq!(refused(), Malformed::NotSealed, "too large");
    drop(file);
    // The real one is found next to a foreign one.
    let _stranger = memfd_create("ucx-gaudi-stats", flags).unwrap();
    machine::set_up("gaudi2");
    let device = fresh();
    assert_eq!(of(&device, "opens"), 1);
}

#[test]
fn dmabuf_failures_are_counted_by_cause() {
    alone!(64, ("SOFT_GAUDI_FAULTS", "yes"));
    let device = fresh();
    let memory = device.alloc(4096, 1).unwrap();
    let export = "hlthunk_device_mapped_memory_export_dmabuf_fd";
    let rows = [
        ("EMFILE", "resources", "out_of_memory"),
        ("ENOMEM", "resources", "out_of_memory"),
        ("EPERM", "permission", "permission_denied"),
        ("EINVAL", "refused", "channel_failed"),
        ("EIO", "device_lost", "channel_failed"),
        ("ENODEV", "device_lost", "device_not_found"),
    ];
    for (errno, cause, kind) in rows {
        let names = [format!("dmabuf_failures_{cause}"), format!("failures_{kind}")];
        let before = names.each_ref().map(|name| of(&device, name));
        faults(&format!("{export} fail:{errno}"));
        device.export(memory.addr(), 4096).unwrap_err();
        let after = names.each_ref().map(|name| of(&device, name));
        assert_eq!(after, before.map(|count| count + 1), "{errno}");
    }
    device.export(DeviceAddr(4096), 1).unwrap_err();
    assert_eq!(of(&device, "dmabuf_failures_range"), 1);
    device.export(memory.addr(), 4096).unwrap();
    assert_eq!(of(&device, "dmabuf_exports"), 1);
    let causes = ["range", "unsupported", "resources", "permission", "device_lost", "refused"];
    let all: u64 =
        causes.iter().map(|cause| of(&device, &format!("dmabuf_failures_{cause}"))).sum();
    assert_eq!(all, rows.len() as u64 + 1, "each once");
}

#[test]
fn failed_copies_are_dma_errors_and_move_no_bytes() {
    alone!(64, ("SOFT_GAUDI_FAULTS", "yes"));
    let device = fresh();
    let memory = device.alloc(1 << 20, 1).unwrap();
    let mut host = vec![1_u8; 1 << 20];
    let sides = (Side::Device(memory.addr()), Side::Host(host.as_mut_ptr()));
    // SAFETY: the buffer lives across every call.
    let copy = |len| unsafe { device.copy_blocking(sides.0, sides.1, len) };
    copy(100).unwrap();
    let names = ["h2d_operations", "submissions", "dma_errors", "failures_dma_failed", "in_flight"];
    let now = || names.map(|name| of(&device, name));
    assert_eq!(now(), [1, 1, 0, 0, 0]);
    // Refused at once: small and bounced, large and pinned.
    for (round, len) in [(1, 100), (2, 1 << 20)] {
        faults("hlthunk_command_submission fail:EIO");
        assert_eq!(copy(len).unwrap_err().kind(), ErrorKind::DmaFailed);
        assert_eq!(now(), [1, 1, round, round, 0]);
    }
    assert_eq!(of(&device, "pins"), of(&device, "unpins") + 1, "the bounce ring stays pinned");
    // Memory that cannot be pinned goes through bounce buffers.
    faults("hlthunk_host_memory_map fail:EFAULT");
    copy(1 << 20).unwrap();
    assert_eq!((of(&device, "pins_refused"), of(&device, "bounced_operations")), (1, 17));
    assert_eq!(of(&device, "h2d_bytes"), 100 + (1 << 20));
    // Accepted, then given up: the bytes did not arrive.
    let before = now();
    faults("transfer fail:EIO");
    assert_eq!(copy(100).unwrap_err().kind(), ErrorKind::DmaFailed);
    let [operations, submissions, errors, failures, _] = before;
    assert_eq!(now(), [operations, submissions + 1, errors + 1, failures + 1, 0]);
    assert_eq!(of(&device, "h2d_bytes"), 100 + (1 << 20));
}

/// A copy that keeps the queue deep.
#[test]
fn the_queue_is_counted_now_and_at_its_deepest() {
    machine::set_up("gaudi2");
    let device = fresh();
    let memory = device.alloc(64 << 20, 1).unwrap();
    let mut host = vec![1_u8; 64 << 20];
    let host_region = Some(HostRegion::record(host.as_mut_ptr(), host.len()));
    let (dst, src) = (Side::Device(memory.addr()), Side::Host(host.as_mut_ptr()));
    let segment = Segment { dst, src, len: 64 << 20, host_region };
    // SAFETY: the buffer lives until all transfers have finished.
    let start = || unsafe { device.copy(std::slice::from_ref(&segment)) };
    let mut transfers: Vec<_> = (0..8).map(|_| start().unwrap()).collect();
    // They were not polled: as far as is known, all are in flight.
    assert_eq!((of(&device, "in_flight"), of(&device, "in_flight_max")), (8, 8));
    transfers.iter_mut().for_each(|transfer| transfer.wait().unwrap());
    assert_eq!((of(&device, "in_flight"), of(&device, "in_flight_max")), (0, 8));
    assert_eq!(of(&device, "h2d_bytes"), 8 * (64 << 20));
    assert_eq!(read(&device, memory.addr(), 10), [1; 10]);
}

/// The counts of a card that ought to be the same before and after.
fn live(device: &Device) -> [u64; 6] {
    let names = [
        "allocations_live",
        "allocated_bytes",
        "reserved_bytes",
        "dmabuf_live",
        "dmabuf_bytes",
        "pinned_bytes",
    ];
    names.map(|name| of(device, name))
}

#[track_caller]
fn assert_cycles_are_flat(device: &Arc<Device>, what: &str, mut cycle: impl FnMut()) {
    const CYCLES: usize = 10_000;
    (0..100).for_each(|_| cycle());
    let (footprint, memory, counts) = (Footprint::now(), device.memory(), live(device));
    (0..CYCLES).for_each(|_| cycle());
    footprint.assert_flat(what);
    assert_eq!(device.memory(), memory, "{what}: device memory");
    assert_eq!(live(device), counts, "{what}: counters");
}

#[test]
fn ten_thousand_registrations_and_exports_leave_nothing_behind() {
    alone!(64);
    let device = fresh();
    let memory = device.alloc(1 << 20, 1).unwrap();
    let mut host = vec![3_u8; 128 << 10];
    let (start, len) = (host.as_mut_ptr(), host.len());
    let (pins, unpins) = (of(&device, "pins"), of(&device, "unpins"));
    assert_cycles_are_flat(&device, "register, copy, deregister", || {
        let region = HostRegion::record(start, len);
        let (dst, src) = (Side::Device(memory.addr()), Side::Host(start));
        let segment = Segment { dst, src, len, host_region: Some(Arc::clone(&region)) };
        // SAFETY: the buffer lives across the wait.
        unsafe { device.copy(&[segment]) }.unwrap().wait().unwrap();
        assert!(region.is_pinned_for(&device));
    });
    assert_eq!(of(&device, "pins") - pins, 10_100);
    assert_eq!(of(&device, "unpins") - unpins, 10_100);
    assert_cycles_are_flat(&device, "export a shared dma-buf, close", || {
        drop(device.export(memory.addr(), 4096).unwrap());
    });
    assert_eq!((of(&device, "dmabuf_exports"), of(&device, "dmabuf_descriptors")), (1, 10_100));
    assert_cycles_are_flat(&device, "export a dma-buf of its own, close", || {
        drop(device.export_alone(memory.addr(), 4096).unwrap());
    });
    assert_eq!(of(&device, "dmabuf_exports"), 10_101);
    assert_cycles_are_flat(&device, "allocate, export, free", || {
        let other = device.alloc(100, 1).unwrap();
        drop(device.export(other.addr(), 100).unwrap());
    });
}
