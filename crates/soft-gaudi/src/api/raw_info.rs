//! The INFO ioctl itself, for programs that ask the driver rather than its library.

use core::ffi::c_int;

use hl_thunk::sys::{HwIpInfo, InfoArgs};
use rustix::io::Errno;

use super::{
    get, hlthunk_get_clk_throttle_info, hlthunk_get_cs_counters_info, hlthunk_get_dram_usage,
    hlthunk_get_open_stats, hlthunk_get_pci_counters_info, hlthunk_get_reset_count_info,
    hlthunk_get_sync_manager_info, hlthunk_get_time_sync_info, info, status,
};
use crate::guarded;
use crate::node::node;

/// Bytes of an answer that C code fills in.
fn ask<T>(question: impl FnOnce(*mut T) -> c_int) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0u8; size_of::<T>().next_multiple_of(8)];
    // Aligned as any allocation of whole words is.
    match question(bytes.as_mut_ptr().cast()) {
        0 => Ok(bytes[..size_of::<T>()].to_vec()),
        error => Err(Errno::from_raw_os_error(-error)),
    }
}

/// The kernel's structure, which differs from the library's in layout.
fn kernel_hw_ip(info: &HwIpInfo) -> Vec<u8> {
    let mut bytes = vec![0u8; 304];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &info.sram_base_address.to_le_bytes());
    put(8, &info.dram_base_address.to_le_bytes());
    put(16, &info.dram_size.to_le_bytes());
    put(24, &info.sram_size.to_le_bytes());
    put(28, &info.num_of_events.to_le_bytes());
    put(32, &info.device_id.to_le_bytes());
    put(36, &info.module_id.to_le_bytes());
    put(40, &info.decoder_enabled_mask.to_le_bytes());
    put(44, &info.first_available_interrupt_id.to_le_bytes());
    put(46, &info.server_type.to_le_bytes());
    put(68, &[info.tpc_enabled_mask as u8, info.dram_enabled, info.security_enabled]);
    put(72, &info.cpucp_version);
    put(200, &info.card_name);
    put(216, &info.tpc_enabled_mask_ext.to_le_bytes());
    put(224, &info.dram_page_size.to_le_bytes());
    put(232, &info.edma_enabled_mask.to_le_bytes());
    put(236, &info.number_of_user_interrupts.to_le_bytes());
    put(248, &info.device_mem_alloc_default_page_size.to_le_bytes());
    put(277, &[info.revision_id]);
    put(278, &info.tpc_interrupt_id.to_le_bytes());
    put(296, &info.reserved_dram_size.to_le_bytes());
    bytes
}

fn answer(fd: c_int, args: &InfoArgs) -> Result<Vec<u8>, Errno> {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect();
    Ok(match args.op {
        0 => kernel_hw_ip(&info::hw_ip_info(fd)?),
        1 | 7 => vec![0; node()?.profile.events as usize * 4],
        2 => ask(|out| hlthunk_get_dram_usage(fd, out))?,
        3 => words(&[u32::from(super::hlthunk_is_device_idle(fd)), 0]),
        4 => words(&[super::hlthunk_get_device_status_info(fd) as u32, 0]),
        8 => words(&[1000, 1000]),
        9 => ask(|out| hlthunk_get_reset_count_info(fd, out))?,
        10 => ask(|out| hlthunk_get_time_sync_info(fd, out))?,
        11 => ask(|out| hlthunk_get_cs_counters_info(fd, out))?,
        12 => ask(|out| hlthunk_get_pci_counters_info(fd, out))?,
        13 => ask(|out| hlthunk_get_clk_throttle_info(fd, out))?,
        14 => ask(|out| hlthunk_get_sync_manager_info(fd, args.argument as c_int, out))?,
        15 | 17 | 26 => vec![0; 8],
        18 => ask(|out| hlthunk_get_open_stats(fd, out))?,
        _ => return Err(Errno::INVAL),
    })
}

/// The ioctl: as much of the answer as the caller has room for.
pub(super) fn info_ioctl(fd: c_int, args: &InfoArgs) -> Result<(), Errno> {
    info::card(fd)?;
    if args.pad != 0 || args.return_pointer == 0 || args.return_size == 0 {
        return Err(Errno::INVAL);
    }
    let bytes = answer(fd, args)?;
    let len = bytes.len().min(args.return_size as usize);
    // SAFETY: the source is ours; a bad destination comes back as an error.
    unsafe { guarded::copy(args.return_pointer as *mut u8, bytes.as_ptr(), len) }
        .map_err(|_| Errno::FAULT)
}

/// `hlthunk_get_info`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_info(fd: c_int, args: *mut InfoArgs) -> c_int {
    status("hlthunk_get_info", || {
        info_ioctl(fd, &get(args)?)?;
        Ok(0)
    })
}
