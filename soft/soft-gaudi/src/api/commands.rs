//! Command buffers, submissions and waits.

use core::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::{borrow, get, put};
use crate::abi::{self, CsChunk, CsIn, CsOut};
use crate::asic::Generation;
use crate::context::{self, Context};
use crate::engine::Waited;
use crate::guarded;
use crate::parser::{self, QueueKind};
use crate::processor::Program;
use crate::state::Rejection;
use crate::submission::{Lookup, Outcome, Submission};

fn create_buffer(fd: c_int, size: u32, out: *mut u64, mapped: bool) -> Result<c_int, Errno> {
    if out.is_null() {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    if mapped && context.profile.mapped_cb_pool == 0 {
        return Err(Errno::NOMEM);
    }
    let mut buffers = context.buffers();
    let (handle, buffer) = buffers.create(size)?;
    if mapped {
        let va = context.space_mut().map_command_buffer(buffer.ptr, buffer.mapped_len());
        match va {
            Ok(va) => buffers.set_va(handle, va),
            Err(errno) => {
                let _ = buffers.destroy(handle);
                return Err(errno);
            }
        }
    }
    put(out, handle)?;
    Ok(0)
}

/// Copies the chunk array out of the program's memory; `EFAULT` if it is not there.
fn read_chunks(array: u64, count: u32) -> Result<Vec<CsChunk>, Errno> {
    if count > abi::MAX_JOBS_PER_CS {
        return Err(Errno::INVAL);
    }
    let mut chunks = vec![CsChunk::zeroed(); count as usize];
    let len = size_of_val(&chunks[..]);
    // SAFETY: the destination is ours; a bad source comes back as an error.
    unsafe { guarded::copy(chunks.as_mut_ptr().cast(), array as *const u8, len) }
        .map_err(|_| Errno::FAULT)?;
    Ok(chunks)
}

/// Checks a chunk; returns its queue, program and the kind of queue.
fn program(context: &Context, chunk: &CsChunk) -> Result<(u32, Program, QueueKind), Errno> {
    let profile = context.profile;
    let all_pdma = context.node.config.lenient.pdma_streams;
    let queue = chunk.get(CsChunk::QUEUE_INDEX);
    let (handle, size) = (chunk.get(CsChunk::CB_HANDLE), chunk.get(CsChunk::CB_SIZE));
    let kind = parser::queue_kind(profile, queue, all_pdma).ok_or(Errno::INVAL)?;
    let user_buffer = chunk.get(CsChunk::CS_CHUNK_FLAGS) & abi::CS_CHUNK_USER_ALLOC_CB != 0;
    if kind == QueueKind::Hardware && !user_buffer {
        return Err(Errno::INVAL);
    }
    if size < 8 {
        return Err(Errno::INVAL);
    }
    let program = if kind == QueueKind::External {
        let buffer = context.buffers().get(handle)?;
        if size > buffer.size {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![0; size as usize];
        // SAFETY: the source is in the mapping of command buffers, the destination ours.
        unsafe { guarded::copy(bytes.as_mut_ptr(), buffer.ptr as *const u8, bytes.len()) }
            .map_err(|_| Errno::FAULT)?;
        parser::check_external(&bytes)?;
        Program::Copied(bytes.into())
    } else {
        if !parser::fetchable(profile, context.dram_size, handle, size.into()) {
            return Err(Errno::FAULT);
        }
        Program::At { addr: handle, size }
    };
    Ok((queue, program, kind))
}

/// Checks all chunks: which queue runs what.
fn check(
    context: &Context,
    chunks: &[CsChunk],
    staged: bool,
) -> Result<Vec<(u32, Program)>, Errno> {
    let programs: Vec<_> =
        chunks.iter().map(|chunk| program(context, chunk)).collect::<Result<_, _>>()?;
    // Internal queues do not report completion, so another chunk has to; in a staged submission it may be in another stage.
    if !staged && programs.iter().all(|(_, _, kind)| *kind == QueueKind::Internal) {
        return Err(Errno::INVAL);
    }
    Ok(programs.into_iter().map(|(queue, program, _)| (queue, program)).collect())
}

/// Which part of a staged submission this is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// Not staged: a submission of its own.
    Whole,
    /// A later part of this submission, or the first if the flags say so.
    Sequence(u64),
    /// The first part; it makes the signals of this reservation.
    Reserved(u32),
}

/// Submits plain chunks; returns the sequence number.
fn submit_chunks(
    fd: c_int,
    context: &Arc<Context>,
    chunks: &[CsChunk],
    timeout: Duration,
    flags: u32,
    stage: Stage,
) -> Result<u64, Errno> {
    let mut queues: Vec<u32> = chunks.iter().map(|chunk| chunk.get(CsChunk::QUEUE_INDEX)).collect();
    queues.sort_unstable();
    queues.dedup();
    let jobs = chunks.len() as u32;
    let staged = flags & FLAG_STAGED != 0;
    let (first, last) = (flags & FLAG_STAGED_FIRST != 0, flags & FLAG_STAGED_LAST != 0);
    // A first part that is not the last keeps the submission open with an extra job.
    let open = u32::from(staged && first && !last);
    let submission = context.enter_window(|seq| {
        Submission::new(seq, queues, jobs + open, timeout)
            .remembered(flags & FLAG_TIMESTAMP != 0)
            .sparing_card(flags & FLAG_SKIP_RESET_ON_TIMEOUT != 0)
    })?;
    let whole = if staged && !first {
        let Stage::Sequence(sequence) = stage else { return Err(Errno::INVAL) };
        match context.window.find(sequence) {
            Ok(Lookup::Known(whole)) if whole.outcome().is_none() => Some(whole),
            _ => {
                context.reject(&submission);
                return Err(Errno::INVAL);
            }
        }
    } else {
        None
    };
    let checked = check(context, chunks, staged).and_then(|programs| {
        if let Stage::Reserved(id) = stage
            && !context.signals().is_reserved(id)
        {
            return Err(Errno::INVAL);
        }
        context.wait_for_ring_space(&submission)?;
        Ok(programs)
    });
    let programs = match checked {
        Ok(programs) => programs,
        Err(errno) => {
            context.reject(&submission);
            let malformed = context.profile.generation == Generation::Gaudi1;
            let cause = if malformed { Rejection::Parsing } else { Rejection::Validation };
            context.state.reject(cause);
            return Err(errno);
        }
    };
    let Some(whole) = whole else {
        if let Stage::Reserved(id) = stage {
            context.signals().bind(id, submission.clone())?;
        }
        let seq = submission.seq;
        context.submit(borrow(fd)?, submission, programs, None);
        return Ok(seq);
    };
    // A later part adds its jobs to the whole submission; its own number is not used any further.
    whole.add_jobs(jobs);
    context.reject(&submission);
    let seq = whole.seq;
    context.submit(borrow(fd)?, whole.clone(), programs, None);
    if last {
        context.job_done(&whole);
    }
    Ok(seq)
}

const FLAG_FORCE_RESTORE: u32 = 0x1;
const FLAG_TIMESTAMP: u32 = 0x20;
const FLAG_STAGED: u32 = 0x40;
const FLAG_STAGED_FIRST: u32 = 0x80;
const FLAG_STAGED_LAST: u32 = 0x100;
const FLAG_SKIP_RESET_ON_TIMEOUT: u32 = 0x400;
const FLAGS_STAGED: u32 = FLAG_STAGED | FLAG_STAGED_FIRST | FLAG_STAGED_LAST;
/// Each of these flags makes a submission of another kind.
const FLAGS_KINDS: u32 = 0x2 | 0x4 | 0x8 | 0x1000 | 0x2000 | 0x4000 | 0x8000 | 0x10000;

/// A submission; see [`Stage`] for those in several parts.
pub(super) fn submit(
    fd: c_int,
    input: *const CsIn,
    out: *mut CsOut,
    timeout: Option<u32>,
    stage: Stage,
) -> Result<c_int, Errno> {
    let input = get(input)?;
    if !matches!(stage, Stage::Whole) && input.get(CsIn::FLAGS) & FLAG_STAGED == 0 {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    super::scal::refuse_beside_scal(&context)?;
    let seq = execute(fd, &context, &input, timeout, stage);
    let seq = context.log_refusal("submission", seq)?;
    put(out, CsOut::zeroed().with(CsOut::SEQ, seq))?;
    Ok(0)
}

/// Executes a submission as the driver does; returns its sequence number.
fn execute(
    fd: c_int,
    context: &Arc<Context>,
    input: &CsIn,
    timeout: Option<u32>,
    stage: Stage,
) -> Result<u64, Errno> {
    let flags = input.get(CsIn::FLAGS);
    if flags & FLAGS_STAGED != 0 && context.profile.generation != Generation::Gaudi1 {
        return Err(Errno::PERM);
    }
    let (execute, restore) =
        (input.get(CsIn::NUM_CHUNKS_EXECUTE), input.get(CsIn::NUM_CHUNKS_RESTORE));
    if (flags & FLAGS_KINDS).count_ones() > 1 || execute == 0 {
        return Err(Errno::INVAL);
    }
    let config = &context.node.config;
    let slow = config.model.map_or(1, |model| model.slow);
    let timeout = match timeout {
        Some(seconds) => Duration::from_secs(u64::from(seconds) * slow),
        None => config.cs_timeout,
    };
    if flags & FLAG_FORCE_RESTORE != 0 && restore > 0 {
        let chunks = read_chunks(input.get(CsIn::CHUNKS_RESTORE), restore)?;
        let seq = submit_chunks(fd, context, &chunks, timeout, 0, Stage::Whole)?;
        match context.wait(seq, None)? {
            Waited::Ended { outcome: Outcome::Completed, .. } | Waited::Gone => {}
            _ => return Err(Errno::NOEXEC),
        }
    }
    let chunks = read_chunks(input.get(CsIn::CHUNKS_EXECUTE), execute)?;
    submit_chunks(fd, context, &chunks, timeout, flags, stage)
}

/// A timeout of the library: the largest signed number means forever, otherwise the low 32 bits are microseconds.
pub(super) fn wait_limit(timeout_us: u64) -> Option<Duration> {
    const FOR_EVER: u64 = i64::MAX as u64;
    match timeout_us {
        FOR_EVER => None,
        us => Some(Duration::from_micros(us & 0xffff_ffff)),
    }
}

fn wait(fd: c_int, seq: u64, timeout_us: u64, status: *mut u32) -> Result<u64, Errno> {
    if status.is_null() {
        return Err(Errno::INVAL);
    }
    let context = context::of(borrow(fd)?)?;
    let waited = match context.wait(seq, wait_limit(timeout_us)) {
        Ok(waited) => waited,
        Err(errno) => {
            put(status, 0)?;
            return Err(errno);
        }
    };
    let (value, result) = match waited {
        Waited::Ended { outcome: Outcome::Completed, at_ns } => (abi::WAIT_COMPLETED, Ok(at_ns)),
        Waited::Ended { outcome: Outcome::TimedOut, .. } => {
            (abi::WAIT_TIMEDOUT, Err(Errno::TIMEDOUT))
        }
        Waited::Ended { outcome: Outcome::Aborted, .. } => (abi::WAIT_ABORTED, Err(Errno::IO)),
        Waited::Gone => (abi::WAIT_COMPLETED, Ok(0)),
        Waited::Busy => (abi::WAIT_BUSY, Ok(0)),
    };
    put(status, value)?;
    result
}

c_functions! {
    fn hlthunk_request_command_buffer(fd: c_int, size: u32, out: *mut u64) -> status {
        create_buffer(fd, size, out, false)
    }

    fn hlthunk_request_mapped_command_buffer(fd: c_int, size: u32, out: *mut u64) -> status {
        create_buffer(fd, size, out, true)
    }

    fn hlthunk_destroy_command_buffer(fd: c_int, cb_handle: u64) -> done {
        let context = context::operational(borrow(fd)?)?;
        let buffer = context.buffers().destroy(cb_handle)?;
        if let Some(va) = buffer.va {
            context.space_mut().unmap_command_buffer(va);
        }
        Ok(())
    }

    fn hlthunk_get_cb_usage_count(fd: c_int, cb_handle: u64, out: *mut u32) -> done {
        context::operational(borrow(fd)?)?.buffers().get(cb_handle)?;
        put(out, 0)
    }

    fn hlthunk_get_mapped_cb_device_va_by_handle(fd: c_int, cb_handle: u64, out: *mut u64) -> done {
        let buffer = context::operational(borrow(fd)?)?.buffers().get(cb_handle)?;
        put(out, buffer.va.ok_or(Errno::INVAL)?)
    }

    fn hlthunk_command_submission(fd: c_int, input: *const CsIn, out: *mut CsOut) -> status {
        submit(fd, input, out, None, Stage::Whole)
    }

    /// With a timeout in seconds of its own.
    fn hlthunk_command_submission_timeout(fd: c_int, input: *const CsIn, out: *mut CsOut, timeout: u32) -> status {
        submit(fd, input, out, Some(timeout), Stage::Whole)
    }

    fn hlthunk_wait_for_cs(fd: c_int, seq: u64, timeout_us: u64, out: *mut u32) -> status {
        wait(fd, seq, timeout_us, out).map(|_| 0)
    }

    fn hlthunk_wait_for_cs_with_timestamp(
        fd: c_int, seq: u64, timeout_us: u64, out: *mut u32, timestamp: *mut u64,
    ) -> done {
        let at = wait(fd, seq, timeout_us, out)?;
        put(timestamp, at)
    }
}
