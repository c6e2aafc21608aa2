//! The C functions as a framework calls them, written from the facts and not from the crates under test.

use std::ffi::{c_char, c_int, c_void};

pub(crate) type Handle = *mut c_void;
pub(crate) const NULL: Handle = std::ptr::null_mut();

macro_rules! functions {
    ($($library:ident { $(fn $name:ident($($type:ty),*) $(-> $out:ty)?;)* })*) => {
        /// All functions, found by name.
        #[allow(non_snake_case)]
        pub(crate) struct Api { $($(pub(crate) $name: unsafe extern "C" fn($($type),*) $(-> $out)?,)*)* }

        impl Api {
            /// Loads libSynapse by name, which brings the others.
            pub(crate) fn load() -> Self {
                // SAFETY: the libraries of this repository, with the signatures below.
                unsafe {
                    $(let $library = std::mem::ManuallyDrop::new(
                        libloading::Library::new(NAMES.$library).unwrap_or_else(|e| panic!("{e}")),
                    );)*
                    Self { $($($name: *$library.get(stringify!($name).as_bytes()).unwrap(),)*)* }
                }
            }
        }
    };
}

struct Names {
    synapse: &'static str,
    scal: &'static str,
    thunk: &'static str,
}

const NAMES: Names =
    Names { synapse: "libSynapse.so", scal: "libscal.so", thunk: "libhl-thunk.so" };

functions! {
    synapse {
        fn synInitialize() -> c_int;
        fn synDestroy() -> c_int;
        fn synDriverGetVersion(*mut c_char, c_int) -> c_int;
        fn synDeviceGetCount(*mut u32) -> c_int;
        fn synDeviceGetModuleIDs(*mut u32, *mut u32) -> c_int;
        fn synDeviceAcquireByDeviceType(*mut u32, c_int) -> c_int;
        fn synDeviceAcquireByModuleId(*mut u32, u32) -> c_int;
        fn synDeviceAcquire(*mut u32, *const c_char) -> c_int;
        fn synDeviceRelease(u32) -> c_int;
        fn synDeviceGetMemoryInfo(u32, *mut u64, *mut u64) -> c_int;
        fn synDeviceGetInfo(u32, *mut u8) -> c_int;
        fn synDeviceGetInfoV2(u32, *mut u8) -> c_int;
        fn synDeviceMalloc(u32, u64, u64, u32, *mut u64) -> c_int;
        fn synDeviceFree(u32, u64, u32) -> c_int;
        fn synHostMalloc(u32, u64, u32, *mut Handle) -> c_int;
        fn synHostFree(u32, Handle, u32) -> c_int;
        fn synHostMap(u32, u64, Handle) -> c_int;
        fn synHostUnmap(u32, Handle) -> c_int;
        fn synStreamCreateGeneric(*mut Handle, u32, u32) -> c_int;
        fn synStreamDestroy(Handle) -> c_int;
        fn synStreamWaitEvent(Handle, Handle, u32) -> c_int;
        fn synStreamSynchronize(Handle) -> c_int;
        fn synStreamQuery(Handle) -> c_int;
        fn synEventCreate(*mut Handle, u32, u32) -> c_int;
        fn synEventDestroy(Handle) -> c_int;
        fn synEventRecord(Handle, Handle) -> c_int;
        fn synEventQuery(Handle) -> c_int;
        fn synEventSynchronize(Handle) -> c_int;
        fn synEventElapsedTime(*mut u64, Handle, Handle) -> c_int;
        fn synMemCopyAsync(Handle, u64, u64, u64, c_int) -> c_int;
        fn synMemCopyAsyncMultiple(Handle, *const u64, *const u64, *const u64, c_int, u64) -> c_int;
        fn synMemsetD16Async(u64, u16, usize, Handle) -> c_int;
        fn synMemsetD32Async(u64, u32, usize, Handle) -> c_int;
    }
    scal {
        fn scal_init(c_int, *const c_char, *mut Handle, Handle) -> c_int;
        fn scal_get_fd(Handle) -> c_int;
        fn scal_get_handle_from_fd(c_int, *mut Handle) -> c_int;
        fn scal_get_pool_handle_by_name(Handle, *const c_char, *mut Handle) -> c_int;
        fn scal_get_pool_handle_by_id(Handle, u32, *mut Handle) -> c_int;
        fn scal_pool_get_infoV2(Handle, *mut [u64; 9]) -> c_int;
        fn scal_allocate_aligned_buffer(Handle, u64, u64, *mut Handle) -> c_int;
        fn scal_buffer_get_info(Handle, *mut [u64; 4]) -> c_int;
        fn scal_free_buffer(Handle) -> c_int;
        fn scal_get_version_sha1() -> *const c_char;
    }
    thunk {
        fn hlthunk_open_by_module_id(u32) -> c_int;
        fn hlthunk_close(c_int) -> c_int;
        fn hlthunk_device_mapped_memory_export_dmabuf_fd(c_int, u64, u64, u64, u32) -> c_int;
        fn hlthunk_command_submission(c_int, *const [u64; 8], *mut [u64; 8]) -> c_int;
        fn soft_gaudi_calls(*const c_char) -> u64;
    }
}
