//! What the addresses in UCX's operations are, and which way the bytes go.

use std::sync::Arc;

use gaudi::{Device, DeviceAddr, Side};

/// Which way a copy goes, seen from the local buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Put,
    Get,
}

impl Way {
    /// Destination and source.
    pub(crate) fn sides<S>(self, local: S, remote: S) -> (S, S) {
        match self {
            Way::Put => (remote, local),
            Way::Get => (local, remote),
        }
    }
}

/// What an address of this process is, and the device it lies on if it is a device address.
pub(crate) fn classify(address: u64, length: usize) -> (Side, Option<Arc<Device>>) {
    match gaudi::runtime().locate(address, length).and_then(|place| place.device()) {
        Some(device) => (Side::Device(DeviceAddr(address)), Some(device)),
        None => {
            let host = core::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            (Side::Host(host), None)
        }
    }
}
