//! The back end for a card that this process opened: the engine itself, or the application, which may have
//! [lent](super::lent) it to the engine. Memory and copies go through the driver's own calls.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use hl_thunk::packet::{LIN_DMA_LEN, LinDma};
use hl_thunk::sys::HwIpInfo;
use hl_thunk::{
    Chunk, CommandBuffer, DeviceAddr, DeviceMapping, DeviceMemory, Direction, DmaBuf, ExportCall,
    Generation, HostMapping, HwBlock, ImportedMapping, PAGE_SIZE, WaitStatus,
};

use super::lent::Lender;
use super::{
    Backend, CopyLimits, FLUSHING, Geometry, HostPin, IMPORTING, MapOutcome, Page, Placement,
    Registers, SLOTS, Ticket,
};
use crate::error::{Error, ErrorKind, Phase};
use crate::process::{CloseOnFork, ClosedInChildren};
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};

/// Bytes of packets one submission may have.
const SLOT_LEN: usize = PAGE_SIZE as usize;
/// Submission slots of the driver that stay unused, so that its library never spins: rejected submissions use up
/// sequence numbers too.
const MARGIN: u64 = 4;

/// Page size where the driver reports none; the driver rounds up what we ask for.
const FALLBACK_PAGE: u64 = 32 << 20;

/// A card through `libhl-thunk`.
#[derive(Debug)]
pub(crate) struct Driver {
    // Declared before the device, so that command buffers are released first.
    commands: OnceLock<Commands>,
    making_commands: Mutex<()>,
    /// A forked child must not keep the card busy. Declared before the device, which closes the descriptor.
    _closed_in_children: Option<ClosedInChildren>,
    device: hl_thunk::Device,
    /// `None`: we opened it.
    lender: Option<Lender>,
    queues: [Queues; 3],
}

#[derive(Debug)]
struct Queues {
    ids: &'static [u32],
    next: AtomicU32,
    /// Lane of the first queue.
    lane: u32,
}

/// Long-lived command buffers: one for all slots where it can be submitted in parts, else one per slot.
#[derive(Debug)]
struct Commands {
    buffers: Vec<CommandBuffer>,
}

impl Commands {
    fn new(device: &hl_thunk::Device) -> Result<Self, hl_thunk::Error> {
        let buffers = if device.generation().has_dram_mmu() {
            vec![CommandBuffer::new(device, SLOT_LEN as u32 * SLOTS)?]
        } else {
            let one = |_| CommandBuffer::new(device, SLOT_LEN as u32);
            (0..SLOTS).map(one).collect::<Result<_, _>>()?
        };
        Ok(Self { buffers })
    }

    fn place(&self, slot: u32) -> (&CommandBuffer, usize) {
        match self.buffers.as_slice() {
            [shared] => (shared, slot as usize * SLOT_LEN),
            each => (&each[slot as usize], 0),
        }
    }
}

impl Driver {
    pub(crate) fn new(device: hl_thunk::Device, lender: Option<Lender>) -> Self {
        let mut lane = 0;
        let queues = [Direction::HostToDevice, Direction::DeviceToHost, Direction::DeviceToDevice]
            .map(|direction| {
                let ids = device.generation().queues(direction);
                let queues = Queues { next: AtomicU32::new(0), lane, ids };
                lane += queues.ids.len() as u32;
                queues
            });
        Self {
            commands: OnceLock::new(),
            making_commands: Mutex::new(()),
            _closed_in_children: ClosedInChildren::new(device.as_fd()),
            device,
            lender,
            queues,
        }
    }

    /// The card, for a call that only the process which opened it may make.
    fn device(&self, operation: &'static str) -> Result<&hl_thunk::Device, Error> {
        if self.device.is_ours() { Ok(&self.device) } else { Err(Error::forked(operation)) }
    }

    /// Like `device`, for calls that the application must have lent the card for.
    fn lent_device(&self, operation: &'static str) -> Result<&hl_thunk::Device, Error> {
        self.lender.as_ref().map_or(Ok(()), |lender| lender.permit(operation))?;
        self.device(operation)
    }

    /// Makes the command buffers, when the first copy needs them.
    #[cold]
    fn make_commands(&self) -> Result<&Commands, Error> {
        let _making = self.making_commands.lock().unwrap_or_else(PoisonError::into_inner);
        if self.commands.get().is_none() {
            let made = Commands::new(&self.device)
                .map_err(|error| Error::driver(Phase::Use, "making command buffers", error))?;
            let _ = self.commands.set(made);
        }
        Ok(self.commands.get().expect("set just above"))
    }
}

impl Backend for Driver {
    fn geometry(&self) -> Geometry {
        geometry_of(self.device.generation(), self.device.hw_info())
    }

    fn free_memory(&self) -> Option<u64> {
        // On a card of our own there are no other users.
        self.lender.as_ref().filter(|lender| lender.lent).and_then(|_| self.device.free_memory())
    }

    fn take_page(&self, at: DeviceAddr, len: u64) -> Result<MapOutcome, Error> {
        let operation = "allocating device memory";
        let device = self.lent_device(operation)?;
        if !device.generation().has_dram_mmu() {
            let device = device.clone();
            let page = PhysicalPage { device, addr: at, len, whole: Mutex::default() };
            return Ok(MapOutcome::Page(Box::new(page)));
        }
        let failed = |error| Error::driver(Phase::Use, operation, error);
        let memory = DeviceMemory::alloc(device, len).map_err(failed)?;
        let mapping = memory.map(Some(at)).map_err(failed)?;
        if mapping.addr() != at {
            return Ok(MapOutcome::Elsewhere(mapping.addr()));
        }
        Ok(MapOutcome::Page(Box::new(MappedPage::new(mapping, len))))
    }

    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<HostPin, Error> {
        let operation = "pinning host memory";
        let device = self.lent_device(operation)?;
        // SAFETY: the caller keeps the memory.
        let mapping = unsafe { HostMapping::new(device, ptr, len as u64) }
            .map_err(|error| Error::driver(Phase::Use, operation, error))?;
        Ok(HostPin::new(mapping.addr(), mapping))
    }

    fn is_operational(&self) -> bool {
        self.device.is_operational()
    }

    fn can_import(&self) -> Result<(), Error> {
        let supported = ImportedMapping::supported(self.lent_device(IMPORTING)?)
            .map_err(|error| Error::driver(Phase::Share, IMPORTING, error))?;
        if supported {
            return Ok(());
        }
        Err(Error::unsupported(
            IMPORTING,
            "the driver has no dma-buf import",
            "transfers between devices go through host memory",
        ))
    }

    fn import(&self, dmabuf: BorrowedFd<'_>, len: u64) -> Result<HostPin, Error> {
        self.can_import()?;
        let device = self.device(IMPORTING)?;
        let mapping = ImportedMapping::new(device, dmabuf, len).map_err(import_failed)?;
        Ok(HostPin::new(mapping.addr(), mapping))
    }

    fn export_foreign(
        &self,
        mapping: DeviceAddr,
        offset: u64,
        len: u64,
        counts: Counts,
    ) -> Result<OwnedFd, Error> {
        let device = self.device(EXPORTING)?;
        let call = ExportCall::best(device.library());
        alone(DmaBuf::export_foreign(device, mapping, offset, len, call), counts)
    }

    fn map_block(&self, address: DeviceAddr) -> Result<Box<dyn Registers>, Error> {
        let operation = "mapping a register block";
        let mapped = HwBlock::map(self.lent_device(operation)?, address)
            .map_err(|error| Error::driver(Phase::Use, operation, error))?;
        Ok(Box::new(mapped))
    }

    fn copy_limits(&self) -> Result<CopyLimits, Error> {
        let generation = self.device.generation();
        if let Some(lender) = &self.lender {
            lender.permit("copying")?;
        }
        if !generation.accepts_submissions() {
            return Err(Error::unsupported(
                "copying",
                format!("the {generation} driver takes no DMA submissions"),
                "memory can be allocated, detected and exported; copies need the framework's \
                 streams (Synapse)",
            ));
        }
        let most = generation.max_pending_submissions().min(u64::from(SLOTS)) - MARGIN;
        // The application that lends the card submits work, too, and the driver's limit covers both.
        let in_flight = if self.lender.is_some() { most / 2 } else { most };
        let lanes = self.queues.iter().map(|queues| queues.ids.len()).sum();
        let rule = self.device.dma_rule();
        Ok(CopyLimits { moves: SLOT_LEN / LIN_DMA_LEN, in_flight, lanes, rule })
    }

    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error> {
        let operation = "submitting a copy";
        let device = self.device(operation)?;
        if let Some(lender) = &self.lender {
            lender.permit_submission(operation)?;
        }
        let made = self.commands.get();
        let (buffer, offset) = made.map_or_else(|| self.make_commands(), Ok)?.place(slot);
        let len = moves.len() * LIN_DMA_LEN;
        for (at, dma) in moves.iter().enumerate() {
            let packet = dma.encode(device.generation(), &moves[..at]).ok_or_else(|| {
                let detail = format!("an address or the length of {dma:?} does not fit the packet");
                Error::new(ErrorKind::InvalidParams, operation, detail, "report this")
            })?;
            // SAFETY: the slot is this submission's alone, as the caller promises.
            unsafe { buffer.write(offset + at * LIN_DMA_LEN, &packet) };
        }
        let queues = &self.queues[direction as usize];
        // Two threads may get the same turn. That is harmless, and cheaper than agreeing on an order.
        let next = queues.next.load(Ordering::Relaxed);
        queues.next.store(next.wrapping_add(1), Ordering::Relaxed);
        let turn = next % queues.ids.len() as u32;
        let (queue, lane) = (queues.ids[turn as usize], queues.lane + turn);
        // SAFETY: the caller keeps the slot and the memory until the submission has ended.
        let sequence = unsafe { device.submit(Chunk { buffer, offset, len, queue }) }
            .map_err(|error| Error::driver(Phase::Copy, operation, error))?;
        Ok(Ticket { sequence, lane, slot })
    }

    fn flush_peer_writes(&self) -> Result<(), Error> {
        flush(self.device(FLUSHING)?)
    }

    fn wait(&self, ticket: Ticket, timeout_us: u32) -> Result<bool, Error> {
        let operation = "waiting for a copy";
        match self.device(operation)?.wait(ticket.sequence, timeout_us) {
            Ok(WaitStatus::Completed) => Ok(true),
            Ok(WaitStatus::Busy) => Ok(false),
            Err(error) => Err(Error::driver(Phase::Copy, operation, error)),
        }
    }
}

/// Flushes the writes of other devices.
pub(super) fn flush(device: &hl_thunk::Device) -> Result<(), Error> {
    device.flush_peer_writes().map_err(|error| match error.errno {
        // A driver older than this call treats it as an empty submission.
        libc::EINVAL | libc::EOPNOTSUPP => Error::unsupported(
            FLUSHING,
            format!("{}: the driver cannot", error.call),
            "a newer driver has it",
        ),
        _ => Error::driver(Phase::Copy, FLUSHING, error),
    })
}

impl Registers for HwBlock {
    fn len(&self) -> usize {
        self.len()
    }

    fn read(&self, offset: usize) -> Option<u32> {
        self.read(offset)
    }

    unsafe fn write(&self, offset: usize, value: u32) -> Option<()> {
        // SAFETY: the caller's promise.
        unsafe { self.write(offset, value) }
    }
}

/// Derives the memory geometry from what the hardware reports.
fn geometry_of(generation: Generation, hw: &HwIpInfo) -> Geometry {
    if !generation.has_dram_mmu() {
        let base = hw.dram_base_address.next_multiple_of(PAGE_SIZE);
        let end = hw.dram_base_address.saturating_add(hw.dram_size) / PAGE_SIZE * PAGE_SIZE;
        let total = end.saturating_sub(base);
        return Geometry {
            total,
            page: total.max(PAGE_SIZE),
            placement: Placement::Physical(base),
        };
    }
    let reported = [hw.device_mem_alloc_default_page_size, hw.dram_page_size];
    let usable = |page: &u64| *page != 0 && page.is_multiple_of(PAGE_SIZE);
    let page = reported.into_iter().find(usable).unwrap_or(FALLBACK_PAGE);
    Geometry { total: hw.dram_size / page * page, page, placement: Placement::Window }
}

/// The usual advice for an errno of the driver is about exports: imports need their own.
fn import_failed(error: hl_thunk::Error) -> Error {
    let errno = error.errno;
    let failed = Error::driver(Phase::Share, IMPORTING, error);
    match errno {
        libc::EINVAL => failed.advise_instead("the driver does not map dma-bufs of this exporter"),
        libc::EPERM => failed.advise_instead(
            "the card cannot reach the exporter's device on the PCI bus (peer-to-peer)",
        ),
        _ => failed,
    }
}

const EXPORTING: &str = "exporting a dma-buf";

pub(super) fn export_failed(error: hl_thunk::Error) -> Error {
    Error::driver(Phase::Share, EXPORTING, error)
}

/// The one export that this process shares, made at first use.
pub(super) type Shared = Mutex<Option<(CloseOnFork, GaugeGuard)>>;

pub(super) fn shared(
    whole: &Shared,
    counts: Counts,
    export: impl FnOnce() -> Result<DmaBuf, Error>,
) -> Result<OwnedFd, Error> {
    let mut whole = whole.lock().unwrap_or_else(PoisonError::into_inner);
    let no_descriptor = |call, errno| Error::os(Phase::Share, EXPORTING, call, errno);
    let kept = match whole.take() {
        Some(kept) => kept,
        None => {
            let made = export()?;
            let gauge = counts.track(Gauge::Export, made.len());
            let fd = CloseOnFork::new(made.into_fd());
            (fd.ok_or_else(|| no_descriptor("keeping a dma-buf", libc::EMFILE))?, gauge)
        }
    };
    let (fd, _) = whole.insert(kept);
    fd.as_fd()
        .try_clone_to_owned()
        .map_err(|error| no_descriptor("dup", error.raw_os_error().unwrap_or(libc::EMFILE)))
}

/// A new export, for this caller alone.
pub(super) fn alone(
    part: Result<DmaBuf, hl_thunk::Error>,
    counts: Counts,
) -> Result<OwnedFd, Error> {
    let part = part.map_err(export_failed)?;
    counts.add(Counter::DmabufExports, 1);
    Ok(part.into_fd())
}

/// Memory from the driver's allocator, mapped.
#[derive(Debug)]
struct MappedPage {
    /// The exports of the whole page, by the driver call that made them.
    by_mapped: Shared,
    by_whole: Shared,
    mapping: Arc<DeviceMapping>,
    len: u64,
}

impl MappedPage {
    fn new(mapping: DeviceMapping, len: u64) -> Self {
        let (by_mapped, by_whole) = (Mutex::default(), Mutex::default());
        Self { by_mapped, by_whole, mapping: Arc::new(mapping), len }
    }

    fn best(&self) -> ExportCall {
        ExportCall::best(self.mapping.device().library())
    }
}

impl Page for MappedPage {
    fn export_whole(&self, call: Option<ExportCall>, counts: Counts) -> Result<OwnedFd, Error> {
        let call = call.unwrap_or_else(|| self.best());
        let kept = match call {
            ExportCall::Mapped => &self.by_mapped,
            ExportCall::Whole => &self.by_whole,
        };
        shared(kept, counts, || {
            DmaBuf::export(&self.mapping, 0, self.len, call).map_err(export_failed)
        })
    }

    fn export_part(&self, offset: u64, len: u64, counts: Counts) -> Result<OwnedFd, Error> {
        alone(DmaBuf::export(&self.mapping, offset, len, self.best()), counts)
    }

    fn was_exported(&self) -> bool {
        self.mapping.was_exported()
    }

    fn give_back(self: Box<Self>, needed: bool) -> Result<(), Box<dyn Page>> {
        // Keeping the page takes memory from nobody: the card is ours alone.
        if !needed && self.was_exported() && self.mapping.device().is_own_opening() {
            return Err(self);
        }
        let MappedPage { by_mapped, by_whole, mapping, len } = *self;
        drop((by_mapped, by_whole));
        let mapping =
            Arc::into_inner(mapping).expect("exports are gone, so this is the last reference");
        mapping.unmap().map_err(|(mapping, _still_exported)| {
            Box::new(MappedPage::new(mapping, len)) as Box<dyn Page>
        })
    }

    fn leave(self: Box<Self>) {
        drop((self.by_mapped, self.by_whole));
        if let Some(mapping) = Arc::into_inner(self.mapping) {
            mapping.leave();
        }
    }
}

/// All of a device's physical memory, on cards without an allocator.
#[derive(Debug)]
struct PhysicalPage {
    whole: Shared,
    device: hl_thunk::Device,
    addr: DeviceAddr,
    len: u64,
}

impl Page for PhysicalPage {
    /// There is only one call for physical memory.
    fn export_whole(&self, _call: Option<ExportCall>, counts: Counts) -> Result<OwnedFd, Error> {
        shared(&self.whole, counts, || {
            DmaBuf::export_physical(&self.device, self.addr, self.len).map_err(export_failed)
        })
    }

    fn export_part(&self, offset: u64, len: u64, counts: Counts) -> Result<OwnedFd, Error> {
        let addr = DeviceAddr(self.addr.0 + offset);
        alone(DmaBuf::export_physical(&self.device, addr, len), counts)
    }

    fn give_back(self: Box<Self>, _needed: bool) -> Result<(), Box<dyn Page>> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hw() -> HwIpInfo {
        // SAFETY: plain numbers; all zeroes is a value.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn a_refused_import_is_not_given_the_advice_for_exports() {
        for (errno, kind, words) in [
            (libc::EINVAL, ErrorKind::ChannelFailed, "exporter"),
            (libc::EPERM, ErrorKind::PermissionDenied, "peer-to-peer"),
            (libc::ENOMEM, ErrorKind::OutOfMemory, "memory"),
        ] {
            let error = import_failed(hl_thunk::Error { call: "ioctl", errno });
            assert_eq!((error.kind(), error.errno()), (kind, Some(errno)));
            let text = error.to_string();
            assert!(text.contains(words) && !text.contains("BAR"), "{text}");
        }
    }

    #[test]
    fn memory_comes_as_the_hardware_says() {
        let mut gaudi2 = hw();
        (gaudi2.dram_size, gaudi2.dram_page_size) = (0x17_d000_0000, 0x3000_0000);
        let geometry = geometry_of(Generation::Gaudi2, &gaudi2);
        assert_eq!((geometry.total, geometry.page), (0x17_d000_0000, 0x3000_0000));
        assert_eq!(geometry.placement, Placement::Window);

        let mut gaudi = hw();
        (gaudi.dram_base_address, gaudi.dram_size) = (0x2000_0000, 0x7_e000_0000);
        let geometry = geometry_of(Generation::Gaudi, &gaudi);
        let physical = Placement::Physical(0x2000_0000);
        assert_eq!((geometry.total, geometry.placement), (0x7_e000_0000, physical));
    }

    #[test]
    fn nonsense_from_the_driver_is_no_reason_to_divide_by_zero() {
        for generation in [Generation::Gaudi, Generation::Gaudi2, Generation::Gaudi3] {
            let geometry = geometry_of(generation, &hw());
            assert!(geometry.page >= 4096 && geometry.total == 0);
        }
        let mut odd = hw();
        (odd.dram_size, odd.dram_page_size) = (100 << 20, 12_345);
        let geometry = geometry_of(Generation::Gaudi3, &odd);
        assert_eq!((geometry.total, geometry.page), (96 << 20, 32 << 20));
    }
}
