//! The initiator's side: puts and gets through a ring, polled by the code that started them, on any thread.
//!
//! A job is a list of pieces that were started together. Pieces wait in order. While ranges of the ring are free, the first
//! pieces are made into a *chunk*: part of a large piece, or many small ones, each with a range of the ring of its own. For a
//! put, the chunk is filled, requested and answered; for a get, it is requested, answered and emptied. Chunks may complete in
//! any order. A job has ended when all its bytes were copied or, after a failure, when none of its chunks is in flight.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;
use smallvec::SmallVec;

use super::super::unreached::Unreached;
use super::super::wire::parse_answer;
use super::super::{Identity, RemoteKey, initiator, socket};
use super::chunks::{Job, LARGE_RING, Local, Part, SMALL_RING, Stage, State, start_local};
use super::ring::Ring;
use super::wire::{Access, Answer, MAX_REQUESTS, Outcome, Piece, Request};
use super::{Counted, MAX_RELAYS};
use crate::process::{CloseOnFork, Instance, Notifier, PerProcess};
use crate::{Device, Error, ErrorKind, Side, SubmitError};

pub(super) const RELAYING: &str = "copying through a relay";

/// A range to copy.
#[derive(Clone, Debug)]
pub struct RelayPiece {
    /// Put or get.
    pub access: Access,
    /// The key of the peer's memory.
    pub key: RemoteKey,
    /// The address in the peer's memory, as the peer sees it.
    pub remote: u64,
    /// Memory of this process.
    pub local: Side,
    /// The card that `local` is on, unless it is host memory.
    pub device: Option<Arc<Device>>,
    /// Bytes.
    pub len: usize,
}

/// A connection to the owner of memory, and the ring. A poller has one for each owner.
#[derive(Debug)]
pub struct Relay {
    owner: Identity,
    socket: CloseOnFork,
    made_by: Instance,
    state: Mutex<State>,
    _counted: Counted,
}

/// A job in flight. Dropping it before it has ended abandons it: when the drop returns, this process's memory is not accessed
/// any more. The peer's may still be, if the owner was asked to.
#[derive(Debug)]
#[must_use = "a job that nobody polls is never known to be complete"]
pub struct Relayed {
    relay: Arc<Relay>,
    job: Option<u64>,
}

impl RemoteKey {
    /// Checks that the owner of this memory can be asked for a relay: that a process listens, and that it is the owner.
    pub fn check_relay(&self) -> Result<(), Error> {
        // Refused here, before UCX relies on a relay.
        if RELAYS.get_or_default().load(Ordering::Relaxed) >= MAX_RELAYS {
            return Err(too_many_relays(self.peer()));
        }
        initiator::check(self.peer()).map_err(|why| why.error(self.peer()))
    }
}

/// How many relays this process has to others.
static RELAYS: PerProcess<AtomicUsize> = PerProcess::new();

fn too_many_relays(owner: &Identity) -> Error {
    Unreached::Ourselves(format!("this process has {MAX_RELAYS} relays already")).error(owner)
}

/// A ring, and its descriptor for the owner.
fn new_ring(owner: &Identity, len: usize) -> Result<(Arc<Ring>, OwnedFd), Error> {
    Ring::new(len).map_err(|(call, errno)| {
        Unreached::Ourselves(format!("no memory for a ring: {call}: {errno}")).error(owner)
    })
}

impl Relay {
    /// Connects to the process that shares the memory of this key. Does not wait for its answer.
    pub fn new(key: &RemoteKey) -> Result<Arc<Self>, Error> {
        let owner = *key.peer();
        let counted =
            Counted::new(RELAYS.get_or_default()).ok_or_else(|| too_many_relays(&owner))?;
        let (ring, file) = new_ring(&owner, SMALL_RING)?;
        let socket = initiator::connect_relay(key.fields(), file.as_fd())
            .map_err(|why| why.error(&owner))?;
        Ok(Self::connected(owner, socket, ring, counted))
    }

    /// A relay on a connection over which the ring was sent to the owner.
    fn connected(
        owner: Identity,
        socket: CloseOnFork,
        ring: Arc<Ring>,
        counted: Counted,
    ) -> Arc<Self> {
        let state = State::new(Some(ring));
        let (made_by, state) = (Instance::current(), Mutex::new(state));
        Arc::new(Self { owner, socket, made_by, state, _counted: counted })
    }

    /// For the crate `fuzz`: a relay to any process at the other end.
    #[cfg(feature = "fuzzing")]
    pub(super) fn to_anyone(owner: Identity, socket: OwnedFd) -> Option<Arc<Self>> {
        let counted = Counted::new(RELAYS.get_or_default())?;
        let (ring, _file) = Ring::new(SMALL_RING).ok()?;
        let socket = super::super::descriptors::keep(socket).ok()?;
        Some(Self::connected(owner, socket, ring, counted))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            // A thread has panicked, perhaps in the middle of a change.
            let why = "a thread of this process panicked in it";
            state.close(Error::new(ErrorKind::ChannelFailed, RELAYING, why, "please report it"));
            self.state.clear_poison();
            state
        })
    }

    /// Whether the connection has ended: then a new relay may replace this one. `false` in a forked child, where operations
    /// are refused: a new relay of the child must not be added to the epoll set of its parent.
    pub fn is_closed(&self) -> bool {
        self.is_ours() && self.state().closed.is_some()
    }

    /// Whether this process made it, and not the parent that it was forked from. Only then may its lock be taken.
    fn is_ours(&self) -> bool {
        self.made_by == Instance::current()
    }

    /// Whether [`Relay::start`] would accept a job now, and not return `Busy`.
    pub fn can_start(&self) -> bool {
        // In a forked child, `start` returns an error instead.
        !self.is_ours() || self.state().waiting_bytes < LARGE_RING
    }

    /// Starts a job. It advances when the relay is polled.
    ///
    /// # Safety
    /// Until the job has ended or was dropped, host memory must be valid for the access, and nobody may write what is
    /// read or touch what is written.
    pub unsafe fn start(self: &Arc<Self>, pieces: &[RelayPiece]) -> Result<Relayed, SubmitError> {
        if !self.is_ours() {
            return Err(Error::forked(RELAYING).into());
        }
        for piece in pieces {
            self.check(piece)?;
        }
        let locals = pieces.iter().map(Local::new).collect::<Result<SmallVec<[_; 1]>, _>>()?;
        let mut state = self.state();
        if let Some(error) = &state.closed {
            return Err(error.clone().into());
        }
        if state.waiting_bytes >= LARGE_RING {
            return Err(SubmitError::Busy);
        }
        state.last += 1;
        let job = state.last;
        let left = pieces.iter().map(|piece| piece.len).sum();
        state.jobs.insert(job, Job { left, failure: None });
        state.waiting_bytes += left;
        let pieces = pieces.iter().zip(locals).filter(|(piece, _)| piece.len > 0);
        let parts = pieces.map(|(piece, local)| Part {
            job,
            access: piece.access,
            token: piece.key.token(),
            remote: piece.remote,
            local,
            len: piece.len,
            alone: false,
        });
        state.waiting.extend(parts);
        self.launch(&mut state);
        drop(state);
        Ok(Relayed { relay: Arc::clone(self), job: Some(job) })
    }

    /// Refuses pieces that the owner would refuse, or that belong to another owner.
    fn check(&self, piece: &RelayPiece) -> Result<(), Error> {
        let RelayPiece { key, remote, len, .. } = piece;
        if *key.peer() != self.owner {
            let detail = format!("the key is of {}, the relay to {}", key.peer(), self.owner);
            return Err(Error::new(ErrorKind::InvalidParams, RELAYING, detail, ""));
        }
        if !key.contains(*remote, *len as u64) {
            let detail = format!("{len} bytes at {remote:#x} are not in the memory of the key");
            return Err(Error::new(ErrorKind::InvalidParams, RELAYING, detail, ""));
        }
        Ok(())
    }

    /// Receives answers, and advances what they permit. Never blocks.
    pub fn advance(&self) {
        if !self.is_ours() {
            return;
        }
        let mut state = self.state();
        if state.closed.is_none()
            && let Err(error) = self.receive(&mut state)
        {
            state.close(error);
        }
        for number in 0..MAX_REQUESTS {
            self.step(&mut state, number);
        }
        self.launch(&mut state);
    }

    /// Receives answers.
    fn receive(&self, state: &mut State) -> Result<(), Error> {
        loop {
            let mut message = [0; 64];
            let received = match socket::receive_plain(self.socket.as_fd(), &mut message) {
                // The owner closed the connection without reading what we sent; what it sent comes after this error.
                Err(Errno::CONNRESET) => socket::receive_plain(self.socket.as_fd(), &mut message),
                received => received,
            };
            let len = match received {
                Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
                Ok(0) | Err(_) => return Err(self.hung_up()),
                Ok(len) => len.min(message.len()),
            };
            if let Some(Err(why)) = parse_answer(&message[..len]) {
                return Err(Unreached::from(why).of(&self.owner).error(&self.owner));
            }
            let answer = Answer::parse(&message[..len]);
            if let Some(Answer { id: 0, outcome }) = answer
                && let Some(ring) = state.new_ring.take()
            {
                match outcome {
                    Outcome::Done => state.ring = Some(ring),
                    Outcome::Unknown | Outcome::Failed => state.may_grow = false,
                }
                continue;
            }
            let chunk = answer.and_then(|answer| {
                let number = (answer.id as usize).checked_sub(1)?;
                let chunk = state.chunks.get_mut(number)?.as_mut()?;
                matches!(chunk.stage, Stage::Remote).then_some((number, chunk, answer.outcome))
            });
            let Some((number, chunk, outcome)) = chunk else {
                return Err(Unreached::NotUnderstood.error(&self.owner));
            };
            match (outcome, chunk.access) {
                (Outcome::Done, Access::Read) => {
                    chunk.stage = Stage::Local(None);
                    self.step(state, number);
                }
                (Outcome::Done, Access::Write) => state.end_chunk(number, Ok(())),
                (Outcome::Failed, _) => state.fail_chunk(number, self.refused(outcome)),
                // Each part is tried alone, to find out which was refused.
                (Outcome::Unknown, _) if chunk.parts.len() > 1 => state.split_chunk(number),
                (Outcome::Unknown, _) => state.end_chunk(number, Err(self.refused(outcome))),
            }
        }
    }

    /// The connection has ended without a refusal. If the owner runs, it has closed this relay alone, perhaps because it is
    /// out of memory. If the kernel cannot tell whether it runs, most likely it does not.
    fn hung_up(&self) -> Error {
        match self.owner.is_running() {
            Ok(true) => return Unreached::RelayEnded.error(&self.owner),
            Err(_) if !self.owner.has_stopped_listening() => {}
            Ok(false) | Err(_) => self.owner.note_end(),
        }
        Unreached::Ended.error(&self.owner)
    }

    fn refused(&self, outcome: Outcome) -> Error {
        if outcome == Outcome::Unknown {
            return Unreached::NotShared.error(&self.owner);
        }
        let detail = format!("{} could not copy its memory", self.owner);
        let remedy = "the kernel log, and its counters failures_…, say more";
        Error::new(ErrorKind::ChannelFailed, RELAYING, detail, remedy)
    }

    /// Advances the local half of a chunk.
    fn step(&self, state: &mut State, number: usize) {
        let State { chunks, jobs, ring, closed, .. } = state;
        let (Some(chunk), Some(ring)) = (&mut chunks[number], ring) else { return };
        let Stage::Local(running) = &mut chunk.stage else { return };
        if running.is_none() {
            if let Some(error) = closed {
                let error = error.clone();
                return state.end_chunk(number, Err(error));
            }
            // Memory of a job that was dropped must not be accessed any more.
            let is_live =
                |part: &Part| jobs.get(&part.job).is_some_and(|job| job.failure.is_none());
            let live = chunk.parts.iter().filter(|(part, _)| is_live(part));
            // SAFETY: promised when the job was started, until it has ended.
            match unsafe { start_local(chunk.access, live, ring) } {
                Ok(Some(transfer)) => *running = Some(Box::new(transfer)),
                Ok(None) => return self.local_done(state, number),
                Err(SubmitError::Busy) => return,
                Err(SubmitError::Failed(error)) => return state.fail_chunk(number, error),
            }
        }
        match running.as_mut().and_then(|transfer| transfer.poll()) {
            None => {}
            Some(Ok(())) => self.local_done(state, number),
            Some(Err(error)) => state.fail_chunk(number, error),
        }
    }

    /// The ring's range is filled, or emptied.
    fn local_done(&self, state: &mut State, number: usize) {
        state.keep_live(number);
        let Some(chunk) = &mut state.chunks[number] else { return };
        match (chunk.access, state.closed.clone()) {
            (_, Some(error)) => state.end_chunk(number, Err(error)),
            (Access::Write, None) if !chunk.parts.is_empty() => self.ask(state, number),
            _ => state.end_chunk(number, Ok(())),
        }
    }

    /// Requests the owner's half of a chunk.
    fn ask(&self, state: &mut State, number: usize) {
        let Some(chunk) = &mut state.chunks[number] else { return };
        chunk.stage = Stage::Remote;
        let pieces = chunk.parts.iter().map(|(part, at)| Piece {
            token: part.token,
            addr: part.remote,
            len: part.len as u32,
            at: *at,
        });
        let id = number as u32 + 1;
        let request = Request::Copy { id, access: chunk.access, pieces: pieces.collect() };
        state.outbox.push_back((request.pack(), None));
        self.flush(state);
    }

    /// Sends queued messages, until the socket's queue is full.
    fn flush(&self, state: &mut State) {
        while let Some((message, enclosed)) = state.outbox.front() {
            let enclosed = enclosed.as_ref().map(|fd| fd.as_fd());
            match socket::send(self.socket.as_fd(), message, enclosed) {
                Ok(()) => drop(state.outbox.pop_front()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => return,
                // Too many descriptors are in flight, perhaps to peers that are stopped: keep the small ring.
                Err(errno)
                    if enclosed.is_some() && !matches!(errno, Errno::PIPE | Errno::CONNRESET) =>
                {
                    state.outbox.pop_front();
                    state.new_ring = None;
                    state.may_grow = false;
                }
                // The owner may have sent a refusal before it closed the connection.
                Err(_) => {
                    let error = self.receive(state).err().unwrap_or_else(|| self.hung_up());
                    return state.close(error);
                }
            }
        }
    }

    /// Makes chunks of waiting parts, while there is space in the ring.
    fn launch(&self, state: &mut State) {
        self.flush(state);
        while state.closed.is_none() && state.new_ring.is_none() && !state.waiting.is_empty() {
            let Some(ring) = &state.ring else { return };
            let ring_len = ring.len();
            // Much is waiting, and no chunk uses the small ring any more.
            if ring_len < LARGE_RING && state.wants_large_ring() && state.used == 0 {
                match new_ring(&self.owner, LARGE_RING) {
                    Ok((ring, file)) => {
                        state.new_ring = Some(ring);
                        state.outbox.push_back((Request::Ring.pack(), Some(file)));
                        self.flush(state);
                        continue;
                    }
                    // The small ring works as well, if slower.
                    Err(_) => state.may_grow = false,
                }
            }
            let Some(number) = state.next_chunk(ring_len) else { return };
            match state.chunks[number].as_ref().map(|chunk| chunk.access) {
                Some(Access::Read) => self.ask(state, number),
                _ => self.step(state, number),
            }
        }
    }

    /// Arms the notifier for the end of this relay's copies on cards. Returns whether [`Relay::advance`] has nothing to do,
    /// except when this relay's descriptor is readable.
    pub fn notify_when_ready(&self, notifier: &Arc<Notifier>) -> bool {
        if !self.is_ours() {
            return false;
        }
        let state = self.state();
        state.outbox.is_empty()
            && state.closed.is_none()
            && state.chunks.iter().flatten().all(|chunk| match &chunk.stage {
                Stage::Remote => true,
                Stage::Local(Some(transfer)) => {
                    transfer.notify_when_done(notifier) && !transfer.has_news()
                }
                Stage::Local(None) => false,
            })
    }
}

impl AsFd for Relay {
    /// Readable when a message of the owner, or the end of the connection, waits for [`Relay::advance`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Relayed {
    /// The result of the job, once it has ended; not to be called again after that. [`Relay::advance`] advances the job.
    pub fn poll(&mut self) -> Option<Result<(), Error>> {
        let job = self.job?;
        if !self.relay.is_ours() {
            self.job = None;
            return Some(Err(Error::forked(RELAYING)));
        }
        if self.relay.is_closed() {
            // A new relay may have replaced it, and then nothing else advances this one.
            self.relay.advance();
        }
        let mut state = self.relay.state();
        if state.jobs.get(&job)?.left > 0 {
            return None;
        }
        self.job = None;
        let job = state.jobs.remove(&job)?;
        Some(job.failure.map_or(Ok(()), Err))
    }

    /// Whether [`Relayed::poll`] would return a result.
    pub fn has_ended(&self) -> bool {
        if !self.relay.is_ours() {
            return true;
        }
        let state = self.relay.state();
        self.job.and_then(|job| state.jobs.get(&job)).is_some_and(|job| job.left == 0)
    }

    /// Advances and polls until the job has ended.
    pub fn wait(&mut self) -> Result<(), Error> {
        loop {
            self.relay.advance();
            if let Some(result) = self.poll() {
                return result;
            }
            std::thread::yield_now();
        }
    }

    /// The relay it goes through.
    pub fn relay(&self) -> &Arc<Relay> {
        &self.relay
    }
}

impl Drop for Relayed {
    fn drop(&mut self) {
        let Some(job) = self.job.filter(|_| self.relay.is_ours()) else { return };
        let mut state = self.relay.state();
        state.jobs.remove(&job);
        state.forget_failed();
        for chunk in state.chunks.iter_mut().flatten() {
            let has_part = chunk.parts.iter().any(|(part, _)| part.job == job);
            if let Stage::Local(Some(transfer)) = &mut chunk.stage
                && has_part
            {
                // There is no caller left to report a failure to.
                let _ = transfer.wait();
            }
        }
    }
}

#[cfg(test)]
mod tests;
