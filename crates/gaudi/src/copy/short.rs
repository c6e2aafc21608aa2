//! Small copies that someone waits for: one slot, one packet, one submission, and none of the
//! bookkeeping that a copy needs which outlives its caller.

use std::sync::Arc;

use hl_thunk::packet::LinDma;

use super::Side;
use super::host_copy::{copy_in, copy_out};
use super::plan::{BOUNCE_LEN, HostPtr, card_for, check_host};
use crate::stats::{Path, Tally};
use crate::{Device, Direction, Error};

/// Copies and waits, if this is a small copy between host and device and a slot is free; `None`,
/// and nothing done, if it is not.
///
/// # Safety
/// As for [`Device::copy`].
pub(crate) unsafe fn copy_short(
    device: &Arc<Device>,
    dst: Side,
    src: Side,
    len: usize,
) -> Option<Result<(), Error>> {
    let (host, addr, direction) = match (dst, src) {
        _ if len == 0 || len > BOUNCE_LEN => return None,
        (Side::Device(addr), Side::Host(host)) => (host, addr, Direction::HostToDevice),
        (Side::Host(host), Side::Device(addr)) => (host, addr, Direction::DeviceToHost),
        (Side::Host(_), Side::Host(_)) | (Side::Device(_), Side::Device(_)) => return None,
    };
    let ready = check_host(host, len).and_then(|()| {
        let on = card_for(device, addr, len)?;
        let ring = Arc::clone(on.bounce()?);
        Ok((on, ring))
    });
    let (on, ring) = match ready {
        Ok(ready) => ready,
        Err(error) => return Some(Err(error)),
    };
    let slot = ring.borrow()?;
    let copied = (|| {
        let stage = slot.home(&on)?;
        let dma = match direction {
            Direction::DeviceToHost => LinDma::Copy { src: addr, dst: stage, len: len as u32 },
            _ => {
                // SAFETY: the caller answers for the host side; the slot is ours.
                unsafe { copy_in(HostPtr(host), slot.ptr(), len, false)? };
                LinDma::Copy { src: stage, dst: addr, len: len as u32 }
            }
        };
        let tally = Tally::one(direction, Path::Bounced, len as u64);
        // SAFETY: the slot is held, and stays pinned with the device; the device side was found
        // live, and its owner must not free it under a running copy.
        unsafe { on.engine().run(direction, dma, tally)? };
        if direction == Direction::DeviceToHost {
            // SAFETY: as above, and the device is done.
            unsafe { copy_out(slot.ptr(), HostPtr(host), len, false)? };
        }
        Ok(())
    })();
    Some(copied.map_err(|error: Error| error.on(&on)))
}
