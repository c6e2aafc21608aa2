//! The submissions of a device: permits, the record of what is in flight, completion.
//!
//! Any thread may find that a submission has ended: the owner of the transfer, a thread that needs a
//! permit, or the [waiter](super::waiter). That thread completes it (see [`submission`](super::submission)).
//!
//! Submissions of one lane (a hardware queue) end in order, so only the oldest of each lane is polled. The
//! driver may report the ends in another order: a submission has ended only when the driver reported that one.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hl_thunk::Direction;
use hl_thunk::packet::LinDma;

use super::peer_writes::PeerWrites;
use super::permits::{InFlight, Permit};
use super::submission::{Moves, Resources, Submission};
use super::waiter::Waiter;
use crate::backend::{Backend, CopyLimits, Ticket};
use crate::options::Configuration;
use crate::process::Notifier;
use crate::stats::{Counter, Counts, Tally};
use crate::{DeviceId, Error, probes};

/// The longest sleep of one driver call that waits for a submission.
const WAIT_US: u32 = 1_000_000;
/// The same for a thread that waits for any submission to end, on a card with several lanes. The driver waits for one
/// submission at a time, and one on another lane, perhaps submitted meanwhile, may end first. This constant bounds how
/// late that is noticed. A thread that wakes at this rate while copies run costs next to nothing.
const SHARED_WAIT_US: u32 = 1_000;

/// The state of a lane that is read without a lock.
#[derive(Debug, Default)]
struct Lane {
    /// Sequence number of the oldest submission in flight.
    head: AtomicU64,
    /// How often the oldest was polled and was still running.
    polls: AtomicU64,
}

/// The submissions of one device.
#[derive(Debug)]
pub(crate) struct Engine {
    device: DeviceId,
    backend: Arc<dyn Backend>,
    limits: Result<CopyLimits, Error>,
    in_flight: Mutex<InFlight<Arc<Submission>>>,
    lanes: Box<[Lane]>,
    lost: AtomicBool,
    counts: Counts,
    waiter: Waiter,
    peer_writes: PeerWrites,
    on_lost: fn(DeviceId),
}

impl Engine {
    /// `on_lost` is called when the driver says that the hardware is gone.
    pub(crate) fn new(
        device: DeviceId,
        backend: Arc<dyn Backend>,
        counts: Counts,
        options: Arc<Configuration>,
        on_lost: fn(DeviceId),
    ) -> Arc<Self> {
        let limits = backend.copy_limits();
        let lanes = limits.as_ref().map_or(0, |limits| limits.lanes);
        Arc::new(Self {
            device,
            backend,
            limits,
            in_flight: Mutex::default(),
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            lost: AtomicBool::new(false),
            counts,
            waiter: Waiter::default(),
            peer_writes: PeerWrites::new(options),
            on_lost,
        })
    }

    /// The memory that other devices may write to.
    pub(crate) fn peer_writes(&self) -> &PeerWrites {
        &self.peer_writes
    }

    /// Whether the hardware was lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// The hardware is gone.
    pub(crate) fn lose(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Records an error that means the hardware is gone. If the driver confirms it, `on_lost` takes its memory from peers.
    pub(crate) fn note_loss(&self, error: Error) -> Error {
        if error.is_device_lost() {
            self.lose();
            if !self.backend.is_operational() {
                (self.on_lost)(self.device);
            }
        }
        error
    }

    /// The limits of a submission, or why this device cannot copy.
    pub(crate) fn limits(&self) -> Result<&CopyLimits, &Error> {
        self.limits.as_ref()
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlight<Arc<Submission>>> {
        #[cfg(test)]
        crate::engine::effort::lock();
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn free_slots(&self) -> u32 {
        self.in_flight().free_slots()
    }

    /// A permit for one submission, or `None` if the device has as many in flight as it can take.
    pub(crate) fn try_permit(&self) -> Option<SubmitPermit<'_>> {
        let limit = self.limits.as_ref().ok()?.in_flight;
        let try_permit = || self.in_flight().try_permit(limit);
        let permit = try_permit().or_else(|| {
            self.reap();
            try_permit()
        })?;
        Some(SubmitPermit { engine: self, permit, used: None })
    }

    /// A permit for one submission; waits until one is free. Only for devices that can copy.
    pub(crate) fn wait_for_permit(&self) -> SubmitPermit<'_> {
        let limit = self.limits.as_ref().map_or(0, |limits| limits.in_flight);
        loop {
            // A statement of its own, so that the lock is not held during the wait.
            let permit = self.in_flight().try_permit(limit);
            match permit {
                Some(permit) => return SubmitPermit { engine: self, permit, used: None },
                None => self.wait_for_oldest(),
            }
        }
    }

    fn lane(&self, ticket: Ticket) -> Option<&Lane> {
        self.lanes.get(ticket.lane as usize)
    }

    /// Whether older submissions of the same lane are recorded.
    fn has_older(&self, submission: &Submission) -> bool {
        // Acquire: pairs with the store in `set_head`. Without it, a submission could look like the
        // oldest while an older one is not completed yet, and be polled for nothing.
        let lane = self.lane(submission.ticket);
        lane.is_some_and(|lane| lane.head.load(Ordering::Acquire) < submission.ticket.sequence)
    }

    /// How often the oldest submission of a lane was polled and was still running.
    fn polls(&self, ticket: Ticket) -> u64 {
        self.lane(ticket).map_or(0, |lane| lane.polls.load(Ordering::Relaxed))
    }

    /// Polls the older submissions of the same lane, because their owners may never poll. Returns whether none
    /// is left. If many owners poll in turn, one poll of the oldest serves all of them.
    fn poll_older(&self, submission: &Submission) -> bool {
        while self.has_older(submission) {
            if submission.lane_was_polled(self.polls(submission.ticket)) {
                return false;
            }
            let head = self.in_flight().head_of(submission.ticket.lane);
            // If it has an outcome, another thread is about to remove it.
            let Some(head) = head.filter(|head| head.outcome().is_none()) else { return false };
            if head.ticket.sequence < submission.ticket.sequence
                && self.ask_driver(&head, 0).is_none()
            {
                submission.lane_was_polled(self.polls(submission.ticket));
                return false;
            }
        }
        true
    }

    /// The outcome of a submission, if it has ended; sleeps in the driver for up to `timeout_us`.
    pub(crate) fn poll<'s>(
        &self,
        submission: &'s Submission,
        timeout_us: u32,
    ) -> Option<&'s Result<(), Error>> {
        if submission.outcome().is_none() && timeout_us == 0 && !self.poll_older(submission) {
            return None;
        }
        self.ask_driver(submission, timeout_us)
    }

    /// As `poll`, but ignores older submissions of the lane.
    fn ask_driver<'s>(
        &self,
        submission: &'s Submission,
        timeout_us: u32,
    ) -> Option<&'s Result<(), Error>> {
        if let Some(outcome) = submission.outcome() {
            return Some(outcome);
        }
        let ended = match self.backend.wait(submission.ticket, timeout_us) {
            Ok(false) => {
                let lane = self.lane(submission.ticket);
                if let Some(lane) = lane.filter(|_| !self.has_older(submission)) {
                    lane.polls.fetch_add(1, Ordering::Relaxed);
                }
                return None;
            }
            Ok(true) => Ok(()),
            Err(error) => Err(self.note_loss(error)),
        };
        // `None`: another thread polled at the same time and has completed it.
        if let Some(guards) = submission.complete(ended.clone()) {
            self.counts.ended(&ended, submission.tally());
            probes::copy_end(self.id(), submission.ticket.sequence, ended.is_ok());
            let someone_sleeps = self.remove(submission.ticket);
            // Unpinning is a driver call: drop the guards while no lock is held.
            drop(guards);
            if someone_sleeps {
                self.waiter.notify();
            }
        }
        submission.outcome()
    }

    /// Removes a submission from the record. Returns whether a notifier may be waiting.
    fn remove(&self, ticket: Ticket) -> bool {
        let mut in_flight = self.in_flight();
        let head = in_flight.remove(ticket.sequence);
        // Under the lock, so that stores to `head` happen in the order of the changes to the record.
        self.set_head(ticket, head);
        self.waiter.has_notifiers()
    }

    fn set_head(&self, ticket: Ticket, head: Option<u64>) {
        if let Some(lane) = self.lane(ticket) {
            // Empty lane: the next number is not known, but every number that was issued is below this.
            lane.head.store(head.unwrap_or(u64::MAX), Ordering::Release);
        }
    }

    /// Waits for a submission.
    pub(crate) fn wait(&self, submission: &Submission) -> Result<(), Error> {
        loop {
            if let Some(outcome) = self.poll(submission, WAIT_US) {
                return outcome.clone();
            }
        }
    }

    /// Identifies the open card in probes.
    fn id(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// # Safety
    /// As for [`Backend::submit`].
    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error> {
        let flushed = self.peer_writes.flush_for(direction, moves, &*self.backend, self.counts);
        // SAFETY: the caller's promise.
        match flushed.and_then(|()| unsafe { self.backend.submit(direction, slot, moves) }) {
            Ok(ticket) => {
                self.counts.submitted();
                probes::copy_start(self.id(), ticket.sequence, direction, moves);
                Ok(ticket)
            }
            Err(error) => {
                self.counts.add(Counter::DmaErrors, 1);
                Err(self.note_loss(error))
            }
        }
    }

    /// Completes every submission that has ended. Returns how many are still in flight.
    pub(crate) fn reap(&self) -> usize {
        loop {
            let heads = self.in_flight().heads();
            // The submissions behind a head that has ended may have ended, too.
            let ended = heads.iter().filter(|head| self.poll(head, 0).is_some()).count();
            if ended == 0 {
                return self.in_flight().len();
            }
        }
    }

    /// Waits until the oldest submission has ended.
    pub(crate) fn wait_for_oldest(&self) {
        let oldest = self.in_flight().oldest();
        match oldest {
            // The outcome is for its owner; here it is ignored.
            Some(submission) => {
                self.poll(&submission, self.any_wait_us());
            }
            // Other threads are submitting, or run short copies, which are not recorded.
            None => std::thread::yield_now(),
        }
    }

    /// Waits until no recorded submission touches `range`. Short copies ([`SubmitPermit::run`]) and submissions
    /// that other threads are making right now are not recorded, so it does not wait for them: memory must not
    /// be freed while its own copies run.
    pub(crate) fn quiesce(&self, range: &Range<u64>) {
        let mut submissions = self.in_flight().all();
        submissions.retain(|submission| submission.touches(range));
        for submission in submissions {
            let _ = self.wait(&submission);
        }
    }

    /// Waits until nothing is in flight. Returns the first failure among the submissions.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        let submissions = self.in_flight().all();
        submissions.iter().map(|submission| self.wait(submission)).fold(Ok(()), Result::and)
    }

    /// Notifies when the next submission ends. Returns `false`, and will not notify, if nothing is in
    /// flight: the caller can already see every end.
    pub(crate) fn notify_on_completion(self: &Arc<Self>, notifier: &Arc<Notifier>) -> bool {
        if self.in_flight().is_empty() {
            return false;
        }
        // Check again after adding the notifier: every submission that ends from then on notifies.
        let will_notify = self.waiter.add(self, notifier) && !self.in_flight().is_empty();
        if !will_notify {
            self.waiter.remove(notifier);
        }
        will_notify
    }

    pub(super) fn waiter(&self) -> &Waiter {
        &self.waiter
    }

    /// The waiter thread's work: sleeps until a submission ends or the timeout passes. `false` if nothing is in flight.
    pub(crate) fn wait_for_any(&self) -> bool {
        let heads = self.in_flight().heads();
        let Some(oldest) = heads.first() else { return false };
        if heads.len() == 1 || !heads.iter().any(|head| self.poll(head, 0).is_some()) {
            self.poll(oldest, self.any_wait_us());
        }
        true
    }

    /// How long to sleep for one submission when the caller waits for any to end.
    fn any_wait_us(&self) -> u32 {
        if self.lanes.len() > 1 { SHARED_WAIT_US } else { WAIT_US }
    }

    /// Stops the waiter thread, if there is one. Nothing may be in flight any more.
    pub(crate) fn stop(&self) {
        self.waiter.stop();
    }
}

/// The right to make one submission. Dropping it returns the permit.
pub(crate) struct SubmitPermit<'a> {
    engine: &'a Engine,
    permit: Permit,
    /// The sequence number of the submission that [`SubmitPermit::run`] made with it.
    used: Option<u64>,
}

impl SubmitPermit<'_> {
    /// A number below [`SLOTS`](crate::backend::SLOTS) that no other permit or submission has.
    pub(crate) fn slot(&self) -> u32 {
        self.permit.slot
    }

    /// Whether this engine granted it.
    pub(crate) fn is_of(&self, engine: &Engine) -> bool {
        std::ptr::eq(self.engine, engine)
    }

    /// Makes one move to or from a bounce buffer and waits for it. The submission is not recorded: the caller
    /// keeps alive what it uses, and the permit counts as in flight until it is dropped.
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
        let ticket = unsafe { engine.submit(direction, self.permit.slot, &[dma])? };
        self.used = Some(ticket.sequence);
        let ended = loop {
            match engine.backend.wait(ticket, WAIT_US) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(engine.note_loss(error)),
            }
        };
        engine.counts.bounced(&ended, direction, bytes);
        probes::copy_end(engine.id(), ticket.sequence, ended.is_ok());
        ended
    }

    /// Submits, and records the submission.
    ///
    /// # Safety
    /// `resources` must keep valid everything that the moves name, except the caller's own memory: the
    /// caller must keep that valid until the submission has ended.
    pub(crate) unsafe fn submit(
        self,
        direction: Direction,
        moves: Moves,
        resources: Resources,
        tally: Tally,
    ) -> Result<Arc<Submission>, Error> {
        // SAFETY: the caller's promise.
        let ticket = unsafe { self.engine.submit(direction, self.permit.slot, &moves)? };
        let polls = self.engine.polls(ticket);
        let submission = Arc::new(Submission::new(ticket, moves, tally, resources, polls));
        let recorded = Arc::clone(&submission);
        let mut in_flight = self.engine.in_flight();
        let head = in_flight.record(self.permit, ticket.sequence, ticket.lane, recorded);
        self.engine.set_head(ticket, Some(head));
        drop(in_flight);
        // The record owns the permit now.
        std::mem::forget(self);
        Ok(submission)
    }
}

impl Drop for SubmitPermit<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.engine.in_flight();
        in_flight.release(self.permit, self.used);
        let someone_sleeps = self.used.is_some() && self.engine.waiter.has_notifiers();
        drop(in_flight);
        // A sleeper may be waiting for a permit.
        if someone_sleeps {
            self.engine.waiter.notify();
        }
    }
}
