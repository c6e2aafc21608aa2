//! A copy in flight. Its pieces are submitted step by step, as permits and slots become free. Starting and
//! polling never block; [`Transfer::wait`] does.

use std::sync::Arc;

use hl_thunk::packet::LinDma;
use smallvec::SmallVec;

use super::located::Place;
use super::route::{ANYTHING, Piece, Pieces, Step, route};
use super::{Segment, SubmitError};
use crate::pin::PinRef;
use crate::process::Notifier;
use crate::stats::Tally;
use crate::submit::engine::SubmitPermit;
use crate::submit::host_copy::copy_in;
use crate::submit::slab::{Slot, SlotPool};
use crate::submit::submission::{CopyOut, Guard, Moves, Resources, Submission};
use crate::{Device, DeviceAddr, Error};

/// A copy in flight.
///
/// Dropping it before it has finished abandons it: no more pieces are submitted, and the CPU does not write
/// to host memory any more. Pieces that were already submitted run to their end, and their resources are
/// kept until then.
#[derive(Debug)]
#[must_use = "a copy that is not polled is never known to be complete"]
pub struct Transfer {
    device: Arc<Device>,
    /// Pieces that are not submitted yet; the last is the next to submit.
    waiting: Pieces,
    /// Submissions in flight.
    active: SmallVec<[Active; 1]>,
    failure: Option<Error>,
    outcome: Option<Result<(), Error>>,
}

#[derive(Debug)]
struct Active {
    submission: Arc<Submission>,
    /// The device that runs it.
    on: Arc<Device>,
    forward: Option<Forward>,
}

/// The step of another device that follows when this submission has ended.
#[derive(Debug)]
struct Forward {
    slot: Arc<Slot>,
    target: Arc<Device>,
    dst: DeviceAddr,
    len: usize,
}

/// The moves of one submission, and what belongs to them.
#[derive(Default)]
struct Batch {
    moves: Moves,
    resources: Resources,
    forward: Option<Forward>,
    /// Bytes that the CPU copies.
    bounced: usize,
    tally: Tally,
}

/// The most that the CPU copies for one submission, so that it fills the next one while the device runs this one.
const MOST_BOUNCED: usize = 4 << 20;

impl Batch {
    /// Keeps a slot and its pin until the submission has ended. Returns the slot's device address.
    fn use_slot(&mut self, on: &Arc<Device>, slot: &Arc<Slot>) -> Result<DeviceAddr, Error> {
        let (addr, pin) = slot.pin(on)?;
        self.resources.guards.push(Guard::Pin(PinRef::Owned(pin)));
        self.resources.guards.push(Guard::Slot(slot.in_flight()));
        Ok(addr)
    }
}

/// Whether steps were routed just now, so that the lookup of their device memory is still valid, or have waited since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Routed {
    Now,
    Earlier,
}

impl Device {
    /// Starts a copy of all `segments` and returns at once. The order of the segments, and of different
    /// transfers, is undefined.
    ///
    /// Device sides may also be memory of other open devices, which then run part of the copy; between
    /// two devices the bytes travel through pinned host memory.
    ///
    /// # Safety
    /// Until the transfer has finished or was dropped, host sides must be valid for the access
    /// (reads for sources, writes for destinations), and nothing else may write the sources or access
    /// the destinations. Host memory of a dropped, unfinished transfer must not be used for
    /// anything else until the device is idle ([`Device::drain`]).
    pub unsafe fn copy(self: &Arc<Self>, segments: &[Segment]) -> Result<Transfer, SubmitError> {
        let failed = |error| SubmitError::Failed(self.failed(error));
        let rule = self.copy_limits().map_err(failed)?.rule;
        // Before routing: pinning for a copy that cannot start would be wasted work.
        let permit = self.engine().try_permit().ok_or(SubmitError::Busy)?;
        // `route` copies the bytes that break the rule, and waits for other permits. Release ours first: a thread
        // that holds one permit while it waits for another can deadlock.
        let permit = (rule == ANYTHING).then_some(permit);
        let mut pieces = Pieces::new();
        for Segment { dst, src, len, host_region } in segments.iter().filter(|it| it.len > 0) {
            let end = |side| Place::of_side(self, side, *len)?.end(self);
            let ends = end(*dst).and_then(|dst| Ok((dst, end(*src)?))).map_err(failed)?;
            // SAFETY: the caller's promise.
            unsafe { route(self, &ends, *len, host_region.as_deref(), rule, &mut pieces) }
                .map_err(failed)?;
        }
        let transfer = Transfer::submit(self, pieces, permit).map_err(failed)?;
        if transfer.active.is_empty() && !transfer.waiting.is_empty() {
            return Err(SubmitError::Busy);
        }
        for segment in segments {
            if let Some(region) = &segment.host_region {
                region.count_copy(&**self, segment.len);
            }
        }
        Ok(transfer)
    }
}

impl Transfer {
    /// Submits as many of the pieces, which were routed just now, as there are permits for. Uses `permit`
    /// first, if it belongs to the right device.
    pub(super) fn submit(
        device: &Arc<Device>,
        mut pieces: Pieces,
        permit: Option<SubmitPermit<'_>>,
    ) -> Result<Self, Error> {
        pieces.reverse();
        let mut transfer = Self {
            device: Arc::clone(device),
            waiting: pieces,
            active: SmallVec::new(),
            failure: None,
            outcome: None,
        };
        transfer.failure = match transfer.launch(Routed::Now, permit) {
            Err(error) if transfer.active.is_empty() => return Err(error),
            launched => launched.err(),
        };
        transfer.conclude();
        Ok(transfer)
    }

    /// The outcome of the copy, if it has finished. Never blocks. After the first `Some` the result
    /// stays the same.
    pub fn poll(&mut self) -> Option<Result<(), Error>> {
        if self.outcome.is_none() && !self.device.is_ours() {
            // A forked child: it may have inherited locks of the submissions in the locked state.
            self.outcome = Some(Err(self.device.failed(Error::forked("copying"))));
        } else if self.outcome.is_none() {
            self.collect();
            // After a failure nothing more is submitted.
            if self.failure.is_none() {
                self.failure = self.launch(Routed::Earlier, None).err();
            }
            self.conclude();
        }
        self.outcome.clone()
    }

    /// Waits until the copy has finished.
    pub fn wait(&mut self) -> Result<(), Error> {
        loop {
            if let Some(outcome) = self.poll() {
                return outcome;
            }
            match (self.active.first(), self.waiting.last()) {
                (Some(active), _) => drop(active.on.engine().wait(&active.submission)),
                // Other transfers have all permits or slots of the device.
                (None, Some(piece)) => piece.on.engine().wait_for_oldest(),
                (None, None) => {}
            }
        }
    }

    /// Notifies when [`Transfer::poll`] may make progress. Returns `false`, and will not notify, if only
    /// polling advances this transfer.
    ///
    /// Completions before this call do not notify: call [`Transfer::has_news`] after it, and only then
    /// sleep.
    pub fn notify_when_done(&self, notifier: &Arc<Notifier>) -> bool {
        let mut devices: Vec<&Arc<Device>> = Vec::new();
        for device in self.working() {
            if !devices.iter().any(|other| other.id() == device.id()) {
                devices.push(device);
            }
        }
        !devices.is_empty()
            && devices.into_iter().all(|device| device.notify_on_completion(notifier))
    }

    /// Whether [`Transfer::poll`] would advance it. Never blocks.
    pub fn has_news(&self) -> bool {
        if !self.device.is_ours() {
            return true;
        }
        let ended = |active: &Active| active.on.engine().poll(&active.submission, 0).is_some();
        match self.waiting.last() {
            _ if self.active.iter().any(ended) => true,
            Some(piece) if self.active.is_empty() => piece.on.can_submit(),
            Some(_) => false,
            None => self.active.is_empty(),
        }
    }

    /// The devices with submissions of this transfer. If there is none, the device whose permit it needs.
    fn working(&self) -> impl Iterator<Item = &Arc<Device>> {
        let waiting = self.waiting.last().filter(|_| self.active.is_empty());
        let active = self.active.iter().map(|active| &active.on);
        active.chain(waiting.map(|piece| &piece.on))
    }

    /// Removes the submissions that have ended.
    fn collect(&mut self) {
        let mut at = 0;
        while at < self.active.len() {
            let active = &self.active[at];
            let Some(outcome) = active.on.engine().poll(&active.submission, 0) else {
                at += 1;
                continue;
            };
            if let Err(error) = outcome {
                let error = error.clone().on(&active.on);
                self.failure.get_or_insert(error);
            }
            let active = self.active.swap_remove(at);
            if let Some(Forward { slot, target, dst, len }) = active.forward {
                // Next in line, before pieces that have not started, so that its slot is soon free again.
                let step = Step::Forward { slot, dst, len };
                self.waiting.push(Piece { on: target, step });
            }
        }
    }

    /// Submits as many pieces as there are permits and slots for. Batches pieces of one direction on one device.
    fn launch(
        &mut self,
        routed: Routed,
        mut permit: Option<SubmitPermit<'_>>,
    ) -> Result<(), Error> {
        while let Some(front) = self.waiting.last() {
            let (on, direction) = (Arc::clone(&front.on), front.step.direction());
            let permit = permit.take().filter(|permit| permit.is_of(on.engine()));
            let Some(permit) = permit.or_else(|| on.engine().try_permit()) else { break };
            let limit = on.engine().limits().map_err(Clone::clone)?.moves;
            let mut batch = Batch::default();
            let fits =
                |piece: &Piece| piece.on.id() == on.id() && piece.step.direction() == direction;
            while batch.moves.len() < limit
                && self.waiting.last().is_some_and(fits)
                && let Some(Piece { step, .. }) = self.waiting.pop()
            {
                if routed == Routed::Earlier {
                    step.check_live(&self.device)?;
                }
                if let Some(step) = self.add(&on, step, &mut batch)? {
                    self.waiting.push(Piece { on: Arc::clone(&on), step });
                    break;
                }
            }
            let Batch { moves, resources, forward, tally, .. } = batch;
            if moves.is_empty() {
                break;
            }
            // SAFETY: pins and slots are in `resources`; device memory was just found to be allocated or imported, and
            // the caller of the copy keeps host memory valid.
            let submission = unsafe { permit.submit(direction, moves, resources, tally) }
                .map_err(|error| error.on(&on))?;
            self.active.push(Active { submission, on, forward });
        }
        Ok(())
    }

    /// Adds a step to a batch; returns it if no slot is free for it.
    fn add(&self, on: &Arc<Device>, step: Step, batch: &mut Batch) -> Result<Option<Step>, Error> {
        let (direction, path, bytes) = (step.direction(), step.path(), step.len());
        let dma = match step {
            Step::Direct { dma, pin, .. } => {
                batch.resources.guards.extend(pin.map(Guard::Pin));
                dma
            }
            Step::BounceIn { len, .. } | Step::BounceOut { len, .. }
                if batch.bounced > 0 && batch.bounced + len > MOST_BOUNCED =>
            {
                return Ok(Some(step));
            }
            Step::BounceIn { from, dst, len, guarded } => {
                let Some(slot) = take_slot(on, on.bounce()?, len)? else { return Ok(Some(step)) };
                // SAFETY: the caller of the copy keeps the host side valid; only we have the slot.
                unsafe { copy_in(from, slot.ptr(), len, guarded)? };
                batch.bounced += len;
                LinDma::Copy { src: batch.use_slot(on, &slot)?, dst, len: len as u32 }
            }
            Step::BounceOut { to, src, len, guarded } => {
                let Some(slot) = take_slot(on, on.bounce()?, len)? else { return Ok(Some(step)) };
                let dst = batch.use_slot(on, &slot)?;
                batch.bounced += len;
                batch.resources.copy_outs.push(CopyOut { slot, to, len, guarded });
                LinDma::Copy { src, dst, len: len as u32 }
            }
            Step::Stage { ref target, src, dst, len } => {
                // One piece per submission, so that its second half overlaps with the next piece's first half.
                if !batch.moves.is_empty() {
                    return Ok(Some(step));
                }
                let Some(slot) = take_slot(on, self.device.staging()?, len)? else {
                    return Ok(Some(step));
                };
                let stage = batch.use_slot(on, &slot)?;
                let target = Arc::clone(target);
                batch.forward = Some(Forward { slot, target, dst, len });
                LinDma::Copy { src, dst: stage, len: len as u32 }
            }
            Step::Forward { slot, dst, len } => {
                LinDma::Copy { src: batch.use_slot(on, &slot)?, dst, len: len as u32 }
            }
        };
        batch.moves.push(dma);
        batch.tally.add(direction, path, bytes);
        Ok(None)
    }

    fn conclude(&mut self) {
        if self.failure.is_some() {
            self.waiting.clear();
        }
        if self.active.is_empty() && self.waiting.is_empty() && self.outcome.is_none() {
            let failure = self.failure.take().map(|error| self.device.failed(error));
            self.outcome = Some(failure.map_or(Ok(()), Err));
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.device.is_ours() {
            self.active.iter().for_each(|active| active.submission.abandon());
        }
    }
}

/// Takes a slot of the pool. If all slots belong to transfers whose owners have yet to poll, and may never
/// do so, allocates one for this copy. `None`: the hardware is using slots of the pool.
fn take_slot(on: &Device, pool: &Arc<SlotPool>, len: usize) -> Result<Option<Arc<Slot>>, Error> {
    let taken = pool.take().or_else(|| {
        // Submissions that have ended, but were not polled, also keep slots. They may be on any device.
        for device in on.registry().devices() {
            device.progress();
        }
        pool.take()
    });
    match taken {
        Some(slot) => Ok(Some(slot)),
        None if pool.is_idle() => Ok(SlotPool::new(len, 1)?.take()),
        None => Ok(None),
    }
}
