//! Small copies that someone waits for: one packet, one submission, and none of the bookkeeping that
//! a copy needs which outlives its caller.

use std::sync::Arc;

use hl_thunk::packet::LinDma;

use super::Side;
use super::host_copy::{copy_in, copy_out};
use super::plan::{BOUNCE_LEN, HostPtr, card_for, check_host};
use crate::{Device, DeviceAddr, Direction, Error};

/// Copies and waits, if this is a small copy between host and device; `None`, and nothing done, if
/// it is not.
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
        _ if !is_short(len) => return None,
        (Side::Device(addr), Side::Host(host)) => (host, addr, Direction::HostToDevice),
        (Side::Host(host), Side::Device(addr)) => (host, addr, Direction::DeviceToHost),
        (Side::Host(_), Side::Host(_)) | (Side::Device(_), Side::Device(_)) => return None,
    };
    Some(card_for(device, addr, len).and_then(|on| {
        // SAFETY: the caller's promise; the device side was found live just now.
        unsafe { short_on(&on, host, addr, direction, len) }
    }))
}

/// Whether a copy between host and device is small enough for this.
pub(crate) fn is_short(len: usize) -> bool {
    (1..=BOUNCE_LEN).contains(&len)
}

/// Copies between host memory and memory that `on` reaches, and waits.
///
/// # Safety
/// As for [`Device::copy`]; `addr` must be live, and `len` [short](is_short).
pub(crate) unsafe fn short_on(
    on: &Arc<Device>,
    host: *mut u8,
    addr: DeviceAddr,
    direction: Direction,
    len: usize,
) -> Result<(), Error> {
    check_host(host, len)?;
    on.can_copy()?;
    let copied = (|| {
        let ring = on.shorts()?;
        let mut reservation = on.engine().make_room();
        let (slot, stage) = ring.own_slot(on, reservation.slot())?;
        let dma = match direction {
            Direction::DeviceToHost => LinDma::Copy { src: addr, dst: stage, len: len as u32 },
            _ => {
                // SAFETY: the caller answers for the host side; the slot is the reservation's.
                unsafe { copy_in(HostPtr(host), slot, len, false)? };
                LinDma::Copy { src: stage, dst: addr, len: len as u32 }
            }
        };
        // SAFETY: the slot stays ours until the reservation goes, and pinned with the device; the
        // owner of the device side must not free it under a running copy.
        unsafe { reservation.run(direction, dma, len as u64)? };
        if direction == Direction::DeviceToHost {
            // SAFETY: as above, and the device is done.
            unsafe { copy_out(slot, HostPtr(host), len, false)? };
        }
        Ok(())
    })();
    copied.map_err(|error: Error| error.on(on))
}
