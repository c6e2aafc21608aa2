//! How submissions are carried out: who runs a queue and when, what a fault or a timeout ends.
//!
//! Small work on an idle queue is done by the submitting thread before its call returns (handing it
//! to another thread costs more than the work); everything else goes to the workers, and a thread
//! that waits takes a queue over if nobody runs it yet. What a program sees is the same in all
//! cases: each queue in order, queues independent of each other.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::context::Context;
use crate::guarded;
use crate::packet::LinDma;
use crate::processor::{Bus, Fault, Pause, Program};
use crate::queue::Job;
use crate::submission::{Lookup, Outcome, Submission};
use crate::workers;

/// A submission is run by its submitter if it moves no more than this.
const INLINE_BYTES: u64 = 64 << 10;
/// What a waiter may do per microsecond of its timeout; about the speed of a copy.
const BYTES_PER_US: u64 = 4096;

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

fn realtime_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Context {
    /// Puts the programs into their queues as one submission. `fd` keeps the card if work is left.
    pub(crate) fn submit(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        submission: Arc<Submission>,
        programs: Vec<(u32, Program)>,
    ) {
        let mut idle = Vec::new();
        {
            let _entering = self.entering.lock().unwrap_or_else(|p| p.into_inner());
            for (queue, program) in programs {
                let target = &self.queues[queue as usize];
                if target.len() == 0 {
                    idle.push(queue);
                }
                target.push(Job { submission: submission.clone(), program });
            }
        }
        // A queue that was not idle has someone to run it: a thread, the workers or a fence.
        let mut budget = INLINE_BYTES;
        for queue in idle {
            self.run(queue, &mut budget);
        }
        self.run_ready(&mut budget);
        if submission.outcome().is_none() {
            self.keep(fd);
        }
    }

    /// Takes a place in the window, waiting for one as the library does.
    pub(crate) fn enter(
        self: &Arc<Self>,
        make: impl Fn(u64) -> Submission,
    ) -> Result<Arc<Submission>, Errno> {
        loop {
            if self.down.load(Ordering::Acquire) {
                return Err(Errno::BUSY);
            }
            match self.window.enter(&make) {
                Ok(submission) => {
                    self.in_flight.fetch_add(1, Ordering::AcqRel);
                    self.state.in_flight.fetch_add(1, Ordering::Relaxed);
                    return Ok(submission);
                }
                Err(in_the_way) => {
                    self.help(&in_the_way, u64::MAX);
                    if in_the_way.outcome().is_none() {
                        in_the_way.sleep(self.until_timeout());
                        self.check_timeout();
                    }
                }
            }
        }
    }

    /// A submission that was rejected after it got its number.
    pub(crate) fn reject(&self, submission: &Submission) {
        self.end(submission, Outcome::Completed);
    }

    /// Keeps the card's descriptor until the work in flight is done.
    fn keep(&self, fd: BorrowedFd<'_>) {
        let mut hold = self.hold.lock().unwrap_or_else(|p| p.into_inner());
        if hold.is_none() {
            *hold = fd.try_clone_to_owned().ok();
        }
        if self.in_flight.load(Ordering::Acquire) == 0 {
            *hold = None;
        }
    }

    fn end(&self, submission: &Submission, outcome: Outcome) {
        if !submission.end(outcome, realtime_ns()) {
            return;
        }
        self.last_end.store(self.epoch.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.state.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut hold = self.hold.lock().unwrap_or_else(|p| p.into_inner());
            if self.in_flight.load(Ordering::Acquire) == 0 {
                *hold = None;
            }
        }
    }

    /// Runs a queue until it has nothing to do, or the budget is spent and the workers take over.
    pub(crate) fn run(self: &Arc<Self>, queue: u32, budget: &mut u64) {
        let target = &self.queues[queue as usize];
        let bus = QueueBus { context: self, queue };
        let Some(mut turn) = target.begin() else { return };
        loop {
            let back = match turn.processor.run(&bus, budget) {
                Ok(Pause::Done) => {
                    let (job, next) = target.finish(turn);
                    if let Some(job) = job
                        && job.submission.job_done()
                    {
                        self.end(&job.submission, Outcome::Completed);
                    }
                    next
                }
                Ok(Pause::Blocked) => target.pause(turn, true),
                Ok(Pause::Stopped) => target.pause(turn, false),
                Ok(Pause::Spent) => {
                    target.pause(turn, false);
                    workers::run_later(self.clone(), queue);
                    None
                }
                Err(fault) => {
                    target.pause(turn, false);
                    self.fault(queue, fault);
                    None
                }
            };
            match back {
                Some(again) if !self.down.load(Ordering::Acquire) => turn = again,
                Some(last) => {
                    target.pause(last, false);
                    return;
                }
                None => return,
            }
        }
    }

    /// Runs the queues that fences have let go.
    pub(crate) fn run_ready(self: &Arc<Self>, budget: &mut u64) {
        loop {
            let next = self.ready.lock().unwrap_or_else(|p| p.into_inner()).pop_front();
            match next {
                Some(queue) => self.run(queue, budget),
                None => return,
            }
        }
    }

    /// Works for a submission in place of a worker.
    fn help(self: &Arc<Self>, submission: &Submission, budget: u64) {
        if self.down.load(Ordering::Acquire) {
            return;
        }
        let mut budget = budget;
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
            if let Some(outcome) = submission.outcome() {
                return Ok(Waited::Ended { outcome, at_ns: submission.finished_ns() });
            }
            let left = match deadline {
                None => Duration::MAX,
                Some((timeout, since)) => match timeout.checked_sub(since.elapsed()) {
                    Some(left) if !left.is_zero() => left,
                    _ => {
                        self.check_timeout();
                        return Ok(match submission.outcome() {
                            Some(outcome) => {
                                Waited::Ended { outcome, at_ns: submission.finished_ns() }
                            }
                            None => Waited::Busy,
                        });
                    }
                },
            };
            let budget = u64::try_from(left.as_micros()).unwrap_or(u64::MAX);
            self.help(&submission, budget.saturating_mul(BYTES_PER_US));
            if submission.outcome().is_none() {
                submission.sleep(left.min(self.until_timeout()));
                self.check_timeout();
            }
        }
    }

    /// How long the oldest submission may still take.
    fn until_timeout(&self) -> Duration {
        let Some(oldest) = self.window.oldest() else { return Duration::from_secs(1) };
        let since = oldest
            .submitted
            .max(self.epoch + Duration::from_nanos(self.last_end.load(Ordering::Relaxed)));
        let left = oldest.timeout.saturating_sub(since.elapsed());
        left.max(Duration::from_millis(1))
    }

    /// Resets the card if its oldest submission has been stuck for too long.
    pub(crate) fn check_timeout(&self) {
        let Some(oldest) = self.window.oldest() else { return };
        let since = oldest
            .submitted
            .max(self.epoch + Duration::from_nanos(self.last_end.load(Ordering::Relaxed)));
        if since.elapsed() >= oldest.timeout {
            self.reset(Some(&oldest));
        }
    }

    /// A queue hit an error: the driver resets the card.
    fn fault(&self, queue: u32, fault: Fault) {
        let what = match fault {
            Fault::Page { addr } => format!("page fault at {addr:#x}"),
            Fault::Razwi { addr } => format!("nobody answers at {addr:#x} (RAZWI)"),
            Fault::Opcode => "undefined packet".to_owned(),
        };
        eprintln!(
            "soft-gaudi: device {} ({}), queue {queue}: {what}; the device is reset",
            self.device,
            crate::asic::bus_id(self.device)
        );
        self.reset(None);
    }

    /// Takes the card down: what is in flight ends, nothing new is accepted until it is reopened.
    pub(crate) fn reset(&self, stuck: Option<&Submission>) {
        if !self.down.load(Ordering::Acquire) {
            self.state.reset();
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
    }
}

/// The device as one queue of it sees it.
struct QueueBus<'a> {
    context: &'a Arc<Context>,
    queue: u32,
}

impl QueueBus<'_> {
    /// Moves bytes between this process and device memory, piece by piece.
    fn transfer(&self, addr: u64, ptr: *mut u8, len: usize, write: bool) -> Result<(), Fault> {
        let mut done = 0;
        while done < len {
            let at = addr.checked_add(done as u64).ok_or(Fault::Page { addr })?;
            let place = self.context.space().translate(at).ok_or(Fault::Page { addr: at })?;
            let part = place.len.min((len - done) as u64) as usize;
            // SAFETY: `place` is memory the program mapped for the device, `ptr` the caller's
            // buffer of `len` bytes; a vanished mapping comes back as an error.
            let moved = unsafe {
                let here = ptr.add(done);
                if write {
                    guarded::copy(place.ptr, here, part)
                } else {
                    guarded::copy(here, place.ptr, part)
                }
            };
            moved.map_err(|_| Fault::Page { addr: at })?;
            done += part;
        }
        Ok(())
    }

    /// Copies through a buffer, reversing the bytes of each unit.
    fn swap(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault> {
        let unit = 1usize << dma.swap;
        let mut bounce = vec![0u8; len.min(64 << 10) as usize];
        let mut at = 0;
        while at < len {
            let part = &mut bounce[..(len - at).min(64 << 10) as usize];
            self.transfer(dma.src.wrapping_add(done + at), part.as_mut_ptr(), part.len(), false)?;
            part.chunks_exact_mut(unit).for_each(<[u8]>::reverse);
            self.transfer(dma.dst.wrapping_add(done + at), part.as_mut_ptr(), part.len(), true)?;
            at += part.len() as u64;
        }
        Ok(())
    }
}

impl Bus for QueueBus<'_> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.transfer(addr, into.as_mut_ptr(), into.len(), false)
    }

    fn dma(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault> {
        if dma.swap != 0 && !dma.memset {
            return self.swap(dma, done, len);
        }
        let mut at = done;
        while at < done + len {
            let dst = dma.dst.checked_add(at).ok_or(Fault::Page { addr: dma.dst })?;
            let src = dma.src.wrapping_add(at);
            let (to, from) = {
                let space = self.context.space();
                let to = space.translate(dst).ok_or(Fault::Page { addr: dst })?;
                let from = if dma.memset {
                    None
                } else {
                    Some(space.translate(src).ok_or(Fault::Page { addr: src })?)
                };
                (to, from)
            };
            let mut part = (done + len - at).min(to.len);
            let moved = match from {
                Some(from) => {
                    part = part.min(from.len);
                    // SAFETY: both are memory the program mapped for the device; a vanished
                    // mapping comes back as an error.
                    unsafe { guarded::copy(to.ptr, from.ptr, part as usize) }
                        .map_err(|_| Fault::Page { addr: src })
                }
                None => {
                    let pattern = fill_pattern(dma, self.context.profile.dram_mmu, at);
                    // SAFETY: as above.
                    unsafe { guarded::fill(to.ptr, pattern, part as usize) }
                        .map_err(|_| Fault::Page { addr: dst })
                }
            };
            moved?;
            at += part;
        }
        Ok(())
    }

    fn write(&self, addr: u64, value: u32) -> Result<(), Fault> {
        if self.context.profile.cfg.contains(addr, 4) {
            // Registers come with the sync manager.
            return Err(Fault::Razwi { addr });
        }
        let mut bytes = value.to_le_bytes();
        self.transfer(addr, bytes.as_mut_ptr(), bytes.len(), true)
    }

    fn write_own(&self, _offset: u16, _value: u32) -> Result<(), Fault> {
        Ok(())
    }

    fn message_base(&self, _base: u8) -> u64 {
        self.context.profile.cfg.first
    }

    fn pass_fence(&self, _lower: bool, _id: u8, target: u8, _decrement: u8) -> bool {
        target == 0
    }

    fn raise_fence(&self, _lower: bool, _id: u8, _increment: u8) {
        self.context.queues[self.queue as usize].kick();
    }

    fn time(&self) -> u32 {
        self.context.epoch.elapsed().as_nanos() as u32
    }

    fn stopped(&self) -> bool {
        self.context.down.load(Ordering::Relaxed)
    }
}

/// The eight bytes to repeat from byte `at` of a fill on. Gaudi2's driver fills with 32-bit values.
fn fill_pattern(dma: &LinDma, gaudi2: bool, at: u64) -> u64 {
    let pattern = if gaudi2 {
        let low = dma.src & 0xffff_ffff;
        low << 32 | low
    } else {
        dma.src
    };
    pattern.rotate_right((at % 8) as u32 * 8)
}
