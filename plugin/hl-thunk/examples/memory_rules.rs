//! What the driver allows with memory: where it maps host memory of small and huge pages, what a dma-buf is, who may
//! import it, and in which order all of it ends.
//!
//! The same rules are checked on the software card (`tests/memory_rules.rs`) and on the kernel's own driver, by
//! `cargo xtask vm test` (its argument is another device of the kernel's, which knows no peer-to-peer). Each is a line
//! of output; the first that does not hold panics.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use hl_thunk::Library;

/// The library's functions, in their bare form: the rules are about calls that the bindings do not make.
struct Thunk {
    open: extern "C" fn(c_int, *const c_char) -> c_int,
    close: extern "C" fn(c_int) -> c_int,
    alloc: extern "C" fn(c_int, u64, u64, bool, bool) -> u64,
    free: extern "C" fn(c_int, u64) -> c_int,
    map: extern "C" fn(c_int, u64, u64) -> u64,
    /// Host memory, which stays mapped and no queue touches while it is mapped.
    map_host: extern "C" fn(c_int, *mut c_void, u64, u64) -> u64,
    unmap: extern "C" fn(c_int, u64) -> c_int,
    /// Address, size, offset, flags.
    export: extern "C" fn(c_int, u64, u64, u64, u32) -> c_int,
}

impl Thunk {
    fn new(library: &Library) -> Self {
        /// A function by name; `F` must be its type in hlthunk.h.
        fn find<F: Copy>(library: &Library, name: &str) -> F {
            let found = library.function(name).unwrap_or_else(|| panic!("no {name}"));
            assert_eq!(size_of::<F>(), size_of_val(&found));
            // SAFETY: a pointer to the function, of which the fields below name the type.
            unsafe { std::mem::transmute_copy(&found) }
        }
        Self {
            open: find(library, "hlthunk_open"),
            close: find(library, "hlthunk_close"),
            alloc: find(library, "hlthunk_device_memory_alloc"),
            free: find(library, "hlthunk_device_memory_free"),
            map: find(library, "hlthunk_device_memory_map"),
            map_host: find(library, "hlthunk_host_memory_map"),
            unmap: find(library, "hlthunk_memory_unmap"),
            export: find(library, "hlthunk_device_mapped_memory_export_dmabuf_fd"),
        }
    }

    /// Opens a card that is free.
    fn open(&self) -> c_int {
        const ANY: c_int = 4;
        (self.open)(ANY, null())
    }
}

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

/// Checks all rules.
pub(crate) fn check(library: &Library, importer: Option<&str>) {
    let thunk = Thunk::new(library);
    let card = thunk.open();
    rule(card >= 0, "the card opens");
    host_memory(&thunk, card);
    dma_bufs(&thunk, card, importer);
}

#[allow(dead_code, reason = "the test calls `check`")]
fn main() {
    let library = Library::load().unwrap_or_else(|error| panic!("{error}"));
    check(&library, std::env::args().nth(1).as_deref());
}

/// Anonymous memory, of huge pages if they are asked for.
fn pages(len: usize, flags: c_int) -> Option<*mut c_void> {
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE | flags;
    // SAFETY: new memory.
    let at =
        unsafe { libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, kind, -1, 0) };
    (at != libc::MAP_FAILED).then_some(at)
}

fn host_memory(thunk: &Thunk, card: c_int) {
    let small = pages(HUGE, 0).expect("memory");
    let at = (thunk.map_host)(card, small, 0, 4096);
    rule(at != 0 && at < HUGE_RANGE, "a page of 4 KiB is mapped in the range of small pages");
    let again = (thunk.map_host)(card, small, 0, 4096);
    rule(again != 0 && again != at, "the same memory can be mapped twice");
    rule((thunk.unmap)(card, at) == 0, "and is unmapped once each");
    rule((thunk.unmap)(card, at) == -libc::EINVAL, "a second unmap is EINVAL");
    rule((thunk.unmap)(card, again) == 0, "the other mapping is still there");
    let none = (thunk.map_host)(card, null_mut(), 0, 4096);
    rule(none == 0 && errno() == libc::EFAULT, "an address without memory is EFAULT");
    match pages(2 * HUGE, libc::MAP_HUGETLB) {
        None => println!("skipped: no huge pages (errno {})", errno()),
        Some(huge) => {
            let at = (thunk.map_host)(card, huge, 0, 2 * HUGE as u64);
            rule(
                at >= HUGE_RANGE && at.is_multiple_of(HUGE as u64),
                "huge pages are mapped in their own range",
            );
            rule((thunk.unmap)(card, at) == 0, "and unmapped");
        }
    }
}

fn dma_bufs(thunk: &Thunk, card: c_int, importer: Option<&str>) {
    let handle = (thunk.alloc)(card, PAGE, 0, false, false);
    rule(handle != 0, "device memory is allocated");
    let at = (thunk.map)(card, handle, 0);
    rule(at != 0, "and mapped");
    rule((thunk.free)(card, handle) == -libc::EINVAL, "mapped memory is not freed: EINVAL");
    let (len, offset) = (32 * 4096, 16 * 4096);
    rule(
        (thunk.export)(card, at, len, 7, FLAGS) == -libc::EINVAL,
        "an offset inside a page is EINVAL",
    );
    rule(
        (thunk.export)(card, at + 4096, len, 0, FLAGS) == -libc::EINVAL,
        "an address inside a mapping is EINVAL",
    );
    rule(
        (thunk.export)(card, at, PAGE, offset, FLAGS) == -libc::EINVAL,
        "more than the mapping is EINVAL",
    );
    let fd = (thunk.export)(card, at, len, offset, FLAGS);
    rule(fd >= 0, "a part of the mapping is exported");
    // SAFETY: a new descriptor of ours.
    let dmabuf = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an open descriptor.
    let seek = |offset, whence| unsafe { libc::lseek(fd, offset, whence) };
    rule(seek(0, libc::SEEK_END) == len as i64, "its end is its size");
    rule(seek(0, libc::SEEK_SET) == 0, "lseek goes back to its start");
    if let Some(importer) = importer {
        kernel_object(&dmabuf);
        import(&dmabuf, importer);
    }
    rule((thunk.unmap)(card, at) == -libc::EINVAL, "memory is not unmapped while exported: EINVAL");
    rule((thunk.close)(card) == 0, "the card's descriptor is closed before the dma-buf");
    let busy = thunk.open();
    rule(
        busy < 0 && errno() == libc::EBUSY,
        "the card stays open until the dma-buf is closed: EBUSY",
    );
    drop(dmabuf);
    // Its close resets the card.
    let mut again = -1;
    for _ in 0..100 {
        again = thunk.open();
        if again >= 0 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    rule(again >= 0, "then it opens again");
}

/// What a file of user space, as the software card's, cannot imitate.
fn kernel_object(dmabuf: &OwnedFd) {
    let fd = dmabuf.as_raw_fd();
    // SAFETY: an open descriptor.
    let beyond = unsafe { libc::lseek(fd, 1, libc::SEEK_SET) };
    rule(beyond == -1 && errno() == libc::EINVAL, "lseek goes nowhere else: EINVAL");
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    rule(info.contains("exp_name:\thabanalabs"), "fdinfo names the driver");
    let (access, shared) = (libc::PROT_READ, libc::MAP_SHARED);
    // SAFETY: new memory, if any.
    let mapped = unsafe { libc::mmap(null_mut(), 4096, access, shared, fd, 0) };
    rule(
        mapped == libc::MAP_FAILED && errno() == libc::EINVAL,
        "the processor cannot map it: EINVAL",
    );
}

/// Offers a dma-buf to another device: it attaches and maps it at once.
fn import(dmabuf: &OwnedFd, importer: &str) {
    /// `struct drm_prime_handle`.
    #[repr(C)]
    struct Prime {
        handle: u32,
        flags: u32,
        fd: c_int,
    }
    const FD_TO_HANDLE: c_ulong = 0xc00c_642e;
    let importer = fs::File::options().read(true).write(true).open(importer).expect("importer");
    let mut prime = Prime { handle: 0, flags: 0, fd: dmabuf.as_raw_fd() };
    // SAFETY: the structure of this call.
    let refused = unsafe { libc::ioctl(importer.as_raw_fd(), FD_TO_HANDLE, &mut prime) };
    rule(
        refused == -1 && errno() == libc::EPERM,
        "a device without peer-to-peer cannot map it: EPERM",
    );
}
