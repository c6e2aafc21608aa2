//! Memory domains: operations, attributes and parameters.

use core::ffi::{c_char, c_void};

use super::{LinearFunc, MemoryType, RawCompletion, RawComponent, SysDevice, assert_layout};

/// Slots of the operation table handed to UCX: 1.22 reads 12, 1.23 reads 13.
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

/// `uct_md_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawMd {
    pub ops: *const MdOps,
    pub component: *mut RawComponent,
}
assert_layout!(RawMd, 16, ops @ 0, component @ 8);

/// Flags of a memory domain.
#[allow(missing_docs)]
pub mod md_flag {
    pub const ALLOC: u64 = 1 << 0;
    pub const REG: u64 = 1 << 1;
    pub const NEED_MEMH: u64 = 1 << 2;
    pub const NEED_RKEY: u64 = 1 << 3;
    pub const RKEY_PTR: u64 = 1 << 6;
    pub const INVALIDATE: u64 = 1 << 8;
    pub const EXPORTED_MKEY: u64 = 1 << 9;
    pub const REG_DMABUF: u64 = 1 << 10;
    pub const INVALIDATE_RMA: u64 = 1 << 11;
    pub const INVALIDATE_AMO: u64 = 1 << 12;
}

/// `uct_md_attr_v2_t` up to the fields a plugin sets. UCX owns the structure and it may be longer
/// than this: only ever used behind UCX's pointer, after UCX's own defaults were written.
#[repr(C)]
#[allow(missing_docs)]
pub struct MdAttr {
    pub field_mask: u64,
    pub max_alloc: u64,
    pub max_reg: u64,
    pub flags: u64,
    pub reg_mem_types: u64,
    pub reg_nonblock_mem_types: u64,
    pub cache_mem_types: u64,
    pub gva_mem_types: u64,
    pub detect_mem_types: u64,
    pub alloc_mem_types: u64,
    pub access_mem_types: u64,
    pub dmabuf_mem_types: u64,
    pub reg_cost: LinearFunc,
    pub component_name: [c_char; 16],
    pub rkey_packed_size: usize,
    pub local_cpus: [u64; 16],
    pub exported_mkey_packed_size: usize,
    pub global_id: [c_char; 256],
    pub reg_alignment: usize,
    pub required_mem_flags: u8,
}
assert_layout!(MdAttr, 544, max_alloc @ 8, max_reg @ 16, flags @ 24, reg_mem_types @ 32,
    cache_mem_types @ 48, detect_mem_types @ 64, alloc_mem_types @ 72, access_mem_types @ 80,
    dmabuf_mem_types @ 88, reg_cost @ 96, component_name @ 112, rkey_packed_size @ 128,
    local_cpus @ 136, exported_mkey_packed_size @ 264, global_id @ 272, reg_alignment @ 528,
    required_mem_flags @ 536);

/// `uct_md_mem_attr_v2_t`: the mask tells which fields UCX wants; the others are uninitialised.
#[repr(C)]
#[allow(missing_docs)]
pub struct MemAttr {
    pub field_mask: u64,
    pub mem_type: MemoryType,
    pub sys_dev: SysDevice,
    pub base_address: *mut c_void,
    pub alloc_length: usize,
    pub dmabuf_fd: i32,
    pub dmabuf_offset: usize,
    pub mem_flags: u8,
}
assert_layout!(MemAttr, 56, field_mask @ 0, mem_type @ 8, sys_dev @ 12, base_address @ 16,
    alloc_length @ 24, dmabuf_fd @ 32, dmabuf_offset @ 40, mem_flags @ 48);

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

/// `uct_md_mem_reg_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct MemRegParams {
    pub field_mask: u64,
    pub flags: u64,
    pub dmabuf_fd: i32,
    pub dmabuf_offset: usize,
    pub mem_type: MemoryType,
}
assert_layout!(MemRegParams, 40, field_mask @ 0, flags @ 8, dmabuf_fd @ 16, dmabuf_offset @ 24,
    mem_type @ 32);

/// `uct_md_mem_dereg_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct MemDeregParams {
    pub field_mask: u64,
    pub flags: u32,
    pub memh: *mut c_void,
    pub comp: *mut RawCompletion,
}
assert_layout!(MemDeregParams, 32, field_mask @ 0, flags @ 8, memh @ 16, comp @ 24);

/// `uct_md_mem_attach_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct MemAttachParams {
    pub field_mask: u64,
    pub flags: u64,
    pub mkey_size: usize,
}
assert_layout!(MemAttachParams, 24, flags @ 8, mkey_size @ 16);

/// Registration flag: the caller does not want errors logged (`UCT_MD_MEM_FLAG_HIDE_ERRORS`).
pub const REG_FLAG_HIDE_ERRORS: u64 = 1 << 3;
