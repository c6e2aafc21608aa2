//! Copies that the caller waits for. A small one is one packet in one submission, and skips the bookkeeping
//! that a copy needs when it outlives the call.

use std::sync::Arc;

use hl_thunk::packet::{DmaRule, LinDma};

use super::located::{Memory, Place};
use super::route::{ANYTHING, Pieces, route};
use super::{BOUNCE_LEN, Side, Transfer};
use crate::submit::host_copy::HostPtr;
use crate::{Device, DeviceAddr, Direction, Error};

impl Device {
    /// Copies `len` bytes and returns when they have arrived. At least one side must be device memory.
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
        let place = |side| Place::of_side(self, side, len);
        let found =
            self.copy_limits().and_then(|limits| Ok((limits.rule, place(dst)?, place(src)?)));
        let (rule, dst, src) = found.map_err(|error| self.failed(error))?;
        let is_short = |on| on == self.id() && len <= BOUNCE_LEN && rule == ANYTHING;
        // SAFETY: the caller's promise; the device side was looked up.
        let done = unsafe {
            match (dst.0, src.0) {
                (Memory::Device(dst, on), Memory::Host(src)) if is_short(on) => {
                    self.copy_short(src, dst, Direction::HostToDevice, len)
                }
                (Memory::Host(dst), Memory::Device(src, on)) if is_short(on) => {
                    self.copy_short(dst, src, Direction::DeviceToHost, len)
                }
                _ => match self.start_one((dst, src), len, rule) {
                    // No `failed` here: the transfer counted its failure when it finished.
                    Ok(mut transfer) => return transfer.wait().map_err(|error| error.on(self)),
                    Err(error) => Err(error),
                },
            }
        };
        done.map_err(|error| self.failed(error))
    }

    /// # Safety
    /// As for [`Device::copy`].
    unsafe fn start_one(
        self: &Arc<Self>,
        (dst, src): (Place, Place),
        len: usize,
        rule: DmaRule,
    ) -> Result<Transfer, Error> {
        let mut pieces = Pieces::new();
        // SAFETY: the caller's promise.
        unsafe { route(self, &(dst.end(self)?, src.end(self)?), len, None, rule, &mut pieces)? };
        Transfer::submit(self, pieces, None)
    }

    /// Copies through the slot of a permit, by one packet.
    ///
    /// # Safety
    /// As for [`Device::copy`]; `len` is at most [`BOUNCE_LEN`], and the device side is allocated.
    unsafe fn copy_short(
        self: &Arc<Self>,
        host: HostPtr,
        addr: DeviceAddr,
        direction: Direction,
        len: usize,
    ) -> Result<(), Error> {
        let mut permit = self.engine().wait_for_permit();
        let (slot, seen) = self.slot_of(&permit)?;
        let (dst, src) = if direction == Direction::DeviceToHost {
            (seen, addr)
        } else {
            // SAFETY: the caller keeps the host side valid; the slot belongs to the permit.
            unsafe { host.0.copy_to_nonoverlapping(slot, len) };
            (addr, seen)
        };
        let dma = LinDma::Copy { src, dst, len: len as u32 };
        // SAFETY: the slot is ours until the permit is dropped, and pinned as long as the device is
        // open; the owner of the device side must not free it while a copy runs.
        unsafe { permit.run(direction, dma, len as u64)? };
        if direction == Direction::DeviceToHost {
            // SAFETY: as above, and the device is done.
            unsafe { slot.copy_to_nonoverlapping(host.0, len) };
        }
        Ok(())
    }
}
