//! dma-bufs given as descriptors: bytes on every card, refusals with their reasons, and their end.

mod machine;
mod poison;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use gaudi::{
    Allocation, Device, DeviceAddr, Error, ErrorKind, ImportedRegion, Segment, Side, runtime,
};
use machine::{Footprint, alone, assert_same, faults, open, pattern, read, write};
use poison::{MARGIN, POISON, at, framed, poisoned};

fn stat(name: &str) -> u64 {
    stats_reader::read(std::process::id()).unwrap().get(name).unwrap_or_else(|| panic!("{name}"))
}

fn copy(device: &Arc<Device>, dst: Side, src: Side, len: usize) -> Result<(), Error> {
    let segment = Segment { dst, src, len, host_region: None };
    // SAFETY: the caller's memory lives across the call.
    match unsafe { device.copy(&[segment]) } {
        Ok(mut transfer) => transfer.wait(),
        Err(gaudi::SubmitError::Failed(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

/// Poisoned memory of a card with `len` bytes in it, and its dma-buf.
fn exported(device: &Arc<Device>, len: usize) -> (Allocation, OwnedFd, u64) {
    let memory = poisoned(device, len);
    let (fd, offset) = device.export(at(&memory, MARGIN), len as u64).unwrap();
    (memory, fd, offset)
}

#[test]
fn a_dmabuf_is_read_and_written_at_odd_places_and_nothing_beside_it() {
    alone!(2);
    let (here, there) = (open(0), open(1));
    for len in [1, 3, 4095, 4097, 70_001, (2 << 20) + 5] {
        let (memory, fd, offset) = exported(&there, len);
        let bytes = pattern(len, len as u64);
        write(&there, at(&memory, MARGIN), &bytes);
        let import = here.import(fd.as_fd(), offset, len as u64).unwrap();
        // The descriptor is the caller's.
        drop(fd);
        assert_eq!((import.len(), import.device().id()), (len as u64, here.id()));
        let ours = poisoned(&here, len);
        let (local, remote) = (Side::Device(at(&ours, 1)), Side::Device(import.addr()));
        copy(&here, local, remote, len).unwrap();
        let whole = len + 2 * MARGIN;
        assert_same(&read(&here, ours.addr(), whole), &framed(&bytes, 1), "read from a dma-buf");
        let other = pattern(len, 7);
        write(&here, at(&ours, 1), &other);
        copy(&here, remote, local, len).unwrap();
        let expected = framed(&other, MARGIN);
        assert_same(&read(&there, memory.addr(), whole), &expected, "written to a dma-buf");
        // Host memory, too, small and pinned.
        let mut host = vec![POISON; len + 2];
        copy(&here, Side::Host(host[1..].as_mut_ptr()), remote, len).unwrap();
        assert_same(&host[1..=len], &other, "to host memory");
        assert_eq!((host[0], host[len + 1]), (POISON, POISON));
        assert_eq!(runtime().locate(import.addr().0, 1), None, "no allocation of ours");
    }
}

#[test]
fn an_import_is_counted_and_unmapped_once() {
    alone!(2, ("SOFT_GAUDI_FAULTS", "yes"));
    let (here, there) = (open(0), open(1));
    let (memory, fd, offset) = exported(&there, 5000);
    let import = || here.import(fd.as_fd(), offset, 5000).unwrap();
    drop(import());
    let footprint = Footprint::now();
    for _ in 0..300 {
        drop(import());
    }
    footprint.assert_flat("300 imports");
    assert_eq!((stat("dmabuf_imports"), stat("dmabuf_imports_live")), (301, 0));
    let (one, two) = (import(), import());
    assert_ne!(one.addr(), two.addr());
    assert_eq!((stat("dmabuf_imports_live"), stat("dmabuf_failures_range")), (2, 0));
    let gone = one.addr();
    drop(one);
    let to = here.alloc(5000, 1).unwrap();
    copy(&here, Side::Device(to.addr()), Side::Device(two.addr()), 5000).unwrap();
    let refused = copy(&here, Side::Device(to.addr()), Side::Device(gone), 5000);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidParams, "unmapped");
    assert_eq!(runtime().take_drop_errors(), []);
    // It keeps the card open, and the exporter's memory.
    let card = here.id();
    drop((here, to));
    assert!(runtime().device(card).is_some());
    drop(two);
    assert!(runtime().device(card).is_none());
    drop((memory, fd));
    assert_eq!(runtime().take_drop_errors(), []);
}

#[test]
fn what_is_no_dmabuf_or_too_short_is_refused_with_the_reason() {
    alone!(2);
    let (here, there) = (open(0), open(1));
    let (_memory, fd, offset) = exported(&there, 8192);
    let size = rustix::fs::fstat(&fd).unwrap().st_size as u64;
    let memfd = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, 1 << 20).unwrap();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    // SAFETY: only looked at; nothing has that number.
    let closed = unsafe { BorrowedFd::borrow_raw(1 << 20) };
    let null: OwnedFd = File::open("/dev/null").unwrap().into();
    for (fd, from, len, words) in [
        (fd.as_fd(), size - 10, 11, "11 bytes from offset"),
        (fd.as_fd(), size, 1, "are not inside"),
        (fd.as_fd(), offset, 0, "at least one byte"),
        (fd.as_fd(), u64::MAX, 2, "are not inside"),
        (memfd.as_fd(), 0, 4096, "is not of a dma-buf"),
        (reader.as_fd(), 0, 4096, "is not of a dma-buf"),
        (null.as_fd(), 0, 4096, "is not of a dma-buf"),
        (closed, 0, 4096, "is not of a dma-buf"),
    ] {
        let error = here.import(fd, from, len).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidParams, "{error}");
        let text = error.to_string();
        assert!(text.contains(words) && text.contains("importing a dma-buf"), "{words}: {text}");
        assert!(!text.contains('\n') && !error.remedy().words().is_empty(), "{text}");
    }
    assert_eq!(here.import(closed, 0, 1).unwrap_err().errno(), Some(libc::EBADF));
    assert_eq!(stat("dmabuf_imports"), 0);
    assert_eq!(stat("dmabuf_failures_range") + stat("dmabuf_failures_refused"), 9);
    // Neither is the card the worse for it.
    drop(here.import(fd.as_fd(), offset, 8192).unwrap());
}

#[test]
fn a_driver_without_import_says_so() {
    alone!(2, ("SOFT_GAUDI_LENIENT", ""));
    let (here, there) = (open(0), open(1));
    let (_memory, fd, offset) = exported(&there, 8192);
    let error = here.import(fd.as_fd(), offset, 8192).unwrap_err();
    assert!(error.is_unsupported() && error.kind() == ErrorKind::InvalidParams, "{error}");
    assert!(error.to_string().contains("the driver has no dma-buf import; "), "{error}");
    assert_eq!(stat("dmabuf_failures_unsupported"), 1);
}

#[test]
fn a_forked_child_is_refused_and_its_drop_unmaps_nothing() {
    alone!(2);
    let (here, there) = (open(0), open(1));
    let (memory, fd, offset) = exported(&there, 8192);
    write(&there, at(&memory, MARGIN), &pattern(8192, 3));
    let mut import = Some(here.import(fd.as_fd(), offset, 8192).unwrap());
    let region = ImportedRegion::new(&here, (0x1000, 8192), fd.as_fd(), offset).unwrap();
    let mut region = Some(region);
    // SAFETY: the child looks, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = here.import(fd.as_fd(), offset, 8192).map(drop);
        let forked = matches!(&refused, Err(error) if error.kind() == ErrorKind::PermissionDenied
            && error.to_string().contains("forked"));
        drop(import.take());
        drop(region.take());
        // SAFETY: ends the process without its parent's handlers.
        unsafe { libc::_exit(if forked { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let to = here.alloc(8192, 1).unwrap();
    let sources = [
        import.as_ref().unwrap().addr(),
        region.as_ref().unwrap().find(None, 0x1000, 8192).unwrap().0,
    ];
    for from in sources {
        copy(&here, Side::Device(to.addr()), Side::Device(from), 8192).unwrap();
        assert_same(&read(&here, to.addr(), 8192), &pattern(8192, 3), "the parent's");
    }
}

#[test]
fn after_a_reset_an_import_is_dropped_without_a_trace_and_the_card_opens_again() {
    alone!(2, ("SOFT_GAUDI_FAULTS", "yes"));
    let (here, there) = (open(0), open(1));
    let (memory, fd, offset) = exported(&there, 8192);
    write(&there, at(&memory, MARGIN), &pattern(8192, 4));
    let region = ImportedRegion::new(&here, (0x5000, 8192), fd.as_fd(), offset).unwrap();
    let import = here.import(fd.as_fd(), offset, 8192).unwrap();
    let to = here.alloc(8192, 1).unwrap();
    faults("transfer reset times=1");
    copy(&here, Side::Device(to.addr()), Side::Device(import.addr()), 8192).unwrap_err();
    assert!(here.is_surely_lost());
    drop((import, to));
    // A registration lets go of a card that was reset, and is good for the one opened after it.
    let error = region.find(None, 0x5000, 1).unwrap_err();
    assert!(error.to_string().contains("was reset"), "{error}");
    drop(here);
    let again = open(0);
    let to = again.alloc(8192, 1).unwrap();
    let (from, on) = region.find(Some(&again), 0x5000, 8192).unwrap();
    assert_eq!(on.id(), again.id());
    copy(&again, Side::Device(to.addr()), Side::Device(from), 8192).unwrap();
    assert_same(&read(&again, to.addr(), 8192), &pattern(8192, 4), "after the reset");
}

#[test]
fn a_region_is_mapped_once_for_each_card_that_uses_it() {
    alone!(3);
    let (here, there, third) = (open(0), open(1), open(2));
    let (memory, fd, offset) = exported(&there, 70_001);
    write(&there, at(&memory, MARGIN), &pattern(70_001, 5));
    let start = 0x7000_0003_u64;
    let region = ImportedRegion::new(&here, (start, 70_001), fd.as_fd(), offset).unwrap();
    drop(fd);
    for device in [&here, &third, &here, &third, &there] {
        let to = poisoned(device, 70_000);
        let (from, on) = region.find(Some(device), start + 1, 70_000).unwrap();
        assert_eq!(on.id(), device.id());
        copy(device, Side::Device(at(&to, 5)), Side::Device(from), 70_000).unwrap();
        let found = read(device, to.addr(), 70_000 + 2 * MARGIN);
        assert_same(&found, &framed(&pattern(70_001, 5)[1..], 5), "by a region");
    }
    assert_eq!(stat("dmabuf_imports"), 3, "one for each card");
    for (addr, len) in [(start - 1, 1), (start, 70_002), (start + 70_001, 1), (u64::MAX, 2), (0, 0)]
    {
        let error = region.find(Some(&here), addr, len).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidParams, "{error}");
    }
    // Memory of one card, mapped for another: what to do about it.
    let to = third.alloc(16, 1).unwrap();
    let (from, _) = region.find(None, start, 16).unwrap();
    let error = copy(&here, Side::Device(to.addr()), Side::Device(from), 16).unwrap_err();
    assert!(error.to_string().contains("import it for the card"), "{error}");
    drop(region);
    assert_eq!((stat("dmabuf_imports_live"), runtime().take_drop_errors()), (0, vec![]));
}

/// A dma-buf of the kernel's own exporter of host memory.
fn udmabuf(len: u64) -> Result<(OwnedFd, OwnedFd), String> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    #[repr(C)]
    struct Create {
        memfd: u32,
        flags: u32,
        offset: u64,
        size: u64,
    }
    const UDMABUF_CREATE: libc::c_ulong = 0x4018_7542;
    let device = File::options().read(true).write(true).open("/dev/udmabuf");
    let device = device.map_err(|error| format!("/dev/udmabuf: {error}"))?;
    let memory = memfd_create("udmabuf", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memory, len).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK).unwrap();
    let create = Create { memfd: memory.as_raw_fd() as u32, flags: 1, offset: 0, size: len };
    // SAFETY: the structure that this request takes.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE, &raw const create) };
    if fd < 0 {
        return Err(format!("UDMABUF_CREATE: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: just opened for us.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, memory))
}

#[test]
fn a_dmabuf_of_host_memory_is_copied_from_and_to() {
    alone!(1);
    let len = 64 << 10;
    let (fd, memory) = match udmabuf(len as u64) {
        Ok(made) => made,
        Err(why) => return println!("skipped: {why}"),
    };
    let device = open(0);
    let bytes = pattern(len, 8);
    rustix::io::pwrite(&memory, &bytes, 0).unwrap();
    let import = device.import(fd.as_fd(), 4097, 5003).unwrap();
    let ours = poisoned(&device, 5003);
    copy(&device, Side::Device(at(&ours, 3)), Side::Device(import.addr()), 5003).unwrap();
    let found = read(&device, ours.addr(), 5003 + 2 * MARGIN);
    assert_same(&found, &framed(&bytes[4097..9100], 3), "from a udmabuf");
    let other = pattern(5003, 9);
    write(&device, at(&ours, 3), &other);
    copy(&device, Side::Device(DeviceAddr(import.addr().0)), Side::Device(at(&ours, 3)), 5003)
        .unwrap();
    let mut expected = bytes;
    expected[4097..9100].copy_from_slice(&other);
    let mut found = vec![0; len];
    rustix::io::pread(&memory, &mut found[..], 0).unwrap();
    assert_same(&found, &expected, "to a udmabuf");
    drop(import);
    assert_eq!(runtime().take_drop_errors(), []);
}
