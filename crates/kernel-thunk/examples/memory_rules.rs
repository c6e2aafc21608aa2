//! What the driver allows with memory: where it maps host memory of small and huge pages, what a dma-buf is, who may
//! import it, and in which order all of it ends. Each rule is a line of output; the first that does not hold panics.

use std::ffi::{c_int, c_ulong, c_void};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use kernel_thunk::memory::{
    hlthunk_device_mapped_memory_export_dmabuf_fd as export, hlthunk_device_memory_alloc,
    hlthunk_device_memory_free, hlthunk_device_memory_map, hlthunk_host_memory_map,
    hlthunk_memory_unmap,
};
use kernel_thunk::nodes::{hlthunk_close, hlthunk_open};

const ANY: c_int = 4;
const PAGE: u64 = 768 << 20;
const HUGE: usize = 2 << 20;
/// Host memory: from here on huge pages, below 4 KiB ones.
const HUGE_RANGE: u64 = 0xfff0_8000_0000_0000;
const FLAGS: u32 = (libc::O_RDWR | libc::O_CLOEXEC) as u32;

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn rule(holds: bool, what: &str) {
    assert!(holds, "not so: {what} (errno {})", errno());
    println!("{what}");
}

fn main() {
    // SAFETY: no address given.
    let card = unsafe { hlthunk_open(ANY, null()) };
    rule(card >= 0, "the card opens");
    host_memory(card);
    dma_bufs(card);
}

/// Anonymous memory, of huge pages if they are asked for.
fn pages(len: usize, flags: c_int) -> Option<*mut c_void> {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE | flags;
    // SAFETY: new memory.
    let at =
        unsafe { libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0) };
    (at != libc::MAP_FAILED).then_some(at)
}

fn host_memory(card: c_int) {
    let small = pages(HUGE, 0).expect("memory");
    // SAFETY: nothing here takes the memory away or runs the card.
    let at = unsafe { hlthunk_host_memory_map(card, small, 0, 4096) };
    rule(at != 0 && at < HUGE_RANGE, "a page of 4 KiB is mapped in the range of small pages");
    // SAFETY: as above.
    let again = unsafe { hlthunk_host_memory_map(card, small, 0, 4096) };
    rule(again != 0 && again != at, "the same memory can be mapped twice");
    rule(hlthunk_memory_unmap(card, at) == 0, "and is unmapped once each");
    rule(hlthunk_memory_unmap(card, at) == -libc::EINVAL, "a second unmap is EINVAL");
    rule(hlthunk_memory_unmap(card, again) == 0, "the other mapping is still there");
    // SAFETY: the driver refuses it.
    let none = unsafe { hlthunk_host_memory_map(card, null_mut(), 0, 4096) };
    rule(none == 0 && errno() == libc::EFAULT, "an address without memory is EFAULT");
    match pages(2 * HUGE, libc::MAP_HUGETLB) {
        None => println!("skipped: no huge pages (errno {})", errno()),
        Some(huge) => {
            // SAFETY: nothing here takes the memory away or runs the card.
            let at = unsafe { hlthunk_host_memory_map(card, huge, 0, 2 * HUGE as u64) };
            rule(
                at >= HUGE_RANGE && at % HUGE as u64 == 0,
                "huge pages are mapped in their own range",
            );
            rule(hlthunk_memory_unmap(card, at) == 0, "and unmapped");
        }
    }
}

fn dma_bufs(card: c_int) {
    let handle = hlthunk_device_memory_alloc(card, PAGE, 0, false, false);
    rule(handle != 0, "device memory is allocated");
    let at = hlthunk_device_memory_map(card, handle, 0);
    rule(at != 0, "and mapped");
    rule(
        hlthunk_device_memory_free(card, handle) == -libc::EINVAL,
        "mapped memory is not freed: EINVAL",
    );
    let (len, offset) = (32 * 4096, 16 * 4096);
    rule(export(card, at, len, 7, FLAGS) == -libc::EINVAL, "an offset inside a page is EINVAL");
    rule(
        export(card, at + 4096, len, 0, FLAGS) == -libc::EINVAL,
        "an address inside a mapping is EINVAL",
    );
    rule(export(card, at, PAGE, offset, FLAGS) == -libc::EINVAL, "more than the mapping is EINVAL");
    let fd = export(card, at, len, offset, FLAGS);
    rule(fd >= 0, "a part of the mapping is exported");
    // SAFETY: a new descriptor of ours.
    let dmabuf = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an open descriptor.
    let seek = |offset, whence| unsafe { libc::lseek(fd, offset, whence) };
    rule(seek(0, libc::SEEK_END) == len as i64, "its end is its size");
    rule(seek(0, libc::SEEK_SET) == 0, "lseek goes back to its start");
    rule(seek(1, libc::SEEK_SET) == -1 && errno() == libc::EINVAL, "and nowhere else");
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    rule(info.contains("exp_name:\thabanalabs"), "fdinfo names the driver");
    let (access, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: new memory, if any.
    let mapped = unsafe { libc::mmap(null_mut(), 4096, access, shared, fd, 0) };
    rule(
        mapped == libc::MAP_FAILED && errno() == libc::EINVAL,
        "the processor cannot map it: EINVAL",
    );
    import(&dmabuf);
    rule(
        hlthunk_memory_unmap(card, at) == -libc::EINVAL,
        "memory is not unmapped while exported: EINVAL",
    );
    // SAFETY: not used after this; the dma-buf keeps the card open.
    rule(unsafe { hlthunk_close(card) } == 0, "the card's descriptor is closed before the dma-buf");
    // SAFETY: no address given.
    let busy = unsafe { hlthunk_open(ANY, null()) };
    rule(
        busy < 0 && errno() == libc::EBUSY,
        "the card stays open until the dma-buf is closed: EBUSY",
    );
    drop(dmabuf);
    // Its close resets the card.
    let mut again = -1;
    for _ in 0..100 {
        // SAFETY: no address given.
        again = unsafe { hlthunk_open(ANY, null()) };
        if again >= 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    rule(again >= 0, "then it opens again");
}

/// Offers a dma-buf to another device: it attaches and maps it at once.
fn import(dmabuf: &OwnedFd) {
    /// `struct drm_prime_handle`.
    #[repr(C)]
    struct Prime {
        handle: u32,
        flags: u32,
        fd: c_int,
    }
    const FD_TO_HANDLE: c_ulong = 0xc00c_642e;
    let Ok(importer) = fs::File::options().read(true).write(true).open("/dev/dri/card0") else {
        println!("skipped: no other DRM device to import it");
        return;
    };
    let mut prime = Prime { handle: 0, flags: 0, fd: dmabuf.as_raw_fd() };
    // SAFETY: the structure of this call.
    let refused = unsafe { libc::ioctl(importer.as_raw_fd(), FD_TO_HANDLE, &mut prime) };
    rule(
        refused == -1 && errno() == libc::EPERM,
        "a device without peer-to-peer cannot map it: EPERM",
    );
}
