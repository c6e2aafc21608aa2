//! What the packets of a queue access: device memory, registers, fences, other queues.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use crate::address_space::HostRange;
use crate::asic::Generation;
use crate::context::Context;
use crate::engine::INLINE_BYTES;
use crate::faults::Action;
use crate::guarded::{self, BadAddress};
use crate::packet::LinDma;
use crate::processor::{Bus, Fault};
use crate::registers::{Registers, WriteEffects};
use crate::ring::CopyEnd;
use crate::sync_manager::Effect;
use crate::timing::Link;
use crate::workers;

/// Most bytes copied through a buffer at once.
const BOUNCE: usize = 64 << 10;
/// Monitors that trigger each other without end are an error.
const MAX_EFFECTS: u32 = 1 << 16;

/// The device as one queue of it sees it.
pub(crate) struct QueueBus<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) queue: u32,
}

impl QueueBus<'_> {
    /// Moves bytes between this process and device memory, piece by piece.
    fn transfer(&self, addr: u64, ptr: *mut u8, len: usize, write: bool) -> Result<(), Fault> {
        let mut done = 0;
        while done < len {
            let at = addr.checked_add(done as u64).ok_or(Fault::Page { addr })?;
            let range = self.context.space().translate(at).ok_or(Fault::Page { addr: at })?;
            let part = range.len.min((len - done) as u64) as usize;
            let here = HostRange { ptr: ptr.wrapping_add(done), len: part as u64, pin: None };
            let moved =
                if write { self.copy(&range, &here, part) } else { self.copy(&here, &range, part) };
            moved.map_err(|_| Fault::Page { addr: at })?;
            done += part;
        }
        Ok(())
    }

    /// Copies between two ranges of memory, each mapped for the device or a buffer of the caller.
    fn copy(&self, to: &HostRange, from: &HostRange, len: usize) -> Result<(), BadAddress> {
        self.context.memory.before_access(from.ptr, len as u64, false);
        self.context.memory.before_access(to.ptr, len as u64, true);
        let other = |range: &HostRange| match self.context.memory.file_range(range.ptr) {
            Some((file, offset)) => CopyEnd::File(file, offset),
            None => CopyEnd::Memory(range.ptr),
        };
        match (to.pin, from.pin) {
            // SAFETY: a vanished mapping comes back as an error.
            (None, None) => unsafe { guarded::copy(to.ptr, from.ptr, len) },
            (Some(pin), None) => pin.copy(to.ptr as u64, other(from), len, true),
            (None, Some(pin)) => pin.copy(from.ptr as u64, other(to), len, false),
            (Some(to_pin), Some(from_pin)) => {
                let mut buffer = vec![0u8; len.min(BOUNCE)];
                let memory = CopyEnd::Memory(buffer.as_mut_ptr());
                for at in (0..len).step_by(BOUNCE) {
                    let part = (len - at).min(BOUNCE);
                    from_pin.copy(from.ptr as u64 + at as u64, memory, part, false)?;
                    to_pin.copy(to.ptr as u64 + at as u64, memory, part, true)?;
                }
                Ok(())
            }
        }
    }

    /// Fills memory that is mapped for the device with eight bytes, over and over.
    fn fill(&self, to: &HostRange, pattern: u64, len: usize) -> Result<(), BadAddress> {
        self.context.memory.before_access(to.ptr, len as u64, true);
        let Some(pin) = to.pin else {
            // SAFETY: a vanished mapping comes back as an error.
            return unsafe { guarded::fill(to.ptr, pattern, len) };
        };
        let mut buffer = vec![pattern; len.min(BOUNCE).div_ceil(8)];
        for at in (0..len).step_by(BOUNCE) {
            let memory = CopyEnd::Memory(buffer.as_mut_ptr().cast());
            pin.copy(to.ptr as u64 + at as u64, memory, (len - at).min(BOUNCE), true)?;
        }
        Ok(())
    }

    /// Advances the clocks of the links.
    fn account(&self, dma: &LinDma, len: u64) {
        let context = self.context;
        let host = |addr| context.profile.is_host(addr);
        let link = match (!dma.memset && host(dma.src), host(dma.dst)) {
            (true, _) => Link::ToDevice,
            (false, true) => Link::ToHost,
            (false, false) => Link::Inside,
        };
        let peer = context.node.config.model.and_then(|_| {
            let space = context.space();
            space.peer(dma.src).filter(|_| !dma.memset).or_else(|| space.peer(dma.dst))
        });
        context.timing.moved(self.queue, link, len, peer.and_then(|peer| peer.links()));
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.context.registers.lock().unwrap_or_else(|p| p.into_inner())
    }

    /// Adds to a 64-bit counter in memory; the lock makes it one step.
    fn add(&self, addr: u64, value: u32) -> Result<(), Fault> {
        let _one_at_a_time = self.registers();
        let mut bytes = [0; 8];
        self.transfer(addr, bytes.as_mut_ptr(), bytes.len(), false)?;
        bytes = u64::from_le_bytes(bytes).wrapping_add(u64::from(value)).to_le_bytes();
        self.transfer(addr, bytes.as_mut_ptr(), bytes.len(), true)
    }

    /// Continues a queue whose fence counter changed.
    fn kick(&self, queue: u32) {
        if let Some(target) = self.context.queues.get(queue as usize)
            && target.kick()
        {
            self.context.ready.lock().unwrap_or_else(|p| p.into_inner()).push_back(queue);
        }
    }

    /// Hands ready queues to the workers before a long copy, so that they do not wait for it.
    fn hand_over_ready_queues(&self) {
        let ready =
            core::mem::take(&mut *self.context.ready.lock().unwrap_or_else(|p| p.into_inner()));
        for queue in ready {
            workers::enqueue(self.context.clone(), queue);
        }
    }

    /// Copies through a buffer, reversing the bytes of each unit.
    fn swap(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault> {
        let unit = 1usize << dma.swap;
        let mut bounce = vec![0u8; len.min(BOUNCE as u64) as usize];
        let mut at = 0;
        while at < len {
            let part = &mut bounce[..(len - at).min(BOUNCE as u64) as usize];
            self.transfer(dma.src.wrapping_add(done + at), part.as_mut_ptr(), part.len(), false)?;
            part.chunks_exact_mut(unit).for_each(<[u8]>::reverse);
            self.transfer(dma.dst.wrapping_add(done + at), part.as_mut_ptr(), part.len(), true)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Flips a bit, for a fault rule.
    fn flip(&self, addr: u64) -> Result<(), Fault> {
        let mut byte = 0_u8;
        self.transfer(addr, &raw mut byte, 1, false)?;
        byte ^= 1;
        self.transfer(addr, &raw mut byte, 1, true)
    }
}

impl Bus for QueueBus<'_> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        let context = self.context;
        if !context.node.config.lenient.edma_fetch
            && context.profile.edma_engine(self.queue).is_some()
            && context.profile.is_host(addr)
        {
            return Err(Fault::Fetch { addr });
        }
        self.transfer(addr, into.as_mut_ptr(), into.len(), false)
    }

    fn dma(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault> {
        let mut flip = None;
        if done == 0 {
            let (unit, align) = self.context.node.config.dma_rule;
            let odd = |addr: u64| !addr.is_multiple_of(align);
            if !u64::from(dma.size).is_multiple_of(unit)
                || odd(dma.dst)
                || (!dma.memset && odd(dma.src))
            {
                return Err(Fault::Rule { addr: dma.dst });
            }
            match self.context.node.fault("transfer") {
                Some(Action::Fail(_)) => return Err(Fault::Page { addr: dma.src }),
                Some(Action::Slow(time)) => std::thread::sleep(time),
                Some(Action::Reset) => self.context.reset(None),
                Some(Action::Remove) => crate::context::remove_all(),
                Some(Action::Flip(at)) => flip = Some(dma.dst.wrapping_add(at)),
                Some(Action::Hang | Action::Late(_)) | None => {}
            }
        }
        if len >= INLINE_BYTES {
            self.hand_over_ready_queues();
        }
        self.account(dma, len);
        if dma.swap != 0 && !dma.memset {
            return self.swap(dma, done, len);
        }
        let early = self.context.node.config.early_writes;
        let mut at = done;
        while at < done + len {
            let dst = dma.dst.checked_add(at).ok_or(Fault::Page { addr: dma.dst })?;
            let src = dma.src.wrapping_add(at);
            let (mut to, from, peer) = {
                let space = self.context.space();
                let peer = |addr| early.then(|| space.peer(addr)).flatten();
                if let Some(peer) = peer(src) {
                    peer.before_read();
                }
                let to = space.translate(dst).ok_or(Fault::Page { addr: dst })?;
                let from = if dma.memset {
                    None
                } else {
                    Some(space.translate(src).ok_or(Fault::Page { addr: src })?)
                };
                (to, from, peer(dst))
            };
            if let Some(peer) = &peer {
                to.ptr = peer.write_to(to.ptr);
            }
            let mut part = (done + len - at).min(to.len);
            let moved = match from {
                Some(from) => {
                    part = part.min(from.len);
                    self.copy(&to, &from, part as usize).map_err(|_| Fault::Page { addr: src })
                }
                None => {
                    let pattern = fill_pattern(dma, self.context.profile.dram_mmu, at);
                    self.fill(&to, pattern, part as usize).map_err(|_| Fault::Page { addr: dst })
                }
            };
            moved?;
            if let Some(peer) = &peer {
                peer.written(to.ptr, part);
            }
            at += part;
        }
        flip.map_or(Ok(()), |addr| self.flip(addr))
    }

    fn write(&self, addr: u64, value: u32) -> Result<(), Fault> {
        if !self.context.profile.cfg.contains(addr, 4) {
            let mut bytes = value.to_le_bytes();
            return self.transfer(addr, bytes.as_mut_ptr(), bytes.len(), true);
        }
        let mut then = WriteEffects::default();
        self.registers().write(addr, value, &mut then);
        // A monitor's payload may be another register, and so on.
        let mut effects = VecDeque::from(then.effects);
        let mut kicked = then.kicked;
        let mut rounds = 0;
        while let Some(effect) = effects.pop_front() {
            rounds += 1;
            if rounds > MAX_EFFECTS {
                return Err(Fault::Razwi { addr, write: true });
            }
            match effect {
                Effect::Write { addr, value, .. } if self.context.profile.cfg.contains(addr, 4) => {
                    let mut then = WriteEffects::default();
                    self.registers().write(addr, value, &mut then);
                    effects.extend(then.effects);
                    kicked.extend(then.kicked);
                }
                Effect::Write { addr, value, .. } => {
                    let mut bytes = value.to_le_bytes();
                    self.transfer(addr, bytes.as_mut_ptr(), bytes.len(), true)?;
                }
                Effect::Add { addr, value, .. } => self.add(addr, value)?,
                Effect::Interrupt { id, .. } => self.context.interrupt(id),
            }
        }
        for queue in kicked {
            self.kick(queue);
        }
        Ok(())
    }

    fn write_own(&self, offset: u16, value: u32) -> Result<(), Fault> {
        // Gaudi1's DMA engines: two of external queues, six of internal ones.
        let engine = match (self.context.profile.generation, self.queue) {
            (Generation::Gaudi1, queue @ 0..=7) => queue / 4,
            (Generation::Gaudi1, queue @ 9..=32) => (queue - 1) / 4,
            _ => return Ok(()),
        };
        let transfer = {
            let mut cores = self.context.dma_cores.lock().unwrap_or_else(|p| p.into_inner());
            cores[engine as usize].write(offset, value).map_err(|()| Fault::Opcode)?
        };
        let Some(transfer) = transfer else { return Ok(()) };
        let size = transfer.row_len;
        for (src, dst) in transfer.rows {
            if self.stopped() {
                return Ok(());
            }
            let row = LinDma { size, src, dst, memset: false, swap: 0, completion: false };
            self.dma(&row, 0, size.into())?;
        }
        match transfer.completion {
            Some((addr, value)) => self.write(addr, value),
            None => Ok(()),
        }
    }

    fn message_base(&self, base: u8) -> u64 {
        self.registers().message_base(base)
    }

    fn pass_fence(&self, lower: bool, id: u8, target: u8, decrement: u8) -> bool {
        self.registers().pass_fence(self.queue, lower, id, target, decrement)
    }

    fn drained(&self) {
        self.context.timing.drained(self.queue);
    }

    fn raise_fence(&self, lower: bool, id: u8, increment: u8) {
        self.registers().raise_fence(self.queue, lower, id, increment);
        self.kick(self.queue);
    }

    fn time(&self) -> u32 {
        self.context.epoch.elapsed().as_nanos() as u32
    }

    fn stopped(&self) -> bool {
        self.context.down.load(Ordering::Relaxed)
    }
}

/// The eight bytes to repeat from byte `at` of a fill on. Gaudi2's driver fills with 32-bit values.
fn fill_pattern(dma: &LinDma, gaudi2: bool, at: u64) -> u64 {
    let pattern = if gaudi2 {
        let low = dma.src & 0xffff_ffff;
        low << 32 | low
    } else {
        dma.src
    };
    pattern.rotate_right((at % 8) as u32 * 8)
}
