//! Copies whose lengths or addresses the DMA engines do not accept ([`DmaRule`]), through aligned buffers.
//!
//! No card is known to have such a rule. If we learn of one, it goes into [`DmaRule::of`], and this module makes copies
//! work. [`cut`] finds the part of a copy that follows the rule, for the engines. The rest goes through the slot of a
//! permit in whole units. To read some bytes, it reads their units and the CPU picks the bytes; to write some bytes of a
//! unit, it reads, changes and writes back the unit.
//!
//! These steps block, even in copies that otherwise do not. Between reading and writing back a unit nothing else may
//! write to it. Copies of this process serialise on [`TURN`]; a NIC, or a peer that imported the memory, must not write
//! to the same unit meanwhile.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use hl_thunk::packet::{DmaRule, LinDma};

use super::BOUNCE_LEN;
use super::located::{End, Located};
use crate::submit::host_copy::HostPtr;
use crate::submit::host_copy::{copy_in, copy_out};
use crate::{Device, DeviceAddr, Direction, Error};

/// Locked while units are read, changed and written back.
static TURN: Mutex<()> = Mutex::new(());

/// The part of `len` bytes that the engines can copy: whole units on every side that is device memory. Without a rule,
/// that is all of it.
pub(super) fn cut(rule: DmaRule, (dst, src): &(End, End), len: usize) -> Range<usize> {
    let unit = rule.unit() as usize;
    let offset = |end: &End| match end {
        End::Host(_) => None,
        End::Device(located) => Some((located.addr.0 % rule.unit()) as usize),
    };
    let (one, other) = (offset(dst), offset(src));
    let first = one.or(other).unwrap_or(0);
    // If the two sides have different offsets in their units, no whole unit can be copied.
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
    // A piece fits a slot together with the rest of its first and last unit.
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

/// Sets `len` bytes of `device` that the engines cannot fill because of their rule.
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

/// The whole units that contain these bytes: start, length, and the offset of the bytes.
fn units(rule: DmaRule, addr: u64, len: usize) -> (u64, usize, usize) {
    let start = addr / rule.unit() * rule.unit();
    let end = (addr + len as u64).next_multiple_of(rule.unit());
    (start, (end - start) as usize, (addr - start) as usize)
}

impl Located {
    fn read(&self, rule: DmaRule, at: usize, into: &mut [u8]) -> Result<(), Error> {
        let (start, len, skip) = units(rule, self.addr.0 + at as u64, into.len());
        let mut read = vec![0; len];
        self.fetch(start, &mut read)?;
        into.copy_from_slice(&read[skip..skip + into.len()]);
        Ok(())
    }

    fn write(&self, rule: DmaRule, at: usize, from: &[u8]) -> Result<(), Error> {
        let (start, len, skip) = units(rule, self.addr.0 + at as u64, from.len());
        if len == from.len() {
            return self.store(start, from);
        }
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = vec![0; len];
        self.fetch(start, &mut changed)?;
        changed[skip..skip + from.len()].copy_from_slice(from);
        self.store(start, &changed)
    }

    /// Reads whole units.
    fn fetch(&self, start: u64, units: &mut [u8]) -> Result<(), Error> {
        self.through_slot(Direction::DeviceToHost, start, units.len(), |slot, run| {
            run()?;
            // SAFETY: the units are in the slot, which only we use.
            unsafe { slot.0.copy_to_nonoverlapping(units.as_mut_ptr(), units.len()) };
            Ok(())
        })
    }

    /// Writes whole units.
    fn store(&self, start: u64, units: &[u8]) -> Result<(), Error> {
        self.through_slot(Direction::HostToDevice, start, units.len(), |slot, run| {
            // SAFETY: the slot is large enough for the units, and only we use it.
            unsafe { slot.0.copy_from_nonoverlapping(units.as_ptr(), units.len()) };
            run()
        })
    }

    /// Runs `work` with the slot of a permit, and a function that moves units between it and the device. Takes one permit
    /// for each move: a thread that holds one permit while it waits for another can deadlock.
    fn through_slot(
        &self,
        direction: Direction,
        start: u64,
        len: usize,
        work: impl FnOnce(HostPtr, &mut dyn FnMut() -> Result<(), Error>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let on = &self.device;
        let mut permit = on.engine().wait_for_permit();
        let (slot, seen) = on.slot_of(&permit)?;
        let (dst, src) = match direction {
            Direction::DeviceToHost => (seen, DeviceAddr(start)),
            _ => (DeviceAddr(start), seen),
        };
        let mut run = || {
            let dma = LinDma::Copy { src, dst, len: len as u32 };
            // SAFETY: the slot is ours until the permit is dropped, and pinned as long as the device is open; the
            // units are in the driver pages that contain the caller's memory.
            unsafe { permit.run(direction, dma, len as u64) }
        };
        work(HostPtr(slot), &mut run).map_err(|error| error.on(on))
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
