//! The copies an interface has under way, in the order they were posted.
//!
//! UCP's staging protocols take a copy transport's word that there is always room: a refusal
//! (`NO_RESOURCE`) is counted as success, with whatever bytes were there before. So a copy for which
//! the device has no room waits here, and starts from progress.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use gaudi::{Device, Error, Segment, SubmitError, Transfer};
use uct::{Completion, Posted};

/// A copy that the device has no room for yet, or that a fence holds back.
struct Waiting {
    device: Arc<Device>,
    segments: Vec<Segment>,
}

// SAFETY: the host pointers in the segments belong to an operation of UCX, which keeps them valid
// until its completion, whichever thread progresses the worker.
unsafe impl Send for Waiting {}

#[expect(clippy::large_enum_variant, reason = "nearly all entries are running copies")]
enum Entry {
    Running(Transfer, Completion),
    Waiting(Waiting, Completion),
    /// Ends when everything in front of it has ended.
    Flush(Completion),
    /// Nothing behind it starts before everything in front of it has ended.
    Fence,
}

/// What came of an operation that ended.
pub(crate) type Ended = (Completion, Result<(), Error>);

/// Operations under way. Used under the worker's lock; no borrow outlives a call here, so that
/// UCX's callbacks may post more.
#[derive(Default)]
pub(crate) struct Copies {
    entries: RefCell<VecDeque<Entry>>,
}

/// How far starting a copy got.
enum Start {
    Ended(Result<(), Error>),
    Running(Transfer),
    NoRoom,
}

/// # Safety
/// As for [`Device::copy`].
unsafe fn start(waiting: &Waiting) -> Start {
    // SAFETY: as the caller promises.
    match unsafe { waiting.device.copy(&waiting.segments) } {
        Ok(mut transfer) => match transfer.poll() {
            Some(result) => Start::Ended(result),
            None => Start::Running(transfer),
        },
        Err(SubmitError::Busy) => Start::NoRoom,
        Err(SubmitError::Failed(error)) => Start::Ended(Err(error)),
    }
}

impl Copies {
    pub(crate) fn is_idle(&self) -> bool {
        self.entries.borrow().is_empty()
    }

    /// Whether a fence holds back what is posted now.
    pub(crate) fn is_fenced(&self) -> bool {
        self.entries.borrow().iter().any(|entry| matches!(entry, Entry::Fence))
    }

    /// Holds back what comes until what is under way has ended.
    pub(crate) fn fence(&self) {
        let mut entries = self.entries.borrow_mut();
        if !matches!(entries.back(), None | Some(Entry::Fence)) {
            entries.push_back(Entry::Fence);
        }
    }

    /// Starts a copy, now or when there is room.
    ///
    /// # Safety
    /// As for [`Device::copy`], until the completion is finished.
    pub(crate) unsafe fn post(
        &self,
        device: Arc<Device>,
        segments: Vec<Segment>,
        completion: Completion,
    ) -> Result<Posted, Error> {
        let waiting = Waiting { device, segments };
        let mut entries = self.entries.borrow_mut();
        let held_back =
            entries.iter().any(|entry| matches!(entry, Entry::Waiting(..) | Entry::Fence));
        // SAFETY: as the caller promises.
        let started = if held_back { Start::NoRoom } else { unsafe { start(&waiting) } };
        match started {
            Start::Ended(result) => return result.map(|()| Posted::Done(completion)),
            Start::Running(transfer) => entries.push_back(Entry::Running(transfer, completion)),
            Start::NoRoom => entries.push_back(Entry::Waiting(waiting, completion)),
        }
        Ok(Posted::Later)
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

    /// Takes out what has ended and starts what there is room for. Never blocks.
    pub(crate) fn reap(&self) -> Vec<Ended> {
        let mut ended = Vec::new();
        let mut entries = self.entries.borrow_mut();
        let mut kept = VecDeque::with_capacity(entries.len());
        let mut running_before = false;
        let mut held_back = false;
        for entry in entries.drain(..) {
            let keep = match entry {
                Entry::Running(mut transfer, completion) => match transfer.poll() {
                    Some(result) => {
                        ended.push((completion, result));
                        None
                    }
                    None => Some(Entry::Running(transfer, completion)),
                },
                Entry::Waiting(waiting, completion) if !held_back => {
                    // SAFETY: promised when the copy was posted, until its completion.
                    match unsafe { start(&waiting) } {
                        Start::Ended(result) => {
                            ended.push((completion, result));
                            None
                        }
                        Start::Running(transfer) => Some(Entry::Running(transfer, completion)),
                        Start::NoRoom => {
                            held_back = true;
                            Some(Entry::Waiting(waiting, completion))
                        }
                    }
                }
                Entry::Flush(completion) if !running_before => {
                    ended.push((completion, Ok(())));
                    None
                }
                Entry::Fence if running_before => {
                    held_back = true;
                    Some(Entry::Fence)
                }
                Entry::Fence => None,
                entry @ (Entry::Waiting(..) | Entry::Flush(_)) => Some(entry),
            };
            running_before |= matches!(keep, Some(Entry::Running(..) | Entry::Waiting(..)));
            kept.extend(keep);
        }
        *entries = kept;
        ended
    }
}
