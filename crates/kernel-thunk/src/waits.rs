//! Waiting for submissions and interrupts.

use std::ffi::c_int;

use crate::ioctl::{self, Wait};

const INTERRUPT: u32 = 0x2;
const KERNEL_COUNTERS: u32 = 0x10;
const TIMESTAMP: u32 = 2;

/// Waits, and puts the status where the caller wants it, and the time if there is one.
///
/// # Safety
/// `status` and `timestamp` are null or valid for writing.
unsafe fn wait(fd: c_int, mut args: Wait, status: *mut u32, timestamp: *mut u64) -> c_int {
    // SAFETY: the caller's promise.
    let Some(status) = (unsafe { status.as_mut() }) else { return -libc::EINVAL };
    let ret = ioctl::call(fd, &mut args);
    if !matches!(-ret, 0 | libc::ETIMEDOUT | libc::EIO) {
        // The driver has not answered.
        return ret;
    }
    // The answer: status, flags, a time in nanoseconds.
    *status = args.sequence as u32;
    let flags = (args.sequence >> 32) as u32;
    // SAFETY: as above.
    if let Some(place) = unsafe { timestamp.as_mut() } {
        *place = if flags & TIMESTAMP != 0 { args.timeout } else { 0 };
    }
    ret
}

/// Waits for a submission; with a time of 0, only looks.
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
    let args = Wait { sequence: seq, timeout: timeout_us, ..Wait::default() };
    // SAFETY: the caller's promise.
    unsafe { wait(fd, args, status, std::ptr::null_mut()) }
}

/// As [`hlthunk_wait_for_cs`], with the time of its end, if the submission asked for it.
///
/// # Safety
/// The pointers are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_cs_with_timestamp(
    fd: c_int,
    seq: u64,
    timeout_us: u64,
    status: *mut u32,
    timestamp: *mut u64,
) -> c_int {
    let args = Wait { sequence: seq, timeout: timeout_us, ..Wait::default() };
    // SAFETY: the caller's promise.
    unsafe { wait(fd, args, status, timestamp) }
}

/// The interrupt in the flags; all ones stands for any completion queue.
fn interrupt(id: u32) -> u32 {
    let id = if id == u32::MAX { 0xfff } else { id };
    INTERRUPT | id << 20
}

/// Waits until an interrupt comes and the word at `addr` has reached a value.
///
/// # Safety
/// `addr` points to the word, `status` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_interrupt(
    fd: c_int,
    addr: *mut std::ffi::c_void,
    target_value: u64,
    interrupt_id: u32,
    timeout_us: u64,
    status: *mut u32,
) -> c_int {
    let args = Wait {
        sequence: addr as u64,
        timeout: target_value,
        flags: interrupt(interrupt_id),
        interrupt_timeout: timeout_us,
        ..Wait::default()
    };
    // SAFETY: the caller's promise.
    unsafe { wait(fd, args, status, std::ptr::null_mut()) }
}

/// As [`hlthunk_wait_for_interrupt`], with the counter in a command buffer.
///
/// # Safety
/// `status` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_interrupt_by_handle(
    fd: c_int,
    cq_counters_handle: u64,
    cq_counters_offset: u64,
    target_value: u64,
    interrupt_id: u32,
    timeout_us: u64,
    status: *mut u32,
) -> c_int {
    let args = Wait {
        sequence: cq_counters_handle,
        timeout: target_value,
        flags: interrupt(interrupt_id) | KERNEL_COUNTERS,
        interrupt_timeout: timeout_us,
        counters_offset: cq_counters_offset,
        ..Wait::default()
    };
    // SAFETY: the caller's promise.
    unsafe { wait(fd, args, status, std::ptr::null_mut()) }
}
