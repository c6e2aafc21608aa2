//! Sync objects, monitors and completion queues of one sync manager.
//!
//! A write to a register returns what it sets off – words to be written, counters to be advanced,
//! interrupts – for the caller to carry out. Nothing here touches memory or other queues.

use crate::asic::Generation;

/// What a register write sets off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields bear the names of the specification")]
pub enum Effect {
    /// Write a word to an address.
    Write { addr: u64, value: u32, by: Writer },
    /// Add to a 64-bit counter in memory.
    Add { addr: u64, value: u32, by: Writer },
    /// Write `id` to the interrupt doorbell that the completion queue names, at `addr`.
    Interrupt { id: u32, addr: u64, enabled: bool },
}

/// Which register caused a write. The driver's own use physical addresses, those of users virtual ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    /// A monitor, by number.
    Monitor(usize),
    /// A completion queue, by number.
    Queue(usize),
}

/// Where the parts of a sync manager lie, from its first sync object on.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    sobs: u64,
    monitors: u64,
    addr_low: u64,
    addr_high: u64,
    data: u64,
    arm: u64,
    /// Gaudi2: long sync objects, several payloads, completion queues.
    config: Option<u64>,
    queues: Option<u64>,
}

impl Layout {
    /// Of a generation.
    pub fn of(generation: Generation) -> Self {
        match generation {
            Generation::Gaudi1 => Self {
                sobs: 2048,
                monitors: 512,
                addr_low: 0x2000,
                addr_high: 0x2800,
                data: 0x3000,
                arm: 0x3800,
                config: None,
                queues: None,
            },
            Generation::Gaudi2 | Generation::Gaudi3 => Self {
                sobs: 8192,
                monitors: 2048,
                addr_low: 0x8000,
                addr_high: 0xa000,
                data: 0xc000,
                arm: 0xe000,
                config: Some(0x10000),
                queues: Some(0x1e050),
            },
        }
    }

    /// Bytes of registers, from the first sync object on.
    pub(crate) fn len(self) -> u64 {
        match self.queues {
            Some(queues) => queues + CQ_BLOCK * 9,
            None => self.arm + self.monitors * 4,
        }
    }
}

/// Registers of one kind for all completion queues take this much.
const CQ_BLOCK: u64 = 0x100;
const CQS: usize = 64;
/// Sync objects count in 15 bits; four of them make a long one.
const SOB_BITS: u32 = 15;
const SOB_MASK: u64 = 0x7fff;

#[derive(Clone, Copy, Debug, Default)]
struct Monitor {
    addr: u64,
    data: u32,
    arm: u32,
    armed: bool,
    config: u32,
}

impl Monitor {
    fn long(&self) -> bool {
        self.config & 1 != 0
    }

    /// How many monitors after it send their payloads together with its own.
    fn more_writes(&self) -> usize {
        (self.config >> 5 & 3) as usize
    }

    fn has_queue(&self) -> bool {
        self.config >> 4 & 1 != 0
    }

    /// Its completion queue raises an interrupt.
    fn interrupts(&self) -> bool {
        self.config >> 8 & 1 != 0
    }

    /// First of the eight sync objects it monitors.
    fn group(&self) -> usize {
        let high = (self.config >> 16 & 0xf) << 8;
        ((self.arm & 0xff | high) * 8) as usize
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct CompletionQueue {
    base: u64,
    size_log2: u32,
    produced: u32,
    interrupt_addr: u64,
    interrupt_data: u32,
    counts: bool,
}

/// The registers.
#[derive(Debug)]
pub struct SyncManager {
    layout: Layout,
    sobs: Vec<u16>,
    monitors: Vec<Monitor>,
    /// Indices of armed monitors: only these need a check when a sync object changes.
    armed: Vec<usize>,
    queues: Vec<CompletionQueue>,
}

impl SyncManager {
    /// After a reset.
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            sobs: vec![0; layout.sobs as usize],
            monitors: vec![Monitor::default(); layout.monitors as usize],
            armed: Vec::new(),
            queues: vec![CompletionQueue::default(); CQS],
        }
    }

    /// Writes a register at an offset from the first sync object.
    pub fn write(&mut self, offset: u64, value: u32, effects: &mut Vec<Effect>) {
        let layout = self.layout;
        let monitor = |base: u64| {
            let index = offset.checked_sub(base)? / 4;
            (index < layout.monitors).then_some(index as usize)
        };
        if offset < layout.sobs * 4 {
            self.write_sob((offset / 4) as usize, value);
            self.fire(effects);
        } else if let Some(at) = monitor(layout.addr_low) {
            let m = &mut self.monitors[at];
            m.addr = m.addr & !0xffff_ffff | u64::from(value);
        } else if let Some(at) = monitor(layout.addr_high) {
            let m = &mut self.monitors[at];
            m.addr = m.addr & 0xffff_ffff | u64::from(value) << 32;
        } else if let Some(at) = monitor(layout.data) {
            self.monitors[at].data = value;
        } else if let Some(at) = monitor(layout.arm) {
            self.arm(at, value);
            self.fire(effects);
        } else if let Some(at) = layout.config.and_then(monitor) {
            self.monitors[at].config = value;
        } else if let Some(at) = layout.queues.and_then(|base| offset.checked_sub(base)) {
            self.write_queue(at / CQ_BLOCK, (at % CQ_BLOCK / 4) as usize, value);
        }
    }

    /// Value of a sync object; `None` if there is none of this number.
    pub fn sob(&self, index: usize) -> Option<u16> {
        self.sobs.get(index).copied()
    }

    fn write_sob(&mut self, index: usize, value: u32) {
        let amount = u64::from(value) & SOB_MASK;
        let add = value >> 31 != 0;
        let long = value >> 24 & 1 != 0 && self.layout.config.is_some();
        match (add, long) {
            (false, false) => self.sobs[index] = amount as u16,
            (true, false) => {
                self.sobs[index] = ((u64::from(self.sobs[index]) + amount) & SOB_MASK) as u16;
            }
            (false, true) => self.set_long(index, amount),
            (true, true) => self.set_long(index, self.long(index).wrapping_add(amount)),
        }
    }

    fn long(&self, index: usize) -> u64 {
        let parts = self.sobs[index..].iter().take(4).enumerate();
        parts.fold(0, |sum, (n, part)| sum | u64::from(*part) << (SOB_BITS * n as u32))
    }

    fn set_long(&mut self, index: usize, value: u64) {
        for (n, part) in self.sobs[index..].iter_mut().take(4).enumerate() {
            *part = (value >> (SOB_BITS * n as u32) & SOB_MASK) as u16;
        }
    }

    fn arm(&mut self, at: usize, value: u32) {
        self.monitors[at].arm = value;
        // The upper parts of a long monitor only hold bits of its target.
        let first = at & !3;
        if at != first && self.monitors[first].long() {
            return;
        }
        if !self.monitors[at].armed {
            self.monitors[at].armed = true;
            self.armed.push(at);
        }
    }

    fn holds(&self, at: usize) -> bool {
        let m = &self.monitors[at];
        let reaches = |value: u64, target: u64| {
            if m.arm >> 16 & 1 != 0 { value == target } else { value >= target }
        };
        let target = u64::from(m.arm >> 17);
        if m.long() {
            let parts = self.monitors[at..].iter().take(4).enumerate();
            let target = parts
                .fold(0, |sum, (n, part)| sum | u64::from(part.arm >> 17) << (SOB_BITS * n as u32));
            let half = if m.arm >> 8 & 0xf == 0xf { 4 } else { 0 };
            return m.group() + half < self.sobs.len()
                && reaches(self.long(m.group() + half), target);
        }
        // A clear bit in the mask selects a sync object.
        (0..8).filter(|bit| m.arm >> (8 + bit) & 1 == 0).all(|bit| {
            let sob = self.sobs.get(m.group() + bit);
            sob.is_some_and(|value| reaches(u64::from(*value), target))
        })
    }

    /// Fires the armed monitors whose condition holds, each once.
    fn fire(&mut self, effects: &mut Vec<Effect>) {
        let (fired, waiting): (Vec<usize>, Vec<usize>) =
            self.armed.iter().partition(|at| self.holds(**at));
        self.armed = waiting;
        for at in fired {
            self.monitors[at].armed = false;
            let last = (at + self.monitors[at].more_writes()).min(self.monitors.len() - 1);
            for payload in at..=last {
                let Monitor { addr, data, .. } = self.monitors[payload];
                if self.monitors[at].has_queue() {
                    let enabled = self.monitors[at].interrupts();
                    self.produce(addr as usize, data, enabled, effects);
                } else {
                    effects.push(Effect::Write { addr, value: data, by: Writer::Monitor(payload) });
                }
            }
        }
    }

    fn write_queue(&mut self, register: u64, index: usize, value: u32) {
        let Some(queue) = self.queues.get_mut(index) else { return };
        match register {
            0 => queue.base = queue.base & !0xffff_ffff | u64::from(value),
            1 => queue.base = queue.base & 0xffff_ffff | u64::from(value) << 32,
            2 => {
                queue.size_log2 = value & 0x1f;
                queue.produced = 0;
            }
            3 => queue.produced = value,
            5 => queue.interrupt_addr = queue.interrupt_addr & !0xffff_ffff | u64::from(value),
            6 => queue.interrupt_addr = queue.interrupt_addr & 0xffff_ffff | u64::from(value) << 32,
            7 => queue.interrupt_data = value,
            8 => queue.counts = value & 1 != 0,
            _ => {}
        }
    }

    fn produce(&mut self, index: usize, data: u32, enabled: bool, effects: &mut Vec<Effect>) {
        let Some(queue) = self.queues.get_mut(index) else { return };
        let by = Writer::Queue(index);
        if queue.counts {
            effects.push(Effect::Add { addr: queue.base, value: data, by });
        } else {
            let place = u64::from(queue.produced) * 4 % (1 << queue.size_log2.max(2));
            queue.produced = queue.produced.wrapping_add(1);
            effects.push(Effect::Write { addr: queue.base.wrapping_add(place), value: data, by });
        }
        let (id, addr) = (queue.interrupt_data, queue.interrupt_addr);
        effects.push(Effect::Interrupt { id, addr, enabled });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADD: u32 = 1 << 31;
    const LONG: u32 = 1 << 24;
    const EQUAL: u32 = 1 << 16;

    fn gaudi2() -> SyncManager {
        SyncManager::new(Layout::of(Generation::Gaudi2))
    }

    fn write(manager: &mut SyncManager, offset: u64, value: u32) -> Vec<Effect> {
        let mut effects = Vec::new();
        manager.write(offset, value, &mut effects);
        effects
    }

    /// Arm value that monitors one sync object.
    fn arm(sob: u32, target: u32) -> u32 {
        ((sob / 8) & 0xff) | (!(1u32 << (sob % 8)) & 0xff) << 8 | EQUAL | target << 17
    }

    #[test]
    fn an_armed_monitor_fires_once() {
        let mut sm = gaudi2();
        write(&mut sm, 0x8000 + 4 * 7, 0x1234);
        write(&mut sm, 0xa000 + 4 * 7, 0x1000);
        write(&mut sm, 0xc000 + 4 * 7, 42);
        assert_eq!(write(&mut sm, 0xe000 + 4 * 7, arm(13, 2)), []);
        assert_eq!(write(&mut sm, 4 * 13, ADD | 1), []);
        let by = Writer::Monitor(7);
        let fired = [Effect::Write { addr: 0x1000_0000_1234, value: 42, by }];
        assert_eq!(write(&mut sm, 4 * 13, ADD | 1), fired);
        assert_eq!(write(&mut sm, 4 * 13, 2), []);
        // Armed when the condition already holds: at once.
        assert_eq!(write(&mut sm, 0xe000 + 4 * 7, arm(13, 2)), fired);
    }

    #[test]
    fn greater_or_equal_and_several_objects() {
        let mut sm = gaudi2();
        write(&mut sm, 0xe000, 0xfc << 8 | 5 << 17);
        write(&mut sm, 0, 9);
        assert_eq!(write(&mut sm, 4, 4), []);
        assert_eq!(write(&mut sm, 4, 5).len(), 1);
    }

    #[test]
    fn long_objects_carry_and_long_monitors_compare_60_bits() {
        let mut sm = gaudi2();
        let target: u64 = 0xfff_e000_3fff_8100;
        write(&mut sm, 4 * 416, LONG | 0x7fff);
        write(&mut sm, 4 * 416, ADD | LONG | 1);
        assert_eq!((sm.sob(416), sm.sob(417)), (Some(0), Some(1)));
        for n in 0..4 {
            let value = (target >> (15 * n) & 0x7fff) as u32;
            write(&mut sm, 4 * (416 + n), if n == 0 { LONG | value } else { value });
        }
        write(&mut sm, 0x10000 + 4 * 296, 1);
        for n in (1..4).rev() {
            let value = (target >> (15 * n) & 0x7fff) as u32;
            assert_eq!(write(&mut sm, 0xe000 + 4 * (296 + n), arm(0, value)), []);
        }
        let low = (target & 0x7fff) as u32;
        assert_eq!(write(&mut sm, 0xe000 + 4 * 296, arm(416, low)).len(), 1);
    }

    #[test]
    fn completion_queues_store_or_count_and_interrupt() {
        let mut sm = gaudi2();
        let cq = |register: u64| 0x1e050 + register * 0x100 + 4 * 3;
        for (register, value) in [(0, 0x5000), (1, 0xfff0_0000), (2, 3), (5, 0x77), (7, 50), (8, 0)]
        {
            write(&mut sm, cq(register), value);
        }
        write(&mut sm, 0x10000, 1 << 4 | 1 << 8);
        write(&mut sm, 0x8000, 3);
        let by = Writer::Queue(3);
        write(&mut sm, 0xc000, 101);
        for place in [0, 4, 0] {
            write(&mut sm, 0, 0);
            write(&mut sm, 0xe000, arm(0, 1));
            let addr = 0xfff0_0000_0000_5000 + place;
            let interrupt = Effect::Interrupt { id: 50, addr: 0x77, enabled: true };
            assert_eq!(write(&mut sm, 0, 1), [Effect::Write { addr, value: 101, by }, interrupt]);
        }
        write(&mut sm, cq(8), 1);
        let counted = write(&mut sm, 0xe000, arm(0, 1));
        assert_eq!(counted[0], Effect::Add { addr: 0xfff0_0000_0000_5000, value: 101, by });
    }

    proptest::proptest! {
        #[test]
        fn any_writes_do_not_panic(writes: Vec<(u32, u32)>) {
            for generation in [Generation::Gaudi1, Generation::Gaudi2] {
                let mut sm = SyncManager::new(Layout::of(generation));
                for (offset, value) in &writes {
                    write(&mut sm, u64::from(*offset) % 0x20000, *value);
                }
            }
        }
    }
}
