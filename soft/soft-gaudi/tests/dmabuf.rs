//! Exported memory: what may be exported, how long it lives, and who can reach it.

mod driver;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;
use soft_gaudi::dmabuf::Exported;

const PAGE: u64 = 768 << 20;

/// What the second process does; in a normal run there is nothing to do.
#[test]
fn child() {
    let Some((role, argument)) = child_role() else { return };
    machine("gaudi2");
    let _exclusive = exclusive();
    let parent = parent();
    match role.as_str() {
        "export" => {
            let fd = open(argument);
            let (_, va) = alloc(fd, 2 * PAGE);
            // Across the edge of two pages.
            put(fd, va + PAGE - 8192, &pattern(16384, 42));
            let dmabuf = export(fd, va, 16384, PAGE - 8192);
            assert!(dmabuf >= 0);
            send_fd(&parent, dmabuf);
            wait_for_end(&parent);
        }
        "import" => {
            let fd = open(argument);
            let dmabuf = receive_fd(&parent);
            let va = import(fd, dmabuf.as_raw_fd(), 8192).unwrap();
            drop(dmabuf);
            put(fd, va + 100, &pattern(5000, 7));
            send(&parent, 0);
            wait_for_end(&parent);
        }
        other => panic!("no such role: {other}"),
    }
}

#[test]
fn exports_are_checked_as_the_driver_does() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let fd = card();
    let (handle, va) = alloc(fd, 1);
    let mut host = vec![0u8; 8192];
    let host_va = map_host(fd, &mut host);
    let refused = [
        (va + 4096, 4096, 0, "not the start of a mapping"),
        (handle, 4096, 0, "a handle"),
        (host_va & !4095, 4096, 0, "host memory"),
        (va, 0, 0, "nothing"),
        (va, 100, 0, "part of a page"),
        (va, 4096, 100, "offset in a page"),
        (va, PAGE, 4096, "beyond the end"),
        (va, 4096, u64::MAX - 4095, "wrapping around"),
    ];
    for (addr, size, offset, what) in refused {
        assert_eq!(export(fd, addr, size, offset), -libc::EINVAL, "{what}");
    }
    assert_eq!(hlthunk_device_mapped_memory_export_dmabuf_fd(fd, va, 4096, 0, 0), -libc::EINVAL);
    // The older function ignores the flags and takes no offset.
    let old = hlthunk_device_memory_export_dmabuf_fd(fd, va, PAGE, 0);
    assert!(old >= 0);
    // SAFETY: plain system calls on a descriptor of this test.
    unsafe {
        assert_eq!(libc::lseek(old, 0, libc::SEEK_END), PAGE as i64);
        assert_ne!(libc::fcntl(old, libc::F_GETFD) & libc::FD_CLOEXEC, 0);
        for protection in [libc::PROT_READ, libc::PROT_WRITE, libc::PROT_READ | libc::PROT_WRITE] {
            let flags = libc::MAP_SHARED;
            let mapped = libc::mmap(core::ptr::null_mut(), 4096, protection, flags, old, 0);
            assert_eq!(mapped, libc::MAP_FAILED);
        }
        libc::close(old);
    }
}

#[test]
fn exported_memory_stays_until_the_last_descriptor_is_closed() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let fd = open(index);
    let (handle, va) = alloc(fd, 1);
    // SAFETY: fresh descriptors.
    let one = unsafe { OwnedFd::from_raw_fd(export(fd, va, 4096, 0)) };
    // SAFETY: as above.
    let two = unsafe { OwnedFd::from_raw_fd(export(fd, va, PAGE, 0)) };
    assert_eq!(hlthunk_memory_unmap(fd, va), -libc::EINVAL);
    assert_eq!(hlthunk_device_memory_free(fd, handle), -libc::EINVAL);
    drop(one);
    assert_eq!(hlthunk_memory_unmap(fd, va), -libc::EINVAL);
    let copy = two.try_clone().unwrap();
    drop(two);
    assert_eq!(hlthunk_memory_unmap(fd, va), -libc::EINVAL);
    // The card stays busy after its own descriptor is closed.
    hlthunk_close(fd);
    assert_eq!(open(index), -libc::EBUSY);
    drop(copy);
    let fd = open(index);
    assert!(fd >= 0);
    let (handle, va) = alloc(fd, 1);
    drop(export_fd(fd, va, 4096, 0));
    assert_eq!(hlthunk_memory_unmap(fd, va), 0);
    assert_eq!(hlthunk_device_memory_free(fd, handle), 0);
}

#[test]
fn a_second_card_reaches_the_memory_of_the_first() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let (one, two) = (card(), card());
    let (_, va) = alloc(one, 1);
    let size = 300_000;
    put(one, va + 4096, &pattern(size, 5));
    let dmabuf = export_fd(one, va, 1 << 20, 4096);
    assert_eq!(import(two, dmabuf.as_raw_fd(), (1 << 20) + 1), Err(libc::EINVAL));
    assert_eq!(import(two, one, 4096), Err(libc::EINVAL));
    assert_eq!(import(two, -1, 4096), Err(libc::EBADF));
    let remote = import(two, dmabuf.as_raw_fd(), 1 << 20).unwrap();
    // As the out-of-tree driver: in the host's range.
    assert_eq!(remote >> 48, 0xfff0);
    assert_eq!(get(two, remote, size), pattern(size, 5));
    put(two, remote + 77, &pattern(1000, 6));
    assert_eq!(get(one, va + 4096 + 77, 1000), pattern(1000, 6));
    // The import is a reference like a descriptor.
    drop(dmabuf);
    assert_eq!(hlthunk_memory_unmap(one, va), -libc::EINVAL);
    assert_eq!(hlthunk_memory_unmap(two, remote), 0);
    assert_eq!(hlthunk_memory_unmap(one, va), 0);
    hlthunk_close(one);
    hlthunk_close(two);
}

/// Another device's dma-buf, a CUDA GPU's for one, cannot be mapped by the CPU, so the software card cannot
/// reach what is behind it; other files are no dma-bufs at all.
#[test]
fn descriptors_that_are_not_of_a_gaudi_are_refused_and_the_card_works_on() {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    machine("gaudi2");
    let _exclusive = exclusive();
    let fd = card();
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let notifier = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    // Sealed, so that it could be trusted not to shrink, full of random-looking bytes, and long enough.
    let memory = memfd_create("foreign", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, 1 << 20).unwrap();
    rustix::io::pwrite(&memory, &pattern(65536, 3), 0).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE).unwrap();
    // As an unfinished description would begin.
    let beginning = memfd_create("beginning", MemfdFlags::empty()).unwrap();
    rustix::io::pwrite(&beginning, b"softGdma", 0).unwrap();
    let folder = rustix::fs::open("/proc/self", rustix::fs::OFlags::RDONLY, 0.into()).unwrap();
    let foreign: [(&str, &OwnedFd); 5] = [
        ("a pipe", &writer),
        ("an eventfd", &notifier),
        ("a sealed memfd", &memory),
        ("the beginning of a description", &beginning),
        ("a folder", &folder),
    ];
    for (what, descriptor) in foreign {
        for length in [1, 4096, 1 << 20] {
            assert_eq!(import(fd, descriptor.as_raw_fd(), length), Err(libc::EINVAL), "{what}");
        }
        assert!(Exported::from_fd(descriptor.as_fd()).is_err(), "{what}");
    }
    let (_, va) = alloc(fd, 1);
    put(fd, va, &pattern(5000, 8));
    assert_eq!(get(fd, va, 5000), pattern(5000, 8));
}

#[test]
fn a_dmabuf_outlives_the_process_that_exported_it() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let mut other = Child::start("export", index);
    let dmabuf = other.receive_fd();
    other.kill();
    assert_eq!(open(index), -libc::EBUSY);
    let fd = card();
    let va = import(fd, dmabuf.as_raw_fd(), 16384).unwrap();
    assert_eq!(get(fd, va, 16384), pattern(16384, 42));
    // The Rust side door for other software devices.
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    assert_eq!((exported.size(), exported.device()), (16384, index));
    let total: u64 = exported.ranges().iter().map(|range| range.len).sum();
    assert_eq!(total, 16384);
    drop(dmabuf);
    hlthunk_memory_unmap(fd, va);
    assert_eq!(open(index), -libc::EBUSY);
    drop(exported);
    let again = open(index);
    assert!(again >= 0);
    hlthunk_close(again);
}

#[test]
fn an_importer_in_another_process_writes_and_dies() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let (mine, theirs) = (fresh_index(), fresh_index());
    let fd = open(mine);
    let (_, va) = alloc(fd, 1);
    let dmabuf = export_fd(fd, va, 8192, 0);
    let mut other = Child::start("import", theirs);
    send_fd(&other.socket, dmabuf.as_raw_fd());
    drop(dmabuf);
    assert_eq!(other.receive_number(), 0);
    assert_eq!(get(fd, va + 100, 5000), pattern(5000, 7));
    assert_eq!(hlthunk_memory_unmap(fd, va), -libc::EINVAL);
    other.kill();
    assert_eq!(hlthunk_memory_unmap(fd, va), 0);
}

#[test]
fn other_ioctls_reach_the_kernel() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&writer, b"12345").unwrap();
    let mut waiting = 0i32;
    let asked = ioctl(reader.as_raw_fd(), libc::FIONREAD, (&raw mut waiting).cast());
    assert_eq!((asked, waiting), (0, 5));
    assert_eq!(ioctl(reader.as_raw_fd(), sys::IOCTL_MEMORY, core::ptr::null_mut()), -1);
    assert_eq!(errno(), libc::ENOTTY);
}
