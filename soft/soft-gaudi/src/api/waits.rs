//! Waiting for several submissions, and for interrupts.

use core::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::io::Errno;

use super::commands::wait_limit;
use super::{borrow, get, put};
use crate::abi::{self, WaitMultiCsIn, WaitMultiCsOut};
use crate::asic::Generation;
use crate::context::{self, Context};
use crate::engine::realtime_ns;
use crate::guarded;
use crate::interrupts::{ANY, CounterTarget, Registration};

/// Most sequence numbers one call may wait for.
const MAX_MULTI: usize = 32;

fn wait_multi(
    fd: c_int,
    input: *const WaitMultiCsIn,
    out: *mut WaitMultiCsOut,
    timestamp: Option<*mut u64>,
) -> Result<c_int, Errno> {
    let input = get(input)?;
    let array = input.get(WaitMultiCsIn::SEQ) as *const u8;
    if out.is_null() || array.is_null() {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    if context.profile.generation != Generation::Gaudi1 {
        return Err(Errno::PERM);
    }
    // The library keeps the length in a byte.
    let len = usize::from(input.get(WaitMultiCsIn::SEQ_LEN) as u8);
    if len == 0 || len > MAX_MULTI {
        return Err(Errno::INVAL);
    }
    let mut seqs = vec![0u64; len];
    // SAFETY: the destination is ours; a bad source comes back as an error.
    unsafe { guarded::copy(seqs.as_mut_ptr().cast(), array, len * 8) }.map_err(|_| Errno::FAULT)?;
    let limit = wait_limit(input.get(WaitMultiCsIn::TIMEOUT_US));
    let (set, first_ns) = context.wait_any(&seqs, limit)?;
    let status = if set == 0 { abi::WAIT_BUSY } else { abi::WAIT_COMPLETED };
    let answer = WaitMultiCsOut::zeroed()
        .with(WaitMultiCsOut::STATUS, status)
        .with(WaitMultiCsOut::SEQ_SET, set)
        .with(WaitMultiCsOut::COMPLETED, set.count_ones() as u8);
    put(out, answer)?;
    if let Some(timestamp) = timestamp {
        put(timestamp, first_ns)?;
    }
    Ok(0)
}

/// Whether an interrupt id exists: one of the user's, or "any queue" and "any decoder".
fn check_interrupt(context: &Context, id: u32) -> Result<(), Errno> {
    let profile = context.profile;
    if profile.interrupts == 0 {
        return Err(Errno::PERM);
    }
    let first = u32::from(profile.first_interrupt);
    let own = first..first + u32::from(profile.interrupts);
    if own.contains(&id) || matches!(id, 0xfff | 0xffe | u32::MAX) {
        Ok(())
    } else {
        Err(Errno::INVAL)
    }
}

/// A counter in a command buffer: `index` counts 64-bit words.
fn counter_address(context: &Context, handle: u64, index: u64) -> Result<usize, Errno> {
    let buffer = context.buffers().get(handle)?;
    let offset = index.checked_mul(8).ok_or(Errno::INVAL)?;
    if offset + 8 > buffer.mapped_len() {
        return Err(Errno::INVAL);
    }
    Ok(buffer.ptr + offset as usize)
}

struct InterruptWait {
    id: u32,
    timeout_us: u64,
    status: *mut u32,
    timestamp: Option<*mut u64>,
}

fn wait_interrupt(
    context: &Arc<Context>,
    how: &InterruptWait,
    goal: CounterTarget,
) -> Result<c_int, Errno> {
    check_interrupt(context, how.id)?;
    let until = wait_limit(how.timeout_us).map(|limit| Instant::now() + limit);
    // The library writes "any queue" as the largest number, the driver as one of twelve bits.
    let id = if how.id == u32::MAX { ANY[0] } else { how.id };
    let reached = context.interrupts.wait(id, goal, until)?;
    if !reached && context.down.load(Ordering::Acquire) {
        put(how.status, abi::WAIT_ABORTED)?;
        return Err(Errno::IO);
    }
    put(how.status, if reached { abi::WAIT_COMPLETED } else { abi::WAIT_BUSY })?;
    if let Some(timestamp) = how.timestamp {
        put(timestamp, realtime_ns())?;
    }
    Ok(0)
}

fn wait_at_address(
    fd: c_int,
    addr: *const c_void,
    target: u64,
    how: &InterruptWait,
) -> Result<c_int, Errno> {
    if how.status.is_null() || addr.is_null() {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    wait_interrupt(&context, how, CounterTarget { counter: addr as usize, target })
}

fn wait_by_handle(
    fd: c_int,
    handle: u64,
    index: u64,
    target: u64,
    how: &InterruptWait,
) -> Result<c_int, Errno> {
    if how.status.is_null() {
        return Err(Errno::INVAL);
    }
    let context = context::operational(borrow(fd)?)?;
    check_interrupt(&context, how.id)?;
    let counter = counter_address(&context, handle, index)?;
    wait_interrupt(&context, how, CounterTarget { counter, target })
}

c_functions! {
    /// Until at least one of them has ended (Gaudi1).
    fn hlthunk_wait_for_multi_cs(fd: c_int, input: *const WaitMultiCsIn, out: *mut WaitMultiCsOut) -> status {
        wait_multi(fd, input, out, None)
    }

    fn hlthunk_wait_for_multi_cs_with_timestamp(
        fd: c_int, input: *const WaitMultiCsIn, out: *mut WaitMultiCsOut, timestamp: *mut u64,
    ) -> status {
        wait_multi(fd, input, out, Some(timestamp))
    }

    /// Until the 64-bit word at `addr` reaches `target`.
    fn hlthunk_wait_for_interrupt(
        fd: c_int, addr: *mut c_void, target: u64, id: u32, timeout_us: u64, out: *mut u32,
    ) -> status {
        let how = InterruptWait { id, timeout_us, status: out, timestamp: None };
        wait_at_address(fd, addr, target, &how)
    }

    fn hlthunk_wait_for_interrupt_with_timestamp(
        fd: c_int, addr: *mut c_void, target: u64, id: u32, timeout_us: u64, out: *mut u32, timestamp: *mut u64,
    ) -> status {
        let how = InterruptWait { id, timeout_us, status: out, timestamp: Some(timestamp) };
        wait_at_address(fd, addr, target, &how)
    }

    /// The counter is in a command buffer.
    fn hlthunk_wait_for_interrupt_by_handle(
        fd: c_int, handle: u64, index: u64, target: u64, id: u32, timeout_us: u64, out: *mut u32,
    ) -> status {
        let how = InterruptWait { id, timeout_us, status: out, timestamp: None };
        wait_by_handle(fd, handle, index, target, &how)
    }

    fn hlthunk_wait_for_interrupt_by_handle_with_timestamp(
        fd: c_int, handle: u64, index: u64, target: u64, id: u32, timeout_us: u64, out: *mut u32, timestamp: *mut u64,
    ) -> status {
        let how = InterruptWait { id, timeout_us, status: out, timestamp: Some(timestamp) };
        wait_by_handle(fd, handle, index, target, &how)
    }

    /// Memory for times, mapped by its handle.
    fn hlthunk_allocate_timestamp_elements(fd: c_int, count: u32, handle: *mut u64) -> done {
        if handle.is_null() || count > 1 << 20 {
            return Err(Errno::INVAL);
        }
        let context = context::operational(borrow(fd)?)?;
        let (made, _) = context.buffers().create_any(u64::from(count) * 8)?;
        put(handle, made)
    }

    /// Notes the time when a counter reaches its target.
    fn hlthunk_register_timestamp_interrupt(
        fd: c_int, id: u32, counter_handle: u64, counter_index: u64, target: u64, note_handle: u64, note_index: u64,
    ) -> done {
        let context = context::operational(borrow(fd)?)?;
        check_interrupt(&context, id)?;
        let counter = counter_address(&context, counter_handle, counter_index)?;
        let timestamp_at = counter_address(&context, note_handle, note_index)?;
        context.register(id, Registration { goal: CounterTarget { counter, target }, timestamp_at });
        Ok(())
    }
}
