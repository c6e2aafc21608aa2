//! UCX's C API as data: the functions this program calls, and the structures it passes to them.
//!
//! UCT's structures come from `uct::abi`. UCP's public ones (`ucp/api/ucp.h`, `ucp_def.h`), and the few of UCT that a
//! plugin never sees, are declared here. They follow UCX 1.22, and hold for 1.21 and 1.23. Every parameter structure
//! carries a `field_mask`: UCX never reads fields whose bit is not set, so later versions may append fields. Sizes and
//! offsets are asserted at compile time.
#![allow(missing_docs)]

use std::ffi::{c_char, c_int, c_uint, c_void};
pub use uct::abi::{
    EpParams as UctEpParams, IfaceAttr, IfaceOps, IfaceParams, Iov, IsConnectedParams, MdAttr,
    MdResource, MemAttachParams, MemAttr, MemDeregParams, MemRegParams, MemoryInfo, MemoryType,
    Operation, PerfAttr, RawCompletion, RkeyUnpackParams, Status, SysDevice,
};

/// `ucs_status_ptr_t`: NULL is done, the top 100 addresses are errors, the rest are requests.
pub type StatusPtr = *mut c_void;
/// Any opaque handle of UCX.
pub type Raw = *mut c_void;

/// `UCS_ERR_MESSAGE_TRUNCATED`
pub const ERR_TRUNCATED: Status = Status(-9);
/// The smallest status.
pub const ERR_LAST: Status = Status(-100);

/// A structure of plain data for which all zeroes is a valid value.
///
/// # Safety
/// Integers, floats, raw pointers and optional functions only.
pub unsafe trait Plain: Sized {
    fn zeroed() -> Self {
        // SAFETY: what an implementation promises.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: plain data, each.
unsafe impl Plain for UctEpParams {}
// SAFETY: as above.
unsafe impl Plain for IfaceParams {}
// SAFETY: as above.
unsafe impl Plain for MemAttr {}
// SAFETY: as above.
unsafe impl Plain for MemoryInfo {}

/// A structure that UCX fills, with space for fields that later versions append.
#[repr(C)]
pub struct Growing<T> {
    pub known: T,
    room: [u64; 64],
}
// SAFETY: plain data around plain data.
unsafe impl Plain for Growing<MdAttr> {}
// SAFETY: as above.
unsafe impl Plain for Growing<IfaceAttr> {}
// SAFETY: as above.
unsafe impl Plain for Growing<PerfAttr> {}

/// Declares C structures: name, size, fields with their offsets.
macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($field:ident: $t:ty = $at:literal,)* })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name { $(pub $field: $t,)* }
        const _: () = {
            assert!(std::mem::size_of::<$name>() == $size);
            $(assert!(std::mem::offset_of!($name, $field) == $at);)*
        };
        // SAFETY: integers, pointers and optional functions.
        unsafe impl Plain for $name {}
    )*};
}

structures! {
    /// `ucp_params_t`
    Params: 88 {
        field_mask: u64 = 0, features: u64 = 8, unused: [u64; 4] = 16, mt_workers_shared: c_int = 48,
        rest: [u64; 4] = 56,
    }
    /// `ucp_worker_params_t`
    WorkerParams: 200 { field_mask: u64 = 0, thread_mode: c_uint = 8, rest: [u64; 23] = 16, }
    /// `ucp_ep_params_t`
    EpParams: 104 {
        field_mask: u64 = 0, address: *const c_void = 8, err_mode: c_uint = 16,
        err_cb: Option<unsafe extern "C" fn(arg: *mut c_void, ep: Raw, status: Status)> = 24,
        err_arg: *mut c_void = 32, rest: [u64; 8] = 40,
    }
    /// `ucp_mem_map_params_t`
    MemMapParams: 48 {
        field_mask: u64 = 0, address: *mut c_void = 8, length: usize = 16, flags: c_uint = 24,
        prot: c_uint = 28, memory_type: MemoryType = 32, exported_memh_buffer: *const c_void = 40,
    }
    /// `ucp_mem_attr_t`
    UcpMemAttr: 32 {
        field_mask: u64 = 0, address: *mut c_void = 8, length: usize = 16, mem_type: MemoryType = 24,
    }
    /// `ucp_tag_recv_info_t`
    TagRecvInfo: 16 { sender_tag: u64 = 0, length: usize = 8, }
    /// `ucp_request_param_t`
    RequestParam: 96 {
        op_attr_mask: u32 = 0, flags: u32 = 4, request: *mut c_void = 8, cb: *mut c_void = 16,
        datatype: u64 = 24, user_data: *mut c_void = 32, reply_buffer: *mut c_void = 40,
        memory_type: MemoryType = 48, recv_info: *mut c_void = 56, rest: [u64; 4] = 64,
    }
    /// `ucp_am_recv_param_t`
    AmRecvParam: 16 { recv_attr: u64 = 0, reply_ep: Raw = 8, }
    /// `ucp_am_handler_param_t`
    AmHandlerParam: 32 {
        field_mask: u64 = 0, id: c_uint = 8, flags: u32 = 12, cb: Option<AmRecvCallback> = 16,
        arg: *mut c_void = 24,
    }
    /// `uct_component_attr_t`
    ComponentAttr: 48 {
        field_mask: u64 = 0, name: [c_char; 16] = 8, md_resource_count: c_uint = 24,
        md_resources: *mut MdResource = 32, flags: u64 = 40,
    }
    /// `uct_mem_alloc_params_t`
    MemAllocParams: 64 {
        field_mask: u64 = 0, flags: c_uint = 8, address: *mut c_void = 16, mem_type: MemoryType = 24,
        mds: *const Raw = 32, md_count: c_uint = 40, name: *const c_char = 48, sys_device: SysDevice = 56,
    }
    /// `uct_allocated_memory_t`
    AllocatedMemory: 48 {
        address: u64 = 0, length: usize = 8, method: u32 = 16, mem_type: MemoryType = 20, md: Raw = 24,
        memh: Raw = 32, sys_device: SysDevice = 40,
    }
    /// `uct_md_mkey_pack_params_t`
    MkeyPackParams: 16 { field_mask: u64 = 0, flags: c_uint = 8, }
    /// `uct_rkey_bundle_t`
    RkeyBundle: 24 { rkey: usize = 0, handle: *mut c_void = 8, kind: *mut c_void = 16, }
}

/// `ucp_am_recv_callback_t`
pub type AmRecvCallback = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmRecvParam,
) -> Status;

/// Bits of UCP's masks and flags, by the structure or call that they belong to.
pub mod ucp {
    /// The oldest API version that is supported.
    pub const API: (u32, u32) = (1, 21);
    pub const PARAM_FEATURES: u64 = 1 << 0;
    pub const PARAM_MT_WORKERS_SHARED: u64 = 1 << 5;
    pub const WORKER_THREAD_MODE: u64 = 1 << 0;
    pub const THREAD_MODE_MULTI: u32 = 2;
    pub const EP_ADDRESS_AND_ERR_MODE: u64 = 0b11;
    pub const EP_ERR_HANDLER: u64 = 1 << 2;
    pub const ERR_MODE_PEER: u32 = 1;
    pub const CLOSE_FORCE: u32 = 1;
    pub const MAP_ADDRESS_AND_LENGTH: u64 = 0b11;
    pub const MAP_FLAGS_AND_TYPE: u64 = 1 << 2 | 1 << 4;
    pub const MAP_ALLOCATE: u32 = 2;
    pub const MEM_ATTR_ALL: u64 = 0b111;
    pub const OP_DATATYPE: u32 = 1 << 3;
    pub const OP_FLAGS: u32 = 1 << 4;
    pub const OP_REPLY_BUFFER: u32 = 1 << 5;
    pub const OP_MEMORY_TYPE: u32 = 1 << 6;
    pub const OP_RECV_INFO: u32 = 1 << 7;
    /// An operation without a reply reports its error only if the caller wants the request.
    pub const OP_NO_IMMEDIATE: u32 = 1 << 16;
    pub const STREAM_WAITALL: u32 = 1;
    pub const AM_SEND_EAGER: u32 = 1 << 1;
    pub const AM_SEND_RNDV: u32 = 1 << 2;
    pub const AM_SEND_COPY_HEADER: u32 = 1 << 3;
    pub const AM_RECV_DATA: u64 = 1 << 16;
    pub const AM_RECV_RNDV: u64 = 1 << 17;
    pub const AM_HANDLER_ALL: u64 = 0b1111;
    pub const AM_WHOLE_AND_PERSISTENT: u32 = 1 | 2;
}

/// `uct_md_mem_query` and its second version.
pub type MemQuery = unsafe extern "C" fn(Raw, u64, usize, *mut MemAttr) -> Status;

/// Declares the table of C functions and fills it from a library.
macro_rules! functions {
    ($($name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// The functions we call, each found by name in one libucp or the libraries it needs.
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Functions {
            /// Looks up every function; the error names the first missing one.
            ///
            /// # Safety
            /// `library` must be a libucp whose functions have the signatures of the public headers, and
            /// must never be unloaded while the table is in use.
            pub unsafe fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller vouches for the signatures.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                    })
                }
            }
        }
    };
}

functions! {
    ucp_get_version_string() -> *const c_char;
    ucs_status_string(Status) -> *const c_char;
    ucp_init_version(c_uint, c_uint, *const Params, *const c_void, *mut Raw) -> Status;
    ucp_cleanup(Raw);
    ucp_worker_create(Raw, *const WorkerParams, *mut Raw) -> Status;
    ucp_worker_destroy(Raw);
    ucp_worker_get_address(Raw, *mut *mut c_void, *mut usize) -> Status;
    ucp_worker_release_address(Raw, *mut c_void);
    ucp_worker_progress(Raw) -> c_uint;
    ucp_worker_get_efd(Raw, *mut c_int) -> Status;
    ucp_worker_arm(Raw) -> Status;
    ucp_worker_set_am_recv_handler(Raw, *const AmHandlerParam) -> Status;
    ucp_ep_create(Raw, *const EpParams, *mut Raw) -> Status;
    ucp_ep_close_nbx(Raw, *const RequestParam) -> StatusPtr;
    ucp_ep_flush_nbx(Raw, *const RequestParam) -> StatusPtr;
    ucp_mem_map(Raw, *const MemMapParams, *mut Raw) -> Status;
    ucp_mem_unmap(Raw, Raw) -> Status;
    ucp_mem_query(Raw, *mut UcpMemAttr) -> Status;
    ucp_rkey_pack(Raw, Raw, *mut *mut c_void, *mut usize) -> Status;
    ucp_rkey_buffer_release(*mut c_void);
    ucp_ep_rkey_unpack(Raw, *const c_void, *mut Raw) -> Status;
    ucp_rkey_destroy(Raw);
    ucp_am_send_nbx(Raw, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_am_recv_data_nbx(Raw, *mut c_void, *mut c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_am_data_release(Raw, *mut c_void);
    ucp_stream_send_nbx(Raw, *const c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_stream_recv_nbx(Raw, *mut c_void, usize, *mut usize, *const RequestParam) -> StatusPtr;
    ucp_stream_recv_request_test(*mut c_void, *mut usize) -> Status;
    ucp_tag_send_nbx(Raw, *const c_void, usize, u64, *const RequestParam) -> StatusPtr;
    ucp_tag_recv_nbx(Raw, *mut c_void, usize, u64, u64, *const RequestParam) -> StatusPtr;
    ucp_tag_recv_request_test(*mut c_void, *mut TagRecvInfo) -> Status;
    ucp_put_nbx(Raw, *const c_void, usize, u64, Raw, *const RequestParam) -> StatusPtr;
    ucp_get_nbx(Raw, *mut c_void, usize, u64, Raw, *const RequestParam) -> StatusPtr;
    ucp_atomic_op_nbx(Raw, c_uint, *const c_void, usize, u64, Raw, *const RequestParam) -> StatusPtr;
    ucp_request_check_status(*mut c_void) -> Status;
    ucp_request_cancel(Raw, *mut c_void);
    ucp_request_free(*mut c_void);
    ucs_async_context_create(u32, *mut Raw) -> Status;
    ucs_async_context_destroy(Raw);
    ucs_topo_sys_device_bdf_name(SysDevice, *mut c_char, usize) -> *const c_char;
    ucs_memtype_cache_lookup(u64, usize, *mut MemoryInfo) -> Status;
    uct_query_components(*mut *mut Raw, *mut c_uint) -> Status;
    uct_release_component_list(*mut Raw);
    uct_component_query(Raw, *mut ComponentAttr) -> Status;
    uct_md_config_read(Raw, *const c_char, *const c_char, *mut Raw) -> Status;
    uct_config_modify(Raw, *const c_char, *const c_char) -> Status;
    uct_config_release(Raw);
    uct_md_open(Raw, *const c_char, Raw, *mut Raw) -> Status;
    uct_md_close(Raw);
    uct_md_query_v2(Raw, *mut MdAttr) -> Status;
    uct_mem_alloc(usize, *const u32, c_uint, *const MemAllocParams, *mut AllocatedMemory) -> Status;
    uct_mem_free(*const AllocatedMemory) -> Status;
    uct_md_mem_query(Raw, u64, usize, *mut MemAttr) -> Status;
    uct_md_detect_memory_type(Raw, u64, usize, *mut MemoryType) -> Status;
    uct_md_mem_reg_v2(Raw, u64, usize, *const MemRegParams, *mut Raw) -> Status;
    uct_md_mem_dereg_v2(Raw, *const MemDeregParams) -> Status;
    uct_md_mkey_pack_v2(Raw, Raw, u64, usize, *const MkeyPackParams, *mut c_void) -> Status;
    uct_md_mem_attach(Raw, *const c_void, *const MemAttachParams, *mut Raw) -> Status;
    uct_rkey_unpack_v2(Raw, *const c_void, *const RkeyUnpackParams, *mut RkeyBundle) -> Status;
    uct_rkey_release(Raw, *const RkeyBundle) -> Status;
    uct_rkey_compare(Raw, usize, usize, *const u64, *mut c_int) -> Status;
    uct_worker_create(Raw, u32, *mut Raw) -> Status;
    uct_worker_destroy(Raw);
    uct_md_iface_config_read(Raw, *const c_char, *const c_char, *const c_char, *mut Raw) -> Status;
    uct_iface_open(Raw, Raw, *const IfaceParams, Raw, *mut Raw) -> Status;
    uct_iface_close(Raw);
    uct_iface_mem_alloc(Raw, usize, c_uint, *const c_char, *mut AllocatedMemory) -> Status;
    uct_iface_mem_free(*const AllocatedMemory);
    uct_iface_query(Raw, *mut IfaceAttr) -> Status;
    uct_iface_estimate_perf(Raw, *mut PerfAttr) -> Status;
    uct_iface_get_device_address(Raw, *mut c_void) -> Status;
    uct_iface_get_address(Raw, *mut c_void) -> Status;
    uct_ep_create(*const UctEpParams, *mut Raw) -> Status;
    uct_ep_check(Raw, c_uint, *mut RawCompletion) -> Status;
    uct_ep_is_connected(Raw, *const IsConnectedParams) -> c_int;
    uct_ep_destroy(Raw);
}
