//! How submissions are executed: which thread runs a queue and when. [`ends`]: how they end. [`resets`]: what takes the
//! card down.
//!
//! Small work on an idle queue is done by the submitting thread before its call returns (handing it
//! to another thread costs more than the work); everything else goes to the workers, and a thread
//! that waits runs a queue if no other thread does. What a program sees is the same in all
//! cases: each queue in order, queues independent of each other.

mod ends;
mod resets;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;

use crate::bus::QueueBus;
use crate::context::Context;
use crate::faults::Action;
use crate::guarded;
use crate::interrupts::Registration;
use crate::processor::{Fault, Pause, Program};
use crate::queue::Job;
use crate::registers::WriteEffects;
use crate::signals::Sob;
use crate::state::{Rejection, Word, clock_ns};
use crate::submission::{Outcome, Submission};
use crate::workers;

pub(crate) use ends::Waited;

/// A submission that moves at most this many bytes is run by its submitter.
pub(crate) const INLINE_BYTES: u64 = 64 << 10;
/// Most bytes a waiting thread moves before it checks timeouts.
const WAITER_BYTES: u64 = 256 << 20;
/// Entries of a queue's ring.
const RING: usize = 4096;

/// Writes a timestamp where a program has asked for it.
fn store_timestamp(at: usize, now_ns: u64) {
    // Eight bytes are one store. It is lost if the file behind the mapping was truncated.
    // SAFETY: callers pass aligned addresses inside the mapping of command buffers, the source is ours.
    let _ = unsafe { guarded::copy(at as *mut u8, (&raw const now_ns).cast(), 8) };
}

pub(crate) fn realtime_ns() -> u64 {
    clock_ns(libc::CLOCK_REALTIME)
}

impl Context {
    /// Puts the programs into their queues as one submission. `fd` keeps the card owned while work is left.
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
                // One extra job; it is done when `others` other submissions have ended.
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
        // A queue that was not empty needs no start: a thread runs it, it is listed for the workers, or it waits at a fence.
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

    /// Takes a slot in the window. If none is free, waits for one, as the library does by retrying.
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

    /// Ends a submission that was rejected after it got its number.
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
                        // Release the sync object before publishing the end, so that it can be reused.
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
                    // Take the card down before returning the processor: otherwise another thread could continue past the fault.
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

    /// Runs the queues whose fences have been passed, then those that the arbiter selects.
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

    /// Writes a register on behalf of the driver.
    pub(crate) fn set_register(&self, addr: u64, value: u32) {
        let mut then = WriteEffects::default();
        self.registers.lock().unwrap_or_else(|p| p.into_inner()).write(addr, value, &mut then);
        debug_assert!(then.effects.is_empty());
    }

    /// Raises a user interrupt of the card.
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
}
