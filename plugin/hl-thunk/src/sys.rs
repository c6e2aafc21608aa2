//! The C side of the driver library: structures and constants exactly as `hlthunk.h` and the
//! kernel's `habanalabs_accel.h` lay them out, and nothing else.
//!
//! The software device (`soft-gaudi`) has definitions of its own, of structures as of packets, so that there are
//! two independent readings of the same specification; `soft-gaudi/tests/layouts.rs` compares them. Layouts
//! are asserted at compile time at the end of the file.

use core::ffi::{c_int, c_void};
use core::mem::{offset_of, size_of};

/// `enum hlthunk_device_name`, open-ended: newer libraries add values.
pub type DeviceName = c_int;
/// First-generation Gaudi.
pub const DEVICE_GAUDI: DeviceName = 2;
/// Not a device the library knows.
pub const DEVICE_INVALID: DeviceName = 3;
/// Matches every device.
pub const DEVICE_DONT_CARE: DeviceName = 4;
/// Second-generation Gaudi.
pub const DEVICE_GAUDI2: DeviceName = 5;
/// Third-generation Gaudi.
pub const DEVICE_GAUDI3: DeviceName = 7;
/// First value that `hlthunk_get_device_count` refuses.
pub const DEVICE_MAX: DeviceName = 9;

/// PCI device id of a Gaudi.
pub const PCI_ID_GAUDI: u32 = 0x1000;
/// PCI device id of a Gaudi with secured firmware.
pub const PCI_ID_GAUDI_SEC: u32 = 0x1010;
/// PCI device id of a Gaudi2.
pub const PCI_ID_GAUDI2: u32 = 0x1020;
/// PCI device id of an HL-288, a Gaudi2 as a PCIe card.
pub const PCI_ID_HL288: u32 = 0x1021;
/// PCI device id of a Gaudi3.
pub const PCI_ID_GAUDI3: u32 = 0x1060;
/// PCI device id of an HL-338, a Gaudi3 as a PCIe card.
pub const PCI_ID_HL338: u32 = 0x1063;

/// `struct hlthunk_hw_ip_info`, with the reserved fields under the names newer headers give them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct HwIpInfo {
    pub sram_base_address: u64,
    pub dram_base_address: u64,
    pub dram_size: u64,
    pub sram_size: u32,
    pub num_of_events: u32,
    pub device_id: u32,
    pub cpld_version: u32,
    pub psoc_pci_pll_nr: u32,
    pub psoc_pci_pll_nf: u32,
    pub psoc_pci_pll_od: u32,
    pub psoc_pci_pll_div_factor: u32,
    pub tpc_enabled_mask: u16,
    pub dram_enabled: u8,
    pub cpucp_version: [u8; 128],
    pub module_id: u32,
    pub card_name: [u8; 16],
    pub decoder_enabled_mask: u32,
    pub mme_master_slave_mode: u8,
    pub tpc_enabled_mask_ext: u64,
    pub dram_page_size: u64,
    pub first_available_interrupt_id: u16,
    pub edma_enabled_mask: u32,
    pub server_type: u16,
    pub pdma_user_owned_ch_mask: u64,
    pub number_of_user_interrupts: u16,
    pub device_mem_alloc_default_page_size: u64,
    pub nic_ports_mask: u64,
    pub interposer_version: u8,
    pub substrate_version: u8,
    pub nic_ports_external_mask: u64,
    pub mme_enabled_mask: u32,
    pub odp_supported: u8,
    pub security_enabled: u8,
    pub revision_id: u8,
    pub tpc_interrupt_id: u16,
    pub engine_core_interrupt_reg_addr: u64,
    pub rotator_enabled_mask: u32,
    pub sched_arc_enabled_mask: u32,
    pub reserved_dram_size: u64,
}

/// `struct hlthunk_dram_usage_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct DramUsageInfo {
    pub dram_free_mem: u64,
    pub ctx_dram_mem: u64,
}

/// `struct hlthunk_open_stats_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct OpenStatsInfo {
    pub open_counter: u64,
    pub last_open_period_ms: u64,
    pub is_compute_ctx_active: u8,
    pub compute_ctx_in_release: u8,
}

/// `struct hl_cs_chunk`: one command buffer of a submission.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CsChunk {
    /// Command-buffer handle, or a device address with [`CS_CHUNK_USER_ALLOC_CB`].
    pub cb_handle: u64,
    /// Hardware queue.
    pub queue_index: u32,
    /// Bytes of the buffer that hold packets.
    pub cb_size: u32,
    /// `HL_CS_CHUNK_FLAGS_*`.
    pub cs_chunk_flags: u32,
    /// Used by collective waits only.
    pub collective_engine_id: u32,
    /// Must be zero.
    pub pad: [u32; 10],
}

/// The chunk's `cb_handle` is a device address, not a driver handle.
pub const CS_CHUNK_USER_ALLOC_CB: u32 = 1;
/// If the submission times out, the driver does not reset the card.
pub const CS_SKIP_RESET_ON_TIMEOUT: u32 = 0x400;
/// Most chunks one submission may have.
pub const MAX_JOBS_PER_CS: u32 = 512;
/// Largest command buffer the driver allocates.
pub const MAX_CB_SIZE: u32 = 0x20_0000 - 32;

/// `struct hlthunk_cs_in`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct CsIn {
    pub chunks_restore: *mut c_void,
    pub chunks_execute: *mut c_void,
    pub num_chunks_restore: u32,
    pub num_chunks_execute: u32,
    pub flags: u32,
}

/// `struct hlthunk_cs_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct CsOut {
    pub seq: u64,
    pub status: u32,
    pub sob_count_before_submission: u16,
}

/// `HL_WAIT_CS_STATUS_COMPLETED`.
pub const WAIT_COMPLETED: u32 = 0;
/// `HL_WAIT_CS_STATUS_BUSY`.
pub const WAIT_BUSY: u32 = 1;
/// `HL_WAIT_CS_STATUS_TIMEDOUT`.
pub const WAIT_TIMEDOUT: u32 = 2;
/// `HL_WAIT_CS_STATUS_ABORTED`.
pub const WAIT_ABORTED: u32 = 3;

/// Device status: ready for work.
pub const STATUS_OPERATIONAL: c_int = 0;

/// `HL_MEM_FORCE_HINT`: map exactly at the hint or fail.
pub const MEM_FORCE_HINT: u32 = 0x8;
/// The only flags `hlthunk_device_mapped_memory_export_dmabuf_fd` takes.
pub const DMABUF_FLAGS: u32 = (libc::O_RDWR | libc::O_CLOEXEC) as u32;

/// `DRM_IOCTL_HL_MEMORY`, needed raw only for operations the library does not wrap.
pub const IOCTL_MEMORY: libc::c_ulong = 0xc028_6444;
/// `HL_MEM_OP_REG_DMABUF_FD` of the out-of-tree driver: import a dma-buf.
pub const MEM_OP_REG_DMABUF_FD: u32 = 99;

/// `union hl_mem_args` as the dma-buf import uses it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct MemArgs {
    /// In: the dma-buf descriptor. Out: the device virtual address.
    pub fd_or_device_va: u64,
    /// Bytes to map.
    pub length: u64,
    /// Unused by the import.
    pub reserved: u64,
    /// `HL_MEM_OP_*`.
    pub op: u32,
    /// `HL_MEM_*`.
    pub flags: u32,
    /// Context id, 0.
    pub ctx_id: u32,
    /// Used by timestamp allocation only.
    pub num_of_elements: u32,
}

macro_rules! assert_layout {
    ($type:ty, $size:expr $(, $field:ident @ $offset:expr)* $(,)?) => {
        const _: () = assert!(size_of::<$type>() == $size);
        $(const _: () = assert!(offset_of!($type, $field) == $offset);)*
    };
}

assert_layout!(HwIpInfo, 336,
    sram_base_address @ 0, dram_base_address @ 8, dram_size @ 16, sram_size @ 24,
    num_of_events @ 28, device_id @ 32, cpld_version @ 36, psoc_pci_pll_nr @ 40,
    psoc_pci_pll_div_factor @ 52, tpc_enabled_mask @ 56, dram_enabled @ 58, cpucp_version @ 59,
    module_id @ 188, card_name @ 192, decoder_enabled_mask @ 208, mme_master_slave_mode @ 212,
    tpc_enabled_mask_ext @ 216, dram_page_size @ 224, first_available_interrupt_id @ 232,
    edma_enabled_mask @ 236, server_type @ 240, pdma_user_owned_ch_mask @ 248,
    number_of_user_interrupts @ 256, device_mem_alloc_default_page_size @ 264,
    nic_ports_mask @ 272, interposer_version @ 280, substrate_version @ 281,
    nic_ports_external_mask @ 288, mme_enabled_mask @ 296, odp_supported @ 300,
    security_enabled @ 301, revision_id @ 302, tpc_interrupt_id @ 304,
    engine_core_interrupt_reg_addr @ 312, rotator_enabled_mask @ 320,
    sched_arc_enabled_mask @ 324, reserved_dram_size @ 328);
assert_layout!(DramUsageInfo, 16, dram_free_mem @ 0, ctx_dram_mem @ 8);
assert_layout!(OpenStatsInfo, 24, open_counter @ 0, last_open_period_ms @ 8,
    is_compute_ctx_active @ 16, compute_ctx_in_release @ 17);
assert_layout!(CsChunk, 64, cb_handle @ 0, queue_index @ 8, cb_size @ 12, cs_chunk_flags @ 16,
    collective_engine_id @ 20, pad @ 24);
assert_layout!(CsIn, 32, chunks_restore @ 0, chunks_execute @ 8, num_chunks_restore @ 16,
    num_chunks_execute @ 20, flags @ 24);
assert_layout!(CsOut, 16, seq @ 0, status @ 8, sob_count_before_submission @ 12);
assert_layout!(MemArgs, 40, fd_or_device_va @ 0, length @ 8, op @ 24, flags @ 28, ctx_id @ 32);
