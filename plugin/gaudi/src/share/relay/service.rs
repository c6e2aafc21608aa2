//! The owner's side: a thread that copies between this process's memory and the rings of peers, at their request.
//!
//! It is started for the first relay, sleeps while there are no requests, and never blocks on a peer. All requests are
//! checked here, against what is shared at that moment ([`Owner::begin_use`], [`HostMemory`](super::host::HostMemory)): a
//! request names memory by the token of its key. Card memory that is freed while a copy uses it returns to the pool when the
//! copy has ended, as with a lease. Requests of one peer may complete in any order.
//!
//! A card copies asynchronously: the thread starts all copies that were requested, and the engine notifies it when they end.
//! The thread copies host memory itself.
//!
//! On a machine whose processors all poll, the service's own thread is scheduled only after milliseconds. So a thread of the
//! program that polls its transports serves requests, too, while there is traffic ([`assist`]).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use super::super::listener::refuse;
use super::super::owner::{InUse, Owner};
use super::super::wire::Refusal;
use super::super::{descriptors, socket};
use super::Counted;
use super::ring::Ring;
use super::wire::{Access, Answer, MAX_LEN, MAX_REQUESTS, Outcome, Pieces, Request};
use crate::process::thread::OnDemand;
use crate::process::{CloseOnFork, Notifier, PerProcess};
use crate::stats::{Counter, Counts};
use crate::{Device, DeviceAddr, Segment, Side, SubmitError, Transfer};

/// Pause when the kernel is out of a resource.
const PAUSE: Duration = Duration::from_millis(2);
/// Most bytes of one peer's requests that are accepted before other peers have their turn.
const MAX_AT_ONCE: usize = 4 << 20;
/// The same for a thread of the program, which has its own work to do.
const MAX_ASSISTED: usize = 1 << 20;
/// The number of the notifier in the epoll set. Peers have higher ones.
const NOTIFIED: u64 = 0;

/// How long after a request other threads assist.
const TRAFFIC: Duration = Duration::from_millis(2);

/// The service: its thread, and what others share with it.
#[derive(Debug)]
pub(in super::super) struct Service {
    owner: &'static Owner,
    epoll: CloseOnFork,
    thread: OnDemand,
    /// Notified when there is a new relay, and when a copy ends.
    notifier: Arc<Notifier>,
    new: Mutex<Vec<Peer>>,
    /// How many peers there are, new or served.
    peers: AtomicUsize,
    /// The thread that holds this lock serves.
    state: Mutex<State>,
    started: Instant,
    /// When traffic ends, in microseconds since `started`.
    traffic_until: AtomicU64,
}

/// An initiator.
#[derive(Debug)]
struct Peer {
    socket: Arc<CloseOnFork>,
    ring: Arc<Ring>,
    _counted: Counted,
}

static SERVICE: PerProcess<Service> = PerProcess::new();

impl Service {
    /// Takes over a connection, and the ring that came with it.
    pub(in super::super) fn adopt(
        owner: &'static Owner,
        socket: Arc<CloseOnFork>,
        ring: OwnedFd,
    ) -> Result<(), Refusal> {
        let ring = Ring::of_peer(ring.as_fd())?;
        let service = Self::started(owner).map_err(|_| Refusal::Short)?;
        let counted = Counted::new(&service.peers).ok_or(Refusal::Short)?;
        let mut new = service.new.lock().unwrap_or_else(PoisonError::into_inner);
        new.push(Peer { socket, ring, _counted: counted });
        drop(new);
        service.notifier.notify();
        Ok(())
    }

    /// The service, with its thread. An error if this process is out of threads or descriptors.
    fn started(owner: &'static Owner) -> io::Result<&'static Service> {
        let service = SERVICE.get_or_make(|| Self::new(owner))?;
        service.thread.ensure("gaudi-relay", || service.run())?;
        Ok(service)
    }

    fn new(owner: &'static Owner) -> io::Result<Service> {
        // Starts the counters of this process, which may have opened no card.
        Counts::begin();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let epoll = descriptors::keep(epoll).map_err(io::Error::other)?;
        let notifier = Arc::new(Notifier::new()?);
        let data = epoll::EventData::new_u64(NOTIFIED);
        epoll::add(&epoll, &*notifier, data, epoll::EventFlags::IN)?;
        Ok(Service {
            owner,
            epoll,
            thread: OnDemand::default(),
            notifier,
            new: Mutex::default(),
            peers: AtomicUsize::new(0),
            state: Mutex::default(),
            started: Instant::now(),
            traffic_until: AtomicU64::new(0),
        })
    }

    /// Waits for events and handles them, for ever.
    fn run(&'static self) {
        // Do not sleep at first: after a panic there may be work left for which no event comes.
        let mut timeout = Some(Timespec::default());
        loop {
            let mut events = Vec::with_capacity(64);
            let space = rustix::buffer::spare_capacity(&mut events);
            if epoll::wait(&self.epoll, space, timeout.as_ref()).is_err() {
                // Interrupted by a signal, or out of memory: neither lasts.
                std::thread::sleep(PAUSE);
                continue;
            }
            timeout = self.serve(self.state(), &events, Server::Thread);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            // A thread has panicked, and a request may have been lost. Its peer must not wait for an answer for ever.
            let peers: Vec<u64> = state.peers.keys().copied().collect();
            peers.into_iter().for_each(|peer| state.hang_up(self, peer));
            self.state.clear_poison();
            state
        })
    }

    /// Handles events. Returns how long the thread may sleep; `None`: until something wakes it.
    fn serve(
        &'static self,
        mut state: MutexGuard<'_, State>,
        events: &[epoll::Event],
        server: Server,
    ) -> Option<Timespec> {
        for event in events {
            match event.data.u64() {
                NOTIFIED => self.notifier.clear(),
                peer => {
                    let until = (self.started.elapsed() + TRAFFIC).as_micros() as u64;
                    self.traffic_until.store(until, Ordering::Relaxed);
                    state.receive(self, peer, server);
                }
            }
        }
        state.take_new(self);
        state.advance(self, server);
        state.ended.part_with_cards();
        let timeout = state.timeout(self);
        if server == Server::Thread {
            let ended = std::mem::take(&mut state.ended);
            drop(state);
            drop(ended);
            return timeout;
        }
        // Also for what other threads left in `ended`: this thread may have consumed their notification.
        if state.ended.is_empty() { timeout } else { Some(Timespec::default()) }
    }
}

/// Serves relays on the caller's thread, if this process has some, there is traffic, and no other thread serves. Never blocks
/// for long: large requests, those on a card that has not pinned the ring, and the end of peers, rings and cards are left to
/// the service's own thread. Memory that was freed while a request used it may go back to the driver here.
pub fn assist() {
    let Some(service) = SERVICE.get() else { return };
    let until = service.traffic_until.load(Ordering::Relaxed);
    if until == 0 || service.started.elapsed().as_micros() as u64 > until {
        return;
    }
    let _woken = WokenAfterPanic(service);
    let Ok(state) = service.state.try_lock() else { return };
    // One event is enough: the caller calls again.
    let mut space = [MaybeUninit::uninit(); 1];
    if let Ok((events, _)) = epoll::wait(&service.epoll, &mut space, Some(&Timespec::default()))
        && service.serve(state, events, Server::Assistant).is_some()
    {
        // Leave the rest to the service's thread: perhaps no thread calls `assist` again.
        service.notifier.notify();
    }
}

/// Wakes the service's thread if this one panics: that thread then hangs up on the peers, whose requests may be lost.
struct WokenAfterPanic(&'static Service);

impl Drop for WokenAfterPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.notifier.notify();
        }
    }
}

/// Which thread serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    /// The service's own thread.
    Thread,
    /// A thread of the program.
    Assistant,
}

/// A request in flight.
#[derive(Debug)]
struct Work {
    peer: u64,
    id: u32,
    segments: Vec<Segment>,
    /// The card that copies.
    device: Arc<Device>,
    running: Option<Transfer>,
    // These two are dropped after the copy, which uses them.
    in_use: Vec<InUse>,
    ring: Arc<Ring>,
}

// SAFETY: the host pointers in the segments are of the ring, which goes with them.
unsafe impl Send for Work {}

/// The peers, and what they have asked for.
#[derive(Debug, Default)]
struct State {
    peers: HashMap<u64, Peer>,
    last: u64,
    work: VecDeque<Work>,
    ended: Ended,
}

/// What is dropped without the lock, and by the service's own thread, because it may take long: dropping the last reference
/// to a card closes it, a ring is unpinned, and with a connection the kernel closes the descriptors that were sent over it.
#[derive(Debug, Default)]
struct Ended {
    /// Cards that nothing else uses any more. Closed before the rings and peers, which may take longer.
    closing: Vec<Device>,
    rings: Vec<Arc<Ring>>,
    peers: Vec<Peer>,
    /// The cards of requests that have ended or were refused, each once.
    cards: Vec<Arc<Device>>,
}

impl Ended {
    /// Drops the references to cards that are still in use elsewhere.
    fn part_with_cards(&mut self) {
        self.closing.extend(self.cards.drain(..).filter_map(Arc::into_inner));
    }

    fn is_empty(&self) -> bool {
        self.closing.is_empty() && self.rings.is_empty() && self.peers.is_empty()
    }
}

impl State {
    /// How long the thread may sleep; `None` if something will wake it. Arms the notifier before it checks for completions:
    /// one in between would otherwise be missed.
    fn timeout(&self, service: &Service) -> Option<Timespec> {
        let notifier = &service.notifier;
        let will_wake = self.work.iter().all(|work| match &work.running {
            Some(transfer) => transfer.notify_when_done(notifier) && !transfer.has_news(),
            // It can start when something on its card ends.
            None => work.device.notify_on_completion(notifier) && !work.device.can_submit(),
        });
        if will_wake { None } else { Some(Timespec::default()) }
    }

    fn take_new(&mut self, service: &Service) {
        let new = service.new.lock().unwrap_or_else(PoisonError::into_inner).split_off(0);
        for peer in new {
            self.last += 1;
            let data = epoll::EventData::new_u64(self.last);
            let flags = epoll::EventFlags::IN;
            match epoll::add(&service.epoll, &*peer.socket, data, flags) {
                Ok(()) => drop(self.peers.insert(self.last, peer)),
                Err(_) => {
                    refuse(&*peer.socket, Refusal::Short);
                    self.ended.peers.push(peer);
                }
            }
        }
    }

    /// Receives requests of a peer, and starts them.
    fn receive(&mut self, service: &'static Service, number: u64, server: Server) {
        let mut bytes = 0;
        for _ in 0..MAX_REQUESTS {
            // Other peers have their turn; epoll reports the rest again.
            if bytes > MAX_AT_ONCE {
                return;
            }
            let Some(peer) = self.peers.get_mut(&number) else { return };
            if server == Server::Assistant && !peer.asks_for_little(MAX_ASSISTED - bytes) {
                return;
            }
            let mut message = [0; MAX_LEN];
            let (len, descriptor) = match socket::receive(peer.socket.as_fd(), &mut message) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok((0, _)) | Err(_) => return self.hang_up(service, number),
                Ok(received) => received,
            };
            let under_way = self.work.iter().filter(|work| work.peer == number).count();
            match (Request::parse(&message[..len]), descriptor) {
                (Some(Request::Ring), file) if under_way == 0 => {
                    // If this process is out of descriptors, the message comes without its own.
                    let file = file.ok_or(Refusal::Short);
                    let outcome = match file.and_then(|file| Ring::of_peer(file.as_fd())) {
                        Ok(ring) => {
                            self.ended.rings.push(std::mem::replace(&mut peer.ring, ring));
                            Outcome::Done
                        }
                        // The current ring stays in use.
                        Err(Refusal::Short) => Outcome::Failed,
                        Err(why) => return self.refuse(service, number, why),
                    };
                    self.answer(service, number, 0, outcome);
                }
                (Some(Request::Copy { id, access, pieces }), None) if under_way < MAX_REQUESTS => {
                    let ring = Arc::clone(&peer.ring);
                    bytes += bytes_of(&pieces);
                    self.begin(service, (number, id), (access, &pieces), ring, server);
                }
                _ => return self.refuse(service, number, Refusal::Malformed),
            }
        }
    }

    fn begin(
        &mut self,
        service: &'static Service,
        (peer, id): (u64, u32),
        (access, pieces): (Access, &Pieces),
        ring: Arc<Ring>,
        server: Server,
    ) {
        let mut in_use = Vec::new();
        match prepare(service.owner, access, pieces, &ring, &mut in_use) {
            Ok(segments) => {
                count(Counter::IpcRelayRequests, 1);
                count(Counter::IpcRelayBytes, bytes_of(pieces) as u64);
                let Some(first) = in_use.first() else {
                    return self.answer(service, peer, id, Outcome::Done); // all of it was host memory
                };
                let device = Arc::clone(&first.device);
                let mut work = Work { peer, id, segments, device, running: None, in_use, ring };
                match self.start(&mut work, server) {
                    Some(outcome) => self.end(service, work, outcome),
                    None => self.work.push_back(work),
                }
            }
            Err(outcome) => {
                self.set_aside(&in_use);
                drop(in_use);
                count(Counter::IpcRelayRefused, 1);
                self.answer(service, peer, id, outcome);
            }
        }
    }

    /// Starts a request, if the card accepts it; returns the outcome, if it has ended.
    fn start(&mut self, work: &mut Work, server: Server) -> Option<Outcome> {
        // Nothing more is started for a peer that has hung up. No peer gets this answer.
        if !self.peers.contains_key(&work.peer) {
            return Some(Outcome::Failed);
        }
        let mut cards = work.in_use.iter().map(|used| &used.device);
        if server == Server::Assistant && !cards.all(|card| work.ring.region().has_pin(&**card)) {
            return None; // this would pin the ring
        }
        work.start()
    }

    /// Answers requests that have ended, and starts those that a card was too busy for.
    fn advance(&mut self, service: &Service, server: Server) {
        for _ in 0..self.work.len() {
            let Some(mut work) = self.work.pop_front() else { return };
            let outcome = match &mut work.running {
                Some(transfer) => transfer.poll().map(|result| outcome_of(&result)),
                None => self.start(&mut work, server),
            };
            match outcome {
                Some(outcome) => self.end(service, work, outcome),
                None => self.work.push_back(work),
            }
        }
    }

    /// Keeps a reference to the cards of this memory, so that no card is closed under the lock.
    fn set_aside(&mut self, in_use: &[InUse]) {
        let cards = &mut self.ended.cards;
        for InUse { device, .. } in in_use {
            if !cards.iter().any(|card| Arc::ptr_eq(card, device)) {
                cards.push(Arc::clone(device));
            }
        }
    }

    fn end(&mut self, service: &Service, work: Work, outcome: Outcome) {
        let Work { peer, id, .. } = work;
        self.set_aside(&work.in_use);
        // The last reference: the peer has hung up, or uses another ring.
        if Arc::strong_count(&work.ring) == 1 {
            self.ended.rings.push(Arc::clone(&work.ring));
        }
        // The memory is released before the peer gets the answer.
        drop(work);
        self.answer(service, peer, id, outcome);
    }

    /// Sends an answer. The queue is full only if the peer does not read: it has at most [`MAX_REQUESTS`] in flight.
    fn answer(&mut self, service: &Service, number: u64, id: u32, outcome: Outcome) {
        let Some(peer) = self.peers.get(&number) else { return };
        if socket::send(peer.socket.as_fd(), &Answer { id, outcome }.pack(), None).is_err() {
            self.hang_up(service, number);
        }
    }

    fn refuse(&mut self, service: &Service, number: u64, why: Refusal) {
        self.peers.get(&number).into_iter().for_each(|peer| refuse(&*peer.socket, why));
        self.hang_up(service, number);
    }

    fn hang_up(&mut self, service: &Service, number: u64) {
        if let Some(peer) = self.peers.remove(&number) {
            // Remove from epoll explicitly: a forked child may still have the socket open.
            let _ = epoll::delete(&service.epoll, &*peer.socket);
            // The peer sees this at once; closing may take long.
            let _ = shutdown(&*peer.socket, Shutdown::Both);
            self.ended.peers.push(peer);
        }
    }
}

impl Peer {
    /// Whether the next message is a small request without descriptors: closing those may take long.
    fn asks_for_little(&self, most: usize) -> bool {
        let mut message = [0; MAX_LEN];
        let Ok(len) = socket::peek_plain(self.socket.as_fd(), &mut message) else { return false };
        let request = Request::parse(&message[..len]);
        matches!(request, Some(Request::Copy { pieces, .. }) if bytes_of(&pieces) <= most)
    }
}

fn bytes_of(pieces: &Pieces) -> usize {
    pieces.iter().map(|piece| piece.len as usize).sum()
}

/// Checks all pieces and copies host memory at once. Returns what a card has to copy; `in_use` keeps the memory for that.
fn prepare(
    owner: &'static Owner,
    access: Access,
    pieces: &Pieces,
    ring: &Arc<Ring>,
    in_use: &mut Vec<InUse>,
) -> Result<Vec<Segment>, Outcome> {
    let mut segments = Vec::new();
    // Each piece has a place of its own in the ring, so together they cannot be longer than it.
    if bytes_of(pieces) > ring.len() {
        return Err(Outcome::Unknown);
    }
    for piece in pieces {
        let here = ring.at(piece.at, piece.len).ok_or(Outcome::Unknown)?;
        let len = piece.len as usize;
        if let Some(memory) = owner.host_shares.find(piece.token) {
            // SAFETY: inside the ring, which stays mapped; what its initiator does there meanwhile changes bytes, and
            // nothing else.
            let copied = unsafe { memory.copy(access, piece.addr, here, len) };
            copied.ok_or(Outcome::Unknown)?.map_err(|_| Outcome::Failed)?;
            continue;
        }
        let used = owner.begin_use(piece.token, piece.addr, piece.len.into());
        in_use.push(used.ok_or(Outcome::Unknown)?);
        let (host, card) = (Side::Host(here), Side::Device(DeviceAddr(piece.addr)));
        let (dst, src) = if access == Access::Write { (card, host) } else { (host, card) };
        segments.push(Segment { dst, src, len, host_region: Some(Arc::clone(ring.region())) });
    }
    Ok(segments)
}

impl Work {
    /// Starts the copy, if the card accepts it; returns the outcome, if it has ended.
    fn start(&mut self) -> Option<Outcome> {
        // SAFETY: the ring is kept until the copy has ended; what its initiator writes meanwhile changes bytes, and nothing
        // else.
        match unsafe { self.device.copy(&self.segments) } {
            Ok(mut transfer) => {
                let result = transfer.poll();
                self.running = Some(transfer);
                result.map(|result| outcome_of(&result))
            }
            Err(SubmitError::Busy) => None,
            Err(SubmitError::Failed(error)) => Some(outcome_of(&Err(error))),
        }
    }
}

/// What the peer is told: not why a copy failed, which is in the counters and the log here.
fn outcome_of(result: &Result<(), crate::Error>) -> Outcome {
    match result {
        Ok(()) => Outcome::Done,
        Err(_) => Outcome::Failed,
    }
}

fn count(counter: Counter, number: u64) {
    if let Some(counts) = Counts::process() {
        counts.add(counter, number);
    }
}

#[cfg(test)]
mod tests;
