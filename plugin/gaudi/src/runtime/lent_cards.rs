//! Cards that the application opened by itself, and the memory it mapped on them. How such a card is driven is in
//! [`backend::lent`](crate::backend::lent).
//!
//! A card has one context, so a program that opened it keeps us out, unless it lends us the card:
//! then we work through a duplicate of its descriptor, which is the same context. Memory that it
//! mapped by itself is reported to us, by the program or by hooks on the driver library's calls, and is
//! from then on Gaudi memory like any other: detected, exported and, on a card that was lent, copied.
//!
//! Called from any thread, also from inside a driver call of the application. Observers are
//! notified with no lock held.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use synapse::Framework;

use super::owners;
use crate::backend::driver::Driver;
use crate::backend::lent::{Lender, driven_by_framework};
use crate::device::Withdrawn;
use crate::error::Phase;
use crate::memory::DeviceRange;
use crate::{
    BusId, Device, DeviceAddr, DeviceId, DeviceInfo, Error, ErrorKind, Remedy, Runtime, Window,
};

const LENDING: &str = "taking a card that the application lends";
const NOTING: &str = "noting memory that the application mapped";

/// The application's cards and memory, as far as we know them.
#[derive(Debug, Default)]
pub(crate) struct LentCards {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    cards: HashMap<BusId, Card>,
    /// How much memory is behind the driver's handles, by card, and through which descriptor it was
    /// allocated.
    sizes: HashMap<(BusId, u64), (u64, Descriptor)>,
}

/// One of the application's descriptors: its number and the file behind it, since the number may belong to another
/// file when we see it again. A duplicate is another descriptor: closing it ends nothing, and neither does closing a
/// control node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Descriptor {
    number: RawFd,
    file: (u64, u64, u64),
}

impl Descriptor {
    fn of(fd: BorrowedFd<'_>) -> Option<Descriptor> {
        let stat = rustix::fs::fstat(fd).ok()?;
        Some(Descriptor { number: fd.as_raw_fd(), file: (stat.st_dev, stat.st_ino, stat.st_rdev) })
    }
}

#[derive(Debug)]
struct Card {
    device: Arc<Device>,
    lent: bool,
    /// The descriptor that identifies it: the one that was lent, else the one that memory was first mapped with.
    descriptor: Descriptor,
    /// Mappings of the application: first address and length.
    memory: BTreeMap<u64, u64>,
}

/// Memory that is about to be unmapped; see [`Runtime::keep_memory`].
#[derive(Debug)]
pub struct Unmapping {
    card: BusId,
    start: u64,
    len: u64,
}

impl LentCards {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runtime {
    /// Uses a card that the application opened, through a descriptor of our own, until the application takes it back
    /// or (as the hooks see) closes it. `fd` is its compute node.
    pub fn lend(&self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        let info = self.card_of(fd)?;
        self.lent_device(&info, fd, true).map(drop)
    }

    /// The application wants its card back: forgets its memory and, once nothing of ours on the
    /// card is left, the card.
    pub fn take_back(&self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.check_process("giving a card back")?;
        let info = self.card_of(fd)?;
        if self.withdraw_card(&info.bus_id) {
            return Ok(());
        }
        let detail = "it was not lent";
        Err(Error::new(ErrorKind::InvalidParams, "giving a card back", detail, "").on(&info))
    }

    /// The application mapped `len` bytes at `start`. A card that was not lent is known from now on, but not used for copies.
    pub fn add_memory(&self, fd: BorrowedFd<'_>, start: DeviceAddr, len: u64) -> Result<(), Error> {
        let info = self.card_of(fd)?;
        self.lent_device(&info, fd, self.adopts_own_cards())?;
        let end = start.0.checked_add(len).filter(|_| start.0 != 0 && len != 0);
        let refuse = |detail: String, remedy| {
            Err(Error::new(ErrorKind::InvalidParams, NOTING, detail, remedy).on(&info))
        };
        let Some(end) = end else {
            let detail = match len {
                0 => format!("zero-length range at {start}"),
                _ => format!("{len} bytes at {start} are not device memory"),
            };
            return refuse(detail, "");
        };
        let overlaps = |from: u64, to: u64| from < end && start.0 < to;
        // Our own windows on other cards. On this card, the driver keeps the two apart.
        let in_a_window = self.devices().into_iter().any(|other| {
            let window = other.window().range();
            other.info().bus_id != info.bus_id && overlaps(window.start, window.end)
        });
        let device = {
            let mut state = self.lent.state();
            let mut known = state.cards.iter().flat_map(|(bus_id, card)| {
                card.memory.iter().map(move |(&from, &len)| (bus_id, from, len))
            });
            if let Some((bus_id, from, _)) =
                known.find(|&(_, from, len)| overlaps(from, from + len))
            {
                let other =
                    format!("{len} bytes at {start} overlap memory at {from:#x} of {bus_id}");
                return refuse(other, "two cards must not have memory at one address: use a hint");
            }
            if in_a_window {
                let detail = format!("{start} is in another card's window");
                return refuse(detail, "let the driver choose the address");
            }
            let Some(card) = state.cards.get_mut(&info.bus_id) else {
                return refuse(String::from("the card was taken back meanwhile"), "");
            };
            card.memory.insert(start.0, len);
            // Another device by now, if the card was lent meanwhile.
            let device = card.device.id();
            self.table().insert(DeviceRange { base: start.0, len, device });
            device
        };
        self.windows().mapped(Window { start, len, device, info });
        Ok(())
    }

    /// The application is about to unmap the memory at `start`. When this returns, submitted copies have ended, later
    /// ones fail, observers were notified, and peers have had a second to release it: those that do not use it have
    /// released it. A copy that another thread is just submitting, or a small one that it waits for, is not noticed:
    /// its caller uses memory that is being unmapped. `None`: the memory is not known.
    pub fn remove_memory(&self, fd: BorrowedFd<'_>, start: DeviceAddr) -> Option<Unmapping> {
        self.check_process(NOTING).ok()?;
        let card = self.bus_id_of(fd).ok()?;
        let (device, len) = {
            let mut state = self.lent.state();
            let known = state.cards.get_mut(&card)?;
            let len = known.memory.remove(&start.0)?;
            (Arc::clone(&known.device), len)
        };
        Withdrawn::wait(&[self.withdraw_memory(&device, start.0, len)]);
        Some(Unmapping { card, start: start.0, len })
    }

    /// The driver refused to unmap it: the memory still exists.
    pub fn keep_memory(&self, fd: BorrowedFd<'_>, unmapping: Unmapping) -> Result<(), Error> {
        debug_assert_eq!(self.bus_id_of(fd).ok(), Some(unmapping.card));
        self.add_memory(fd, DeviceAddr(unmapping.start), unmapping.len)
    }

    /// The application allocated device memory; its address follows when it is mapped.
    pub fn memory_allocated(&self, fd: BorrowedFd<'_>, handle: u64, len: u64) {
        if let (Ok(card), Some(through)) = (self.bus_id_of(fd), Descriptor::of(fd)) {
            self.lent.state().sizes.insert((card, handle), (len, through));
        }
    }

    /// The application is about to free device memory. Once that is done, another thread may be given the same
    /// handle. Returns the length, if we saw the allocation: if the driver refuses to free it, report it again with
    /// [`Runtime::memory_allocated`].
    pub fn memory_freeing(&self, fd: BorrowedFd<'_>, handle: u64) -> Option<u64> {
        let card = self.bus_id_of(fd).ok()?;
        self.lent.state().sizes.remove(&(card, handle)).map(|(len, _)| len)
    }

    /// The application mapped device memory. Its length follows from its handle, if we saw the allocation.
    pub fn memory_mapped(
        &self,
        fd: BorrowedFd<'_>,
        handle: u64,
        start: DeviceAddr,
    ) -> Result<(), Error> {
        let card = self.bus_id_of(fd)?;
        let size = self.lent.state().sizes.get(&(card, handle)).copied();
        let (len, _) = size.ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidParams,
                NOTING,
                format!(
                    "the memory at {start} was allocated before its allocation could be noticed"
                ),
                Remedy::ReportLength,
            )
        })?;
        self.add_memory(fd, start, len)
    }

    /// The application is about to close a descriptor. If it is the one that the card was lent with (of a card that was
    /// not lent: the one that memory was first mapped with), the loan ends and the memory is withdrawn. Another descriptor
    /// of the same card (of its control node, or a duplicate) has no effect.
    pub fn card_closing(&self, fd: BorrowedFd<'_>) {
        if self.check_process(LENDING).is_err() {
            return;
        }
        let (Ok(card), Some(closing)) = (self.bus_id_of(fd), Descriptor::of(fd)) else { return };
        let known = {
            let mut state = self.lent.state();
            state.sizes.retain(|_, (_, through)| *through != closing);
            state.cards.get(&card).is_some_and(|known| known.descriptor == closing)
        };
        if known {
            self.withdraw_card(&card);
        }
    }

    /// Length of the memory behind a handle of the application, if we saw the allocation.
    pub fn memory_behind(&self, fd: BorrowedFd<'_>, handle: u64) -> Option<u64> {
        let card = self.bus_id_of(fd).ok()?;
        self.lent.state().sizes.get(&(card, handle)).map(|&(len, _)| len)
    }

    /// Whether the card behind a descriptor was lent, or memory of it reported.
    pub fn knows_card_of(&self, fd: BorrowedFd<'_>) -> bool {
        self.bus_id_of(fd).is_ok_and(|card| self.lent.state().cards.contains_key(&card))
    }

    /// Whether this device is the application's.
    pub fn is_lent(&self, device: DeviceId) -> bool {
        self.lent.state().cards.values().any(|card| card.device.id() == device)
    }

    /// Whether a card that is busy in this process may be used without being lent.
    fn adopts_own_cards(&self) -> bool {
        self.options().adopt_own_cards.unwrap_or(false)
    }

    /// Whether the application may map memory on a card by itself: it has lent us a card or reported memory, or a
    /// framework is in the process; or it had the driver library before us, and a card is in use, its own or ours.
    /// Having the library is not enough: it comes with programs that never use a Gaudi.
    pub fn application_uses_cards(&self) -> bool {
        if !self.lent.state().cards.is_empty() || self.has_framework() {
            return true;
        }
        let library = self.library_if_loaded().filter(|library| library.was_loaded());
        library.is_some_and(|library| {
            // A program that has its cards adopted is going to open some.
            self.adopts_own_cards()
                || !self.devices().is_empty()
                || self.discover().is_ok_and(|cards| {
                    let own = |card: &DeviceInfo| owners::own_descriptor(library, card.node);
                    cards.iter().any(|card| own(card).is_some())
                })
        })
    }

    /// The address of a function of the driver library, for hooks.
    pub fn driver_function(&self, name: &str) -> Option<*const std::ffi::c_void> {
        self.library_if_loaded()?.function(name)
    }

    /// Adopts a card that did not open because this process has it open, if the options allow that.
    pub(crate) fn adopt_busy(&self, candidates: &[DeviceInfo]) -> Option<Arc<Device>> {
        if !self.adopts_own_cards() {
            return None;
        }
        let library = self.library_if_loaded()?;
        candidates.iter().find_map(|card| {
            let fd = owners::own_descriptor(library, card.node)?;
            // SAFETY: open just now; if it is closed meanwhile, the duplication fails.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            self.lent_device(card, fd, true).ok()
        })
    }

    /// The device of the application's card, made if it is not known yet.
    fn lent_device(
        &self,
        info: &DeviceInfo,
        fd: BorrowedFd<'_>,
        lend: bool,
    ) -> Result<Arc<Device>, Error> {
        self.check_process(LENDING)?;
        if Framework::drives(fd.as_raw_fd()) {
            return Err(driven_by_framework(LENDING).on(info));
        }
        let _opening = self.opening();
        let known = match self.lent.state().cards.get(&info.bus_id) {
            Some(card) if card.lent || !lend => return Ok(Arc::clone(&card.device)),
            card => card.is_some(),
        };
        if !known && self.devices().iter().any(|open| open.info().bus_id == info.bus_id) {
            let detail = "it is open already";
            return Err(Error::new(ErrorKind::DeviceBusy, LENDING, detail, "lend it once").on(info));
        }
        if !info.generation.has_dram_mmu() {
            return Err(Error::unsupported(
                LENDING,
                format!(
                    "the driver of a {} has no allocator: which memory is free is not known",
                    info.generation
                ),
                "do not open it in the application, but allocate here",
            )
            .on(info));
        }
        let descriptor = Descriptor::of(fd)
            .ok_or_else(|| Error::os(Phase::Use, LENDING, "fstat", libc::EBADF).on(info))?;
        let device = self.duplicate(info, fd, lend)?;
        let mut state = self.lent.state();
        // Memory that was reported meanwhile counts, too: the list changes under the lock only.
        let memory = BTreeMap::new();
        let mut card = Card { device: Arc::clone(&device), lent: lend, descriptor, memory };
        let old = state.cards.remove(&info.bus_id).map(|old| {
            card.memory = old.memory;
            old.device
        });
        for (&base, &len) in &card.memory {
            self.table().insert(DeviceRange { base, len, device: device.id() });
        }
        state.cards.insert(info.bus_id.clone(), card);
        drop(state);
        // Closing is a driver call: only after the lock was released.
        drop(old);
        Ok(device)
    }

    fn duplicate(
        &self,
        info: &DeviceInfo,
        fd: BorrowedFd<'_>,
        lend: bool,
    ) -> Result<Arc<Device>, Error> {
        let number = fd.as_raw_fd();
        let fd = fd.try_clone_to_owned().map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            Error::os(Phase::Use, LENDING, "dup", errno).on(info)
        })?;
        let device = hl_thunk::Device::from_opened(self.library()?, fd).map_err(|error| {
            let compute = error.errno != libc::ENOTTY;
            let error = Error::driver(Phase::Use, LENDING, error).on(info);
            if compute {
                error
            } else {
                error.advise_instead("lend the compute node, not the control node")
            }
        })?;
        let lender = Lender { lent: lend, descriptor: number };
        self.adopt(info, Arc::new(Driver::new(device, Some(lender))))
    }

    fn withdraw_card(&self, bus_id: &BusId) -> bool {
        let Some(card) = self.lent.state().cards.remove(bus_id) else { return false };
        let memory = card.memory.iter();
        let forgotten: Vec<Withdrawn> =
            memory.map(|(&start, &len)| self.withdraw_memory(&card.device, start, len)).collect();
        Withdrawn::wait(&forgotten);
        true
    }

    fn withdraw_memory(&self, device: &Device, start: u64, len: u64) -> Withdrawn {
        self.windows().unmapping(DeviceAddr(start), device.id());
        device.withdraw_foreign(DeviceAddr(start), len)
    }

    fn bus_id_of(&self, fd: BorrowedFd<'_>) -> Result<BusId, Error> {
        let driver = |error| Error::driver(Phase::Use, "finding the card of a descriptor", error);
        self.library()?.bus_id_of(fd).map_err(driver)?.parse()
    }

    /// Which card a descriptor is of, among those this process may use.
    fn card_of(&self, fd: BorrowedFd<'_>) -> Result<DeviceInfo, Error> {
        let bus_id = self.bus_id_of(fd)?;
        if let Some(card) = self.lent.state().cards.get(&bus_id) {
            return Ok(card.device.info().clone());
        }
        self.discover()?.into_iter().find(|card| card.bus_id == bus_id).ok_or_else(|| {
            Error::new(
                ErrorKind::DeviceNotFound,
                LENDING,
                format!("descriptor {} is of {bus_id}, which is hidden here", fd.as_raw_fd()),
                "check GAUDI_MAPPING_TABLE and HABANA_VISIBLE_MODULES",
            )
        })
    }
}
