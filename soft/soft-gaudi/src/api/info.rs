//! Information about a card.

use core::ffi::{c_char, c_int, c_void};

use rustix::io::Errno;

use super::nodes::index_from_fd;
use super::{guard, put, set_errno};
use crate::abi::{DramUsageInfo, HwIpInfo, OpenStatsInfo};
use crate::asic::module_id;
use crate::node::node;
use crate::state::{self, Snapshot, Word};

/// The version, which names the software card wherever a version is reported, and what is special about it: the
/// rule of its DMA engines, the model of its times.
fn version() -> String {
    let version = concat!("1.10.0-soft-gaudi-", env!("CARGO_PKG_VERSION"));
    let Ok(node) = node() else { return version.to_owned() };
    let rule = match node.config.dma_rule {
        (1, 1) => String::new(),
        (len, addr) => format!("+dma={len},{addr}"),
    };
    let model = node.config.model.map(|model| format!("+{},slow={}", model.name, model.slow));
    format!("{version}{rule}{}", model.unwrap_or_default())
}

/// A text as C has it in an array.
fn c_array<const N: usize>(text: &str) -> [u8; N] {
    let mut array = [0; N];
    let count = text.len().min(N - 1);
    array[..count].copy_from_slice(&text.as_bytes()[..count]);
    array
}

/// The card's index and published state. The driver answers nothing about a card that was removed.
pub(super) fn card(fd: c_int) -> Result<(u32, Snapshot), Errno> {
    let index = index_from_fd(fd)?;
    let state = state::of(node()?, index)?.read()?;
    if state.get(Word::Removed) == 0 { Ok((index, state)) } else { Err(Errno::NODEV) }
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
    let pci_id = node.config.pci_id(index);
    type Info = HwIpInfo;
    Ok(Info::zeroed()
        .with(Info::SRAM_BASE_ADDRESS, profile.sram_base)
        .with(Info::DRAM_BASE_ADDRESS, profile.dram_base)
        .with(Info::DRAM_SIZE, dram_size)
        .with(Info::SRAM_SIZE, profile.sram_size as u32)
        .with(Info::NUM_OF_EVENTS, profile.events)
        .with(Info::DEVICE_ID, pci_id.device)
        .with(Info::TPC_ENABLED_MASK, (profile.tpc_mask as u8).into())
        .with(Info::DRAM_ENABLED, 1)
        .with(Info::CPUCP_VERSION, c_array(&version()))
        .with(Info::MODULE_ID, module_id(index))
        .with(Info::CARD_NAME, c_array(pci_id.card_name(profile)))
        .with(Info::TPC_ENABLED_MASK_EXT, profile.tpc_mask)
        .with(Info::DRAM_PAGE_SIZE, profile.dram_page)
        .with(Info::FIRST_AVAILABLE_INTERRUPT_ID, profile.first_interrupt)
        .with(Info::EDMA_ENABLED_MASK, profile.edma_mask)
        .with(Info::NUMBER_OF_USER_INTERRUPTS, profile.interrupts)
        .with(Info::DEVICE_MEM_ALLOC_DEFAULT_PAGE_SIZE, profile.dram_page)
        .with(Info::REVISION_ID, pci_id.revision)
        .with(Info::TPC_INTERRUPT_ID, profile.tpc_interrupt)
        .with(Info::RESERVED_DRAM_SIZE, profile.dram_reserved))
}

pub(super) fn open_stats(fd: c_int) -> Result<OpenStatsInfo, Errno> {
    let (index, state) = card(fd)?;
    let (opened, closed) = (state.get(Word::OpenedMs), state.get(Word::ClosedMs));
    let held = node()?.is_owned(index)?;
    let until = if held { state::boot_ms() } else { closed };
    Ok(OpenStatsInfo::zeroed()
        .with(OpenStatsInfo::OPEN_COUNTER, state.get(Word::Opens))
        .with(OpenStatsInfo::LAST_OPEN_PERIOD_MS, until.saturating_sub(opened))
        .with(OpenStatsInfo::IS_COMPUTE_CTX_ACTIVE, held.into())
        .with(OpenStatsInfo::COMPUTE_CTX_IN_RELEASE, (state.get(Word::InRelease) != 0).into()))
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
    let version = version();
    let copy = hlthunk_malloc(version.len() + 1).cast::<u8>();
    if !copy.is_null() {
        // SAFETY: `copy` has room for the text; zeroed, so the NUL is there.
        unsafe { core::ptr::copy_nonoverlapping(version.as_ptr(), copy, version.len()) };
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

c_functions! {
    fn hlthunk_get_hw_ip_info(fd: c_int, out: *mut HwIpInfo) -> done {
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        put(out, hw_ip_info(fd)?)
    }

    fn hlthunk_get_dram_usage(fd: c_int, out: *mut DramUsageInfo) -> done {
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        let size = hw_ip_info(fd)?.get(HwIpInfo::DRAM_SIZE);
        let (index, state) = card(fd)?;
        let held = node()?.is_owned(index)?;
        let used = if held { state.get(Word::DramUsed) } else { 0 };
        let usage = DramUsageInfo::zeroed()
            .with(DramUsageInfo::DRAM_FREE_MEM, size.saturating_sub(used))
            .with(DramUsageInfo::CTX_DRAM_MEM, used);
        put(out, usage)
    }

    fn hlthunk_get_open_stats(fd: c_int, out: *mut OpenStatsInfo) -> done {
        if out.is_null() {
            return Err(Errno::INVAL);
        }
        put(out, open_stats(fd)?)
    }

    /// The status, or a negative errno.
    fn hlthunk_get_device_status_info(fd: c_int) -> status {
        let (index, state) = card(fd)?;
        let held = node()?.is_owned(index)?;
        Ok(if held { state.get(Word::Status) as c_int } else { 0 })
    }
}
