//! One page per card that every process may read: what the driver answers on a control node.
//!
//! Only the owner of the card writes (except for the release flag, set by the closer). The values
//! are hints for people and monitors; correctness never rests on them, except for the generation
//! of the context, which only a process holding the card's lock changes.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::node::Node;

/// The page. Fresh tmpfs pages are zero, which is the right start for every field.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct DeviceState {
    /// Counts contexts; the current one's number.
    pub(crate) context: AtomicU64,
    /// Times the card was opened.
    pub(crate) opens: AtomicU64,
    /// CLOCK_BOOTTIME of the last open and close, ms.
    pub(crate) opened_ms: AtomicU64,
    /// See `opened_ms`.
    pub(crate) closed_ms: AtomicU64,
    /// Process that opened it last.
    pub(crate) pid: AtomicU32,
    /// 1 while a closer cleans up.
    pub(crate) in_release: AtomicU32,
    /// DRAM of the current owner's card.
    pub(crate) dram_size: AtomicU64,
    /// Of it allocated.
    pub(crate) dram_used: AtomicU64,
    /// 1 after the card was taken out of the machine.
    pub(crate) removed: AtomicU32,
    /// `hl_device_status` of the current context.
    pub(crate) status: AtomicU32,
    /// Resets since the machine was made.
    pub(crate) hard_resets: AtomicU32,
    /// Rejected submissions by cause, as `hl_info_cs_counters` lists them (totals).
    pub(crate) drops: [AtomicU64; 6],
    /// The same for the current context.
    pub(crate) context_drops: [AtomicU64; 6],
    /// Submissions not finished, for `is_device_idle` of others.
    pub(crate) in_flight: AtomicU64,
    /// The first of each kind of error in this context: when (ns, 0 for never) and where.
    pub(crate) cs_timeout: Record,
    /// See `cs_timeout`.
    pub(crate) page_fault: Record,
    /// See `cs_timeout`.
    pub(crate) razwi: Record,
    /// See `cs_timeout`.
    pub(crate) undefined_opcode: Record,
}

/// An error that was captured for later questions.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Record {
    when_ns: AtomicU64,
    what: AtomicU64,
    who: AtomicU64,
}

impl Record {
    /// Keeps the first error only, as the driver does.
    pub(crate) fn capture(&self, now_ns: u64, what: u64, who: u64) {
        if self.when_ns.load(Ordering::Acquire) == 0 {
            self.what.store(what, Ordering::Relaxed);
            self.who.store(who, Ordering::Relaxed);
            self.when_ns.store(now_ns, Ordering::Release);
        }
    }

    /// When, what (an address or a sequence number), and which queue; zeros if nothing happened.
    pub(crate) fn get(&self) -> (u64, u64, u64) {
        let when = self.when_ns.load(Ordering::Acquire);
        (when, self.what.load(Ordering::Relaxed), self.who.load(Ordering::Relaxed))
    }

    fn clear(&self) {
        for part in [&self.when_ns, &self.what, &self.who] {
            part.store(0, Ordering::Release);
        }
    }
}

/// Why a submission was turned away, in the order of `hl_info_cs_counters`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Drop {
    /// The packets are malformed.
    Parsing = 1,
    /// The queue's ring has no room.
    QueueFull = 2,
    /// The card is being reset.
    InReset = 3,
    /// The window is full.
    InFlight = 4,
    /// A chunk is not allowed.
    Validation = 5,
}

/// `HL_DEVICE_STATUS_OPERATIONAL`.
pub(crate) const OPERATIONAL: u32 = 0;
/// `HL_DEVICE_STATUS_IN_RESET`.
pub(crate) const IN_RESET: u32 = 1;

impl DeviceState {
    /// A process has taken the card.
    pub(crate) fn begin(&self, dram_size: u64) {
        self.opens.fetch_add(1, Ordering::Relaxed);
        self.opened_ms.store(boot_ms(), Ordering::Relaxed);
        self.pid.store(std::process::id(), Ordering::Relaxed);
        self.in_release.store(0, Ordering::Release);
        self.dram_size.store(dram_size, Ordering::Relaxed);
        self.dram_used.store(0, Ordering::Relaxed);
        self.status.store(OPERATIONAL, Ordering::Relaxed);
        self.in_flight.store(0, Ordering::Relaxed);
        for counter in &self.context_drops {
            counter.store(0, Ordering::Relaxed);
        }
        for record in [&self.cs_timeout, &self.page_fault, &self.razwi, &self.undefined_opcode] {
            record.clear();
        }
    }

    /// It has given the card back.
    pub(crate) fn end(&self) {
        self.closed_ms.store(boot_ms(), Ordering::Relaxed);
        self.dram_used.store(0, Ordering::Relaxed);
        self.status.store(OPERATIONAL, Ordering::Relaxed);
        self.in_flight.store(0, Ordering::Relaxed);
    }

    /// A submission was turned away.
    pub(crate) fn drop_submission(&self, cause: Drop) {
        self.drops[cause as usize].fetch_add(1, Ordering::Relaxed);
        self.context_drops[cause as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The card is being reset.
    pub(crate) fn reset(&self) {
        self.status.store(IN_RESET, Ordering::Relaxed);
        self.hard_resets.fetch_add(1, Ordering::Relaxed);
    }
}

const PAGE: usize = 4096;
const _: () = assert!(size_of::<DeviceState>() <= PAGE);

/// The card's page, mapped once per process and never unmapped.
pub(crate) fn of(node: &Node, device: u32) -> Result<&'static DeviceState, Errno> {
    static MAPPED: Mutex<[Option<&'static DeviceState>; 256]> = Mutex::new([None; 256]);
    let mut mapped = MAPPED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let slot = mapped.get_mut(device as usize).ok_or(Errno::NODEV)?;
    if let Some(state) = slot {
        return Ok(state);
    }
    let fd = node.open_state(device)?;
    rustix::fs::ftruncate(fd.as_fd(), PAGE as u64)?;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let page = unsafe {
        rustix::mm::mmap(
            core::ptr::null_mut(),
            PAGE,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
    }?;
    // SAFETY: page-aligned, large enough, never unmapped, and made of atomics only.
    let state = unsafe { &*page.cast::<DeviceState>() };
    *slot = Some(state);
    Ok(state)
}

/// Nanoseconds since boot, the same clock in every process.
pub(crate) fn boot_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME)
}

/// Nanoseconds of a clock that always exists.
pub(crate) fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // By the C library: rustix looks for the vDSO by itself, at an address that valgrind has taken
    // away, and dies of it.
    // SAFETY: a place to write to.
    unsafe { libc::clock_gettime(clock, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Milliseconds since boot.
pub(crate) fn boot_ms() -> u64 {
    boot_ns() / 1_000_000
}
