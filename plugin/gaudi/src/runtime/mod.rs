//! What a process has one of: the driver library, the open cards, their windows, and the table of Gaudi addresses.

pub(crate) mod discovery;
pub(crate) mod framework_card;
pub(crate) mod keep_open;
pub(crate) mod lent_cards;
pub(crate) mod mapping_table;
pub(crate) mod nics;
pub(crate) mod opening;
pub(crate) mod owners;
pub(crate) mod pairing;
pub(crate) mod selection;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use hl_thunk::{Generation, Library};

use crate::backend::driver::Driver;
use crate::backend::{Backend, Placement};
use crate::device::{Registry, Upcalls};
use crate::error::Phase;
use crate::memory::AddressTable;
use crate::process::PerProcess;
use crate::rcache::{self, CacheLimits, Watch};
use crate::topology::PciLink;
use crate::window::{ReservedAddresses, Windows};
use crate::{
    BusId, Conflict, Device, DeviceAddr, DeviceChoice, DeviceId, DeviceInfo, Error, ErrorKind,
    Location, Options, RegistrationCache, Side, Sysfs, Window, WindowEvent, share,
};
use discovery::{Discovered, Note};
use lent_cards::LentCards;
use opening::{OPEN_TIMEOUT, OPENING, first_to_open, is_in_reset, none_opened};
use owners::Owners;
use selection::Selection;

/// The engine of this process. See [`runtime()`].
pub struct Runtime {
    library: OnceLock<Result<Arc<Library>, Error>>,
    cards: Mutex<HashMap<BusId, OpenCard>>,
    /// The same devices. Its list is replaced under the lock of `cards`.
    registry: Arc<Registry>,
    card_closed: Condvar,
    next_id: AtomicU32,
    notes: Mutex<Notes>,
    pub(crate) lent: LentCards,
    /// Logs what the engine waits for.
    on_wait: OnceLock<OnWait>,
}

type OnWait = Box<dyn Fn(&str) + Send + Sync>;

/// The calls of devices into this floor and into the one of peers.
const UPCALLS: Upcalls = Upcalls {
    poll_framework: || drop(runtime().poll_framework(&[])),
    peer_handles: share::peer_handles,
    freed: share::freed,
    card_lost: share::card_lost,
    drop_lost: keep_open::drop_lost,
};

/// A card that is open, or just being closed (then `device` has expired and the entry is removed soon).
#[derive(Debug)]
struct OpenCard {
    id: DeviceId,
    info: DeviceInfo,
    device: Weak<Device>,
}

impl OpenCard {
    fn is_closing(&self) -> bool {
        self.device.strong_count() == 0
    }
}

/// Lines for a log, each logged once.
#[derive(Debug, Default)]
struct Notes {
    waiting: Vec<Note>,
    known: BTreeSet<Note>,
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("cards", &self.cards()).finish_non_exhaustive()
    }
}

/// The engine of this process. Touching it costs nothing: no library is loaded, no device opened,
/// no thread started until a function is called that needs it.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(Runtime::new)
}

/// State that a forked child has anew: it has no cards yet, and threads that it lacks may hold its parent's locks.
#[derive(Debug, Default)]
struct Own {
    opening: Mutex<()>,
    kept: Mutex<keep_open::State>,
    framework: Mutex<framework_card::State>,
    /// Polls of the framework take it for reading, an announced release of its card for writing.
    attach_lock: RwLock<()>,
}

fn own() -> &'static Own {
    static OWN: PerProcess<Own> = PerProcess::new();
    OWN.get_or_default()
}

impl Runtime {
    fn new() -> Self {
        Self {
            library: OnceLock::new(),
            cards: Mutex::default(),
            registry: Registry::new(UPCALLS),
            card_closed: Condvar::new(),
            next_id: AtomicU32::new(0),
            notes: Mutex::default(),
            lent: LentCards::default(),
            on_wait: OnceLock::new(),
        }
    }

    /// Loads the driver library and lists the cards this process may use, through control nodes
    /// only: those of `GAUDI_MAPPING_TABLE` where it is set, else all, less what
    /// `HABANA_VISIBLE_MODULES` hides. No cards is an error of kind `DeviceNotFound` whose text
    /// says whether the library or the cards are missing; a library that did not load is not tried
    /// again. A variable that makes no sense is an error, not ignored.
    pub fn discover(&self) -> Result<Vec<DeviceInfo>, Error> {
        Ok(self.look()?.cards)
    }

    fn look(&self) -> Result<Discovered, Error> {
        let found = discovery::discover(self.library()?)?;
        let notes = &mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        for note in &found.notes {
            if notes.known.insert(note.clone()) {
                notes.waiting.push(note.clone());
            }
        }
        Ok(found)
    }

    /// What discovery ignored, each once, since the last call: for a log.
    pub fn take_notes(&self) -> Vec<Note> {
        std::mem::take(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner).waiting)
    }

    /// The cards that [`Runtime::open`] would try for this choice, in this order; at least one.
    /// Opens none of them.
    pub fn candidates(&self, choice: &DeviceChoice) -> Result<Vec<DeviceInfo>, Error> {
        Ok(self.select(choice)?.cards)
    }

    /// Why [`Runtime::candidates`] are those for this choice.
    pub fn why_chosen(&self, choice: &DeviceChoice) -> Result<String, Error> {
        Ok(self.select(choice)?.why)
    }

    fn select(&self, choice: &DeviceChoice) -> Result<Selection, Error> {
        selection::select(choice, self.look()?)
    }

    /// The driver library, if it was needed before.
    pub(crate) fn library_if_loaded(&self) -> Option<&Arc<Library>> {
        self.library.get()?.as_ref().ok()
    }

    /// Held while a card is opened, but not while one is waited for: one is opened at a time, so that two
    /// threads share it instead of racing for it.
    pub(crate) fn opening(&self) -> MutexGuard<'static, ()> {
        own().opening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn library(&self) -> Result<&Arc<Library>, Error> {
        let loaded = self.library.get_or_init(|| {
            Library::load().map_err(|error| {
                let named = error.named_by_variable;
                let remedy = if named {
                    "correct or unset HL_THUNK_LIBRARY, which names the file of the driver library"
                } else {
                    "install habanalabs-thunk, or set HL_THUNK_LIBRARY"
                };
                let what = "loading the driver library";
                let error = Error::new(ErrorKind::DeviceNotFound, what, error.to_string(), remedy);
                if named { error.caused_by_setting() } else { error }
            })
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    /// Takes a card for this process. One that is already open here and matches is shared. Without
    /// a choice, the one that `HLS_MODULE_ID` names, else the first card that opens.
    ///
    /// Refused in a child that was forked while its parent had a card open: the engine's state is its
    /// parent's, and so are the threads and the locks. A child that was forked before opens cards as any
    /// process does.
    pub fn open(&self, choice: &DeviceChoice) -> Result<Arc<Device>, Error> {
        self.check_process(OPENING)?;
        keep_open::drop_lost();
        let Selection { cards: candidates, left_out, .. } = self.select(choice)?;
        if let Some(device) = self.open_framework_card(choice, &candidates)? {
            return Ok(device);
        }
        if let Some(shared) = self.share_open(&candidates) {
            return shared;
        }
        let limit = self.options().open_timeout.unwrap_or(OPEN_TIMEOUT);
        let waiting = |line: &str| {
            if let Some(log) = self.on_wait.get() {
                log(line);
            }
        };
        let begun = Instant::now();
        let open = |card: &DeviceInfo| {
            self.wait_until_closed(&card.bus_id, limit.saturating_sub(begun.elapsed()));
            let _opening = self.opening();
            // Another thread may have opened one meanwhile.
            let shared = self.share_open(&candidates);
            shared.unwrap_or_else(|| Ok(self.keep(self.open_card(card)?)))
        };
        let opened = first_to_open(candidates.clone(), limit, open, std::thread::sleep, waiting);
        opened.or_else(|failures| {
            let mut error = none_opened(failures, |nodes| self.owners(nodes));
            left_out.iter().for_each(|line| error.add_detail(line));
            if error.kind() != ErrorKind::DeviceBusy {
                return Err(error);
            }
            self.adopt_busy(&candidates).ok_or(error)
        })
    }

    /// Fails in a child that was forked while its parent had cards open. Takes no lock: in such a child, a thread
    /// that does not exist may hold it.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<(), Error> {
        if self.registry.is_inherited() { Err(Error::forked(operation)) } else { Ok(()) }
    }

    /// Names of the host's NICs that can carry data and are nearest to a card, as sysfs has it now; several if they are
    /// equally near.
    pub fn nearest_nics(&self, card: &DeviceInfo) -> Vec<String> {
        nics::nearest(&Sysfs::default(), card)
    }

    /// How a card is connected to the host, as sysfs has it now. `None` where it does not say, or
    /// has something else at the card's address: a software card is not one of the machine's
    /// devices.
    pub fn link(&self, card: &DeviceInfo) -> Option<PciLink> {
        let sysfs = Sysfs::default();
        let there = sysfs.location(&card.bus_id).is_some_and(|place| place.is_gaudi());
        if there { sysfs.link(&card.bus_id) } else { None }
    }

    /// Which processes have the cards with these nodes open, as far as this user may see.
    pub fn owners(&self, nodes: &[u32]) -> Vec<Owners> {
        self.library().map(|library| owners::of_cards(library, nodes)).unwrap_or_default()
    }

    /// A card of `candidates` that this process has open, for one more user.
    fn share_open(&self, candidates: &[DeviceInfo]) -> Option<Result<Arc<Device>, Error>> {
        let device = self.find_open(candidates)?;
        // An error of one submission does not mean a reset.
        if !device.is_surely_lost() {
            return Some(Ok(self.keep(device)));
        }
        let detail = "it was reset, and this process still holds memory of it";
        let remedy = "free all memory of this card, then open it again";
        Some(Err(Error::new(ErrorKind::DeviceBusy, OPENING, detail, remedy).on(&device)))
    }

    /// Keeps a card open if the options say so. The application closes its own cards.
    fn keep(&self, device: Arc<Device>) -> Arc<Device> {
        if !self.is_lent(device.id()) && !device.is_guest() {
            keep_open::opened(&device, self.options().keep_open.unwrap_or_default());
        }
        device
    }

    /// A card of `candidates` that this process has open.
    fn find_open(&self, candidates: &[DeviceInfo]) -> Option<Arc<Device>> {
        let cards = self.cards();
        let open = |card: &DeviceInfo| cards.get(&card.bus_id)?.device.upgrade();
        candidates.iter().find_map(open)
    }

    fn open_card(&self, card: &DeviceInfo) -> Result<Arc<Device>, Error> {
        // Do not wait for the end of closing here, with the lock held.
        if self.cards().get(&card.bus_id).is_some_and(OpenCard::is_closing) {
            return Err(Error::os(Phase::Open, OPENING, "hlthunk_open", libc::EAGAIN).on(card));
        }
        let library = self.library()?;
        let opened = hl_thunk::Device::open(library, card.bus_id.as_str());
        let device = opened.map_err(|mut error| {
            // Some drivers also return "busy" for a card in reset.
            if error.errno == libc::EBUSY && is_in_reset(Sysfs::default().card_status(&card.bus_id))
            {
                error.errno = libc::EAGAIN;
            }
            Error::driver(Phase::Open, OPENING, error).on(card)
        })?;
        self.adopt(card, Arc::new(Driver::new(device, None)))
    }

    /// Makes a device of an opened card.
    pub(crate) fn adopt(
        &self,
        info: &DeviceInfo,
        backend: Arc<dyn Backend>,
    ) -> Result<Arc<Device>, Error> {
        let mut geometry = backend.geometry();
        let mut range = self.windows().range_for(info, geometry).map_err(|error| error.on(info))?;
        let mut blocked = None;
        if let Placement::Physical(_) = geometry.placement {
            let (block, part) = self.block(info, &range)?;
            geometry.total = part.end - part.start;
            geometry.page = geometry.total;
            geometry.placement = Placement::Physical(part.start);
            (blocked, range) = (Some(block), part);
        }
        let id = DeviceId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let window = Window {
            start: DeviceAddr(range.start),
            len: range.end - range.start,
            device: id,
            info: info.clone(),
        };
        let listed = Box::new(DirectoryGuard { bus_id: info.bus_id.clone(), id });
        let registry = Arc::clone(&self.registry);
        let device = Device::new(backend, window, geometry, blocked, registry, listed);
        let open = OpenCard { id, info: info.clone(), device: Arc::downgrade(&device) };
        let mut cards = self.cards();
        cards.insert(info.bus_id.clone(), open);
        self.list(&cards);
        drop(cards);
        Ok(device)
    }

    /// Keeps host memory out of a first-generation card's addresses.
    fn block(
        &self,
        info: &DeviceInfo,
        range: &Range<u64>,
    ) -> Result<(ReservedAddresses, Range<u64>), Error> {
        let other = {
            let cards = self.cards();
            let mut open = cards.values().map(|card| &card.info);
            open.find(|card| card.generation == Generation::Gaudi).cloned()
        };
        if let Some(other) = other {
            return Err(Error::unsupported(
                OPENING,
                format!("{other} is open, and first-generation cards have the same addresses"),
                "use one first-generation card per process",
            )
            .on(info));
        }
        ReservedAddresses::largest_part_of(range).map_err(|error| error.on(info))
    }

    /// Waits while another thread of this process closes the card: it would look busy. That thread may have to wait
    /// itself: for other cards, or for what a peer has sent it.
    fn wait_until_closed(&self, bus_id: &BusId, limit: Duration) {
        let closing = |cards: &mut HashMap<BusId, OpenCard>| {
            cards.get(bus_id).is_some_and(OpenCard::is_closing)
        };
        let waited = self.card_closed.wait_timeout_while(self.cards(), limit, closing);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Sets options of this process; those that are `None` stay as they are. The last value of an option is used; a
    /// conflict with an earlier one is reported once ([`Runtime::take_conflicts`]).
    pub fn configure(&self, options: Options) {
        let handle_limits = options.handle_limits;
        self.registry.options.set(options);
        // Cards that are opened later take the limits from the options.
        if let Some(limits) = handle_limits {
            self.devices().iter().for_each(|device| device.set_handle_limits(limits));
        }
    }

    /// Calls `log` with a line for people while an open waits for a card. The first one set is used.
    pub fn on_wait(&self, log: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.on_wait.set(Box::new(log));
    }

    /// The options of this process. Wait-free.
    pub fn options(&self) -> Arc<Options> {
        self.registry.options.get()
    }

    /// Options that were set to different values, each once, since the last call: for a log.
    pub fn take_conflicts(&self) -> Vec<Conflict> {
        self.registry.options.take_conflicts()
    }

    /// The open device with this id. Wait-free.
    pub fn device(&self, id: DeviceId) -> Option<Arc<Device>> {
        self.registry.device(id)
    }

    /// The cards this process has open.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        self.registry.devices()
    }

    /// Whether all of `[addr, addr + len)` is memory of one live allocation, and which. Wait-free for memory that is
    /// known and for host memory; for an unknown address that no host memory can have, the framework is asked.
    /// A length of zero asks about the address alone.
    pub fn locate(&self, addr: u64, len: usize) -> Option<Location> {
        self.registry.locate(addr, len)
    }

    /// What `[addr, addr + len)` is, as a side of a copy, which then needs no second look-up. Polls the framework as
    /// [`Runtime::locate`] does.
    pub fn find(&self, addr: u64, len: usize) -> Side {
        self.registry.find(addr, len)
    }

    /// Copies `len` bytes between two addresses of this process, each of host memory or of a live
    /// allocation, and returns when they have arrived. `None`, and nothing done, if neither is an
    /// allocation's.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Option<Result<(), Error>> {
        let (dst, src) = (self.find(dst, len), self.find(src, len));
        let device = self.registry.open_device(dst.device_id().or(src.device_id())?);
        // SAFETY: the caller's promise.
        Some(device.and_then(|device| unsafe { device.copy_blocking(dst, src, len) }))
    }

    /// Calls `observer` for every window: at once for those that exist, later on the thread that opens one, before an
    /// address in it is handed out. It is never removed. The engine holds no lock meanwhile: the observer may call
    /// back.
    pub fn subscribe(&self, observer: Box<dyn Fn(&WindowEvent) + Send + Sync>) {
        self.windows().subscribe(Arc::from(observer));
    }

    /// Failures of the driver in destructors, which return nothing, since the last call: for a log.
    pub fn take_drop_errors(&self) -> Vec<Error> {
        let Some(Ok(library)) = self.library.get() else { return Vec::new() };
        let errors = library.take_drop_errors();
        let name = |error| Error::driver(Phase::Use, "giving something back to the driver", error);
        errors.into_iter().map(name).collect()
    }

    fn list(&self, cards: &HashMap<BusId, OpenCard>) {
        self.registry.list(cards.values().map(|card| (card.id, &card.device)));
    }

    /// Never drop a [`Device`] handle while holding this: closing takes it too.
    fn cards(&self) -> MutexGuard<'_, HashMap<BusId, OpenCard>> {
        self.cards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn table(&self) -> &AddressTable {
        &self.registry.table
    }

    /// Makes every card keep the pins that copies from and to host memory need, for the next copy. `watch` is called
    /// before the first pin is kept: it starts to call [`rcache::invalidate`] for memory that is unmapped, or reports
    /// that it cannot; then nothing is kept.
    ///
    /// [`rcache::invalidate`]: crate::rcache::invalidate
    pub fn cache_registrations(&self, limits: CacheLimits, watch: Watch) {
        let cache = Some(RegistrationCache::Keep(limits));
        self.configure(Options { registration_cache: cache, ..Options::default() });
        rcache::SWITCH.enable(limits, watch);
    }

    /// Stops caching pins. Those that are cached are released: now, or when the copies
    /// that use them have ended.
    pub fn stop_caching_registrations(&self) {
        let cache = Some(RegistrationCache::Off);
        self.configure(Options { registration_cache: cache, ..Options::default() });
        rcache::SWITCH.off();
        rcache::clear();
    }

    /// Whether cards keep pins, as far as is known. Before the first would be kept: whether that is wanted; from then
    /// on: whether the watch could start.
    pub fn caches_registrations(&self) -> bool {
        rcache::SWITCH.is_wanted()
    }

    pub(crate) fn windows(&self) -> &Windows {
        &self.registry.windows
    }
}

impl Location {
    /// The device, unless it is being closed right now.
    pub fn device(&self) -> Option<Arc<Device>> {
        runtime().device(self.device_id)
    }
}

/// A device's entry in the list of open cards; the last part of the device to be dropped.
#[derive(Debug)]
pub(crate) struct DirectoryGuard {
    bus_id: BusId,
    id: DeviceId,
}

impl Drop for DirectoryGuard {
    fn drop(&mut self) {
        let runtime = runtime();
        runtime.windows().retired(self.id);
        let mut cards = runtime.cards();
        if cards.get(&self.bus_id).is_some_and(|card| card.id == self.id) {
            cards.remove(&self.bus_id);
            runtime.list(&cards);
        }
        drop(cards);
        runtime.card_closed.notify_all();
    }
}
