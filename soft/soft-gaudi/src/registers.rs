//! The registers a program's packets can reach: sync managers and the fence counters of queues.
//!
//! Registers of other blocks take any write and forget it; the card would, for those that a user
//! may write (arbiter weights and the like), behave differently in speed only.

use std::collections::BTreeMap;

use crate::asic::{Generation, Profile};
use crate::sync_manager::{Effect, Layout, SyncManager};

/// Fence counters of a queue's command processor, or of the lower one its engine has.
type Fences = [u32; 4];

/// One engine: four queues with an upper command processor each, and one lower.
#[derive(Debug)]
struct Engine {
    first_queue: u32,
    upper: [Fences; 4],
    lower: Fences,
}

/// Registers of one card.
#[derive(Debug)]
pub(crate) struct Registers {
    cfg_base: u64,
    message_bases: [u64; 4],
    layout: Layout,
    /// Offset of the first sync object → sync manager.
    managers: BTreeMap<u64, SyncManager>,
    /// Offset of the first fence register → engine.
    engines: BTreeMap<u64, Engine>,
    /// Queue / 4 is not enough: ids have holes.
    by_queue: BTreeMap<u32, u64>,
}

/// What a register write sets off.
#[derive(Debug, Default)]
pub(crate) struct WriteEffects {
    pub(crate) effects: Vec<Effect>,
    /// Queues whose fence counters changed.
    pub(crate) kicked: Vec<u32>,
}

/// The fence registers: for each of four fences five words, one per stream and one for the lower
/// command processor.
const FENCE_WORDS: u64 = 5;
const FENCES_LEN: u64 = 4 * FENCE_WORDS * 4;
/// Counters saturate, as hardware's few bits do.
const FENCE_MAX: u32 = 0xff;

/// (offset of the first fence register, first queue) of every engine.
fn engines(generation: Generation) -> Vec<(u64, u32)> {
    let mut list = Vec::new();
    match generation {
        Generation::Gaudi1 => {
            for n in 0..8u32 {
                let queue = if n < 2 { 4 * n } else { 9 + 4 * (n - 2) };
                list.push((0x50_8308 + u64::from(n) * 0x2_0000, queue));
                list.push((0xe0_8308 + u64::from(n) * 0x4_0000, 41 + 4 * n));
            }
            list.extend([(0x16_8308, 33), (0x6_8308, 37)]);
        }
        Generation::Gaudi2 | Generation::Gaudi3 => {
            list.extend([(0x4c8_a290, 0), (0x4c9_a290, 4)]);
            for (dcore, first) in [8u32, 48, 84, 120].into_iter().enumerate() {
                let base = dcore as u64 * 0x20_0000;
                list.push((0x41c_a290 + base, first));
                list.push((0x41d_a290 + base, first + 4));
                list.push((0x40c_a290 + base, first + 8));
                let tpcs = if dcore == 0 { 7 } else { 6 };
                for n in 0..tpcs {
                    list.push((0x400_a290 + base + u64::from(n) * 0x1_0000, first + 12 + 4 * n));
                }
            }
        }
    }
    list
}

/// Offsets of the first sync object of every sync manager.
fn managers(generation: Generation) -> [u64; 4] {
    match generation {
        Generation::Gaudi1 => [0x49_2000, 0x4b_2000, 0x4d_2000, 0x4f_2000],
        Generation::Gaudi2 | Generation::Gaudi3 => [0x410_0000, 0x430_0000, 0x450_0000, 0x470_0000],
    }
}

impl Registers {
    pub(crate) fn new(profile: &Profile) -> Self {
        let generation = profile.generation;
        let layout = Layout::of(generation);
        let bases = managers(generation);
        let cfg = profile.cfg.first;
        let message_bases = match generation {
            Generation::Gaudi1 => [0x4f_4000, 0x4f_2000, 0x49_4000, 0x49_2000],
            Generation::Gaudi2 | Generation::Gaudi3 => [0x410_8000, 0x410_0000, 0x410_8000, 0],
        };
        let list = engines(generation);
        let engine = |first_queue| Engine { first_queue, upper: [[0; 4]; 4], lower: [0; 4] };
        Self {
            cfg_base: cfg,
            message_bases: message_bases.map(|offset| cfg + offset),
            layout,
            managers: bases.map(|base| (base, SyncManager::new(layout))).into(),
            engines: list.iter().map(|(base, first)| (*base, engine(*first))).collect(),
            by_queue: list.iter().map(|(base, first)| (*first, *base)).collect(),
        }
    }

    /// Address behind a base of short messages.
    pub(crate) fn message_base(&self, base: u8) -> u64 {
        self.message_bases[usize::from(base & 3)]
    }

    /// Writes the register at an address of the configuration space.
    pub(crate) fn write(&mut self, addr: u64, value: u32, then: &mut WriteEffects) {
        let offset = addr.wrapping_sub(self.cfg_base);
        if let Some((base, manager)) = self.managers.range_mut(..=offset).next_back()
            && offset - base < self.layout.len()
        {
            manager.write(offset - base, value, &mut then.effects);
        } else if let Some((base, engine)) = self.engines.range_mut(..=offset).next_back()
            && offset - base < FENCES_LEN
        {
            let word = (offset - base) / 4;
            let (fence, which) = ((word / FENCE_WORDS) as usize, (word % FENCE_WORDS) as usize);
            match engine.upper.get_mut(which) {
                Some(fences) => {
                    raise(&mut fences[fence], value);
                    then.kicked.push(engine.first_queue + which as u32);
                }
                None => {
                    raise(&mut engine.lower[fence], value);
                    then.kicked.extend(engine.first_queue..engine.first_queue + 4);
                }
            }
        }
    }

    fn fence(&mut self, queue: u32, lower: bool, id: u8) -> Option<&mut u32> {
        let (first, base) = self.by_queue.range(..=queue).next_back()?;
        let engine = self.engines.get_mut(base)?;
        let fences = if lower {
            &mut engine.lower
        } else {
            engine.upper.get_mut((queue - first) as usize)?
        };
        fences.get_mut(usize::from(id))
    }

    /// Passes a queue's fence if the counter allows it.
    pub(crate) fn pass_fence(
        &mut self,
        queue: u32,
        lower: bool,
        id: u8,
        target: u8,
        decrement: u8,
    ) -> bool {
        match self.fence(queue, lower, id) {
            Some(counter) if *counter >= u32::from(target) => {
                *counter = counter.saturating_sub(u32::from(decrement));
                true
            }
            _ => false,
        }
    }

    /// Adds to a queue's own fence counter.
    pub(crate) fn raise_fence(&mut self, queue: u32, lower: bool, id: u8, by: u8) {
        if let Some(counter) = self.fence(queue, lower, id) {
            raise(counter, u32::from(by));
        }
    }
}

fn raise(counter: &mut u32, by: u32) {
    *counter = counter.saturating_add(by & FENCE_MAX).min(FENCE_MAX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync_manager::Writer;

    #[test]
    fn every_user_queue_has_fences_of_its_own() {
        for (generation, queues) in [(Generation::Gaudi1, 0..73u32), (Generation::Gaudi2, 0..156)] {
            let profile = generation.profile();
            for queue in queues {
                if crate::parser::queue_kind(profile, queue, true).is_none() {
                    continue;
                }
                let mut registers = Registers::new(profile);
                registers.raise_fence(queue, false, 2, 1);
                for other in 0..profile.queues {
                    let passes = registers.pass_fence(other, false, 2, 1, 1);
                    assert_eq!(passes, other == queue, "{queue} {other}");
                }
            }
        }
    }

    #[test]
    fn fence_registers_are_those_of_the_specification() {
        let written = |generation: Generation, offset: u64| {
            let mut registers = Registers::new(generation.profile());
            let mut then = WriteEffects::default();
            registers.write(generation.profile().cfg.first + offset, 1, &mut then);
            then.kicked
        };
        assert_eq!(written(Generation::Gaudi2, 0x4c8_a290), [0]);
        assert_eq!(written(Generation::Gaudi2, 0x4c9_a290), [4]);
        assert_eq!(written(Generation::Gaudi2, 0x4c8_a2a4 + 4), [1]);
        assert_eq!(written(Generation::Gaudi2, 0x41c_a2a0), [8, 9, 10, 11]);
        assert_eq!(written(Generation::Gaudi1, 0x50_8308 + 4), [1]);
        assert_eq!(written(Generation::Gaudi1, 0x54_8308), [9]);
        assert_eq!(written(Generation::Gaudi1, 0x50_8300), []);
    }

    #[test]
    fn a_monitor_of_the_right_base_reaches_the_sync_manager() {
        let profile = Generation::Gaudi2.profile();
        let mut registers = Registers::new(profile);
        let mut then = WriteEffects::default();
        let monitors = registers.message_base(0);
        registers.write(monitors, 0x77, &mut then);
        registers.write(monitors + 0x4000, 5, &mut then);
        registers.write(monitors + 0x6000, 0xfe << 8 | 1 << 16 | 1 << 17, &mut then);
        assert!(then.effects.is_empty());
        registers.write(registers.message_base(1), 1, &mut then);
        let by = Writer::Monitor(0);
        assert_eq!(then.effects, [Effect::Write { addr: 0x77, value: 5, by }]);
    }
}
