//! The back end for a card that the application opened: as [`Driver`], through a descriptor of our
//! own of the same opening, if the application has lent it; otherwise only what does not disturb it. Which cards
//! are lent, and the memory on them, is in `runtime/lent_cards.rs`.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use hl_thunk::packet::LinDma;
use hl_thunk::{DeviceAddr, Direction};
use synapse::Framework;

use super::driver::Driver;
use super::{Backend, CopyLimits, Geometry, HostPin, IMPORTING, MapOutcome, Registers, Ticket};
use crate::error::ErrorKind;
use crate::stats::Counts;
use crate::{Error, Remedy};

/// The application's card.
#[derive(Debug)]
pub(crate) struct LentDriver {
    driver: Driver,
    lent: bool,
    /// The application's own descriptor: by its number SCAL knows the card.
    theirs: RawFd,
}

impl LentDriver {
    /// `lent`: we may use it as if it were ours; else we only know of it.
    pub(crate) fn new(device: hl_thunk::Device, lent: bool, theirs: RawFd) -> Self {
        Self { driver: Driver::new(device), lent, theirs }
    }

    fn permitted(&self, operation: &'static str) -> Result<&Driver, Error> {
        if self.lent {
            return Ok(&self.driver);
        }
        Err(Error::new(
            ErrorKind::PermissionDenied,
            operation,
            "this process opened the card itself and has not lent it",
            Remedy::LendCard,
        ))
    }
}

/// Why raw submissions to a card are refused.
pub(crate) fn driven_by_framework(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::PermissionDenied,
        operation,
        "SCAL (Synapse) drives the card: its queues are reprogrammed, and other submissions are not safe",
        "do not lend the framework's card: its memory is found and copied through Synapse",
    )
}

impl Backend for LentDriver {
    fn geometry(&self) -> Geometry {
        self.driver.geometry()
    }

    fn free_memory(&self) -> Option<u64> {
        if self.lent { self.driver.free_memory() } else { None }
    }

    fn take_page(&self, at: DeviceAddr, len: u64) -> Result<MapOutcome, Error> {
        self.permitted("allocating device memory")?.take_page(at, len)
    }

    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<HostPin, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.permitted("pinning host memory")?.pin(ptr, len) }
    }

    fn is_operational(&self) -> bool {
        self.driver.is_operational()
    }

    fn can_import(&self) -> Result<(), Error> {
        self.permitted(IMPORTING)?.can_import()
    }

    fn import(&self, dmabuf: BorrowedFd<'_>, len: u64) -> Result<HostPin, Error> {
        self.permitted(IMPORTING)?.import(dmabuf, len)
    }

    fn export_foreign(
        &self,
        mapping: DeviceAddr,
        offset: u64,
        len: u64,
        counts: Counts,
    ) -> Result<OwnedFd, Error> {
        self.driver.export_foreign(mapping, offset, len, counts)
    }

    fn map_block(&self, address: DeviceAddr) -> Result<Box<dyn Registers>, Error> {
        self.permitted("mapping a register block")?.map_block(address)
    }

    fn copy_limits(&self) -> Result<CopyLimits, Error> {
        let limits = self.permitted("copying")?.copy_limits()?;
        // The application submits work, too, and the driver's limit is for both.
        Ok(CopyLimits { in_flight: (limits.in_flight / 2).max(1), ..limits })
    }

    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error> {
        let operation = "submitting a copy";
        // It may have been started after the card was lent.
        if Framework::drives(self.theirs) {
            return Err(driven_by_framework(operation));
        }
        // SAFETY: the caller's promise.
        unsafe { self.permitted(operation)?.submit(direction, slot, moves) }
    }

    fn flush_peer_writes(&self) -> Result<(), Error> {
        self.driver.flush_peer_writes()
    }

    fn wait(&self, ticket: Ticket, timeout_us: u32) -> Result<bool, Error> {
        self.driver.wait(ticket, timeout_us)
    }
}
