//! Staged submissions, and signals between queues. A Gaudi2 has no queues for signals: its driver refuses them.

use std::ffi::{c_int, c_void};

use crate::commands::{CsIn, CsOut, Submitted, limited, submit};
use crate::ioctl::{self, Submission};

const SIGNAL: u32 = 0x2;
const WAIT: u32 = 0x4;
const COLLECTIVE_WAIT: u32 = 0x8;
const STAGED: u32 = 0x40;
const ENCAPSULATED: u32 = 0x800;
const RESERVE: u32 = 0x1000;
const UNRESERVE: u32 = 0x2000;

/// `struct hl_cs_chunk` of a signal or of a wait for one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    /// Address of the signals' sequence numbers, or that of the submission with reserved signals.
    signals: u64,
    queue: u32,
    /// How many sequence numbers, or which of the reserved signals.
    count: u32,
    flags: u32,
    collective_engine: u32,
    pad: [u32; 10],
}

const _: () = assert!(size_of::<Chunk>() == 64);

/// Submits one chunk after those of the restore phase.
fn submit_one(
    fd: c_int,
    restore: (*mut c_void, u32),
    chunk: &Chunk,
    with: Submission,
) -> Result<Submitted, c_int> {
    let args = Submission {
        restore: restore.0 as u64,
        restores: restore.1,
        execute: std::ptr::from_ref(chunk) as u64,
        executes: 1,
        ..with
    };
    let done = Submitted::from(ioctl::ask(fd, args)?);
    if done.status == 0 { Ok(done) } else { Err(-libc::EINVAL) }
}

/// Without a limit for 0.
fn with_flags(flags: u32, timeout: u32) -> Submission {
    let with = if timeout == 0 { Submission::default() } else { limited(timeout) };
    Submission { flags: with.flags | flags, ..with }
}

/// A part of a submission that began with the sequence number given.
///
/// # Safety
/// As for [`crate::commands::hlthunk_command_submission`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_staged_command_submission(
    fd: c_int,
    sequence: u64,
    input: *mut CsIn,
    output: *mut CsOut,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { submit(fd, input, output, Submission { sequence, ..Submission::default() }) }
}

/// As [`hlthunk_staged_command_submission`], with a limit in seconds.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_staged_command_submission_timeout(
    fd: c_int,
    sequence: u64,
    input: *mut CsIn,
    output: *mut CsOut,
    timeout: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { submit(fd, input, output, Submission { sequence, ..limited(timeout) }) }
}

/// A part of a submission that makes reserved signals; its flags say that it is staged.
///
/// # Safety
/// As for [`crate::commands::hlthunk_command_submission`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_staged_command_submission_encaps_signals(
    fd: c_int,
    handle_id: u64,
    input: *mut CsIn,
    output: *mut CsOut,
) -> c_int {
    // SAFETY: the caller's promise.
    if unsafe { input.as_ref() }.is_none_or(|input| input.flags & STAGED == 0) {
        return -libc::EINVAL;
    }
    let sequence = u64::from(handle_id as u32);
    let with = Submission { sequence, flags: ENCAPSULATED, ..Submission::default() };
    // SAFETY: the caller's promise.
    unsafe { submit(fd, input, output, with) }
}

/// `struct hlthunk_signal_in`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the library's names")]
pub struct SignalIn {
    pub chunks_restore: *mut c_void,
    pub num_chunks_restore: u32,
    pub queue_index: u32,
    pub flags: u32,
}

/// `struct hlthunk_signal_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the library's names")]
pub struct SignalOut {
    pub seq: u64,
    pub status: u32,
    pub sob_base_addr_offset: u32,
    pub sob_count_before_submission: u16,
}

/// A signal of a queue, which others can wait for.
///
/// # Safety
/// `input` is null or its chunks are readable; `output` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_signal_submission(
    fd: c_int,
    input: *mut SignalIn,
    output: *mut SignalOut,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { hlthunk_signal_submission_timeout(fd, input, output, 0) }
}

/// As [`hlthunk_signal_submission`], with a limit in seconds; 0 for none.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_signal_submission_timeout(
    fd: c_int,
    input: *mut SignalIn,
    output: *mut SignalOut,
    timeout: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(input) = (unsafe { input.as_ref() }) else { return -libc::EINVAL };
    let chunk = Chunk { queue: input.queue_index, ..Chunk::default() };
    let restore = (input.chunks_restore, input.num_chunks_restore);
    let with = with_flags(input.flags | SIGNAL, timeout);
    // SAFETY: the caller's promise.
    unsafe {
        ioctl::answer(output, || {
            let done = submit_one(fd, restore, &chunk, with)?;
            Ok(SignalOut {
                seq: done.seq,
                status: done.status,
                sob_base_addr_offset: done.sync_object,
                sob_count_before_submission: done.signals_before,
            })
        })
    }
}

/// `struct hlthunk_wait_for_signal_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the library's names")]
pub struct WaitData {
    /// An address, or with reserved signals a sequence number.
    pub signal_seq_arr: u64,
    pub signal_seq_nr: u32,
    pub queue_index: u32,
    pub flags: u32,
    pub collective_engine_id: u32,
    pub encaps_signal_offset: u32,
}

/// `struct hlthunk_wait_in`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the library's names")]
pub struct WaitIn {
    pub chunks_restore: *mut c_void,
    pub num_chunks_restore: u32,
    pub hlthunk_wait_for_signal: *const WaitData,
    pub num_wait_for_signal: u32,
    pub flags: u32,
}

/// `struct hlthunk_wait_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the library's names")]
pub struct WaitOut {
    pub seq: u64,
    pub status: u32,
}

/// # Safety
/// `input` is null or what it points to is readable; `output` is null or valid for writing.
unsafe fn wait(
    fd: c_int,
    input: *mut WaitIn,
    output: *mut WaitOut,
    flags: u32,
    timeout: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(input) = (unsafe { input.as_ref() }) else { return -libc::EINVAL };
    // SAFETY: the caller's promise.
    let data = unsafe { input.hlthunk_wait_for_signal.as_ref() };
    // The driver knows waits for one signal only.
    let Some(data) = data.filter(|data| data.signal_seq_nr == 1 && input.num_wait_for_signal == 1)
    else {
        return -libc::EINVAL;
    };
    let chunk = Chunk {
        signals: data.signal_seq_arr,
        queue: data.queue_index,
        count: if flags & ENCAPSULATED != 0 { data.encaps_signal_offset } else { 1 },
        collective_engine: if flags & COLLECTIVE_WAIT != 0 { data.collective_engine_id } else { 0 },
        ..Chunk::default()
    };
    let restore = (input.chunks_restore, input.num_chunks_restore);
    let with = with_flags(input.flags | flags, timeout);
    // SAFETY: the caller's promise.
    unsafe {
        ioctl::answer(output, || {
            let done = submit_one(fd, restore, &chunk, with)?;
            Ok(WaitOut { seq: done.seq, status: done.status })
        })
    }
}

macro_rules! waits {
    ($($(#[$doc:meta])* $name:ident: $flags:expr;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// `input` is null or what it points to is readable; `output` is null or valid for writing.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                fd: c_int,
                input: *mut WaitIn,
                output: *mut WaitOut,
            ) -> c_int {
                // SAFETY: the caller's promise.
                unsafe { wait(fd, input, output, $flags, 0) }
            }
        )*
    };
}

waits! {
    /// Makes a queue wait for a signal.
    hlthunk_wait_for_signal: WAIT;
    /// Makes a queue wait for a signal together with the NICs.
    hlthunk_wait_for_collective_signal: COLLECTIVE_WAIT;
    /// As [`hlthunk_wait_for_signal`], for a reserved signal.
    hlthunk_wait_for_reserved_encaps_signals: WAIT | ENCAPSULATED;
    /// As [`hlthunk_wait_for_collective_signal`], for a reserved signal.
    hlthunk_wait_for_reserved_encaps_collective_signals: COLLECTIVE_WAIT | ENCAPSULATED;
}

/// As [`hlthunk_wait_for_signal`], with a limit in seconds.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_signal_timeout(
    fd: c_int,
    input: *mut WaitIn,
    output: *mut WaitOut,
    timeout: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { wait(fd, input, output, WAIT, timeout) }
}

/// As [`hlthunk_wait_for_collective_signal`], with a limit in seconds.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_wait_for_collective_signal_timeout(
    fd: c_int,
    input: *mut WaitIn,
    output: *mut WaitOut,
    timeout: u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { wait(fd, input, output, COLLECTIVE_WAIT, timeout) }
}

/// `struct hlthunk_sig_res_in`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the library's names")]
pub struct ReserveIn {
    pub queue_index: u32,
    pub count: u32,
}

/// `struct reserve_sig_handle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the library's names")]
pub struct Reserved {
    pub id: u32,
    pub sob_base_addr_offset: u32,
    pub count: u32,
}

/// `struct hlthunk_sig_res_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the library's names")]
pub struct ReserveOut {
    pub handle: Reserved,
    pub status: u32,
}

/// Reserves signals, which a submission makes later.
///
/// # Safety
/// `input` is null or readable; `output` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_reserve_encaps_signals(
    fd: c_int,
    input: *const ReserveIn,
    output: *mut ReserveOut,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(input) = (unsafe { input.as_ref() }) else { return -libc::EINVAL };
    let sequence = u64::from(input.count) | u64::from(input.queue_index) << 32;
    let args = Submission { sequence, flags: RESERVE, ..Submission::default() };
    // SAFETY: the caller's promise.
    unsafe {
        ioctl::answer(output, || {
            let done = Submitted::from(ioctl::ask(fd, args)?);
            let handle = Reserved {
                id: done.seq as u32,
                sob_base_addr_offset: done.sync_object,
                count: (done.seq >> 32) as u32,
            };
            Ok(ReserveOut { handle, status: done.status })
        })
    }
}

/// Gives reserved signals up.
///
/// # Safety
/// `handle` is null or readable; `status` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_unreserve_encaps_signals(
    fd: c_int,
    handle: *const Reserved,
    status: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(handle) = (unsafe { handle.as_ref() }) else { return -libc::EINVAL };
    let args = Submission { sequence: handle.id.into(), flags: UNRESERVE, ..Submission::default() };
    // SAFETY: the caller's promise.
    unsafe {
        ioctl::answer(status, || ioctl::ask(fd, args).map(|done| Submitted::from(done).status))
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::{null, null_mut};

    use super::*;

    #[test]
    fn a_wait_for_other_than_one_signal_is_refused_before_the_driver_is_asked() {
        let answer = |signal_seq_nr, num_wait_for_signal| {
            let data = WaitData {
                signal_seq_arr: 0,
                signal_seq_nr,
                queue_index: 0,
                flags: 0,
                collective_engine_id: 0,
                encaps_signal_offset: 0,
            };
            let mut input = WaitIn {
                chunks_restore: null_mut(),
                num_chunks_restore: 0,
                hlthunk_wait_for_signal: &data,
                num_wait_for_signal,
                flags: 0,
            };
            // SAFETY: all live across the call.
            unsafe { hlthunk_wait_for_signal(-1, &mut input, &mut WaitOut::default()) }
        };
        let refused = -libc::EINVAL;
        assert_eq!(
            [(1, 1), (2, 1), (1, 0)].map(|(n, m)| answer(n, m)),
            [-libc::EBADF, refused, refused]
        );
        // SAFETY: null pointers are refused.
        unsafe {
            assert_eq!(hlthunk_signal_submission(-1, null_mut(), null_mut()), refused);
            assert_eq!(hlthunk_unreserve_encaps_signals(-1, null(), null_mut()), refused);
        }
    }
}
