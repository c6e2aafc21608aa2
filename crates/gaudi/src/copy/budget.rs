//! How many submissions may be in flight, and which are.

use std::collections::VecDeque;

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
}

#[derive(Debug)]
struct Running<F> {
    sequence: u64,
    lane: u32,
    flight: F,
}

impl<F> Default for InFlight<F> {
    fn default() -> Self {
        Self { running: VecDeque::new(), pending: Vec::new(), last: 0 }
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

    pub(crate) fn reserve(&mut self, budget: u64) -> Option<u64> {
        // Numbers start at 1; before the first submission `last` is 0.
        let floor = self.last + 1;
        let newest = floor + self.pending.len() as u64;
        let running = self.running.front().map(|running| &running.sequence);
        let oldest = running.into_iter().chain(&self.pending).min();
        if newest - oldest.copied().unwrap_or(newest) >= budget {
            return None;
        }
        self.pending.push(floor);
        Some(floor)
    }

    pub(crate) fn release(&mut self, floor: u64) {
        if let Some(at) = self.pending.iter().position(|&pending| pending == floor) {
            self.pending.swap_remove(at);
        }
    }

    /// Puts a submission on record; the number of the oldest in its lane.
    pub(crate) fn start(&mut self, sequence: u64, lane: u32, flight: F) -> u64 {
        self.last = self.last.max(sequence);
        let at = self.running.partition_point(|other| other.sequence < sequence);
        self.running.insert(at, Running { sequence, lane, flight });
        self.head(lane).unwrap_or(sequence)
    }

    /// Takes a submission off the record; the number of the oldest that is left in its lane.
    pub(crate) fn finish(&mut self, sequence: u64) -> Option<u64> {
        let found = self.running.binary_search_by_key(&sequence, |other| other.sequence);
        let lane = self.running.remove(found.ok()?)?.lane;
        self.head(lane)
    }

    fn head(&self, lane: u32) -> Option<u64> {
        self.in_lane(lane).map(|running| running.sequence)
    }

    fn in_lane(&self, lane: u32) -> Option<&Running<F>> {
        self.running.iter().find(|running| running.lane == lane)
    }

    /// A number was used by a submission that is not on record.
    pub(crate) fn passed(&mut self, sequence: u64) {
        self.last = self.last.max(sequence);
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
        assert_eq!(window.start(1, 0, "a"), 1);
        assert_eq!(window.start(2, 1, "b"), 2);
        assert_eq!(window.start(4, 0, "d"), 1);
        // Two threads may submit in one order and note it in the other.
        assert_eq!(window.start(3, 0, "c"), 1);
        assert_eq!(window.heads(), ["a", "b"]);
        assert_eq!([0, 1, 2].map(|lane| window.head_of(lane)), [Some("a"), Some("b"), None]);
        assert_eq!(window.finish(1), Some(3));
        assert_eq!(window.finish(2), None);
        assert_eq!((window.heads(), window.oldest(), window.len()), (vec!["c"], Some("c"), 2));
    }

    proptest! {
        /// A driver that accepts number n only when n - slots has finished never has to wait.
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
            let mut unrecorded: Vec<(u64, u64)> = Vec::new();
            let mut next = 1;
            for step in steps {
                match step {
                    Step::Reserve => reserved.extend(window.reserve(budget)),
                    Step::Submit(pick) if !reserved.is_empty() => {
                        let floor = reserved.swap_remove(pick % reserved.len());
                        let in_flight = running.iter().chain(unrecorded.iter().map(|(_, seq)| seq));
                        if let Some(&oldest) = in_flight.min() {
                            prop_assert!(next - oldest < budget, "the library would spin");
                        }
                        prop_assert!(next >= floor);
                        window.start(next, 0, ());
                        window.release(floor);
                        running.push(next);
                        next += 1;
                    }
                    Step::SubmitUnrecorded(pick) if !reserved.is_empty() => {
                        let floor = reserved.swap_remove(pick % reserved.len());
                        let in_flight = running.iter().chain(unrecorded.iter().map(|(_, seq)| seq));
                        if let Some(&oldest) = in_flight.min() {
                            prop_assert!(next - oldest < budget, "the library would spin");
                        }
                        unrecorded.push((floor, next));
                        next += 1;
                    }
                    Step::EndUnrecorded(pick) if !unrecorded.is_empty() => {
                        let (floor, seq) = unrecorded.swap_remove(pick % unrecorded.len());
                        window.passed(seq);
                        window.release(floor);
                    }
                    Step::Cancel(pick) if !reserved.is_empty() => {
                        window.release(reserved.swap_remove(pick % reserved.len()));
                    }
                    Step::Finish(pick) if !running.is_empty() => {
                        window.finish(running.swap_remove(pick % running.len()));
                    }
                    Step::Submit(_)
                    | Step::SubmitUnrecorded(_)
                    | Step::EndUnrecorded(_)
                    | Step::Cancel(_)
                    | Step::Finish(_) => {}
                }
            }
            // With everything finished there is room again.
            for floor in reserved {
                window.release(floor);
            }
            for sequence in running {
                window.finish(sequence);
            }
            for (floor, sequence) in unrecorded {
                window.passed(sequence);
                window.release(floor);
            }
            prop_assert!(window.reserve(budget).is_some());
        }
    }
}
