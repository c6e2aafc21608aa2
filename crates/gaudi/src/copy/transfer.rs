//! A copy under way: a plan that is carried out step by step, never blocking, as the hardware and
//! the bounce slots allow.

use std::collections::VecDeque;
use std::sync::Arc;

use hl_thunk::packet::LinDma;

use super::engine::{Flight, Hold};
use super::plan::{HostPtr, Piece, Step};
use super::ring::{Ring, Slot};
use super::{Segment, SubmitError, plan};
use crate::error::Phase;
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
    /// Not yet started.
    waiting: VecDeque<Piece>,
    /// With the hardware.
    active: Vec<Active>,
    failure: Option<Error>,
    outcome: Option<Result<(), Error>>,
    /// Someone waits for this transfer and for nothing else: it must not depend on slots that only
    /// other transfers can free.
    blocking: bool,
}

#[derive(Debug)]
struct Active {
    flight: Arc<Flight>,
    /// The card that does it.
    on: Arc<Device>,
    then: Vec<Then>,
}

/// What remains to be done when the hardware is finished.
#[derive(Debug)]
enum Then {
    CopyOut { slot: Arc<Slot>, to: HostPtr, len: usize, guarded: bool },
    Forward { slot: Arc<Slot>, target: Arc<Device>, dst: DeviceAddr, len: usize },
}

/// Moves of one submission and what comes with them.
#[derive(Default)]
struct Batch {
    moves: Vec<LinDma>,
    holds: Vec<Hold>,
    then: Vec<Then>,
    tally: Tally,
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
        let waiting = unsafe { plan::plan(device, segments)? };
        let mut transfer = Self {
            device: Arc::clone(device),
            waiting,
            active: Vec::new(),
            failure: None,
            outcome: None,
            blocking,
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
        self.blocking = true;
        loop {
            if let Some(outcome) = self.poll() {
                return outcome;
            }
            match (self.active.first(), self.waiting.front()) {
                (Some(active), _) => drop(active.on.engine().wait(&active.flight)),
                // Other transfers use up the budget of the card.
                (None, Some(piece)) => piece.on.engine().wait_for_oldest(),
                (None, None) => {}
            }
        }
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
            let active = self.active.swap_remove(at);
            let finished = outcome
                .map_err(|error| error.on(&active.on))
                .and_then(|()| active.then.into_iter().try_for_each(|then| self.follow_up(then)));
            if let Err(error) = finished {
                self.failure.get_or_insert(error);
            }
        }
    }

    fn follow_up(&mut self, then: Then) -> Result<(), Error> {
        match then {
            Then::CopyOut { slot, to, len, guarded } => {
                // SAFETY: the caller of the copy answers for the host side as long as the transfer
                // lives; the slot is ours and the device is done with it.
                unsafe { copy_out(slot.ptr(), to, len, guarded) }
            }
            Then::Forward { slot, target, dst, len } => {
                // Ahead of what has not started, so that its slot is soon free again.
                let step = Step::Forward { slot, dst, len };
                self.waiting.push_front(Piece { on: target, step });
                Ok(())
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
        let Some(front) = self.waiting.front() else { return Ok(None) };
        let (on, direction) = (Arc::clone(&front.on), front.step.direction());
        let Some(reservation) = on.engine().reserve() else { return Ok(None) };
        let limit = on.engine().limits()?.moves;
        let mut batch = Batch::default();
        let fits = |piece: &Piece| piece.on.id() == on.id() && piece.step.direction() == direction;
        while batch.moves.len() < limit
            && self.waiting.front().is_some_and(fits)
            && let Some(Piece { step, .. }) = self.waiting.pop_front()
        {
            if let Some(step) = self.add(&on, step, &mut batch)? {
                self.waiting.push_front(Piece { on: Arc::clone(&on), step });
                break;
            }
        }
        let Batch { moves, holds, then, tally } = batch;
        if moves.is_empty() {
            return Ok(None);
        }
        // SAFETY: pins and slots are in `holds`; device memory was found live by the plan, and for
        // host memory the caller of the copy answers.
        let flight = unsafe { reservation.launch(direction, moves, holds, tally) }
            .map_err(|error| error.on(&on))?;
        Ok(Some(Active { flight, on, then }))
    }

    /// Adds a step to a batch; gives it back if there is no slot for it.
    fn add(&self, on: &Arc<Device>, step: Step, batch: &mut Batch) -> Result<Option<Step>, Error> {
        let (direction, path, bytes) = (step.direction(), step.path(), step.len());
        match step {
            Step::Direct { dma, pin, .. } => {
                batch.moves.push(dma);
                batch.holds.extend(pin.map(|pin| pin as Hold));
            }
            Step::In { from, dst, len, guarded } => {
                let Some(slot) = self.slot(on.bounce()?, len, batch)? else {
                    return Ok(Some(step));
                };
                // SAFETY: the caller of the copy answers for the host side; the slot is ours alone.
                unsafe { copy_in(from, slot.ptr(), len, guarded)? };
                let (src, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst, len: len as u32 });
                batch.holds.extend([pin as Hold, slot as Hold]);
            }
            Step::Out { to, src, len, guarded } => {
                let Some(slot) = self.slot(on.bounce()?, len, batch)? else {
                    return Ok(Some(step));
                };
                let (dst, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst, len: len as u32 });
                batch.holds.extend([pin as Hold, Arc::clone(&slot) as Hold]);
                batch.then.push(Then::CopyOut { slot, to, len, guarded });
            }
            Step::Cross { ref target, src, dst, len } => {
                // One piece per submission: the second half of it overlaps with the next.
                if !batch.moves.is_empty() {
                    return Ok(Some(step));
                }
                let Some(slot) = self.slot(self.device.staging()?, len, batch)? else {
                    return Ok(Some(step));
                };
                let (stage, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst: stage, len: len as u32 });
                batch.holds.extend([pin as Hold, Arc::clone(&slot) as Hold]);
                let target = Arc::clone(target);
                batch.then.push(Then::Forward { slot, target, dst, len });
            }
            Step::Forward { slot, dst, len } => {
                let (src, pin) = slot.pin(on)?;
                batch.moves.push(LinDma::Copy { src, dst, len: len as u32 });
                batch.holds.extend([pin as Hold, slot as Hold]);
            }
        }
        batch.tally.add(direction, path, bytes);
        Ok(None)
    }

    /// A slot of the ring, or, for someone who waits while others hold them all, one made for the
    /// occasion.
    fn slot(
        &self,
        ring: &Arc<Ring>,
        len: usize,
        batch: &Batch,
    ) -> Result<Option<Arc<Slot>>, Error> {
        let stuck = self.active.is_empty() && batch.moves.is_empty();
        match ring.take() {
            Some(slot) => Ok(Some(slot)),
            None if self.blocking && stuck => Ok(Ring::new(len, 1)?.take()),
            None => Ok(None),
        }
    }

    fn conclude(&mut self) {
        if self.active.is_empty() && self.waiting.is_empty() && self.outcome.is_none() {
            let failure = self.failure.take().map(|error| self.device.failed(error));
            self.outcome = Some(failure.map_or(Ok(()), Err));
        }
    }
}

/// Fills a slot from host memory.
///
/// # Safety
/// `to` must be valid for `len` bytes and ours; so must `from`, unless `guarded`.
pub(crate) unsafe fn copy_in(
    from: HostPtr,
    to: *mut u8,
    len: usize,
    guarded: bool,
) -> Result<(), Error> {
    if guarded && let Some(done) = guarded_copy(from.0, to, len, Access::Read) {
        return done;
    }
    // SAFETY: the caller's promise; a slot and the user's memory never overlap.
    unsafe { from.0.copy_to_nonoverlapping(to, len) };
    Ok(())
}

/// Empties a slot to host memory.
///
/// # Safety
/// `from` must be valid for `len` bytes; so must `to`, for writing, unless `guarded`.
pub(crate) unsafe fn copy_out(
    from: *mut u8,
    to: HostPtr,
    len: usize,
    guarded: bool,
) -> Result<(), Error> {
    if guarded && let Some(done) = guarded_copy(to.0, from, len, Access::Write) {
        return done;
    }
    // SAFETY: the caller's promise; a slot and the user's memory never overlap.
    unsafe { from.copy_to_nonoverlapping(to.0, len) };
    Ok(())
}

enum Access {
    Read,
    Write,
}

/// Copies between `theirs` and `ours` with the kernel's help, so that memory which is not mapped,
/// or read-only, gives an error and not a signal. `None` where the kernel will not do it for us.
fn guarded_copy(
    theirs: *mut u8,
    ours: *mut u8,
    len: usize,
    access: Access,
) -> Option<Result<(), Error>> {
    let local = libc::iovec { iov_base: ours.cast(), iov_len: len };
    let remote = libc::iovec { iov_base: theirs.cast(), iov_len: len };
    // SAFETY: our own process; the kernel checks both ranges.
    let (call, copied) = unsafe {
        let me = libc::getpid();
        match access {
            Access::Read => {
                ("process_vm_readv", libc::process_vm_readv(me, &local, 1, &remote, 1, 0))
            }
            Access::Write => {
                ("process_vm_writev", libc::process_vm_writev(me, &local, 1, &remote, 1, 0))
            }
        }
    };
    if copied == len as isize {
        return Some(Ok(()));
    }
    let errno = if copied >= 0 {
        libc::EFAULT
    } else {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EFAULT)
    };
    if matches!(errno, libc::ENOSYS | libc::EPERM) {
        return None;
    }
    Some(Err(Error::os(Phase::Copy, "copying host memory that cannot be pinned", call, errno)))
}
