//! The state that all devices of this process share: the list of devices, the table that finds memory by address,
//! the address windows and the options; and their calls to the floors above ([`Upcalls`]).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;

use crate::memory::AddressTable;
use crate::options::{Configuration, Options};
use crate::process::Instance;
use crate::stats::Counts;
use crate::window::Windows;
use crate::{Device, DeviceAddr, DeviceId, Location, USER_SPACE_END};

/// See the module.
pub(crate) struct Registry {
    pub(crate) options: Arc<Configuration>,
    pub(crate) table: AddressTable,
    pub(crate) windows: Windows,
    pub(crate) upcalls: Upcalls,
    /// Replaced as a whole, so that lookups are wait-free.
    devices: ArcSwap<Vec<RegistryEntry>>,
}

/// Calls from a device to the floors above.
pub(crate) struct Upcalls {
    /// Checks whether a framework was loaded or acquired a card, and adds that card.
    pub(crate) poll_framework: fn(),
    /// Makes the value of [`Device::peer_handles`].
    pub(crate) peer_handles: fn(&Options) -> Box<dyn Any + Send + Sync>,
    /// Memory is freed: peers cannot open it from now on. Calls the function when no peer has it open any more.
    pub(crate) freed: fn(DeviceAddr, u64, Counts, Box<dyn FnOnce() + Send>),
    /// The card was reset or removed: takes its memory from peers.
    pub(crate) card_lost: fn(DeviceId),
    /// Stops keeping cards open that were reset.
    pub(crate) drop_lost: fn(),
}

/// A card that was opened in this process, or in a parent that it was forked from.
#[derive(Debug)]
struct RegistryEntry {
    id: DeviceId,
    device: Weak<Device>,
    opened_by: Instance,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("devices", &self.devices).finish_non_exhaustive()
    }
}

impl Registry {
    pub(crate) fn new(upcalls: Upcalls) -> Arc<Self> {
        Arc::new(Self {
            options: Arc::default(),
            table: AddressTable::default(),
            windows: Windows::default(),
            upcalls,
            devices: ArcSwap::default(),
        })
    }

    /// Replaces the list of devices. Callers must serialise.
    pub(crate) fn list<'a>(&self, open: impl Iterator<Item = (DeviceId, &'a Weak<Device>)>) {
        let list = |(id, device): (_, &Weak<_>)| RegistryEntry {
            id,
            device: device.clone(),
            opened_by: Instance::current(),
        };
        self.devices.store(Arc::new(open.map(list).collect()));
    }

    /// Whether this process was forked from one that had cards open. Takes no lock.
    pub(crate) fn is_inherited(&self) -> bool {
        let current = Instance::current();
        self.devices.load().iter().any(|listed| listed.opened_by != current)
    }

    /// The open device with this id. Wait-free.
    pub(crate) fn device(&self, id: DeviceId) -> Option<Arc<Device>> {
        self.devices.load().iter().find(|listed| listed.id == id)?.device.upgrade()
    }

    /// The cards this process has open.
    pub(crate) fn devices(&self) -> Vec<Arc<Device>> {
        self.devices.load().iter().filter_map(|listed| listed.device.upgrade()).collect()
    }

    /// See [`Runtime::locate`](crate::Runtime::locate).
    #[inline]
    pub(crate) fn locate(&self, addr: u64, len: usize) -> Option<Location> {
        // Most addresses are in the table, or are host memory.
        self.locate_known(addr, len)
            .or_else(|| if addr < USER_SPACE_END { None } else { self.locate_late(addr, len) })
    }

    /// For an address that cannot be host memory: a framework may have come, or acquired its card, since the last poll.
    #[cold]
    fn locate_late(&self, addr: u64, len: usize) -> Option<Location> {
        if self.is_inherited() {
            return None;
        }
        (self.upcalls.poll_framework)();
        self.locate_known(addr, len)
    }

    /// As [`Registry::locate`], but does not poll the framework: for callers that hold a lock.
    #[inline]
    pub(crate) fn locate_known(&self, addr: u64, len: usize) -> Option<Location> {
        self.table.find(addr, len as u64).map(|found| found.at(addr))
    }
}
