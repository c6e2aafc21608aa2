//! The functions of the software `libhl-thunk.so` that the software SCAL and Synapse use.
//!
//! They are linked, as in the vendor's libraries: programs that redirect a library's calls (libucm does) see these as well.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::offset_of;

/// A transfer of `soft_gaudi_scal_submit`; with `fill` 1, `src` is the value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)] // SCAL itself moves nothing.
pub(crate) struct Transfer {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    pub(crate) len: u64,
    pub(crate) fill: u64,
}

/// Functions of a library that this one is linked with.
macro_rules! linked {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        #[cfg(not(test))]
        #[allow(dead_code)] // Each of the two libraries uses a part.
        unsafe extern "C" {
            $(pub(crate) fn $name($($argument: $type),*) $(-> $out)?;)*
        }

        /// A test program is linked without the library, and calls none of this.
        #[cfg(test)]
        #[allow(dead_code, unused_variables)]
        mod absent {
            use super::*;
            $(pub(crate) unsafe extern "C" fn $name($($argument: $type),*) $(-> $out)? { unreachable!() })*
        }
        #[cfg(test)]
        #[allow(unused_imports)]
        pub(crate) use absent::*;
    };
}

linked! {
    fn hlthunk_open_by_module_id(module: u32) -> c_int;
    fn hlthunk_open_control(index: c_int, bus: *const c_char) -> c_int;
    fn hlthunk_close(fd: c_int) -> c_int;
    fn hlthunk_get_device_count(name: c_int) -> c_int;
    fn hlthunk_get_pci_bus_id_from_fd(fd: c_int, bus: *mut c_char, len: c_int) -> c_int;
    fn hlthunk_get_device_index_from_pci_bus_id(bus: *const c_char) -> c_int;
    fn hlthunk_get_hw_ip_info(fd: c_int, info: *mut HwIp) -> c_int;
    fn hlthunk_get_dram_usage(fd: c_int, usage: *mut [u64; 2]) -> c_int;
    fn hlthunk_device_memory_alloc(fd: c_int, size: u64, page: u64, contiguous: bool, shared: bool) -> u64;
    fn hlthunk_device_memory_free(fd: c_int, handle: u64) -> c_int;
    fn hlthunk_device_memory_map(fd: c_int, handle: u64, hint: u64) -> u64;
    fn hlthunk_host_memory_map(fd: c_int, ptr: *mut c_void, hint: u64, size: u64) -> u64;
    fn hlthunk_memory_unmap(fd: c_int, addr: u64) -> c_int;
    fn hlthunk_wait_for_cs_with_timestamp(fd: c_int, seq: u64, timeout: u64, status: *mut u32, at: *mut u64) -> c_int;
    fn soft_gaudi_scal_begin(fd: c_int) -> c_int;
    fn soft_gaudi_scal_end(fd: c_int) -> c_int;
    fn soft_gaudi_scal_submit(fd: c_int, queue: u32, transfers: *const Transfer, count: usize, seq: *mut u64) -> c_int;
    fn soft_gaudi_owner_call(name: *const c_char);
    fn soft_gaudi_forbid(what: *const c_char);
    fn soft_gaudi_is_guest() -> c_int;
}

/// What the card behind a descriptor is.
pub(crate) fn hw_ip(fd: c_int) -> Option<HwIp> {
    // SAFETY: plain numbers.
    let mut info: HwIp = unsafe { core::mem::zeroed() };
    // SAFETY: three times as large as the structure that the library fills in.
    (unsafe { hlthunk_get_hw_ip_info(fd, &raw mut info) } == 0).then_some(info)
}

/// Counts a call that only the owner of a card may make.
pub(crate) fn owner_call(name: &CStr) {
    // SAFETY: a C string.
    unsafe { soft_gaudi_owner_call(name.as_ptr()) }
}

/// Something was done that breaks a real card or the framework on it.
#[allow(dead_code)] // Synapse's.
pub(crate) fn forbid(what: &CStr) {
    // SAFETY: a C string.
    unsafe { soft_gaudi_forbid(what.as_ptr()) }
}

/// `struct hlthunk_hw_ip_info`, with room for later ones.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HwIp {
    pub(crate) sram_base: u64,
    pub(crate) dram_base: u64,
    pub(crate) dram_size: u64,
    pub(crate) sram_size: u32,
    _28: [u8; 4],
    device_id: u32,
    _36: [u8; 22],
    pub(crate) dram_enabled: u8,
    _59: [u8; 129],
    pub(crate) module_id: u32,
    pub(crate) card_name: [u8; 16],
    _208: [u8; 8],
    pub(crate) tpc_mask: u64,
    pub(crate) dram_page: u64,
    _232: [u8; 792],
}

const _: () = assert!(offset_of!(HwIp, device_id) == 32 && offset_of!(HwIp, dram_enabled) == 58);
const _: () = assert!(offset_of!(HwIp, module_id) == 188 && offset_of!(HwIp, dram_page) == 224);

impl HwIp {
    pub(crate) fn generation(&self) -> Option<Generation> {
        match self.device_id {
            0x1020 | 0x1021 => Some(Generation::Gaudi2),
            0x1060 | 0x1063 => Some(Generation::Gaudi3),
            _ => None,
        }
    }
}

/// The cards that SCAL drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Generation {
    Gaudi2,
    Gaudi3,
}
