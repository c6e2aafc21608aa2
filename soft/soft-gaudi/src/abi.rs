//! The driver library's C structures and constants, by the offsets of the contract.
//!
//! `hl_thunk::sys` has the same structures as Rust types. These are written a second time, and in another way, so
//! that a mistake in a layout shows: a structure is an array of bytes here, and a field is an offset and a type.
//! `tests/layouts.rs` compares the two, and all tests of this crate call with the types of `hl_thunk::sys`.

use core::ffi::c_int;
use core::marker::PhantomData;

/// A value that C structures are made of.
pub trait Value: Copy {
    /// Its bytes.
    const SIZE: usize;
    /// Reads it from the first `SIZE` bytes.
    fn load(bytes: &[u8]) -> Self;
    /// Writes it to the first `SIZE` bytes.
    fn store(self, bytes: &mut [u8]);
}

macro_rules! value {
    ($($type:ty),*) => {
        $(impl Value for $type {
            const SIZE: usize = size_of::<$type>();

            fn load(bytes: &[u8]) -> Self {
                let mut value = [0; Self::SIZE];
                value.copy_from_slice(&bytes[..Self::SIZE]);
                Self::from_le_bytes(value)
            }

            fn store(self, bytes: &mut [u8]) {
                bytes[..Self::SIZE].copy_from_slice(&self.to_le_bytes());
            }
        })*
    };
}

value!(u8, u16, u32, u64, i32, i64);

impl<T: Value + Default, const N: usize> Value for [T; N] {
    const SIZE: usize = N * T::SIZE;

    fn load(bytes: &[u8]) -> Self {
        core::array::from_fn(|n| T::load(&bytes[n * T::SIZE..]))
    }

    fn store(self, bytes: &mut [u8]) {
        for (n, value) in self.into_iter().enumerate() {
            value.store(&mut bytes[n * T::SIZE..]);
        }
    }
}

/// A field of type `T` in structure `S`.
#[derive(Debug)]
pub struct Field<S, T> {
    offset: usize,
    of: PhantomData<fn() -> (S, T)>,
}

impl<S, T: Value> Field<S, T> {
    const fn new(offset: usize) -> Self {
        assert!(offset + T::SIZE <= size_of::<S>(), "a field beyond the end of its structure");
        Self { offset, of: PhantomData }
    }

    /// Bytes from the start of the structure.
    pub const fn offset(&self) -> usize {
        self.offset
    }
}

macro_rules! structure {
    ($(#[$doc:meta])* $name:ident, $size:literal: $($field:ident $type:ty = $offset:literal),* $(,)?) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name([u8; $size]);

        #[allow(missing_docs)]
        impl $name {
            $(pub const $field: Field<Self, $type> = Field::new($offset);)*

            /// All bytes zero.
            pub fn zeroed() -> Self {
                Self([0; $size])
            }

            /// The value of a field.
            pub fn get<T: Value>(&self, field: Field<Self, T>) -> T {
                T::load(&self.0[field.offset..])
            }

            /// The structure with another value in a field.
            #[must_use]
            pub fn with<T: Value>(mut self, field: Field<Self, T>, value: T) -> Self {
                value.store(&mut self.0[field.offset..]);
                self
            }

            /// Its bytes.
            pub fn bytes(&self) -> &[u8; $size] {
                &self.0
            }
        }

        impl Value for $name {
            const SIZE: usize = $size;

            fn load(bytes: &[u8]) -> Self {
                Self(<[u8; $size]>::load(bytes))
            }

            fn store(self, bytes: &mut [u8]) {
                self.0.store(bytes);
            }
        }
    };
}

structure! {
    /// `struct hlthunk_hw_ip_info`.
    HwIpInfo, 336:
    SRAM_BASE_ADDRESS u64 = 0, DRAM_BASE_ADDRESS u64 = 8, DRAM_SIZE u64 = 16, SRAM_SIZE u32 = 24,
    NUM_OF_EVENTS u32 = 28, DEVICE_ID u32 = 32, CPLD_VERSION u32 = 36, PSOC_PCI_PLL_NR u32 = 40,
    PSOC_PCI_PLL_NF u32 = 44, PSOC_PCI_PLL_OD u32 = 48, PSOC_PCI_PLL_DIV_FACTOR u32 = 52,
    TPC_ENABLED_MASK u16 = 56, DRAM_ENABLED u8 = 58, CPUCP_VERSION [u8; 128] = 59, MODULE_ID u32 = 188,
    CARD_NAME [u8; 16] = 192, DECODER_ENABLED_MASK u32 = 208, MME_MASTER_SLAVE_MODE u8 = 212,
    TPC_ENABLED_MASK_EXT u64 = 216, DRAM_PAGE_SIZE u64 = 224, FIRST_AVAILABLE_INTERRUPT_ID u16 = 232,
    EDMA_ENABLED_MASK u32 = 236, SERVER_TYPE u16 = 240, PDMA_USER_OWNED_CH_MASK u64 = 248,
    NUMBER_OF_USER_INTERRUPTS u16 = 256, DEVICE_MEM_ALLOC_DEFAULT_PAGE_SIZE u64 = 264,
    NIC_PORTS_MASK u64 = 272, INTERPOSER_VERSION u8 = 280, SUBSTRATE_VERSION u8 = 281,
    NIC_PORTS_EXTERNAL_MASK u64 = 288, MME_ENABLED_MASK u32 = 296, ODP_SUPPORTED u8 = 300,
    SECURITY_ENABLED u8 = 301, REVISION_ID u8 = 302, TPC_INTERRUPT_ID u16 = 304,
    ENGINE_CORE_INTERRUPT_REG_ADDR u64 = 312, ROTATOR_ENABLED_MASK u32 = 320,
    SCHED_ARC_ENABLED_MASK u32 = 324, RESERVED_DRAM_SIZE u64 = 328,
}

structure! {
    /// `struct hl_info_hw_ip_info`, the kernel's answer to the INFO ioctl.
    KernelHwIpInfo, 304:
    SRAM_BASE_ADDRESS u64 = 0, DRAM_BASE_ADDRESS u64 = 8, DRAM_SIZE u64 = 16, SRAM_SIZE u32 = 24,
    NUM_OF_EVENTS u32 = 28, DEVICE_ID u32 = 32, MODULE_ID u32 = 36, DECODER_ENABLED_MASK u32 = 40,
    FIRST_AVAILABLE_INTERRUPT_ID u16 = 44, SERVER_TYPE u16 = 46, TPC_ENABLED_MASK u8 = 68, DRAM_ENABLED u8 = 69,
    SECURITY_ENABLED u8 = 70, CPUCP_VERSION [u8; 128] = 72, CARD_NAME [u8; 16] = 200,
    TPC_ENABLED_MASK_EXT u64 = 216, DRAM_PAGE_SIZE u64 = 224, EDMA_ENABLED_MASK u32 = 232,
    NUMBER_OF_USER_INTERRUPTS u16 = 236, DEVICE_MEM_ALLOC_DEFAULT_PAGE_SIZE u64 = 248, REVISION_ID u8 = 277,
    TPC_INTERRUPT_ID u16 = 278, RESERVED_DRAM_SIZE u64 = 296,
}

structure! {
    /// `struct hlthunk_dram_usage_info`.
    DramUsageInfo, 16: DRAM_FREE_MEM u64 = 0, CTX_DRAM_MEM u64 = 8
}
structure! {
    /// `struct hlthunk_open_stats_info`.
    OpenStatsInfo, 24:
    OPEN_COUNTER u64 = 0, LAST_OPEN_PERIOD_MS u64 = 8, IS_COMPUTE_CTX_ACTIVE u8 = 16, COMPUTE_CTX_IN_RELEASE u8 = 17
}
structure! {
    /// `struct hlthunk_clk_throttle_info`.
    ClkThrottleInfo, 40: REASON u32 = 0, TIMESTAMP_US [u64; 2] = 8, DURATION_NS [u64; 2] = 24
}
structure! {
    /// `struct hlthunk_hw_asic_status`.
    HwAsicStatus, 96:
    THROTTLE ClkThrottleInfo = 0, OPEN_STATS OpenStatsInfo = 40, POWER u64 = 64, STATUS i32 = 72,
    TIMESTAMP_SEC u64 = 80, VALID u8 = 88,
}
structure! {
    /// `struct hlthunk_engines_idle_info`.
    EnginesIdleInfo, 40: IS_IDLE u32 = 0, MASK [u64; 4] = 8
}
structure! {
    /// `struct hlthunk_sync_manager_info`.
    SyncManagerInfo, 16:
    FIRST_AVAILABLE_SYNC_OBJECT u32 = 0, FIRST_AVAILABLE_MONITOR u32 = 4, FIRST_AVAILABLE_CQ u32 = 8, RESERVED u32 = 12
}
structure! {
    /// `struct hl_info_cs_counters`: pairs (in all, in this context) by cause of a rejection.
    CsCounters, 96: PAIRS [[u64; 2]; 6] = 0
}
structure! {
    /// `struct hlthunk_pci_counters_info`.
    PciCountersInfo, 24: RX_THROUGHPUT u64 = 0, TX_THROUGHPUT u64 = 8, REPLAY_CNT u32 = 16
}
structure! {
    /// `struct hlthunk_page_fault_info`.
    PageFaultInfo, 32:
    TIMESTAMP i64 = 0, ADDR u64 = 8, ENGINE_ID u16 = 16, NUM_OF_MAPPINGS u32 = 20, MAPPINGS_BUF u64 = 24
}
structure! {
    /// `struct hlthunk_event_record_cs_timeout`.
    CsTimeoutRecord, 16: TIMESTAMP i64 = 0, SEQ u64 = 8
}
structure! {
    /// `struct hlthunk_event_record_razwi_event`.
    RazwiRecord, 280:
    TIMESTAMP i64 = 0, ADDR u64 = 8, ENGINE_ID [u16; 128] = 16, NUM_OF_POSSIBLE_ENGINES u16 = 272, FLAGS u8 = 274
}
structure! {
    /// `struct hlthunk_event_record_undefined_opcode`.
    UndefinedOpcodeRecord, 288:
    TIMESTAMP i64 = 0, CB_ADDR_STREAMS [[u64; 8]; 4] = 8, CQ_ADDR u64 = 264, CQ_SIZE u32 = 272,
    CB_ADDR_STREAMS_LEN u32 = 276, ENGINE_ID u32 = 280, STREAM_ID u32 = 284,
}

structure! {
    /// `struct hl_info_args`, of the raw INFO ioctl.
    InfoArgs, 24: RETURN_POINTER u64 = 0, RETURN_SIZE u32 = 8, OP u32 = 12, ARGUMENT u32 = 16, PAD u32 = 20
}
structure! {
    /// `union hl_mem_args` as the import of a dma-buf uses it: a descriptor in, a device address out.
    MemArgs, 40: FD_OR_DEVICE_VA u64 = 0, LENGTH u64 = 8, OP u32 = 24, FLAGS u32 = 28, CTX_ID u32 = 32
}
structure! {
    /// `struct hl_debug_args`.
    DebugArgs, 40:
    INPUT_PTR u64 = 0, OUTPUT_PTR u64 = 8, INPUT_SIZE u32 = 16, OUTPUT_SIZE u32 = 20, OP u32 = 24, REG_IDX u32 = 28,
    ENABLE u32 = 32, CTX_ID u32 = 36,
}

structure! {
    /// `struct hl_cs_chunk`.
    CsChunk, 64:
    CB_HANDLE u64 = 0, QUEUE_INDEX u32 = 8, CB_SIZE u32 = 12, CS_CHUNK_FLAGS u32 = 16, COLLECTIVE_ENGINE_ID u32 = 20
}
structure! {
    /// `struct hlthunk_cs_in`.
    CsIn, 32:
    CHUNKS_RESTORE u64 = 0, CHUNKS_EXECUTE u64 = 8, NUM_CHUNKS_RESTORE u32 = 16, NUM_CHUNKS_EXECUTE u32 = 20,
    FLAGS u32 = 24,
}
structure! {
    /// `struct hlthunk_cs_out`.
    CsOut, 16: SEQ u64 = 0, STATUS u32 = 8, SOB_COUNT_BEFORE_SUBMISSION u16 = 12
}
structure! {
    /// `struct hlthunk_wait_multi_cs_in`.
    WaitMultiCsIn, 24: SEQ u64 = 0, TIMEOUT_US u64 = 8, SEQ_LEN u32 = 16
}
structure! {
    /// `struct hlthunk_wait_multi_cs_out`.
    WaitMultiCsOut, 12: STATUS u32 = 0, SEQ_SET u32 = 4, COMPLETED u8 = 8
}
structure! {
    /// `struct hlthunk_signal_in`.
    SignalIn, 24: CHUNKS_RESTORE u64 = 0, NUM_CHUNKS_RESTORE u32 = 8, QUEUE_INDEX u32 = 12, FLAGS u32 = 16
}
structure! {
    /// `struct hlthunk_signal_out`.
    SignalOut, 24:
    SEQ u64 = 0, STATUS u32 = 8, SOB_BASE_ADDR_OFFSET u32 = 12, SOB_COUNT_BEFORE_SUBMISSION u16 = 16
}
structure! {
    /// `struct hlthunk_sig_res_in`.
    SigResIn, 8: QUEUE_INDEX u32 = 0, COUNT u32 = 4
}
structure! {
    /// `struct reserve_sig_handle`.
    ReserveSigHandle, 12: ID u32 = 0, SOB_BASE_ADDR_OFFSET u32 = 4, COUNT u32 = 8
}
structure! {
    /// `struct hlthunk_sig_res_out`.
    SigResOut, 16: HANDLE ReserveSigHandle = 0, STATUS u32 = 12
}
structure! {
    /// `struct hlthunk_wait_for_signal_data`.
    WaitForSignalData, 32:
    SIGNAL_SEQ u64 = 0, SIGNAL_SEQ_NR u32 = 8, QUEUE_INDEX u32 = 12, FLAGS u32 = 16, COLLECTIVE_ENGINE_ID u32 = 20,
    ENCAPS_SIGNAL_OFFSET u32 = 24,
}
structure! {
    /// `struct hlthunk_wait_in`.
    WaitIn, 32:
    CHUNKS_RESTORE u64 = 0, NUM_CHUNKS_RESTORE u32 = 8, WAIT_FOR_SIGNAL u64 = 16, NUM_WAIT_FOR_SIGNAL u32 = 24,
    FLAGS u32 = 28,
}
structure! {
    /// `struct hlthunk_wait_out`.
    WaitOut, 16: SEQ u64 = 0, STATUS u32 = 8
}

/// `enum hlthunk_device_name`.
pub type DeviceName = c_int;
/// `HLTHUNK_DEVICE_GAUDI`.
pub const DEVICE_GAUDI: DeviceName = 2;
/// `HLTHUNK_DEVICE_INVALID`.
pub const DEVICE_INVALID: DeviceName = 3;
/// `HLTHUNK_DEVICE_DONT_CARE`: matches every device.
pub const DEVICE_DONT_CARE: DeviceName = 4;
/// `HLTHUNK_DEVICE_GAUDI2`.
pub const DEVICE_GAUDI2: DeviceName = 5;
/// `HLTHUNK_DEVICE_GAUDI3`.
pub const DEVICE_GAUDI3: DeviceName = 7;
/// `HLTHUNK_DEVICE_MAX`.
pub const DEVICE_MAX: DeviceName = 9;

/// PCI device ids.
pub const PCI_ID_GAUDI: u32 = 0x1000;
/// See `PCI_ID_GAUDI`.
pub const PCI_ID_GAUDI2: u32 = 0x1020;
/// See `PCI_ID_GAUDI`.
pub const PCI_ID_GAUDI3: u32 = 0x1060;

/// `HL_CS_CHUNK_FLAGS_USER_ALLOC_CB`.
pub const CS_CHUNK_USER_ALLOC_CB: u32 = 1;
/// `HL_MAX_JOBS_PER_CS`.
pub const MAX_JOBS_PER_CS: u32 = 512;
/// `HL_MAX_CB_SIZE`.
pub const MAX_CB_SIZE: u32 = 2_097_120;

/// `HL_WAIT_CS_STATUS_*`.
pub const WAIT_COMPLETED: u32 = 0;
/// See `WAIT_COMPLETED`.
pub const WAIT_BUSY: u32 = 1;
/// See `WAIT_COMPLETED`.
pub const WAIT_TIMEDOUT: u32 = 2;
/// See `WAIT_COMPLETED`.
pub const WAIT_ABORTED: u32 = 3;

/// `HL_MEM_FORCE_HINT`.
pub const MEM_FORCE_HINT: u32 = 0x8;
/// `O_RDWR | O_CLOEXEC`.
pub const DMABUF_FLAGS: u32 = 0x80002;
/// `DRM_IOCTL_HL_MEMORY`.
pub const IOCTL_MEMORY: u64 = 0xc028_6444;
/// `DRM_IOCTL_HL_INFO`.
pub const IOCTL_INFO: u64 = 0xc018_6440;
/// `HL_MEM_OP_REG_DMABUF_FD` of the out-of-tree driver.
pub const MEM_OP_REG_DMABUF_FD: u32 = 99;
