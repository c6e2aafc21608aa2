//! What UCX knows of Gaudi memory: its memory-type cache, and its memory-type events.
//!
//! UCP asks that cache what an address is and takes a miss for host memory, without asking any memory
//! domain. So a card's whole window is reported to each UCX copy before its first address is handed out. Not
//! earlier: a region in that cache also costs UCP its short path for host memory, which a program that
//! never touches a Gaudi must not pay for.
//!
//! | what happens | cache | event |
//! |---|---|---|
//! | a card is opened | its window goes in | |
//! | memory is allocated | | ALLOC |
//! | memory is freed | a hole, closed at once: see below | FREE, before it is freed |
//! | a card is closed | its window is taken out | |
//! | a framework (Synapse) is in the process | where it may have memory, as unknown: UCP asks the domains | |
//! | UCX has HCAs open that were not tried with memory of the card | the above, as unknown, until it has asked ([`hcas`]) | |
//! | its card is found | its pool goes in | ALLOC |
//! | it releases the card | its pool is unknown again | FREE |
//!
//! UCX creates the cache at the first look-up, and keeps it until libucs is unloaded.
//!
//! **Freed memory stays Gaudi memory in the cache** as long as its card is open. An address in a window
//! is never host memory. If it were taken for that, UCX would access a stale pointer with the CPU and
//! crash; so it reports an error that names the address. Keeping freed memory in the cache also keeps the window in one
//! piece: the cache never joins regions that touch, and would not recognise an allocation across two of them.
//! Exact detection is up to the memory domain (`mem_query`).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaudi::{Allocation, DeviceInfo, WindowEvent};
use uct::{DeviceRange, MemoryType, SysDevice, Ucx, log};

use crate::{hcas, hooks};

/// A range that neither our memory nor host memory can have (a Gaudi2's on-chip memory lies there). It
/// stays in the cache for ever. UCP checks without a lock whether the cache is empty, and changing a
/// region removes it for a moment. A cache with one region would look empty then, and UCP would take
/// another thread's Gaudi buffer for host memory.
const SENTINEL: DeviceRange = DeviceRange {
    start: 0x1000_0000_0000_0000,
    len: 4096,
    memory_type: MemoryType::GAUDI,
    device: SysDevice::UNKNOWN,
    registrable: true,
};

/// A UCX copy, and the ranges reported to it: windows of open cards, and memory that the application
/// mapped itself. Locked for a moment only, and never while UCX is called.
struct Client {
    ucx: &'static Ucx,
    ranges: Mutex<Vec<DeviceRange>>,
    /// Where a framework may have memory: of unknown type, so that UCX asks the memory domains.
    watched: Mutex<Vec<DeviceRange>>,
}

static CLIENTS: Mutex<Vec<Arc<Client>>> = Mutex::new(Vec::new());

fn clients() -> MutexGuard<'static, Vec<Arc<Client>>> {
    CLIENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reports windows to `ucx`, the present and all future ones. If a framework is expected, also the
/// addresses where it may have memory.
pub(crate) fn begin(ucx: &'static Ucx, expects_framework: bool) {
    let mut clients = clients();
    let watch = |client: &Client| {
        if expects_framework {
            gaudi::runtime().framework_addresses().iter().for_each(|range| client.watch(range));
        }
    };
    if let Some(known) = clients.iter().find(|known| core::ptr::eq(known.ucx, ucx)) {
        return watch(known);
    }
    let client = Arc::new(Client { ucx, ranges: Mutex::default(), watched: Mutex::default() });
    clients.push(Arc::clone(&client));
    watch(&client);
    // The list stays locked until the observer is there: another thread that finds `ucx` in it may
    // allocate at once.
    gaudi::runtime().subscribe(Box::new(move |event| client.follow(event)));
}

/// Makes every loaded UCX query addresses in this range: a framework is about to have memory there.
pub(crate) fn watch(addresses: &Range<u64>) {
    for client in clients().clone() {
        client.watch(addresses);
    }
}

/// Reports all ranges of this UCX copy again, after HCAs were opened or closed, or a trial showed what they can register.
pub(crate) fn hcas_changed(ucx: &Ucx) {
    let known = clients().iter().find(|client| core::ptr::eq(client.ucx, ucx)).cloned();
    let Some(client) = known else { return };
    let ranges = client.ranges().clone();
    for range in ranges {
        client.report(range);
        // Its card may have been closed meanwhile.
        if !client.ranges().contains(&range) {
            client.ucx.memory_type_cache_remove(&range);
            client.watch_again(&range);
        }
    }
}

/// Warns of HCAs that cannot access Gaudi memory, if there is some. Call it when UCX has opened what it needs.
pub(crate) fn warn_of_hcas(ucx: &Ucx) {
    let known = clients().iter().find(|client| core::ptr::eq(client.ucx, ucx)).cloned();
    if known.is_some_and(|client| !client.ranges().is_empty()) {
        hcas::warn(ucx);
    }
}

/// Reports memory that was just allocated to every UCX copy.
pub(crate) fn allocated(allocation: &Allocation) {
    for client in clients().clone() {
        client.allocated(client.range_of(allocation));
    }
}

/// Makes every loaded UCX drop its registrations of memory that is about to be freed: a network device's
/// registration would keep the driver's page in use, and give access to the next allocation in it.
pub(crate) fn freeing(allocation: &Allocation) {
    for client in clients().clone() {
        client.ucx.memory_freed(&client.range_of(allocation));
        client.insert_window(allocation.addr().0);
    }
}

impl Client {
    fn ranges(&self) -> MutexGuard<'_, Vec<DeviceRange>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watched(&self) -> MutexGuard<'_, Vec<DeviceRange>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, addresses: &Range<u64>) {
        let range = DeviceRange {
            start: addresses.start,
            len: bytes(addresses.end - addresses.start),
            memory_type: MemoryType::UNKNOWN,
            device: SysDevice::UNKNOWN,
            registrable: true,
        };
        {
            let mut watched = self.watched();
            if watched.contains(&range) {
                return;
            }
            watched.push(range);
        }
        self.ucx.memory_type_cache_insert(&SENTINEL);
        self.ucx.memory_type_cache_insert(&range);
    }

    /// Watches again a range that has no memory any more.
    fn watch_again(&self, freed: &DeviceRange) {
        let holds = |range: &&DeviceRange| {
            range.start <= freed.start
                && freed.start - range.start + freed.len as u64 <= range.len as u64
        };
        let held = self.watched().iter().any(|range| holds(&range));
        if held {
            let range = DeviceRange { memory_type: MemoryType::UNKNOWN, ..*freed };
            self.ucx.memory_type_cache_insert(&range);
        }
    }

    fn follow(&self, event: &WindowEvent) {
        let ucx = self.ucx;
        match event {
            WindowEvent::Opened(window) => {
                let (start, len) = (window.start, window.len);
                log!(ucx, Debug, "memory of {} is at {:#x}, {len:#x} bytes", window.info, start.0);
                self.insert(self.range(start.0, len, &window.info));
            }
            WindowEvent::Retired(window) => {
                let range = self.range(window.start.0, window.len, &window.info);
                self.ranges().retain(|known| *known != range);
                ucx.memory_type_cache_remove(&range);
            }
            WindowEvent::Mapped(memory) => {
                let (start, len, card) = (memory.start, memory.len, &memory.info);
                let device = gaudi::runtime().device(memory.device);
                let is_guest = device.is_some_and(|device| device.is_guest());
                if is_guest {
                    log!(
                        ucx,
                        Info,
                        "guest of Synapse on {card}: its memory is at {start}, {len} bytes"
                    );
                } else {
                    log!(ucx, Debug, "the application mapped {len} bytes at {start} on {card}");
                }
                let range = self.range(start.0, len, card);
                // `insert` creates the cache if there is none yet; the event goes to all other handlers.
                self.insert(range);
                self.allocated(range);
                if is_guest {
                    // The framework may have come after everything else that installs hooks.
                    hooks::install_if_needed();
                    hooks::install_for_framework();
                }
            }
            WindowEvent::Unmapping(memory) => {
                let range = self.range(memory.start.0, memory.len, &memory.info);
                self.ranges().retain(|known| *known != range);
                ucx.memory_freed(&range);
                self.watch_again(&range);
                // If it lay in the card's window, its removal has left a hole there.
                if let Some(card) = gaudi::runtime().device(memory.device)
                    && !card.is_guest()
                    && card.window().range().contains(&memory.start.0)
                    && card.memory().reserved > 0
                {
                    self.insert_window(card.window().start.0);
                }
            }
        }
    }

    /// Puts a range into the cache, and remembers it for one that is made later.
    fn insert(&self, range: DeviceRange) {
        {
            let mut ranges = self.ranges();
            if !ranges.contains(&range) {
                ranges.push(range);
            }
        }
        self.ucx.memory_type_cache_insert(&SENTINEL);
        self.report(range);
    }

    /// Puts a range into the cache as it is known now. Repeats that if another thread learned more about HCAs meanwhile.
    fn report(&self, range: DeviceRange) {
        loop {
            let known = hcas::as_registrable(self.ucx, range);
            self.ucx.memory_type_cache_insert(&known);
            if hcas::as_registrable(self.ucx, range) == known {
                return;
            }
        }
    }

    fn allocated(&self, range: DeviceRange) {
        self.ucx.memory_allocated(&hcas::as_registrable(self.ucx, range));
        hcas::warn(self.ucx);
    }

    /// Closes the hole that freed memory has left in its window.
    fn insert_window(&self, start: u64) {
        if let Some(window) = self.window_at(start) {
            self.report(window);
        }
    }

    /// The window that contains an address. Ranges that the application mapped inside a window are smaller.
    fn window_at(&self, address: u64) -> Option<DeviceRange> {
        let ranges = self.ranges();
        let around = ranges.iter().filter(|range| {
            address.checked_sub(range.start).is_some_and(|offset| offset < range.len as u64)
        });
        around.max_by_key(|range| range.len).copied()
    }

    fn range_of(&self, allocation: &Allocation) -> DeviceRange {
        let (start, len) = (allocation.addr().0, allocation.len());
        match self.window_at(start) {
            // Its device's number is known already.
            Some(window) => DeviceRange { start, len: bytes(len), ..window },
            None => self.range(start, len, allocation.device().info()),
        }
    }

    fn range(&self, start: u64, len: u64, card: &DeviceInfo) -> DeviceRange {
        let device = sys_device(self.ucx, card);
        DeviceRange {
            start,
            len: bytes(len),
            memory_type: MemoryType::GAUDI,
            device,
            registrable: true,
        }
    }
}

fn bytes(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// UCX's topology number of a card, under the name `ucx_info -T` shows.
pub(crate) fn sys_device(ucx: &Ucx, card: &DeviceInfo) -> SysDevice {
    ucx.sys_device(card.bus_id.as_str(), &format!("GAUDI_{}", card.index))
}
