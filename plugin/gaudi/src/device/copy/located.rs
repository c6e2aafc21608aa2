//! Looks up the two ends of a copy.

use std::sync::Arc;

use super::Side;
use crate::device::Registry;
use crate::submit::host_copy::HostPtr;
use crate::{Device, DeviceAddr, DeviceId, Error, ErrorKind};

/// The memory at an address, as [`Runtime::find`](crate::Runtime::find) found it. A copy that gets one
/// does not look up the address again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(pub(super) Memory);

/// The kind of memory, and its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Host(HostPtr),
    /// In a live allocation of this device.
    Device(DeviceAddr, DeviceId),
    /// Imported by the device on which the copy was called.
    Imported(DeviceAddr),
}

/// Device memory that was found to be allocated or imported, and the device whose engines can access it.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) addr: DeviceAddr,
    pub(crate) device: Arc<Device>,
    /// Whether it is another device's memory, imported by this one. The engines access it the way they access
    /// host memory.
    pub(crate) imported: bool,
}

/// An end of a copy: a [`Place`] with the device that can access it.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Host(HostPtr),
    Device(Located),
}

pub(super) const COPYING: &str = "copying";

pub(super) fn invalid(detail: String, remedy: &'static str) -> Error {
    Error::new(ErrorKind::InvalidParams, COPYING, detail, remedy)
}

/// Host memory lies below this address: user space ends below it on every x86-64 and arm64 kernel
/// (56 bits with five-level page tables). Gaudi2's device addresses lie above it.
pub const USER_SPACE_END: u64 = 1 << 56;

impl Registry {
    /// See [`Runtime::find`](crate::Runtime::find).
    #[inline]
    pub(crate) fn find(&self, addr: u64, len: usize) -> Side {
        let host = || HostPtr(core::ptr::with_exposed_provenance_mut(addr as usize));
        match self.locate(addr, 0) {
            Some(location) if len as u64 <= location.length - location.offset => {
                Side::Found(Place(Memory::Device(DeviceAddr(addr), location.device_id)))
            }
            None if addr != 0 && addr.saturating_add(len as u64) <= USER_SPACE_END => {
                Side::Found(Place(Memory::Host(host())))
            }
            // Beyond the end of an allocation, or where a freed one was: the copy returns an error with the reason.
            _ => Side::Host(host().0),
        }
    }

    /// The open device with this id, for an end of a copy.
    pub(crate) fn open_device(&self, id: DeviceId) -> Result<Arc<Device>, Error> {
        self.device(id).ok_or_else(|| {
            invalid(String::from("the card is being closed"), "free memory after its last copy")
        })
    }
}

impl Side {
    /// The device whose memory it is, if the lookup found one.
    pub fn device_id(&self) -> Option<DeviceId> {
        match self {
            Side::Found(Place(Memory::Device(_, id))) => Some(*id),
            _ => None,
        }
    }

    /// The same side, without the result of the lookup: for a copy that could not start at once.
    pub fn outdated(self) -> Side {
        match self {
            Side::Found(Place(Memory::Host(HostPtr(ptr)))) => Side::Host(ptr),
            Side::Found(Place(Memory::Device(addr, _) | Memory::Imported(addr))) => {
                Side::Device(addr)
            }
            side => side,
        }
    }
}

impl Place {
    /// Looks up a side, for a copy that was called on `device`.
    #[inline]
    pub(super) fn of_side(device: &Device, side: Side, len: usize) -> Result<Place, Error> {
        match side {
            Side::Found(place) => Ok(place),
            Side::Host(ptr) => check_host(device.registry(), ptr, len),
            Side::Device(addr) => Self::on_device(device, addr, len),
        }
    }

    /// Looks up `[addr, addr + len)` in the allocations of all open devices and the imports of `device`.
    pub(super) fn on_device(device: &Device, addr: DeviceAddr, len: usize) -> Result<Place, Error> {
        if device.has_imported(addr, len) {
            return Ok(Place(Memory::Imported(addr)));
        }
        let location = device.registry().locate(addr.0, len).ok_or_else(|| {
            invalid(
                format!("{len} bytes at {addr} are not in one live allocation"),
                "copy within memory that is still allocated",
            )
        })?;
        Ok(Place(Memory::Device(addr, location.device_id)))
    }

    /// Adds the device that can access it, for a copy that was called on `device`.
    pub(super) fn end(self, device: &Arc<Device>) -> Result<End, Error> {
        let located = |addr, device, imported| End::Device(Located { addr, device, imported });
        Ok(match self.0 {
            Memory::Host(ptr) => End::Host(ptr),
            Memory::Imported(addr) => located(addr, Arc::clone(device), true),
            Memory::Device(addr, id) if id == device.id() => {
                located(addr, Arc::clone(device), false)
            }
            Memory::Device(addr, id) => located(addr, device.registry().open_device(id)?, false),
        })
    }
}

/// Returns an error for addresses that cannot be host memory.
fn check_host(registry: &Registry, ptr: *mut u8, len: usize) -> Result<Place, Error> {
    let addr = ptr as usize;
    if ptr.is_null() || addr.checked_add(len).is_none() {
        return Err(invalid(format!("{len} bytes at {addr:#x} are not host memory"), ""));
    }
    if registry.locate(addr as u64, 0).is_some() {
        return Err(invalid(
            format!("{addr:#x} is device memory but was given as host memory"),
            "pass the memory type UCX detected, or leave detection to UCX",
        ));
    }
    if addr as u64 >= USER_SPACE_END {
        return Err(invalid(
            format!("{addr:#x} is neither host memory nor in a live device allocation"),
            "this may be device memory that was freed",
        ));
    }
    Ok(Place(Memory::Host(HostPtr(ptr))))
}
