//! What a device's hardware is doing: submissions in flight, their budget, and who is told of their
//! end.
//!
//! Any thread may find that a submission has ended: the one whose transfer it is, one that needs
//! room, or the [waiter](super::waiter) for those who sleep. Whoever does cleans up after it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hl_thunk::Direction;
use hl_thunk::packet::LinDma;

use super::budget::{InFlight, Room};
use super::flight::{Flight, Load, Moves};
use super::waiter::Waiter;
use crate::Error;
use crate::backend::{Backend, CopyLimits, Ticket};
use crate::process::Notifier;
use crate::stats::{Counter, Counts, Tally};

/// How long one look at a submission may sleep in the driver when we have nothing else to do.
const PATIENCE_US: u32 = 1_000_000;
/// How long the waiter sleeps for one lane while others may end as well.
const SHARED_PATIENCE_US: u32 = 1_000;

/// What ends in the order it was submitted. While the oldest in flight runs, so do those behind it,
/// and the driver need not be asked about them.
#[derive(Debug, Default)]
struct Lane {
    /// Number of the oldest submission in flight.
    head: AtomicU64,
    /// How often the oldest was looked at and still ran.
    looks: AtomicU64,
}

/// The submissions of one device.
#[derive(Debug)]
pub(crate) struct Engine {
    backend: Arc<dyn Backend>,
    limits: Result<CopyLimits, Error>,
    in_flight: Mutex<InFlight<Arc<Flight>>>,
    lanes: Box<[Lane]>,
    lost: AtomicBool,
    counts: Counts,
    waiter: Waiter,
}

impl Engine {
    pub(crate) fn new(backend: Arc<dyn Backend>, counts: Counts) -> Arc<Self> {
        let limits = backend.copy_limits();
        let lanes = limits.as_ref().map_or(0, |limits| limits.lanes);
        Arc::new(Self {
            backend,
            limits,
            in_flight: Mutex::default(),
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            lost: AtomicBool::new(false),
            counts,
            waiter: Waiter::default(),
        })
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
    pub(crate) fn limits(&self) -> Result<&CopyLimits, &Error> {
        self.limits.as_ref()
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlight<Arc<Flight>>> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn free_slots(&self) -> u32 {
        self.in_flight().free_slots()
    }

    /// Room for one submission, or `None` if the device has as much as it can take.
    pub(crate) fn reserve(&self) -> Option<Reservation<'_>> {
        let budget = self.limits.as_ref().ok()?.in_flight;
        let reserve = || self.in_flight().reserve(budget);
        let room = reserve().or_else(|| {
            self.reap();
            reserve()
        })?;
        Some(Reservation { engine: self, room, used: None })
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

    fn lane(&self, ticket: Ticket) -> Option<&Lane> {
        self.lanes.get(ticket.lane as usize)
    }

    /// Whether older submissions in the same lane are on record.
    fn is_behind(&self, flight: &Flight) -> bool {
        let lane = self.lane(flight.ticket);
        lane.is_some_and(|lane| lane.head.load(Ordering::Acquire) < flight.ticket.sequence)
    }

    /// How often the oldest of a lane was looked at in vain.
    fn looks(&self, ticket: Ticket) -> u64 {
        self.lane(ticket).map_or(0, |lane| lane.looks.load(Ordering::Relaxed))
    }

    /// Takes in what has ended of the older ones in the same lane: nobody else may look at them,
    /// their owners being elsewhere or gone. Whether there are none left.
    ///
    /// Where many are looked at in turn, one look at the oldest does for all of them.
    fn overtake(&self, flight: &Flight) -> bool {
        while self.is_behind(flight) {
            if flight.was_preceded(self.looks(flight.ticket)) {
                return false;
            }
            let head = self.in_flight().head_of(flight.ticket.lane);
            // One that has ended already is about to be taken off the record by another thread.
            let Some(head) = head.filter(|head| head.outcome().is_none()) else { return false };
            if head.ticket.sequence < flight.ticket.sequence && self.look(&head, 0).is_none() {
                flight.was_preceded(self.looks(flight.ticket));
                return false;
            }
        }
        true
    }

    /// Looks at a submission, sleeping in the driver up to `timeout_us` if it is not done.
    pub(crate) fn settle<'f>(
        &self,
        flight: &'f Flight,
        timeout_us: u32,
    ) -> Option<&'f Result<(), Error>> {
        if flight.outcome().is_none() && timeout_us == 0 && !self.overtake(flight) {
            return None;
        }
        self.look(flight, timeout_us)
    }

    /// Asks the driver about a submission, whatever there is in front of it.
    fn look<'f>(&self, flight: &'f Flight, timeout_us: u32) -> Option<&'f Result<(), Error>> {
        if let Some(outcome) = flight.outcome() {
            return Some(outcome);
        }
        let ended = match self.backend.wait(flight.ticket, timeout_us) {
            Ok(false) => {
                if let Some(lane) = self.lane(flight.ticket).filter(|_| !self.is_behind(flight)) {
                    lane.looks.fetch_add(1, Ordering::Relaxed);
                }
                return None;
            }
            Ok(true) => Ok(()),
            Err(error) => Err(self.note(error)),
        };
        // Else another thread looked at the same time.
        if let Some(holds) = flight.land(ended.clone()) {
            self.counts.ended(&ended, flight.tally());
            let someone_sleeps = self.finish(flight.ticket);
            // Unpinning is a driver call; no lock is held.
            drop(holds);
            if someone_sleeps {
                self.waiter.notify();
            }
        }
        flight.outcome()
    }

    /// Takes a submission off the record; whether someone sleeps until it has ended.
    fn finish(&self, ticket: Ticket) -> bool {
        let mut in_flight = self.in_flight();
        let head = in_flight.finish(ticket.sequence);
        // Under the lock, so that the last word is the newest.
        self.set_head(ticket, head);
        self.waiter.has_notifiers()
    }

    fn set_head(&self, ticket: Ticket, head: Option<u64>) {
        if let Some(lane) = self.lane(ticket) {
            // With nothing in flight the next number of the lane is not known, but is larger.
            lane.head.store(head.unwrap_or(u64::MAX), Ordering::Release);
        }
    }

    /// Waits for a submission.
    pub(crate) fn wait(&self, flight: &Flight) -> Result<(), Error> {
        loop {
            if let Some(outcome) = self.settle(flight, PATIENCE_US) {
                return outcome.clone();
            }
        }
    }

    /// # Safety
    /// As for [`Backend::submit`].
    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error> {
        // SAFETY: the caller's promise.
        match unsafe { self.backend.submit(direction, slot, moves) } {
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

    /// Takes in whatever has ended; how much is still in flight.
    pub(crate) fn reap(&self) -> usize {
        loop {
            let heads = self.in_flight().heads();
            // What is behind one that has ended may have ended, too.
            let ended = heads.iter().filter(|head| self.settle(head, 0).is_some()).count();
            if ended == 0 {
                return self.in_flight().len();
            }
        }
    }

    /// Waits until the oldest submission is done.
    pub(crate) fn wait_for_oldest(&self) {
        let oldest = self.in_flight().oldest();
        match oldest {
            // Whoever started it learns how it ended.
            Some(flight) => {
                self.settle(&flight, PATIENCE_US);
            }
            // Other threads are submitting, or wait for one move each.
            None => std::thread::yield_now(),
        }
    }

    /// Waits until nothing on record touches `range`. What [`Reservation::run`] does is not on
    /// record, nor is what another thread is just submitting: callers of copies must not free what
    /// they copy.
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

    /// Notifies when the next submission ends. `false`, and no notification will come, if nothing
    /// is in flight: whatever has ended can be seen now.
    pub(crate) fn notify_on_completion(self: &Arc<Self>, notifier: &Arc<Notifier>) -> bool {
        if self.in_flight().is_empty() {
            return false;
        }
        // Looked at again afterwards: what ends from there on notifies.
        let will_notify = self.waiter.add(self, notifier) && !self.in_flight().is_empty();
        if !will_notify {
            self.waiter.remove(notifier);
        }
        will_notify
    }

    pub(super) fn waiter(&self) -> &Waiter {
        &self.waiter
    }

    /// The waiter's work: sleeps until something has ended. `false` if nothing is in flight.
    pub(crate) fn sleep_until_something_ends(&self) -> bool {
        let heads = self.in_flight().heads();
        let Some(oldest) = heads.first() else { return false };
        if heads.len() == 1 {
            self.settle(oldest, PATIENCE_US);
        } else if !heads.iter().any(|head| self.settle(head, 0).is_some()) {
            // The driver waits for one submission at a time, and another lane may be quicker.
            self.settle(oldest, SHARED_PATIENCE_US);
        }
        true
    }

    /// Ends the waiter's thread, if there is one. Nothing must be in flight any more.
    pub(crate) fn stop(&self) {
        self.waiter.stop();
    }
}

/// The right to make one submission.
pub(crate) struct Reservation<'a> {
    engine: &'a Engine,
    room: Room,
    /// The number it was used for, without being on record.
    used: Option<u64>,
}

impl Reservation<'_> {
    /// A number below [`SLOTS`](super::budget::SLOTS) that no other reservation or submission has.
    pub(crate) fn slot(&self) -> u32 {
        self.room.slot
    }

    /// One move to or from a bounce buffer, waited for. What would otherwise keep count of it, and
    /// keep what it needs, is the caller: the reservation stands for it until it is dropped.
    ///
    /// # Safety
    /// Everything the move names must stay valid until this returns.
    pub(crate) unsafe fn run(
        &mut self,
        direction: Direction,
        dma: LinDma,
        bytes: u64,
    ) -> Result<(), Error> {
        let engine = self.engine;
        // SAFETY: the caller's promise.
        let ticket = unsafe { engine.submit(direction, self.room.slot, &[dma])? };
        self.used = Some(ticket.sequence);
        let ended = loop {
            match engine.backend.wait(ticket, PATIENCE_US) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(engine.note(error)),
            }
        };
        engine.counts.bounced(&ended, direction, bytes);
        ended
    }

    /// Submits.
    ///
    /// # Safety
    /// `load` must keep everything the moves name, except the caller's own memory, for which the
    /// caller answers until the flight is done.
    pub(crate) unsafe fn launch(
        self,
        direction: Direction,
        moves: Moves,
        load: Load,
        tally: Tally,
    ) -> Result<Arc<Flight>, Error> {
        // SAFETY: the caller's promise.
        let ticket = unsafe { self.engine.submit(direction, self.room.slot, &moves)? };
        let looks = self.engine.looks(ticket);
        let flight = Arc::new(Flight::new(ticket, moves, tally, load, looks));
        let record = Arc::clone(&flight);
        let mut in_flight = self.engine.in_flight();
        let head = in_flight.start(self.room, ticket.sequence, ticket.lane, record);
        self.engine.set_head(ticket, Some(head));
        drop(in_flight);
        // The record has its room now.
        std::mem::forget(self);
        Ok(flight)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.engine.in_flight();
        in_flight.release(self.room, self.used);
        let someone_sleeps = self.used.is_some() && self.engine.waiter.has_notifiers();
        drop(in_flight);
        // For want of room, it may be.
        if someone_sleeps {
            self.engine.waiter.notify();
        }
    }
}
