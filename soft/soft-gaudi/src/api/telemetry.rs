//! Counters, clocks, power: what monitoring tools ask. A card in software is cool and idle.

use core::ffi::{c_char, c_int, c_void};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::io::Errno;

use super::info::{card, open_stats};
use super::put;
use crate::abi::{
    ClkThrottleInfo, CsCounters, EnginesIdleInfo, HwAsicStatus, PciCountersInfo, SyncManagerInfo,
};
use crate::asic::Generation;
use crate::node::node;
use crate::state::{Snapshot, Word, boot_ns};

/// Fills an out structure for one of our descriptors. Checks for NULL (`EINVAL`) first.
fn answer<T>(
    fd: c_int,
    out: *mut T,
    value: impl FnOnce(Snapshot) -> Result<T, Errno>,
) -> Result<(), Errno> {
    if out.is_null() {
        return Err(Errno::INVAL);
    }
    put(out, value(card(fd)?.1)?)
}

c_functions! {
    fn hlthunk_get_hw_asic_status(fd: c_int, out: *mut HwAsicStatus) -> done {
        answer(fd, out, |_| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
            Ok(HwAsicStatus::zeroed()
                .with(HwAsicStatus::OPEN_STATS, open_stats(fd)?)
                .with(HwAsicStatus::STATUS, super::hlthunk_get_device_status_info(fd))
                .with(HwAsicStatus::TIMESTAMP_SEC, now)
                .with(HwAsicStatus::VALID, 1))
        })
    }

    fn hlthunk_get_busy_engines_mask(fd: c_int, out: *mut EnginesIdleInfo) -> done {
        answer(fd, out, |state| {
            let busy = state.get(Word::Busy) != 0;
            Ok(EnginesIdleInfo::zeroed()
                .with(EnginesIdleInfo::IS_IDLE, (!busy).into())
                .with(EnginesIdleInfo::MASK, [busy.into(), 0, 0, 0]))
        })
    }

    fn hlthunk_get_pll_frequency(fd: c_int, _index: u32, out: *mut [u16; 4]) -> done { answer(fd, out, |_| Ok([0; 4])) }

    fn hlthunk_get_device_utilization(fd: c_int, period_ms: u32, rate: *mut u32) -> done {
        answer(fd, rate, |state| {
            if period_ms == 0 { Err(Errno::INVAL) } else { Ok(100 * u32::from(state.get(Word::Busy) != 0)) }
        })
    }

    fn hlthunk_get_hw_events_arr(fd: c_int, _aggregate: bool, size: u32, out: *mut u32) -> done {
        if out.is_null() || size == 0 {
            return Err(Errno::INVAL);
        }
        card(fd)?;
        let len = (node()?.profile.events as usize * 4).min(size as usize);
        // SAFETY: the caller promises `size` bytes.
        unsafe { core::ptr::write_bytes(out.cast::<u8>(), 0, len) };
        Ok(())
    }

    fn hlthunk_get_clk_rate(fd: c_int, current: *mut u32, most: *mut u32) -> done {
        if current.is_null() || most.is_null() {
            return Err(Errno::INVAL);
        }
        card(fd)?;
        put(current, 1000)?;
        put(most, 1000)
    }

    /// Hard and soft resets.
    fn hlthunk_get_reset_count_info(fd: c_int, out: *mut [u32; 2]) -> done {
        answer(fd, out, |state| {
            Ok([state.get(Word::HardResets) as u32, 0])
        })
    }

    /// Device and host time, in ns.
    fn hlthunk_get_time_sync_info(fd: c_int, out: *mut [u64; 2]) -> done {
        answer(fd, out, |_| Ok([boot_ns(), boot_ns()]))
    }

    fn hlthunk_get_sync_manager_info(fd: c_int, dcore: c_int, out: *mut SyncManagerInfo) -> done {
        answer(fd, out, |_| {
            if !(0..8).contains(&dcore) {
                return Err(Errno::INVAL);
            }
            let profile = node()?.profile;
            let no_queue = if profile.generation == Generation::Gaudi1 { 0xffff } else { 0 };
            let [sob, monitor, cq] = if dcore == 0 { profile.first_free } else { [0, 0, no_queue] };
            Ok(SyncManagerInfo::zeroed()
                .with(SyncManagerInfo::FIRST_AVAILABLE_SYNC_OBJECT, sob)
                .with(SyncManagerInfo::FIRST_AVAILABLE_MONITOR, monitor)
                .with(SyncManagerInfo::FIRST_AVAILABLE_CQ, cq))
        })
    }

    fn hlthunk_get_cs_counters_info(fd: c_int, out: *mut CsCounters) -> done {
        answer(fd, out, |state| {
            let pairs = core::array::from_fn(|cause| state.rejected(cause));
            Ok(CsCounters::zeroed().with(CsCounters::PAIRS, pairs))
        })
    }

    fn hlthunk_get_pci_counters_info(fd: c_int, out: *mut PciCountersInfo) -> done {
        answer(fd, out, |_| Ok(PciCountersInfo::zeroed()))
    }

    fn hlthunk_get_clk_throttle_info(fd: c_int, out: *mut ClkThrottleInfo) -> done {
        answer(fd, out, |_| Ok(ClkThrottleInfo::zeroed()))
    }

    fn hlthunk_get_total_energy_consumption_info(fd: c_int, out: *mut u64) -> done { answer(fd, out, |_| Ok(0)) }
    fn hlthunk_get_power_info(fd: c_int, out: *mut u64) -> done { answer(fd, out, |_| Ok(0)) }

    /// No rows were replaced.
    fn hlthunk_get_dram_replaced_rows_info(fd: c_int, out: *mut [u64; 33]) -> done { answer(fd, out, |_| Ok([0; 33])) }

    fn hlthunk_get_dram_pending_rows_info(fd: c_int, out: *mut u32) -> done { answer(fd, out, |_| Ok(0)) }

    /// There is no firmware to attest.
    fn hlthunk_get_sec_attest_info(fd: c_int, _nonce: u32, out: *mut c_void) -> done {
        answer(fd, out.cast::<u8>(), |_| Err(Errno::PERM))
    }

    /// A text for people.
    fn hlthunk_get_engine_status(fd: c_int, buf: *mut c_char, size: u32, actual: *mut c_int) -> done {
        if buf.is_null() || actual.is_null() || !(1 << 10..=1 << 20).contains(&size) {
            return Err(Errno::INVAL);
        }
        let busy = card(fd)?.1.get(Word::Busy) != 0;
        let text = format!("soft-gaudi: no engines, {}\n", if busy { "busy" } else { "idle" });
        // SAFETY: the caller promises `size` bytes, at least 1 KiB.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), text.len());
            *buf.add(text.len()) = 0;
        }
        put(actual, text.len() as c_int)
    }
}
