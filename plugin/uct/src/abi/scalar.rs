//! Scalar types with pitfalls: one-byte status codes, open-ended enums, bit sets.

use core::ffi::{c_int, c_void};
use core::fmt;

use super::layout;

/// `ucs_status_t`: a *packed* enum, one byte wide. Declaring it wider reads garbage.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(pub i8);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:expr, $text:expr;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status($value);)*
            fn text(self) -> &'static str {
                match self.0 { $($value => $text,)* _ => "unknown status" }
            }
        }
    };
}
statuses! {
    /// Done.
    OK = 0, "success";
    /// Accepted; a completion follows.
    INPROGRESS = 1, "in progress";
    /// Nothing to receive.
    NO_MESSAGE = -1, "no message";
    /// Out of queue slots for now: add a pending request and try again.
    NO_RESOURCE = -2, "no resource";
    /// The device or the link failed.
    IO_ERROR = -3, "input/output error";
    /// Out of memory.
    NO_MEMORY = -4, "out of memory";
    /// The caller passed nonsense.
    INVALID_PARAM = -5, "invalid parameter";
    /// The peer cannot be reached.
    UNREACHABLE = -6, "destination unreachable";
    /// Not an address of ours.
    INVALID_ADDR = -7, "invalid address";
    /// Not implemented.
    NOT_IMPLEMENTED = -8, "not implemented";
    /// Nothing left to progress.
    NO_PROGRESS = -10, "no progress";
    /// The caller's buffer is too small.
    BUFFER_TOO_SMALL = -11, "buffer too small";
    /// No such element.
    NO_ELEM = -12, "no such element";
    /// No such device.
    NO_DEVICE = -14, "no such device";
    /// In use elsewhere.
    BUSY = -15, "busy";
    /// Cancelled.
    CANCELED = -16, "cancelled";
    /// Already there.
    ALREADY_EXISTS = -18, "already exists";
    /// Outside the range this domain knows.
    OUT_OF_RANGE = -19, "out of range";
    /// Took too long.
    TIMED_OUT = -20, "timed out";
    /// Over a limit.
    EXCEEDS_LIMIT = -21, "exceeds limit";
    /// Cannot be done by this transport.
    UNSUPPORTED = -22, "unsupported";
    /// Refused.
    REJECTED = -23, "rejected";
    /// Not connected.
    NOT_CONNECTED = -24, "not connected";
    /// The peer went away.
    CONNECTION_RESET = -25, "connection reset";
    /// The endpoint failed.
    ENDPOINT_TIMEOUT = -80, "endpoint timeout";
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text(), self.0)
    }
}

impl core::error::Error for Status {}

/// `ucs_memory_type_t`, open-ended.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryType(pub u32);

impl MemoryType {
    /// Ordinary memory.
    pub const HOST: MemoryType = MemoryType(0);
    /// NVIDIA CUDA memory.
    pub const CUDA: MemoryType = MemoryType(1);
    /// Habana Gaudi memory (known to UCX since 1.21).
    pub const GAUDI: MemoryType = MemoryType(9);
    /// Not known, or none.
    pub const UNKNOWN: MemoryType = MemoryType(10);
}

/// A set of memory types, as UCX's 64-bit masks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTypes(pub u64);

impl MemoryTypes {
    /// The empty set.
    pub const NONE: MemoryTypes = MemoryTypes(0);

    /// This set and one more type.
    #[must_use]
    pub const fn with(self, memory_type: MemoryType) -> Self {
        MemoryTypes(self.0 | 1 << memory_type.0)
    }

    /// A set of one.
    pub const fn only(memory_type: MemoryType) -> Self {
        Self::NONE.with(memory_type)
    }
}

/// `ucs_sys_device_t`: UCX's number for a device in its topology.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SysDevice(pub u8);

impl SysDevice {
    /// Not in the topology.
    pub const UNKNOWN: SysDevice = SysDevice(255);
}

/// `uct_device_type_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceType(pub u32);

impl DeviceType {
    /// An accelerator.
    pub const ACC: DeviceType = DeviceType(2);
    /// This process only.
    pub const SELF: DeviceType = DeviceType(3);
}

/// `uct_ep_operation_t`, open-ended.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation(pub u32);

#[allow(missing_docs)]
impl Operation {
    pub const PUT_SHORT: Operation = Operation(3);
    pub const PUT_ZCOPY: Operation = Operation(5);
    pub const GET_SHORT: Operation = Operation(6);
    pub const GET_BCOPY: Operation = Operation(7);
    pub const GET_ZCOPY: Operation = Operation(8);

    /// Data flows from the remote side to the local one.
    pub fn is_fetch(self) -> bool {
        matches!(self, Self::GET_SHORT | Self::GET_BCOPY | Self::GET_ZCOPY)
    }

    /// The operation may complete later.
    pub fn is_zcopy(self) -> bool {
        matches!(self, Self::PUT_ZCOPY | Self::GET_ZCOPY)
    }
}

layout! {
    /// `ucs_linear_func_t`: `constant + slope * x`.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub struct LinearFunc: 16 {
        0 constant: f64,
        8 slope: f64,
    }

    /// `uct_ppn_bandwidth_t`, bytes per second.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub struct Bandwidth: 16 {
        /// For each process alone.
        0 dedicated: f64,
        /// Divided among the processes of a node.
        8 shared: f64,
    }

    /// `ucs_list_link_t`: `prev` comes first.
    #[derive(Debug)]
    pub struct ListLink: 16 {
        0 prev: *mut ListLink,
        8 next: *mut ListLink,
    }

    /// `ucs_memory_info_t`, the result of a look-up in the memory-type cache. 1.21 does not write `mem_flags`.
    #[derive(Debug)]
    pub struct MemoryInfo: 64 {
        0 mem_type: u32,
        4 sys_dev: u8,
        8 base_address: *mut c_void,
        16 alloc_length: usize,
        24 mem_flags: u8,
        /// Space for fields that later versions append.
        32 spare: [u64; 4],
    }
}

/// `UCS_MEM_FLAG_REGISTRABLE`.
pub const MEM_FLAG_REGISTRABLE: u8 = 1;

/// Memory flags: whether network devices can register the memory.
pub(crate) fn mem_flags(registrable: bool) -> u8 {
    if registrable { MEM_FLAG_REGISTRABLE } else { 0 }
}

layout! {
    /// `ucm_event_t` as memory-type events use it, at the full size of the union. 1.21 reads neither
    /// `sys_dev` nor `mem_flags`.
    #[derive(Debug)]
    pub struct MemTypeEvent: 48 {
        0 address: *mut c_void,
        8 size: usize,
        16 mem_type: MemoryType,
        20 sys_dev: SysDevice,
        21 mem_flags: u8,
        24 spare: [u64; 3],
    }
}

/// `UCM_EVENT_MEM_TYPE_ALLOC`: device memory was allocated.
pub const UCM_EVENT_MEM_TYPE_ALLOC: u32 = 1 << 20;
/// `UCM_EVENT_MEM_TYPE_FREE`: device memory is about to be freed.
pub const UCM_EVENT_MEM_TYPE_FREE: u32 = 1 << 21;

layout! {
    /// `uct_iov_t`.
    #[derive(Debug)]
    pub struct Iov: 40 {
        0 buffer: *mut c_void,
        8 length: usize,
        16 memh: *mut c_void,
        24 stride: usize,
        32 count: u32,
    }

    /// `uct_completion_t`.
    #[derive(Debug)]
    pub struct RawCompletion: 16 {
        0 func: Option<unsafe extern "C" fn(*mut RawCompletion)>,
        8 count: c_int,
        12 status: Status,
    }

    /// `ucs_class_t`.
    #[derive(Debug)]
    pub struct Class: 40 {
        0 name: *const core::ffi::c_char,
        8 size: usize,
        16 superclass: *mut Class,
        24 init: *const c_void,
        32 cleanup: *const c_void,
    }
}

/// A remote key that stands for "none" (`UCT_INVALID_RKEY`).
pub const INVALID_RKEY: usize = usize::MAX;
