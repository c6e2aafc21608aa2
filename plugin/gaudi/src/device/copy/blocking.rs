//! Copies that the caller waits for. A small one is one packet and one submission, and needs none of the
//! bookkeeping of a copy that outlives its caller.

use std::sync::Arc;

use hl_thunk::packet::LinDma;

use super::located::{Memory, Place};
use super::route::{Pieces, route};
use super::{BOUNCE_LEN, Side, Transfer};
use crate::submit::host_copy::{HostPtr, copy_in, copy_out};
use crate::{Device, DeviceAddr, Direction, Error};

impl Device {
    /// Copies `len` bytes and returns when they have arrived. At least one side is on a device.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    pub unsafe fn copy_blocking(
        self: &Arc<Self>,
        dst: Side,
        src: Side,
        len: usize,
    ) -> Result<(), Error> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let started = unsafe { self.start_blocking(dst, src, len) };
        match started.map_err(|error| self.failed(error))? {
            None => Ok(()),
            // A failure was counted when the transfer concluded.
            Some(mut transfer) => transfer.wait().map_err(|error| error.on(self)),
        }
    }

    /// Makes a short copy; starts any other.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    unsafe fn start_blocking(
        self: &Arc<Self>,
        dst: Side,
        src: Side,
        len: usize,
    ) -> Result<Option<Transfer>, Error> {
        let rule = self.copy_limits()?.rule;
        let (dst, src) = (Place::of_side(self, dst, len)?, Place::of_side(self, src, len)?);
        let is_short = len <= BOUNCE_LEN && rule.unit() == 1;
        let (host, addr, direction) = match (dst.0, src.0) {
            (Memory::Device(addr, id), Memory::Host(host)) if is_short && id == self.id() => {
                (host, addr, Direction::HostToDevice)
            }
            (Memory::Host(host), Memory::Device(addr, id)) if is_short && id == self.id() => {
                (host, addr, Direction::DeviceToHost)
            }
            _ => {
                let mut pieces = Pieces::new();
                let ends = (dst.end(self)?, src.end(self)?);
                // SAFETY: the caller's promise.
                unsafe { route(self, &ends, len, None, rule, &mut pieces)? };
                return Transfer::submit(self, pieces, None).map(Some);
            }
        };
        // SAFETY: the caller's promise; the device side was looked up, and the length fits.
        unsafe { self.copy_short(host, addr, direction, len) }.map(|()| None)
    }

    /// Copies through the slot of a permit, by one packet.
    ///
    /// # Safety
    /// As for [`Device::copy`]; `len` is at most [`BOUNCE_LEN`], and the device side is in use.
    unsafe fn copy_short(
        self: &Arc<Self>,
        host: HostPtr,
        addr: DeviceAddr,
        direction: Direction,
        len: usize,
    ) -> Result<(), Error> {
        let slots = self.permit_slots()?;
        let mut permit = self.engine().wait_for_permit();
        let (slot, seen) = slots.slot(self, permit.slot())?;
        let dma = match direction {
            Direction::DeviceToHost => LinDma::Copy { src: addr, dst: seen, len: len as u32 },
            _ => {
                // SAFETY: the caller answers for the host side; the slot is the permit's.
                unsafe { copy_in(host, slot, len, false)? };
                LinDma::Copy { src: seen, dst: addr, len: len as u32 }
            }
        };
        // SAFETY: the slot is ours until the permit is dropped, and pinned as long as the device is
        // open; the owner of the device side must not free it under a running copy.
        unsafe { permit.run(direction, dma, len as u64)? };
        if direction == Direction::DeviceToHost {
            // SAFETY: as above, and the device is done.
            unsafe { copy_out(slot, host, len, false)? };
        }
        Ok(())
    }
}
