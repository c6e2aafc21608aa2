//! `/dev/infiniband/softrdmaN` for programs that look for it.
//!
//! UCX uses a device only if its node under `/dev/infiniband` is a character device that can be
//! opened for reading and writing. These functions take the place of the C library's when this
//! library is preloaded, and answer for our nodes as if they were there; everything else goes to
//! the kernel unchanged. Nothing on the host is touched.

use core::ffi::{CStr, c_char, c_int};

use super::devices::is_device;

const FOLDER: &[u8] = b"/dev/infiniband/";

/// Whether a path names one of our devices. Called for every `stat` and `access` of the program:
/// anything else is recognised by its first bytes.
unsafe fn is_ours(path: *const c_char) -> bool {
    if path.is_null() {
        return false;
    }
    for (at, byte) in FOLDER.iter().enumerate() {
        // SAFETY: all bytes before this one were equal to `FOLDER`'s, so the string goes on here.
        if unsafe { *path.add(at) } as u8 != *byte {
            return false;
        }
    }
    // SAFETY: a string that ends with NUL, by the contract of these functions.
    let name = unsafe { CStr::from_ptr(path.add(FOLDER.len())) }.to_bytes();
    super::caught(|| Ok(is_device(name))).unwrap_or(false)
}

unsafe fn stat_any(path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: the caller's path.
    if unsafe { is_ours(path) } {
        // SAFETY: integers; zero is a value of each.
        let mut stat: libc::stat = unsafe { core::mem::zeroed() };
        stat.st_mode = libc::S_IFCHR | 0o666;
        stat.st_nlink = 1;
        // Major 231 is that of InfiniBand's nodes; 192 the first minor of uverbs.
        stat.st_rdev = libc::makedev(231, 192);
        stat.st_blksize = 4096;
        // SAFETY: the caller's structure.
        unsafe { out.write(stat) };
        return 0;
    }
    // SAFETY: what the C library's function does; the kernel's structure is the same on x86-64.
    unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, path, out, 0) as c_int }
}

/// `stat`, of glibc 2.33 and later.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat(path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: passed on.
    unsafe { stat_any(path, out) }
}

/// `stat64`, of glibc 2.33 and later.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: passed on.
    unsafe { stat_any(path, out) }
}

/// `stat` as programs built for older glibc call it.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xstat(
    _version: c_int,
    path: *const c_char,
    out: *mut libc::stat,
) -> c_int {
    // SAFETY: passed on.
    unsafe { stat_any(path, out) }
}

/// `stat64` as programs built for older glibc call it.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __xstat64(
    _version: c_int,
    path: *const c_char,
    out: *mut libc::stat,
) -> c_int {
    // SAFETY: passed on.
    unsafe { stat_any(path, out) }
}

/// `access`.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller's path.
    if unsafe { is_ours(path) } && mode & libc::X_OK == 0 {
        return 0;
    }
    // SAFETY: what the C library's function does.
    unsafe { libc::syscall(libc::SYS_access, path, mode) as c_int }
}
