//! Signals between queues, as the driver manages them: every stream has a pair of sync objects of
//! its own, a signal adds one, a wait blocks another queue until the value is reached.
//! Ranges of values can be reserved for programs that signal by themselves.
//!
//! When an object has reached its largest value, the stream switches to the other of the pair, if that one is
//! not in use any more; otherwise the driver refuses.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::io::Errno;

use crate::asic::{Generation, Profile};
use crate::submission::Submission;

/// How far a sync object counts.
const MAX_VALUE: u32 = 0x7fff;
/// The fence that driver-made waits use.
const FENCE: u32 = 2;

/// A sync object; it is not set back to zero while references to it exist.
#[derive(Debug)]
pub(crate) struct Sob {
    index: u32,
}

/// A value of a sync object.
#[derive(Clone, Debug)]
pub(crate) struct SobValue {
    pub(crate) sob: Arc<Sob>,
    pub(crate) value: u32,
}

#[derive(Debug)]
struct Stream {
    sobs: [Arc<Sob>; 2],
    current: usize,
    /// Values allocated of the current object.
    allocated: u32,
}

#[derive(Debug)]
struct Reservation {
    queue: u32,
    before: u32,
    count: u32,
    sob: Arc<Sob>,
    /// The submission that makes the signals, once there is one.
    submission: Option<Arc<Submission>>,
}

/// Values of a sync object for a signal or a reservation.
#[derive(Clone, Debug)]
pub(crate) struct Allocated {
    pub(crate) target: SobValue,
    /// The object's value before.
    pub(crate) before: u32,
    /// The object must be set to zero first: it is reused.
    pub(crate) fresh: bool,
}

/// Signals of one context.
#[derive(Debug)]
pub(crate) struct Signals {
    profile: &'static Profile,
    streams: HashMap<u32, Stream>,
    reservations: HashMap<u32, Reservation>,
    next_id: u32,
}

/// Position of a queue among those that can signal.
fn stream_number(generation: Generation, queue: u32) -> Option<u32> {
    match (generation, queue) {
        (Generation::Gaudi1, 0..=7) => Some(queue),
        (Generation::Gaudi2, 0 | 1) => Some(queue),
        (Generation::Gaudi2, 4) => Some(2),
        _ => None,
    }
}

impl Signals {
    pub(crate) fn new(profile: &'static Profile) -> Self {
        Self { profile, streams: HashMap::new(), reservations: HashMap::new(), next_id: 1 }
    }

    /// Offset in configuration space of the first driver-owned sync object.
    fn first_sob(&self) -> u64 {
        match self.profile.generation {
            Generation::Gaudi1 => 0x49_2000,
            _ => 0x410_0000,
        }
    }

    /// Offset in configuration space of a sync object.
    pub(crate) fn offset(&self, sob: &Sob) -> u64 {
        self.first_sob() + u64::from(sob.index) * 4
    }

    /// Address of a sync object.
    pub(crate) fn address(&self, sob: &Sob) -> u64 {
        self.profile.cfg.first + self.offset(sob)
    }

    /// The next `count` values of a queue's stream.
    pub(crate) fn allocate(&mut self, queue: u32, count: u32) -> Result<Allocated, Errno> {
        self.forget_finished();
        let number = stream_number(self.profile.generation, queue).ok_or(Errno::INVAL)?;
        if count == 0 || count > MAX_VALUE {
            return Err(Errno::INVAL);
        }
        let sob = |which| Arc::new(Sob { index: 2 * number + which });
        let stream = self.streams.entry(queue).or_insert_with(|| Stream {
            sobs: [sob(0), sob(1)],
            current: 0,
            allocated: 0,
        });
        let mut fresh = false;
        if stream.allocated + count > MAX_VALUE {
            let other = 1 - stream.current;
            if Arc::strong_count(&stream.sobs[other]) > 1 {
                return Err(Errno::INVAL);
            }
            stream.current = other;
            stream.allocated = 0;
            fresh = true;
        }
        let before = stream.allocated;
        stream.allocated += count;
        let target = SobValue { sob: stream.sobs[stream.current].clone(), value: stream.allocated };
        Ok(Allocated { target, before, fresh })
    }

    /// Reserves values: an id.
    pub(crate) fn reserve(&mut self, queue: u32, count: u32) -> Result<(u32, Allocated), Errno> {
        let allocated = self.allocate(queue, count)?;
        let id = self.next_id;
        self.next_id += 1;
        let sob = allocated.target.sob.clone();
        let before = allocated.before;
        let reservation = Reservation { queue, before, count, sob, submission: None };
        self.reservations.insert(id, reservation);
        Ok((id, allocated))
    }

    /// Releases the values of the latest reservation.
    pub(crate) fn unreserve(&mut self, id: u32) -> Result<(), Errno> {
        let reservation = self.reservations.get(&id).ok_or(Errno::INVAL)?;
        let stream = self.streams.get_mut(&reservation.queue).ok_or(Errno::INVAL)?;
        let current = Arc::ptr_eq(&stream.sobs[stream.current], &reservation.sob);
        let latest = stream.allocated == reservation.before + reservation.count;
        if !current || !latest || reservation.submission.is_some() {
            return Err(Errno::INVAL);
        }
        stream.allocated = reservation.before;
        self.reservations.remove(&id);
        Ok(())
    }

    /// Sets the submission that makes the signals of a reservation.
    pub(crate) fn bind(&mut self, id: u32, submission: Arc<Submission>) -> Result<(), Errno> {
        let reservation = self.reservations.get_mut(&id).ok_or(Errno::INVAL)?;
        reservation.submission = Some(submission);
        Ok(())
    }

    /// Whether an id stands for a reservation.
    pub(crate) fn is_reserved(&self, id: u32) -> bool {
        self.reservations.contains_key(&id)
    }

    /// The value that a reservation's submission reaches after `offset` signals.
    pub(crate) fn reserved(&mut self, seq: u64, offset: u32) -> Option<SobValue> {
        self.forget_finished();
        let bound = |r: &&Reservation| r.submission.as_ref().is_some_and(|s| s.seq == seq);
        let reservation = self.reservations.values().find(bound)?;
        Some(SobValue { sob: reservation.sob.clone(), value: reservation.before + offset })
    }

    fn forget_finished(&mut self) {
        self.reservations
            .retain(|_, r| r.submission.as_ref().is_none_or(|s| s.outcome().is_none()));
    }

    /// Packets that give one signal, after everything before them in the queue.
    pub(crate) fn signal_packets(&self, target: &SobValue) -> Vec<u8> {
        const ADD_ONE: u32 = 1 << 31 | 1;
        self.short(self.sob_base(), self.sob_offset(target), ADD_ONE, true)
    }

    /// Packets that let `queue` wait for a value.
    pub(crate) fn wait_packets(&self, queue: u32, target: &SobValue) -> Result<Vec<u8>, Errno> {
        let generation = self.profile.generation;
        let monitor = stream_number(generation, queue).ok_or(Errno::INVAL)? * 4;
        let fence = self.fence_address(queue);
        let base = self.monitor_base();
        // Payload address low and high, data, arm: as far apart as the generation's registers.
        let [low, high, data, arm] = match generation {
            Generation::Gaudi1 => [0, 0x800, 0x1000, 0x1800],
            _ => [0, 0x2000, 0x4000, 0x6000],
        };
        let group = target.sob.index / 8;
        let mask = !(1u32 << (target.sob.index % 8)) & 0xff;
        let mut packets = self.short(base, low + monitor, fence as u32, false);
        packets.extend(self.short(base, high + monitor, (fence >> 32) as u32, false));
        packets.extend(self.short(base, data + monitor, 1, false));
        packets.extend(self.short(
            base,
            arm + monitor,
            group | mask << 8 | target.value << 17,
            true,
        ));
        packets.extend_from_slice(&(FENCE << 30 | 1 << 16 | 1).to_le_bytes());
        packets.extend_from_slice(&0x8800_0000u32.to_le_bytes());
        Ok(packets)
    }

    fn sob_base(&self) -> u32 {
        if self.profile.generation == Generation::Gaudi1 { 3 } else { 1 }
    }

    fn monitor_base(&self) -> u32 {
        if self.profile.generation == Generation::Gaudi1 { 2 } else { 0 }
    }

    fn sob_offset(&self, target: &SobValue) -> u32 {
        target.sob.index * 4
    }

    fn fence_address(&self, queue: u32) -> u64 {
        let (first, engine, stream) = match self.profile.generation {
            Generation::Gaudi1 => (0x50_8308, u64::from(queue / 4) * 0x2_0000, queue % 4),
            _ => (0x4c8_a290, u64::from(queue / 4) * 0x1_0000, queue % 4),
        };
        self.profile.cfg.first + first + engine + u64::from(FENCE) * 20 + u64::from(stream) * 4
    }

    fn short(&self, base: u32, offset: u32, value: u32, barrier: bool) -> Vec<u8> {
        let barriers = if barrier { 0xa000_0000 } else { 0x8000_0000 };
        let ctl = barriers | 0x0400_0000 | base << 22 | offset;
        [value.to_le_bytes(), ctl.to_le_bytes()].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signals() -> Signals {
        Signals::new(Generation::Gaudi1.profile())
    }

    #[test]
    fn values_rise_and_switch_to_the_other_object_when_it_is_free() {
        let mut signals = signals();
        let first = signals.allocate(3, 1).unwrap();
        assert_eq!((first.before, first.target.value, first.fresh), (0, 1, false));
        assert_eq!(signals.address(&first.target.sob), 0x7f_fc00_0000 + 0x49_2000 + 6 * 4);
        let all = signals.allocate(3, MAX_VALUE - 1).unwrap();
        assert_eq!(all.target.value, MAX_VALUE);
        let turned = signals.allocate(3, 1).unwrap();
        assert!(turned.fresh && turned.target.value == 1);
        assert_ne!(turned.target.sob.index, all.target.sob.index);
        // `all` still has a reference to the first object.
        assert_eq!(signals.allocate(3, MAX_VALUE).unwrap_err(), Errno::INVAL);
        drop((first, all));
        assert!(signals.allocate(3, MAX_VALUE).unwrap().fresh);
        assert_eq!(signals.allocate(9, 1).unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn only_the_latest_reservation_can_be_released() {
        let mut signals = signals();
        let (one, _) = signals.reserve(0, 10).unwrap();
        let (two, allocated) = signals.reserve(0, 5).unwrap();
        assert_eq!((allocated.before, allocated.target.value), (10, 15));
        assert_eq!(signals.unreserve(one), Err(Errno::INVAL));
        assert_eq!(signals.unreserve(two), Ok(()));
        assert_eq!(signals.unreserve(one), Ok(()));
        assert_eq!(signals.unreserve(one), Err(Errno::INVAL));
        assert_eq!(signals.allocate(0, 1).unwrap().before, 0);
    }
}
