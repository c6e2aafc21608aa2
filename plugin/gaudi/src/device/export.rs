//! Exports dma-bufs of a device's memory: for NICs of this process, for other processes, or for a trial.

use std::os::fd::OwnedFd;

use hl_thunk::ExportCall;

use super::Device;
use crate::memory::{DeviceRange, Extent};
use crate::stats::Counter;
use crate::{DeviceAddr, Error, PAGE_SIZE, probes};

const EXPORTING: &str = "exporting a dma-buf";

/// What others do with a dma-buf.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DmabufUse {
    /// They may write to the memory.
    Written,
    /// They only test whether they can import it.
    Trial,
}

impl Device {
    /// Returns when the card's engines see what other devices have written to its memory so far: for work on the card that
    /// others submit. Our copies flush by themselves. `false`: the driver has no flush call.
    pub fn flush_peer_writes(&self) -> Result<bool, Error> {
        let peer_writes = self.open.engine.peer_writes();
        peer_writes.flush_now(&*self.open.backend, self.counts).map_err(|error| self.failed(error))
    }

    /// A dma-buf for `[addr, addr + len)`, which must lie in one live allocation. Returns a close-on-exec
    /// descriptor that the caller owns, and the offset of the range in the dma-buf.
    ///
    /// All allocations in one driver page share the driver's export, so the descriptor may reach
    /// beyond the range: hand it to a NIC of this process, not to another process.
    pub fn export(&self, addr: DeviceAddr, len: u64) -> Result<(OwnedFd, u64), Error> {
        self.export_with(addr, len, None)
    }

    /// As [`Device::export`], but made with the given one of the driver library's two calls, if any. Fails if
    /// the library does not have that call.
    pub fn export_with(
        &self,
        addr: DeviceAddr,
        len: u64,
        call: Option<ExportCall>,
    ) -> Result<(OwnedFd, u64), Error> {
        self.export_extent(addr, len, Extent::Page(call), DmabufUse::Written)
    }

    /// As [`Device::export`] or [`Device::export_with`], to test whether another device can import the dma-buf. Peers must
    /// not write through it: copies do not flush such writes.
    pub fn export_for_trial(
        &self,
        addr: DeviceAddr,
        len: u64,
        call: Option<ExportCall>,
    ) -> Result<(OwnedFd, u64), Error> {
        self.export_extent(addr, len, Extent::Page(call), DmabufUse::Trial)
    }

    /// A separate dma-buf for only `[addr, addr + len)`, rounded out to 4 KiB, which contains no other
    /// allocation's memory: for other processes. Freeing the allocation does not revoke it: the
    /// descriptor still gives access when the range belongs to another allocation. [`Device::share`]
    /// prevents that.
    pub fn export_alone(&self, addr: DeviceAddr, len: u64) -> Result<(OwnedFd, u64), Error> {
        self.export_extent(addr, len, Extent::Alone, DmabufUse::Written)
    }

    fn export_extent(
        &self,
        addr: DeviceAddr,
        len: u64,
        extent: Extent,
        by_others: DmabufUse,
    ) -> Result<(OwnedFd, u64), Error> {
        self.check_process(EXPORTING)?;
        let checked = self.check_own(addr, len, EXPORTING);
        let exported = checked.and_then(|entry| {
            let peer_writes = self.open.engine.peer_writes();
            peer_writes.permit_export(&*self.open.backend)?;
            let exported = probes::export(addr.0, len, || {
                if self.open.memory.exports(addr.0) {
                    self.open.memory.export(addr.0, len, extent)
                } else {
                    self.export_foreign(&entry, addr, len)
                }
            });
            if exported.is_ok() && by_others == DmabufUse::Written {
                peer_writes.exported(entry);
            }
            exported
        });
        match exported {
            Ok(_) => self.counts.add(Counter::DmabufDescriptors, 1),
            Err(ref error) => self.counts.dmabuf_failed(error),
        }
        exported.map_err(|error| self.failed(error))
    }

    /// A new dma-buf of memory that the application mapped. We keep no export of such memory: while one is
    /// open, the driver would refuse the application's unmap.
    fn export_foreign(
        &self,
        mapping: &DeviceRange,
        addr: DeviceAddr,
        len: u64,
    ) -> Result<(OwnedFd, u64), Error> {
        let offset = addr.0 - mapping.base;
        let start = offset / PAGE_SIZE * PAGE_SIZE;
        let covered = (offset + len).next_multiple_of(PAGE_SIZE) - start;
        let base = DeviceAddr(mapping.base);
        let fd = self.open.backend.export_foreign(base, start, covered, self.counts)?;
        Ok((fd, offset - start))
    }
}
