//! Copies whose lengths or addresses the DMA engines do not take ([`DmaRule`]), done through aligned buffers.
//!
//! No such rule is known of a card; one that is learned is written down in [`DmaRule::of`], and this makes the copies
//! work. [`cut`] finds the part of a copy that keeps to the rule, for the engines. What is left goes through the slot of a
//! permit, whole units at a time: bytes are read with their units and picked by the CPU; to write some bytes of a unit,
//! the unit is read, changed and written back.
//!
//! That is waited for, also in copies that otherwise do not block. Between reading and writing a unit nobody else may
//! write to it. Copies of this process take turns ([`TURN`]); a NIC, or a peer that imported the memory, must not write
//! to the same unit meanwhile.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use hl_thunk::packet::{DmaRule, LinDma};

use super::BOUNCE_LEN;
use super::host_copy::{copy_in, copy_out};
use super::located::{End, HostPtr, Located};
use crate::{Device, DeviceAddr, Direction, Error};

/// Held while units are read, changed and written back. One thread at a time also means that not all permits can be
/// held by threads that wait for a second one.
static TURN: Mutex<()> = Mutex::new(());

/// The part of `len` bytes that the engines can copy: whole units on every side that is device memory. All of it where
/// there is no rule.
pub(super) fn cut(rule: DmaRule, (dst, src): &(End, End), len: usize) -> Range<usize> {
    let unit = rule.unit() as usize;
    let offset = |end: &End| match end {
        End::Host(_) => None,
        End::Device(located) => Some((located.addr.0 % rule.unit()) as usize),
    };
    let (one, other) = (offset(dst), offset(src));
    let first = one.or(other).unwrap_or(0);
    // Two sides that lie differently in their units have none in common.
    if one.is_some_and(|one| other.is_some_and(|other| one != other)) {
        return 0..0;
    }
    let head = (unit - first) % unit;
    if head >= len { 0..0 } else { head..head + (len - head) / unit * unit }
}

/// Copies `range` of a copy and waits.
///
/// # Safety
/// As for [`Device::copy`].
pub(super) unsafe fn copy(
    rule: DmaRule,
    (dst, src): &(End, End),
    range: Range<usize>,
) -> Result<(), Error> {
    // With the rest of its first and last unit, a piece fits a slot.
    let piece = BOUNCE_LEN - 2 * rule.unit() as usize;
    let mut bytes = vec![0u8; piece.min(range.len())];
    for at in range.clone().step_by(piece) {
        let bytes = &mut bytes[..piece.min(range.end - at)];
        match src {
            End::Device(from) => from.read(rule, at, bytes)?,
            // SAFETY: the caller's promise.
            End::Host(from) => unsafe {
                copy_in(from.add(at), bytes.as_mut_ptr(), bytes.len(), true)?
            },
        }
        match dst {
            End::Device(to) => to.write(rule, at, bytes)?,
            // SAFETY: the caller's promise.
            End::Host(to) => unsafe {
                copy_out(bytes.as_mut_ptr(), to.add(at), bytes.len(), true)?
            },
        }
    }
    Ok(())
}

/// Sets `len` bytes of `device` that the engines do not fill.
pub(crate) fn fill(
    device: &Arc<Device>,
    addr: DeviceAddr,
    len: u64,
    byte: u8,
) -> Result<(), Error> {
    let rule = device.engine().limits().map_err(Clone::clone)?.rule;
    let to = Located { addr, device: Arc::clone(device), imported: false };
    let piece = BOUNCE_LEN - 2 * rule.unit() as usize;
    let bytes = vec![byte; piece.min(len as usize)];
    (0..len as usize)
        .step_by(piece)
        .try_for_each(|at| to.write(rule, at, &bytes[..piece.min(len as usize - at)]))
}

/// Whole units that contain these bytes, and where they begin in them.
fn units(rule: DmaRule, addr: u64, len: usize) -> (u64, usize, usize) {
    let start = addr / rule.unit() * rule.unit();
    let end = (addr + len as u64).next_multiple_of(rule.unit());
    (start, (end - start) as usize, (addr - start) as usize)
}

impl Located {
    fn read(&self, rule: DmaRule, at: usize, into: &mut [u8]) -> Result<(), Error> {
        let (start, len, skip) = units(rule, self.addr.0 + at as u64, into.len());
        self.through_slot(|slot, fetch, _| {
            fetch(start, len)?;
            // SAFETY: the units are in the slot, which is ours.
            unsafe { slot.0.add(skip).copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
            Ok(())
        })
    }

    fn write(&self, rule: DmaRule, at: usize, from: &[u8]) -> Result<(), Error> {
        let (start, len, skip) = units(rule, self.addr.0 + at as u64, from.len());
        let whole = len == from.len();
        self.through_slot(|slot, fetch, store| {
            if !whole {
                fetch(start, len)?;
            }
            // SAFETY: the slot has room for the units, and is ours.
            unsafe { slot.0.add(skip).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
            store(start, len)
        })
    }

    /// Runs `work` with a slot, and functions that fill it from the device and empty it to the device.
    fn through_slot(
        &self,
        work: impl FnOnce(
            HostPtr,
            &dyn Fn(u64, usize) -> Result<(), Error>,
            &dyn Fn(u64, usize) -> Result<(), Error>,
        ) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let on = &self.device;
        let slots = on.permit_slots()?;
        // One permit for the slot, another for each move: a permit is for one submission.
        let owner = on.engine().wait_for_permit();
        let (slot, seen) = slots.slot(on, owner.slot())?;
        let run = |direction, dma, len: usize| {
            let mut permit = on.engine().wait_for_permit();
            // SAFETY: the slot is ours until `owner` is dropped, and pinned as long as the device is open; the units
            // are in driver pages that memory of the caller lies in.
            unsafe { permit.run(direction, dma, len as u64) }
        };
        let fetch = |addr, len: usize| {
            let dma = LinDma::Copy { src: DeviceAddr(addr), dst: seen, len: len as u32 };
            run(Direction::DeviceToHost, dma, len)
        };
        let store = |addr, len: usize| {
            let dma = LinDma::Copy { src: seen, dst: DeviceAddr(addr), len: len as u32 };
            run(Direction::HostToDevice, dma, len)
        };
        work(HostPtr(slot), &fetch, &store).map_err(|error| error.on(on))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_lie_in_whole_units() {
        let rule = DmaRule { len: 4, addr: 64 };
        assert_eq!(units(rule, 0x1000, 64), (0x1000, 64, 0));
        assert_eq!(units(rule, 0x103f, 2), (0x1000, 128, 63));
        assert_eq!(units(rule, 0x1041, 1), (0x1040, 64, 1));
    }
}
