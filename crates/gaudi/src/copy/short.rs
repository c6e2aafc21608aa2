//! Small copies that someone waits for: one packet, one submission, and none of the bookkeeping that
//! a copy needs which outlives its caller.

use std::sync::Arc;

use hl_thunk::packet::LinDma;

use super::Side;
use super::host_copy::{copy_in, copy_out};
use super::plan::{BOUNCE_LEN, HostPtr, SMALL_LEN, card_for, check_host};
use crate::rcache::Pin;
use crate::stats::Path;
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
    if len > SMALL_LEN {
        // SAFETY: the caller's promise.
        let pinned = unsafe { kept_pin(on, host, len) };
        if let Some((host, pin)) = pinned {
            // SAFETY: the pin is held across the call; else as below.
            let copied = unsafe {
                let dma = dma(direction, addr, host, len);
                on.engine().make_room().run(direction, dma, Path::Pinned, len as u64)
            };
            drop(pin);
            return copied.map_err(|error| error.on(on));
        }
    }
    let copied = (|| {
        let ring = on.shorts()?;
        let mut reservation = on.engine().make_room();
        let (slot, stage) = ring.own_slot(on, reservation.slot())?;
        if direction == Direction::HostToDevice {
            // SAFETY: the caller answers for the host side; the slot is the reservation's.
            unsafe { copy_in(HostPtr(host), slot, len, false)? };
        }
        let dma = dma(direction, addr, stage, len);
        // SAFETY: the slot stays ours until the reservation goes, and pinned with the device; the
        // owner of the device side must not free it under a running copy.
        unsafe { reservation.run(direction, dma, Path::Bounced, len as u64)? };
        if direction == Direction::DeviceToHost {
            // SAFETY: as above, and the device is done.
            unsafe { copy_out(slot, HostPtr(host), len, false)? };
        }
        Ok(())
    })();
    copied.map_err(|error: Error| error.on(on))
}

fn dma(direction: Direction, addr: DeviceAddr, host: DeviceAddr, len: usize) -> LinDma {
    let (dst, src) = match direction {
        Direction::DeviceToHost => (host, addr),
        _ => (addr, host),
    };
    LinDma::Copy { src, dst, len: len as u32 }
}

/// The pin of host memory that is in the registration cache, or has come back often enough to get
/// into it.
///
/// # Safety
/// As for [`Device::copy`].
unsafe fn kept_pin(on: &Arc<Device>, host: *mut u8, len: usize) -> Option<(DeviceAddr, Pin)> {
    let (cache, addr) = (on.registrations(), host as usize);
    if let Some(found) = cache.find(addr, len) {
        return Some(found);
    }
    if !on.recurring().has_earned_pin(addr) || !cache.keeps(len) {
        return None;
    }
    // SAFETY: the caller keeps the memory while the copy uses it.
    let pinned = unsafe { cache.pin(on, (addr, len), addr..addr + len) };
    // It goes without: if something is wrong with the card, the copy will show it.
    pinned.ok().flatten()
}
