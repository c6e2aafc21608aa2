//! Waiting for submissions.

use std::ffi::c_int;

use crate::ioctl::{self, Wait};

/// Waits for a submission; with a time of 0, polls once.
///
/// # Safety
/// `status` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_cs(
    fd: c_int,
    seq: u64,
    timeout_us: u64,
    status: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(status) = (unsafe { status.as_mut() }) else { return -libc::EINVAL };
    let mut args = Wait { sequence: seq, timeout: timeout_us, ..Wait::default() };
    let ret = ioctl::call(fd, &mut args);
    // With other errors the driver has written no status.
    if matches!(-ret, 0 | libc::ETIMEDOUT | libc::EIO) {
        *status = args.sequence as u32;
    }
    ret
}
