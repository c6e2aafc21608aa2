//! Signals between queues, staged submissions and reserved ("encapsulated") signals.

use core::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::commands::{self, Stage};
use super::{borrow, get, put};
use crate::abi::{
    CsIn, CsOut, ReserveSigHandle, SigResIn, SigResOut, SignalIn, SignalOut, WaitForSignalData,
    WaitIn, WaitOut,
};
use crate::asic::Generation;
use crate::context::{self, Context};
use crate::guarded;
use crate::processor::Program;
use crate::signals::{Allocated, Signals, SobValue};
use crate::submission::{Lookup, Submission};

fn timeout_of(context: &Context, seconds: Option<u32>) -> Duration {
    seconds.map_or(context.node.config.cs_timeout, |s| Duration::from_secs(s.into()))
}

/// Sets a sync object that is reused back to zero.
fn begin(context: &Context, signals: &Signals, allocated: &Allocated) {
    if allocated.fresh {
        context.set_register(signals.address(&allocated.target.sob), 0);
    }
}

/// Takes a slot in the window and waits for space in the queue's ring, for packets that the driver makes.
fn enter(
    context: &Arc<Context>,
    queue: u32,
    timeout: Option<u32>,
) -> Result<Arc<Submission>, Errno> {
    if context.profile.queues <= queue {
        return Err(Errno::INVAL);
    }
    super::scal::refuse_beside_scal(context)?;
    let timeout = timeout_of(context, timeout);
    let submission = context.enter_window(|seq| Submission::new(seq, vec![queue], 1, timeout))?;
    match context.wait_for_ring_space(&submission) {
        Ok(()) => Ok(submission),
        Err(errno) => {
            context.reject(&submission);
            Err(errno)
        }
    }
}

fn signal(
    fd: c_int,
    input: *const SignalIn,
    out: *mut SignalOut,
    timeout: Option<u32>,
) -> Result<c_int, Errno> {
    let input = get(input)?;
    if out.is_null() {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    let queue = input.get(SignalIn::QUEUE_INDEX);
    let submission = enter(&context, queue, timeout)?;
    // Values must enter the queue in the order they are allocated.
    let mut signals = context.signals();
    let allocated = match signals.allocate(queue, 1) {
        Ok(allocated) => allocated,
        Err(errno) => {
            context.reject(&submission);
            return Err(errno);
        }
    };
    begin(&context, &signals, &allocated);
    submission.set_signal(allocated.target.value);
    let offset = signals.offset(&allocated.target.sob) as u32;
    let answer = SignalOut::zeroed()
        .with(SignalOut::SEQ, submission.seq)
        .with(SignalOut::SOB_BASE_ADDR_OFFSET, offset)
        .with(SignalOut::SOB_COUNT_BEFORE_SUBMISSION, allocated.before as u16);
    let program = Program::Copied(signals.signal_packets(&allocated.target).into());
    context.submit(borrow(fd)?, submission, vec![(queue, program)], Some(allocated.target.sob));
    put(out, answer)?;
    Ok(0)
}

/// The value that a signal submission reaches; `None` if it already has.
fn signal_target(context: &Context, seq: u64) -> Result<Option<SobValue>, Errno> {
    match context.window.find(seq)? {
        Lookup::Gone => Ok(None),
        Lookup::Known(submission) => {
            let value = submission.signal().ok_or(Errno::INVAL)?;
            if submission.outcome().is_some() {
                return Ok(None);
            }
            let queue = *submission.queues.first().ok_or(Errno::INVAL)?;
            // The pending signal keeps its object in use, so it is one of the stream's pair; the job knows which. If
            // the job has ended since, there is nothing to wait for.
            let sob = context.queues[queue as usize].sob_of(&submission);
            Ok(sob.map(|sob| SobValue { sob, value }))
        }
    }
}

fn wait_signal(
    fd: c_int,
    input: *const WaitIn,
    out: *mut WaitOut,
    timeout: Option<u32>,
    reserved: bool,
) -> Result<c_int, Errno> {
    let input = get(input)?;
    if out.is_null() || input.get(WaitIn::NUM_WAIT_FOR_SIGNAL) != 1 {
        return Err(Errno::INVAL);
    }
    let data = get(input.get(WaitIn::WAIT_FOR_SIGNAL) as *const WaitForSignalData)?;
    if data.get(WaitForSignalData::SIGNAL_SEQ_NR) != 1 {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    let of = data.get(WaitForSignalData::SIGNAL_SEQ);
    let target = if reserved {
        context.signals().reserved(of, data.get(WaitForSignalData::ENCAPS_SIGNAL_OFFSET))
    } else {
        let mut seq = 0u64;
        // SAFETY: the destination is ours; a bad source comes back as an error.
        unsafe { guarded::copy((&raw mut seq).cast(), of as *const u8, 8) }
            .map_err(|_| Errno::FAULT)?;
        signal_target(&context, seq)?
    };
    let Some(target) = target else {
        // Nothing to wait for: the driver returns an invalid sequence number.
        put(out, WaitOut::zeroed().with(WaitOut::SEQ, u64::MAX))?;
        return Ok(0);
    };
    let queue = data.get(WaitForSignalData::QUEUE_INDEX);
    let packets = context.signals().wait_packets(queue, &target)?;
    let submission = enter(&context, queue, timeout)?;
    let seq = submission.seq;
    let program = Program::Copied(packets.into());
    context.submit(borrow(fd)?, submission, vec![(queue, program)], Some(target.sob));
    put(out, WaitOut::zeroed().with(WaitOut::SEQ, seq))?;
    Ok(0)
}

fn wait_collective(
    fd: c_int,
    input: *const WaitIn,
    out: *mut WaitOut,
    timeout: Option<u32>,
    reserved: bool,
) -> Result<c_int, Errno> {
    if context::operational(borrow(fd)?)?.profile.generation != Generation::Gaudi1 {
        return Err(Errno::INVAL);
    }
    wait_signal(fd, input, out, timeout, reserved)
}

c_functions! {
    fn hlthunk_signal_submission(fd: c_int, input: *const SignalIn, out: *mut SignalOut) -> status {
        signal(fd, input, out, None)
    }

    fn hlthunk_signal_submission_timeout(
        fd: c_int, input: *const SignalIn, out: *mut SignalOut, timeout: u32,
    ) -> status { signal(fd, input, out, Some(timeout)) }

    /// A queue waits for another queue's signal.
    fn hlthunk_wait_for_signal(fd: c_int, input: *const WaitIn, out: *mut WaitOut) -> status {
        wait_signal(fd, input, out, None, false)
    }

    fn hlthunk_wait_for_signal_timeout(fd: c_int, input: *const WaitIn, out: *mut WaitOut, timeout: u32) -> status {
        wait_signal(fd, input, out, Some(timeout), false)
    }

    /// As a wait; there are no engines to reduce anything.
    fn hlthunk_wait_for_collective_signal(fd: c_int, input: *const WaitIn, out: *mut WaitOut) -> status {
        wait_collective(fd, input, out, None, false)
    }

    fn hlthunk_wait_for_collective_signal_timeout(
        fd: c_int, input: *const WaitIn, out: *mut WaitOut, timeout: u32,
    ) -> status {
        wait_collective(fd, input, out, Some(timeout), false)
    }

    fn hlthunk_wait_for_reserved_encaps_signals(fd: c_int, input: *const WaitIn, out: *mut WaitOut) -> status {
        wait_signal(fd, input, out, None, true)
    }

    fn hlthunk_wait_for_reserved_encaps_collective_signals(
        fd: c_int, input: *const WaitIn, out: *mut WaitOut,
    ) -> status {
        wait_collective(fd, input, out, None, true)
    }

    /// Reserves signals that the program will make itself.
    fn hlthunk_reserve_encaps_signals(fd: c_int, input: *const SigResIn, out: *mut SigResOut) -> done {
        let input = get(input)?;
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        let context = context::operational(borrow(fd)?)?;
        let mut signals = context.signals();
        let count = input.get(SigResIn::COUNT);
        let (id, allocated) = signals.reserve(input.get(SigResIn::QUEUE_INDEX), count)?;
        begin(&context, &signals, &allocated);
        let offset = signals.offset(&allocated.target.sob) as u32;
        let handle = ReserveSigHandle::zeroed()
            .with(ReserveSigHandle::ID, id)
            .with(ReserveSigHandle::SOB_BASE_ADDR_OFFSET, offset)
            .with(ReserveSigHandle::COUNT, count);
        put(out, SigResOut::zeroed().with(SigResOut::HANDLE, handle))
    }

    fn hlthunk_unreserve_encaps_signals(fd: c_int, handle: *const ReserveSigHandle, out: *mut u32) -> done {
        let handle = get(handle)?;
        context::operational(borrow(fd)?)?.signals().unreserve(handle.get(ReserveSigHandle::ID))?;
        put(out, 0)
    }

    /// A submission in several parts.
    fn hlthunk_staged_command_submission(fd: c_int, sequence: u64, input: *const CsIn, out: *mut CsOut) -> status {
        commands::submit(fd, input, out, None, Stage::Sequence(sequence))
    }

    fn hlthunk_staged_command_submission_timeout(
        fd: c_int, sequence: u64, input: *const CsIn, out: *mut CsOut, timeout: u32,
    ) -> status {
        commands::submit(fd, input, out, Some(timeout), Stage::Sequence(sequence))
    }

    /// A staged submission whose packets make reserved signals.
    fn hlthunk_staged_command_submission_encaps_signals(
        fd: c_int, handle_id: u64, input: *const CsIn, out: *mut CsOut,
    ) -> status {
        commands::submit(fd, input, out, None, Stage::Reserved(handle_id as u32))
    }
}
