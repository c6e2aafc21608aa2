//! Interfaces and endpoints: operation tables, attributes and parameters.

use core::ffi::{c_char, c_void};

use super::{Bandwidth, LinearFunc, MemoryType, Operation, SysDevice, layout};

/// Slots of `uct_iface_ops_t`, equal in all supported versions.
pub const IFACE_OP_SLOTS: usize = 50;
/// Slots handed to UCX as `uct_iface_internal_ops_t`: 1.21 reads 8, 1.22 reads 10, 1.23 reads 12.
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

/// Slots of internal operations in 1.22 and later; [`Variant::internal`](super::Variant::internal) maps them for others.
#[allow(missing_docs)]
pub mod internal_op {
    pub const IFACE_QUERY_V2: usize = 0;
    pub const IFACE_ESTIMATE_PERF: usize = 1;
    pub const IFACE_VFS_REFRESH: usize = 2;
    pub const EP_QUERY: usize = 3;
    pub const EP_INVALIDATE: usize = 4;
    pub const IFACE_IS_REACHABLE_V2: usize = 6;
    pub const EP_IS_CONNECTED: usize = 7;
    pub const EP_GET_DEVICE_EP: usize = 8;
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

layout! {
    /// `put` and `get` limits inside [`IfaceAttr`].
    #[derive(Clone, Copy, Debug, Default)]
    pub struct RmaLimits: 56 {
        0 max_short: usize,
        8 max_bcopy: usize,
        16 min_zcopy: usize,
        24 max_zcopy: usize,
        32 opt_zcopy_align: usize,
        40 align_mtu: usize,
        48 max_iov: usize,
    }

    /// `uct_iface_attr_t`. Later versions use its padding.
    pub struct IfaceAttr: 536 {
        0 put: RmaLimits,
        56 get: RmaLimits,
        112 am: [usize; 8],
        176 tag: [u64; 11],
        264 atomic: [u64; 4],
        296 flags: u64,
        304 event_flags: u64,
        312 device_addr_len: usize,
        320 iface_addr_len: usize,
        328 ep_addr_len: usize,
        336 max_conn_priv: usize,
        344 listen_sockaddr: [u64; 16],
        472 overhead: f64,
        480 bandwidth: Bandwidth,
        496 latency: LinearFunc,
        512 priority: u8,
        520 max_num_eps: usize,
        528 dev_num_paths: u32,
    }

    /// `uct_perf_attr_t`.
    pub struct PerfAttr: 112 {
        0 field_mask: u64,
        8 operation: Operation,
        12 local_memory_type: MemoryType,
        16 remote_memory_type: MemoryType,
        20 local_sys_device: SysDevice,
        21 remote_sys_device: SysDevice,
        24 send_pre_overhead: f64,
        32 send_post_overhead: f64,
        40 recv_overhead: f64,
        48 bandwidth: Bandwidth,
        64 path_bandwidth: Bandwidth,
        80 latency: LinearFunc,
        96 max_inflight_eps: usize,
        104 flags: u64,
    }
}

/// Bits of [`PerfAttr::field_mask`].
#[allow(missing_docs)]
pub mod perf_field {
    pub const OPERATION: u64 = 1 << 0;
    pub const LOCAL_MEMORY_TYPE: u64 = 1 << 1;
    pub const REMOTE_MEMORY_TYPE: u64 = 1 << 2;
    pub const SEND_PRE_OVERHEAD: u64 = 1 << 5;
    pub const SEND_POST_OVERHEAD: u64 = 1 << 6;
    pub const RECV_OVERHEAD: u64 = 1 << 7;
    pub const BANDWIDTH: u64 = 1 << 8;
    pub const PATH_BANDWIDTH: u64 = 1 << 9;
    pub const LATENCY: u64 = 1 << 10;
    pub const MAX_INFLIGHT_EPS: u64 = 1 << 11;
    pub const FLAGS: u64 = 1 << 12;
}

layout! {
    /// The head of `uct_iface_params_t`, as far as a device-mode transport reads it.
    pub struct IfaceParams: 192 {
        0 field_mask: u64,
        8 cpu_mask: [u64; 16],
        136 open_mode: u64,
        144 tl_name: *const c_char,
        152 dev_name: *const c_char,
        160 other_modes: [u64; 3],
        184 stats_root: *mut c_void,
    }
}

/// `UCT_IFACE_PARAM_FIELD_DEVICE`.
pub const IFACE_PARAM_DEVICE: u64 = 1 << 2;

/// `UCT_IFACE_PARAM_FIELD_STATS_ROOT`.
pub const IFACE_PARAM_STATS_ROOT: u64 = 1 << 4;

layout! {
    /// The head of `uct_ep_params_t`.
    pub struct EpParams: 160 {
        0 field_mask: u64,
        8 iface: *mut c_void,
        16 user_data: *mut c_void,
        24 dev_addr: *const c_void,
        32 iface_addr: *const c_void,
        40 sockaddr: *const c_void,
        48 unused: [u64; 12],
        144 dev_addr_length: usize,
        152 iface_addr_length: usize,
    }
}

/// `UCT_EP_PARAM_FIELD_DEV_ADDR`.
pub const EP_PARAM_DEV_ADDR: u64 = 1 << 2;
/// `UCT_EP_PARAM_FIELD_IFACE_ADDR`.
pub const EP_PARAM_IFACE_ADDR: u64 = 1 << 3;

layout! {
    /// `uct_iface_is_reachable_params_t`.
    pub struct ReachableParams: 64 {
        0 field_mask: u64,
        8 device_addr: *const c_void,
        16 iface_addr: *const c_void,
        24 info_string: *mut c_char,
        32 info_string_length: usize,
        40 scope: u32,
        48 device_addr_length: usize,
        56 iface_addr_length: usize,
    }
}

/// Bits of [`ReachableParams::field_mask`].
#[allow(missing_docs)]
pub mod reachable_field {
    pub const DEVICE_ADDR: u64 = 1 << 0;
    pub const IFACE_ADDR: u64 = 1 << 1;
    pub const INFO_STRING: u64 = 1 << 2;
    pub const INFO_STRING_LENGTH: u64 = 1 << 3;
    pub const IFACE_ADDR_LENGTH: u64 = 1 << 6;
}

layout! {
    /// `uct_ep_is_connected_params_t`.
    pub struct IsConnectedParams: 32 {
        0 field_mask: u64,
        8 device_addr: *const c_void,
        16 iface_addr: *const c_void,
        24 ep_addr: *const c_void,
    }
}

/// Bits of [`IsConnectedParams::field_mask`].
#[allow(missing_docs)]
pub mod is_connected_field {
    pub const DEVICE_ADDR: u64 = 1 << 0;
    pub const IFACE_ADDR: u64 = 1 << 1;
}

layout! {
    /// The start of a `uct_base_iface_t` and of a `uct_base_ep_t`, as far as this crate looks inside.
    pub struct BaseEp: 8 {
        0 iface: *mut c_void,
    }
}
