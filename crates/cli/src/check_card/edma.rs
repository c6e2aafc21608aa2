//! The one step that may reset the card: does an EDMA engine fetch a command buffer from host memory?
//!
//! By the vendor's sources a Gaudi2's does not, and hangs. The submission asks the driver not to reset the
//! card when it times out; whether that saves it is part of the question.

use std::os::fd::{AsFd, AsRawFd};
use std::time::Instant;

use hl_thunk::packet::LinDma;
use hl_thunk::sys::{CS_CHUNK_USER_ALLOC_CB, CsChunk, CsIn, CsOut};
use hl_thunk::{
    Chunk, CommandBuffer, Device, DeviceAddr, Direction, Generation, HostMapping, HostPages,
    WaitStatus, packet,
};
use serde_json::json;

use super::asking::ms;
use super::memory::Area;
use crate::report::Finding;

/// Queue of the first EDMA engine.
const QUEUE: u32 = 8;
/// Seconds the driver gives it.
const TIMEOUT: u32 = 5;
const SKIP_RESET_ON_TIMEOUT: u32 = 0x400;
const LEN: u32 = 4096;

type SubmitWithTimeout = unsafe extern "C" fn(i32, *mut CsIn, *mut CsOut, u32) -> i32;

/// Submits a copy within the card to an EDMA queue, its command buffer in host memory.
pub(super) fn host_command_buffer(device: &Device, area: &Area) -> Finding {
    if device.generation() != Generation::Gaudi2 {
        return Finding::skipped("", "only a Gaudi2 has EDMA queues for users");
    }
    let began = Instant::now();
    let outcome = submit(device, area.base());
    let took = began.elapsed();
    let alive = still_works(device);
    let data = |fetches: Option<bool>| json!({"fetches_host": fetches, "survived": alive.is_ok()});
    match (outcome, &alive) {
        (Ok(()), Ok(())) => Finding::good("", "EDMA fetched its command buffer from host memory")
            .with(data(Some(true))),
        (Err(why), Ok(())) => Finding::good(
            "",
            format!(
                "EDMA did not fetch from host memory ({why} after {}); the card survived",
                ms(took)
            ),
        )
        .with(data(Some(false))),
        (outcome, Err(lost)) => Finding::bad(
            "",
            format!("the card is lost after an EDMA submission ({outcome:?}): {lost}"),
            "close all users and let the driver reset it; send this report and the kernel log",
        )
        .with(data(None)),
    }
}

fn submit(device: &Device, area: DeviceAddr) -> Result<(), String> {
    let function = device.library().function("hlthunk_command_submission_timeout");
    let function = function.ok_or("the library has no hlthunk_command_submission_timeout")?;
    // SAFETY: the signature that hlthunk.h gives this function.
    let call: SubmitWithTimeout = unsafe { std::mem::transmute(function) };
    let copy = LinDma::Copy { src: area, dst: DeviceAddr(area.0 + u64::from(LEN)), len: LEN };
    let packet = copy.encode(device.generation()).ok_or("no packet")?;
    let pages = HostPages::new(packet.len()).map_err(|error| error.to_string())?;
    // Never given back: a hung engine may still look at it. The process ends soon.
    let pages = std::mem::ManuallyDrop::new(pages);
    // SAFETY: fresh pages, as long as the packet.
    unsafe { pages.as_ptr().copy_from_nonoverlapping(packet.as_ptr(), packet.len()) };
    // SAFETY: the pages are never given back.
    let mapping = unsafe { HostMapping::new(device, pages.as_ptr(), pages.len() as u64) };
    let mapping = std::mem::ManuallyDrop::new(mapping.map_err(|error| error.to_string())?);
    let mut chunk = CsChunk {
        cb_handle: mapping.addr().0,
        queue_index: QUEUE,
        cb_size: packet.len() as u32,
        cs_chunk_flags: CS_CHUNK_USER_ALLOC_CB,
        ..CsChunk::default()
    };
    let mut input = CsIn {
        chunks_restore: std::ptr::null_mut(),
        chunks_execute: (&raw mut chunk).cast(),
        num_chunks_restore: 0,
        num_chunks_execute: 1,
        flags: SKIP_RESET_ON_TIMEOUT,
    };
    let mut out = CsOut::default();
    // SAFETY: the structures live across the call; the packet touches the area alone, which the caller
    // keeps mapped, and nobody uses meanwhile.
    let rc = unsafe { call(device.as_fd().as_raw_fd(), &mut input, &mut out, TIMEOUT) };
    if rc != 0 {
        return Err(format!("submission answers {rc}"));
    }
    wait(device, out.seq, TIMEOUT + 5)
}

fn wait(device: &Device, sequence: u64, seconds: u32) -> Result<(), String> {
    for _ in 0..seconds {
        match device.wait(sequence, 1_000_000) {
            Ok(WaitStatus::Completed) => return Ok(()),
            Ok(WaitStatus::Busy) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Err(format!("not done after {seconds} s"))
}

/// Whether the card still carries out a packet that does nothing.
fn still_works(device: &Device) -> Result<(), String> {
    let queue = device.generation().queues(Direction::HostToDevice)[0];
    let commands = CommandBuffer::new(device, packet::NOP.len() as u32);
    let commands = commands.map_err(|error| error.to_string())?;
    // SAFETY: a buffer of our own that nothing was submitted from.
    unsafe { commands.write(0, &packet::NOP) };
    let chunk = Chunk { buffer: &commands, offset: 0, len: packet::NOP.len(), queue };
    // SAFETY: a packet that touches no memory; the buffer lives until the wait has ended.
    let sequence = unsafe { device.submit(&[chunk]) }.map_err(|error| error.to_string())?;
    wait(device, sequence, 5)
}
