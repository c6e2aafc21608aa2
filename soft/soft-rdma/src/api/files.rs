//! `/dev/infiniband/softrdmaN`, `/dev/accel/accelN` and the files of sysfs, for programs that look for them.
//!
//! UCX uses a device only if its node under `/dev/infiniband` is a character device that can be
//! opened for reading and writing, and learns from sysfs how far it is from a card. These functions
//! take the place of the C library's when this library is preloaded, and answer for our devices as
//! if they were there. In `/sys` the kernel is asked first: what is really there stays as it is. Nothing
//! on the host is touched.

use core::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;

use super::devices::is_device;
use super::set_errno;
use crate::config;
use crate::placement::cards;
use crate::sysfs::{self, Entry};

/// Whether a string begins with a prefix. Called for every path that the program uses.
unsafe fn begins_with(path: *const c_char, prefix: &[u8]) -> bool {
    if path.is_null() {
        return false;
    }
    // SAFETY: all bytes before this one were equal to those of the prefix, so the string goes on here.
    prefix.iter().enumerate().all(|(at, byte)| unsafe { *path.add(at) } as u8 == *byte)
}

/// Major and minor number if a path names one of our device nodes, or of the software Gaudi's.
unsafe fn node_numbers(path: *const c_char) -> Option<(u32, u32)> {
    const FOLDERS: [&[u8]; 2] = [b"/dev/infiniband/", b"/dev/accel/"];
    // SAFETY: the caller's path.
    let at = FOLDERS.iter().position(|folder| unsafe { begins_with(path, folder) })?;
    // SAFETY: a string that ends with NUL, by the contract of these functions.
    let name = unsafe { CStr::from_ptr(path.add(FOLDERS[at].len())) }.to_bytes();
    let numbers = || match at {
        // Major 231 is that of InfiniBand's nodes; 192 the first minor of uverbs.
        0 => is_device(name).then_some((231, 192)),
        _ if !config::get().accel_nodes => None,
        _ => {
            let index = std::str::from_utf8(name).ok()?.strip_prefix("accel")?;
            let index = index.parse().ok().filter(|index| (*index as usize) < cards().count());
            index.map(|index| (261, index))
        }
    };
    super::caught(|| Ok(numbers())).ok().flatten()
}

/// What `ask` says about a path of sysfs that the kernel does not know. `errno` stays as it is.
unsafe fn in_sysfs<T>(path: *const c_char, ask: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let error = std::io::Error::last_os_error().raw_os_error();
    // SAFETY: the caller's path.
    if error != Some(libc::ENOENT) || !unsafe { begins_with(path, b"/sys/") } {
        return None;
    }
    // SAFETY: a string that ends with NUL, by the contract of these functions.
    let text = unsafe { CStr::from_ptr(path) }.to_str().ok()?;
    let answer = super::caught(|| Ok(ask(text))).ok().flatten();
    set_errno(rustix::io::Errno::NOENT);
    answer
}

unsafe fn stat_any(path: *const c_char, out: *mut libc::stat) -> c_int {
    // SAFETY: integers; zero is a value of each.
    let mut stat: libc::stat = unsafe { core::mem::zeroed() };
    (stat.st_nlink, stat.st_blksize) = (1, 4096);
    // SAFETY: the caller's path.
    if let Some((major, minor)) = unsafe { node_numbers(path) } {
        stat.st_mode = libc::S_IFCHR | 0o666;
        stat.st_rdev = libc::makedev(major, minor);
    } else {
        // SAFETY: what the C library's function does; the kernel's structure is the same on x86-64.
        let done = unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, path, out, 0) };
        // SAFETY: the caller's path.
        let entry = if done == 0 { None } else { unsafe { in_sysfs(path, sysfs::look_up) } };
        stat.st_mode = match entry {
            None => return done as c_int,
            Some(Entry::Folder) => libc::S_IFDIR | 0o555,
            Some(Entry::File(_)) => libc::S_IFREG | 0o444,
        };
    }
    // SAFETY: the caller's structure.
    unsafe { out.write(stat) };
    0
}

unsafe fn open_any(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    // SAFETY: what the C library's function does.
    let fd = unsafe { libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path, flags, mode) } as c_int;
    if fd >= 0 || flags & libc::O_ACCMODE != libc::O_RDONLY {
        return fd;
    }
    // SAFETY: the caller's path.
    let Some(Entry::File(text)) = (unsafe { in_sysfs(path, sysfs::look_up) }) else { return fd };
    let cloexec =
        if flags & libc::O_CLOEXEC != 0 { MemfdFlags::CLOEXEC } else { MemfdFlags::empty() };
    let file = rustix::fs::memfd_create("sysfs", cloexec).and_then(|file| {
        rustix::io::pwrite(&file, text.as_bytes(), 0)?;
        Ok(file)
    });
    match file {
        Ok(file) => std::os::fd::IntoRawFd::into_raw_fd(file),
        Err(error) => {
            set_errno(error);
            -1
        }
    }
}

/// Writes functions that take the place of the C library's under their names.
macro_rules! in_place_of {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty = $ours:expr;)*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> $result {
            // SAFETY: passed on.
            unsafe { $ours }
        }
    )*};
}

// `open` has a variable number of arguments: on x86-64 the third is then whatever the register has,
// which the kernel ignores unless the flags ask for a mode. `__xstat` and the like are what programs
// built for older glibc call, `__open_2` those built with checks.
in_place_of! {
    stat(path: *const c_char, out: *mut libc::stat) -> c_int = stat_any(path, out);
    stat64(path: *const c_char, out: *mut libc::stat) -> c_int = stat_any(path, out);
    __xstat(_version: c_int, path: *const c_char, out: *mut libc::stat) -> c_int = stat_any(path, out);
    __xstat64(_version: c_int, path: *const c_char, out: *mut libc::stat) -> c_int = stat_any(path, out);
    open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int = open_any(path, flags, mode);
    open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int = open_any(path, flags, mode);
    __open_2(path: *const c_char, flags: c_int) -> c_int = open_any(path, flags, 0);
    __open64_2(path: *const c_char, flags: c_int) -> c_int = open_any(path, flags, 0);
}

/// `access`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller's path.
    if unsafe { node_numbers(path) }.is_some() && mode & libc::X_OK == 0 {
        return 0;
    }
    // SAFETY: what the C library's function does.
    unsafe { libc::syscall(libc::SYS_access, path, mode) as c_int }
}

type Realpath = unsafe extern "C" fn(*const c_char, *mut c_char) -> *mut c_char;

/// `realpath`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realpath(path: *const c_char, out: *mut c_char) -> *mut c_char {
    static NEXT: OnceLock<Option<Realpath>> = OnceLock::new();
    let next = NEXT.get_or_init(|| {
        // SAFETY: a name that ends with NUL; the C library's function of that name has that type.
        unsafe {
            let found = libc::dlvsym(libc::RTLD_NEXT, c"realpath".as_ptr(), c"GLIBC_2.3".as_ptr());
            core::mem::transmute::<*mut core::ffi::c_void, Option<Realpath>>(found)
        }
    });
    let Some(next) = next else {
        set_errno(rustix::io::Errno::NOSYS);
        return core::ptr::null_mut();
    };
    // SAFETY: passed on.
    let found = unsafe { next(path, out) };
    if !found.is_null() {
        return found;
    }
    // SAFETY: the caller's path.
    let Some(resolved) = (unsafe { in_sysfs(path, sysfs::resolve) }) else { return found };
    if resolved.len() >= libc::PATH_MAX as usize {
        return found;
    }
    let Ok(resolved) = std::ffi::CString::new(resolved) else { return found };
    // SAFETY: the caller's buffer has PATH_MAX bytes, or is NULL: then the result is for `free`.
    unsafe {
        if out.is_null() {
            libc::strdup(resolved.as_ptr())
        } else {
            libc::strcpy(out, resolved.as_ptr())
        }
    }
}
