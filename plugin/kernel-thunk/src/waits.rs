//! Waiting for submissions and interrupts.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::ioctl::{self, Wait};

const INTERRUPT: u32 = 0x2;
const MULTI: u32 = 0x4;
const KERNEL_COUNTERS: u32 = 0x10;
const REGISTER: u32 = 0x20;
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
    unsafe { wait(fd, args, status, null_mut()) }
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

/// The interrupt in the flags, which have 12 bits for it; all ones stands for any completion queue.
fn interrupt(id: u32) -> Option<u32> {
    let id = if id == u32::MAX { 0xfff } else { id };
    (id <= 0xfff).then_some(INTERRUPT | id << 20)
}

/// Where the word is that an interrupt is waited for with.
struct Counter {
    /// Its address, or the handle of a command buffer.
    place: u64,
    offset: u64,
    flags: u32,
}

/// Waits until an interrupt comes and a word has reached a value.
///
/// # Safety
/// The word stays readable; `status` and `timestamp` are null or valid for writing.
unsafe fn wait_for_interrupt(
    fd: c_int,
    counter: Counter,
    (target, interrupt_id, timeout_us): (u64, u32, u64),
    status: *mut u32,
    timestamp: *mut u64,
) -> c_int {
    let Some(interrupt) = interrupt(interrupt_id) else { return -libc::EINVAL };
    let args = Wait {
        sequence: counter.place,
        timeout: target,
        flags: interrupt | counter.flags,
        interrupt_timeout: timeout_us,
        counters_offset: counter.offset,
        ..Wait::default()
    };
    // SAFETY: the caller's promise.
    unsafe { wait(fd, args, status, timestamp) }
}

/// Waits until an interrupt comes and the word at `addr` has reached a value.
///
/// # Safety
/// `addr` points to the word, `status` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_interrupt(
    fd: c_int,
    addr: *mut c_void,
    target_value: u64,
    interrupt_id: u32,
    timeout_us: u64,
    status: *mut u32,
) -> c_int {
    let counter = Counter { place: addr as u64, offset: 0, flags: 0 };
    let until = (target_value, interrupt_id, timeout_us);
    // SAFETY: the caller's promise.
    unsafe { wait_for_interrupt(fd, counter, until, status, null_mut()) }
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
    let (place, offset) = (cq_counters_handle, cq_counters_offset);
    let counter = Counter { place, offset, flags: KERNEL_COUNTERS };
    let until = (target_value, interrupt_id, timeout_us);
    // SAFETY: the caller's promise.
    unsafe { wait_for_interrupt(fd, counter, until, status, null_mut()) }
}

/// As [`hlthunk_wait_for_interrupt`], with the time of the interrupt.
///
/// # Safety
/// As there; `timestamp` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_interrupt_with_timestamp(
    fd: c_int,
    addr: *mut c_void,
    target_value: u64,
    interrupt_id: u32,
    timeout_us: u64,
    status: *mut u32,
    timestamp: *mut u64,
) -> c_int {
    let counter = Counter { place: addr as u64, offset: 0, flags: 0 };
    let until = (target_value, interrupt_id, timeout_us);
    // SAFETY: the caller's promise.
    unsafe { wait_for_interrupt(fd, counter, until, status, timestamp) }
}

/// Makes the driver write a time to a place of a timestamp buffer when a counter reaches a value.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_register_timestamp_interrupt(
    fd: c_int,
    interrupt_id: u32,
    cq_counters_handle: u64,
    cq_counters_offset: u64,
    target_value: u64,
    timestamp_handle: u64,
    timestamp_offset: u64,
) -> c_int {
    let Some(interrupt) = interrupt(interrupt_id) else { return -libc::EINVAL };
    let mut args = Wait {
        sequence: cq_counters_handle,
        timeout: target_value,
        flags: interrupt | KERNEL_COUNTERS | REGISTER,
        counters_offset: cq_counters_offset,
        timestamps: timestamp_handle,
        timestamps_offset: timestamp_offset,
        ..Wait::default()
    };
    ioctl::call(fd, &mut args)
}

/// `struct hlthunk_wait_multi_cs_in`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the library's names")]
pub struct MultiIn {
    pub seq: *const u64,
    pub timeout_us: u64,
    pub seq_len: u32,
}

/// `struct hlthunk_wait_multi_cs_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the library's names")]
pub struct MultiOut {
    pub status: u32,
    pub seq_set: u32,
    pub completed: u8,
}

/// Waits for the first of several submissions.
///
/// # Safety
/// `input` is null or names as many sequence numbers as it says; the others are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_multi_cs_with_timestamp(
    fd: c_int,
    input: *mut MultiIn,
    output: *mut MultiOut,
    timestamp: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(input), Some(output)) = (unsafe { (input.as_ref(), output.as_mut()) }) else {
        return -libc::EINVAL;
    };
    // The driver reads a byte.
    let Ok(count) = u8::try_from(input.seq_len) else { return -libc::EINVAL };
    let mut args = Wait {
        sequence: input.seq as u64,
        timeout: input.timeout_us,
        flags: MULTI,
        interrupt_timeout: count.into(),
        ..Wait::default()
    };
    let ret = ioctl::call(fd, &mut args);
    if ret == 0 {
        // The answer: status, flags, a time, and a bit for each that is done.
        *output = MultiOut {
            status: args.sequence as u32,
            seq_set: args.context,
            completed: args.context.count_ones() as u8,
        };
        // SAFETY: as above.
        if let Some(place) = unsafe { timestamp.as_mut() } {
            let flags = (args.sequence >> 32) as u32;
            *place = if flags & TIMESTAMP != 0 { args.timeout } else { 0 };
        }
    }
    ret
}

/// As [`hlthunk_wait_for_multi_cs_with_timestamp`], without the time.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_multi_cs(
    fd: c_int,
    input: *mut MultiIn,
    output: *mut MultiOut,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hlthunk_wait_for_multi_cs_with_timestamp(fd, input, output, null_mut()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_the_driver_has_no_bits_for_are_refused_before_it_is_asked() {
        let refused = |id| hlthunk_register_timestamp_interrupt(-1, id, 0, 0, 0, 0, 0);
        assert_eq!([0x1000, 1 << 31].map(refused), [-libc::EINVAL; 2]);
        assert_eq!([0, 0xfff, u32::MAX].map(refused), [-libc::EBADF; 3]);
        let multi = |seq_len| {
            let seq = [0; 256];
            let mut input = MultiIn { seq: seq.as_ptr(), timeout_us: 0, seq_len };
            // SAFETY: there are at least as many numbers.
            unsafe { hlthunk_wait_for_multi_cs(-1, &mut input, &mut MultiOut::default()) }
        };
        assert_eq!([256, 255].map(multi), [-libc::EINVAL, -libc::EBADF]);
    }
}
