//! Address windows: each device of a process has one range of addresses of its own. Observers, such as
//! UCX's memory-type cache, are notified of a window before its first address is handed out.
//!
//! Every Gaudi2 has an MMU of its own, so two of them may return the same address. To prevent that, each
//! card gets a slice of the range that the driver leaves to callers' hints, for the life of the process. A
//! slice is never given to another card, because a cache may remember which card it belonged to. Gaudi1
//! uses physical addresses, and a host pointer could have the same value: their range is reserved in the
//! host's address space while the card is open.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::backend::{Geometry, Placement};
use crate::error::Phase;
use crate::{BusId, DeviceAddr, DeviceId, DeviceInfo, Error, ErrorKind, Generation};

/// Size of a card's slice: several times the memory of any card, and a power of two so that UCX's
/// page table holds it in one entry. The unit tests of this crate open more cards in one process
/// than a machine has.
const SLICE: u64 = if cfg!(test) { 1 << 37 } else { 1 << 39 };
/// Length of the range, from the start of a framework's pool, that no slice may overlap: several times the memory
/// of any card. A framework in this process may use the same card or another one.
pub(crate) const KEPT_CLEAR: u64 = 1 << 40;
/// The driver aligns device addresses by their low 48 bits only.
const ALIGNED_BITS: u64 = (1 << 48) - 1;

/// A range of a device's addresses: either the one that contains all its allocations and nothing else; or device memory
/// that the application mapped by itself, at an address that the driver or the application chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: DeviceAddr,
    /// Length in bytes.
    pub len: u64,
    /// The open device it belongs to.
    pub device: DeviceId,
    /// The card of that device.
    pub info: DeviceInfo,
}

impl Window {
    /// The addresses as plain numbers.
    pub fn range(&self) -> Range<u64> {
        self.start.0..self.start.0 + self.len
    }
}

/// What happened to a window, or to memory that the application mapped by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WindowEvent {
    /// Addresses of this window are about to be handed out, or had been handed out before the observer
    /// subscribed.
    Opened(Window),
    /// The card was closed: no address of this window is valid any more. The same card gets the
    /// same window when it is opened again; no other card ever does.
    Retired(Window),
    /// The application mapped device memory by itself, and the engine was notified.
    Mapped(Window),
    /// The application is about to unmap that memory.
    Unmapping(Window),
}

type Observer = Arc<dyn Fn(&WindowEvent) + Send + Sync>;

/// Each card's slice, the windows in use, and the observers.
#[derive(Default)]
pub(crate) struct Windows {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// First address of each card's slice.
    slices: HashMap<BusId, u64>,
    open: Vec<Window>,
    foreign: Vec<Window>,
    observers: Vec<Observer>,
}

impl Windows {
    /// The addresses for a card's memory.
    pub(crate) fn range_for(
        &self,
        info: &DeviceInfo,
        geometry: Geometry,
    ) -> Result<Range<u64>, Error> {
        match geometry.placement {
            Placement::Physical(base) => return Ok(base..base + geometry.total),
            Placement::Pool { start, len } => return Ok(start..start + len),
            Placement::Window => {}
        }
        let full = || {
            Error::new(
                ErrorKind::OutOfMemory,
                "choosing device addresses",
                "every address window of this process has been given to a card",
                "restart the process",
            )
        };
        let hints = info.generation.hint_range().ok_or_else(full)?;
        let starts = slice_starts(info.generation, hints);
        let state = &mut *self.state();
        let slice = match state.slices.get(&info.bus_id) {
            Some(&slice) => slice,
            None => {
                // Chosen by the card's number, so that a second copy of this library in the process, which
                // uses other cards, uses other addresses too.
                let count = starts.len();
                let wanted = info.node as usize + count / 2;
                let mut slices = (0..count).map(|step| starts[(wanted + step) % count]);
                let foreign = |slice: u64| {
                    let overlaps = |other: &Window| {
                        other.info.bus_id != info.bus_id
                            && slice < other.start.0 + other.len
                            && other.start.0 < slice + SLICE
                    };
                    state.foreign.iter().any(overlaps)
                };
                let free = |slice: &u64| {
                    !state.slices.values().any(|taken| taken == slice) && !foreign(*slice)
                };
                let slice = slices.find(free).ok_or_else(full)?;
                state.slices.insert(info.bus_id.clone(), slice);
                slice
            }
        };
        Ok(slice..slice + SLICE)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and notifies the observers of the event that `change` returns. Returns whether there was one.
    /// No lock is held while they run, because they may call back.
    fn publish(&self, change: impl FnOnce(&mut State) -> Option<WindowEvent>) -> bool {
        let (event, observers) = {
            let mut state = self.state();
            (change(&mut state), state.observers.clone())
        };
        let Some(event) = event else { return false };
        observers.iter().for_each(|observer| observer(&event));
        true
    }

    /// Adds an observer and notifies it of the windows and mappings that exist already.
    pub(crate) fn subscribe(&self, observer: Observer) {
        let (windows, foreign) = {
            let mut state = self.state();
            state.observers.push(Arc::clone(&observer));
            (state.open.clone(), state.foreign.clone())
        };
        let (opened, mapped) = (WindowEvent::Opened, WindowEvent::Mapped);
        let events = windows.into_iter().map(opened).chain(foreign.into_iter().map(mapped));
        events.for_each(|event| observer(&event));
    }

    /// Notifies the observers of memory that the application mapped.
    pub(crate) fn mapped(&self, memory: Window) {
        self.publish(|state| {
            state.foreign.push(memory.clone());
            Some(WindowEvent::Mapped(memory))
        });
    }

    /// Notifies the observers that the application is about to unmap memory of this device.
    pub(crate) fn unmapping(&self, start: DeviceAddr, device: DeviceId) {
        let known = self.publish(|state| {
            let is_meant = |memory: &Window| memory.start == start && memory.device == device;
            let at = state.foreign.iter().position(is_meant)?;
            Some(WindowEvent::Unmapping(state.foreign.swap_remove(at)))
        });
        if known {
            // Another device may have got these addresses meanwhile, and its `Mapped` may have come before our `Unmapping`.
            self.publish(|state| {
                let next = state.foreign.iter().find(|memory| memory.start == start);
                next.cloned().map(WindowEvent::Mapped)
            });
        }
    }

    fn opened(&self, window: &Window) {
        self.publish(|state| {
            state.open.push(window.clone());
            Some(WindowEvent::Opened(window.clone()))
        });
    }

    /// The device is closed; notifies the observers if they were notified of its window.
    pub(crate) fn retired(&self, device: DeviceId) {
        self.publish(|state| {
            let at = state.open.iter().position(|window| window.device == device)?;
            Some(WindowEvent::Retired(state.open.remove(at)))
        });
    }
}

/// The starts of those slices of `hints` that overlap no framework's pool.
fn slice_starts(generation: Generation, hints: Range<u64>) -> Vec<u64> {
    let pools = generation.framework_pools();
    let is_clear = |start: &u64| {
        pools.iter().all(|pool| *start >= pool + KEPT_CLEAR || start + SLICE <= *pool)
    };
    hints.step_by(SLICE as usize).filter(is_clear).collect()
}

/// Notifies the observers of one device's window, once, before its first address is handed out.
#[derive(Debug, Default)]
pub(crate) struct Announcement {
    state: Mutex<Progress>,
    done: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Progress {
    #[default]
    NotYet,
    By(ThreadId),
    Done,
}

impl Announcement {
    /// Returns when all observers know the window. Other threads wait for the one that notifies them;
    /// an observer that calls back on the same thread does not.
    pub(crate) fn ensure(&self, windows: &Windows, window: &Window) {
        let me = std::thread::current().id();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match *state {
                Progress::Done => return,
                Progress::By(thread) if thread == me => return,
                Progress::By(_) => {
                    state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Progress::NotYet => break,
            }
        }
        *state = Progress::By(me);
        drop(state);
        // A guard, so that other threads do not wait for ever if an observer panics.
        let _done = AnnouncedGuard(self);
        windows.opened(window);
    }
}

struct AnnouncedGuard<'a>(&'a Announcement);

impl Drop for AnnouncedGuard<'_> {
    fn drop(&mut self) {
        *self.0.state.lock().unwrap_or_else(PoisonError::into_inner) = Progress::Done;
        self.0.done.notify_all();
    }
}

/// The lowest address for `bytes` in `window` that overlaps none of `taken` (sorted) and has the
/// alignment that the driver requires: the low 48 bits are a multiple of `page`.
pub(crate) fn find_gap(
    window: &Range<u64>,
    taken: impl Iterator<Item = (u64, u64)>,
    page: u64,
    bytes: u64,
) -> Option<u64> {
    let align = |addr: u64| {
        let low = addr & ALIGNED_BITS;
        addr.checked_add(low.checked_next_multiple_of(page)? - low)
    };
    let mut at = align(window.start)?;
    for (start, len) in taken {
        if at.checked_add(bytes)? <= start {
            break;
        }
        at = at.max(align(start.checked_add(len)?)?);
    }
    (at.checked_add(bytes)? <= window.end).then_some(at)
}

/// A reserved range of host addresses: nothing else can be mapped there while this lives.
#[derive(Debug)]
pub(crate) struct ReservedAddresses {
    start: usize,
    len: usize,
}

/// The largest part of `range` that is free according to `maps` (in the format of `/proc/self/maps`).
/// Both ends are multiples of `align`.
fn largest_free(range: &Range<u64>, maps: &str, align: u64) -> Option<Range<u64>> {
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut used: Vec<(u64, u64)> = maps
        .lines()
        .filter_map(|line| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            Some((number(start)?, number(end)?))
        })
        .collect();
    used.push((range.end, range.end));
    used.sort_unstable();
    let mut free_from = range.start;
    let mut best: Option<Range<u64>> = None;
    for (start, end) in used {
        let gap = free_from.next_multiple_of(align)..start.min(range.end) / align * align;
        let size = |gap: &Range<u64>| gap.end.saturating_sub(gap.start);
        if size(&gap) > best.as_ref().map_or(0, size) {
            best = Some(gap);
        }
        free_from = free_from.max(end);
        if free_from >= range.end {
            break;
        }
    }
    best
}

impl ReservedAddresses {
    /// Reserves the largest free piece of `range`. A program that is not position-independent has its
    /// heap somewhere in the first gigabytes; that part of the card's memory stays unused.
    pub(crate) fn largest_part_of(range: &Range<u64>) -> Result<(Self, Range<u64>), Error> {
        const ALIGN: u64 = 2 << 20;
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let part = largest_free(range, &maps, ALIGN).unwrap_or_else(|| range.clone());
        Ok((Self::new(&part)?, part))
    }

    /// Reserves `range`; fails if any of it is in use.
    pub(crate) fn new(range: &Range<u64>) -> Result<Self, Error> {
        let operation = "keeping host pointers out of the card's physical addresses";
        let (start, len) = (range.start as usize, (range.end - range.start) as usize);
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: with FIXED_NOREPLACE it fails instead of touching an existing mapping.
        let mapped =
            unsafe { mmap_anonymous(start as *mut c_void, len, ProtFlags::empty(), flags) };
        match mapped {
            Ok(at) if at as usize == start => Ok(Self { start, len }),
            Ok(at) => {
                // A kernel that does not know the flag treats the address as a hint.
                // SAFETY: our own mapping from just above.
                let _ = unsafe { munmap(at, len) };
                Err(Error::os(Phase::Use, operation, "mmap", libc::EEXIST))
            }
            Err(errno) => Err(Error::os(Phase::Use, operation, "mmap", errno.raw_os_error())),
        }
    }
}

impl Drop for ReservedAddresses {
    fn drop(&mut self) {
        // SAFETY: our own inaccessible mapping.
        let _ = unsafe { munmap(self.start as *mut c_void, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::fake::Fake;
    use crate::runtime;
    use proptest::prelude::*;
    use std::collections::HashSet;

    const GAUDI2_PAGE: u64 = 0x3000_0000;
    const GEOMETRY: Geometry =
        Geometry { total: 127 * GAUDI2_PAGE, page: GAUDI2_PAGE, placement: Placement::Window };

    #[test]
    fn every_card_has_a_window_of_its_own_for_ever() {
        let windows = Windows::default();
        let place = |index| windows.range_for(&DeviceInfo::example(index), GEOMETRY);
        let count = ((0x2000_0000_0000 - 2 * KEPT_CLEAR) / SLICE) as u32;
        // This card and number 3 have the same preferred slice.
        let mut placed = vec![place(count + 3).unwrap()];
        placed.extend((0..count - 1).map(|index| place(index).unwrap()));
        for (at, one) in placed.iter().enumerate() {
            assert!(one.start >= 0x1001_5000_0000_0000 && one.end <= 0x1001_7000_0000_0000);
            assert_eq!(one.start % SLICE, 0, "one entry in UCX's page table");
            // The start of SCAL's pool with five HBM stacks, and with six.
            for pool in [0x1001_5000_0000_0000, 0x1001_6000_0000_0000_u64] {
                assert!(one.start >= pool + (1 << 40) || one.end <= pool, "{one:#x?}");
            }
            for other in &placed[at + 1..] {
                assert!(one.end <= other.start || other.end <= one.start);
            }
        }
        assert_eq!(place(count + 3).unwrap(), placed[0], "opened again");
        let error = place(count - 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    }

    #[test]
    fn the_window_follows_from_the_cards_number_alone() {
        let (one, another) = (Windows::default(), Windows::default());
        one.range_for(&DeviceInfo::example(5), GEOMETRY).unwrap();
        // A mapping table may give the same card another index.
        let place = |windows: &Windows, index| {
            let card = DeviceInfo { index, ..DeviceInfo::example(2) };
            windows.range_for(&card, GEOMETRY).unwrap()
        };
        assert_eq!(place(&one, 2), place(&another, 7));
    }

    proptest! {
        #[test]
        fn gaps_are_aligned_inside_and_free(
            page in prop_oneof![Just(GAUDI2_PAGE), Just(0x2800_0000_u64), Just(1_u64 << 25)],
            slots in prop::collection::btree_set(0..40_u64, 0..30),
            count in 1..5_u64
        ) {
            let window = 0x1001_6000_0000_0000..0x1001_6000_0000_0000 + SLICE;
            let first = find_gap(&window, std::iter::empty(), page, page).unwrap();
            prop_assert!(first - window.start < page);
            let taken: Vec<_> = slots.iter().map(|slot| (first + slot * page, page)).collect();
            let at = find_gap(&window, taken.iter().copied(), page, count * page).unwrap();
            prop_assert_eq!((at & ALIGNED_BITS) % page, 0);
            prop_assert!(at >= window.start && at + count * page <= window.end);
            for (start, len) in taken {
                prop_assert!(at + count * page <= start || start + len <= at);
            }
        }
    }

    #[test]
    fn a_full_window_has_no_gap() {
        let window = 0x1000..0x5000;
        assert_eq!(find_gap(&window, [(0x1000, 0x4000)].into_iter(), 0x1000, 0x1000), None);
        assert_eq!(find_gap(&window, std::iter::empty(), 0x1000, 0x5000), None);
        assert_eq!(find_gap(&window, std::iter::empty(), 0x1000, u64::MAX), None);
    }

    #[test]
    fn the_heap_of_the_program_is_left_alone() {
        let maps = "00400000-00500000 r-xp 00000000 fe:00 1 /usr/bin/program\n\
                    2f2b1000-2f400000 rw-p 00000000 00:00 0 [heap]\n\
                    7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n";
        let card = 0x2000_0000..0x8_0000_0000_u64;
        assert_eq!(largest_free(&card, maps, 2 << 20), Some(0x2f40_0000..0x8_0000_0000));
        assert_eq!(largest_free(&card, "", 2 << 20), Some(card.clone()));
        let all = "10000000-900000000 rw-p 00000000 00:00 0\n";
        assert_eq!(largest_free(&card, all, 2 << 20), None);
        let middle = "100000000-700000000 rw-p 00000000 00:00 0\n";
        assert_eq!(largest_free(&card, middle, 2 << 20), Some(0x7_0000_0000..0x8_0000_0000));
    }

    #[test]
    fn a_blocked_range_is_refused_a_second_time_and_free_afterwards() {
        let range = 0x6_0000_0000..0x6_0010_0000;
        let blocked = ReservedAddresses::new(&range).unwrap();
        assert_eq!(ReservedAddresses::new(&range).unwrap_err().errno(), Some(libc::EEXIST));
        drop(blocked);
        ReservedAddresses::new(&range).unwrap();
    }

    #[test]
    fn nobody_gets_an_address_before_the_observers_know_the_window() {
        let notified = Arc::new(Mutex::new(HashSet::new()));
        let record = Arc::clone(&notified);
        runtime().subscribe(Box::new(move |event| {
            if let WindowEvent::Opened(window) = event {
                std::thread::yield_now();
                record.lock().unwrap().insert(window.device);
            }
        }));
        for _ in 0..8 {
            let (_fake, device) = Fake::device();
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let _allocation = device.alloc(1, 1).unwrap();
                        assert!(notified.lock().unwrap().contains(&device.id()));
                    });
                }
            });
        }
    }

    #[test]
    fn memory_goes_past_a_mapping_of_somebody_else_in_the_window() {
        let (fake, device) = Fake::device();
        let start = device.window().start.0;
        fake.occupy(start + (8 << 20)..start + (24 << 20));
        let allocation = device.alloc(1, 1).unwrap();
        assert!(device.window().range().contains(&allocation.addr().0));
        assert!(allocation.addr().0 >= start + (24 << 20));
        let asked = fake.page_calls();
        let large = device.alloc(20 << 20, 1).unwrap();
        assert_eq!(fake.page_calls(), asked + 1, "the mapping is remembered");
        drop((allocation, large));
        fake.occupy(0..u64::MAX);
        let error = device.alloc(64 << 20, 1).unwrap_err();
        assert!(error.to_string().contains("the driver maps at"), "{error}");
    }

    #[test]
    fn the_driver_is_not_asked_for_more_memory_than_there_is() {
        let (fake, device) = Fake::device();
        let most = device.alloc(device.memory().total - (16 << 20), 1).unwrap();
        let asked = fake.page_calls();
        let error = device.alloc(17 << 20, 1).unwrap_err();
        assert_eq!((error.kind(), error.errno()), (ErrorKind::OutOfMemory, Some(libc::ENOMEM)));
        assert_eq!(fake.page_calls(), asked);
        drop(most);
    }

    #[test]
    fn an_observer_may_allocate_from_the_device_it_is_told_about() {
        let (_fake, device) = Fake::device();
        let id = device.id();
        let inner = Arc::new(Mutex::new(None));
        let keep = Arc::clone(&inner);
        runtime().subscribe(Box::new(move |event| {
            if let WindowEvent::Opened(window) = event
                && window.device == id
            {
                let device = runtime().device(id).unwrap();
                *keep.lock().unwrap() = Some(device.alloc(1, 1).unwrap());
            }
        }));
        let outer = device.alloc(1, 1).unwrap();
        let inner = inner.lock().unwrap().take().unwrap();
        assert_ne!(outer.addr(), inner.addr());
    }
}
