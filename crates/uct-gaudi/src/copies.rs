//! The copies an interface has under way, in the order they were posted.
//!
//! UCP's staging protocols take a copy transport's word that copies succeed: neither a refusal
//! (`NO_RESOURCE`) nor an error of a copy in progress is looked at, and the message goes on with
//! whatever bytes were there before. So a copy for which the device has no room waits here and
//! starts from progress, and one that failed is tried once more before anyone hears of it.
//!
//! Between processes failures are looked at: [`OnFailure::Report`] hands every one of them on.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

use gaudi::{Bell, Device, Error, Segment, SubmitError, Transfer};
use uct::{Completion, Posted, Status};

/// What becomes of a copy that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnFailure {
    /// It is tried once more.
    TryAgain,
    /// Whoever posted it hears of it.
    Report,
}

/// Why an operation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The engine could not do it.
    Copy(Error),
    /// It was refused before the engine heard of it, and the reason logged.
    Refused(Status),
}

/// What to copy, and what has to live until it is done.
struct Copy<T> {
    device: Arc<Device>,
    segments: Vec<Segment>,
    companion: T,
}

// SAFETY: the host pointers in the segments belong to an operation of UCX, which keeps them valid
// until its completion, whichever thread progresses the worker.
unsafe impl<T: Send> Send for Copy<T> {}

/// How far starting a copy got.
enum Start {
    Ended(Result<(), Error>),
    Running(Box<Transfer>),
    NoRoom,
}

impl<T> Copy<T> {
    /// # Safety
    /// As for [`Device::copy`].
    unsafe fn start(&self, on_failure: OnFailure) -> Start {
        // SAFETY: as the caller promises.
        match unsafe { self.device.copy(&self.segments) } {
            Ok(mut transfer) => match transfer.poll() {
                // SAFETY: as the caller promises.
                Some(result) => Start::Ended(unsafe { self.settle(result, on_failure) }),
                None => Start::Running(Box::new(transfer)),
            },
            Err(SubmitError::Busy) => Start::NoRoom,
            Err(SubmitError::Failed(error)) => {
                // SAFETY: as the caller promises.
                Start::Ended(unsafe { self.settle(Err(error), on_failure) })
            }
        }
    }

    /// Takes a result for good, or tries once more, waiting for the end, if it is a failure.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    unsafe fn settle(&self, result: Result<(), Error>, on_failure: OnFailure) -> Result<(), Error> {
        let Err(first) = result else { return Ok(()) };
        if on_failure == OnFailure::Report {
            return Err(first);
        }
        let again = self.segments.iter().try_for_each(|segment| {
            // SAFETY: as the caller promises.
            unsafe { self.device.copy_blocking(segment.dst, segment.src, segment.len) }
        });
        // What went wrong first says more than what went wrong after it.
        again.map_err(|_| first)
    }
}

enum Entry<T> {
    Running(Box<Transfer>, Copy<T>, Completion),
    /// The device has no room for it yet, or a fence holds it back.
    Waiting(Copy<T>, Completion),
    /// Over; its completion waits for progress.
    Ended(Result<(), Failure>, Completion, T),
    /// Ends when everything in front of it has ended.
    Flush(Completion),
    /// Nothing behind it starts before everything in front of it has ended.
    Fence,
}

/// An entry that only the hardware can get on.
#[derive(Clone, Copy)]
enum UnderWay<'a> {
    Running(&'a Transfer),
    /// Room for it comes when something on its device ends.
    Waiting(&'a Device),
}

impl UnderWay<'_> {
    fn ring(self, bell: &Arc<Bell>) -> bool {
        match self {
            UnderWay::Running(transfer) => transfer.ring_when_done(bell),
            UnderWay::Waiting(device) => device.ring_on_completion(bell),
        }
    }

    fn has_news(self) -> bool {
        match self {
            UnderWay::Running(transfer) => transfer.has_news(),
            UnderWay::Waiting(device) => device.has_room(),
        }
    }
}

/// What came of an operation that ended.
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

/// Operations under way. Used under the worker's lock; no borrow outlives a call here, so that
/// UCX's callbacks may post more. `T` goes with each copy until it has ended.
pub(crate) struct Copies<T> {
    on_failure: OnFailure,
    entries: RefCell<VecDeque<Entry<T>>>,
    /// Waiting copies and fences among the entries: while there are any, new copies wait too.
    holding_back: Cell<usize>,
    fences: Cell<usize>,
}

impl<T> Copies<T> {
    pub(crate) fn new(on_failure: OnFailure) -> Self {
        Copies {
            on_failure,
            entries: RefCell::default(),
            holding_back: Cell::new(0),
            fences: Cell::new(0),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.entries.borrow().is_empty()
    }

    /// Holds back what comes until what is under way has ended.
    pub(crate) fn fence(&self) {
        let mut entries = self.entries.borrow_mut();
        if !matches!(entries.back(), None | Some(Entry::Fence)) {
            entries.push_back(Entry::Fence);
            self.holding_back.set(self.holding_back.get() + 1);
            self.fences.set(self.fences.get() + 1);
        }
    }

    /// Starts a copy, now or when there is room. One that cannot be started is given back.
    ///
    /// # Safety
    /// As for [`Device::copy`], until the completion is finished.
    pub(crate) unsafe fn post(
        &self,
        device: Arc<Device>,
        segments: Vec<Segment>,
        companion: T,
        completion: Completion,
    ) -> Result<Posted, NotStarted<T>> {
        let copy = Copy { device, segments, companion };
        let started = if self.holding_back.get() > 0 {
            Start::NoRoom
        } else {
            // SAFETY: as the caller promises.
            unsafe { copy.start(self.on_failure) }
        };
        let entry = match started {
            Start::Ended(Ok(())) => return Ok(Posted::Done(completion)),
            Start::Ended(Err(error)) => {
                let companion = copy.companion;
                return Err(NotStarted { error, companion, completion });
            }
            Start::Running(transfer) => Entry::Running(transfer, copy, completion),
            Start::NoRoom => {
                self.holding_back.set(self.holding_back.get() + 1);
                Entry::Waiting(copy, completion)
            }
        };
        self.entries.borrow_mut().push_back(entry);
        Ok(Posted::Later)
    }

    /// Takes an operation that has failed already: its completion hears of it from progress.
    pub(crate) fn fail(&self, why: Failure, companion: T, completion: Completion) -> Posted {
        self.entries.borrow_mut().push_back(Entry::Ended(Err(why), completion, companion));
        Posted::Later
    }

    /// Completes when everything so far has.
    pub(crate) fn flush(&self, completion: Completion) -> Posted {
        if self.is_idle() {
            return Posted::Done(completion);
        }
        if completion.is_wanted() {
            self.entries.borrow_mut().push_back(Entry::Flush(completion));
        }
        Posted::Later
    }

    /// Waits until no fence holds anything back. Completions wait for progress: a caller that must
    /// not return before the copies have ended may be inside an operation of another transport.
    pub(crate) fn wait_for_fences(&self) {
        while self.fences.get() > 0 {
            self.advance();
        }
    }

    /// Takes out what has ended and starts what there is room for. Never blocks.
    pub(crate) fn reap(&self) -> Vec<Ended<T>> {
        self.advance();
        let mut ended = Vec::new();
        let mut running_before = false;
        self.entries.borrow_mut().retain_mut(|entry| {
            let keep = match entry {
                Entry::Ended(..) => false,
                Entry::Flush(_) => running_before,
                Entry::Running(..) | Entry::Waiting(..) | Entry::Fence => true,
            };
            running_before |= matches!(entry, Entry::Running(..) | Entry::Waiting(..));
            if !keep {
                match core::mem::replace(entry, Entry::Fence) {
                    Entry::Ended(result, completion, companion) => {
                        ended.push(Ended { completion, result, companion: Some(companion) });
                    }
                    Entry::Flush(completion) => {
                        ended.push(Ended { completion, result: Ok(()), companion: None });
                    }
                    Entry::Running(..) | Entry::Waiting(..) | Entry::Fence => {}
                }
            }
            keep
        });
        ended
    }

    /// Whether the bell will ring when there is something for [`Copies::reap`] to do. `false`: do not
    /// sleep, reap.
    pub(crate) fn ring_when_ready(&self, bell: &Arc<Bell>) -> bool {
        self.advance();
        let entries = self.entries.borrow();
        let mut under_way = entries.iter().filter_map(|entry| match entry {
            Entry::Running(transfer, ..) => Some(UnderWay::Running(transfer)),
            Entry::Waiting(copy, _) => Some(UnderWay::Waiting(&copy.device)),
            // Over when the others are.
            Entry::Ended(..) | Entry::Flush(_) | Entry::Fence => None,
        });
        let ended = entries.iter().any(|entry| matches!(entry, Entry::Ended(..)));
        let nothing = under_way.clone().next().is_none();
        // Looked at again after the bell is in place: what happens from there on rings.
        !ended
            && !nothing
            && under_way.clone().all(|entry| entry.ring(bell))
            && !under_way.any(|entry| entry.has_news())
    }

    /// Looks at what is running, starts what can start, takes fences down.
    fn advance(&self) {
        let (mut running_before, mut held_back) = (false, false);
        let (mut holding_back, mut fences) = (0, 0);
        self.entries.borrow_mut().retain_mut(|entry| {
            // Looked at through a stand-in, so that an entry can turn into another.
            let next = match core::mem::replace(entry, Entry::Fence) {
                Entry::Running(mut transfer, copy, completion) => match transfer.poll() {
                    Some(result) => {
                        // SAFETY: promised when the copy was posted, until its completion.
                        let result = unsafe { copy.settle(result, self.on_failure) };
                        Entry::Ended(result.map_err(Failure::Copy), completion, copy.companion)
                    }
                    None => Entry::Running(transfer, copy, completion),
                },
                Entry::Waiting(copy, completion) if !held_back => {
                    // SAFETY: promised when the copy was posted, until its completion.
                    match unsafe { copy.start(self.on_failure) } {
                        Start::Ended(result) => {
                            Entry::Ended(result.map_err(Failure::Copy), completion, copy.companion)
                        }
                        Start::Running(transfer) => Entry::Running(transfer, copy, completion),
                        Start::NoRoom => Entry::Waiting(copy, completion),
                    }
                }
                Entry::Fence if !running_before => return false,
                other => other,
            };
            running_before |= matches!(next, Entry::Running(..) | Entry::Waiting(..));
            held_back |= matches!(next, Entry::Waiting(..) | Entry::Fence);
            holding_back += usize::from(matches!(next, Entry::Waiting(..) | Entry::Fence));
            fences += usize::from(matches!(next, Entry::Fence));
            *entry = next;
            true
        });
        self.holding_back.set(holding_back);
        self.fences.set(fences);
    }
}

impl<T> Drop for Copies<T> {
    /// The interface is closed, and with it the memory of its operations may go: what the hardware
    /// was told to do must be over first.
    fn drop(&mut self) {
        for entry in self.entries.get_mut() {
            if let Entry::Running(transfer, ..) = entry {
                // Nobody is left to hear of a failure.
                let _ = transfer.wait();
            }
        }
    }
}
