//! Command buffers and submissions.

use std::ffi::{c_int, c_void};

use crate::ioctl::{self, CommandBuffer, Submission};

mod op {
    pub(super) const CREATE: u32 = 0;
    pub(super) const DESTROY: u32 = 1;
}

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
    unsafe {
        ioctl::answer(cb_handle, || {
            let args = CommandBuffer { op: op::CREATE, size: cb_size, ..CommandBuffer::default() };
            ioctl::ask(fd, args).map(|answer| answer.handle)
        })
    }
}

/// Destroys a command buffer; its memory is freed with the last user of it.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_destroy_command_buffer(fd: c_int, cb_handle: u64) -> c_int {
    let mut args = CommandBuffer { handle: cb_handle, op: op::DESTROY, ..CommandBuffer::default() };
    ioctl::call(fd, &mut args)
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
    unsafe {
        let limit = Submission { timeout, flags: CUSTOM_TIMEOUT, ..Submission::default() };
        submit(fd, input, output, limit)
    }
}

/// Submits chunks. `with` has the flags and the time limit that the driver gets, too.
///
/// # Safety
/// As for [`hlthunk_command_submission`].
unsafe fn submit(fd: c_int, input: *mut CsIn, output: *mut CsOut, with: Submission) -> c_int {
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
            // `struct hl_cs_out`: sequence number, status, signals before it.
            let done = ioctl::ask(fd, args)?;
            Ok(CsOut {
                seq: done.restore,
                status: done.execute as u32,
                sob_count_before_submission: done.sequence as u16,
            })
        })
    }
}

/// Flushes all writes of PCI peers to the card's memory.
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
