//! The interface between the engine and whatever drives the card.
//!
//! The engine above divides memory, plans copies and keeps count; a back end below knows one way to
//! reach the hardware. [`driver`] is the one for cards this process opened itself, through the
//! driver's command submission; [`lent`] the one for cards that the application opened and may have
//! lent to us; [`synapse`] the one for the card of a framework (Synapse) in this process. A fake one
//! serves the engine's own tests.

pub(crate) mod driver;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod lent;
pub(crate) mod synapse;

use std::any::Any;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use hl_thunk::packet::{DmaRule, LinDma};
use hl_thunk::{DeviceAddr, Direction, ExportCall};

use crate::Error;
use crate::stats::{Counts, GaugeGuard};

/// Submission slots of a device; no device's limit may be larger.
pub(crate) const SLOTS: u32 = u64::BITS;

/// The size of a bounce slot. Most host buffers up to this size are copied through one, because pinning
/// and unpinning costs more than the CPU needs to copy them; [`pin`](crate::pin) has the exceptions.
pub(crate) const BOUNCE_LEN: usize = 64 * 1024;

/// Bounce slots of a device, of [`BOUNCE_LEN`] bytes each. Short copies use separate ones: one per permit.
const BOUNCE_SLOTS: u32 = 64;

pub(crate) const FLUSHING: &str = "flushing what other devices wrote";
pub(crate) const IMPORTING: &str = "importing a dma-buf";

/// How a device provides memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Bytes that can be allocated in total.
    pub(crate) total: u64,
    /// The unit in which the driver allocates memory.
    pub(crate) page: u64,
    pub(crate) placement: Placement,
}

/// Which addresses a device's memory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Those that we ask for, in a window of the card's own.
    Window,
    /// Physical ones: all memory is one page, at this address.
    Physical(u64),
    /// Those of a foreign pool, whose owner allocates from it for us. All of it is device memory.
    Pool { start: u64, len: u64 },
}

/// Limits of one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyLimits {
    /// Most moves in one submission.
    pub(crate) moves: usize,
    /// A submission must not be this many sequence numbers ahead of the oldest unfinished one.
    pub(crate) in_flight: u64,
    /// Number of lanes; they are numbered from 0.
    pub(crate) lanes: usize,
    /// Which lengths and addresses moves may have.
    pub(crate) rule: DmaRule,
}

/// A submission, as the back end knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    /// Grows with every submission on the device.
    pub(crate) sequence: u64,
    /// The queue it went to: submissions in one lane end in the order in which they were made.
    pub(crate) lane: u32,
    /// The slot it was made with.
    pub(crate) slot: u32,
}

/// Host memory pinned for a device (or another device's memory, imported), for as long as this
/// lives.
#[derive(Debug)]
pub(crate) struct HostPin {
    /// Where the device sees its first byte.
    pub(crate) addr: DeviceAddr,
    /// Keeps the pin.
    _guard: Box<dyn Any + Send + Sync>,
    /// Counts the pin until after it is released.
    _gauge: Option<GaugeGuard>,
}

impl HostPin {
    /// A pin that lasts as long as `guard`.
    pub(crate) fn new(addr: DeviceAddr, guard: impl Any + Send + Sync) -> Self {
        Self { addr, _guard: Box::new(guard), _gauge: None }
    }

    /// The same, counted while it lasts.
    pub(crate) fn counted(self, gauge: GaugeGuard) -> Self {
        Self { _gauge: Some(gauge), ..self }
    }
}

/// Where the driver mapped a page.
#[derive(Debug)]
pub(crate) enum MapOutcome {
    /// The page, at the address that was asked for.
    Page(Box<dyn Page>),
    /// The driver would have mapped it here instead: something else occupies that address. The mapping was undone.
    Elsewhere(DeviceAddr),
}

/// One allocation of the driver's, mapped in the device's window.
pub(crate) trait Page: Send + Sync + fmt::Debug {
    /// A new descriptor of the dma-buf of the whole page, made with this driver call (`None`: the
    /// best there is); all callers share one export per call.
    fn export_whole(&self, call: Option<ExportCall>, counts: Counts) -> Result<OwnedFd, Error>;

    /// A new export of `len` bytes from `offset`, both in whole 4 KiB.
    fn export_part(&self, offset: u64, len: u64, counts: Counts) -> Result<OwnedFd, Error>;

    /// Whether a dma-buf of it may be open: then the driver may refuse to take it back.
    fn was_exported(&self) -> bool {
        false
    }

    /// Gives the page back to the driver. Returns the page, still usable, if the driver refuses it because a dma-buf
    /// of it is still open. The driver writes a refusal into the kernel log: unless the memory is `needed`, it is not
    /// asked where it might refuse.
    fn give_back(self: Box<Self>, needed: bool) -> Result<(), Box<dyn Page>>;

    /// Drops the page because the device is being closed. Other processes may still have dma-bufs of it open: the
    /// driver then keeps it for them, which is not an error.
    fn leave(self: Box<Self>) {}
}

/// A register block of the device, mapped.
pub(crate) trait Registers: Send + Sync + fmt::Debug {
    /// Length in bytes.
    fn len(&self) -> usize;

    /// The register at this byte offset; `None` if there is none.
    fn read(&self, offset: usize) -> Option<u32>;

    /// Writes the register at this byte offset; `None` if there is none.
    ///
    /// # Safety
    /// The caller is responsible for what the value makes the device do.
    unsafe fn write(&self, offset: usize, value: u32) -> Option<()>;
}

/// A way to reach the hardware.
pub(crate) trait Backend: Send + Sync + fmt::Debug {
    /// How the device provides memory.
    fn geometry(&self) -> Geometry;

    /// Fails if the card cannot be used any more: its owner may have closed it.
    fn check_present(&self, operation: &'static str) -> Result<(), Error> {
        let _ = operation;
        Ok(())
    }

    /// Free bytes by the driver's account, if others may allocate without our knowledge and the driver can be asked.
    fn free_memory(&self) -> Option<u64> {
        None
    }

    /// Takes `len` bytes (whole pages) from the driver, at exactly this address.
    fn take_page(&self, at: DeviceAddr, len: u64) -> Result<MapOutcome, Error>;

    /// Takes `len` bytes from a [`Placement::Pool`], at an address of the pool's choice, aligned to 4 KiB.
    fn take_from_pool(&self, len: u64) -> Result<(DeviceAddr, Box<dyn Page>), Error> {
        let _ = len;
        let detail = "the device has no pool";
        Err(Error::unsupported("allocating device memory", detail, "report this"))
    }

    /// The whole of a [`Placement::Pool`], to export from.
    fn pool(&self) -> Option<Box<dyn Page>> {
        None
    }

    /// Whether copies may pin the caller's host memory; else only the engine's own buffers.
    fn pins_callers_memory(&self) -> bool {
        true
    }

    /// How many bounce slots there are, and how long they are.
    fn bounce_slots(&self) -> (u32, usize) {
        (BOUNCE_SLOTS, BOUNCE_LEN)
    }

    /// Pins host memory.
    ///
    /// # Safety
    /// The memory must stay allocated as long as copies use the pin.
    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<HostPin, Error>;

    /// Whether dma-bufs can be imported; the error says why not, or why that is not known now.
    fn can_import(&self) -> Result<(), Error>;

    /// Maps the first `len` bytes of another device's dma-buf for this device, whose engines then
    /// see them as they see host memory.
    fn import(&self, dmabuf: BorrowedFd<'_>, len: u64) -> Result<HostPin, Error>;

    /// A dma-buf of `len` bytes from `offset` (whole 4 KiB) of memory that the application mapped at
    /// `mapping` by itself.
    fn export_foreign(
        &self,
        mapping: DeviceAddr,
        offset: u64,
        len: u64,
        counts: Counts,
    ) -> Result<OwnedFd, Error> {
        let _ = (mapping, offset, len, counts);
        Err(Error::unsupported(
            "exporting a dma-buf",
            "the application maps no memory on this card",
            "report this",
        ))
    }

    /// Maps the register block at this address, if the driver has it on its list.
    fn map_block(&self, address: DeviceAddr) -> Result<Box<dyn Registers>, Error>;

    /// The limits of a submission; the error says why this device cannot copy.
    fn copy_limits(&self) -> Result<CopyLimits, Error>;

    /// Starts the moves, at most [`CopyLimits::moves`] of them. Does not wait. `slot`, below
    /// [`SLOTS`], is where the packets may go; no other submission in flight has it.
    ///
    /// # Safety
    /// All memory named must stay valid for the device, and the slot may not be used otherwise, until the
    /// ticket has completed or failed.
    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error>;

    /// Returns when the engines see everything that other devices wrote to this card's memory before the call. Where
    /// there is no such operation, the error [`Error::is_unsupported`].
    fn flush_peer_writes(&self) -> Result<(), Error> {
        Err(Error::unsupported(FLUSHING, "there is no call for it", "report this"))
    }

    /// Whether the card takes work. It is asked only after a failure.
    fn is_operational(&self) -> bool {
        true
    }

    /// Whether a submission has completed, after waiting up to `timeout_us` for it.
    fn wait(&self, ticket: Ticket, timeout_us: u32) -> Result<bool, Error>;
}
