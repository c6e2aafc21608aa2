//! The initiator's side: puts and gets through a ring, polled by whoever started them.
//!
//! A job is what was started as one: a list of pieces. Pieces wait in order. While ranges of the ring are free, a *chunk* is
//! made of the first of them: part of a large piece, or many small ones, each with a range of the ring of its own. A chunk
//! is then filled, asked for and answered, or asked for, answered and emptied; chunks overtake each other. A job has ended
//! when all its bytes have, or, after a failure, when none of its chunks is under way any more.

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

/// What is to be copied.
#[derive(Clone, Debug)]
pub struct RelayPiece {
    /// Put or get.
    pub access: Access,
    /// Of the peer's memory.
    pub key: RemoteKey,
    /// Where in the peer's memory, as the peer sees it.
    pub remote: u64,
    /// Memory of this process.
    pub local: Side,
    /// The card that `local` is on, unless it is host memory.
    pub device: Option<Arc<Device>>,
    /// Bytes.
    pub len: usize,
}

/// A connection to the owner of memory, and the ring. One for each owner, in whatever polls it.
#[derive(Debug)]
pub struct Relay {
    owner: Identity,
    socket: CloseOnFork,
    made_by: Instance,
    state: Mutex<State>,
    _counted: Counted,
}

/// A job under way. Dropping it before it has ended abandons it: when the drop returns, nothing of this process's memory
/// is read or written any more. The peer's may be, where it was asked to.
#[derive(Debug)]
#[must_use = "a job that nobody polls is never known to be complete"]
pub struct Relayed {
    relay: Arc<Relay>,
    job: Option<u64>,
}

impl RemoteKey {
    /// Whether the process that shares this memory can be asked for a relay: somebody listens, and it is that process.
    pub fn check_relay(&self) -> Result<(), Error> {
        // UCX would count on it.
        if RELAYS.get_or_default().load(Ordering::Relaxed) >= MAX_RELAYS {
            return Err(too_many_relays(self.peer()));
        }
        initiator::check(self.peer()).map_err(|why| why.error(self.peer()))
    }
}

/// How many this process has to others.
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
    /// Connects to the process that shares the memory of this key. Does not wait for it.
    pub fn new(key: &RemoteKey) -> Result<Arc<Self>, Error> {
        let owner = *key.peer();
        let counted =
            Counted::new(RELAYS.get_or_default()).ok_or_else(|| too_many_relays(&owner))?;
        let (ring, file) = new_ring(&owner, SMALL_RING)?;
        let socket = initiator::connect_relay(key.fields(), file.as_fd())
            .map_err(|why| why.error(&owner))?;
        Ok(Self::connected(owner, socket, ring, counted))
    }

    /// On a connection over which the owner was sent the ring.
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

    /// For the crate `fuzz`: to whoever is at the other end.
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

    /// Whether the connection has ended: a new relay may take its place. Never in a forked child, which is refused: what wakes
    /// a sleeper of its parent is not for its relays.
    pub fn is_closed(&self) -> bool {
        self.is_ours() && self.state().closed.is_some()
    }

    /// Whether this process made it, and not one that it was forked from: then its lock may be taken.
    fn is_ours(&self) -> bool {
        self.made_by == Instance::current()
    }

    /// Whether what is started now does not only wait.
    pub fn can_start(&self) -> bool {
        // Where it is not ours, the start is refused.
        !self.is_ours() || self.state().waiting_bytes < LARGE_RING
    }

    /// Starts a job. It gets on when the relay is polled.
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

    /// Refuses what the owner would refuse, or is not for it.
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

    /// Takes in answers, and gets on with what they permit. Never blocks.
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

    /// Takes in answers.
    fn receive(&self, state: &mut State) -> Result<(), Error> {
        loop {
            let mut message = [0; 64];
            let received = match socket::receive_plain(self.socket.as_fd(), &mut message) {
                // It hung up without reading what we sent; what it sent comes after this error.
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
                // Which of them was refused is found out one by one.
                (Outcome::Unknown, _) if chunk.parts.len() > 1 => state.split_chunk(number),
                (Outcome::Unknown, _) => state.end_chunk(number, Err(self.refused(outcome))),
            }
        }
    }

    /// The connection has ended without a reason. An owner that runs has hung up on this relay alone, perhaps because it lacks
    /// memory. Where the kernel cannot tell whether it runs, mostly it does not.
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

    /// Gets on with the local half of a chunk.
    fn step(&self, state: &mut State, number: usize) {
        let State { chunks, jobs, ring, closed, .. } = state;
        let (Some(chunk), Some(ring)) = (&mut chunks[number], ring) else { return };
        let Stage::Local(running) = &mut chunk.stage else { return };
        if running.is_none() {
            if let Some(error) = closed {
                let error = error.clone();
                return state.end_chunk(number, Err(error));
            }
            // Memory of a job that was dropped is not ours to touch any more.
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

    /// Asks the owner for its half.
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

    /// Sends what there is space for.
    fn flush(&self, state: &mut State) {
        while let Some((message, enclosed)) = state.outbox.front() {
            let enclosed = enclosed.as_ref().map(|fd| fd.as_fd());
            match socket::send(self.socket.as_fd(), message, enclosed) {
                Ok(()) => drop(state.outbox.pop_front()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => return,
                // Too many descriptors are on their way, perhaps to peers that are stopped: the small ring goes on.
                Err(errno)
                    if enclosed.is_some() && !matches!(errno, Errno::PIPE | Errno::CONNRESET) =>
                {
                    state.outbox.pop_front();
                    state.new_ring = None;
                    state.may_grow = false;
                }
                // It may have sent the reason before it closed the connection.
                Err(_) => {
                    let error = self.receive(state).err().unwrap_or_else(|| self.hung_up());
                    return state.close(error);
                }
            }
        }
    }

    /// Makes chunks of what waits, while there is space in the ring.
    fn launch(&self, state: &mut State) {
        self.flush(state);
        while state.closed.is_none() && state.new_ring.is_none() && !state.waiting.is_empty() {
            let Some(ring) = &state.ring else { return };
            let ring_len = ring.len();
            // When the first large piece waits, and nothing uses the small one any more.
            if ring_len < LARGE_RING && state.wants_large_ring() && state.used == 0 {
                match new_ring(&self.owner, LARGE_RING) {
                    Ok((ring, file)) => {
                        state.new_ring = Some(ring);
                        state.outbox.push_back((Request::Ring.pack(), Some(file)));
                        self.flush(state);
                        continue;
                    }
                    // The small one does it, too, if slowly.
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

    /// Has the notifier notified when a card ends something of this relay; whether there is nothing for
    /// [`Relay::advance`] to do, except what its descriptor shows.
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
    /// Readable when [`Relay::advance`] has something to do that no card notifies of.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Relayed {
    /// Whether the job has ended, and how; asked no more after that. Looks only: [`Relay::advance`] gets it on.
    pub fn poll(&mut self) -> Option<Result<(), Error>> {
        let job = self.job?;
        if !self.relay.is_ours() {
            self.job = None;
            return Some(Err(Error::forked(RELAYING)));
        }
        if self.relay.is_closed() {
            // Another may have taken its place, and then nothing else gets it on.
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

    /// Whether [`Relayed::poll`] would say how it ended.
    pub fn has_ended(&self) -> bool {
        if !self.relay.is_ours() {
            return true;
        }
        let state = self.relay.state();
        self.job.and_then(|job| state.jobs.get(&job)).is_some_and(|job| job.left == 0)
    }

    /// Advances and looks until the job has ended.
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
                // Nobody is left to report a failure to.
                let _ = transfer.wait();
            }
        }
    }
}

#[cfg(test)]
mod tests;
