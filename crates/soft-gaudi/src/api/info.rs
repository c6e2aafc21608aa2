//! Information about a card.

use core::ffi::{c_char, c_int, c_void};

use hl_thunk::sys::{DramUsageInfo, HwIpInfo, OpenStatsInfo};
use rustix::io::Errno;

use super::nodes::index_from_fd;
use super::{guard, put, set_errno, status};
use crate::asic::module_id;
use crate::node::node;
use crate::state::{self, Snapshot, Word};

/// The version, which names the software card wherever a version is reported.
const VERSION: &str = concat!("1.10.0-soft-gaudi-", env!("CARGO_PKG_VERSION"));

fn fill(text: &str, out: &mut [u8]) {
    let count = text.len().min(out.len() - 1);
    out[..count].copy_from_slice(&text.as_bytes()[..count]);
}

/// The card's index and published state.
pub(super) fn card(fd: c_int) -> Result<(u32, Snapshot), Errno> {
    let index = index_from_fd(fd)?;
    Ok((index, state::of(node()?, index)?.read()?))
}

pub(super) fn hw_ip_info(fd: c_int) -> Result<HwIpInfo, Errno> {
    let (index, state) = card(fd)?;
    let node = node()?;
    let profile = node.profile;
    // The owner decides on the size; a card nobody has opened yet has the configured one.
    let dram_size = match state.get(Word::DramSize) {
        size if size != 0 && node.is_owned(index)? => size,
        _ => node.config.dram_size,
    };
    // SAFETY: plain data; zero is what the library starts with.
    let mut info: HwIpInfo = unsafe { core::mem::zeroed() };
    info.sram_base_address = profile.sram_base;
    info.dram_base_address = profile.dram_base;
    info.dram_size = dram_size;
    info.sram_size = profile.sram_size as u32;
    info.num_of_events = profile.events;
    info.device_id = profile.pci_id;
    info.tpc_enabled_mask = profile.tpc_mask as u8 as u16;
    info.dram_enabled = 1;
    fill(VERSION, &mut info.cpucp_version);
    info.module_id = module_id(index);
    fill(profile.card_name, &mut info.card_name);
    info.tpc_enabled_mask_ext = profile.tpc_mask;
    info.dram_page_size = profile.dram_page;
    info.first_available_interrupt_id = profile.first_interrupt;
    info.edma_enabled_mask = profile.edma_mask;
    info.number_of_user_interrupts = profile.interrupts;
    info.device_mem_alloc_default_page_size = profile.dram_page;
    info.revision_id = 1;
    info.tpc_interrupt_id = profile.tpc_interrupt;
    info.reserved_dram_size = profile.dram_reserved;
    Ok(info)
}

/// `hlthunk_get_hw_ip_info`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_hw_ip_info(fd: c_int, out: *mut HwIpInfo) -> c_int {
    status("hlthunk_get_hw_ip_info", || {
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        put(out, hw_ip_info(fd)?)?;
        Ok(0)
    })
}

/// `hlthunk_get_dram_usage`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_dram_usage(fd: c_int, out: *mut DramUsageInfo) -> c_int {
    status("hlthunk_get_dram_usage", || {
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        let size = hw_ip_info(fd)?.dram_size;
        let (index, state) = card(fd)?;
        let held = node()?.is_owned(index)?;
        let used = if held { state.get(Word::DramUsed) } else { 0 };
        put(out, DramUsageInfo { dram_free_mem: size.saturating_sub(used), ctx_dram_mem: used })?;
        Ok(0)
    })
}

pub(super) fn open_stats(fd: c_int) -> Result<OpenStatsInfo, Errno> {
    let (index, state) = card(fd)?;
    let (opened, closed) = (state.get(Word::OpenedMs), state.get(Word::ClosedMs));
    let held = node()?.is_owned(index)?;
    let until = if held { state::boot_ms() } else { closed };
    Ok(OpenStatsInfo {
        open_counter: state.get(Word::Opens),
        last_open_period_ms: until.saturating_sub(opened),
        is_compute_ctx_active: held.into(),
        compute_ctx_in_release: (state.get(Word::InRelease) != 0).into(),
    })
}

/// `hlthunk_get_open_stats`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_open_stats(fd: c_int, out: *mut OpenStatsInfo) -> c_int {
    status("hlthunk_get_open_stats", || {
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        put(out, open_stats(fd)?)?;
        Ok(0)
    })
}

/// `hlthunk_get_device_status_info`: the status, or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_status_info(fd: c_int) -> c_int {
    status("hlthunk_get_device_status_info", || {
        let (index, state) = card(fd)?;
        let held = node()?.is_owned(index)?;
        Ok(if held { state.get(Word::Status) as c_int } else { 0 })
    })
}

/// `hlthunk_is_device_idle`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_is_device_idle(fd: c_int) -> bool {
    guard("hlthunk_is_device_idle", || {
        let (_, state) = card(fd)?;
        Ok(state.get(Word::Busy) == 0)
    })
    .unwrap_or_else(|errno| {
        set_errno(errno);
        false
    })
}

/// `hlthunk_get_version`: to be released with `hlthunk_free`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_version() -> *mut c_char {
    let copy = hlthunk_malloc(VERSION.len() + 1).cast::<u8>();
    if !copy.is_null() {
        // SAFETY: `copy` has room for the text; zeroed, so the NUL is there.
        unsafe { core::ptr::copy_nonoverlapping(VERSION.as_ptr(), copy, VERSION.len()) };
    }
    copy.cast()
}

/// `hlthunk_malloc`: zeroed memory.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_malloc(size: usize) -> *mut c_void {
    // SAFETY: calloc has no preconditions.
    unsafe { libc::calloc(1, size) }
}

/// `hlthunk_free`.
///
/// # Safety
/// `memory` must come from [`hlthunk_malloc`] or another function that says so, or be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_free(memory: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { libc::free(memory) };
}
