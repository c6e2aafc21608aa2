//! The INFO ioctl itself, for programs that ask the driver rather than its library.

use core::ffi::c_int;

use rustix::io::Errno;

use super::{
    get, hlthunk_get_clk_throttle_info, hlthunk_get_cs_counters_info, hlthunk_get_dram_usage,
    hlthunk_get_open_stats, hlthunk_get_pci_counters_info, hlthunk_get_reset_count_info,
    hlthunk_get_sync_manager_info, hlthunk_get_time_sync_info, info,
};
use crate::abi::{HwIpInfo, InfoArgs, KernelHwIpInfo};
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
    let mut answer = KernelHwIpInfo::zeroed();
    macro_rules! copy {
        ($($field:ident),*) => {
            $(answer = answer.with(KernelHwIpInfo::$field, info.get(HwIpInfo::$field));)*
        };
    }
    copy!(SRAM_BASE_ADDRESS, DRAM_BASE_ADDRESS, DRAM_SIZE, SRAM_SIZE, NUM_OF_EVENTS, DEVICE_ID);
    copy!(MODULE_ID, DECODER_ENABLED_MASK, FIRST_AVAILABLE_INTERRUPT_ID, SERVER_TYPE, DRAM_ENABLED);
    copy!(SECURITY_ENABLED, CPUCP_VERSION, CARD_NAME, TPC_ENABLED_MASK_EXT, DRAM_PAGE_SIZE);
    copy!(EDMA_ENABLED_MASK, NUMBER_OF_USER_INTERRUPTS, DEVICE_MEM_ALLOC_DEFAULT_PAGE_SIZE);
    copy!(REVISION_ID, TPC_INTERRUPT_ID, RESERVED_DRAM_SIZE);
    let tpcs = info.get(HwIpInfo::TPC_ENABLED_MASK) as u8;
    answer.with(KernelHwIpInfo::TPC_ENABLED_MASK, tpcs).bytes().to_vec()
}

fn answer(fd: c_int, args: &InfoArgs) -> Result<Vec<u8>, Errno> {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect();
    Ok(match args.get(InfoArgs::OP) {
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
        14 => ask(|out| {
            hlthunk_get_sync_manager_info(fd, args.get(InfoArgs::ARGUMENT) as c_int, out)
        })?,
        15 | 17 | 26 => vec![0; 8],
        18 => ask(|out| hlthunk_get_open_stats(fd, out))?,
        _ => return Err(Errno::INVAL),
    })
}

/// The ioctl: as much of the answer as the caller has room for.
pub(super) fn info_ioctl(fd: c_int, args: &InfoArgs) -> Result<(), Errno> {
    info::card(fd)?;
    let (to, size) = (args.get(InfoArgs::RETURN_POINTER), args.get(InfoArgs::RETURN_SIZE));
    if args.get(InfoArgs::PAD) != 0 || to == 0 || size == 0 {
        return Err(Errno::INVAL);
    }
    let bytes = answer(fd, args)?;
    let len = bytes.len().min(size as usize);
    // SAFETY: the source is ours; a bad destination comes back as an error.
    unsafe { guarded::copy(to as *mut u8, bytes.as_ptr(), len) }.map_err(|_| Errno::FAULT)
}

c_functions! {
    fn hlthunk_get_info(fd: c_int, args: *mut InfoArgs) -> done {
        info_ioctl(fd, &get(args)?)?;
        Ok(())
    }
}
