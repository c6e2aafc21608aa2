//! A copy under way: a plan that is carried out step by step, never blocking, as the hardware and
//! the bounce slots allow.

use std::any::Any;
use std::sync::Arc;

use hl_thunk::packet::LinDma;
use smallvec::SmallVec;

use super::flight::{CopyOut, Flight, Hold, Load, Moves};
use super::host_copy::copy_in;
use super::plan::{Piece, Pieces, Step};
use super::ring::{Ring, Slot};
use super::{Segment, SubmitError, plan};
use crate::process::Notifier;
use crate::stats::Tally;
use crate::{Device, DeviceAddr, Error};

/// A copy under way.
///
/// Dropping it before it has finished abandons it: nothing more is started and nothing is written
/// to host memory by the CPU any more; what the hardware was already told to do runs to its end,
/// and everything it needs is kept until then.
#[derive(Debug)]
#[must_use = "a copy that nobody polls is never known to be complete"]
pub struct Transfer {
    device: Arc<Device>,
    /// Not yet started, the next one last.
    waiting: Pieces,
    /// With the hardware.
    active: SmallVec<[Active; 1]>,
    failure: Option<Error>,
    outcome: Option<Result<(), Error>>,
}

#[derive(Debug)]
struct Active {
    flight: Arc<Flight>,
    /// The card that does it.
    on: Arc<Device>,
    forward: Option<Forward>,
}

/// What another card has to do when this one is finished.
#[derive(Debug)]
struct Forward {
    slot: Arc<Slot>,
    target: Arc<Device>,
    dst: DeviceAddr,
    len: usize,
}

/// Moves of one submission and what comes with them.
#[derive(Default)]
struct Batch {
    moves: Moves,
    load: Load,
    forward: Option<Forward>,
    tally: Tally,
}

impl Batch {
    fn hold(&mut self, hold: Arc<dyn Any + Send + Sync>) {
        self.load.holds.push(Hold::Slot(hold));
    }
}

impl Transfer {
    /// Plans and starts a copy.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    pub(crate) unsafe fn start(
        device: &Arc<Device>,
        segments: &[Segment],
        blocking: bool,
    ) -> Result<Self, SubmitError> {
        device.can_copy()?;
        // Pinning for a copy that cannot start would be wasted work: look for room first.
        if !blocking && device.engine().reserve().is_none() {
            return Err(SubmitError::Busy);
        }
        // SAFETY: the caller's promise.
        let mut waiting = unsafe { plan::plan(device, segments)? };
        waiting.reverse();
        let mut transfer = Self {
            device: Arc::clone(device),
            waiting,
            active: SmallVec::new(),
            failure: None,
            outcome: None,
        };
        transfer.launch();
        match transfer.failure.take() {
            Some(error) if transfer.active.is_empty() => return Err(error.into()),
            failure => transfer.failure = failure,
        }
        if transfer.active.is_empty() && !transfer.waiting.is_empty() && !blocking {
            return Err(SubmitError::Busy);
        }
        transfer.conclude();
        Ok(transfer)
    }

    /// Whether the copy has finished, and how. Never blocks. After the first `Some` the answer
    /// stays the same.
    pub fn poll(&mut self) -> Option<Result<(), Error>> {
        if self.outcome.is_none() {
            self.collect();
            self.launch();
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
                (Some(active), _) => drop(active.on.engine().wait(&active.flight)),
                // Other transfers use up the budget of the card.
                (None, Some(piece)) => piece.on.engine().wait_for_oldest(),
                (None, None) => {}
            }
        }
    }

    /// Notifies when there may be something new for [`Transfer::poll`] to see. `false`, and
    /// no notification will come, if only polling gets this transfer on.
    ///
    /// What happened before does not notify: look at [`Transfer::has_news`] after this, and only then
    /// sleep.
    pub fn notify_when_done(&self, notifier: &Arc<Notifier>) -> bool {
        let mut cards: Vec<&Arc<Device>> = Vec::new();
        for card in self.working() {
            if !cards.iter().any(|other| other.id() == card.id()) {
                cards.push(card);
            }
        }
        !cards.is_empty() && cards.into_iter().all(|card| card.notify_on_completion(notifier))
    }

    /// Whether [`Transfer::poll`] would get it on. Never blocks.
    pub fn has_news(&self) -> bool {
        let ended = |active: &Active| active.on.engine().settle(&active.flight, 0).is_some();
        match self.waiting.last() {
            _ if self.active.iter().any(ended) => true,
            Some(piece) if self.active.is_empty() => piece.on.has_room(),
            Some(_) => false,
            None => self.active.is_empty(),
        }
    }

    /// The cards with work in flight for this transfer; without any, the one that has no room.
    fn working(&self) -> impl Iterator<Item = &Arc<Device>> {
        let waiting = self.waiting.last().filter(|_| self.active.is_empty());
        let active = self.active.iter().map(|active| &active.on);
        active.chain(waiting.map(|piece| &piece.on))
    }

    /// Takes in what the hardware has finished.
    fn collect(&mut self) {
        let mut at = 0;
        while at < self.active.len() {
            let active = &self.active[at];
            let Some(outcome) = active.on.engine().settle(&active.flight, 0) else {
                at += 1;
                continue;
            };
            if let Err(error) = outcome {
                let error = error.clone().on(&active.on);
                self.failure.get_or_insert(error);
            }
            let active = self.active.swap_remove(at);
            if let Some(Forward { slot, target, dst, len }) = active.forward {
                // Ahead of what has not started, so that its slot is soon free again.
                let step = Step::Forward { slot, dst, len };
                self.waiting.push(Piece { on: target, step });
            }
        }
    }

    /// Starts as much as the devices and the slots have room for; nothing more once something has
    /// failed.
    fn launch(&mut self) {
        while self.failure.is_none() && !self.waiting.is_empty() {
            match self.launch_batch() {
                Ok(Some(active)) => self.active.push(active),
                Ok(None) => return,
                Err(error) => self.failure = Some(error),
            }
        }
        if self.failure.is_some() {
            self.waiting.clear();
        }
    }

    /// One submission of pieces that go the same way on the same card. `None`: no room.
    fn launch_batch(&mut self) -> Result<Option<Active>, Error> {
        let Some(front) = self.waiting.last() else { return Ok(None) };
        let (on, direction) = (Arc::clone(&front.on), front.step.direction());
        let Some(reservation) = on.engine().reserve() else { return Ok(None) };
        let limit = on.engine().limits().map_err(Clone::clone)?.moves;
        let mut batch = Batch::default();
        let fits = |piece: &Piece| piece.on.id() == on.id() && piece.step.direction() == direction;
        while batch.moves.len() < limit
            && self.waiting.last().is_some_and(fits)
            && let Some(Piece { step, .. }) = self.waiting.pop()
        {
            if let Some(step) = self.add(&on, step, &mut batch)? {
                self.waiting.push(Piece { on: Arc::clone(&on), step });
                break;
            }
        }
        let Batch { moves, load, forward, tally } = batch;
        if moves.is_empty() {
            return Ok(None);
        }
        // SAFETY: pins and slots are in `load`; device memory was found live just now, and for host
        // memory the caller of the copy answers.
        let flight = unsafe { reservation.launch(direction, moves, load, tally) }
            .map_err(|error| error.on(&on))?;
        Ok(Some(Active { flight, on, forward }))
    }

    /// Adds a step to a batch; gives it back if there is no slot for it.
    fn add(&self, on: &Arc<Device>, step: Step, batch: &mut Batch) -> Result<Option<Step>, Error> {
        let (direction, path, bytes) = (step.direction(), step.path(), step.len());
        step.check_live(&self.device)?;
        match step {
            Step::Direct { dma, pin, .. } => {
                batch.moves.push(dma);
                batch.load.holds.extend(pin.map(Hold::Pin));
            }
            Step::In { from, dst, len, guarded } => {
                let Some(slot) = slot(on.bounce()?, len)? else {
                    return Ok(Some(step));
                };
                // SAFETY: the caller of the copy answers for the host side; the slot is ours alone.
                unsafe { copy_in(from, slot.ptr(), len, guarded)? };
                let (src, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst, len: len as u32 });
                batch.hold(pin);
                batch.hold(slot.fly());
            }
            Step::Out { to, src, len, guarded } => {
                let Some(slot) = slot(on.bounce()?, len)? else {
                    return Ok(Some(step));
                };
                let (dst, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst, len: len as u32 });
                batch.hold(pin);
                batch.hold(slot.fly());
                batch.load.outs.push(CopyOut { slot, to, len, guarded });
            }
            Step::Cross { ref target, src, dst, len } => {
                // One piece per submission: the second half of it overlaps with the next.
                if !batch.moves.is_empty() {
                    return Ok(Some(step));
                }
                let Some(slot) = slot(self.device.staging()?, len)? else {
                    return Ok(Some(step));
                };
                let (stage, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst: stage, len: len as u32 });
                batch.hold(pin);
                batch.hold(slot.fly());
                let target = Arc::clone(target);
                batch.forward = Some(Forward { slot, target, dst, len });
            }
            Step::Forward { slot, dst, len } => {
                let (src, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst, len: len as u32 });
                batch.hold(pin);
                batch.hold(slot.fly());
            }
        }
        batch.tally.add(direction, path, bytes);
        Ok(None)
    }

    fn conclude(&mut self) {
        if self.active.is_empty() && self.waiting.is_empty() && self.outcome.is_none() {
            let failure = self.failure.take().map(|error| self.device.failed(error));
            self.outcome = Some(failure.map_or(Ok(()), Err));
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.active.iter().for_each(|active| active.flight.abandon());
    }
}

/// A slot of the ring; one made for the occasion if all of them are with transfers that wait for
/// someone to poll them, which may never happen.
fn slot(ring: &Arc<Ring>, len: usize) -> Result<Option<Arc<Slot>>, Error> {
    let taken = ring.take().or_else(|| {
        // Finished copies that nobody has looked at hold slots as well, on any card.
        for card in crate::runtime().devices() {
            card.progress();
        }
        ring.take()
    });
    match taken {
        Some(slot) => Ok(Some(slot)),
        None if ring.is_parked() => Ok(Ring::new(len, 1)?.take()),
        None => Ok(None),
    }
}
