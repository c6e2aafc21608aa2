//! The functions of the software `libhl-thunk.so` that the software SCAL and Synapse use, found at run time.
//!
//! Both crates include this file. As one crate that both link, it would export the C functions of either from both.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

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

macro_rules! thunk {
    ($(fn $name:ident($($type:ty),*) $(-> $out:ty)?;)*) => {
        /// See the module.
        #[derive(Debug)]
        #[allow(dead_code)] // Each of the two crates uses a part.
        pub(crate) struct Thunk {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) $(-> $out)?,)*
        }

        impl Thunk {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are the signatures that hlthunk.h and soft-gaudi give these functions.
                Ok(Self { $($name: *unsafe { library.get(stringify!($name)) }?,)* })
            }
        }
    };
}

thunk! {
    fn hlthunk_open_by_module_id(u32) -> c_int;
    fn hlthunk_open_control(c_int, *const c_char) -> c_int;
    fn hlthunk_open_control_by_module_id(u32) -> c_int;
    fn hlthunk_close(c_int) -> c_int;
    fn hlthunk_get_device_count(c_int) -> c_int;
    fn hlthunk_get_pci_bus_id_from_fd(c_int, *mut c_char, c_int) -> c_int;
    fn hlthunk_get_device_index_from_pci_bus_id(*const c_char) -> c_int;
    fn hlthunk_get_hw_ip_info(c_int, *mut HwIp) -> c_int;
    fn hlthunk_get_dram_usage(c_int, *mut [u64; 2]) -> c_int;
    fn hlthunk_device_memory_alloc(c_int, u64, u64, bool, bool) -> u64;
    fn hlthunk_device_memory_free(c_int, u64) -> c_int;
    fn hlthunk_device_memory_map(c_int, u64, u64) -> u64;
    fn hlthunk_host_memory_map(c_int, *mut c_void, u64, u64) -> u64;
    fn hlthunk_memory_unmap(c_int, u64) -> c_int;
    fn hlthunk_wait_for_cs_with_timestamp(c_int, u64, u64, *mut u32, *mut u64) -> c_int;
    fn soft_gaudi_scal_begin(c_int) -> c_int;
    fn soft_gaudi_scal_end(c_int) -> c_int;
    fn soft_gaudi_scal_submit(c_int, u32, *const Transfer, usize, *mut u64) -> c_int;
    fn soft_gaudi_owner_call(*const c_char);
    fn soft_gaudi_forbid(*const c_char);
    fn soft_gaudi_is_guest() -> c_int;
}

impl Thunk {
    /// The library, loaded by its name; `None` after saying why not.
    pub(crate) fn get() -> Option<&'static Self> {
        static THUNK: OnceLock<Option<Thunk>> = OnceLock::new();
        THUNK
            .get_or_init(|| {
                // SAFETY: runs the initialisers of the library that the loader path names.
                let library =
                    unsafe { Library::open(Some("libhl-thunk.so"), RTLD_NOW | RTLD_LOCAL) };
                let library = library.map(core::mem::ManuallyDrop::new);
                match library.and_then(|library| Self::find(&library)) {
                    Ok(thunk) => Some(thunk),
                    Err(error) => {
                        eprintln!("{}: needs the software Gaudi: {error}", env!("CARGO_PKG_NAME"));
                        None
                    }
                }
            })
            .as_ref()
    }

    /// What the card behind a descriptor is.
    pub(crate) fn hw_ip(&self, fd: c_int) -> Option<HwIp> {
        let mut info = HwIp([0; 128]);
        // SAFETY: three times as large as the structure that the library fills in.
        (unsafe { (self.hlthunk_get_hw_ip_info)(fd, &raw mut info) } == 0).then_some(info)
    }

    /// Counts a call that only the owner of a card may make.
    pub(crate) fn owner_call(&self, name: &CStr) {
        // SAFETY: a C string.
        unsafe { (self.soft_gaudi_owner_call)(name.as_ptr()) }
    }
}

/// `struct hlthunk_hw_ip_info`, with room for later ones.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct HwIp([u64; 128]);

#[allow(dead_code)] // Each of the two crates uses a part.
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
