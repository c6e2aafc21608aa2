//! UCP's public C API as data: struct layouts, constants and the table of functions.
//!
//! Facts come from the public headers (`ucp/api/ucp.h`, `ucp_def.h`) of UCX 1.22 and hold for the
//! development line of 1.23 too. Every parameter struct carries a `field_mask`: fields whose bit is
//! not set are never read, which is what keeps this valid on later versions. The layouts are
//! asserted at compile time; nothing here is `safe`, that is the business of the files beside it.

use crate::bind::{functions, layout};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: a *packed* enum, one byte wide. Upper bits of the return register are garbage.
pub(super) type RawStatus = i8;
/// `ucs_status_ptr_t`: NULL is done, the top 100 addresses are errors, the rest are requests.
pub(super) type StatusPtr = *mut c_void;
/// Any opaque UCP handle.
pub(super) type Raw = *mut c_void;

pub(super) const OK: RawStatus = 0;
pub(super) const INPROGRESS: RawStatus = 1;
pub(super) const ERR_MESSAGE_TRUNCATED: RawStatus = -9;
pub(super) const ERR_BUSY: RawStatus = -15;
pub(super) const ERR_CANCELED: RawStatus = -16;
pub(super) const ERR_LAST: RawStatus = -100;

pub(super) const MEMORY_TYPE_HOST: c_uint = 0;
pub(super) const MEMORY_TYPE_GAUDI: c_uint = 9;

pub(super) const API_MAJOR: c_uint = 1;
/// The oldest minor we can do with: the library must be at least this, so ask for the floor.
pub(super) const API_MINOR: c_uint = 21;

pub(super) const FEATURE_TAG: u64 = 1 << 0;
pub(super) const FEATURE_RMA: u64 = 1 << 1;
pub(super) const FEATURE_AMO32: u64 = 1 << 2;
pub(super) const FEATURE_AMO64: u64 = 1 << 3;
pub(super) const FEATURE_WAKEUP: u64 = 1 << 4;
pub(super) const FEATURE_STREAM: u64 = 1 << 5;
pub(super) const FEATURE_AM: u64 = 1 << 6;

pub(super) const THREAD_MODE_SINGLE: c_uint = 0;
pub(super) const THREAD_MODE_MULTI: c_uint = 2;

pub(super) const ERR_MODE_NONE: c_uint = 0;
pub(super) const ERR_MODE_PEER: c_uint = 1;

pub(super) const EP_CLOSE_FLAG_FORCE: u32 = 1;
pub(super) const STREAM_RECV_FLAG_WAITALL: u32 = 1;
pub(super) const AM_SEND_FLAG_EAGER: u32 = 1 << 1;
pub(super) const AM_SEND_FLAG_RNDV: u32 = 1 << 2;
pub(super) const AM_SEND_FLAG_COPY_HEADER: u32 = 1 << 3;
pub(super) const AM_RECV_ATTR_FLAG_DATA: u64 = 1 << 16;
pub(super) const AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;
pub(super) const AM_FLAG_WHOLE_MSG: u32 = 1;
pub(super) const AM_FLAG_PERSISTENT_DATA: u32 = 2;

pub(super) const MEM_MAP_ALLOCATE: c_uint = 2;

pub(super) const OP_ATTR_FIELD_DATATYPE: u32 = 1 << 3;
pub(super) const OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
pub(super) const OP_ATTR_FIELD_REPLY_BUFFER: u32 = 1 << 5;
pub(super) const OP_ATTR_FIELD_MEMORY_TYPE: u32 = 1 << 6;
pub(super) const OP_ATTR_FIELD_RECV_INFO: u32 = 1 << 7;
/// An error of an operation without a reply is told only if the request is wanted.
pub(super) const OP_ATTR_FLAG_NO_IMM_CMPL: u32 = 1 << 16;

/// `ucp_dt_make_contig`: elements of so many bytes.
pub(super) const fn contiguous(bytes: usize) -> u64 {
    (bytes as u64) << 3
}

/// `ucp_params_t`
#[repr(C)]
pub(super) struct Params {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    pub(super) request_size: usize,
    pub(super) request_init: *mut c_void,
    pub(super) request_cleanup: *mut c_void,
    pub(super) tag_sender_mask: u64,
    pub(super) mt_workers_shared: c_int,
    pub(super) estimated_num_eps: usize,
    pub(super) estimated_num_ppn: usize,
    pub(super) name: *const c_char,
    pub(super) node_local_id: usize,
}
impl Params {
    pub(super) const FEATURES: u64 = 1 << 0;
    pub(super) const MT_WORKERS_SHARED: u64 = 1 << 5;
}

/// `ucp_worker_params_t`
#[repr(C)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_uint,
    pub(super) cpu_mask: [u64; 16],
    pub(super) events: c_uint,
    pub(super) user_data: *mut c_void,
    pub(super) event_fd: c_int,
    pub(super) flags: u64,
    pub(super) name: *const c_char,
    pub(super) am_alignment: usize,
    pub(super) client_id: u64,
}
impl WorkerParams {
    pub(super) const THREAD_MODE: u64 = 1 << 0;
}

/// `ucp_err_handler_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ErrHandler {
    pub(super) cb: Option<unsafe extern "C" fn(arg: *mut c_void, ep: Raw, status: RawStatus)>,
    pub(super) arg: *mut c_void,
}

/// `ucp_ep_params_t`
#[repr(C)]
pub(super) struct EpParams {
    pub(super) field_mask: u64,
    pub(super) address: *const c_void,
    pub(super) err_mode: c_uint,
    pub(super) err_handler: ErrHandler,
    pub(super) user_data: *mut c_void,
    pub(super) flags: c_uint,
    pub(super) sockaddr: [usize; 2],
    pub(super) conn_request: *mut c_void,
    pub(super) name: *const c_char,
    pub(super) local_sockaddr: [usize; 2],
}
impl EpParams {
    pub(super) const REMOTE_ADDRESS: u64 = 1 << 0;
    pub(super) const ERR_HANDLING_MODE: u64 = 1 << 1;
    pub(super) const ERR_HANDLER: u64 = 1 << 2;
}

/// `ucp_mem_map_params_t`
#[repr(C)]
pub(super) struct MemMapParams {
    pub(super) field_mask: u64,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    pub(super) flags: c_uint,
    pub(super) prot: c_uint,
    pub(super) memory_type: c_uint,
    pub(super) exported_memh_buffer: *const c_void,
}
impl MemMapParams {
    pub(super) const ADDRESS: u64 = 1 << 0;
    pub(super) const LENGTH: u64 = 1 << 1;
    pub(super) const FLAGS: u64 = 1 << 2;
    pub(super) const MEMORY_TYPE: u64 = 1 << 4;
}

/// `ucp_mem_attr_t`
#[repr(C)]
pub(super) struct MemAttr {
    pub(super) field_mask: u64,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    pub(super) mem_type: c_uint,
}
impl MemAttr {
    pub(super) const ALL: u64 = 0b111;
}

/// `ucp_tag_recv_info_t`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct TagRecvInfo {
    pub(super) sender_tag: u64,
    pub(super) length: usize,
}

/// `ucp_request_param_t`
#[repr(C)]
pub(super) struct RequestParam {
    pub(super) op_attr_mask: u32,
    pub(super) flags: u32,
    pub(super) request: *mut c_void,
    pub(super) cb: *mut c_void,
    pub(super) datatype: u64,
    pub(super) user_data: *mut c_void,
    pub(super) reply_buffer: *mut c_void,
    pub(super) memory_type: c_uint,
    pub(super) recv_info: *mut c_void,
    pub(super) memh: Raw,
    pub(super) remote_datatype: u64,
    pub(super) remote: *const c_void,
    pub(super) remote_count: usize,
}

/// `ucp_am_recv_param_t`
#[repr(C)]
pub(super) struct AmRecvParam {
    pub(super) recv_attr: u64,
    pub(super) reply_ep: Raw,
}

/// `ucp_am_recv_callback_t`
pub(super) type AmRecvCallback = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmRecvParam,
) -> RawStatus;

/// `ucp_am_handler_param_t`
#[repr(C)]
pub(super) struct AmHandlerParam {
    pub(super) field_mask: u64,
    pub(super) id: c_uint,
    pub(super) flags: u32,
    pub(super) cb: Option<AmRecvCallback>,
    pub(super) arg: *mut c_void,
}
impl AmHandlerParam {
    pub(super) const ALL: u64 = 0b1111;
}

layout! {
    Params: 88 { features @ 8, tag_sender_mask @ 40, mt_workers_shared @ 48, estimated_num_eps @ 56, name @ 72, node_local_id @ 80 }
    WorkerParams: 200 { thread_mode @ 8, cpu_mask @ 16, events @ 144, user_data @ 152, event_fd @ 160, flags @ 168, name @ 176, am_alignment @ 184, client_id @ 192 }
    EpParams: 104 { address @ 8, err_mode @ 16, err_handler @ 24, user_data @ 40, flags @ 48, sockaddr @ 56, conn_request @ 72, name @ 80, local_sockaddr @ 88 }
    MemMapParams: 48 { address @ 8, length @ 16, flags @ 24, prot @ 28, memory_type @ 32, exported_memh_buffer @ 40 }
    MemAttr: 32 { address @ 8, length @ 16, mem_type @ 24 }
    RequestParam: 96 { flags @ 4, request @ 8, cb @ 16, datatype @ 24, user_data @ 32, reply_buffer @ 40, memory_type @ 48, recv_info @ 56, memh @ 64 }
    TagRecvInfo: 16 { sender_tag @ 0, length @ 8 }
    AmHandlerParam: 32 { id @ 8, flags @ 12, cb @ 16, arg @ 24 }
    AmRecvParam: 16 { recv_attr @ 0, reply_ep @ 8 }
}

functions! {
    ucp_get_version_string() -> *const c_char;
    ucs_status_string(RawStatus) -> *const c_char;
    ucp_init_version(c_uint, c_uint, *const Params, *const c_void, *mut Raw) -> RawStatus;
    ucp_cleanup(Raw);
    ucp_worker_create(Raw, *const WorkerParams, *mut Raw) -> RawStatus;
    ucp_worker_destroy(Raw);
    ucp_worker_get_address(Raw, *mut *mut c_void, *mut usize) -> RawStatus;
    ucp_worker_release_address(Raw, *mut c_void);
    ucp_worker_progress(Raw) -> c_uint;
    ucp_worker_get_efd(Raw, *mut c_int) -> RawStatus;
    ucp_worker_arm(Raw) -> RawStatus;
    ucp_worker_set_am_recv_handler(Raw, *const AmHandlerParam) -> RawStatus;
    ucp_ep_create(Raw, *const EpParams, *mut Raw) -> RawStatus;
    ucp_ep_close_nbx(Raw, *const RequestParam) -> StatusPtr;
    ucp_ep_flush_nbx(Raw, *const RequestParam) -> StatusPtr;
    ucp_mem_map(Raw, *const MemMapParams, *mut Raw) -> RawStatus;
    ucp_mem_unmap(Raw, Raw) -> RawStatus;
    ucp_mem_query(Raw, *mut MemAttr) -> RawStatus;
    ucp_rkey_pack(Raw, Raw, *mut *mut c_void, *mut usize) -> RawStatus;
    ucp_rkey_buffer_release(*mut c_void);
    ucp_ep_rkey_unpack(Raw, *const c_void, *mut Raw) -> RawStatus;
    ucp_rkey_destroy(Raw);
    ucp_am_send_nbx(Raw, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_am_recv_data_nbx(Raw, *mut c_void, *mut c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_am_data_release(Raw, *mut c_void);
    ucp_stream_send_nbx(Raw, *const c_void, usize, *const RequestParam) -> StatusPtr;
    ucp_stream_recv_nbx(Raw, *mut c_void, usize, *mut usize, *const RequestParam) -> StatusPtr;
    ucp_stream_recv_request_test(*mut c_void, *mut usize) -> RawStatus;
    ucp_tag_send_nbx(Raw, *const c_void, usize, u64, *const RequestParam) -> StatusPtr;
    ucp_tag_recv_nbx(Raw, *mut c_void, usize, u64, u64, *const RequestParam) -> StatusPtr;
    ucp_tag_recv_request_test(*mut c_void, *mut TagRecvInfo) -> RawStatus;
    ucp_put_nbx(Raw, *const c_void, usize, u64, Raw, *const RequestParam) -> StatusPtr;
    ucp_get_nbx(Raw, *mut c_void, usize, u64, Raw, *const RequestParam) -> StatusPtr;
    ucp_atomic_op_nbx(Raw, c_uint, *const c_void, usize, u64, Raw, *const RequestParam) -> StatusPtr;
    ucp_request_check_status(*mut c_void) -> RawStatus;
    ucp_request_cancel(Raw, *mut c_void);
    ucp_request_free(*mut c_void);
}
