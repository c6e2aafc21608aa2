//! What a device's hardware is doing: submissions in flight, their budget, and everything they need
//! until they are done.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hl_thunk::Direction;
use hl_thunk::packet::LinDma;

use crate::backend::{Backend, CopyLimits, Ticket};
use crate::stats::{Counter, Counts, Tally};
use crate::{DeviceAddr, Error};

/// How long one look at a submission may sleep in the driver when we have nothing else to do.
const PATIENCE_US: u32 = 1_000_000;

/// Something that must live until the hardware is done: a pin, a bounce slot.
pub(crate) type Hold = Arc<dyn Any + Send + Sync>;

/// One submission.
pub(crate) struct Flight {
    ticket: Ticket,
    moves: Vec<LinDma>,
    tally: Tally,
    state: Mutex<State>,
}

struct State {
    outcome: Option<Result<(), Error>>,
    holds: Vec<Hold>,
}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

impl Flight {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the device reads or writes an address of `range`.
    fn touches(&self, range: &Range<u64>) -> bool {
        let overlaps = |start: DeviceAddr, len: u32| {
            start.0 < range.end && range.start < start.0.saturating_add(u64::from(len))
        };
        self.moves.iter().any(|dma| match *dma {
            LinDma::Copy { src, dst, len } => overlaps(src, len) || overlaps(dst, len),
            LinDma::Fill { dst, len, .. } => overlaps(dst, len),
        })
    }
}

/// The submissions of one device.
#[derive(Debug)]
pub(crate) struct Engine {
    backend: Arc<dyn Backend>,
    limits: Result<CopyLimits, Error>,
    in_flight: Mutex<InFlight<Arc<Flight>>>,
    lost: AtomicBool,
    counts: Counts,
}

impl Engine {
    pub(crate) fn new(backend: Arc<dyn Backend>, counts: Counts) -> Self {
        let limits = backend.copy_limits();
        let lost = AtomicBool::new(false);
        Self { backend, limits, in_flight: Mutex::default(), lost, counts }
    }

    /// Whether the hardware was lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Takes note of an error that means the hardware is gone.
    fn note(&self, error: Error) -> Error {
        if error.is_device_lost() {
            self.lost.store(true, Ordering::Relaxed);
        }
        error
    }

    /// What a submission may be, or why there can be none.
    pub(crate) fn limits(&self) -> Result<CopyLimits, Error> {
        self.limits.clone()
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlight<Arc<Flight>>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for one submission, or `None` if the device has as much as it can take.
    pub(crate) fn reserve(&self) -> Option<Reservation<'_>> {
        let budget = self.limits.as_ref().ok()?.in_flight;
        let reserve = || self.in_flight().reserve(budget);
        let floor = reserve().or_else(|| {
            self.reap();
            reserve()
        })?;
        Some(Reservation { engine: self, floor })
    }

    /// Room for one submission, waiting for it if need be. Only for devices that can copy.
    pub(crate) fn make_room(&self) -> Reservation<'_> {
        loop {
            match self.reserve() {
                Some(reservation) => return reservation,
                None => self.wait_for_oldest(),
            }
        }
    }

    /// Looks at a submission, sleeping in the driver up to `timeout_us` if it is not done.
    pub(crate) fn settle(&self, flight: &Flight, timeout_us: u32) -> Option<Result<(), Error>> {
        if let Some(outcome) = &flight.state().outcome {
            return Some(outcome.clone());
        }
        let outcome = match self.backend.wait(flight.ticket, timeout_us) {
            Ok(false) => return None,
            Ok(true) => Ok(()),
            Err(error) => Err(self.note(error)),
        };
        let holds = {
            let mut state = flight.state();
            if let Some(outcome) = &state.outcome {
                // Another thread looked at the same time.
                return Some(outcome.clone());
            }
            state.outcome = Some(outcome.clone());
            std::mem::take(&mut state.holds)
        };
        self.counts.ended(&outcome, &flight.tally);
        self.backend.retire(flight.ticket);
        self.in_flight().finish(flight.ticket.sequence);
        // Unpinning is a driver call; no lock is held.
        drop(holds);
        Some(outcome)
    }

    /// Waits for a submission.
    pub(crate) fn wait(&self, flight: &Flight) -> Result<(), Error> {
        loop {
            if let Some(outcome) = self.settle(flight, PATIENCE_US) {
                return outcome;
            }
        }
    }

    /// One move, waited for. What would otherwise keep count of it, and keep what it needs, is this
    /// call: the reservation stands for it until it has ended.
    ///
    /// # Safety
    /// Everything the move names must stay valid until this returns.
    pub(crate) unsafe fn run(
        &self,
        direction: Direction,
        dma: LinDma,
        tally: Tally,
    ) -> Result<(), Error> {
        let _reservation = self.make_room();
        // SAFETY: the caller's promise.
        let ticket = unsafe { self.submit(direction, &[dma])? };
        let ended = loop {
            match self.backend.wait(ticket, PATIENCE_US) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(self.note(error)),
            }
        };
        self.counts.ended(&ended, &tally);
        self.backend.retire(ticket);
        self.in_flight().passed(ticket.sequence);
        ended
    }

    /// # Safety
    /// As for [`Backend::submit`].
    unsafe fn submit(&self, direction: Direction, moves: &[LinDma]) -> Result<Ticket, Error> {
        // SAFETY: the caller's promise.
        match unsafe { self.backend.submit(direction, moves) } {
            Ok(ticket) => {
                self.counts.submitted();
                Ok(ticket)
            }
            Err(error) => {
                self.counts.add(Counter::DmaErrors, 1);
                Err(self.note(error))
            }
        }
    }

    /// Looks at everything in flight once; how much there still is.
    pub(crate) fn reap(&self) -> usize {
        let flights = self.in_flight().all();
        let running = flights.iter().filter(|flight| self.settle(flight, 0).is_none());
        running.count()
    }

    /// Waits until the oldest submission is done.
    pub(crate) fn wait_for_oldest(&self) {
        let oldest = self.in_flight().running.front().map(|(_, flight)| Arc::clone(flight));
        match oldest {
            // Whoever started it learns how it ended.
            Some(flight) => drop(self.settle(&flight, PATIENCE_US)),
            // Other threads are submitting, or wait for one move each.
            None => std::thread::yield_now(),
        }
    }

    /// Waits until nothing in flight touches `range`.
    pub(crate) fn quiesce(&self, range: &Range<u64>) {
        let mut flights = self.in_flight().all();
        flights.retain(|flight| flight.touches(range));
        for flight in flights {
            let _ = self.wait(&flight);
        }
    }

    /// Waits until nothing is in flight; the first failure among them.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        let flights = self.in_flight().all();
        flights.iter().map(|flight| self.wait(flight)).fold(Ok(()), Result::and)
    }
}

/// The right to make one submission.
pub(crate) struct Reservation<'a> {
    engine: &'a Engine,
    floor: u64,
}

impl Reservation<'_> {
    /// Submits.
    ///
    /// # Safety
    /// `holds` must keep everything the moves name, except the caller's own memory, for which the
    /// caller answers until the flight is done.
    pub(crate) unsafe fn launch(
        self,
        direction: Direction,
        moves: Vec<LinDma>,
        holds: Vec<Hold>,
        tally: Tally,
    ) -> Result<Arc<Flight>, Error> {
        // SAFETY: the caller's promise.
        let ticket = unsafe { self.engine.submit(direction, &moves)? };
        let state = Mutex::new(State { outcome: None, holds });
        let flight = Arc::new(Flight { ticket, moves, tally, state });
        self.engine.in_flight().start(ticket.sequence, Arc::clone(&flight));
        // The reservation ends here, after the submission is on record.
        drop(self);
        Ok(flight)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.engine.in_flight().release(self.floor);
    }
}

/// The window of sequence numbers in use. The driver takes a submission only when the one a fixed
/// number before it has finished, and its library spins until then; so what counts is the distance
/// from the oldest unfinished number, not how many are unfinished.
#[derive(Debug)]
struct InFlight<F> {
    /// By sequence number. New ones come at the end, or nearly.
    running: VecDeque<(u64, F)>,
    /// Smallest sequence number that each submission being made just now can get.
    pending: Vec<u64>,
    last: u64,
}

impl<F> Default for InFlight<F> {
    fn default() -> Self {
        Self { running: VecDeque::new(), pending: Vec::new(), last: 0 }
    }
}

impl<F: Clone> InFlight<F> {
    fn all(&self) -> Vec<F> {
        self.running.iter().map(|(_, flight)| flight.clone()).collect()
    }
}

impl<F> InFlight<F> {
    fn reserve(&mut self, budget: u64) -> Option<u64> {
        // Numbers start at 1; before the first submission `last` is 0.
        let floor = self.last + 1;
        let newest = floor + self.pending.len() as u64;
        let running = self.running.front().map(|(sequence, _)| sequence);
        let oldest = running.into_iter().chain(&self.pending).min();
        if newest - oldest.copied().unwrap_or(newest) >= budget {
            return None;
        }
        self.pending.push(floor);
        Some(floor)
    }

    fn release(&mut self, floor: u64) {
        if let Some(at) = self.pending.iter().position(|&pending| pending == floor) {
            self.pending.swap_remove(at);
        }
    }

    fn start(&mut self, sequence: u64, flight: F) {
        self.last = self.last.max(sequence);
        let at = self.running.partition_point(|(other, _)| *other < sequence);
        self.running.insert(at, (sequence, flight));
    }

    fn finish(&mut self, sequence: u64) {
        if let Ok(at) = self.running.binary_search_by_key(&sequence, |(other, _)| *other) {
            self.running.remove(at);
        }
    }

    /// A number was used by a submission that is not on record.
    fn passed(&mut self, sequence: u64) {
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
                        window.start(next, ());
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
