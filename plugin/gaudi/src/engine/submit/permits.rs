//! Permits to submit, and the submissions in flight.
//!
//! A permit has a slot number that no other permit or submission has at the time. It selects the memory
//! for the packets, and for the bytes of a short copy.

use std::collections::VecDeque;

use crate::backend::SLOTS;

/// The window of sequence numbers in use. The driver accepts a submission only when the one a fixed number before it
/// has finished, and its library spins until then; `limit` is below that number. So permits are limited by the distance
/// from the oldest unfinished number, not by how many are unfinished.
#[derive(Debug)]
pub(crate) struct InFlight<F> {
    /// In the order of sequence numbers. New ones are inserted at or near the end.
    running: VecDeque<Running<F>>,
    /// For each permit in use, the smallest sequence number that its submission can get.
    pending: Vec<u64>,
    /// The largest sequence number so far.
    last: u64,
    /// A set bit is a free slot.
    free: u64,
}

/// The right to make one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permit {
    /// The smallest sequence number that it can get.
    pub(crate) floor: u64,
    /// Reserved for it until the submission has ended.
    pub(crate) slot: u32,
}

#[derive(Debug)]
struct Running<F> {
    sequence: u64,
    lane: u32,
    slot: u32,
    item: F,
}

impl<F> Default for InFlight<F> {
    fn default() -> Self {
        Self { running: VecDeque::new(), pending: Vec::new(), last: 0, free: u64::MAX }
    }
}

impl<F: Clone> InFlight<F> {
    /// All submissions, the oldest first.
    pub(crate) fn all(&self) -> Vec<F> {
        self.running.iter().map(|running| running.item.clone()).collect()
    }

    /// The oldest of each lane, the oldest of all first.
    pub(crate) fn heads(&self) -> Vec<F> {
        let mut lanes = Vec::new();
        let mut heads = Vec::new();
        for running in &self.running {
            if !lanes.contains(&running.lane) {
                lanes.push(running.lane);
                heads.push(running.item.clone());
            }
        }
        heads
    }

    /// The oldest of one lane.
    pub(crate) fn head_of(&self, lane: u32) -> Option<F> {
        self.in_lane(lane).map(|running| running.item.clone())
    }

    /// The oldest of all.
    pub(crate) fn oldest(&self) -> Option<F> {
        self.running.front().map(|running| running.item.clone())
    }
}

impl<F> InFlight<F> {
    /// Whether no submission is recorded.
    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// How many submissions are recorded.
    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    /// How many slots are free.
    #[cfg(test)]
    pub(crate) fn free_slots(&self) -> u32 {
        self.free.count_ones()
    }

    /// A permit, unless its submission could be `limit` or more numbers ahead of the oldest unfinished one.
    /// The caller must pass it to [`InFlight::record`] or [`InFlight::release`].
    pub(crate) fn try_permit(&mut self, limit: u64) -> Option<Permit> {
        debug_assert!(limit <= SLOTS.into());
        // Numbers start at 1; before the first submission `last` is 0.
        let floor = self.last + 1;
        let newest = floor + self.pending.len() as u64;
        let running = self.running.front().map(|running| &running.sequence);
        let oldest = running.into_iter().chain(&self.pending).min();
        if newest - oldest.copied().unwrap_or(newest) >= limit || self.free == 0 {
            return None;
        }
        let slot = self.free.trailing_zeros();
        self.free &= self.free - 1;
        self.pending.push(floor);
        Some(Permit { floor, slot })
    }

    /// Returns a permit that was not used, or whose submission, with the number `used`, has ended and was not
    /// recorded.
    pub(crate) fn release(&mut self, permit: Permit, used: Option<u64>) {
        self.last = self.last.max(used.unwrap_or(0));
        self.free_slot(permit.slot);
        self.remove_pending(permit);
    }

    fn free_slot(&mut self, slot: u32) {
        debug_assert_eq!(self.free & 1 << slot, 0, "slot {slot} freed twice");
        self.free |= 1 << slot;
    }

    fn remove_pending(&mut self, permit: Permit) {
        let at = self.pending.iter().position(|&pending| pending == permit.floor);
        debug_assert!(at.is_some(), "permit returned twice");
        if let Some(at) = at {
            self.pending.swap_remove(at);
        }
    }

    /// Records a submission, which owns the permit's slot from now on. Returns the number of the oldest in
    /// its lane.
    pub(crate) fn record(&mut self, permit: Permit, sequence: u64, lane: u32, item: F) -> u64 {
        self.last = self.last.max(sequence);
        self.remove_pending(permit);
        let at = self.running.partition_point(|other| other.sequence < sequence);
        self.running.insert(at, Running { sequence, lane, slot: permit.slot, item });
        self.head(lane).unwrap_or(sequence)
    }

    /// Removes a submission that has ended; returns the number of the oldest that is left in its lane.
    pub(crate) fn remove(&mut self, sequence: u64) -> Option<u64> {
        let found = self.running.binary_search_by_key(&sequence, |other| other.sequence);
        let Running { lane, slot, .. } = self.running.remove(found.ok()?)?;
        self.free_slot(slot);
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
        Acquire,
        Submit(usize),
        /// Submitted, but not recorded: the permit counts as in flight until it has ended.
        SubmitUnrecorded(usize),
        EndUnrecorded(usize),
        Cancel(usize),
        Finish(usize),
    }

    #[test]
    fn each_lane_has_its_own_oldest() {
        let mut window = InFlight::<&str>::default();
        let permits = [(); 4].map(|()| window.try_permit(10).unwrap());
        assert_eq!(permits.map(|permit| permit.slot), [0, 1, 2, 3]);
        assert_eq!(window.record(permits[0], 1, 0, "a"), 1);
        assert_eq!(window.record(permits[1], 2, 1, "b"), 2);
        assert_eq!(window.record(permits[3], 4, 0, "d"), 1);
        // Two threads may submit in one order and record in the other.
        assert_eq!(window.record(permits[2], 3, 0, "c"), 1);
        assert_eq!(window.heads(), ["a", "b"]);
        assert_eq!([0, 1, 2].map(|lane| window.head_of(lane)), [Some("a"), Some("b"), None]);
        assert_eq!(window.remove(1), Some(3));
        assert_eq!(window.remove(2), None);
        assert_eq!((window.heads(), window.oldest(), window.len()), (vec!["c"], Some("c"), 2));
        assert_eq!(window.try_permit(10).unwrap().slot, 0, "the first slot is free again");
    }

    proptest! {
        /// A driver that accepts number n only when n - slots has finished never has to wait, and no
        /// slot has two users.
        #[test]
        fn a_permitted_submission_never_makes_the_driver_spin(
            limit in 1..20_u64,
            steps in prop::collection::vec(prop_oneof![
                4 => Just(Step::Acquire),
                4 => any::<usize>().prop_map(Step::Submit),
                2 => any::<usize>().prop_map(Step::SubmitUnrecorded),
                2 => any::<usize>().prop_map(Step::EndUnrecorded),
                1 => any::<usize>().prop_map(Step::Cancel),
                3 => any::<usize>().prop_map(Step::Finish),
            ], 1..300)
        ) {
            let mut window = InFlight::<()>::default();
            let mut permits_held = Vec::new();
            let mut running: Vec<u64> = Vec::new();
            let mut unrecorded: Vec<(Permit, u64)> = Vec::new();
            let mut taken = std::collections::BTreeMap::<u64, u32>::new();
            let mut next = 1;
            for step in steps {
                match step {
                    Step::Acquire => if let Some(permit) = window.try_permit(limit) {
                        let others = permits_held.iter().map(|permit: &Permit| permit.slot);
                        let others = others.chain(unrecorded.iter().map(|(permit, _)| permit.slot));
                        let mut others = others.chain(taken.values().copied());
                        prop_assert!(others.all(|slot| slot != permit.slot), "someone has it");
                        permits_held.push(permit);
                    },
                    Step::Submit(pick) if !permits_held.is_empty() => {
                        let permit = permits_held.swap_remove(pick % permits_held.len());
                        let in_flight = running.iter().chain(unrecorded.iter().map(|(_, seq)| seq));
                        if let Some(&oldest) = in_flight.min() {
                            prop_assert!(next - oldest < limit, "the library would spin");
                        }
                        prop_assert!(next >= permit.floor);
                        window.record(permit, next, 0, ());
                        taken.insert(next, permit.slot);
                        running.push(next);
                        next += 1;
                    }
                    Step::SubmitUnrecorded(pick) if !permits_held.is_empty() => {
                        let permit = permits_held.swap_remove(pick % permits_held.len());
                        let in_flight = running.iter().chain(unrecorded.iter().map(|(_, seq)| seq));
                        if let Some(&oldest) = in_flight.min() {
                            prop_assert!(next - oldest < limit, "the library would spin");
                        }
                        unrecorded.push((permit, next));
                        next += 1;
                    }
                    Step::EndUnrecorded(pick) if !unrecorded.is_empty() => {
                        let (permit, seq) = unrecorded.swap_remove(pick % unrecorded.len());
                        window.release(permit, Some(seq));
                    }
                    Step::Cancel(pick) if !permits_held.is_empty() => {
                        window.release(permits_held.swap_remove(pick % permits_held.len()), None);
                    }
                    Step::Finish(pick) if !running.is_empty() => {
                        let sequence = running.swap_remove(pick % running.len());
                        window.remove(sequence);
                        taken.remove(&sequence);
                    }
                    Step::Submit(_)
                    | Step::SubmitUnrecorded(_)
                    | Step::EndUnrecorded(_)
                    | Step::Cancel(_)
                    | Step::Finish(_) => {}
                }
            }
            // When everything has finished, all permits are free again.
            for permit in permits_held {
                window.release(permit, None);
            }
            for sequence in running {
                window.remove(sequence);
            }
            for (permit, sequence) in unrecorded {
                window.release(permit, Some(sequence));
            }
            prop_assert_eq!(window.free_slots(), SLOTS);
            prop_assert!(window.try_permit(limit).is_some());
        }
    }
}
