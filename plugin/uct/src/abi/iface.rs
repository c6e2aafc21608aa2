//! Interfaces and endpoints: operation tables, attributes and parameters.

use core::ffi::{c_char, c_void};

use super::{Bandwidth, LinearFunc, MemoryType, Operation, SysDevice, assert_layout};

/// Slots of `uct_iface_ops_t`, equal in 1.22 and 1.23.
pub const IFACE_OP_SLOTS: usize = 50;
/// Slots handed to UCX as `uct_iface_internal_ops_t`: 1.22 reads 10, 1.23 reads 12.
pub const INTERNAL_OP_SLOTS: usize = 16;

/// `uct_iface_ops_t` as an array of slots. UCX copies it into each interface.
#[repr(C)]
pub struct IfaceOps(pub [*const c_void; IFACE_OP_SLOTS]);

/// `uct_iface_internal_ops_t` as an array of slots. UCX keeps the pointer.
#[repr(C)]
pub struct InternalOps(pub [*const c_void; INTERNAL_OP_SLOTS]);

#[allow(missing_docs)]
pub mod iface_op {
    pub const EP_PUT_SHORT: usize = 0;
    pub const EP_PUT_ZCOPY: usize = 2;
    pub const EP_GET_SHORT: usize = 3;
    pub const EP_GET_ZCOPY: usize = 5;
    pub const EP_TAG_RNDV_ZCOPY: usize = 19;
    pub const EP_PENDING_ADD: usize = 24;
    pub const EP_PENDING_PURGE: usize = 25;
    pub const EP_FLUSH: usize = 26;
    pub const EP_FENCE: usize = 27;
    pub const EP_CHECK: usize = 28;
    pub const EP_CREATE: usize = 29;
    pub const EP_DESTROY: usize = 33;
    pub const IFACE_FLUSH: usize = 38;
    pub const IFACE_FENCE: usize = 39;
    pub const IFACE_PROGRESS_ENABLE: usize = 40;
    pub const IFACE_PROGRESS_DISABLE: usize = 41;
    pub const IFACE_PROGRESS: usize = 42;
    pub const IFACE_EVENT_FD_GET: usize = 43;
    pub const IFACE_EVENT_ARM: usize = 44;
    pub const IFACE_CLOSE: usize = 45;
    pub const IFACE_QUERY: usize = 46;
    pub const IFACE_GET_DEVICE_ADDRESS: usize = 47;
    pub const IFACE_GET_ADDRESS: usize = 48;
    pub const IFACE_IS_REACHABLE: usize = 49;
}

#[allow(missing_docs)]
pub mod internal_op {
    pub const IFACE_QUERY_V2: usize = 0;
    pub const IFACE_ESTIMATE_PERF: usize = 1;
    pub const IFACE_VFS_REFRESH: usize = 2;
    pub const IFACE_IS_REACHABLE_V2: usize = 6;
    pub const EP_IS_CONNECTED: usize = 7;
}

/// Capability flags of an interface.
#[allow(missing_docs)]
pub mod iface_flag {
    pub const PENDING: u64 = 1 << 3;
    pub const PUT_SHORT: u64 = 1 << 4;
    pub const PUT_ZCOPY: u64 = 1 << 6;
    pub const GET_SHORT: u64 = 1 << 8;
    pub const GET_ZCOPY: u64 = 1 << 10;
    pub const ERRHANDLE_PEER_FAILURE: u64 = 1 << 38;
    pub const EP_CHECK: u64 = 1 << 39;
    pub const CONNECT_TO_IFACE: u64 = 1 << 40;
}

/// Event flags of an interface.
#[allow(missing_docs)]
pub mod event_flag {
    pub const SEND_COMP: u64 = 1 << 0;
    pub const RECV: u64 = 1 << 1;
    pub const FD: u64 = 1 << 3;
}

/// `put` and `get` limits inside [`IfaceAttr`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct RmaLimits {
    pub max_short: usize,
    pub max_bcopy: usize,
    pub min_zcopy: usize,
    pub max_zcopy: usize,
    pub opt_zcopy_align: usize,
    pub align_mtu: usize,
    pub max_iov: usize,
}

/// `uct_iface_attr_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct IfaceAttr {
    pub put: RmaLimits,
    pub get: RmaLimits,
    pub am: [usize; 8],
    pub tag: [u64; 11],
    pub atomic: [u64; 4],
    pub flags: u64,
    pub event_flags: u64,
    pub device_addr_len: usize,
    pub iface_addr_len: usize,
    pub ep_addr_len: usize,
    pub max_conn_priv: usize,
    pub listen_sockaddr: [u64; 16],
    pub overhead: f64,
    pub bandwidth: Bandwidth,
    pub latency: LinearFunc,
    pub priority: u8,
    pub max_num_eps: usize,
    pub dev_num_paths: u32,
    pub ctl_device: u8,
}
assert_layout!(IfaceAttr, 536, put @ 0, get @ 56, am @ 112, tag @ 176, atomic @ 264, flags @ 296,
    event_flags @ 304, device_addr_len @ 312, iface_addr_len @ 320, ep_addr_len @ 328,
    max_conn_priv @ 336, listen_sockaddr @ 344, overhead @ 472, bandwidth @ 480, latency @ 496,
    priority @ 512, max_num_eps @ 520, dev_num_paths @ 528, ctl_device @ 532);

/// `uct_perf_attr_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct PerfAttr {
    pub field_mask: u64,
    pub operation: Operation,
    pub local_memory_type: MemoryType,
    pub remote_memory_type: MemoryType,
    pub local_sys_device: SysDevice,
    pub remote_sys_device: SysDevice,
    pub send_pre_overhead: f64,
    pub send_post_overhead: f64,
    pub recv_overhead: f64,
    pub bandwidth: Bandwidth,
    pub path_bandwidth: Bandwidth,
    pub latency: LinearFunc,
    pub max_inflight_eps: usize,
    pub flags: u64,
}
assert_layout!(PerfAttr, 112, operation @ 8, local_memory_type @ 12, remote_memory_type @ 16,
    local_sys_device @ 20, remote_sys_device @ 21, send_pre_overhead @ 24,
    send_post_overhead @ 32, recv_overhead @ 40, bandwidth @ 48, path_bandwidth @ 64,
    latency @ 80, max_inflight_eps @ 96, flags @ 104);

/// Bits of [`PerfAttr::field_mask`].
#[allow(missing_docs)]
pub mod perf_field {
    pub const OPERATION: u64 = 1 << 0;
    pub const LOCAL_MEMORY_TYPE: u64 = 1 << 1;
    pub const REMOTE_MEMORY_TYPE: u64 = 1 << 2;
    pub const LOCAL_SYS_DEVICE: u64 = 1 << 3;
    pub const REMOTE_SYS_DEVICE: u64 = 1 << 4;
    pub const SEND_PRE_OVERHEAD: u64 = 1 << 5;
    pub const SEND_POST_OVERHEAD: u64 = 1 << 6;
    pub const RECV_OVERHEAD: u64 = 1 << 7;
    pub const BANDWIDTH: u64 = 1 << 8;
    pub const PATH_BANDWIDTH: u64 = 1 << 9;
    pub const LATENCY: u64 = 1 << 10;
    pub const MAX_INFLIGHT_EPS: u64 = 1 << 11;
    pub const FLAGS: u64 = 1 << 12;
}

/// The head of `uct_iface_params_t`, as far as a device-mode transport reads it.
#[repr(C)]
#[allow(missing_docs)]
pub struct IfaceParams {
    pub field_mask: u64,
    pub cpu_mask: [u64; 16],
    pub open_mode: u64,
    pub tl_name: *const c_char,
    pub dev_name: *const c_char,
    pub other_modes: [u64; 3],
    pub stats_root: *mut c_void,
}
assert_layout!(IfaceParams, 192, cpu_mask @ 8, open_mode @ 136, tl_name @ 144, dev_name @ 152,
    stats_root @ 184);

/// `UCT_IFACE_PARAM_FIELD_DEVICE`.
pub const IFACE_PARAM_DEVICE: u64 = 1 << 2;

/// `UCT_IFACE_PARAM_FIELD_STATS_ROOT`.
pub const IFACE_PARAM_STATS_ROOT: u64 = 1 << 4;

/// The head of `uct_ep_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct EpParams {
    pub field_mask: u64,
    pub iface: *mut c_void,
    pub user_data: *mut c_void,
    pub dev_addr: *const c_void,
    pub iface_addr: *const c_void,
    pub sockaddr: *const c_void,
    pub unused: [u64; 12],
    pub dev_addr_length: usize,
    pub iface_addr_length: usize,
}
assert_layout!(EpParams, 160, iface @ 8, dev_addr @ 24, iface_addr @ 32, sockaddr @ 40,
    dev_addr_length @ 144, iface_addr_length @ 152);

/// `UCT_EP_PARAM_FIELD_DEV_ADDR`.
pub const EP_PARAM_DEV_ADDR: u64 = 1 << 2;
/// `UCT_EP_PARAM_FIELD_IFACE_ADDR`.
pub const EP_PARAM_IFACE_ADDR: u64 = 1 << 3;

/// `uct_iface_is_reachable_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct ReachableParams {
    pub field_mask: u64,
    pub device_addr: *const c_void,
    pub iface_addr: *const c_void,
    pub info_string: *mut c_char,
    pub info_string_length: usize,
    pub scope: u32,
    pub device_addr_length: usize,
    pub iface_addr_length: usize,
}
assert_layout!(ReachableParams, 64, device_addr @ 8, iface_addr @ 16, info_string @ 24,
    info_string_length @ 32, scope @ 40, device_addr_length @ 48, iface_addr_length @ 56);

/// Bits of [`ReachableParams::field_mask`].
#[allow(missing_docs)]
pub mod reachable_field {
    pub const DEVICE_ADDR: u64 = 1 << 0;
    pub const IFACE_ADDR: u64 = 1 << 1;
    pub const INFO_STRING: u64 = 1 << 2;
    pub const INFO_STRING_LENGTH: u64 = 1 << 3;
    pub const SCOPE: u64 = 1 << 4;
    pub const DEVICE_ADDR_LENGTH: u64 = 1 << 5;
    pub const IFACE_ADDR_LENGTH: u64 = 1 << 6;
}

/// `uct_ep_is_connected_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct IsConnectedParams {
    pub field_mask: u64,
    pub device_addr: *const c_void,
    pub iface_addr: *const c_void,
    pub ep_addr: *const c_void,
}
assert_layout!(IsConnectedParams, 32, device_addr @ 8, iface_addr @ 16, ep_addr @ 24);

/// Bits of [`IsConnectedParams::field_mask`].
#[allow(missing_docs)]
pub mod is_connected_field {
    pub const DEVICE_ADDR: u64 = 1 << 0;
    pub const IFACE_ADDR: u64 = 1 << 1;
}

/// The start of a `uct_base_iface_t` and of a `uct_base_ep_t`, as far as this crate looks inside.
#[repr(C)]
#[allow(missing_docs)]
pub struct BaseEp {
    pub iface: *mut c_void,
}
