//! Copies that the caller waits for. A small one is one packet and one submission, and needs none of the
//! bookkeeping of a copy that outlives its caller.

use std::sync::Arc;

use hl_thunk::packet::LinDma;

use super::Transfer;
use super::located::End;
use super::route::{Caller, Pieces, ShortCopy, route};
use crate::submit::host_copy::{copy_in, copy_out};
use crate::{Device, Direction, Error};

/// Copies `len` bytes between two ends and returns when they have arrived. `device` was asked to copy.
///
/// # Safety
/// As for [`Device::copy`].
#[inline]
pub(crate) unsafe fn copy_and_wait(
    device: &Arc<Device>,
    ends: &(End, End),
    len: usize,
) -> Result<(), Error> {
    let mut pieces = Pieces::new();
    // SAFETY: the caller's promise.
    let routed = unsafe { route(device, ends, len, None, Caller::Waits, &mut pieces) };
    let done = match routed {
        // SAFETY: the caller's promise; the device side was looked up, and `route` checked the length.
        Ok(Some(short)) => unsafe { short.copy(len) },
        Ok(None) => match Transfer::submit(device, pieces) {
            // A failure was counted when the transfer concluded.
            Ok(mut transfer) => return transfer.wait().map_err(|error| error.on(device)),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    };
    done.map_err(|error| device.failed(error))
}

impl ShortCopy<'_> {
    /// Copies `len` bytes and waits.
    ///
    /// # Safety
    /// As for [`Device::copy`](crate::Device::copy); `len` is at most
    /// [`BOUNCE_LEN`](super::BOUNCE_LEN), and the device side is in use.
    pub(super) unsafe fn copy(&self, len: usize) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.try_copy(len) }.map_err(|error| error.on(self.on))
    }

    /// # Safety
    /// As for [`ShortCopy::copy`].
    unsafe fn try_copy(&self, len: usize) -> Result<(), Error> {
        let ShortCopy { on, host, addr, direction } = self;
        let slots = on.permit_slots()?;
        let mut permit = on.engine().wait_for_permit();
        let (slot, seen) = slots.slot(on, permit.slot())?;
        let dma = match direction {
            Direction::DeviceToHost => LinDma::Copy { src: *addr, dst: seen, len: len as u32 },
            _ => {
                // SAFETY: the caller answers for the host side; the slot is the permit's.
                unsafe { copy_in(*host, slot, len, false)? };
                LinDma::Copy { src: seen, dst: *addr, len: len as u32 }
            }
        };
        // SAFETY: the slot is ours until the permit is dropped, and pinned as long as the device is
        // open; the owner of the device side must not free it under a running copy.
        unsafe { permit.run(*direction, dma, len as u64)? };
        if *direction == Direction::DeviceToHost {
            // SAFETY: as above, and the device is done.
            unsafe { copy_out(slot, *host, len, false)? };
        }
        Ok(())
    }
}
