//! How submissions are executed: which thread runs a queue and when, what a fault or a timeout ends.
//!
//! Small work on an idle queue is done by the submitting thread before its call returns (handing it
//! to another thread costs more than the work); everything else goes to the workers, and a thread
//! that waits runs a queue if no other thread does. What a program sees is the same in all
//! cases: each queue in order, queues independent of each other.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::asic::Generation;
use crate::bus::QueueBus;
use crate::context::Context;
use crate::events::bit;
use crate::faults::Action;
use crate::guarded;
use crate::interrupts::Registration;
use crate::processor::{Fault, Pause, Program};
use crate::queue::Job;
use crate::registers::WriteEffects;
use crate::signals::Sob;
use crate::state::{Rejection, Word, clock_ns};
use crate::submission::{Lookup, Outcome, Submission};
use crate::workers;

/// A submission is run by its submitter if it moves no more than this.
pub(crate) const INLINE_BYTES: u64 = 64 << 10;
/// Most bytes a waiting thread moves before it checks timeouts.
const WAITER_BYTES: u64 = 256 << 20;
/// Entries of a queue's ring.
const RING: usize = 4096;
/// Below this a waiting thread yields instead of sleeping.
const SHORT: Duration = Duration::from_micros(60);
/// How long a thread sleeps that does not know when the next end is reported.
const NAP: Duration = Duration::from_millis(1);
/// What a waiter may do per microsecond of its timeout; about the speed of a copy.
const BYTES_PER_US: u64 = 4096;

/// Writes a timestamp where a program has asked for it.
fn store_timestamp(at: usize, now_ns: u64) {
    // Eight bytes are one store. It is lost if the file behind the mapping was truncated.
    // SAFETY: callers pass aligned addresses inside the mapping of command buffers, the source is ours.
    let _ = unsafe { guarded::copy(at as *mut u8, (&raw const now_ns).cast(), 8) };
}

/// How a wait ended.
#[derive(Clone, Debug)]
pub(crate) enum Waited {
    /// It ended, and when (ns of the realtime clock).
    Ended { outcome: Outcome, at_ns: u64 },
    /// So old that only its end is known.
    Gone,
    /// Not within the timeout.
    Busy,
}

pub(crate) fn realtime_ns() -> u64 {
    clock_ns(libc::CLOCK_REALTIME)
}

impl Context {
    /// Puts the programs into their queues as one submission. `fd` keeps the card if work is left.
    pub(crate) fn submit(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        submission: Arc<Submission>,
        programs: Vec<(u32, Program)>,
        sob: Option<Arc<Sob>>,
    ) {
        let mut programs = programs;
        match self.node.fault("submission") {
            None | Some(Action::Flip(_)) => {}
            Some(Action::Hang) => {
                // STOP halts a queue until the card is reset.
                let stop: Arc<[u8]> = [0, 0, 0, 0, 0, 0, 0, 0x0b].into();
                programs.iter_mut().for_each(|(_, p)| *p = Program::Copied(stop.clone()));
            }
            Some(Action::Late(others)) => {
                // One job more than there are: it is done when the others have ended.
                submission.add_jobs(1);
                let mut delayed = self.delayed.lock().unwrap_or_else(|p| p.into_inner());
                delayed.push((submission.clone(), others));
            }
            Some(Action::Slow(time)) => std::thread::sleep(time),
            Some(Action::Fail(_) | Action::Reset) => self.reset(None),
            Some(Action::Remove) => crate::context::remove_all(),
        }
        let mut idle = Vec::new();
        {
            let _entering = self.entering.lock().unwrap_or_else(|p| p.into_inner());
            for (queue, program) in programs {
                let job = Job { submission: submission.clone(), program, sob: sob.clone() };
                if self.queues[queue as usize].push(job) {
                    idle.push(queue);
                }
            }
        }
        // A queue that was not empty is run by a thread, is listed for the workers, or waits at a fence.
        let latency = self.node.config.latency;
        if latency.is_zero() {
            let mut budget = INLINE_BYTES;
            for queue in idle {
                self.run(queue, &mut budget);
            }
            self.run_ready(&mut budget);
        } else {
            for queue in idle {
                workers::enqueue_after(self.clone(), queue, latency);
            }
        }
        if submission.outcome().is_none() {
            self.retain_fd(fd);
            workers::watch(self);
        }
    }

    /// Takes a slot in the window; waits for one, as the library does by retrying.
    pub(crate) fn enter_window(
        self: &Arc<Self>,
        make: impl FnOnce(u64) -> Submission,
    ) -> Result<Arc<Submission>, Errno> {
        let mut make = Some(make);
        loop {
            if self.down.load(Ordering::Acquire) {
                self.state.reject(Rejection::InReset);
                return Err(Errno::BUSY);
            }
            match self.window.enter(&mut make) {
                Ok(submission) => {
                    self.in_flight.fetch_add(1, Ordering::SeqCst);
                    return Ok(submission);
                }
                Err(in_the_way) => {
                    // The driver returns EAGAIN and its library retries; each try is counted.
                    self.state.reject(Rejection::InFlight);
                    self.run_queues_of(&in_the_way, u64::MAX);
                    let next = self.report_ends();
                    if in_the_way.outcome().is_none() {
                        self.window.wait_for_slot(self.nap(next));
                        self.check_timeout();
                    }
                }
            }
        }
    }

    /// Waits until no ring of its queues is full, as the library does by retrying.
    pub(crate) fn wait_for_ring_space(
        self: &Arc<Self>,
        submission: &Submission,
    ) -> Result<(), Errno> {
        let full = |queue: &u32| self.queues[*queue as usize].len() >= RING;
        while submission.queues.iter().any(full) {
            if self.down.load(Ordering::Acquire) {
                return Err(Errno::PERM);
            }
            self.state.reject(Rejection::QueueFull);
            self.run_queues_of(submission, u64::MAX);
            std::thread::sleep(Duration::from_micros(50));
            self.check_timeout();
        }
        Ok(())
    }

    /// A submission that was rejected after it got its number.
    pub(crate) fn reject(&self, submission: &Submission) {
        self.end(submission, Outcome::Completed);
    }

    /// Keeps a copy of the card's descriptor until nothing is in flight.
    fn retain_fd(&self, fd: BorrowedFd<'_>) {
        let mut busy_fd = self.busy_fd.lock().unwrap_or_else(|p| p.into_inner());
        let was_idle = busy_fd.is_none();
        if was_idle {
            *busy_fd = fd.try_clone_to_owned().ok();
        }
        self.has_busy_fd.store(true, Ordering::SeqCst);
        if self.in_flight.load(Ordering::SeqCst) == 0 {
            *busy_fd = None;
        }
        if was_idle == busy_fd.is_some() {
            self.state.set(Word::Busy, busy_fd.is_some().into());
        }
    }

    fn end(&self, submission: &Submission, outcome: Outcome) {
        if !submission.claim() {
            return;
        }
        // Counters first: a thread that sees the end may ask whether the card is idle.
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
            // However it ends, also in time: "Command submission N completed after … (s)".
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

    /// Runs a queue until it has nothing to do, or the budget is spent and the workers take over.
    pub(crate) fn run(self: &Arc<Self>, queue: u32, budget: &mut u64) {
        let target = &self.queues[queue as usize];
        let bus = QueueBus { context: self, queue };
        if self.down.load(Ordering::Acquire) {
            return;
        }
        let Some(mut running) = target.begin() else { return };
        loop {
            let back = match running.processor.run(&bus, budget) {
                Ok(Pause::Done) => {
                    let (job, next) = target.finish(running);
                    if let Some(Job { submission, sob, .. }) = job {
                        // Released before the end is published: then it can be reused.
                        drop(sob);
                        self.job_done_at(&submission, self.timing.queue_done(queue));
                    }
                    next
                }
                Ok(Pause::Blocked) => target.pause(running, true),
                Ok(Pause::Stopped) => target.pause(running, false),
                Ok(Pause::Arbitrate(priority)) => {
                    target.pause(running, false);
                    let mut waiting = self.arbitrating.lock().unwrap_or_else(|p| p.into_inner());
                    waiting.push((priority, queue));
                    None
                }
                Ok(Pause::Spent) => {
                    target.pause(running, false);
                    workers::enqueue(self.clone(), queue);
                    None
                }
                Err(Fault::Fetch { addr }) => {
                    eprintln!(
                        "soft-gaudi: device {} ({}), queue {queue}: an EDMA engine cannot fetch from host memory \
                         ({addr:#x}); the queue hangs until the watchdog resets the device",
                        self.device,
                        crate::asic::bus_id(self.device)
                    );
                    target.pause(running, true)
                }
                Err(fault) => {
                    // First: another thread that took the queue over would go on behind the fault.
                    self.fault(queue, fault);
                    target.pause(running, false);
                    None
                }
            };
            match back {
                Some(again) if !self.down.load(Ordering::Acquire) => running = again,
                Some(last) => {
                    target.pause(last, false);
                    return;
                }
                None => return,
            }
        }
    }

    /// Runs the queues whose fences were passed, then those that the arbiter selects.
    pub(crate) fn run_ready(self: &Arc<Self>, budget: &mut u64) {
        loop {
            let ready = self.ready.lock().unwrap_or_else(|p| p.into_inner()).pop_front();
            match ready.or_else(|| self.arbitrate()) {
                Some(queue) => self.run(queue, budget),
                None => return,
            }
        }
    }

    /// The queue with the highest priority among those that wait for the arbiter.
    fn arbitrate(&self) -> Option<u32> {
        let mut waiting = self.arbitrating.lock().unwrap_or_else(|p| p.into_inner());
        let best = (0..waiting.len()).max_by_key(|n| (waiting[*n].0, core::cmp::Reverse(*n)))?;
        Some(waiting.remove(best).1)
    }

    /// Runs the queues of a submission in the calling thread.
    fn run_queues_of(self: &Arc<Self>, submission: &Submission, budget: u64) {
        if self.down.load(Ordering::Acquire) || !self.node.config.latency.is_zero() {
            return;
        }
        // A program may loop for ever; this thread must come back to check timeouts.
        let mut budget = budget.min(WAITER_BYTES);
        for queue in &submission.queues {
            self.run(*queue, &mut budget);
        }
        self.run_ready(&mut budget);
    }

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
                        // A polling thread must not keep the processor from the workers.
                        std::thread::yield_now();
                        self.check_timeout();
                        return Ok(Waited::Busy);
                    }
                },
            };
            let budget = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
            self.run_queues_of(&submission, budget.saturating_mul(BYTES_PER_US));
            match next {
                // A timer would be late by more than that.
                Some(next) if next < SHORT => std::thread::yield_now(),
                _ if submission.outcome().is_some() => {}
                _ => {
                    submission.sleep(left.min(self.nap(next)));
                    self.check_timeout();
                }
            }
        }
    }

    /// How much longer a submission may take: its time runs while it is the oldest.
    fn time_left(&self, oldest: &Submission) -> Duration {
        let since = oldest
            .submitted
            .max(self.epoch + Duration::from_nanos(self.last_end.load(Ordering::Relaxed)));
        oldest.timeout.saturating_sub(since.elapsed())
    }

    /// How long the oldest submission may still take.
    pub(crate) fn until_timeout(&self) -> Duration {
        const LOOK: Duration = Duration::from_secs(1);
        match self.window.oldest() {
            Some(oldest) if !oldest.is_overdue() => {
                self.time_left(&oldest).max(Duration::from_millis(1))
            }
            _ => LOOK,
        }
    }

    /// Resets the card if its oldest submission has been stuck for too long. One that asked the driver to spare the
    /// card stays in flight instead, and keeps the watchdog from those behind it, as the driver's list does.
    pub(crate) fn check_timeout(&self) {
        self.report_ends();
        let Some(oldest) = self.window.oldest() else { return };
        if !self.time_left(&oldest).is_zero() || self.down.load(Ordering::Acquire) {
            return;
        }
        // Several threads may come here at once.
        if !oldest.set_overdue() {
            return;
        }
        self.node.log_kernel_error(self.device, "timeout", libc::ETIMEDOUT);
        // Only the first timeout of a context is recorded and announced; each is logged.
        let is_first = self.state.record(Word::CsTimeout, realtime_ns(), oldest.seq, 0);
        let timeout = if is_first { bit::CS_TIMEOUT } else { 0 };
        if !oldest.spares_card {
            self.events.raise(timeout | bit::DEVICE_RESET);
            self.reset(Some(&oldest));
        } else if is_first {
            self.events.raise(timeout);
        }
    }

    /// A queue hit an error: the driver resets the card.
    fn fault(&self, queue: u32, fault: Fault) {
        let now = realtime_ns();
        let (what, bits) = match fault {
            Fault::Page { addr } => {
                let known = self.fault_address(addr);
                self.state.record(Word::PageFault, now, known, queue.into());
                let mapped = self.space().translate(addr).is_some();
                let why = if !mapped {
                    ""
                } else if self.node.is_full() {
                    // The card's memory is a sparse file, whose pages take space when they are written.
                    self.node.advise_on_space();
                    ": no space left for the card's memory"
                } else {
                    // The program took its memory away.
                    ", which is mapped: no host memory behind it"
                };
                (format!("page fault at {addr:#x}{why}"), bit::PAGE_FAULT)
            }
            Fault::Razwi { addr, .. } => {
                self.state.record(Word::Razwi, now, addr, queue.into());
                (format!("nobody answers at {addr:#x} (RAZWI)"), bit::RAZWI)
            }
            Fault::Rule { addr } => {
                self.state.record(Word::Razwi, now, addr, queue.into());
                (
                    format!("length or address breaks SOFT_GAUDI_DMA_ALIGNMENT ({addr:#x})"),
                    bit::RAZWI,
                )
            }
            Fault::Opcode | Fault::Fetch { .. } => {
                self.state.record(Word::UndefinedOpcode, now, 0, queue.into());
                ("undefined packet".to_owned(), bit::UNDEFINED_OPCODE)
            }
        };
        self.events.raise(bits | bit::USER_ENGINE_ERROR | bit::DEVICE_RESET);
        eprintln!(
            "soft-gaudi: device {} ({}), queue {queue}: {what}; the device is reset",
            self.device,
            crate::asic::bus_id(self.device)
        );
        self.reset(None);
    }

    /// The part of a faulting address that the MMUs of a Gaudi2 report.
    fn fault_address(&self, addr: u64) -> u64 {
        let lost = match self.profile.generation {
            Generation::Gaudi1 => 0,
            _ if self.profile.dram_va.contains(addr, 1) => (1 << 26) - 1,
            _ => 0xff,
        };
        addr & !lost
    }

    /// Takes the card down: what is in flight ends, nothing new is accepted until it is reopened.
    pub(crate) fn reset(&self, stuck: Option<&Submission>) {
        if !self.down.load(Ordering::Acquire) {
            self.state.reset();
            self.kill_holder_later();
        }
        self.take_down(stuck);
    }

    /// Ends what is in flight, accepts nothing new.
    pub(crate) fn take_down(&self, stuck: Option<&Submission>) {
        if self.down.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(stuck) = stuck {
            self.end(stuck, Outcome::TimedOut);
        }
        for submission in self.window.pending() {
            self.end(&submission, Outcome::Aborted);
        }
        self.window.close();
        self.interrupts.close();
    }

    /// Writes a register on behalf of the driver.
    pub(crate) fn set_register(&self, addr: u64, value: u32) {
        let mut then = WriteEffects::default();
        self.registers.lock().unwrap_or_else(|p| p.into_inner()).write(addr, value, &mut then);
        debug_assert!(then.effects.is_empty());
    }

    /// One job of a submission is done, or a stage that was to come is not coming any more.
    pub(crate) fn job_done(&self, submission: &Arc<Submission>) {
        self.job_done_at(submission, 0);
    }

    fn job_done_at(&self, submission: &Arc<Submission>, at: u64) {
        let Some(done) = submission.job_done(at) else { return };
        if self.timing.is_instant() {
            return self.end(submission, Outcome::Completed);
        }
        let at = self.timing.report_at(done);
        self.lock_ends().insert((at, submission.seq), submission.clone());
        // Whoever waits for it learns when it ends. One who is about to sleep may miss this: see `nap`.
        submission.wake();
    }

    /// How long a thread that waits may sleep, if the next end is reported after that time.
    fn nap(&self, next: Option<Duration>) -> Duration {
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

    /// Reports the ends whose time has come; how long until the next.
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

    /// The card raises an interrupt of the user.
    pub(crate) fn interrupt(&self, id: u32) {
        let now = realtime_ns();
        for due in self.interrupts.raise(id) {
            store_timestamp(due.timestamp_at, now);
        }
    }

    /// Stores a timestamp when a counter reaches its target, at once if it has.
    pub(crate) fn register(&self, interrupt: u32, registration: Registration) {
        if registration.goal.reached() == Ok(true) {
            store_timestamp(registration.timestamp_at, realtime_ns());
        } else {
            self.interrupts.register(interrupt, registration);
        }
    }

    /// Waits until one of several submissions has ended: which, and when the first did.
    pub(crate) fn wait_any(
        self: &Arc<Self>,
        seqs: &[u64],
        timeout: Option<Duration>,
    ) -> Result<(u32, u64), Errno> {
        let found: Vec<Lookup> =
            seqs.iter().map(|seq| self.window.find(*seq)).collect::<Result<_, _>>()?;
        let until = timeout.map(|timeout| Instant::now() + timeout);
        self.any_waiters.fetch_add(1, Ordering::SeqCst);
        let result = loop {
            let next = self.report_ends();
            let guard = self.any_ended.0.lock().unwrap_or_else(|p| p.into_inner());
            let mut set = 0;
            let mut first = u64::MAX;
            for (n, lookup) in found.iter().enumerate() {
                match lookup {
                    Lookup::Gone => set |= 1 << n,
                    Lookup::Known(submission) if submission.outcome().is_some() => {
                        set |= 1 << n;
                        first = first.min(submission.finished_ns());
                    }
                    Lookup::Known(_) => {}
                }
            }
            let now = Instant::now();
            if set != 0 || until.is_some_and(|until| now >= until) {
                break (set, if first == u64::MAX { 0 } else { first });
            }
            drop(guard);
            for lookup in &found {
                if let Lookup::Known(submission) = lookup {
                    self.run_queues_of(submission, u64::MAX);
                }
            }
            let guard = self.any_ended.0.lock().unwrap_or_else(|p| p.into_inner());
            let any = |l: &Lookup| matches!(l, Lookup::Known(s) if s.outcome().is_some());
            if !found.iter().any(any) {
                let left =
                    until.map_or(Duration::MAX, |until| until.saturating_duration_since(now));
                let left = left.min(self.nap(next));
                drop(self.any_ended.1.wait_timeout(guard, left));
                self.check_timeout();
            }
        };
        self.any_waiters.fetch_sub(1, Ordering::SeqCst);
        Ok(result)
    }
}
