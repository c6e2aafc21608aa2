//! The two ends of a copy, looked up.

use std::sync::Arc;

use super::Side;
use crate::device::Registry;
use crate::submit::host_copy::HostPtr;
use crate::{Device, DeviceAddr, Error, ErrorKind, Location};

/// Device memory that was found to be in use, and the device whose engines reach it.
#[derive(Clone, Debug)]
pub(crate) struct Located {
    pub(crate) addr: DeviceAddr,
    pub(crate) device: Arc<Device>,
    /// It is another device's memory, imported by this one: its engines reach it as they reach host
    /// memory.
    pub(crate) imported: bool,
}

/// An end of a copy: a [`Side`] after the lookup.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Host(HostPtr),
    Device(Located),
}

pub(super) const COPYING: &str = "copying";

pub(super) fn invalid(detail: String, remedy: &'static str) -> Error {
    Error::new(ErrorKind::InvalidParams, COPYING, detail, remedy)
}

impl Located {
    /// `[addr, addr + len)` in an allocation of any open device, or an import of `device`.
    pub(super) fn find(
        device: &Arc<Device>,
        addr: DeviceAddr,
        len: usize,
    ) -> Result<Located, Error> {
        if device.has_imported(addr, len) {
            return Ok(Located { addr, device: Arc::clone(device), imported: true });
        }
        let owner = device.registry().locate(addr.0, len).and_then(|location| {
            if location.device_id == device.id() {
                return Some(Arc::clone(device));
            }
            device.registry().device(location.device_id)
        });
        let device = owner.ok_or_else(|| {
            invalid(
                format!("{len} bytes at {addr} are not in one live allocation"),
                "copy within memory that is still allocated",
            )
        })?;
        Ok(Located { addr, device, imported: false })
    }
}

impl End {
    /// Looks a side up, for a copy that was asked of `device`.
    pub(crate) fn of_side(device: &Arc<Device>, side: Side, len: usize) -> Result<End, Error> {
        Ok(match side {
            Side::Host(ptr) => End::Host(HostPtr(ptr)),
            Side::Device(addr) => End::Device(Located::find(device, addr, len)?),
        })
    }

    /// An address of this process, after [`Runtime::locate`](crate::Runtime::locate).
    #[inline]
    pub(crate) fn of_address(
        registry: &Registry,
        addr: u64,
        location: Option<Location>,
    ) -> Result<End, Error> {
        let Some(location) = location else {
            let ptr = core::ptr::with_exposed_provenance_mut(addr as usize);
            return Ok(End::Host(HostPtr(ptr)));
        };
        let device = registry.device(location.device_id).ok_or_else(|| {
            invalid(String::from("the card is being closed"), "free memory after its last copy")
        })?;
        Ok(End::Device(Located { addr: DeviceAddr(addr), device, imported: false }))
    }

    /// The device that reaches it, unless it is host memory.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        match self {
            End::Host(_) => None,
            End::Device(located) => Some(&located.device),
        }
    }
}

/// First address that no host memory has: user space ends below it on every x86-64 and arm64 kernel
/// (56 bits with five-level page tables). Gaudi2's device addresses lie above.
pub const USER_SPACE_END: u64 = 1 << 56;

/// Refuses what cannot be host memory.
pub(super) fn check_host(registry: &Registry, ptr: HostPtr, len: usize) -> Result<(), Error> {
    let addr = ptr.0 as usize;
    if ptr.0.is_null() || addr.checked_add(len).is_none() {
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
    Ok(())
}
