//! What a process has one of: the driver library, the open cards, their windows, the table that
//! tells Gaudi addresses from others.

use std::sync::{Arc, OnceLock};

use crate::{Device, DeviceChoice, DeviceId, DeviceInfo, Error, Location, WindowEvent};

/// The engine of this process. See [`runtime()`].
#[derive(Debug)]
pub struct Runtime {
    _private: (),
}

/// The engine of this process. Touching it costs nothing: no library is loaded, no device opened,
/// no thread started until a function is called that needs it.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime { _private: () })
}

impl Runtime {
    /// Loads the driver library and lists the cards, through control nodes only, honouring
    /// `HABANA_VISIBLE_MODULES`. No cards is an error of kind `DeviceNotFound` whose text says
    /// whether the library or the cards are missing; a library that did not load is not tried
    /// again.
    pub fn discover(&self) -> Result<Vec<DeviceInfo>, Error> {
        Err(Error::unsupported("looking for devices", "not built yet", ""))
    }

    /// Takes a card for this process. One that is already open here and matches is shared. Without
    /// a choice, the first card that opens.
    pub fn open(&self, choice: &DeviceChoice) -> Result<Arc<Device>, Error> {
        let _ = choice;
        Err(Error::unsupported("opening a device", "not built yet", ""))
    }

    /// The open device with this id.
    pub fn device(&self, id: DeviceId) -> Option<Arc<Device>> {
        let _ = id;
        None
    }

    /// The cards this process has open.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        Vec::new()
    }

    /// Whether all of `[addr, addr + len)` is memory of one live allocation, and which. Wait-free.
    /// A length of zero asks about the address alone.
    pub fn locate(&self, addr: u64, len: usize) -> Option<Location> {
        let _ = (addr, len);
        None
    }

    /// Has `observer` called for every window: at once for those there are, later on the thread
    /// that opens one, before an address in it is handed out. The observer may call back into the
    /// engine, but not allocate from the device it is being told about. It stays for ever.
    pub fn subscribe(&self, observer: Box<dyn Fn(&WindowEvent) + Send + Sync>) {
        let _ = observer;
    }
}
