//! How many submissions may be in flight, and which are.
//!
//! Each has a slot besides its number: a place for its packets, and for the bytes of a small copy.

use std::collections::VecDeque;

/// Slots there are; no budget may be larger.
pub(crate) const SLOTS: u32 = u64::BITS;

/// The window of sequence numbers in use. The driver takes a submission only when the one a fixed
/// number before it has finished, and its library spins until then; so what counts is the distance
/// from the oldest unfinished number, not how many are unfinished.
#[derive(Debug)]
pub(crate) struct InFlight<F> {
    /// By sequence number. New ones come at the end, or nearly.
    running: VecDeque<Running<F>>,
    /// Smallest sequence number that each submission being made just now can get.
    pending: Vec<u64>,
    last: u64,
    /// A set bit is a slot that nobody has.
    free: u64,
}

/// Room for one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Smallest sequence number that it can get.
    pub(crate) floor: u64,
    /// Its own until it has ended.
    pub(crate) slot: u32,
}

#[derive(Debug)]
struct Running<F> {
    sequence: u64,
    lane: u32,
    slot: u32,
    flight: F,
}

impl<F> Default for InFlight<F> {
    fn default() -> Self {
        Self { running: VecDeque::new(), pending: Vec::new(), last: 0, free: u64::MAX }
    }
}

impl<F: Clone> InFlight<F> {
    /// All that run, the oldest first.
    pub(crate) fn all(&self) -> Vec<F> {
        self.running.iter().map(|running| running.flight.clone()).collect()
    }

    /// The oldest of each lane, the oldest of all first.
    pub(crate) fn heads(&self) -> Vec<F> {
        let mut lanes = Vec::new();
        let mut heads = Vec::new();
        for running in &self.running {
            if !lanes.contains(&running.lane) {
                lanes.push(running.lane);
                heads.push(running.flight.clone());
            }
        }
        heads
    }

    /// The oldest of one lane.
    pub(crate) fn head_of(&self, lane: u32) -> Option<F> {
        self.in_lane(lane).map(|running| running.flight.clone())
    }

    /// The oldest of all.
    pub(crate) fn oldest(&self) -> Option<F> {
        self.running.front().map(|running| running.flight.clone())
    }
}

impl<F> InFlight<F> {
    /// Whether nothing is on record.
    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// How many are on record.
    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    /// Slots that nobody has.
    #[cfg(test)]
    pub(crate) fn free_slots(&self) -> u32 {
        self.free.count_ones()
    }

    /// Room for a submission, if there is any; it must end in [`InFlight::start`] or
    /// [`InFlight::release`].
    pub(crate) fn reserve(&mut self, budget: u64) -> Option<Room> {
        debug_assert!(budget <= SLOTS.into());
        // Numbers start at 1; before the first submission `last` is 0.
        let floor = self.last + 1;
        let newest = floor + self.pending.len() as u64;
        let running = self.running.front().map(|running| &running.sequence);
        let oldest = running.into_iter().chain(&self.pending).min();
        if newest - oldest.copied().unwrap_or(newest) >= budget || self.free == 0 {
            return None;
        }
        let slot = self.free.trailing_zeros();
        self.free &= self.free - 1;
        self.pending.push(floor);
        Some(Room { floor, slot })
    }

    /// Gives room back: it was not used, or what it was used for has ended without ever being on
    /// record, and had the number `used`.
    pub(crate) fn release(&mut self, room: Room, used: Option<u64>) {
        self.last = self.last.max(used.unwrap_or(0));
        self.give(room.slot);
        self.settle(room);
    }

    fn give(&mut self, slot: u32) {
        debug_assert_eq!(self.free & 1 << slot, 0, "given back twice");
        self.free |= 1 << slot;
    }

    fn settle(&mut self, room: Room) {
        let at = self.pending.iter().position(|&pending| pending == room.floor);
        debug_assert!(at.is_some(), "settled twice");
        if let Some(at) = at {
            self.pending.swap_remove(at);
        }
    }

    /// Puts a submission on record, with the slot of its room; the number of the oldest in its lane.
    pub(crate) fn start(&mut self, room: Room, sequence: u64, lane: u32, flight: F) -> u64 {
        self.last = self.last.max(sequence);
        self.settle(room);
        let at = self.running.partition_point(|other| other.sequence < sequence);
        self.running.insert(at, Running { sequence, lane, slot: room.slot, flight });
        self.head(lane).unwrap_or(sequence)
    }

    /// Takes a submission off the record; the number of the oldest that is left in its lane.
    pub(crate) fn finish(&mut self, sequence: u64) -> Option<u64> {
        let found = self.running.binary_search_by_key(&sequence, |other| other.sequence);
        let Running { lane, slot, .. } = self.running.remove(found.ok()?)?;
        self.give(slot);
        self.head(lane)
    }

    fn head(&self, lane: u32) -> Option<u64> {
        self.in_lane(lane).map(|running| running.sequence)
    }

    fn in_lane(&self, lane: u32) -> Option<&Running<F>> {
        self.running.iter().find(|running| running.lane == lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Reserve,
        Submit(usize),
        /// Submitted, but kept as a reservation until it has ended.
        SubmitUnrecorded(usize),
        EndUnrecorded(usize),
        Cancel(usize),
        Finish(usize),
    }

    #[test]
    fn each_lane_has_its_own_oldest() {
        let mut window = InFlight::<&str>::default();
        let rooms = [(); 4].map(|()| window.reserve(10).unwrap());
        assert_eq!(rooms.map(|room| room.slot), [0, 1, 2, 3]);
        assert_eq!(window.start(rooms[0], 1, 0, "a"), 1);
        assert_eq!(window.start(rooms[1], 2, 1, "b"), 2);
        assert_eq!(window.start(rooms[3], 4, 0, "d"), 1);
        // Two threads may submit in one order and note it in the other.
        assert_eq!(window.start(rooms[2], 3, 0, "c"), 1);
        assert_eq!(window.heads(), ["a", "b"]);
        assert_eq!([0, 1, 2].map(|lane| window.head_of(lane)), [Some("a"), Some("b"), None]);
        assert_eq!(window.finish(1), Some(3));
        assert_eq!(window.finish(2), None);
        assert_eq!((window.heads(), window.oldest(), window.len()), (vec!["c"], Some("c"), 2));
        assert_eq!(window.reserve(10).unwrap().slot, 0, "the first slot is free again");
    }

    proptest! {
        /// A driver that accepts number n only when n - slots has finished never has to wait, and no
        /// slot has two users.
        #[test]
        fn the_driver_never_has_to_spin(
            budget in 1..20_u64,
            steps in prop::collection::vec(prop_oneof![
                4 => Just(Step::Reserve),
                4 => any::<usize>().prop_map(Step::Submit),
                2 => any::<usize>().prop_map(Step::SubmitUnrecorded),
                2 => any::<usize>().prop_map(Step::EndUnrecorded),
                1 => any::<usize>().prop_map(Step::Cancel),
                3 => any::<usize>().prop_map(Step::Finish),
            ], 1..300)
        ) {
            let mut window = InFlight::<()>::default();
            let mut reserved = Vec::new();
            let mut running: Vec<u64> = Vec::new();
            let mut unrecorded: Vec<(Room, u64)> = Vec::new();
            let mut taken = std::collections::BTreeMap::<u64, u32>::new();
            let mut next = 1;
            for step in steps {
                match step {
                    Step::Reserve => if let Some(room) = window.reserve(budget) {
                        let others = reserved.iter().map(|room: &Room| room.slot);
                        let others = others.chain(unrecorded.iter().map(|(room, _)| room.slot));
                        let mut others = others.chain(taken.values().copied());
                        prop_assert!(others.all(|slot| slot != room.slot), "someone has it");
                        reserved.push(room);
                    },
                    Step::Submit(pick) if !reserved.is_empty() => {
                        let room = reserved.swap_remove(pick % reserved.len());
                        let in_flight = running.iter().chain(unrecorded.iter().map(|(_, seq)| seq));
                        if let Some(&oldest) = in_flight.min() {
                            prop_assert!(next - oldest < budget, "the library would spin");
                        }
                        prop_assert!(next >= room.floor);
                        window.start(room, next, 0, ());
                        taken.insert(next, room.slot);
                        running.push(next);
                        next += 1;
                    }
                    Step::SubmitUnrecorded(pick) if !reserved.is_empty() => {
                        let room = reserved.swap_remove(pick % reserved.len());
                        let in_flight = running.iter().chain(unrecorded.iter().map(|(_, seq)| seq));
                        if let Some(&oldest) = in_flight.min() {
                            prop_assert!(next - oldest < budget, "the library would spin");
                        }
                        unrecorded.push((room, next));
                        next += 1;
                    }
                    Step::EndUnrecorded(pick) if !unrecorded.is_empty() => {
                        let (room, seq) = unrecorded.swap_remove(pick % unrecorded.len());
                        window.release(room, Some(seq));
                    }
                    Step::Cancel(pick) if !reserved.is_empty() => {
                        window.release(reserved.swap_remove(pick % reserved.len()), None);
                    }
                    Step::Finish(pick) if !running.is_empty() => {
                        let sequence = running.swap_remove(pick % running.len());
                        window.finish(sequence);
                        taken.remove(&sequence);
                    }
                    Step::Submit(_)
                    | Step::SubmitUnrecorded(_)
                    | Step::EndUnrecorded(_)
                    | Step::Cancel(_)
                    | Step::Finish(_) => {}
                }
            }
            // With everything finished there is room again.
            for room in reserved {
                window.release(room, None);
            }
            for sequence in running {
                window.finish(sequence);
            }
            for (room, sequence) in unrecorded {
                window.release(room, Some(sequence));
            }
            prop_assert_eq!(window.free_slots(), SLOTS);
            prop_assert!(window.reserve(budget).is_some());
        }
    }
}
