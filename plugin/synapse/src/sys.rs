//! The C types of libSynapse and libscal that a guest needs, and their functions as a table.
//!
//! Layouts are those of releases 1.16 to 1.21: a field has the same place in all releases that have it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;

/// `synStreamHandle`, `synEventHandle`: keys, not addresses.
pub type Handle = *mut c_void;

/// `synDeviceInfoV2`. `synDeviceGetInfo` fills the part up to `device_type`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceInfoV2 {
    /// First address of on-chip memory.
    pub sram_base: u64,
    /// Where the driver's range of device addresses begins; not where memory is allocated.
    pub dram_base: u64,
    /// Bytes of on-chip memory.
    pub sram_size: u32,
    /// Bytes that can be allocated.
    pub dram_size: u64,
    /// A bit for each TPC.
    pub tpc_mask: u64,
    /// Not zero where there is device memory.
    pub dram_enabled: u8,
    /// The card's module id. Not what the functions take as device id.
    pub device_id: u32,
    /// The compute node's descriptor, not owned by this structure.
    pub fd: u32,
    /// `synDeviceType`.
    pub device_type: u32,
    /// N of `/dev/accel/accelN`.
    pub device_index: u8,
    /// `globalHbmBaseAddress` from release 1.18 on; reserved before.
    pub hbm_base: u64,
}

/// `scal_memory_pool_infoV2`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolInfoV2 {
    /// The SCAL instance that it belongs to.
    pub scal: *mut c_void,
    /// Its name.
    pub name: *const c_char,
    /// Its number.
    pub idx: u32,
    /// First address the pool hands out.
    pub device_base: u64,
    /// Not a pointer for pools of device memory.
    pub host_base: *mut c_void,
    /// For the card's own processors.
    pub core_base: u32,
    /// Bytes in all.
    pub total: u64,
    /// Free bytes, perhaps a moment ago.
    pub free: u64,
    /// Start of the driver's mapping that contains the pool.
    pub allocated_base: u64,
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<DeviceInfoV2>() == 72);
    assert!(offset_of!(DeviceInfoV2, dram_size) == 24);
    assert!(offset_of!(DeviceInfoV2, dram_enabled) == 40);
    assert!(offset_of!(DeviceInfoV2, device_id) == 44);
    assert!(offset_of!(DeviceInfoV2, fd) == 48);
    assert!(offset_of!(DeviceInfoV2, device_type) == 52);
    assert!(offset_of!(DeviceInfoV2, device_index) == 56);
    assert!(offset_of!(DeviceInfoV2, hbm_base) == 64);
    assert!(size_of::<PoolInfoV2>() == 72);
    assert!(offset_of!(PoolInfoV2, device_base) == 24);
    assert!(offset_of!(PoolInfoV2, total) == 48);
    assert!(offset_of!(PoolInfoV2, allocated_base) == 64);
};

/// `synDeviceType` of a Gaudi2.
pub const TYPE_GAUDI2: u32 = 4;
/// `synDeviceType` of a Gaudi3.
pub const TYPE_GAUDI3: u32 = 5;

/// `synDmaDir`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmaDir {
    /// Host memory to device memory.
    HostToDram = 0,
    /// Device memory to host memory.
    DramToHost = 1,
    /// Within the card.
    DramToDram = 2,
}

macro_rules! functions {
    (
        synapse { $($(#[$doc:meta])* fn $name:ident($($type:ty),*) -> $out:ty;)* }
        scal { $($(#[$scal_doc:meta])* fn $scal_name:ident($($scal_type:ty),*) -> $scal_out:ty;)* }
    ) => {
        /// The functions; `None` for one that the libraries in the process do not have.
        #[allow(non_snake_case, reason = "the libraries' own names")]
        #[derive(Clone, Copy, Default)]
        pub struct Functions {
            $($(#[$doc])* pub $name: Option<unsafe extern "C" fn($($type),*) -> $out>,)*
            $($(#[$scal_doc])* pub $scal_name: Option<unsafe extern "C" fn($($scal_type),*) -> $scal_out>,)*
        }

        impl Functions {
            /// Finds them: `synapse` and `scal` give the address of a function in their library.
            ///
            /// # Safety
            /// What they return has the signature that the vendor's headers give the function, and stays valid.
            pub unsafe fn find(
                synapse: impl Fn(&CStr) -> *mut c_void,
                scal: impl Fn(&CStr) -> *mut c_void,
            ) -> Self {
                Self {
                    // SAFETY: the caller's promise; a null pointer is `None`.
                    $($name: unsafe {
                        transmute::<*mut c_void, Option<unsafe extern "C" fn($($type),*) -> $out>>(
                            synapse(name(concat!(stringify!($name), "\0"))),
                        )
                    },)*
                    // SAFETY: as above.
                    $($scal_name: unsafe {
                        transmute::<*mut c_void, Option<unsafe extern "C" fn($($scal_type),*) -> $scal_out>>(
                            scal(name(concat!(stringify!($scal_name), "\0"))),
                        )
                    },)*
                }
            }
        }
    };
}

fn name(terminated: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(terminated.as_bytes()).expect("one zero byte, at the end")
}

functions! {
    synapse {
        /// From release 1.16 on.
        fn synDeviceGetInfoV2(u32, *mut DeviceInfoV2) -> u32;
        /// The same without the index and the base.
        fn synDeviceGetInfo(u32, *mut DeviceInfoV2) -> u32;
        /// Of the acquired card.
        fn synDeviceGetPCIBusId(*mut c_char, c_int, u32) -> u32;
        /// Free and total bytes of the pool.
        fn synDeviceGetMemoryInfo(u32, *mut u64, *mut u64) -> u32;
        /// Size, wanted address (ignored), flags (0).
        fn synDeviceMalloc(u32, u64, u64, u32, *mut u64) -> u32;
        /// Exactly what was allocated.
        fn synDeviceFree(u32, u64, u32) -> u32;
        /// Not reference-counted: for memory of our own only.
        fn synHostMap(u32, u64, *const c_void) -> u32;
        /// Removes the mapping for all its users.
        fn synHostUnmap(u32, *const c_void) -> u32;
        /// Flags are 0.
        fn synStreamCreateGeneric(*mut Handle, u32, u32) -> u32;
        /// Waits for what was submitted.
        fn synStreamDestroy(Handle) -> u32;
        /// Waits for what was submitted.
        fn synStreamSynchronize(Handle) -> u32;
        /// Flags are 0.
        fn synEventCreate(*mut Handle, u32, u32) -> u32;
        /// Of an unused event.
        fn synEventDestroy(Handle) -> u32;
        /// By one thread at a time.
        fn synEventRecord(Handle, Handle) -> u32;
        /// Of an event that was recorded.
        fn synEventQuery(Handle) -> u32;
        /// Stream, source, size, destination, direction.
        fn synMemCopyAsync(Handle, u64, u64, u64, DmaDir) -> u32;
        /// The same for several.
        fn synMemCopyAsyncMultiple(Handle, *const u64, *const u64, *const u64, DmaDir, u64) -> u32;
        /// Destination, value, bytes.
        fn synMemsetD8Async(u64, u8, usize, Handle) -> u32;
    }
    scal {
        /// By the exact number of the descriptor.
        fn scal_get_handle_from_fd(c_int, *mut Handle) -> c_int;
        /// Not found is -11.
        fn scal_get_pool_handle_by_name(Handle, *const c_char, *mut Handle) -> c_int;
        /// With the mapping's start.
        fn scal_pool_get_infoV2(Handle, *mut PoolInfoV2) -> c_int;
    }
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Functions")
    }
}
