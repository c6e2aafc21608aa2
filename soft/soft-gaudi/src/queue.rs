//! One hardware queue: jobs in order, one thread at a time, never blocked by another queue.
//!
//! Any thread may run a queue: the submitter, a waiter, a worker. The first one takes the command processor out of the
//! queue and runs it without a lock. A kick that arrives meanwhile is recorded. Otherwise it would be lost between the
//! check of a fence and the return of the processor as blocked.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::asic::Generation;
use crate::processor::{Processor, Program};
use crate::signals::Sob;
use crate::submission::Submission;

/// One buffer of a submission.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) submission: Arc<Submission>,
    pub(crate) program: Program,
    /// The sync object it counts or waits for.
    pub(crate) sob: Option<Arc<Sob>>,
}

#[derive(Debug)]
struct State {
    jobs: VecDeque<Job>,
    /// Absent while a thread runs the queue.
    processor: Option<Processor>,
    /// The job at the front has begun.
    started: bool,
    /// The processor waits at a fence.
    blocked: bool,
    /// Something happened that may unblock the processor.
    kicked: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// Whether it is on the workers' list.
    pub(crate) listed: AtomicBool,
}

/// A queue's command processor, taken by the thread that runs the queue.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) processor: Processor,
}

impl Queue {
    pub(crate) fn new(generation: Generation) -> Self {
        let state = State {
            jobs: VecDeque::new(),
            processor: Some(Processor::new(generation)),
            started: false,
            blocked: false,
            kicked: false,
        };
        Self { state: Mutex::new(state), listed: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds a job at the end. True if the queue was empty: then the caller must have it run. Decided under the lock,
    /// because the running thread leaves the queue once it is empty.
    #[must_use]
    pub(crate) fn push(&self, job: Job) -> bool {
        let mut state = self.lock();
        state.jobs.push_back(job);
        state.jobs.len() == 1
    }

    /// The sync object that a pending submission's job uses here.
    pub(crate) fn sob_of(&self, submission: &Arc<Submission>) -> Option<Arc<Sob>> {
        let state = self.lock();
        let job = state.jobs.iter().find(|job| Arc::ptr_eq(&job.submission, submission))?;
        job.sob.clone()
    }

    /// Jobs not finished.
    pub(crate) fn len(&self) -> usize {
        self.lock().jobs.len()
    }

    /// Takes the command processor if there is work and no thread has it.
    pub(crate) fn begin(&self) -> Option<Running> {
        let mut state = self.lock();
        if state.jobs.is_empty() || (state.blocked && !state.kicked) {
            return None;
        }
        let mut processor = state.processor.take()?;
        state.blocked = false;
        state.kicked = false;
        if !state.started {
            processor.start(state.jobs[0].program.clone());
            state.started = true;
        }
        Some(Running { processor })
    }

    /// Removes the finished front job and returns it. Starts the processor on the next job, if any, and returns it too.
    pub(crate) fn finish(&self, mut running: Running) -> (Option<Job>, Option<Running>) {
        let mut state = self.lock();
        let job = state.jobs.pop_front();
        match state.jobs.front() {
            Some(next) => {
                running.processor.start(next.program.clone());
                state.started = true;
                (job, Some(running))
            }
            None => {
                state.started = false;
                state.processor = Some(running.processor);
                (job, None)
            }
        }
    }

    /// Returns the processor with work left. If it is blocked but a kick has arrived, hands it out again.
    pub(crate) fn pause(&self, running: Running, blocked: bool) -> Option<Running> {
        let mut state = self.lock();
        if blocked && state.kicked {
            state.kicked = false;
            return Some(running);
        }
        state.blocked = blocked;
        state.processor = Some(running.processor);
        None
    }

    /// A fence counter of this queue changed. True if the queue was blocked and must be run.
    pub(crate) fn kick(&self) -> bool {
        let mut state = self.lock();
        state.kicked = true;
        state.blocked && state.processor.is_some()
    }

    /// Whether a thread runs it now.
    pub(crate) fn is_running(&self) -> bool {
        self.lock().processor.is_none()
    }
}
