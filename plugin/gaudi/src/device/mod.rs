//! A card that this process owns: memory, copies and exports.

mod allocation;
pub(crate) mod copy;
mod export;
pub(crate) mod import;
pub(crate) mod registers;
mod registry;

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hl_thunk::packet::{self, LinDma};
use smallvec::smallvec;

use crate::backend::{Backend, CopyLimits, Geometry, HostPin};
use crate::copy::unaligned;
use crate::error::OnCard;
use crate::memory::{AddressTable, DeviceRange, Memory};
use crate::pin::{PinOwner, Pins};
use crate::process::ProcessBound;
use crate::rcache::CacheInfo;
use crate::stats::{Counter, Counts, Gauge, Path, Tally};
use crate::submit::engine::{Engine, SubmitPermit};
use crate::submit::slab::{PermitSlots, SlotPool};
use crate::submit::submission::Resources;
use crate::window::{Announcement, ReservedAddresses};
use crate::{
    Costs, DeviceAddr, DeviceId, DeviceInfo, Direction, Error, ErrorKind, HostRegion, MemoryInfo,
    Notifier, PAGE_SIZE, Window,
};

pub use allocation::Allocation;
pub(crate) use registry::{Registry, Upcalls};

/// Staging slots between two cards.
const STAGING_LEN: usize = 1 << 20;
const STAGING_SLOTS: u32 = 8;

/// Pauses while peers release memory; one second in total.
pub(crate) const PEERS_PAUSES_MS: [u64; 11] = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// Memory that the application is about to unmap and that peers may still have open.
#[derive(Debug)]
pub(crate) struct Withdrawn {
    released: Arc<AtomicBool>,
}

impl Withdrawn {
    /// Waits until no peer has any of it open, but no longer than a peer needs to release mappings that it only
    /// caches. The application must make sure that no peer is still using the memory.
    pub(crate) fn wait(all: &[Withdrawn]) {
        for pause in PEERS_PAUSES_MS {
            if all.iter().all(|one| one.released.load(Ordering::Acquire)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(pause));
        }
    }
}

/// An open card.
///
/// It is shared: the card stays open while a handle or an allocation lives. When the last one is dropped,
/// the card is closed, so that another process can open it.
///
/// It belongs to the process that opened it. In a forked child every operation returns an error, and
/// dropping it, or any object on it, has no effect.
pub struct Device {
    info: DeviceInfo,
    id: DeviceId,
    window: Window,
    announcement: Announcement,
    counts: Counts,
    /// Other devices' memory that this one has imported.
    imports: AddressTable,
    registry: Arc<Registry>,
    open: ProcessBound<Open>,
}

/// The parts of an open card. Closing drops them in this order: submissions, pins and imports,
/// bounce and staging buffers, then memory, then the card itself, then its entry in this process.
struct Open {
    engine: Arc<Engine>,
    pins: Pins,
    /// Peers' memory that this device keeps open.
    peer_handles: Box<dyn Any + Send + Sync>,
    bounce: OnceLock<Arc<SlotPool>>,
    permit_slots: OnceLock<PermitSlots>,
    staging: OnceLock<Arc<SlotPool>>,
    memory: Memory,
    backend: Arc<dyn Backend>,
    _blocked: Option<ReservedAddresses>,
    _listed: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("id", &self.id)
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
    }
}

impl OnCard for Device {
    fn is_software(&self) -> bool {
        self.info.is_software
    }
}

impl Device {
    /// A device on this back end, in this window. `listed` is its entry in the process, which is dropped last.
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        window: Window,
        geometry: Geometry,
        blocked: Option<ReservedAddresses>,
        registry: Arc<Registry>,
        listed: Box<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        let counts = Counts::of(&window.info);
        counts.opened();
        let (options, upcalls) = (Arc::clone(&registry.options), &registry.upcalls);
        let peer_handles = (upcalls.peer_handles)(&options.get());
        let on_lost = upcalls.card_lost;
        let open = Open {
            engine: Engine::new(window.device, Arc::clone(&backend), counts, options, on_lost),
            pins: Pins::new(counts, Costs::of(&window.info).pinning),
            peer_handles,
            bounce: OnceLock::new(),
            permit_slots: OnceLock::new(),
            staging: OnceLock::new(),
            memory: Memory::new(window.range(), geometry, backend.pool(), counts),
            backend,
            _blocked: blocked,
            _listed: listed,
        };
        Arc::new(Self {
            info: window.info.clone(),
            id: window.device,
            announcement: Announcement::default(),
            counts,
            imports: AddressTable::default(),
            registry,
            window,
            open: ProcessBound::new(open),
        })
    }

    /// Returns an error in a forked child, which must not use its parent's card.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<(), Error> {
        if self.is_ours() { Ok(()) } else { Err(self.failed(Error::forked(operation))) }
    }

    /// Whether this process opened it. False in a forked child.
    pub(crate) fn is_ours(&self) -> bool {
        self.open.is_ours()
    }

    /// The card.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Identifies this opening of the card.
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The address range of this device's memory.
    pub fn window(&self) -> &Window {
        &self.window
    }

    /// Whether the card belongs to a framework (Synapse) in this process, and is used through that.
    pub fn is_guest(&self) -> bool {
        self.open.memory.is_in_pool()
    }

    /// How much memory there is, and how much is used.
    pub fn memory(&self) -> MemoryInfo {
        self.open.memory.info()
    }

    /// Allocates `len` bytes (not zero) aligned to `align` (a power of two; the alignment is always at least 4 KiB).
    /// The contents are undefined, unless [`Options::clear_allocations`](crate::Options::clear_allocations) is set.
    pub fn alloc(self: &Arc<Self>, len: u64, align: u64) -> Result<Allocation, Error> {
        self.check_process("allocating device memory")?;
        let present = self.open.backend.check_present("allocating device memory");
        present.map_err(|error| self.failed(error))?;
        if !self.is_guest() {
            self.announcement.ensure(&self.registry.windows, &self.window);
        }
        let taken = self.take(len, align).and_then(|base| self.clear_if_asked(base, len));
        let base = taken.map_err(|error| {
            self.release_if_lost();
            self.failed(error)
        })?;
        self.counts.allocated(len);
        // For a framework's card, the table has the whole pool already.
        if !self.is_guest() {
            self.registry.table.insert(DeviceRange { base, len, device: self.id });
        }
        Ok(Allocation::new(Arc::clone(self), DeviceAddr(base), len))
    }

    /// Takes memory from the pool. If the pool is exhausted, and peers still have freed memory open, waits up to a
    /// second for them to release it.
    fn take(&self, len: u64, align: u64) -> Result<u64, Error> {
        let mut pauses = PEERS_PAUSES_MS.into_iter();
        let mut refused = BTreeSet::new();
        loop {
            let backend = &*self.open.backend;
            let taken = self.open.memory.take(backend, (len, align), &mut refused);
            let error = match taken.map_err(|error| self.open.engine.note_loss(error)) {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => error,
                taken => return taken,
            };
            if self.counts.get(Counter::IpcQuarantinedBytes) == 0 {
                return Err(error);
            }
            let Some(pause) = pauses.next() else { return Err(error) };
            std::thread::sleep(Duration::from_millis(pause));
            if pauses.len() == 0 {
                // Last attempt: offer the refused pages again; a peer that had them open may have been killed just now.
                refused.clear();
            }
        }
    }

    /// If the option is set, clears memory that was just taken, including the rest of its last page.
    fn clear_if_asked(&self, base: u64, len: u64) -> Result<u64, Error> {
        if !self.registry.options.get().clear_allocations.unwrap_or(false) {
            return Ok(base);
        }
        let len = len.next_multiple_of(PAGE_SIZE);
        let cleared = self.can_copy().and_then(|()| self.fill_range(DeviceAddr(base), len, 0));
        cleared.map(|()| base).inspect_err(|_| self.open.memory.give(base))
    }

    /// Frees the memory of an [`Allocation`]. Memory that another process has open returns to the pool when that
    /// process releases it; the card may be closed before that. Memory of a framework's pool returns at once: an
    /// application that shares it must wait for its peers first, as with the framework's own tensors.
    pub(crate) fn free(self: &Arc<Self>, addr: DeviceAddr, len: u64) {
        if !self.is_ours() {
            return;
        }
        if !self.is_guest() {
            self.registry.table.remove(addr.0, self.id);
        }
        self.open.engine.quiesce(&(addr.0..addr.0 + len));
        self.counts.freed(len);
        if self.is_guest() {
            // Peers lease the framework's pool as a whole: their leases do not show whether they use this allocation.
            let peer_writes = self.open.engine.peer_writes();
            peer_writes.part_freed(addr.0, &*self.open.backend, self.counts);
            self.open.memory.give(addr.0);
            return;
        }
        let device = Arc::downgrade(self);
        let give = move || {
            if let Some(device) = device.upgrade() {
                device.peer_writes_end(addr);
                device.open.memory.give(addr.0);
            }
        };
        (self.registry.upcalls.freed)(addr, len, self.counts, Box::new(give));
        self.release_if_lost();
    }

    /// Memory was freed or withdrawn: ends the tracking of peers' writes to it, and flushes those that are still under way.
    fn peer_writes_end(&self, addr: DeviceAddr) {
        self.open.engine.peer_writes().freed(addr.0, &*self.open.backend, self.counts);
    }

    /// If the card was reset, lets it close with its last user. The driver waits for the card to be closed, and
    /// kills processes that take long.
    fn release_if_lost(&self) {
        if self.is_lost() {
            (self.registry.upcalls.drop_lost)();
        }
    }

    /// Withdraws memory that the application is about to unmap: lookups do not find it any more, peers
    /// cannot open it, and this waits for submitted copies. The driver refuses to unmap memory that a peer has
    /// open or cached: so the peer's lease is revoked, and [`Withdrawn::wait`] waits until it is released.
    pub(crate) fn withdraw_foreign(&self, addr: DeviceAddr, len: u64) -> Withdrawn {
        self.registry.table.remove(addr.0, self.id);
        self.open.engine.quiesce(&(addr.0..addr.0 + len));
        self.peer_writes_end(addr);
        let released = Arc::new(AtomicBool::new(false));
        let set = Arc::clone(&released);
        let release = move || set.store(true, Ordering::Release);
        (self.registry.upcalls.freed)(addr, len, self.counts, Box::new(release));
        Withdrawn { released }
    }

    /// Whether the device was reset or removed while open. All operations on it fail; when its last
    /// handle and allocation are dropped, the card can be opened again.
    pub fn is_lost(&self) -> bool {
        self.open.engine.is_lost()
    }

    /// As [`Device::is_lost`], but confirmed by the driver: the error of one submission may look like a lost device.
    pub fn is_surely_lost(&self) -> bool {
        self.is_lost() && !self.open.backend.is_operational()
    }

    /// Whether dma-bufs of other devices can be imported; the error says why not. An error that is neither
    /// [`Error::is_unsupported`] nor [`ErrorKind::PermissionDenied`](crate::ErrorKind) is temporary: the card
    /// did not respond, for example during a reset.
    pub fn can_import(&self) -> Result<(), Error> {
        self.open.backend.can_import().map_err(|error| error.on(self))
    }

    /// Maps the first `len` bytes of another device's dma-buf for this device's copies. Between devices this is
    /// experimental in the few drivers that have it.
    pub(crate) fn map_dmabuf(&self, dmabuf: BorrowedFd<'_>, len: u64) -> Result<HostPin, Error> {
        let mapped = self.open.backend.import(dmabuf, len).map_err(|error| {
            self.counts.dmabuf_failed(&error);
            error.on(self)
        })?;
        self.imports.insert(DeviceRange { base: mapped.addr.0, len, device: self.id });
        Ok(mapped.counted(self.counts.track(Gauge::Import, len)))
    }

    pub(crate) fn forget_import(&self, addr: DeviceAddr, len: u64) {
        if !self.is_ours() {
            return;
        }
        self.imports.remove(addr.0, self.id);
        self.open.engine.quiesce(&(addr.0..addr.0 + len));
    }

    pub(crate) fn has_imported(&self, addr: DeviceAddr, len: usize) -> bool {
        self.imports.find(addr.0, len as u64).is_some()
    }

    pub(crate) fn check_own(
        &self,
        addr: DeviceAddr,
        len: u64,
        operation: &'static str,
    ) -> Result<DeviceRange, Error> {
        let found = self.registry.table.find(addr.0, len.max(1));
        if let Some(entry) = found
            && entry.device == self.id
        {
            return Ok(entry);
        }
        let detail = format!("{len} bytes at {addr} are not in one live allocation of this device");
        let remedy = "only allocated device memory will do; a NIC registers host memory directly";
        Err(Error::new(ErrorKind::InvalidParams, operation, detail, remedy).on(self))
    }

    /// Whether this device can copy; the error says why not.
    pub fn can_copy(&self) -> Result<(), Error> {
        self.copy_limits().map(drop)
    }

    /// The limits of a submission; the error says why this device cannot copy.
    pub(crate) fn copy_limits(&self) -> Result<&CopyLimits, Error> {
        self.check_process("copying")?;
        self.open.engine.limits().map_err(|error| error.clone().on(self))
    }

    /// Counts a copy that was refused because the device was busy. Call it once for a copy, however often it is retried.
    pub fn count_busy(&self) {
        self.counts.add(Counter::CopiesBusy, 1);
    }

    /// Sets `len` bytes of device memory to `byte` and returns when it is done.
    pub fn fill(self: &Arc<Self>, addr: DeviceAddr, len: u64, byte: u8) -> Result<(), Error> {
        self.try_fill(addr, len, byte).map_err(|error| self.failed(error))
    }

    fn try_fill(&self, addr: DeviceAddr, len: u64, byte: u8) -> Result<(), Error> {
        self.can_copy()?;
        if len == 0 {
            return Ok(());
        }
        self.check_own(addr, len, "filling device memory")?;
        self.fill_range(addr, len, byte)
    }

    /// Clears old contents between the end of this allocation and the end of its last 4 KiB page, which no other
    /// allocation shares. For memory that the application mapped, the application must do that.
    pub(crate) fn clear_tail(&self, base: DeviceAddr, len: u64) -> Result<(), Error> {
        let tail = len.next_multiple_of(PAGE_SIZE) - len;
        if tail == 0 || !self.open.memory.has(base.0) {
            return Ok(());
        }
        self.can_copy()?;
        self.fill_range(DeviceAddr(base.0 + len), tail, 0)
    }

    /// Fills device memory in an allocation of ours.
    fn fill_range(&self, addr: DeviceAddr, len: u64, byte: u8) -> Result<(), Error> {
        let unit = self.open.engine.limits().map_err(Clone::clone)?.rule.unit();
        let first = addr.0.next_multiple_of(unit).min(addr.0 + len);
        let last = ((addr.0 + len) / unit * unit).max(first);
        if unit > 1 {
            let gone =
                || Error::new(ErrorKind::DeviceNotFound, "filling", "the card was closed", "");
            let device = self.registry.device(self.id()).ok_or_else(gone)?;
            unaligned::fill(&device, addr, first - addr.0, byte)?;
            unaligned::fill(&device, DeviceAddr(last), addr.0 + len - last, byte)?;
        }
        let (addr, len) = (DeviceAddr(first), last - first);
        for (at, len) in packet::split(len) {
            let dma = LinDma::Fill { dst: DeviceAddr(addr.0 + at), len, byte };
            let direction = Direction::DeviceToDevice;
            let tally = Tally::one(direction, Path::Fill, len.into());
            let permit = self.open.engine.wait_for_permit();
            // Recorded while it runs, so that freeing the memory waits for it.
            // SAFETY: it writes only device memory of a live allocation.
            let submitted =
                unsafe { permit.submit(direction, smallvec![dma], Resources::default(), tally) };
            submitted.and_then(|submission| self.open.engine.wait(&submission))?;
        }
        Ok(())
    }

    /// Completes finished copies whose transfers were dropped, and releases cached pins of host memory
    /// that was unmapped. Returns how many copies are still in flight. Never waits for a copy.
    pub fn progress(&self) -> usize {
        if !self.is_ours() {
            return 0;
        }
        self.open.pins.cache().reclaim();
        self.open.engine.reap()
    }

    /// Waits until no copy is in flight. Returns the first failure among those that were.
    pub fn drain(&self) -> Result<(), Error> {
        self.check_process("waiting for copies")?;
        self.open.engine.drain().map_err(|error| error.on(self))
    }

    /// Notifies when the next copy in flight on this device ends, whichever interface started it. Returns
    /// `false`, and will not notify, if there are none.
    ///
    /// The first call starts a thread that sleeps in the driver; it ends with the device.
    pub fn notify_on_completion(&self, notifier: &Arc<Notifier>) -> bool {
        self.is_ours() && self.open.engine.notify_on_completion(notifier)
    }

    /// Whether a copy that is started now would get a permit to submit. Never blocks.
    pub fn can_submit(&self) -> bool {
        self.open.engine.try_permit().is_some()
    }

    /// Counts a failure that is returned to the caller.
    pub(crate) fn failed(&self, error: Error) -> Error {
        self.counts.failed(error.kind());
        error.on(self)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// The peers' memory that this device keeps open. The floor above knows the type ([`Upcalls::peer_handles`]).
    pub(crate) fn peer_handles(&self) -> &dyn Any {
        &*self.open.peer_handles
    }

    /// The state that all devices of this process share.
    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.open.backend
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.open.engine
    }

    /// Slots for small or unpinnable host buffers. Allocated by the first copy that needs one.
    pub(crate) fn bounce(&self) -> Result<&Arc<SlotPool>, Error> {
        made_once(&self.open.bounce, || {
            let (count, len) = self.open.backend.bounce_slots();
            SlotPool::new(len, count)
        })
    }

    /// The slot of a permit, and its device address. The slots are allocated by the first short copy.
    pub(crate) fn slot_of(
        self: &Arc<Self>,
        permit: &SubmitPermit<'_>,
    ) -> Result<(*mut u8, DeviceAddr), Error> {
        let slots = made_once(&self.open.permit_slots, || PermitSlots::new(self))?;
        Ok(slots.slot(permit.slot()))
    }

    /// Slots for staging between two cards. Allocated by the first copy that needs one.
    pub(crate) fn staging(&self) -> Result<&Arc<SlotPool>, Error> {
        made_once(&self.open.staging, || SlotPool::new(STAGING_LEN, STAGING_SLOTS))
    }

    /// The contents of this device's registration cache.
    pub fn registration_cache(&self) -> CacheInfo {
        self.open.pins.cache().info()
    }

    /// The device address of host memory, if one pin in the registration cache covers all of it. Counted
    /// like a copy's lookup.
    pub fn cached_at(&self, ptr: *const u8, len: usize) -> Option<DeviceAddr> {
        self.open.pins.cache().address_of(ptr as usize, len)
    }

    /// The host memory that is pinned for this device.
    pub(crate) fn pins(&self) -> &Pins {
        &self.open.pins
    }
}

/// The cell's value; makes it if there is none. A failure is not stored, because memory may be free the next time.
fn made_once<T>(cell: &OnceLock<T>, make: impl FnOnce() -> Result<T, Error>) -> Result<&T, Error> {
    match cell.get() {
        Some(value) => Ok(value),
        None => {
            let made = make()?;
            Ok(cell.get_or_init(|| made))
        }
    }
}

impl PinOwner for Device {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn backend(&self) -> &dyn Backend {
        self.backend()
    }

    fn counts(&self) -> Counts {
        self.counts
    }

    fn pins(&self) -> &Pins {
        self.pins()
    }

    fn is_ours(&self) -> bool {
        self.is_ours()
    }

    fn note_loss(&self, error: Error) -> Error {
        self.engine().note_loss(error)
    }
}

impl HostRegion {
    /// Whether the region has a pin of its own on this device at the moment.
    pub fn is_pinned_for(&self, device: &Device) -> bool {
        self.has_pin(device)
    }

    /// Pins the region now instead of at the first copy. Returns whether that was possible.
    ///
    /// # Safety
    /// The region's memory must stay allocated as long as the region lives and as long as copies use it.
    pub unsafe fn prepare(&self, device: &Arc<Device>) -> Result<bool, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.pin_now(device) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // Free nothing that the hardware still uses. Ignore failures: callers that waited have got theirs.
        let _ = self.open.engine.drain();
        self.open.engine.stop();
        self.counts.closed();
    }
}
