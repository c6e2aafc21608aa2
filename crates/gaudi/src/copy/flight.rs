//! One submission: what it moves, what it needs until it is done, and how it ended.
//!
//! Any thread that finds that a submission has ended completes it: it copies bounce buffers out,
//! releases pins and the permit, and wakes sleepers. If that were left to the thread that submitted
//! it, a worker that stops making progress would starve the others. A transfer that is dropped takes
//! its host memory out of the flight first, under the flight's lock.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use hl_thunk::packet::LinDma;
use smallvec::SmallVec;

use super::host_copy::copy_out;
use super::plan::HostPtr;
use super::ring::Slot;
use crate::backend::Ticket;
use crate::pin::PinRef;
use crate::stats::Tally;
use crate::{DeviceAddr, Error};

/// Something that must live until the hardware is done: a pin, a bounce slot.
#[allow(dead_code, reason = "held, not looked at")]
pub(crate) enum Hold {
    Pin(PinRef),
    Slot(Arc<dyn Any + Send + Sync>),
}

/// Most submissions have one move, and a pin or a slot and its pin: they need no memory beside.
pub(crate) type Moves = SmallVec<[LinDma; 1]>;
pub(crate) type Holds = SmallVec<[Hold; 2]>;

/// What has to be taken out of a bounce slot when the hardware has filled it.
#[derive(Debug)]
pub(crate) struct CopyOut {
    pub(crate) slot: Arc<Slot>,
    pub(crate) to: HostPtr,
    pub(crate) len: usize,
    pub(crate) guarded: bool,
}

/// One submission.
pub(crate) struct Flight {
    pub(crate) ticket: Ticket,
    moves: Moves,
    tally: Tally,
    outcome: OnceLock<Result<(), Error>>,
    load: Mutex<Load>,
    /// How often the oldest of the lane had been looked at when this one was last asked about.
    seen: AtomicU64,
}

/// What a submission carries with it until it has ended.
#[derive(Default)]
pub(crate) struct Load {
    pub(crate) holds: Holds,
    pub(crate) outs: SmallVec<[CopyOut; 1]>,
}

impl std::fmt::Debug for Flight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flight").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}

impl Flight {
    /// `looks`: how often the oldest of the lane was looked at so far.
    pub(crate) fn new(ticket: Ticket, moves: Moves, tally: Tally, load: Load, looks: u64) -> Self {
        let (outcome, seen) = (OnceLock::new(), AtomicU64::new(looks));
        Self { ticket, moves, tally, outcome, load: Mutex::new(load), seen }
    }

    /// Whether the oldest of the lane was looked at, which makes `looks` times, since this one was
    /// last asked about.
    pub(crate) fn was_preceded(&self, looks: u64) -> bool {
        self.seen.swap(looks, Ordering::Relaxed) != looks
    }

    fn load(&self) -> MutexGuard<'_, Load> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it ended, if it has.
    pub(crate) fn outcome(&self) -> Option<&Result<(), Error>> {
        self.outcome.get()
    }

    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The hardware is done. Empties the bounce slots, whoever's thread this is, so that a transfer
    /// which nobody polls does not keep them from others; gives what was needed, to be dropped
    /// without a lock. `None` if another thread has been here already.
    pub(crate) fn land(&self, ended: Result<(), Error>) -> Option<Holds> {
        let mut load = self.load();
        if self.outcome.get().is_some() {
            return None;
        }
        let outs = std::mem::take(&mut load.outs);
        let outcome = ended.and_then(|()| {
            outs.iter().try_for_each(|out| {
                // SAFETY: the caller of the copy answers for the host side as long as the transfer
                // lives, and a transfer that goes takes this away first, under the lock we hold;
                // the slot is ours and the device is done with it.
                unsafe { copy_out(out.slot.ptr(), out.to, out.len, out.guarded) }
            })
        });
        let _ = self.outcome.set(outcome);
        Some(std::mem::take(&mut load.holds))
    }

    /// Its transfer goes: nothing may be written to host memory by the CPU from now on.
    pub(crate) fn abandon(&self) {
        let outs = std::mem::take(&mut self.load().outs);
        drop(outs);
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
