//! Small copies that the caller waits for: one packet, one submission, and none of the bookkeeping of a
//! copy that outlives its caller.

use hl_thunk::packet::LinDma;

use super::host_copy::{copy_in, copy_out};
use super::route::Short;
use crate::{Direction, Error};

impl Short<'_> {
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
    /// As for [`Short::copy`].
    unsafe fn try_copy(&self, len: usize) -> Result<(), Error> {
        let Short { on, host, addr, direction } = self;
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
