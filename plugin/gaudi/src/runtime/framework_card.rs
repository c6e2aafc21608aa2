//! The card of a framework (Synapse) in this process: found, used as its guest, and left in time.
//!
//! A framework has one card per process, and owns all of its memory. We do not open that card, but use it through the
//! framework ([`backend::synapse`](crate::backend::synapse)). Its pool is one range of device memory: any pointer
//! into it belongs to a tensor, or did.
//!
//! The framework may appear late: [`Runtime::locate`] polls again for an address that no host memory can have. It may
//! release the card early: hooks on its release calls announce that with [`Runtime::framework_releasing`]. What they
//! miss is noticed by hooks on the driver's calls ([`Runtime::framework_unmapping`]), else by the next poll. Polling
//! calls a function of the framework that changes nothing.
//!
//! The state is not locked while observers are notified or the framework is called. Polls take `attach_lock` for
//! reading and never wait for it. An announced release waits for polls, and holds it for writing until the card is
//! released; an unannounced one does not take it.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError, RwLockWriteGuard, TryLockError, Weak};

use hl_thunk::Generation;
use synapse::{Acquired, Framework, Pool};

use crate::backend::synapse::{Guest, ReleaseKind};
use crate::device::Withdrawn;
use crate::error::Phase;
use crate::memory::DeviceRange;
use crate::process::Instance;
use crate::window::KEPT_CLEAR;
use crate::{Device, DeviceAddr, DeviceChoice, DeviceInfo, Error, ErrorKind, PortMasks, Runtime};

const ATTACHING: &str = "attaching to the card of Synapse";

/// Whether the framework has a card that can be used.
#[derive(Debug)]
pub(crate) enum FrameworkStatus {
    /// It is not in this process.
    Absent,
    /// It is, and has no card (yet, or any more).
    NoCard,
    /// Its card.
    Card(Arc<Device>),
    /// It has a card that cannot be used.
    Unusable(Error),
}

#[derive(Debug, Default)]
pub(super) struct State {
    current: Option<AttachedCard>,
    /// The last card that could not be used, and why.
    unusable: Option<(Acquired, Error)>,
    /// How often a card came or went. What the framework said about its card before a change may be outdated.
    changes: u64,
    /// Guests that have left the card because of a release which the framework then refused.
    left: Vec<Weak<Guest>>,
}

/// The framework's card.
#[derive(Debug)]
struct AttachedCard {
    card: Acquired,
    device: Arc<Device>,
    backend: Arc<Guest>,
}

/// The process that first saw a card of the framework's. A child of it has the framework's state, but not its threads.
static SEEN_BY: OnceLock<Instance> = OnceLock::new();

thread_local! {
    /// The framework is releasing its card on this thread, and must not be called.
    static RELEASING: Cell<bool> = const { Cell::new(false) };
}

fn state() -> MutexGuard<'static, State> {
    super::own().framework.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While this lives, the framework releases its card and is not polled.
#[must_use = "keep it until the framework has released the card"]
#[derive(Debug)]
pub struct Releasing {
    // `None` inside another one.
    _alone: Option<RwLockWriteGuard<'static, ()>>,
    was_releasing: bool,
    /// The guests that left the card for this release.
    ended: Vec<Arc<Guest>>,
}

impl Releasing {
    /// The framework answered that it did not release the card. If it still has it, memory that we have in its pool
    /// is given back when it is freed; the next poll attaches to the card as to a new one.
    pub fn refused(&self) {
        for guest in &self.ended {
            let changes = state().changes;
            if !guest.is_acquired() {
                continue;
            }
            let mut state = state();
            // Otherwise the card may have been released since the framework was asked.
            if state.changes == changes {
                guest.stays();
                state.left.push(Arc::downgrade(guest));
            }
        }
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        RELEASING.set(self.was_releasing);
    }
}

impl Runtime {
    /// Asks the framework for its card, and follows what has changed. `known`: cards that were discovered just now.
    pub(crate) fn poll_framework(&self, known: &[DeviceInfo]) -> FrameworkStatus {
        let Some(framework) = self.framework() else { return FrameworkStatus::Absent };
        if RELEASING.get() {
            return FrameworkStatus::NoCard;
        }
        if SEEN_BY.get().is_some_and(|seen_by| *seen_by != Instance::current()) {
            return FrameworkStatus::Unusable(Error::forked(ATTACHING));
        }
        let _attaching = match super::own().attach_lock.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // The framework is releasing its card.
            Err(TryLockError::WouldBlock) => return FrameworkStatus::NoCard,
        };
        loop {
            let changes = state().changes;
            let acquired = match framework.acquired() {
                Ok(acquired) => acquired,
                Err(error) => return FrameworkStatus::Unusable(unusable(error.to_string())),
            };
            let mut locked = state();
            if locked.changes != changes {
                continue;
            }
            let same = |current: &AttachedCard| {
                Some(current.card) == acquired && current.backend.is_present()
            };
            let is_lost = locked.current.as_ref().is_some_and(|current| !same(current));
            // A guest must not give memory back to a later card: others may have that memory by now.
            let is_gone = |guest: &Guest| is_lost || Some(guest.card()) != acquired;
            if is_lost || locked.left.iter().filter_map(Weak::upgrade).any(|left| is_gone(&left)) {
                let (current, left) = self.take(&mut locked, is_gone);
                drop(locked);
                self.leave(current, &left, ReleaseKind::Unannounced);
                continue;
            }
            let Some(card) = acquired else { return FrameworkStatus::NoCard };
            if let Some(current) = &locked.current {
                return FrameworkStatus::Card(Arc::clone(&current.device));
            }
            if let Some((_, error)) = locked.unusable.as_ref().filter(|(known, _)| *known == card) {
                return FrameworkStatus::Unusable(error.clone());
            }
            SEEN_BY.get_or_init(Instance::current);
            drop(locked);
            // Without the lock: a hook may wait for it while the framework holds locks that these calls need.
            let described = self.describe(&framework, &card, known);
            let mut locked = state();
            if locked.changes != changes {
                continue;
            }
            match described.and_then(|(info, pool)| self.attach(&framework, card, &info, pool)) {
                Ok(current) => {
                    let device = Arc::clone(&current.device);
                    locked.current = Some(current);
                    locked.changes += 1;
                    drop(locked);
                    self.announce_pool(&device);
                    return FrameworkStatus::Card(device);
                }
                Err(error) => {
                    locked.unusable = Some((card, error.clone()));
                    return FrameworkStatus::Unusable(error);
                }
            }
        }
    }

    /// Which card it is, and where its memory is, as the framework reports them.
    fn describe(
        &self,
        framework: &Framework,
        card: &Acquired,
        known: &[DeviceInfo],
    ) -> Result<(DeviceInfo, Pool), Error> {
        let info = self.info_of(framework, card, known)?;
        let pool = framework.pool(card).map_err(|error| {
            let detail = format!("where its memory is, is not known: {error}");
            Error::unsupported(ATTACHING, detail, "use Synapse 1.16 or later with its libscal")
                .on(&info)
        })?;
        Ok((info, pool))
    }

    /// Does not call the framework.
    fn attach(
        &self,
        framework: &Arc<Framework>,
        card: Acquired,
        info: &DeviceInfo,
        pool: Pool,
    ) -> Result<AttachedCard, Error> {
        let overlap = self.devices().into_iter().find(|other| {
            let window = other.window().range();
            // A guest's card has been released by the framework.
            !other.is_guest() && window.start < pool.range.end && pool.range.start < window.end
        });
        if let Some(other) = overlap {
            let detail = format!("its memory at {:#x} has addresses of {other}", pool.range.start);
            let remedy = "close that card, or use another in this process";
            return Err(Error::new(ErrorKind::DeviceBusy, ATTACHING, detail, remedy).on(info));
        }
        if let (Some(larger), Some(log)) = (framework.larger_structure(), self.on_wait.get()) {
            log(&format!(
                "{} writes {} bytes, of which {} are known here: the framework is newer than this version. The known \
                 part is used; please report this",
                larger.call, larger.written, larger.known
            ));
        }
        // SAFETY: it is used only while the framework says that it has this very card.
        let device = unsafe { hl_thunk::Device::borrow(self.library()?, card.fd) };
        let device =
            device.map_err(|error| Error::driver(Phase::Use, ATTACHING, error).on(info))?;
        let range = pool.range.clone();
        let backend = Arc::new(Guest::new(Arc::clone(framework), card, pool, device));
        let device = self.adopt(info, Arc::clone(&backend) as Arc<_>)?;
        let (base, len) = (range.start, range.end - range.start);
        self.table().insert(DeviceRange { base, len, device: device.id() });
        Ok(AttachedCard { card, device, backend })
    }

    /// The card as discovery describes it; if it is hidden from discovery, as far as the framework describes it.
    fn info_of(
        &self,
        framework: &Framework,
        card: &Acquired,
        known: &[DeviceInfo],
    ) -> Result<DeviceInfo, Error> {
        // SAFETY: the framework has it open.
        let fd = unsafe { BorrowedFd::borrow_raw(card.fd) };
        let library = self.library()?;
        let bus_id = match library.bus_id_of(fd) {
            Ok(bus_id) => bus_id,
            Err(error) => framework
                .bus_id()
                .map_err(|_| Error::driver(Phase::Use, "finding the card of Synapse", error))?,
        };
        let bus_id = bus_id.parse()?;
        let is_meant = |card: &&DeviceInfo| card.bus_id == bus_id;
        if let Some(info) = known.iter().find(is_meant) {
            return Ok(info.clone());
        }
        if let Some(info) = self.discover().unwrap_or_default().iter().find(is_meant) {
            return Ok(info.clone());
        }
        let is_its = |generation: &Generation| synapse_type(*generation) == Some(card.device_type);
        let generation = Generation::ALL.into_iter().find(is_its).ok_or_else(|| {
            unusable(format!("it is of type {}, which is not known", card.device_type))
        })?;
        let node = card.index.map_or(card.module_id, u32::from);
        Ok(DeviceInfo {
            index: node,
            node,
            module_id: card.module_id,
            bus_id,
            generation,
            ports: PortMasks::default(),
            card_name: generation.to_string(),
            driver_version: library.version().unwrap_or("unknown").to_owned(),
            is_software: library.is_software(),
        })
    }

    fn announce_pool(&self, device: &Arc<Device>) {
        let (id, window) = (device.id(), device.window());
        self.windows().mapped(window.clone());
        let is_current = |current: &AttachedCard| current.device.id() == id;
        if !state().current.as_ref().is_some_and(is_current) {
            // Another thread has left the card, perhaps before its pool was announced.
            self.windows().unmapping(window.start, id);
        }
    }

    /// Removes the guests of a card that goes away from the state, and its memory from the table: from then on a poll
    /// may attach to the next card, which may have the same addresses.
    fn take(
        &self,
        state: &mut State,
        is_meant: impl Fn(&Guest) -> bool,
    ) -> (Option<AttachedCard>, Vec<Arc<Guest>>) {
        state.changes += 1;
        let current = state.current.take_if(|current| is_meant(&current.backend));
        if let Some(AttachedCard { device, .. }) = &current {
            self.table().remove(device.window().start.0, device.id());
        }
        let left: Vec<_> = state.left.iter().filter_map(Weak::upgrade).collect();
        let (gone, left): (Vec<_>, Vec<_>) = left.into_iter().partition(|guest| is_meant(guest));
        state.left = left.iter().map(Arc::downgrade).collect();
        (current, gone)
    }

    /// The card goes away: forgets its memory, makes peers and network devices release it, and ends our use of it.
    fn leave(&self, current: Option<AttachedCard>, left: &[Arc<Guest>], how: ReleaseKind) {
        left.iter().for_each(|guest| guest.end(how));
        let Some(AttachedCard { device, backend, .. }) = current else { return };
        if how == ReleaseKind::Unannounced {
            // First: waiting for copies would call the framework.
            backend.refuse();
        }
        let (start, len) = (device.window().start, device.window().len);
        self.windows().unmapping(start, device.id());
        Withdrawn::wait(&[device.withdraw_foreign(start, len)]);
        device.engine().lose();
        backend.end(how);
    }

    /// The framework is about to release its card. When this returns, nothing of ours is on it: copies have ended,
    /// later ones fail, observers were notified, and peers have had a second to release its memory. No thread
    /// attaches to it again before the result is dropped.
    pub fn framework_releasing(&self) -> Releasing {
        let was_releasing = RELEASING.replace(true);
        let alone = || super::own().attach_lock.write().unwrap_or_else(PoisonError::into_inner);
        let mut releasing =
            Releasing { _alone: (!was_releasing).then(alone), was_releasing, ended: Vec::new() };
        if !was_releasing {
            releasing.ended = self.end_framework(ReleaseKind::Announced, |_| true);
        }
        releasing
    }

    /// The framework is in the middle of releasing its card, and unmaps memory or closes a descriptor. Like
    /// [`Runtime::framework_releasing`], but the framework is not called, and calls under way are not waited for.
    /// Returns whether it was the framework's card.
    pub fn framework_unmapping(&self, fd: c_int, start: Option<DeviceAddr>) -> bool {
        let was_releasing = RELEASING.replace(true);
        let ended =
            self.end_framework(ReleaseKind::Unannounced, |guest| guest.is_mapped(fd, start));
        RELEASING.set(was_releasing);
        !ended.is_empty()
    }

    /// Ends the use of the framework's card. Returns the guests that were on it.
    fn end_framework(
        &self,
        how: ReleaseKind,
        is_meant: impl Fn(&Guest) -> bool,
    ) -> Vec<Arc<Guest>> {
        if SEEN_BY.get().is_none_or(|seen_by| *seen_by != Instance::current()) {
            return Vec::new();
        }
        let (current, left) = {
            let mut state = state();
            state.unusable = None;
            self.take(&mut state, is_meant)
        };
        let backend = current.as_ref().map(|current| Arc::clone(&current.backend));
        self.leave(current, &left, how);
        backend.into_iter().chain(left).collect()
    }

    /// The framework's card, if it has one that can be used; polls again. An error says why its card cannot be used.
    pub fn framework_card(&self) -> Result<Option<Arc<Device>>, Error> {
        match self.poll_framework(&[]) {
            FrameworkStatus::Absent | FrameworkStatus::NoCard => Ok(None),
            FrameworkStatus::Card(device) => Ok(Some(device)),
            FrameworkStatus::Unusable(error) => Err(error),
        }
    }

    /// Where a framework would have its memory, for the generations of the cards that are here. No host memory and no
    /// card of ours has these addresses.
    pub fn framework_addresses(&self) -> Vec<Range<u64>> {
        let mut generations: Vec<Generation> =
            self.discover().unwrap_or_default().iter().map(|card| card.generation).collect();
        generations.dedup();
        let pools = generations.iter().flat_map(|generation| generation.framework_pools());
        pools.map(|&start| start..start + KEPT_CLEAR).collect()
    }

    /// Whether a framework (Synapse) is in this process: its card is used through it, by copies as well.
    pub fn has_framework(&self) -> bool {
        self.framework().is_some()
    }

    /// The address of a function of the framework's library, for hooks.
    pub fn framework_function(&self, name: &CStr) -> Option<*const c_void> {
        self.framework()?.function(name)
    }

    fn framework(&self) -> Option<Arc<Framework>> {
        if self.options().use_framework == Some(false) { None } else { Framework::find() }
    }

    /// The framework's card, if `choice` leads to it among `candidates`; `None` if a card of our own is to be opened.
    /// An error if there is no card to use other than one that the framework may want.
    pub(crate) fn open_framework_card(
        &self,
        choice: &DeviceChoice,
        candidates: &[DeviceInfo],
    ) -> Result<Option<Arc<Device>>, Error> {
        let named = !matches!(choice, DeviceChoice::Any | DeviceChoice::Numa);
        match self.poll_framework(candidates) {
            FrameworkStatus::Absent => Ok(None),
            FrameworkStatus::Card(device) => {
                let is_candidate =
                    candidates.iter().any(|card| card.bus_id == device.info().bus_id);
                if named && !is_candidate { Ok(None) } else { Ok(Some(device)) }
            }
            FrameworkStatus::NoCard | FrameworkStatus::Unusable(_) if named => Ok(None),
            FrameworkStatus::NoCard => Err(Error::new(
                ErrorKind::DeviceBusy,
                super::opening::OPENING,
                "Synapse is in this process and has acquired no card; a card that is opened here could be the one \
                 it wants",
                "have the framework acquire its card first, or choose a card for this library alone",
            )),
            FrameworkStatus::Unusable(error) => Err(error),
        }
    }
}

/// `synDeviceType` of the cards that a guest can use.
fn synapse_type(generation: Generation) -> Option<u32> {
    match generation {
        Generation::Gaudi => None,
        Generation::Gaudi2 => Some(synapse::sys::TYPE_GAUDI2),
        Generation::Gaudi3 => Some(synapse::sys::TYPE_GAUDI3),
    }
}

fn unusable(detail: String) -> Error {
    Error::unsupported(ATTACHING, detail, "")
}
