//! Memory domains: operations, attributes and parameters.

use core::ffi::{c_char, c_void};

use super::{LinearFunc, MemoryType, RawCompletion, RawComponent, SysDevice, layout};

/// Slots of the operation table handed to UCX: 1.21 and 1.22 read 12, 1.23 reads 13.
pub const MD_OP_SLOTS: usize = 16;

/// `uct_md_ops_t` as an array of slots, so that the tail can be populated for later versions.
#[repr(C)]
pub struct MdOps(pub [*const c_void; MD_OP_SLOTS]);

#[allow(missing_docs)]
pub mod md_op {
    pub const CLOSE: usize = 0;
    pub const QUERY: usize = 1;
    pub const MEM_ALLOC: usize = 2;
    pub const MEM_FREE: usize = 3;
    pub const MEM_ADVISE: usize = 4;
    pub const MEM_REG: usize = 5;
    pub const MEM_DEREG: usize = 6;
    pub const MEM_QUERY: usize = 7;
    pub const MKEY_PACK: usize = 8;
    pub const MEM_ATTACH: usize = 9;
    pub const DETECT_MEMORY_TYPE: usize = 10;
    pub const MEM_ELEM_PACK: usize = 11;
    pub const MEM_ELEM_RELEASE: usize = 12;
}

layout! {
    /// `uct_md_t`.
    #[derive(Debug)]
    pub struct RawMd: 16 {
        0 ops: *const MdOps,
        8 component: *mut RawComponent,
    }
}

/// Flags of a memory domain.
#[allow(missing_docs)]
pub mod md_flag {
    pub const ALLOC: u64 = 1 << 0;
    pub const REG: u64 = 1 << 1;
    pub const NEED_RKEY: u64 = 1 << 3;
    pub const RKEY_PTR: u64 = 1 << 6;
    pub const INVALIDATE: u64 = 1 << 8;
    pub const REG_DMABUF: u64 = 1 << 10;
    pub const INVALIDATE_RMA: u64 = 1 << 11;
    pub const INVALIDATE_AMO: u64 = 1 << 12;
}

layout! {
    /// `uct_md_attr_v2_t` up to the fields a plugin sets. UCX owns the structure, and it may be longer
    /// than this: use it only behind UCX's pointer, after UCX has written its defaults.
    pub struct MdAttr: 536 {
        0 field_mask: u64,
        8 max_alloc: u64,
        16 max_reg: u64,
        24 flags: u64,
        32 reg_mem_types: u64,
        40 reg_nonblock_mem_types: u64,
        48 cache_mem_types: u64,
        56 gva_mem_types: u64,
        64 detect_mem_types: u64,
        72 alloc_mem_types: u64,
        80 access_mem_types: u64,
        88 dmabuf_mem_types: u64,
        96 reg_cost: LinearFunc,
        112 component_name: [c_char; 16],
        128 rkey_packed_size: usize,
        136 local_cpus: [u64; 16],
        264 exported_mkey_packed_size: usize,
        272 global_id: [c_char; 256],
        528 reg_alignment: usize,
    }

    /// `uct_md_mem_attr_v2_t`: the mask tells which fields UCX wants; the others are uninitialised. In 1.21
    /// it is `uct_md_mem_attr_t`, which ends before `mem_flags`; the mask never asks for these there.
    pub struct MemAttr: 56 {
        0 field_mask: u64,
        8 mem_type: MemoryType,
        12 sys_dev: SysDevice,
        16 base_address: *mut c_void,
        24 alloc_length: usize,
        32 dmabuf_fd: i32,
        40 dmabuf_offset: usize,
        48 mem_flags: u8,
    }
}

/// Bits of [`MemAttr::field_mask`].
#[allow(missing_docs)]
pub mod mem_attr_field {
    pub const MEM_TYPE: u64 = 1 << 0;
    pub const SYS_DEV: u64 = 1 << 1;
    pub const BASE_ADDRESS: u64 = 1 << 2;
    pub const ALLOC_LENGTH: u64 = 1 << 3;
    pub const DMABUF_FD: u64 = 1 << 4;
    pub const DMABUF_OFFSET: u64 = 1 << 5;
    pub const MEM_FLAGS: u64 = 1 << 6;
}

layout! {
    /// `uct_md_mem_reg_params_t`. In 1.21 it ends before `mem_type`, which the mask then does not name.
    pub struct MemRegParams: 40 {
        0 field_mask: u64,
        8 flags: u64,
        16 dmabuf_fd: i32,
        24 dmabuf_offset: usize,
        32 mem_type: MemoryType,
    }

    /// `uct_md_mem_dereg_params_t`.
    pub struct MemDeregParams: 32 {
        0 field_mask: u64,
        8 flags: u32,
        16 memh: *mut c_void,
        24 comp: *mut RawCompletion,
    }

    /// `uct_md_mem_attach_params_t`.
    pub struct MemAttachParams: 24 {
        0 field_mask: u64,
        8 flags: u64,
        16 mkey_size: usize,
    }
}

/// Registration flag: the caller does not want errors logged (`UCT_MD_MEM_FLAG_HIDE_ERRORS`).
pub const REG_FLAG_HIDE_ERRORS: u64 = 1 << 3;
