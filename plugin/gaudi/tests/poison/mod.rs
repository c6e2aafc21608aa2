//! Device memory with poison around it, so that a misplaced write is seen.

use std::sync::Arc;

use gaudi::{Allocation, Device, DeviceAddr};

use crate::machine::write;

pub(crate) const POISON: u8 = 0xee;
pub(crate) const MARGIN: usize = 300;

pub(crate) fn at(allocation: &Allocation, offset: usize) -> DeviceAddr {
    DeviceAddr(allocation.addr().0 + offset as u64)
}

/// Poisoned device memory: room for `len` bytes and a margin on each side.
pub(crate) fn poisoned(device: &Arc<Device>, len: usize) -> Allocation {
    let allocation = device.alloc((len + 2 * MARGIN) as u64, 1).unwrap();
    write(device, allocation.addr(), &vec![POISON; len + 2 * MARGIN]);
    allocation
}

/// `inner` at an offset of such memory.
pub(crate) fn framed(inner: &[u8], offset: usize) -> Vec<u8> {
    let mut whole = vec![POISON; inner.len() + 2 * MARGIN];
    whole[offset..offset + inner.len()].copy_from_slice(inner);
    whole
}
