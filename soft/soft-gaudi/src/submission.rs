//! Submissions: sequence numbers, the window of those in flight, and waiting for their end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex;

/// How a submission ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All its jobs ran.
    Completed,
    /// It hit its own timeout.
    TimedOut,
    /// A reset of the device ended it.
    Aborted,
}

const PENDING: u32 = 0;
/// A thread has claimed the right to end it; for all others it is still pending.
const CLAIMED: u32 = 4;

impl Outcome {
    fn code(self) -> u32 {
        match self {
            Self::Completed => 1,
            Self::TimedOut => 2,
            Self::Aborted => 3,
        }
    }

    fn from_code(code: u32) -> Option<Self> {
        [Self::Completed, Self::TimedOut, Self::Aborted].into_iter().find(|o| o.code() == code)
    }
}

/// One submission.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) seq: u64,
    /// Distinct queues it has jobs in.
    pub(crate) queues: Vec<u32>,
    pub(crate) submitted: Instant,
    pub(crate) timeout: Duration,
    /// For a signal: the value its sync object has after it.
    signal: OnceLock<u32>,
    /// Its end is remembered after its slot in the window is reused.
    remembered: bool,
    /// Its timeout is recorded but does not reset the card.
    pub(crate) spares_card: bool,
    /// Its timeout has passed.
    overdue: AtomicBool,
    jobs: AtomicU32,
    /// Futex: [`PENDING`], [`CLAIMED`] or an outcome's code.
    state: AtomicU32,
    sleepers: AtomicU32,
    finished_ns: AtomicU64,
    /// When its queues have done their work, by the clock of [`crate::timing`].
    done_at: AtomicU64,
}

impl Submission {
    pub(crate) fn new(seq: u64, queues: Vec<u32>, jobs: u32, timeout: Duration) -> Self {
        Self {
            seq,
            queues,
            submitted: Instant::now(),
            timeout,
            signal: OnceLock::new(),
            remembered: false,
            spares_card: false,
            overdue: AtomicBool::new(false),
            jobs: AtomicU32::new(jobs),
            state: AtomicU32::new(PENDING),
            sleepers: AtomicU32::new(0),
            finished_ns: AtomicU64::new(0),
            done_at: AtomicU64::new(0),
        }
    }

    /// Sets whether its end is remembered, as for submissions with timestamps.
    pub(crate) fn remembered(mut self, yes: bool) -> Self {
        self.remembered = yes;
        self
    }

    /// Sets whether its timeout leaves the card alone.
    pub(crate) fn sparing_card(mut self, yes: bool) -> Self {
        self.spares_card = yes;
        self
    }

    /// Its timeout has passed, and was recorded.
    pub(crate) fn is_overdue(&self) -> bool {
        self.overdue.load(Ordering::Relaxed)
    }

    /// Notes that its timeout has passed; true the first time.
    pub(crate) fn set_overdue(&self) -> bool {
        !self.overdue.swap(true, Ordering::Relaxed)
    }

    /// Makes it a signal.
    pub(crate) fn set_signal(&self, value: u32) {
        let _ = self.signal.set(value);
    }

    /// For a signal: the value its sync object has after it.
    pub(crate) fn signal(&self) -> Option<u32> {
        self.signal.get().copied()
    }

    /// Another stage adds its jobs; the submission must not have ended.
    pub(crate) fn add_jobs(&self, count: u32) {
        self.jobs.fetch_add(count, Ordering::AcqRel);
    }

    /// One job is done, at this time. If it was the last, returns when all were done.
    pub(crate) fn job_done(&self, at: u64) -> Option<u64> {
        let others = self.done_at.fetch_max(at, Ordering::Relaxed);
        (self.jobs.fetch_sub(1, Ordering::AcqRel) == 1).then_some(others.max(at))
    }

    /// Claims the right to end it; false if another thread has.
    pub(crate) fn claim(&self) -> bool {
        self.state.compare_exchange(PENDING, CLAIMED, Ordering::SeqCst, Ordering::Acquire).is_ok()
    }

    /// Publishes its end; only the thread that has claimed it may call this.
    pub(crate) fn publish(&self, outcome: Outcome, now_ns: u64) {
        self.finished_ns.store(now_ns, Ordering::Relaxed);
        self.state.store(outcome.code(), Ordering::SeqCst);
        self.wake();
    }

    /// Wakes the sleepers, which check the state again.
    pub(crate) fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.state, futex::Flags::PRIVATE, i32::MAX as u32);
        }
    }

    pub(crate) fn outcome(&self) -> Option<Outcome> {
        // SeqCst for `wait_for_slot`, which pairs it with the store in `publish`.
        Outcome::from_code(self.state.load(Ordering::SeqCst))
    }

    /// Nanoseconds of the realtime clock when it ended.
    pub(crate) fn finished_ns(&self) -> u64 {
        self.finished_ns.load(Ordering::Relaxed)
    }

    /// Sleeps until it ends, at most `limit`.
    pub(crate) fn sleep(&self, limit: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let limit = futex::Timespec {
            tv_sec: limit.as_secs().min(i64::MAX as u64) as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        // Woken, timed out or interrupted: the caller checks again in all cases.
        let now = self.state.load(Ordering::SeqCst);
        if now == PENDING || now == CLAIMED {
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, now, Some(&limit));
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What a sequence number stands for.
#[derive(Clone, Debug)]
pub(crate) enum Lookup {
    /// Known.
    Known(Arc<Submission>),
    /// So old that it has been forgotten; it had ended.
    Gone,
}

/// The window of submissions.
#[derive(Debug)]
pub(crate) struct Window {
    ring: Mutex<Ring>,
    /// One thread is woken for each slot that becomes free.
    slot_free: Condvar,
    /// Number of threads in [`Window::wait_for_slot`]; saves the lock when there are none.
    waiting: AtomicU32,
}

#[derive(Debug)]
struct Ring {
    next: u64,
    slots: Vec<Option<Arc<Submission>>>,
    /// All submissions before this number have ended.
    oldest: u64,
    /// The last submissions with timestamps whose slot was reused.
    remembered: VecDeque<Arc<Submission>>,
    /// The card is gone: threads must not wait any more.
    closed: bool,
}

impl Ring {
    /// The slot of the next number.
    fn next_slot(&self) -> usize {
        (self.next % self.slots.len() as u64) as usize
    }

    /// The pending submission that occupies the slot of the next number.
    fn in_the_way(&self) -> Option<&Arc<Submission>> {
        self.slots[self.next_slot()].as_ref().filter(|old| old.outcome().is_none())
    }
}

/// Most entries of `Ring::remembered`.
const REMEMBERED: usize = 256;

impl Window {
    pub(crate) fn new(size: u64) -> Self {
        let ring = Ring {
            next: 1,
            slots: vec![None; size.max(1) as usize],
            oldest: 1,
            remembered: VecDeque::new(),
            closed: false,
        };
        Self { ring: Mutex::new(ring), slot_free: Condvar::new(), waiting: AtomicU32::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Gives a submission the next number. If the slot of that number is occupied, returns the occupant. `make` must be
    /// `Some`; it is used up only on success.
    pub(crate) fn enter(
        &self,
        make: &mut Option<impl FnOnce(u64) -> Submission>,
    ) -> Result<Arc<Submission>, Arc<Submission>> {
        let mut ring = self.lock();
        if let Some(old) = ring.in_the_way() {
            return Err(old.clone());
        }
        let slot = ring.next_slot();
        let Some(make) = make.take() else { unreachable!("entered twice") };
        let submission = Arc::new(make(ring.next));
        ring.next += 1;
        if let Some(old) = ring.slots[slot].replace(submission.clone())
            && old.remembered
        {
            ring.remembered.push_back(old);
            if ring.remembered.len() > REMEMBERED {
                ring.remembered.pop_front();
            }
        }
        // A thread that was woken and took a slot wakes the next waiter if another slot is free.
        self.wake_one_if_free(&ring);
        Ok(submission)
    }

    /// Sleeps until the slot of the next number may be free, at most `limit`.
    pub(crate) fn wait_for_slot(&self, limit: Duration) {
        let ring = self.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Raise `waiting`, then load the state; `publish` stores the state, then `submission_ended` loads `waiting`. All four
        // must be SeqCst: then one of the two loads sees the other side's store. Otherwise a wake could be lost.
        if !ring.closed && ring.in_the_way().is_some() {
            drop(self.slot_free.wait_timeout(ring, limit));
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// The end of a submission was published: wakes one thread if that freed the next slot.
    pub(crate) fn submission_ended(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake_one_if_free(&self.lock());
        }
    }

    fn wake_one_if_free(&self, ring: &Ring) {
        if self.waiting.load(Ordering::SeqCst) > 0 && ring.in_the_way().is_none() {
            self.slot_free.notify_one();
        }
    }

    /// Accepts nothing any more; wakes all threads.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.slot_free.notify_all();
    }

    /// What `seq` stands for; `EINVAL` if it was never given out.
    pub(crate) fn find(&self, seq: u64) -> Result<Lookup, Errno> {
        let ring = self.lock();
        if seq >= ring.next {
            return Err(Errno::INVAL);
        }
        if seq == 0 || ring.next - seq > ring.slots.len() as u64 {
            let old = ring.remembered.iter().find(|old| old.seq == seq);
            return Ok(old.cloned().map_or(Lookup::Gone, Lookup::Known));
        }
        let slot = (seq % ring.slots.len() as u64) as usize;
        Ok(ring.slots[slot].clone().map_or(Lookup::Gone, Lookup::Known))
    }

    /// The oldest submission that has not ended.
    pub(crate) fn oldest(&self) -> Option<Arc<Submission>> {
        let mut ring = self.lock();
        while ring.oldest < ring.next {
            let slot = (ring.oldest % ring.slots.len() as u64) as usize;
            match &ring.slots[slot] {
                Some(s) if s.seq == ring.oldest && s.outcome().is_none() => return Some(s.clone()),
                _ => ring.oldest += 1,
            }
        }
        None
    }

    /// All that have not ended.
    pub(crate) fn pending(&self) -> Vec<Arc<Submission>> {
        let ring = self.lock();
        ring.slots.iter().flatten().filter(|s| s.outcome().is_none()).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(seq: u64) -> Submission {
        Submission::new(seq, Vec::new(), 1, Duration::from_secs(1))
    }

    fn end(submission: &Submission, outcome: Outcome) {
        assert!(submission.claim());
        assert_eq!(submission.outcome(), None);
        submission.publish(outcome, 7);
    }

    #[test]
    fn numbers_start_at_one_and_old_ones_are_gone() {
        let window = Window::new(4);
        for seq in 1..=9 {
            let entered = window.enter(&mut Some(make)).unwrap();
            assert_eq!(entered.seq, seq);
            end(&entered, Outcome::Completed);
        }
        assert!(matches!(window.find(0), Ok(Lookup::Gone)));
        assert!(matches!(window.find(5), Ok(Lookup::Gone)));
        assert!(matches!(window.find(6), Ok(Lookup::Known(s)) if s.seq == 6));
        assert_eq!(window.find(10).unwrap_err(), Errno::INVAL);
    }

    #[test]
    fn a_full_window_names_the_submission_in_the_way() {
        let window = Window::new(2);
        let first = window.enter(&mut Some(make)).unwrap();
        let second = window.enter(&mut Some(make)).unwrap();
        end(&second, Outcome::Completed);
        assert_eq!(window.enter(&mut Some(make)).unwrap_err().seq, 1);
        assert_eq!(window.oldest().unwrap().seq, 1);
        end(&first, Outcome::Aborted);
        assert!(!first.claim());
        assert_eq!(first.outcome(), Some(Outcome::Aborted));
        assert_eq!(window.enter(&mut Some(make)).unwrap().seq, 3);
        assert_eq!(window.pending().len(), 1);
    }

    #[test]
    fn one_free_slot_wakes_one_of_many_threads() {
        const THREADS: u32 = 100;
        let window = Window::new(1);
        let (woken, entered) = (AtomicU32::new(0), AtomicU32::new(0));
        let first = window.enter(&mut Some(make)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let submission = loop {
                        match window.enter(&mut Some(make)) {
                            Ok(submission) => break submission,
                            Err(_) => {
                                window.wait_for_slot(Duration::from_secs(600));
                                woken.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    };
                    entered.fetch_add(1, Ordering::Relaxed);
                    end(&submission, Outcome::Completed);
                    window.submission_ended();
                });
            }
            while window.waiting.load(Ordering::SeqCst) < THREADS {
                std::thread::yield_now();
            }
            end(&first, Outcome::Completed);
            window.submission_ended();
        });
        assert_eq!(entered.into_inner(), THREADS);
        // At most one wake per end and one per entry. Waking all threads at each end would give 5000.
        let woken = woken.into_inner();
        assert!((THREADS..=2 * THREADS + 1).contains(&woken), "{woken} times");
    }

    #[test]
    fn closing_the_window_wakes_all_waiters() {
        let window = Window::new(1);
        let _first = window.enter(&mut Some(make)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..10 {
                scope.spawn(|| window.wait_for_slot(Duration::from_secs(600)));
            }
            window.close();
        });
    }
}
