//! Command buffers and submissions.

use std::ffi::{c_int, c_void};

use crate::ioctl::{self, CommandBuffer, Submission};

mod op {
    pub(super) const CREATE: u32 = 0;
    pub(super) const DESTROY: u32 = 1;
    pub(super) const INFO: u32 = 2;
}

/// Map the buffer for the device.
const MAP: u32 = 1;
/// Ask for its device address.
const DEVICE_ADDRESS: u32 = 2;
const CUSTOM_TIMEOUT: u32 = 0x200;
const FLUSH: u32 = 0x8000;

/// `struct hlthunk_cs_in`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the library's names")]
pub struct CsIn {
    pub chunks_restore: *mut c_void,
    pub chunks_execute: *mut c_void,
    pub num_chunks_restore: u32,
    pub num_chunks_execute: u32,
    pub flags: u32,
}

/// `struct hlthunk_cs_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the library's names")]
pub struct CsOut {
    pub seq: u64,
    pub status: u32,
    pub sob_count_before_submission: u16,
}

const _: () = assert!(size_of::<CsIn>() == 32 && size_of::<CsOut>() == 16);

fn request(fd: c_int, size: u32, flags: u32) -> Result<u64, c_int> {
    let args = CommandBuffer { op: op::CREATE, size, flags, ..CommandBuffer::default() };
    ioctl::ask(fd, args).map(|answer| answer.handle)
}

/// A command buffer of the driver's: its handle, which is also the offset for mmap.
///
/// # Safety
/// `cb_handle` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_request_command_buffer(
    fd: c_int,
    cb_size: u32,
    cb_handle: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ioctl::answer(cb_handle, || request(fd, cb_size, 0)) }
}

/// As [`hlthunk_request_command_buffer`], mapped for the device.
///
/// # Safety
/// `cb_handle` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_request_mapped_command_buffer(
    fd: c_int,
    cb_size: u32,
    cb_handle: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ioctl::answer(cb_handle, || request(fd, cb_size, MAP)) }
}

/// Gives a command buffer up; its memory goes with the last user of it.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_destroy_command_buffer(fd: c_int, cb_handle: u64) -> c_int {
    let mut args = CommandBuffer { handle: cb_handle, op: op::DESTROY, ..CommandBuffer::default() };
    ioctl::call(fd, &mut args)
}

fn ask(fd: c_int, handle: u64, flags: u32) -> Result<u64, c_int> {
    let args = CommandBuffer { handle, op: op::INFO, flags, ..CommandBuffer::default() };
    ioctl::ask(fd, args).map(|answer| answer.handle)
}

/// How many submissions use a buffer.
///
/// # Safety
/// `usage_cnt` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_cb_usage_count(
    fd: c_int,
    cb_handle: u64,
    usage_cnt: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ioctl::answer(usage_cnt, || ask(fd, cb_handle, 0).map(|answer| answer as u32)) }
}

/// The device address of a mapped buffer.
///
/// # Safety
/// `device_va` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_mapped_cb_device_va_by_handle(
    fd: c_int,
    cb_handle: u64,
    device_va: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ioctl::answer(device_va, || ask(fd, cb_handle, DEVICE_ADDRESS)) }
}

/// Submits command buffers.
///
/// # Safety
/// `input` is null or its chunks are readable; `output` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_command_submission(
    fd: c_int,
    input: *mut CsIn,
    output: *mut CsOut,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { submit(fd, input, output, Submission::default()) }
}

/// As [`hlthunk_command_submission`], with a limit in seconds.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_command_submission_timeout(
    fd: c_int,
    input: *mut CsIn,
    output: *mut CsOut,
    timeout: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { submit(fd, input, output, limited(timeout)) }
}

/// What a limit in seconds adds to a submission.
pub(crate) fn limited(timeout: u32) -> Submission {
    Submission { timeout, flags: CUSTOM_TIMEOUT, ..Submission::default() }
}

/// Submits chunks, with what else the driver is to know of them.
///
/// # Safety
/// As for [`hlthunk_command_submission`].
pub(crate) unsafe fn submit(
    fd: c_int,
    input: *mut CsIn,
    output: *mut CsOut,
    with: Submission,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(input) = (unsafe { input.as_ref() }) else { return -libc::EINVAL };
    let args = Submission {
        restore: input.chunks_restore as u64,
        execute: input.chunks_execute as u64,
        restores: input.num_chunks_restore,
        executes: input.num_chunks_execute,
        flags: input.flags | with.flags,
        ..with
    };
    // SAFETY: the caller's promise.
    unsafe {
        ioctl::answer(output, || {
            let done = Submitted::from(ioctl::ask(fd, args)?);
            Ok(CsOut {
                seq: done.seq,
                status: done.status,
                sob_count_before_submission: done.signals_before,
            })
        })
    }
}

/// The answer to a submission, `struct hl_cs_out`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Submitted {
    /// Sequence number; for reserved signals, their handle and their number.
    pub(crate) seq: u64,
    pub(crate) status: u32,
    /// The sync object of a signal, from the first one on.
    pub(crate) sync_object: u32,
    pub(crate) signals_before: u16,
}

impl From<Submission> for Submitted {
    fn from(answer: Submission) -> Self {
        Self {
            seq: answer.restore,
            status: answer.execute as u32,
            sync_object: (answer.execute >> 32) as u32,
            signals_before: answer.sequence as u16,
        }
    }
}

/// Flushes all writes of peers over PCI to the card's memory.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_cs_flush_pci_hbw_writes(fd: c_int) -> c_int {
    ioctl::call(fd, &mut Submission { flags: FLUSH, ..Submission::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_place_for_an_answer_is_refused_before_the_driver_is_asked() {
        // SAFETY: null pointers are refused.
        unsafe {
            let none = std::ptr::null_mut();
            assert_eq!(hlthunk_request_command_buffer(-1, 4096, none), -libc::EINVAL);
            let none = std::ptr::null_mut();
            assert_eq!(hlthunk_command_submission(-1, none, &mut CsOut::default()), -libc::EINVAL);
        }
    }
}
