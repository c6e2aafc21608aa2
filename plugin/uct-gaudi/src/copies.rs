//! The copies in progress of an interface, or of one of its endpoints, in the order they were posted.
//!
//! UCP's staging protocols ignore the status of copies in the background: both a refusal
//! (`NO_RESOURCE`) and the error of a copy in progress. They deliver the message with whatever bytes
//! were there before. So a copy that finds the device busy waits here, and progress starts it
//! ([`queue`](crate::queue)). A copy that failed is tried once more before the failure is reported (and
//! the process aborted, unless `ABORT_ON_ERROR=n`).
//!
//! Short copies do not come through here. They are tried once more, too, and return their error; UCP's
//! staging asserts that there is none.
//!
//! Between processes UCP does use the status. Copies are retried there, too, because an error fails the whole endpoint.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaudi::{Error, Notifier, SubmitError};
use smallvec::{SmallVec, smallvec};
use uct::{Completion, Posted, Status, Ucx, log};

use crate::carrier::{Carried, Running};
use crate::queue::{Queue, Start, Work};
use crate::status::explain;

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The engine could not do it.
    Copy(Error),
    /// It was refused before it reached the engine, and the reason logged.
    Refused(Status),
}

/// Retries a copy that failed with `first`; `copy` returns `None` if it must not be retried: its memory was freed
/// meanwhile, or a relay has retried it. It retries after any error, because a transient error, such as `EIO` of one submission or `EINTR`, has
/// the same kind as a lost card or an invalid request. Only a card that the driver reports as lost is
/// not tried again. If both attempts fail, the first error is returned: it is the cause.
///
/// A success is logged with the first error. It is a warning only once per process, since a card in
/// trouble may fail many copies.
pub(crate) fn try_again(
    ucx: Option<&Ucx>,
    first: Error,
    is_lost: impl FnOnce() -> bool,
    copy: impl FnOnce() -> Option<Result<(), Error>>,
) -> Result<(), Error> {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if is_lost() || !matches!(copy(), Some(Ok(()))) {
        return Err(first);
    }
    let Some(ucx) = ucx else { return Ok(()) };
    if WARNED.swap(true, Ordering::Relaxed) {
        log!(ucx, Debug, "copy succeeded at the second try, after {}", explain(&first));
    } else {
        log!(ucx, Warn, "copy succeeded at the second try, after {}", explain(&first));
    }
    Ok(())
}

/// Copies of up to this many bytes share a submission when many are posted. Otherwise submissions limit a
/// transfer of many blocks: each is a driver call and an interrupt, and the driver takes few at a time.
const SMALL: usize = 64 << 10;
/// The most that share one submission, so that several queues of the card work at the same time.
const JOINED_BYTES: usize = 1 << 20;
const JOINED_COPIES: usize = 64;

/// What to copy, and what must live until it is done: one copy, or several that were joined.
struct CopyWork<T> {
    carried: Carried,
    bytes: usize,
    copies: SmallVec<[PostedCopy<T>; 1]>,
    /// For the log.
    ucx: Option<&'static Ucx>,
    /// The device was busy when it was tried before.
    tried: bool,
    running: Option<Running>,
}

/// A copy as it was posted.
struct PostedCopy<T> {
    /// How many of the pieces are its own.
    pieces: usize,
    companion: T,
    completion: Completion,
}

// SAFETY: the host pointers in the pieces belong to an operation of UCX, which keeps them valid
// until its completion, whichever thread progresses the worker.
unsafe impl<T: Send> Send for CopyWork<T> {}

impl<T> CopyWork<T> {
    /// The result of each copy. After a failure each is made again by itself, so that no copy fails
    /// because of another.
    fn results(&self, result: Result<(), Error>) -> Result<(), Vec<Result<(), Error>>> {
        let Err(first) = result else { return Ok(()) };
        let lost = self.carried.is_lost();
        let mut next = 0;
        let results = self.copies.iter().map(|copy| {
            let own = next..next + copy.pieces;
            next = own.end;
            // SAFETY: promised when the copy was posted, until its completion.
            let again = || unsafe { self.carried.again(own) };
            try_again(self.ucx, first.clone(), || lost, again)
        });
        Err(results.collect())
    }

    /// The copies, each with its result.
    fn ended(self, results: Result<(), Vec<Result<(), Error>>>) -> impl Iterator<Item = Ended<T>> {
        let mut results = results.err().unwrap_or_default().into_iter();
        self.copies.into_iter().map(move |PostedCopy { companion, completion, .. }| {
            let result = results.next().unwrap_or(Ok(())).map_err(Failure::Copy);
            Ended { completion, result, companion: Some(companion) }
        })
    }
}

impl<T> Work for CopyWork<T> {
    /// `Ok` if all copies succeeded, else the result of each.
    type Outcome = Result<(), Vec<Result<(), Error>>>;

    fn start(&mut self) -> Start<Self::Outcome> {
        // SAFETY: promised when the copy was posted, until its completion.
        let started = unsafe {
            match &self.carried {
                Carried::Card(device, segments) => device.copy(segments).map(Running::Card),
                Carried::Relay(relay, pieces) => relay.start(pieces).map(Running::Relay),
            }
        };
        match started {
            Ok(mut running) => match running.poll() {
                Some(result) => Start::Ended(self.results(result)),
                None => {
                    self.running = Some(running);
                    Start::Running
                }
            },
            Err(SubmitError::Busy) => {
                if !std::mem::replace(&mut self.tried, true) {
                    self.carried.count_busy();
                }
                Start::Busy
            }
            Err(SubmitError::Failed(error)) => Start::Ended(self.results(Err(error))),
        }
    }

    /// Its memory may be freed meanwhile.
    fn waits(&mut self) {
        self.carried.outdate();
    }

    fn poll(&mut self) -> Option<Self::Outcome> {
        let result = self.running.as_mut()?.poll()?;
        Some(self.results(result))
    }

    fn is_small(&self) -> bool {
        self.bytes <= SMALL
    }

    fn takes(&self, next: &Self) -> bool {
        (self.is_small() || self.copies.len() > 1)
            && next.is_small()
            && self.carried.goes_with(&next.carried)
            && self.bytes.saturating_add(next.bytes) <= JOINED_BYTES
            && self.copies.len() + next.copies.len() <= JOINED_COPIES
    }

    fn join(&mut self, next: Self) {
        self.bytes += next.bytes;
        self.carried.join(next.carried);
        self.copies.extend(next.copies);
    }
}

/// An operation that has ended, and its result.
pub(crate) struct Ended<T> {
    pub(crate) completion: Completion,
    pub(crate) result: Result<(), Failure>,
    /// What was posted with the copy; a flush has none.
    pub(crate) companion: Option<T>,
}

/// A copy that could not be started.
pub(crate) struct NotStarted<T> {
    pub(crate) error: Error,
    pub(crate) companion: T,
    pub(crate) completion: Completion,
}

/// Operations in progress. Used under the worker's lock; no borrow outlives a call here, so that UCX's
/// callbacks may post more. A `T` is kept with each copy until it has ended.
pub(crate) struct Copies<T> {
    /// For the log; none in tests.
    ucx: Option<&'static Ucx>,
    /// Never contended: the worker's lock admits one thread at a time.
    state: Mutex<State<T>>,
}

struct State<T> {
    queue: Queue<CopyWork<T>, Completion>,
    /// Ended; progress finishes their completions.
    ended: VecDeque<Ended<T>>,
}

impl<T> State<T> {
    /// Polls what is running, starts what can start, removes fences that are passed.
    fn advance(&mut self) {
        let State { queue, ended } = self;
        queue.advance(|copy, results| ended.extend(copy.ended(results)));
    }

    fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.ended.is_empty()
    }

    /// The next flush for which every earlier operation was handed over.
    fn flushed(&mut self) -> Option<Completion> {
        if self.ended.is_empty() { self.queue.flushed() } else { None }
    }
}

impl<T> Copies<T> {
    pub(crate) fn new(ucx: Option<&'static Ucx>) -> Self {
        let state = State { queue: Queue::default(), ended: VecDeque::new() };
        Copies { ucx, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.state().is_idle()
    }

    /// Later copies start only after the copies in progress have ended.
    pub(crate) fn fence(&self) {
        self.state().queue.fence();
    }

    /// Starts a copy, now or when the card or relay takes it. Returns a copy that cannot be started.
    ///
    /// # Safety
    /// As for [`Device::copy`](gaudi::Device::copy), until the completion is finished.
    pub(crate) unsafe fn post(
        &self,
        carried: Carried,
        companion: T,
        completion: Completion,
    ) -> Result<Posted, NotStarted<T>> {
        let copy = CopyWork {
            bytes: carried.bytes(),
            copies: smallvec![PostedCopy { pieces: carried.pieces(), companion, completion }],
            carried,
            ucx: self.ucx,
            tried: false,
            running: None,
        };
        let mut state = self.state();
        let State { queue, ended } = &mut *state;
        let over = queue.post(copy, |copy, results| ended.extend(copy.ended(results)));
        drop(state);
        let Some((mut copy, results)) = over else { return Ok(Posted::Later) };
        let Some(PostedCopy { companion, completion, .. }) = copy.copies.pop() else {
            return Ok(Posted::Later);
        };
        match results.err().and_then(|mut results| results.pop()) {
            Some(Err(error)) => Err(NotStarted { error, companion, completion }),
            _ => Ok(Posted::Done(completion)),
        }
    }

    /// Records an operation that has failed already; progress finishes its completion.
    pub(crate) fn fail(&self, why: Failure, companion: T, completion: Completion) -> Posted {
        let ended = Ended { completion, result: Err(why), companion: Some(companion) };
        self.state().ended.push_back(ended);
        Posted::Later
    }

    /// Cancels copies that depend on another process. Progress finishes their completions.
    pub(crate) fn cancel(&self) {
        let mut state = self.state();
        let State { queue, ended } = &mut *state;
        for mut copy in queue.take_if(|copy| matches!(copy.carried, Carried::Relay(..))) {
            copy.running.take().into_iter().for_each(Running::end);
            ended.extend(copy.copies.into_iter().map(
                |PostedCopy { companion, completion, .. }| {
                    let result = Err(Failure::Refused(Status::CANCELED));
                    Ended { completion, result, companion: Some(companion) }
                },
            ));
        }
    }

    /// Completes when everything posted so far has completed.
    pub(crate) fn flush(&self, completion: Completion) -> Posted {
        let mut state = self.state();
        if state.is_idle() {
            return Posted::Done(completion);
        }
        if completion.is_wanted() {
            state.queue.flush(completion);
        }
        Posted::Later
    }

    /// Waits until no fence holds anything back. Finishes no completions, but leaves them to progress:
    /// the caller may be inside an operation of another transport.
    pub(crate) fn wait_for_fences(&self) {
        let mut state = self.state();
        while state.queue.has_fence() {
            state.advance();
        }
    }

    /// Starts what the device takes, hands over what has ended, and returns how many. Does not block,
    /// except to make failed copies again.
    ///
    /// Hands over one at a time: a callback that flushes must also wait for operations that have ended but were not
    /// handed over yet. Operations that a callback fails at once are left for the next call, so that this loop ends.
    pub(crate) fn reap(&self, mut hand_over: impl FnMut(Ended<T>)) -> u32 {
        let known = {
            let mut state = self.state();
            state.advance();
            state.ended.len()
        };
        let mut count = 0;
        for _ in 0..known {
            // By now a callback may have taken the rest itself.
            let Some(ended) = self.state().ended.pop_front() else { break };
            hand_over(ended);
            count += 1;
        }
        loop {
            // A statement of its own: in a `while let` the borrow would last through the callback.
            let flushed = self.state().flushed();
            let Some(completion) = flushed else { break };
            hand_over(Ended { completion, result: Ok(()), companion: None });
            count += 1;
        }
        count
    }

    /// Arranges a notification for when [`Copies::reap`] has something to do. `false`: none will come;
    /// do not sleep, call it now.
    pub(crate) fn notify_when_ready(&self, notifier: &Arc<Notifier>) -> bool {
        let mut state = self.state();
        state.advance();
        let running = || state.queue.running().filter_map(|copy| copy.running.as_ref());
        // The next can start when something on the same card or relay ends.
        let next = state.queue.next().map(|copy| &copy.carried);
        if !state.ended.is_empty() || (running().next().is_none() && next.is_none()) {
            return false;
        }
        // Checked again after the notifier is set: an earlier end sent no notification, later ones do.
        running().all(|running| running.notify_when_done(notifier))
            && next.is_none_or(|carried| carried.notify_when_free(notifier))
            && !running().any(Running::has_news)
    }
}

impl<T> Drop for Copies<T> {
    /// After close, the memory of the operations may be freed. So wait first until the hardware has
    /// finished the copies it was given.
    fn drop(&mut self) {
        for mut copy in
            self.state.get_mut().unwrap_or_else(PoisonError::into_inner).queue.take_running()
        {
            if let Some(running) = copy.running.take() {
                running.end();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use uct::abi::RawCompletion;

    use super::*;

    fn completion(raw: &mut RawCompletion) -> Completion {
        raw.count = 1;
        // SAFETY: it lives longer than the operation, and counts this one.
        unsafe { Completion::from_raw(raw) }
    }

    #[test]
    fn a_flush_in_a_callback_waits_for_operations_not_handed_over_yet() {
        // SAFETY: numbers and a pointer to a function that may be null.
        let mut raw: [RawCompletion; 4] = unsafe { std::mem::zeroed() };
        let [one, two, flush, three] = raw.each_mut().map(completion);
        let copies = Copies::new(None);
        for (name, completion) in [("one", one), ("two", two)] {
            copies.fail(Failure::Refused(Status::UNREACHABLE), name, completion);
        }
        let mut later = Some((flush, three));
        let order = RefCell::new(Vec::new());
        let hand_over = |ended: Ended<&'static str>| {
            if let Some((flush, three)) = later.take() {
                assert!(
                    matches!(copies.flush(flush), Posted::Later),
                    "one more is to be handed over"
                );
                copies.fail(Failure::Refused(Status::UNREACHABLE), "three", three);
            }
            order.borrow_mut().push(ended.companion);
            ended.completion.finish(Ok(()));
        };
        assert_eq!(copies.reap(hand_over), 2, "what a callback fails is for the next time");
        assert!(!copies.is_idle());
        let hand_over = |ended: Ended<_>| order.borrow_mut().push(ended.companion);
        assert_eq!(copies.reap(hand_over), 2);
        assert_eq!(order.into_inner(), [Some("one"), Some("two"), Some("three"), None]);
        assert!(copies.is_idle());
    }

    #[test]
    fn a_flush_callback_may_post_and_flush() {
        // SAFETY: numbers and a pointer to a function that may be null.
        let mut raw: [RawCompletion; 4] = unsafe { std::mem::zeroed() };
        let [one, flush, two, again] = raw.each_mut().map(completion);
        let copies = Copies::new(None);
        copies.fail(Failure::Refused(Status::UNREACHABLE), "one", one);
        assert!(matches!(copies.flush(flush), Posted::Later));
        let mut later = Some((two, again));
        let mut order = Vec::new();
        let hand_over = |ended: Ended<&'static str>| {
            if ended.companion.is_none()
                && let Some((two, again)) = later.take()
            {
                copies.fail(Failure::Refused(Status::UNREACHABLE), "two", two);
                assert!(matches!(copies.flush(again), Posted::Later));
            }
            order.push(ended.companion);
        };
        assert_eq!(copies.reap(hand_over), 2);
        assert_eq!(copies.reap(|ended| order.push(ended.companion)), 2);
        assert_eq!(order, [Some("one"), None, Some("two"), None]);
    }
}
