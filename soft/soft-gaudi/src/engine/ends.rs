//! How submissions end, and how threads wait for it.
//!
//! With a timing model or with jitter, an end is reported later than the work was done. Such ends are queued in
//! `Context::ends`. Threads that wait or submit, and workers that check timeouts, report those that are due.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{INLINE_BYTES, realtime_ns};
use crate::context::Context;
use crate::state::Word;
use crate::submission::{Lookup, Outcome, Submission};

/// If the next end is due sooner than this, a waiting thread yields instead of sleeping.
const SHORT: Duration = Duration::from_micros(60);
/// How long a thread sleeps when it does not know when the next end is reported.
const NAP: Duration = Duration::from_millis(1);
/// Bytes that a waiter may move per microsecond of its timeout; about the speed of a copy.
const BYTES_PER_US: u64 = 4096;

/// How a wait ended.
#[derive(Clone, Debug)]
pub(crate) enum Waited {
    /// It ended at this time (ns of the realtime clock).
    Ended { outcome: Outcome, at_ns: u64 },
    /// It ended so long ago that its outcome and time are forgotten.
    Gone,
    /// It did not end within the timeout.
    Busy,
}

impl Context {
    /// Waits for a submission; `None` waits for ever.
    pub(crate) fn wait(
        self: &Arc<Self>,
        seq: u64,
        timeout: Option<Duration>,
    ) -> Result<Waited, Errno> {
        let submission = match self.window.find(seq)? {
            Lookup::Known(submission) => submission,
            Lookup::Gone => return Ok(Waited::Gone),
        };
        let deadline = timeout.map(|timeout| (timeout, Instant::now()));
        loop {
            let next = self.report_ends();
            if let Some(outcome) = submission.outcome() {
                return Ok(Waited::Ended { outcome, at_ns: submission.finished_ns() });
            }
            let left = match deadline {
                None => Duration::MAX,
                Some((timeout, since)) => match timeout.checked_sub(since.elapsed()) {
                    Some(left) if !left.is_zero() => left,
                    _ => {
                        // If all processors poll, a worker gets one only after milliseconds, and so does a thread that
                        // has yielded. So a poll does a little of the work itself, and yields only if a thread is
                        // running one of the queues.
                        self.run_queues_of(&submission, INLINE_BYTES);
                        let is_running = |queue: &u32| self.queues[*queue as usize].is_running();
                        if submission.queues.iter().any(is_running) {
                            std::thread::yield_now();
                        }
                        self.check_timeout();
                        return Ok(Waited::Busy);
                    }
                },
            };
            let budget = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
            self.run_queues_of(&submission, budget.saturating_mul(BYTES_PER_US));
            match next {
                // A timer would fire later than that.
                Some(next) if next < SHORT => std::thread::yield_now(),
                _ if submission.outcome().is_some() => {}
                _ => {
                    submission.sleep(left.min(self.nap(next)));
                    self.check_timeout();
                }
            }
        }
    }

    /// Waits until one of several submissions has ended; returns which have ended (bits), and when the first did.
    pub(crate) fn wait_any(
        self: &Arc<Self>,
        seqs: &[u64],
        timeout: Option<Duration>,
    ) -> Result<(u32, u64), Errno> {
        let found: Vec<Lookup> =
            seqs.iter().map(|seq| self.window.find(*seq)).collect::<Result<_, _>>()?;
        let until = timeout.map(|timeout| Instant::now() + timeout);
        self.any_waiters.fetch_add(1, Ordering::SeqCst);
        let ended = |lookup: &Lookup| match lookup {
            Lookup::Gone => Some(0),
            Lookup::Known(submission) => submission.outcome().map(|_| submission.finished_ns()),
        };
        // Which have ended, and the earliest known time.
        let so_far = || {
            let times = found.iter().enumerate().filter_map(|(n, at)| Some((n, ended(at)?)));
            times.fold((0, 0), |(set, first), (n, at)| {
                let first = if first == 0 || (at != 0 && at < first) { at } else { first };
                (set | 1 << n, first)
            })
        };
        let result = loop {
            let next = self.report_ends();
            let now = Instant::now();
            let ended = so_far();
            if ended.0 != 0 || until.is_some_and(|until| now >= until) {
                break ended;
            }
            for lookup in &found {
                if let Lookup::Known(submission) = lookup {
                    self.run_queues_of(submission, u64::MAX);
                }
            }
            // `end` takes this lock before it notifies. So either this check sees the end, or this thread is already asleep.
            let guard = self.any_ended.0.lock().unwrap_or_else(|p| p.into_inner());
            if so_far().0 == 0 {
                let left =
                    until.map_or(Duration::MAX, |until| until.saturating_duration_since(now));
                drop(self.any_ended.1.wait_timeout(guard, left.min(self.nap(next))));
                self.check_timeout();
            }
        };
        self.any_waiters.fetch_sub(1, Ordering::SeqCst);
        Ok(result)
    }

    /// Reports the ends that are due; returns the time until the next.
    pub(crate) fn report_ends(&self) -> Option<Duration> {
        if self.timing.is_instant() {
            return None;
        }
        loop {
            let due = {
                let mut ends = self.lock_ends();
                let first = ends.first_entry()?;
                let (at, now) = (first.key().0, self.timing.now());
                if at > now {
                    return Some(Duration::from_nanos(at - now));
                }
                first.remove()
            };
            self.end(&due, Outcome::Completed);
        }
    }

    /// How long a waiting thread may sleep, if the next end is reported after `next`.
    pub(super) fn nap(&self, next: Option<Duration>) -> Duration {
        let limit = self.until_timeout();
        match next {
            _ if self.timing.is_instant() => limit,
            Some(next) => next.min(limit),
            None => NAP.min(limit),
        }
    }

    fn lock_ends(&self) -> MutexGuard<'_, BTreeMap<(u64, u64), Arc<Submission>>> {
        self.ends.lock().unwrap_or_else(|p| p.into_inner())
    }

    /// One job of a submission is done, or an announced stage will not come.
    pub(crate) fn job_done(&self, submission: &Arc<Submission>) {
        self.job_done_at(submission, 0);
    }

    pub(super) fn job_done_at(&self, submission: &Arc<Submission>, at: u64) {
        let Some(done) = submission.job_done(at) else { return };
        if self.timing.is_instant() {
            return self.end(submission, Outcome::Completed);
        }
        let at = self.timing.report_at(done);
        self.lock_ends().insert((at, submission.seq), submission.clone());
        // Wake the waiters so that they learn the new time. A thread about to sleep may miss this: hence the limit in `nap`.
        submission.wake();
    }

    pub(super) fn end(&self, submission: &Submission, outcome: Outcome) {
        if !submission.claim() {
            return;
        }
        // Update the counters first: a thread that sees the end may ask whether the card is idle.
        self.last_end.store(self.epoch.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if self.in_flight.fetch_sub(1, Ordering::SeqCst) == 1
            && self.has_busy_fd.swap(false, Ordering::SeqCst)
        {
            let mut busy_fd = self.busy_fd.lock().unwrap_or_else(|p| p.into_inner());
            if self.in_flight.load(Ordering::Acquire) == 0 && busy_fd.take().is_some() {
                self.state.set(Word::Busy, 0);
            }
        }
        if submission.spares_card {
            // Logged whenever it ends, also in time: "Command submission N completed after … (s)".
            self.node.log_kernel_error(self.device, "ended", 0);
        }
        submission.publish(outcome, realtime_ns());
        self.window.submission_ended();
        self.count_down_delayed();
        if self.any_waiters.load(Ordering::SeqCst) > 0 {
            drop(self.any_ended.0.lock().unwrap_or_else(|p| p.into_inner()));
            self.any_ended.1.notify_all();
        }
    }

    /// One submission has ended: counts down those whose end is delayed by a fault rule.
    fn count_down_delayed(&self) {
        if !self.node.config.faults {
            return;
        }
        let mut due = Vec::new();
        {
            let mut delayed = self.delayed.lock().unwrap_or_else(|p| p.into_inner());
            delayed.iter_mut().for_each(|(_, others)| *others = others.saturating_sub(1));
            delayed.retain(|(submission, others)| {
                if *others == 0 {
                    due.push(submission.clone());
                }
                *others != 0
            });
        }
        due.iter().for_each(|submission| self.job_done(submission));
    }
}
