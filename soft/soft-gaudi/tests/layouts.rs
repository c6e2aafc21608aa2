//! Two definitions of the driver's C structures, the software card's and the binding's, against the contract.
//!
//! Each line has the size and the offsets of the contract (`hlthunk.h` and the kernel's uapi header, measured with a
//! C compiler), then checks both definitions: a mistake in one of them, or the same one in both, shows. Structures that
//! the plugin does not use only the card has.

use core::mem::offset_of;

use hl_thunk::sys;
use soft_gaudi::abi;

macro_rules! layout {
    ($name:ident, $size:literal: $($field:ident / $constant:ident = $offset:literal),* $(,)?) => {
        assert_eq!(size_of::<sys::$name>(), $size, "{} of the binding", stringify!($name));
        assert_eq!(size_of::<abi::$name>(), $size, "{} of the card", stringify!($name));
        $(
            let field = concat!(stringify!($name), ".", stringify!($field));
            assert_eq!(offset_of!(sys::$name, $field), $offset, "{field} of the binding");
            assert_eq!(abi::$name::$constant.offset(), $offset, "{field} of the card");
        )*
    };
}

macro_rules! card {
    ($name:ident, $size:literal: $($field:ident / $constant:ident = $offset:literal),* $(,)?) => {
        assert_eq!(size_of::<abi::$name>(), $size, "{}", stringify!($name));
        $(assert_eq!(abi::$name::$constant.offset(), $offset, "{}.{}", stringify!($name), stringify!($field));)*
    };
}

#[test]
fn structures_have_the_offsets_of_the_contract() {
    layout!(HwIpInfo, 336:
        sram_base_address / SRAM_BASE_ADDRESS = 0, dram_base_address / DRAM_BASE_ADDRESS = 8,
        dram_size / DRAM_SIZE = 16, sram_size / SRAM_SIZE = 24, num_of_events / NUM_OF_EVENTS = 28,
        device_id / DEVICE_ID = 32, cpld_version / CPLD_VERSION = 36, psoc_pci_pll_nr / PSOC_PCI_PLL_NR = 40,
        psoc_pci_pll_nf / PSOC_PCI_PLL_NF = 44, psoc_pci_pll_od / PSOC_PCI_PLL_OD = 48,
        psoc_pci_pll_div_factor / PSOC_PCI_PLL_DIV_FACTOR = 52, tpc_enabled_mask / TPC_ENABLED_MASK = 56,
        dram_enabled / DRAM_ENABLED = 58, cpucp_version / CPUCP_VERSION = 59, module_id / MODULE_ID = 188,
        card_name / CARD_NAME = 192, decoder_enabled_mask / DECODER_ENABLED_MASK = 208,
        mme_master_slave_mode / MME_MASTER_SLAVE_MODE = 212, tpc_enabled_mask_ext / TPC_ENABLED_MASK_EXT = 216,
        dram_page_size / DRAM_PAGE_SIZE = 224, first_available_interrupt_id / FIRST_AVAILABLE_INTERRUPT_ID = 232,
        edma_enabled_mask / EDMA_ENABLED_MASK = 236, server_type / SERVER_TYPE = 240,
        pdma_user_owned_ch_mask / PDMA_USER_OWNED_CH_MASK = 248,
        number_of_user_interrupts / NUMBER_OF_USER_INTERRUPTS = 256,
        device_mem_alloc_default_page_size / DEVICE_MEM_ALLOC_DEFAULT_PAGE_SIZE = 264,
        nic_ports_mask / NIC_PORTS_MASK = 272, interposer_version / INTERPOSER_VERSION = 280,
        substrate_version / SUBSTRATE_VERSION = 281, nic_ports_external_mask / NIC_PORTS_EXTERNAL_MASK = 288,
        mme_enabled_mask / MME_ENABLED_MASK = 296, odp_supported / ODP_SUPPORTED = 300,
        security_enabled / SECURITY_ENABLED = 301, revision_id / REVISION_ID = 302,
        tpc_interrupt_id / TPC_INTERRUPT_ID = 304,
        engine_core_interrupt_reg_addr / ENGINE_CORE_INTERRUPT_REG_ADDR = 312,
        rotator_enabled_mask / ROTATOR_ENABLED_MASK = 320, sched_arc_enabled_mask / SCHED_ARC_ENABLED_MASK = 324,
        reserved_dram_size / RESERVED_DRAM_SIZE = 328);
    layout!(DramUsageInfo, 16: dram_free_mem / DRAM_FREE_MEM = 0, ctx_dram_mem / CTX_DRAM_MEM = 8);
    layout!(OpenStatsInfo, 24: open_counter / OPEN_COUNTER = 0, last_open_period_ms / LAST_OPEN_PERIOD_MS = 8,
        is_compute_ctx_active / IS_COMPUTE_CTX_ACTIVE = 16, compute_ctx_in_release / COMPUTE_CTX_IN_RELEASE = 17);
    card!(ClkThrottleInfo, 40: reason / REASON = 0, timestamp_us / TIMESTAMP_US = 8,
        duration_ns / DURATION_NS = 24);
    card!(HwAsicStatus, 96: throttle / THROTTLE = 0, open_stats / OPEN_STATS = 40, power / POWER = 64,
        status / STATUS = 72, timestamp_sec / TIMESTAMP_SEC = 80, valid / VALID = 88);
    card!(EnginesIdleInfo, 40: is_idle / IS_IDLE = 0, mask / MASK = 8);
    card!(SyncManagerInfo, 16: first_available_sync_object / FIRST_AVAILABLE_SYNC_OBJECT = 0,
        first_available_monitor / FIRST_AVAILABLE_MONITOR = 4, first_available_cq / FIRST_AVAILABLE_CQ = 8,
        reserved / RESERVED = 12);
    card!(CsCounters, 96: total_out_of_mem / PAIRS = 0);
    card!(PciCountersInfo, 24: rx_throughput / RX_THROUGHPUT = 0, tx_throughput / TX_THROUGHPUT = 8,
        replay_cnt / REPLAY_CNT = 16);
    card!(PageFaultInfo, 32: timestamp / TIMESTAMP = 0, addr / ADDR = 8, engine_id / ENGINE_ID = 16,
        num_of_mappings / NUM_OF_MAPPINGS = 20, mappings_buf / MAPPINGS_BUF = 24);
    card!(CsTimeoutRecord, 16: timestamp / TIMESTAMP = 0, seq / SEQ = 8);
    card!(RazwiRecord, 280: timestamp / TIMESTAMP = 0, addr / ADDR = 8, engine_id / ENGINE_ID = 16,
        num_of_possible_engines / NUM_OF_POSSIBLE_ENGINES = 272, flags / FLAGS = 274);
    card!(UndefinedOpcodeRecord, 288: timestamp / TIMESTAMP = 0, cb_addr_streams / CB_ADDR_STREAMS = 8,
        cq_addr / CQ_ADDR = 264, cq_size / CQ_SIZE = 272, cb_addr_streams_len / CB_ADDR_STREAMS_LEN = 276,
        engine_id / ENGINE_ID = 280, stream_id / STREAM_ID = 284);
    card!(InfoArgs, 24: return_pointer / RETURN_POINTER = 0, return_size / RETURN_SIZE = 8, op / OP = 12,
        argument / ARGUMENT = 16, pad / PAD = 20);
    layout!(MemArgs, 40: fd_or_device_va / FD_OR_DEVICE_VA = 0, length / LENGTH = 8, op / OP = 24,
        flags / FLAGS = 28, ctx_id / CTX_ID = 32);
    card!(DebugArgs, 40: input_ptr / INPUT_PTR = 0, output_ptr / OUTPUT_PTR = 8, input_size / INPUT_SIZE = 16,
        output_size / OUTPUT_SIZE = 20, op / OP = 24, reg_idx / REG_IDX = 28, enable / ENABLE = 32,
        ctx_id / CTX_ID = 36);
    layout!(CsChunk, 64: cb_handle / CB_HANDLE = 0, queue_index / QUEUE_INDEX = 8, cb_size / CB_SIZE = 12,
        cs_chunk_flags / CS_CHUNK_FLAGS = 16, collective_engine_id / COLLECTIVE_ENGINE_ID = 20);
    layout!(CsIn, 32: chunks_restore / CHUNKS_RESTORE = 0, chunks_execute / CHUNKS_EXECUTE = 8,
        num_chunks_restore / NUM_CHUNKS_RESTORE = 16, num_chunks_execute / NUM_CHUNKS_EXECUTE = 20,
        flags / FLAGS = 24);
    layout!(CsOut, 16: seq / SEQ = 0, status / STATUS = 8,
        sob_count_before_submission / SOB_COUNT_BEFORE_SUBMISSION = 12);
    card!(WaitMultiCsIn, 24: seq / SEQ = 0, timeout_us / TIMEOUT_US = 8, seq_len / SEQ_LEN = 16);
    card!(WaitMultiCsOut, 12: status / STATUS = 0, seq_set / SEQ_SET = 4, completed / COMPLETED = 8);
    card!(SignalIn, 24: chunks_restore / CHUNKS_RESTORE = 0, num_chunks_restore / NUM_CHUNKS_RESTORE = 8,
        queue_index / QUEUE_INDEX = 12, flags / FLAGS = 16);
    card!(SignalOut, 24: seq / SEQ = 0, status / STATUS = 8, sob_base_addr_offset / SOB_BASE_ADDR_OFFSET = 12,
        sob_count_before_submission / SOB_COUNT_BEFORE_SUBMISSION = 16);
    card!(SigResIn, 8: queue_index / QUEUE_INDEX = 0, count / COUNT = 4);
    card!(ReserveSigHandle, 12: id / ID = 0, sob_base_addr_offset / SOB_BASE_ADDR_OFFSET = 4, count / COUNT = 8);
    card!(SigResOut, 16: handle / HANDLE = 0, status / STATUS = 12);
    card!(WaitForSignalData, 32: signal_seq / SIGNAL_SEQ = 0, signal_seq_nr / SIGNAL_SEQ_NR = 8,
        queue_index / QUEUE_INDEX = 12, flags / FLAGS = 16, collective_engine_id / COLLECTIVE_ENGINE_ID = 20,
        encaps_signal_offset / ENCAPS_SIGNAL_OFFSET = 24);
    card!(WaitIn, 32: chunks_restore / CHUNKS_RESTORE = 0, num_chunks_restore / NUM_CHUNKS_RESTORE = 8,
        wait_for_signal / WAIT_FOR_SIGNAL = 16, num_wait_for_signal / NUM_WAIT_FOR_SIGNAL = 24, flags / FLAGS = 28);
    card!(WaitOut, 16: seq / SEQ = 0, status / STATUS = 8);
}

macro_rules! constants {
    ($($name:ident = $value:literal),* $(,)?) => {
        $(
            assert_eq!(i128::from(sys::$name), $value, "{} of the binding", stringify!($name));
            assert_eq!(i128::from(abi::$name), $value, "{} of the card", stringify!($name));
        )*
    };
}

#[test]
fn constants_have_the_values_of_the_contract() {
    constants!(DEVICE_GAUDI = 2, DEVICE_INVALID = 3, DEVICE_DONT_CARE = 4, DEVICE_GAUDI2 = 5);
    constants!(DEVICE_GAUDI3 = 7, DEVICE_MAX = 9);
    constants!(PCI_ID_GAUDI = 0x1000, PCI_ID_GAUDI2 = 0x1020, PCI_ID_GAUDI3 = 0x1060);
    constants!(CS_CHUNK_USER_ALLOC_CB = 1, MAX_JOBS_PER_CS = 512, MAX_CB_SIZE = 2_097_120);
    constants!(WAIT_COMPLETED = 0, WAIT_BUSY = 1, WAIT_TIMEDOUT = 2, WAIT_ABORTED = 3);
    constants!(MEM_FORCE_HINT = 8, DMABUF_FLAGS = 0x80002, MEM_OP_REG_DMABUF_FD = 99);
    constants!(IOCTL_MEMORY = 0xc028_6444);
    assert_eq!(abi::IOCTL_INFO, 0xc018_6440);
}

#[test]
fn a_field_is_stored_at_its_offset_and_nowhere_else() {
    let out = abi::SigResOut::zeroed();
    let handle = abi::ReserveSigHandle::zeroed()
        .with(abi::ReserveSigHandle::ID, 0x0403_0201)
        .with(abi::ReserveSigHandle::COUNT, 0x0807_0605);
    let out = out.with(abi::SigResOut::HANDLE, handle).with(abi::SigResOut::STATUS, u32::MAX);
    let expected = [1, 2, 3, 4, 0, 0, 0, 0, 5, 6, 7, 8, 255, 255, 255, 255];
    assert_eq!(out.bytes(), &expected);
    assert_eq!(out.get(abi::SigResOut::HANDLE).get(abi::ReserveSigHandle::COUNT), 0x0807_0605);
}
