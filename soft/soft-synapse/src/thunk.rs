//! The functions of the software `libhl-thunk.so` that the software SCAL and Synapse use.
//!
//! They are linked, as the vendor's are: programs that redirect calls of a library (libucm does) see these as well.

use core::ffi::{CStr, c_char, c_int, c_void};

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
    let mut info = HwIp([0; 128]);
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
pub(crate) struct HwIp([u64; 128]);

#[allow(dead_code)] // Each of the two libraries uses a part.
impl HwIp {
    fn byte(&self, at: usize) -> u8 {
        self.0[at / 8].to_le_bytes()[at % 8]
    }

    fn u64(&self, at: usize) -> u64 {
        self.0[at / 8]
    }

    fn u32(&self, at: usize) -> u32 {
        (self.u64(at) >> (at % 8 * 8)) as u32
    }

    pub(crate) fn sram_base(&self) -> u64 {
        self.u64(0)
    }

    pub(crate) fn dram_base(&self) -> u64 {
        self.u64(8)
    }

    pub(crate) fn dram_size(&self) -> u64 {
        self.u64(16)
    }

    pub(crate) fn sram_size(&self) -> u32 {
        self.u32(24)
    }

    pub(crate) fn dram_enabled(&self) -> u8 {
        self.byte(58)
    }

    pub(crate) fn module_id(&self) -> u32 {
        self.u32(188)
    }

    pub(crate) fn card_name(&self) -> [u8; 16] {
        core::array::from_fn(|at| self.byte(192 + at))
    }

    pub(crate) fn tpc_mask(&self) -> u64 {
        self.u64(216)
    }

    pub(crate) fn dram_page(&self) -> u64 {
        self.u64(224)
    }

    pub(crate) fn generation(&self) -> Option<Generation> {
        match self.u32(32) {
            0x1020 => Some(Generation::Gaudi2),
            0x1060 => Some(Generation::Gaudi3),
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
