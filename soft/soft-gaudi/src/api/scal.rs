//! What the software SCAL and Synapse (crate `soft-synapse`) need beyond the driver's functions.
//!
//! SCAL drives the engines through firmware and mapped registers, not through the driver. So its queues are not among the
//! driver's queues and exist on a Gaudi3 too. From [`soft_gaudi_scal_begin`] on, a submission through the driver is an error.
//! Calls that only the owner of the card may make are counted. If the plugin is on the stack of one, the process ends,
//! except where the plugin passes on a release, or with `SOFT_GAUDI_FORBIDDEN=count`.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

use rustix::io::Errno;

use super::{borrow, put};
use crate::asic::SCAL_QUEUES;
use crate::context;
use crate::guarded;
use crate::processor::Program;
use crate::submission::Submission;

/// LIN_DMA as Gaudi2 writes it; the bit for a fill.
const LIN_DMA: u32 = 9 << 24;
const MEMSET: u32 = 1 << 4;
/// Largest copy of one packet.
const MAX_PACKET: u64 = 1 << 30;

/// File name of the plugin, which is a guest on a card that Synapse has acquired.
const GUEST: &str = "libucx_gaudi.";
const MAX_FRAMES: usize = 64;

/// A copy, or a fill: then `src` is the 32-bit value, twice.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScalTransfer {
    /// Device address, or value.
    pub src: u64,
    /// Device address.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
    /// 1 for a fill.
    pub fill: u64,
}

fn encode(transfer: &ScalTransfer, packets: &mut Vec<u8>) {
    let fill = transfer.fill != 0;
    let ctl = LIN_DMA | if fill { MEMSET } else { 0 };
    let mut done = 0;
    while done < transfer.len {
        let len = (transfer.len - done).min(MAX_PACKET);
        let src = if fill { transfer.src } else { transfer.src.wrapping_add(done) };
        packets.extend((len as u32).to_le_bytes());
        packets.extend(ctl.to_le_bytes());
        packets.extend(src.to_le_bytes());
        packets.extend(transfer.dst.wrapping_add(done).to_le_bytes());
        done += len;
    }
    if transfer.len == 0 {
        packets.extend([0, 0, 0, 0, 0, 0, 0, 0x0a]); // NOP
    }
}

fn calls() -> &'static Mutex<BTreeMap<String, u64>> {
    static CALLS: OnceLock<Mutex<BTreeMap<String, u64>>> = OnceLock::new();
    CALLS.get_or_init(Mutex::default)
}

fn text(name: *const c_char) -> String {
    if name.is_null() {
        return String::new();
    }
    // SAFETY: C's callers promise a NUL-terminated string.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// Counts a call that only the owner of the card may make; forbidden if the plugin makes it.
#[unsafe(no_mangle)]
pub extern "C" fn soft_gaudi_owner_call(name: *const c_char) {
    let name = text(name);
    *calls().lock().unwrap_or_else(|p| p.into_inner()).entry(name.clone()).or_default() += 1;
    // A guest may intercept the calls that release the card and pass the framework's calls on. It does so in one
    // function, which it does not export.
    let releases = matches!(&*name, "synDeviceRelease" | "synDestroy" | "scal_destroy");
    let guests = guest_frames();
    let passed_on = releases && guests == [false];
    if !guests.is_empty() && !passed_on {
        forbidden(&format!("a guest on the framework's card called {name}"));
    }
}

/// How often a call was made that only the owner of the card may make. NULL: how many forbidden actions were counted
/// (with `SOFT_GAUDI_FORBIDDEN=count`).
#[unsafe(no_mangle)]
pub extern "C" fn soft_gaudi_calls(name: *const c_char) -> u64 {
    let name = if name.is_null() { FORBIDDEN.to_owned() } else { text(name) };
    calls().lock().unwrap_or_else(|p| p.into_inner()).get(&name).copied().unwrap_or(0)
}

/// Something was done that breaks a real card or the framework on it.
#[unsafe(no_mangle)]
pub extern "C" fn soft_gaudi_forbid(what: *const c_char) {
    forbidden(&text(what));
}

const FORBIDDEN: &str = "forbidden";

/// Says what was done, and ends the process unless `SOFT_GAUDI_FORBIDDEN=count`.
pub(super) fn forbidden(what: &str) {
    eprintln!("soft-gaudi: forbidden: {what}");
    if std::env::var("SOFT_GAUDI_FORBIDDEN").is_ok_and(|value| value == "count") {
        *calls()
            .lock()
            .unwrap_or_else(|p| p.into_inner())
            .entry(FORBIDDEN.to_owned())
            .or_default() += 1;
    } else {
        std::process::abort();
    }
}

/// Whether the plugin is on the stack, directly or below another library.
#[unsafe(no_mangle)]
pub extern "C" fn soft_gaudi_is_guest() -> c_int {
    (!guest_frames().is_empty()).into()
}

/// The guest's functions on the stack: for each, whether it is exported.
fn guest_frames() -> Vec<bool> {
    unsafe extern "C" {
        fn backtrace(buffer: *mut *mut c_void, size: c_int) -> c_int;
    }
    let mut frames = [core::ptr::null_mut(); MAX_FRAMES];
    // SAFETY: the buffer has room for so many.
    let found = unsafe { backtrace(frames.as_mut_ptr(), MAX_FRAMES as c_int) };
    let guest = |frame: &*mut c_void| {
        // SAFETY: all zeros are a value of it, to be overwritten.
        let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
        // SAFETY: takes any address.
        if unsafe { libc::dladdr(*frame, &raw mut info) } == 0 || info.dli_fname.is_null() {
            return None;
        }
        let path = text(info.dli_fname);
        let name = path.rsplit('/').next().unwrap_or_default();
        name.starts_with(GUEST).then_some(!info.dli_sname.is_null())
    };
    frames.iter().take(found.max(0) as usize).filter_map(guest).collect()
}

/// Refuses a submission through the driver while SCAL drives the engines.
pub(super) fn refuse_beside_scal(context: &context::Context) -> Result<(), Errno> {
    if context.scal.load(Ordering::Acquire) >= 0 {
        forbidden("a raw submission on a card whose engines SCAL drives");
        return Err(Errno::PERM);
    }
    Ok(())
}

c_functions! {
    /// SCAL takes the engines of the card; `EBUSY` if it already has them.
    fn soft_gaudi_scal_begin(fd: c_int) -> status {
        let context = context::operational(borrow(fd)?)?;
        let taken = context.scal.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed);
        taken.map(|_| 0).map_err(|_| Errno::BUSY)
    }

    /// SCAL releases the engines.
    fn soft_gaudi_scal_end(fd: c_int) -> done {
        context::of(borrow(fd)?)?.scal.store(-1, Ordering::Release);
        Ok(())
    }

    /// Queues transfers on one of SCAL's queues, in order, behind all earlier ones. `out`: the number for `hlthunk_wait_for_cs`.
    fn soft_gaudi_scal_submit(
        fd: c_int, queue: u32, transfers: *const ScalTransfer, count: usize, out: *mut u64,
    ) -> done {
        let context = context::operational(borrow(fd)?)?;
        if queue >= SCAL_QUEUES || count == 0 || context.scal.load(Ordering::Acquire) < 0 {
            return Err(Errno::INVAL);
        }
        let mut packets = Vec::with_capacity(count * 24);
        for index in 0..count {
            let mut transfer = ScalTransfer { src: 0, dst: 0, len: 0, fill: 0 };
            let size = size_of::<ScalTransfer>();
            // SAFETY: the destination is ours; a bad source comes back as an error.
            unsafe {
                guarded::copy(
                    (&raw mut transfer).cast(),
                    transfers.wrapping_add(index).cast(),
                    size,
                )
            }
            .map_err(|_| Errno::FAULT)?;
            encode(&transfer, &mut packets);
        }
        let queue = context.profile.queues + queue;
        let timeout = context.node.config.cs_timeout;
        let submission =
            context.enter_window(|seq| Submission::new(seq, vec![queue], 1, timeout))?;
        if let Err(errno) = context.wait_for_ring_space(&submission) {
            context.reject(&submission);
            return Err(errno);
        }
        let seq = submission.seq;
        context.submit(
            borrow(fd)?,
            submission,
            vec![(queue, Program::Copied(packets.into()))],
            None,
        );
        put(out, seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_transfer_becomes_several_packets_and_a_fill_keeps_its_value() {
        let mut packets = Vec::new();
        let transfer = ScalTransfer { src: 7, dst: 0x1000, len: MAX_PACKET + 5, fill: 1 };
        encode(&transfer, &mut packets);
        assert_eq!(packets.len(), 48);
        assert_eq!(packets[24..28], 5_u32.to_le_bytes());
        assert_eq!(packets[28..32], (LIN_DMA | MEMSET).to_le_bytes());
        assert_eq!(packets[32..40], 7_u64.to_le_bytes());
        assert_eq!(packets[40..48], (0x1000 + MAX_PACKET).to_le_bytes());
    }
}
