//! Address windows: each device of a process has one range of addresses of its own, and those who
//! must know about it (UCX's memory-type cache) are told before its first address is handed out.

use crate::{DeviceAddr, DeviceId, DeviceInfo};

/// A device's range of addresses. All its allocations lie inside, and nothing else does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address.
    pub start: DeviceAddr,
    /// Length in bytes.
    pub len: u64,
    /// The open device it belongs to.
    pub device: DeviceId,
    /// Which card that is.
    pub info: DeviceInfo,
}

/// What happened to a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WindowEvent {
    /// Addresses of this window are about to be handed out, or were already when the observer
    /// subscribed.
    Opened(Window),
    /// The card was closed: no address of this window is valid any more. The same card gets the
    /// same window when it is opened again; no other card ever does.
    Retired(Window),
}
