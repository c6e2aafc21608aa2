//! UCT's C API as data: struct layouts, constants, the functions, and the few slots of the public
//! operation table (`uct/api/tl.h`) that copies go through.
//!
//! Valid for UCX 1.22 and the development line of 1.23. Parameters carry a `field_mask`; structures
//! that UCX fills are declared with room behind the last known field.

use crate::bind::{functions, layout};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: one byte wide.
pub(super) type RawStatus = i8;
/// Any opaque UCT handle.
pub(crate) type Raw = *mut c_void;

pub(super) const OK: RawStatus = 0;
pub(super) const INPROGRESS: RawStatus = 1;

pub(super) const MEMORY_TYPE_HOST: u32 = 0;
pub(super) const MEMORY_TYPE_GAUDI: u32 = 9;
pub(super) const SYS_DEVICE_UNKNOWN: u8 = 255;
pub(super) const ALLOC_METHOD_MD: u32 = 1;
/// Remote key of transports that need none.
pub(super) const INVALID_RKEY: usize = usize::MAX;

pub(super) const ASYNC_MODE_THREAD: u32 = 1;
pub(super) const THREAD_MODE_SINGLE: u32 = 0;
pub(super) const OPEN_MODE_DEVICE: u64 = 1 << 0;

/// `uct_component_attr_t`
#[repr(C)]
pub(super) struct ComponentAttr {
    pub(super) field_mask: u64,
    pub(super) name: [c_char; 16],
    pub(super) md_resource_count: c_uint,
    pub(super) md_resources: *mut MdResource,
    pub(super) flags: u64,
}
impl ComponentAttr {
    pub(super) const NAME: u64 = 1 << 0;
    pub(super) const MD_RESOURCE_COUNT: u64 = 1 << 1;
    pub(super) const MD_RESOURCES: u64 = 1 << 2;
}

/// `uct_perf_attr_t`, with room for what later versions append.
#[repr(C)]
pub(super) struct PerfAttr {
    pub(super) field_mask: u64,
    pub(super) operation: u32,
    pub(super) local_memory_type: u32,
    pub(super) remote_memory_type: u32,
    pub(super) local_sys_device: u8,
    pub(super) remote_sys_device: u8,
    pub(super) send_pre_overhead: f64,
    pub(super) send_post_overhead: f64,
    pub(super) recv_overhead: f64,
    pub(super) bandwidth: [f64; 2],
    pub(super) path_bandwidth: [f64; 2],
    pub(super) latency: [f64; 2],
    pub(super) room: [u64; 16],
}
impl PerfAttr {
    pub(super) const OPERATION: u64 = 1 << 0;
    pub(super) const LOCAL_MEMORY_TYPE: u64 = 1 << 1;
    pub(super) const REMOTE_MEMORY_TYPE: u64 = 1 << 2;
    pub(super) const SEND_PRE_OVERHEAD: u64 = 1 << 5;
    pub(super) const SEND_POST_OVERHEAD: u64 = 1 << 6;
    pub(super) const BANDWIDTH: u64 = 1 << 8;
    pub(super) const LATENCY: u64 = 1 << 10;
}
pub(super) const PUT_SHORT: u32 = 3;
pub(super) const PUT_ZCOPY: u32 = 5;
pub(super) const GET_SHORT: u32 = 6;
pub(super) const GET_ZCOPY: u32 = 8;

/// `uct_md_resource_desc_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct MdResource {
    pub(super) name: [c_char; 16],
}

/// `uct_md_attr_v2_t`, with room for what later versions append.
#[repr(C)]
pub(super) struct MdAttr {
    pub(super) field_mask: u64,
    pub(super) max_alloc: u64,
    pub(super) max_reg: usize,
    pub(super) flags: u64,
    pub(super) reg_mem_types: u64,
    pub(super) reg_nonblock_mem_types: u64,
    pub(super) cache_mem_types: u64,
    pub(super) gva_mem_types: u64,
    pub(super) detect_mem_types: u64,
    pub(super) alloc_mem_types: u64,
    pub(super) access_mem_types: u64,
    pub(super) dmabuf_mem_types: u64,
    pub(super) reg_cost: [f64; 2],
    pub(super) component_name: [c_char; 16],
    pub(super) rkey_packed_size: usize,
    pub(super) local_cpus: [u64; 16],
    pub(super) exported_mkey_packed_size: usize,
    pub(super) global_id: [c_char; 256],
    pub(super) reg_alignment: usize,
    pub(super) required_mem_flags: u8,
    pub(super) room: [u64; 64],
}

/// `uct_md_mem_attr_v2_t`
#[repr(C)]
pub(super) struct MemAttr {
    pub(super) field_mask: u64,
    pub(super) mem_type: u32,
    pub(super) sys_dev: u8,
    pub(super) base_address: u64,
    pub(super) alloc_length: usize,
    pub(super) dmabuf_fd: c_int,
    pub(super) dmabuf_offset: usize,
    pub(super) mem_flags: u8,
}
impl MemAttr {
    pub(super) const RANGE: u64 = 0b1111;
    pub(super) const DMABUF_FD: u64 = 1 << 4;
    pub(super) const DMABUF_OFFSET: u64 = 1 << 5;
    pub(super) const MEM_FLAGS: u64 = 1 << 6;
}

/// `uct_mem_alloc_params_t`
#[repr(C)]
pub(super) struct MemAllocParams {
    pub(super) field_mask: u64,
    pub(super) flags: c_uint,
    pub(super) address: *mut c_void,
    pub(super) mem_type: u32,
    pub(super) mds: *const Raw,
    pub(super) md_count: c_uint,
    pub(super) name: *const c_char,
    pub(super) sys_device: u8,
}
impl MemAllocParams {
    pub(super) const FLAGS: u64 = 1 << 0;
    pub(super) const MEM_TYPE: u64 = 1 << 2;
    pub(super) const MDS: u64 = 1 << 3;
    pub(super) const NAME: u64 = 1 << 4;
    pub(super) const SYS_DEVICE: u64 = 1 << 5;
}

/// `uct_allocated_memory_t`
#[repr(C)]
pub(super) struct AllocatedMemory {
    pub(super) address: u64,
    pub(super) length: usize,
    pub(super) method: u32,
    pub(super) mem_type: u32,
    pub(super) md: Raw,
    pub(super) memh: Raw,
    pub(super) sys_device: u8,
}

/// Names of `uct_alloc_method_t`.
pub(super) const ALLOC_METHODS: [&str; 5] = ["thp", "md", "heap", "mmap", "huge"];

/// The failure of an operation is expected, not to be logged as an error.
pub(super) const FLAG_HIDE_ERRORS: u64 = 1 << 3;
/// Read and write, local and remote.
pub(super) const ACCESS_ALL: u64 = 0b11_1110_0000;

/// `uct_md_mem_reg_params_t`
#[repr(C)]
pub(super) struct MemRegParams {
    pub(super) field_mask: u64,
    pub(super) flags: u64,
    pub(super) dmabuf_fd: c_int,
    pub(super) dmabuf_offset: usize,
    pub(super) mem_type: u32,
}
impl MemRegParams {
    pub(super) const FLAGS: u64 = 1 << 0;
    pub(super) const MEM_TYPE: u64 = 1 << 3;
}

/// `uct_md_mem_dereg_params_t`
#[repr(C)]
pub(super) struct MemDeregParams {
    pub(super) field_mask: u64,
    pub(super) flags: c_uint,
    pub(super) memh: Raw,
    pub(super) comp: *mut Completion,
}
impl MemDeregParams {
    pub(super) const MEMH: u64 = 1 << 0;
}

/// `uct_md_mkey_pack_params_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct MkeyPackParams {
    pub(super) field_mask: u64,
    pub(super) flags: c_uint,
}

/// `uct_md_mem_attach_params_t`
#[repr(C)]
pub(super) struct MemAttachParams {
    pub(super) field_mask: u64,
    pub(super) flags: u64,
    pub(super) mkey_size: usize,
}
impl MemAttachParams {
    pub(super) const FLAGS: u64 = 1 << 0;
    pub(super) const HIDE_ERRORS: u64 = 1 << 0;
}

/// `uct_rkey_unpack_params_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct RkeyUnpackParams {
    pub(super) field_mask: u64,
    pub(super) sys_device: u8,
}
impl RkeyUnpackParams {
    pub(super) const SYS_DEVICE: u64 = 1 << 0;
}

/// `uct_rkey_bundle_t`
#[repr(C)]
pub(super) struct RkeyBundle {
    pub(super) rkey: usize,
    pub(super) handle: *mut c_void,
    pub(super) kind: *mut c_void,
}

/// `uct_iov_t`
#[repr(C)]
pub(super) struct Iov {
    pub(super) buffer: *mut c_void,
    pub(super) length: usize,
    pub(super) memh: Raw,
    pub(super) stride: usize,
    pub(super) count: c_uint,
}

/// `uct_completion_t`
#[repr(C)]
pub(super) struct Completion {
    pub(super) func: unsafe extern "C" fn(*mut Completion),
    pub(super) count: c_int,
    pub(super) status: RawStatus,
}

/// `uct_iface_params_t`
#[repr(C)]
pub(super) struct IfaceParams {
    pub(super) field_mask: u64,
    pub(super) cpu_mask: [u64; 16],
    pub(super) open_mode: u64,
    pub(super) tl_name: *const c_char,
    pub(super) dev_name: *const c_char,
    pub(super) rest: [u64; 18],
}
impl IfaceParams {
    pub(super) const OPEN_MODE: u64 = 1 << 1;
    pub(super) const DEVICE: u64 = 1 << 2;
}

/// `uct_ep_params_t`
#[repr(C)]
pub(super) struct EpParams {
    pub(super) field_mask: u64,
    pub(super) iface: Raw,
    pub(super) user_data: *mut c_void,
    pub(super) dev_addr: *const c_void,
    pub(super) iface_addr: *const c_void,
    pub(super) rest: [u64; 15],
}
impl EpParams {
    pub(super) const IFACE: u64 = 1 << 0;
    pub(super) const DEV_ADDR: u64 = 1 << 2;
    pub(super) const IFACE_ADDR: u64 = 1 << 3;
}

/// `ucs_memory_info_t`
#[repr(C)]
#[derive(Default)]
pub(super) struct MemoryInfo {
    pub(super) kind: u32,
    pub(super) sys_dev: u8,
    pub(super) base_address: u64,
    pub(super) alloc_length: usize,
    pub(super) mem_flags: u8,
}

layout! {
    ComponentAttr: 48 { name @ 8, md_resource_count @ 24, md_resources @ 32, flags @ 40 }
    MdResource: 16 { name @ 0 }
    PerfAttr: 224 { operation @ 8, local_memory_type @ 12, remote_memory_type @ 16, send_pre_overhead @ 24, bandwidth @ 48, latency @ 80, room @ 96 }
    MdAttr: 1056 { max_alloc @ 8, flags @ 24, reg_mem_types @ 32, detect_mem_types @ 64, alloc_mem_types @ 72, access_mem_types @ 80, dmabuf_mem_types @ 88, component_name @ 112, rkey_packed_size @ 128, required_mem_flags @ 536 }
    MemAttr: 56 { mem_type @ 8, sys_dev @ 12, base_address @ 16, alloc_length @ 24, dmabuf_fd @ 32, dmabuf_offset @ 40, mem_flags @ 48 }
    MemAllocParams: 64 { flags @ 8, address @ 16, mem_type @ 24, mds @ 32, md_count @ 40, name @ 48, sys_device @ 56 }
    AllocatedMemory: 48 { length @ 8, method @ 16, mem_type @ 20, md @ 24, memh @ 32, sys_device @ 40 }
    MemRegParams: 40 { flags @ 8, dmabuf_fd @ 16, dmabuf_offset @ 24, mem_type @ 32 }
    MemDeregParams: 32 { flags @ 8, memh @ 16, comp @ 24 }
    MkeyPackParams: 16 { flags @ 8 }
    RkeyUnpackParams: 16 { sys_device @ 8 }
    RkeyBundle: 24 { handle @ 8, kind @ 16 }
    Iov: 40 { length @ 8, memh @ 16, stride @ 24, count @ 32 }
    Completion: 16 { count @ 8, status @ 12 }
    IfaceParams: 304 { cpu_mask @ 8, open_mode @ 136, tl_name @ 144, dev_name @ 152 }
    EpParams: 160 { iface @ 8, dev_addr @ 24, iface_addr @ 32 }
    MemoryInfo: 32 { sys_dev @ 4, base_address @ 8, alloc_length @ 16, mem_flags @ 24 }
}

/// Room for `uct_iface_attr_t` (536 bytes in 1.22): we only read where `max_num_eps` is.
pub(super) type IfaceAttr = [u64; 128];
/// Index of `max_num_eps` in [`IfaceAttr`].
pub(super) const IFACE_ATTR_MAX_NUM_EPS: usize = 520 / 8;

/// `uct_iface_ops_t`: the structure of an open interface begins with it.
pub(super) type IfaceOps = [*const c_void; 50];
/// Indices into [`IfaceOps`] of what UCX's headers call through inline functions.
pub(super) mod slot {
    pub(in crate::uct) const PUT_SHORT: usize = 0;
    pub(in crate::uct) const PUT_ZCOPY: usize = 2;
    pub(in crate::uct) const GET_SHORT: usize = 3;
    pub(in crate::uct) const GET_ZCOPY: usize = 5;
    pub(in crate::uct) const FLUSH: usize = 26;
    pub(in crate::uct) const FENCE: usize = 27;
    pub(in crate::uct) const PROGRESS: usize = 42;
}
pub(super) type PutShort =
    unsafe extern "C" fn(Raw, *const c_void, c_uint, u64, usize) -> RawStatus;
pub(super) type GetShort = unsafe extern "C" fn(Raw, *mut c_void, c_uint, u64, usize) -> RawStatus;
pub(super) type Zcopy =
    unsafe extern "C" fn(Raw, *const Iov, usize, u64, usize, *mut Completion) -> RawStatus;
pub(super) type Flush = unsafe extern "C" fn(Raw, c_uint, *mut Completion) -> RawStatus;
pub(super) type Fence = unsafe extern "C" fn(Raw, c_uint) -> RawStatus;
pub(super) type Progress = unsafe extern "C" fn(Raw) -> c_uint;

functions! {
    ucs_status_string(RawStatus) -> *const c_char;
    ucs_async_context_create(u32, *mut Raw) -> RawStatus;
    ucs_async_context_destroy(Raw);
    ucs_topo_sys_device_bdf_name(u8, *mut c_char, usize) -> *const c_char;
    ucs_memtype_cache_lookup(u64, usize, *mut MemoryInfo) -> RawStatus;
    uct_query_components(*mut *mut Raw, *mut c_uint) -> RawStatus;
    uct_release_component_list(*mut Raw);
    uct_component_query(Raw, *mut ComponentAttr) -> RawStatus;
    uct_md_config_read(Raw, *const c_char, *const c_char, *mut Raw) -> RawStatus;
    uct_config_modify(Raw, *const c_char, *const c_char) -> RawStatus;
    uct_config_release(Raw);
    uct_md_open(Raw, *const c_char, Raw, *mut Raw) -> RawStatus;
    uct_md_close(Raw);
    uct_md_query_v2(Raw, *mut MdAttr) -> RawStatus;
    uct_mem_alloc(usize, *const u32, c_uint, *const MemAllocParams, *mut AllocatedMemory) -> RawStatus;
    uct_mem_free(*const AllocatedMemory) -> RawStatus;
    uct_md_mem_query(Raw, u64, usize, *mut MemAttr) -> RawStatus;
    uct_md_mem_query_v2(Raw, u64, usize, *mut MemAttr) -> RawStatus;
    uct_md_detect_memory_type(Raw, u64, usize, *mut u32) -> RawStatus;
    uct_md_mem_reg_v2(Raw, u64, usize, *const MemRegParams, *mut Raw) -> RawStatus;
    uct_md_mem_dereg_v2(Raw, *const MemDeregParams) -> RawStatus;
    uct_md_mkey_pack_v2(Raw, Raw, u64, usize, *const MkeyPackParams, *mut c_void) -> RawStatus;
    uct_md_mem_attach(Raw, *const c_void, *const MemAttachParams, *mut Raw) -> RawStatus;
    uct_rkey_unpack_v2(Raw, *const c_void, *const RkeyUnpackParams, *mut RkeyBundle) -> RawStatus;
    uct_rkey_release(Raw, *const RkeyBundle) -> RawStatus;
    uct_worker_create(Raw, u32, *mut Raw) -> RawStatus;
    uct_worker_destroy(Raw);
    uct_md_iface_config_read(Raw, *const c_char, *const c_char, *const c_char, *mut Raw) -> RawStatus;
    uct_iface_open(Raw, Raw, *const IfaceParams, Raw, *mut Raw) -> RawStatus;
    uct_iface_close(Raw);
    uct_iface_mem_alloc(Raw, usize, c_uint, *const c_char, *mut AllocatedMemory) -> RawStatus;
    uct_iface_mem_free(*const AllocatedMemory);
    uct_iface_query(Raw, *mut IfaceAttr) -> RawStatus;
    uct_iface_estimate_perf(Raw, *mut PerfAttr) -> RawStatus;
    uct_iface_get_device_address(Raw, *mut c_void) -> RawStatus;
    uct_iface_get_address(Raw, *mut c_void) -> RawStatus;
    uct_ep_create(*const EpParams, *mut Raw) -> RawStatus;
    uct_ep_destroy(Raw);
}
