//! One hardware queue: jobs in order, one thread at a time, never blocked by another queue.
//!
//! Any thread may come and run a queue – the submitter, a waiter, a worker. The first one takes
//! the command processor out and runs it without a lock; a wake-up that arrives meanwhile is
//! remembered, so none is lost between "the fence is down" and "I go to sleep".

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
    /// Something happened that may let a blocked processor go on.
    kicked: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// It is on the workers' list.
    pub(crate) listed: AtomicBool,
}

/// The right to run a queue.
#[derive(Debug)]
pub(crate) struct Turn {
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

    /// Adds a job at the end. True if the queue was empty, so that nobody runs it or will: to be
    /// known under the same lock, since whoever runs the queue leaves it when it has become empty.
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

    /// Takes the turn if there is work and nobody has it.
    pub(crate) fn begin(&self) -> Option<Turn> {
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
        Some(Turn { processor })
    }

    /// The front job is finished: returns it, and the turn if there is another.
    pub(crate) fn finish(&self, mut turn: Turn) -> (Option<Job>, Option<Turn>) {
        let mut state = self.lock();
        let job = state.jobs.pop_front();
        match state.jobs.front() {
            Some(next) => {
                turn.processor.start(next.program.clone());
                state.started = true;
                (job, Some(turn))
            }
            None => {
                state.started = false;
                state.processor = Some(turn.processor);
                (job, None)
            }
        }
    }

    /// Gives the turn back with work left; comes back if a kick arrived since it was blocked.
    pub(crate) fn pause(&self, turn: Turn, blocked: bool) -> Option<Turn> {
        let mut state = self.lock();
        if blocked && state.kicked {
            state.kicked = false;
            return Some(turn);
        }
        state.blocked = blocked;
        state.processor = Some(turn.processor);
        None
    }

    /// A fence of this queue moved: true if the queue was waiting for it and needs someone to run.
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
