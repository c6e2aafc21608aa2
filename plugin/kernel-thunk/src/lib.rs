//! A `libhl-thunk.so` for the kernel's own `habanalabs` driver, from Linux 6.8 on.
//!
//! The vendor's published library speaks the ioctls of older kernels; on a newer one every call of it fails. This
//! one speaks the DRM ioctls that replaced them, and looks for sysfs attributes where those kernels have them.
//! Otherwise it behaves as the vendor's: results, `errno` and repetition are part of the contract. It has the
//! functions that the plugin uses and those of the vendor's tests.
//!
//! Functions are thin: [`ioctl`] has the calls, [`nodes`] finds and opens cards, [`info`] asks, [`memory`],
//! [`commands`] and [`signals`] act, [`waits`] wait. No function panics; a null pointer for an answer is `-EINVAL`.

pub mod commands;
pub mod info;
pub mod ioctl;
pub mod memory;
pub mod nodes;
pub mod signals;
pub mod waits;

use std::ffi::{c_char, c_int, c_void};

/// What this library calls itself.
const VERSION: &std::ffi::CStr = c"1.10.0-kernel-thunk";

/// The version, to be released with [`hlthunk_free`].
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_version() -> *mut c_char {
    // SAFETY: a terminated string.
    unsafe { libc::strdup(VERSION.as_ptr()) }
}

/// Memory that [`hlthunk_free`] releases.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_malloc(size: usize) -> *mut c_void {
    // SAFETY: any size may be asked for.
    unsafe { libc::calloc(1, size) }
}

/// Releases what this library has allocated for its caller.
///
/// # Safety
/// `memory` is null or comes from a function here, and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_free(memory: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { libc::free(memory) };
}

/// Debug operations of the profiler.
///
/// # Safety
/// `args` is null or a `struct hl_debug_args` whose pointers are valid for the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_debug(fd: c_int, args: *mut ioctl::Debug) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { args.as_mut() } {
        Some(args) => ioctl::call(fd, args),
        None => -libc::EINVAL,
    }
}
