//! A card that this process owns: memory, copies and exports.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::{
    Allocation, DeviceAddr, DeviceInfo, Error, Segment, Side, SubmitError, Transfer, Window,
};

/// Identifies one opening of a card in this process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub(crate) u32);

/// How much memory a device has and how it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes of device memory that can be allocated at all.
    pub total: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Bytes in live allocations (rounded to the pool's granule).
    pub used: u64,
    /// Number of live allocations.
    pub allocations: usize,
}

/// An open card.
///
/// It is shared: as long as a handle or an allocation lives, the card is ours. When the last goes,
/// the card is closed, so that another process can have it.
#[derive(Debug)]
pub struct Device {
    info: DeviceInfo,
    id: DeviceId,
}

fn unfinished(operation: &'static str) -> Error {
    Error::unsupported(operation, "not built yet", "")
}

impl Device {
    /// Which card this is.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// This opening of the card.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The addresses this device's memory has.
    pub fn window(&self) -> Window {
        Window { start: DeviceAddr(0), len: 0, device: self.id, info: self.info.clone() }
    }

    /// How much memory there is.
    pub fn memory(&self) -> MemoryInfo {
        MemoryInfo::default()
    }

    /// Allocates `len` bytes (not zero) aligned to `align` (a power of two; at least 4 KiB is
    /// always given).
    pub fn alloc(self: &Arc<Self>, len: u64, align: u64) -> Result<Allocation, Error> {
        let _ = (len, align);
        Err(unfinished("allocating device memory"))
    }

    /// A dma-buf for `[addr, addr + len)`, which must lie in one live allocation: a close-on-exec
    /// descriptor that the caller owns, and where in it the range starts.
    ///
    /// All allocations in one driver page share the driver's export, so the descriptor may reach
    /// beyond the range: hand it to a NIC of this process, not to another process.
    pub fn export(&self, addr: DeviceAddr, len: u64) -> Result<(OwnedFd, u64), Error> {
        let _ = (addr, len);
        Err(unfinished("exporting a dma-buf"))
    }

    /// A dma-buf of its own for `[addr, addr + len)` alone, rounded out to 4 KiB, which nobody
    /// else's memory shares: for what leaves the process.
    pub fn export_alone(&self, addr: DeviceAddr, len: u64) -> Result<(OwnedFd, u64), Error> {
        let _ = (addr, len);
        Err(unfinished("exporting a dma-buf"))
    }

    /// Whether this device can copy; the error says why not.
    pub fn can_copy(&self) -> Result<(), Error> {
        Err(unfinished("copying"))
    }

    /// Starts a copy of all `segments` and returns at once. The segments are not ordered among
    /// themselves, nor with other transfers.
    ///
    /// # Safety
    /// Until the transfer has finished or was dropped, host sides must be valid for the access
    /// (reads for sources, writes for destinations), and nobody may write what is read or touch
    /// what is written. Host memory of a dropped, unfinished transfer must stay allocated until
    /// the device is idle ([`Device::drain`]), unless it is given up for good.
    pub unsafe fn copy(self: &Arc<Self>, segments: &[Segment]) -> Result<Transfer, SubmitError> {
        let _ = segments;
        Err(SubmitError::Failed(unfinished("copying")))
    }

    /// Copies `len` bytes and returns when they have arrived. At least one side is on a device.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    pub unsafe fn copy_blocking(
        self: &Arc<Self>,
        dst: Side,
        src: Side,
        len: usize,
    ) -> Result<(), Error> {
        let _ = (dst, src, len);
        Err(unfinished("copying"))
    }

    /// Sets `len` bytes of device memory to `byte` and returns when it is done.
    pub fn fill(self: &Arc<Self>, addr: DeviceAddr, len: u64, byte: u8) -> Result<(), Error> {
        let _ = (addr, len, byte);
        Err(unfinished("filling device memory"))
    }

    /// Collects finished copies whose transfers were dropped; returns how many copies are still in
    /// flight. Never blocks.
    pub fn progress(&self) -> usize {
        0
    }

    /// Waits until no copy is in flight.
    pub fn drain(&self) -> Result<(), Error> {
        Ok(())
    }
}
