//! The submissions of a device: permits, the record of what is in flight, completion.
//!
//! Any thread may find that a submission has ended: the owner of the transfer, a thread that needs a
//! permit, or the [waiter](super::waiter). Whichever does completes it (see [`submission`](super::submission)).
//!
//! Submissions of one lane (a hardware queue) end in order. So only the oldest of each lane is polled. The
//! driver may report the ends in another order: nothing is taken for ended that was not reported itself.

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

/// How long one wait for a submission may sleep in the driver.
const WAIT_US: u32 = 1_000_000;
/// The same for whom the end of any submission will do, on a card with several lanes: the driver waits for one
/// submission at a time, and one on another lane, perhaps submitted meanwhile, may end first. So long is the delay of
/// those who sleep for that; a thread that wakes so often while copies run costs next to nothing.
const SHARED_WAIT_US: u32 = 1_000;

/// What is known of a lane without a lock.
#[derive(Debug, Default)]
struct Lane {
    /// Number of the oldest submission in flight.
    head: AtomicU64,
    /// How often the oldest was polled and still ran.
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

    /// Which memory other devices may write to.
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

    /// Remembers an error that means the hardware is gone. If the driver says so too, peers lose its memory.
    pub(crate) fn note_loss(&self, error: Error) -> Error {
        if error.is_device_lost() {
            self.lose();
            if !self.backend.is_operational() {
                (self.on_lost)(self.device);
            }
        }
        error
    }

    /// What a submission may be, or why there can be none.
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

    /// A permit for one submission, waiting for it if need be. Only for devices that can copy.
    pub(crate) fn wait_for_permit(&self) -> SubmitPermit<'_> {
        let limit = self.limits.as_ref().map_or(0, |limits| limits.in_flight);
        loop {
            // A statement of its own: the lock is not held in the wait.
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
        // oldest while an older one was not completed yet, and be polled for nothing.
        let lane = self.lane(submission.ticket);
        lane.is_some_and(|lane| lane.head.load(Ordering::Acquire) < submission.ticket.sequence)
    }

    /// How often the oldest of a lane was polled in vain.
    fn polls(&self, ticket: Ticket) -> u64 {
        self.lane(ticket).map_or(0, |lane| lane.polls.load(Ordering::Relaxed))
    }

    /// Polls the older submissions of the same lane: their owners may never do so. Whether none is
    /// left. Where the owners of many poll in turn, one poll of the oldest serves all of them.
    fn poll_older(&self, submission: &Submission) -> bool {
        while self.has_older(submission) {
            if submission.lane_was_polled(self.polls(submission.ticket)) {
                return false;
            }
            let head = self.in_flight().head_of(submission.ticket.lane);
            // One that has ended is about to be removed by another thread.
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

    /// How a submission ended, if it has; sleeps in the driver up to `timeout_us` for it.
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

    /// The same, whatever is in front of it.
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
        // Otherwise another thread asked at the same time.
        if let Some(guards) = submission.complete(ended.clone()) {
            self.counts.ended(&ended, submission.tally());
            probes::copy_end(self.id(), submission.ticket.sequence, ended.is_ok());
            let someone_sleeps = self.remove(submission.ticket);
            // Unpinning is a driver call; no lock is held.
            drop(guards);
            if someone_sleeps {
                self.waiter.notify();
            }
        }
        submission.outcome()
    }

    /// Removes a submission from the record; whether someone sleeps until it has ended.
    fn remove(&self, ticket: Ticket) -> bool {
        let mut in_flight = self.in_flight();
        let head = in_flight.remove(ticket.sequence);
        // Under the lock, so that the last store is of the newest head.
        self.set_head(ticket, head);
        self.waiter.has_notifiers()
    }

    fn set_head(&self, ticket: Ticket, head: Option<u64>) {
        if let Some(lane) = self.lane(ticket) {
            // The next number of an empty lane is not known, but is larger.
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

    /// Stands for the open card in probes.
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

    /// Completes what has ended; how many submissions are still in flight.
    pub(crate) fn reap(&self) -> usize {
        loop {
            let heads = self.in_flight().heads();
            // What is behind one that has ended may have ended, too.
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
            // Its owner learns how it ended.
            Some(submission) => {
                self.poll(&submission, self.any_wait_us());
            }
            // Other threads are submitting, or run short copies, which are not recorded.
            None => std::thread::yield_now(),
        }
    }

    /// Waits until no recorded submission touches `range`. Short copies ([`SubmitPermit::run`]) and
    /// submissions that other threads are just making are not recorded: memory must not be freed
    /// while its own copies run.
    pub(crate) fn quiesce(&self, range: &Range<u64>) {
        let mut submissions = self.in_flight().all();
        submissions.retain(|submission| submission.touches(range));
        for submission in submissions {
            let _ = self.wait(&submission);
        }
    }

    /// Waits until nothing is in flight; the first failure among the submissions.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        let submissions = self.in_flight().all();
        submissions.iter().map(|submission| self.wait(submission)).fold(Ok(()), Result::and)
    }

    /// Notifies when the next submission ends. `false`, and no notification will come, if nothing
    /// is in flight: whatever has ended can be seen now.
    pub(crate) fn notify_on_completion(self: &Arc<Self>, notifier: &Arc<Notifier>) -> bool {
        if self.in_flight().is_empty() {
            return false;
        }
        // Checked again afterwards: what ends from then on notifies.
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
    pub(crate) fn wait_for_any(&self) -> bool {
        let heads = self.in_flight().heads();
        let Some(oldest) = heads.first() else { return false };
        if heads.len() == 1 || !heads.iter().any(|head| self.poll(head, 0).is_some()) {
            self.poll(oldest, self.any_wait_us());
        }
        true
    }

    /// How long to sleep for one submission, if the end of any will do.
    fn any_wait_us(&self) -> u32 {
        if self.lanes.len() > 1 { SHARED_WAIT_US } else { WAIT_US }
    }

    /// Ends the waiter's thread, if there is one. Nothing must be in flight any more.
    pub(crate) fn stop(&self) {
        self.waiter.stop();
    }
}

/// The right to make one submission; dropped unused, it is returned.
pub(crate) struct SubmitPermit<'a> {
    engine: &'a Engine,
    permit: Permit,
    /// The sequence number that it was used for by [`SubmitPermit::run`].
    used: Option<u64>,
}

impl SubmitPermit<'_> {
    /// A number below [`SLOTS`](crate::backend::SLOTS) that no other permit or submission has.
    pub(crate) fn slot(&self) -> u32 {
        self.permit.slot
    }

    /// Whether it is for submissions to this engine.
    pub(crate) fn is_of(&self, engine: &Engine) -> bool {
        std::ptr::eq(self.engine, engine)
    }

    /// One move to or from a bounce buffer, waited for. It is not recorded: the caller keeps what it
    /// needs, and the permit stands for it until it is dropped.
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
    /// `resources` must keep everything the moves name, except the caller's own memory, for which the
    /// caller answers until the submission has ended.
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
        // The record has the permit now.
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
        // It may sleep because there was no permit.
        if someone_sleeps {
            self.engine.waiter.notify();
        }
    }
}
