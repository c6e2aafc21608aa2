//! The format of the page: a header, the names of the counters, and one slot of numbers per card.
//!
//! It describes itself. A reader takes sizes and offsets from the header and finds counters by name, so that counters
//! can be added without a new version. Everything is in the machine's own byte order, at multiples of its size.
//! `docs/design/statistics-page.md` has the tables.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use crate::PAGE_SIZE;

/// First bytes of a page; written last, so that a page without them is not finished.
pub(super) const MAGIC: [u8; 8] = *b"ucxgstat";
/// Changes when the header or the meaning of a field in it changes, not when counters are added.
pub(super) const VERSION: u32 = 1;
/// Name of the memory file, as `/proc/PID/fd` shows it after `/memfd:`.
pub(super) const FILE_NAME: &str = "ucx-gaudi-stats";

/// The page.
#[repr(C, align(64))]
pub(super) struct Page {
    pub(super) header: Header,
    pub(super) descriptions: [Description; NAMES.len()],
    /// The first for what belongs to no card, or to cards beyond the last slot; the others for one card each.
    pub(super) slots: [Slot; SLOTS],
}

#[repr(C)]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) version: u32,
    pub(super) header_len: u32,
    pub(super) size: u64,
    pub(super) pid: u32,
    pub(super) counters: u32,
    pub(super) start_time: u64,
    pub(super) created: u64,
    pub(super) descriptions_at: u32,
    pub(super) description_len: u32,
    pub(super) slots_at: u32,
    pub(super) slot_len: u32,
    pub(super) slots: u32,
    pub(super) slot_header_len: u32,
    pub(super) reserved: [u64; 7],
}

/// The description of a counter.
#[repr(C)]
pub(super) struct Description {
    pub(super) name: [u8; 40],
    pub(super) kind: u32,
    pub(super) unit: u32,
}

/// Whole cache lines, so that two cards never share one.
#[repr(C, align(64))]
pub(super) struct Slot {
    /// 0: free.
    pub(super) state: AtomicU32,
    pub(super) index: AtomicU32,
    pub(super) bus_id: [AtomicU8; 32],
    reserved: [u64; 3],
    pub(super) counters: [AtomicU64; NAMES.len()],
}

impl Slot {
    /// States: what belongs to no card, and a card.
    pub(super) const PROCESS: u32 = 1;
    pub(super) const CARD: u32 = 2;
    /// Bytes in front of the counters.
    pub(super) const HEADER_LEN: usize = offset_of!(Slot, counters);
}

pub(super) const SLOTS: usize = 65;
pub(super) const SIZE: usize = size_of::<Page>().next_multiple_of(PAGE_SIZE as usize);

/// How a counter behaves.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(super) enum Kind {
    /// Only grows.
    Sum = 1,
    /// How much there is at the moment.
    Now = 2,
    /// The most there ever was at one time.
    Most = 3,
}

/// What a counter counts.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(super) enum Unit {
    /// Things.
    Number = 1,
    /// Bytes.
    Bytes = 2,
}

macro_rules! counters {
    ($($counter:ident $name:literal $kind:ident $unit:ident,)*) => {
        /// Every counter, in the order of the page.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub(crate) enum Counter { $($counter),* }

        /// The names of all counters, in the order of the page.
        pub const NAMES: &[&str] = &[$($name),*];

        pub(super) const KINDS: [(Kind, Unit); NAMES.len()] = [$((Kind::$kind, Unit::$unit)),*];
    };
}

counters! {
    Opens "opens" Sum Number,
    Open "open" Now Number,

    Allocations "allocations" Sum Number,
    Frees "frees" Sum Number,
    AllocationsLive "allocations_live" Now Number,
    AllocatedBytes "allocated_bytes" Now Bytes,
    ReservedBytes "reserved_bytes" Now Bytes,

    DmabufExports "dmabuf_exports" Sum Number,
    DmabufDescriptors "dmabuf_descriptors" Sum Number,
    DmabufLive "dmabuf_live" Now Number,
    DmabufBytes "dmabuf_bytes" Now Bytes,
    DmabufImports "dmabuf_imports" Sum Number,
    DmabufImportsLive "dmabuf_imports_live" Now Number,
    DmabufImportsBytes "dmabuf_imports_bytes" Now Bytes,
    PeerWriteFlushes "peer_write_flushes" Sum Number,
    DmabufFailuresRange "dmabuf_failures_range" Sum Number,
    DmabufFailuresUnsupported "dmabuf_failures_unsupported" Sum Number,
    DmabufFailuresResources "dmabuf_failures_resources" Sum Number,
    DmabufFailuresPermission "dmabuf_failures_permission" Sum Number,
    DmabufFailuresDeviceLost "dmabuf_failures_device_lost" Sum Number,
    DmabufFailuresRefused "dmabuf_failures_refused" Sum Number,

    IpcShares "ipc_shares" Sum Number,
    IpcSharesLive "ipc_shares_live" Now Number,
    IpcSharesBytes "ipc_shares_bytes" Now Bytes,
    IpcQuarantinedBytes "ipc_quarantined_bytes" Now Bytes,
    IpcLeasesGranted "ipc_leases_granted" Sum Number,
    IpcPeersRefusedUser "ipc_peers_refused_user" Sum Number,
    IpcPeersRefusedKey "ipc_peers_refused_key" Sum Number,
    IpcPeersRefusedMalformed "ipc_peers_refused_malformed" Sum Number,
    IpcPeersRefusedResources "ipc_peers_refused_resources" Sum Number,
    IpcHandlesOpened "ipc_handles_opened" Sum Number,
    IpcHandlesClosed "ipc_handles_closed" Sum Number,
    IpcHandlesLive "ipc_handles_live" Now Number,
    IpcHandlesBytes "ipc_handles_bytes" Now Bytes,
    IpcCacheHits "ipc_cache_hits" Sum Number,
    IpcCacheMisses "ipc_cache_misses" Sum Number,
    IpcCacheEvictions "ipc_cache_evictions" Sum Number,
    IpcDescriptorsReceived "ipc_descriptors_received" Sum Number,
    IpcKeysRefused "ipc_keys_refused" Sum Number,
    IpcRefusedEnded "ipc_refused_ended" Sum Number,
    IpcRefusedWithdrawn "ipc_refused_withdrawn" Sum Number,
    IpcRefusedUnreachable "ipc_refused_unreachable" Sum Number,
    IpcRefusedMismatch "ipc_refused_mismatch" Sum Number,
    IpcRelayRequests "ipc_relay_requests" Sum Number,
    IpcRelayBytes "ipc_relay_bytes" Sum Bytes,
    IpcRelayRefused "ipc_relay_refused" Sum Number,

    Pins "pins" Sum Number,
    Unpins "unpins" Sum Number,
    PinnedBytes "pinned_bytes" Now Bytes,
    PinsRefused "pins_refused" Sum Number,

    RegCacheHits "reg_cache_hits" Sum Number,
    RegCacheMisses "reg_cache_misses" Sum Number,
    RegCacheEvictions "reg_cache_evictions" Sum Number,
    RegCacheInvalidations "reg_cache_invalidations" Sum Number,
    RegCacheRegions "reg_cache_regions" Now Number,
    RegCacheBytes "reg_cache_bytes" Now Bytes,

    Submissions "submissions" Sum Number,
    InFlight "in_flight" Now Number,
    InFlightMost "in_flight_max" Most Number,
    CopiesBusy "copies_busy" Sum Number,
    DmaErrors "dma_errors" Sum Number,

    HostToDeviceOperations "h2d_operations" Sum Number,
    HostToDeviceBytes "h2d_bytes" Sum Bytes,
    DeviceToHostOperations "d2h_operations" Sum Number,
    DeviceToHostBytes "d2h_bytes" Sum Bytes,
    DeviceToDeviceOperations "d2d_operations" Sum Number,
    DeviceToDeviceBytes "d2d_bytes" Sum Bytes,
    CrossCardOperations "cross_card_operations" Sum Number,
    CrossCardBytes "cross_card_bytes" Sum Bytes,
    FillOperations "fill_operations" Sum Number,
    FillBytes "fill_bytes" Sum Bytes,
    PinnedOperations "pinned_operations" Sum Number,
    PinnedCopyBytes "pinned_copy_bytes" Sum Bytes,
    BouncedOperations "bounced_operations" Sum Number,
    BouncedCopyBytes "bounced_copy_bytes" Sum Bytes,
    StagedOperations "staged_operations" Sum Number,
    StagedCopyBytes "staged_copy_bytes" Sum Bytes,
    ImportedOperations "imported_operations" Sum Number,
    ImportedCopyBytes "imported_copy_bytes" Sum Bytes,

    FailuresDeviceNotFound "failures_device_not_found" Sum Number,
    FailuresOutOfMemory "failures_out_of_memory" Sum Number,
    FailuresInvalidParams "failures_invalid_params" Sum Number,
    FailuresDeviceBusy "failures_device_busy" Sum Number,
    FailuresDmaFailed "failures_dma_failed" Sum Number,
    FailuresTimeout "failures_timeout" Sum Number,
    FailuresPermissionDenied "failures_permission_denied" Sum Number,
    FailuresChannelFailed "failures_channel_failed" Sum Number,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_fit() {
        let mut names = NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), NAMES.len());
        for name in NAMES {
            assert!(name.len() < 40, "{name}");
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || b"_2".contains(&byte)));
        }
    }

    /// As docs/design/statistics-page.md has it.
    #[test]
    fn the_layout_is_the_documented_one() {
        assert_eq!((size_of::<Header>(), offset_of!(Page, descriptions)), (128, 128));
        assert_eq!((offset_of!(Header, created), offset_of!(Header, slot_header_len)), (40, 68));
        assert_eq!((size_of::<Description>(), offset_of!(Description, unit)), (48, 44));
        assert_eq!((Slot::HEADER_LEN, offset_of!(Slot, bus_id)), (64, 8));
        assert_eq!((offset_of!(Page, slots) % 64, size_of::<Slot>() % 64), (0, 0));
    }

    #[test]
    fn the_documentation_lists_every_counter_and_no_other() {
        let text = include_str!("../../../../../docs/statistics.md");
        let table = text.split("## Counters").nth(1).and_then(|rest| rest.split("\n## ").next());
        let rows = table.expect("a chapter on counters").lines();
        let listed: Vec<&str> =
            rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next()).collect();
        assert_eq!(listed, NAMES);
    }
}
