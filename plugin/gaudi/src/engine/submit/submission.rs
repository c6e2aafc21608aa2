//! One submission: its moves, the resources it needs until it ends, and its outcome.
//!
//! Any thread that finds that a submission has ended completes it: it copies bounce buffers out,
//! releases pins and the permit, and wakes sleepers. If only the submitting thread did that, a worker
//! that stops making progress would starve the others. A transfer that is dropped first removes its
//! host memory from the submission, under the submission's lock, so that no other thread writes to it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hl_thunk::packet::LinDma;
use smallvec::SmallVec;

use super::host_copy::HostPtr;
use super::host_copy::copy_out;
use super::slab::{Slot, SlotInFlight};
use crate::backend::Ticket;
use crate::pin::PinRef;
use crate::stats::Tally;
use crate::{DeviceAddr, Error};

/// A resource that must live until the hardware is done.
#[allow(dead_code, reason = "kept for its destructor")]
pub(crate) enum Guard {
    Pin(PinRef),
    Slot(SlotInFlight),
}

/// Most submissions have one move, and either a pin or a slot and its pin: these need no allocation.
pub(crate) type Moves = SmallVec<[LinDma; 1]>;
pub(crate) type Guards = SmallVec<[Guard; 2]>;

/// What the CPU copies out of a bounce slot when the hardware has filled it.
#[derive(Debug)]
pub(crate) struct CopyOut {
    pub(crate) slot: Arc<Slot>,
    pub(crate) to: HostPtr,
    pub(crate) len: usize,
    pub(crate) guarded: bool,
}

/// What a submission needs until it is done.
#[derive(Default)]
pub(crate) struct Resources {
    pub(crate) guards: Guards,
    pub(crate) copy_outs: SmallVec<[CopyOut; 1]>,
}

/// One submission.
pub(crate) struct Submission {
    pub(crate) ticket: Ticket,
    moves: Moves,
    tally: Tally,
    outcome: OnceLock<Result<(), Error>>,
    resources: Mutex<Resources>,
    /// The lane's number of polls when this submission was last polled.
    seen_polls: AtomicU64,
}

impl std::fmt::Debug for Submission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Submission").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

impl Submission {
    /// `polls`: how often the lane's oldest submission was polled and was still running, so far.
    pub(crate) fn new(
        ticket: Ticket,
        moves: Moves,
        tally: Tally,
        resources: Resources,
        polls: u64,
    ) -> Self {
        let (outcome, seen_polls) = (OnceLock::new(), AtomicU64::new(polls));
        Self { ticket, moves, tally, outcome, resources: Mutex::new(resources), seen_polls }
    }

    /// Whether the lane's oldest submission was polled since the last call. `polls`: the lane's present number
    /// of polls.
    pub(crate) fn lane_was_polled(&self, polls: u64) -> bool {
        self.seen_polls.swap(polls, Ordering::Relaxed) != polls
    }

    fn resources(&self) -> MutexGuard<'_, Resources> {
        self.resources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its outcome, if it has ended.
    pub(crate) fn outcome(&self) -> Option<&Result<(), Error>> {
        self.outcome.get()
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The hardware is done: copies out of the bounce slots. The thread that noticed does that, so that a
    /// transfer that is not polled does not keep slots from others. Returns the guards; drop them while no
    /// lock is held. `None` if another thread has completed it already.
    pub(crate) fn complete(&self, ended: Result<(), Error>) -> Option<Guards> {
        let mut resources = self.resources();
        if self.outcome.get().is_some() {
            return None;
        }
        // Cleared only after they were copied: after a panic here the next thread copies them.
        let outcome = ended.and_then(|()| {
            resources.copy_outs.iter().try_for_each(|out| {
                // SAFETY: the caller of the copy keeps the host side valid as long as the transfer
                // lives; a transfer that is dropped removes the copy-outs first, under the lock we
                // hold. The slot is ours and the device is done with it.
                unsafe { copy_out(out.slot.ptr(), out.to, out.len, out.guarded) }
            })
        });
        let _ = self.outcome.set(outcome);
        resources.copy_outs.clear();
        Some(std::mem::take(&mut resources.guards))
    }

    /// Its transfer is being dropped: from now on the CPU must not write to the host memory.
    pub(crate) fn abandon(&self) {
        let copy_outs = std::mem::take(&mut self.resources().copy_outs);
        drop(copy_outs);
    }

    /// Whether the device reads or writes an address of `range`.
    pub(crate) fn touches(&self, range: &Range<u64>) -> bool {
        let overlaps = |start: DeviceAddr, len: u32| {
            start.0 < range.end && range.start < start.0.saturating_add(u64::from(len))
        };
        self.moves.iter().any(|dma| match *dma {
            LinDma::Copy { src, dst, len } => overlaps(src, len) || overlaps(dst, len),
            LinDma::Fill { dst, len, .. } => overlaps(dst, len),
        })
    }
}
