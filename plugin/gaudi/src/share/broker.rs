//! The broker: a thread in the exporter that grants leases to importers and takes releases in.
//!
//! It is started when the first memory is shared, sleeps until something happens, and never blocks on
//! anybody: all sockets are non-blocking. It talks to processes of its own user only. A connection
//! that has not been granted a lease yet is closed after [`GRANT_DEADLINE`]; how many there are, of
//! either kind, is bounded by the process's limit of open files and per peer process.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use super::exporter::{Exporter, Offered, Reuse};
use super::key::Fields;
use super::leases::{ConnectionId, ExporterLeases};
use super::socket::{self, Outbox};
use super::wire::{LeaseId, MAX_LEN, Refusal, Reply, Request};
use super::{Identity, KEY_LEN, descriptors};
use crate::process::{CloseOnFork, Instance};
use crate::stats::{Counter, Counts};

/// How long a connection may take to be granted its first lease. An importer asks at once, and waits
/// a second for its turn (`importer`).
const GRANT_DEADLINE: Duration = Duration::from_millis(300);
/// Most connections of one peer process: an importer has one, and each of its workers one until its relay is served.
const MAX_PER_PROCESS: usize = 64;
/// Most messages taken from one connection before others have their turn.
const MAX_AT_ONCE: u32 = 256;
/// Most connections accepted from one socket before others have their turn.
const MAX_ACCEPTED: usize = 16;
/// Pause after so many were refused, or when there is no descriptor for the next: unauthorised
/// connections cannot keep a core busy.
const PAUSE: Duration = Duration::from_millis(2);

/// Where the broker listens and sleeps.
#[derive(Debug)]
pub(super) struct Broker {
    epoll: CloseOnFork,
    listeners: Vec<CloseOnFork>,
}

impl Broker {
    /// Listens; the reason if that is not possible.
    pub(super) fn new(own: &Identity) -> Result<Self, String> {
        let in_no_file = socket::listen_abstract(own);
        socket::remove_leftovers();
        let in_folder = socket::listen_in_folder(own);
        if let (Err(one), Err(other)) = (&in_no_file, &in_folder) {
            return Err(format!("abstract socket: {one}; socket in /dev/shm or /tmp: {other}"));
        }
        let in_folder = in_folder.ok().map(|(socket, path)| {
            remove_at_exit(path.as_os_str().as_bytes());
            socket
        });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|errno| format!("epoll: {errno}"))?;
        let epoll = descriptors::keep(epoll)?;
        let listeners = in_no_file.into_iter().chain(in_folder);
        let listeners = listeners.map(descriptors::keep).collect::<Result<Vec<_>, _>>()?;
        for (number, listener) in listeners.iter().enumerate() {
            let data = epoll::EventData::new_u64(u64::MAX - number as u64);
            epoll::add(&epoll, listener, data, epoll::EventFlags::IN)
                .map_err(|errno| format!("epoll: {errno}"))?;
        }
        Ok(Self { epoll, listeners })
    }

    /// Sleeps and serves, for ever.
    pub(super) fn run(&self, exporter: &'static Exporter) -> ! {
        let mut events = Vec::with_capacity(64);
        loop {
            let time_left = exporter.connections().time_left();
            let timeout = time_left.and_then(|left| Timespec::try_from(left).ok());
            events.clear();
            let waited = epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            );
            if waited.is_err() {
                // A signal, or no memory: neither lasts.
                std::thread::sleep(PAUSE);
                continue;
            }
            let mut refused = 0;
            for event in &events {
                let number = event.data.u64();
                match self.listeners.get((u64::MAX - number) as usize) {
                    Some(listener) => refused += self.accept(listener, exporter),
                    None => exporter.serve(ConnectionId(number)),
                }
            }
            exporter.expire();
            if refused >= MAX_ACCEPTED || exporter.connections().lack_memory() {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Takes new connections; returns how many were refused.
    fn accept(&self, listener: &CloseOnFork, exporter: &Exporter) -> usize {
        let mut refused = 0;
        for _ in 0..MAX_ACCEPTED {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(listener, flags) {
                Ok(connection) => {
                    let accepted = exporter.connections().accept(&self.epoll, connection);
                    refused += usize::from(!accepted);
                }
                Err(Errno::AGAIN) => break,
                // Out of descriptors, or the other end is gone again.
                Err(_) => return MAX_ACCEPTED,
            }
        }
        refused
    }
}

/// Removes the socket's file when the program ends in an orderly way; see also
/// [`socket::remove_leftovers`].
fn remove_at_exit(path: &[u8]) {
    static FILE: OnceLock<(CString, Instance)> = OnceLock::new();
    extern "C" fn remove() {
        if let Some((path, owner)) = FILE.get()
            && Instance::current() == *owner
        {
            // SAFETY: a string that lives for ever.
            unsafe { libc::unlink(path.as_ptr()) };
        }
    }
    let Ok(path) = CString::new(path) else { return };
    // A forked child that shares on its own leaves its file to `remove_leftovers`.
    if FILE.set((path, Instance::current())).is_ok() {
        // SAFETY: the handler takes no arguments, and the plugin is never unloaded.
        unsafe { libc::atexit(remove) };
    }
}

#[derive(Debug)]
struct Connection {
    socket: CloseOnFork,
    /// The peer's process id; 0 if it has none in our pid namespace.
    pid: u32,
    /// Must have been granted a lease by then; `None` if it was.
    deadline: Option<Instant>,
    outbox: Outbox<CloseOnFork>,
    /// Whether the broker's `epoll` waits for space in the peer's queue.
    waits_for_space: bool,
    /// We have hung up on a peer that has leases: only releases are read, until the peer closes.
    is_draining: bool,
    /// When it last asked for something, in requests of all.
    last_request: u64,
}

impl Connection {
    /// An error: hang up.
    fn send(&mut self, reply: Reply, enclosed: Option<Arc<CloseOnFork>>) -> Result<(), Errno> {
        self.outbox.send(self.socket.as_fd(), reply.pack(), enclosed)
    }

    /// Sends what waits. A descriptor may be refused by the kernel for what others do: too many of
    /// this user's are in flight. Then the lease is refused, and the peer keeps those it has.
    fn flush(
        &mut self,
        id: ConnectionId,
        leases: &mut ExporterLeases<Offered, Reuse>,
        reuse: &mut Vec<Reuse>,
    ) -> Result<(), Errno> {
        loop {
            let error = match self.outbox.flush(self.socket.as_fd()) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let refuse = |grant: &[u8]| {
                let lease = match Reply::parse(grant) {
                    Some(Reply::Grant { lease }) => lease,
                    _ => LeaseId::NONE,
                };
                reuse.extend(leases.release(id, lease));
                count(Counter::BrokerRefusedCrowded);
                Reply::Refused { lease, why: Refusal::Crowded }.pack()
            };
            let is_gone = matches!(error, Errno::PIPE | Errno::CONNRESET);
            if is_gone || !self.outbox.replace_enclosing(refuse) {
                return Err(error);
            }
        }
    }
}

/// The peers that are connected.
#[derive(Debug, Default)]
pub(super) struct Connections {
    by_id: HashMap<ConnectionId, Connection>,
    last: u64,
    requests: u64,
}

/// How many connections this process may have that were not granted a lease yet, and that were.
fn limits() -> (usize, usize) {
    let files = descriptors::limit();
    ((files / 32).clamp(2, 64), (files / 4).clamp(4, 1024))
}

/// Whether the conversation goes on.
enum Then {
    GoOn,
    /// We do not want to go on.
    HangUp,
    /// The peer has closed its end: it has unmapped everything, or has ended.
    Ended,
    /// It is a relay, with this ring.
    Relay(OwnedFd),
}

/// Connections that became relays, each with the descriptor of its ring.
pub(super) type Relays = Vec<(CloseOnFork, OwnedFd)>;

impl Connections {
    /// Time until the next grant deadline.
    fn time_left(&self) -> Option<Duration> {
        let deadlines = self.by_id.values().filter_map(|connection| connection.deadline);
        let left = deadlines.min()?.saturating_duration_since(Instant::now());
        Some(left + Duration::from_millis(1))
    }

    /// Whether the kernel had no memory for something that is to be sent.
    fn lack_memory(&self) -> bool {
        self.by_id.values().any(|connection| connection.outbox.lacks_memory())
    }

    /// Whether the connection was accepted.
    fn accept(&mut self, epoll: &CloseOnFork, socket: OwnedFd) -> bool {
        let peer = match socket::credentials(socket.as_fd()) {
            Ok(peer) if socket::is_same_user(peer) => peer,
            _ => {
                count(Counter::BrokerRefusedUser);
                return false;
            }
        };
        let of_peer = self.by_id.values().filter(|other| peer.pid != 0 && other.pid == peer.pid);
        let new = self.by_id.values().filter(|other| other.deadline.is_some());
        let is_crowded = of_peer.count() >= MAX_PER_PROCESS
            || new.count() >= limits().0
            || descriptors::check(socket.as_fd()).is_err();
        let id = ConnectionId(self.last + 1);
        let data = epoll::EventData::new_u64(id.0);
        let added =
            |socket: &CloseOnFork| epoll::add(epoll, socket, data, epoll::EventFlags::IN).is_ok();
        if is_crowded {
            count(Counter::BrokerRefusedCrowded);
            let reply = Reply::Refused { lease: LeaseId::NONE, why: Refusal::Crowded };
            let _ = socket::send(socket.as_fd(), reply.pack().as_ref(), None);
            return false;
        }
        let Some(socket) = CloseOnFork::new(socket).filter(added) else { return false };
        self.last = id.0;
        let connection = Connection {
            socket,
            pid: peer.pid,
            deadline: Some(Instant::now() + GRANT_DEADLINE),
            outbox: Outbox::default(),
            waits_for_space: false,
            is_draining: false,
            last_request: self.requests,
        };
        self.by_id.insert(id, connection);
        true
    }

    /// Everybody.
    pub(super) fn all(&self) -> Vec<ConnectionId> {
        self.by_id.keys().copied().collect()
    }

    /// Those who were not granted anything in time.
    pub(super) fn overdue(&self) -> Vec<ConnectionId> {
        let now = Instant::now();
        let overdue = |connection: &Connection| connection.deadline.is_some_and(|end| end <= now);
        self.by_id.iter().filter(|(_, one)| overdue(one)).map(|(id, _)| *id).collect()
    }

    /// Sends what waits for space, and deals with what the peer has sent. Memory that is free now
    /// goes to `reuse`.
    pub(super) fn serve(
        &mut self,
        id: ConnectionId,
        broker: &Broker,
        exporter: &Exporter,
        leases: &mut ExporterLeases<Offered, Reuse>,
        (reuse, relays): (&mut Vec<Reuse>, &mut Relays),
    ) {
        match self.exchange(id, exporter, leases, reuse) {
            Then::GoOn => {}
            Then::Relay(ring) => {
                if let Some(Connection { socket, .. }) = self.by_id.remove(&id) {
                    let _ = epoll::delete(&broker.epoll, &socket);
                    relays.push((socket, ring));
                }
                return;
            }
            Then::HangUp if leases.has_leases(id) => self.drain(id),
            Then::HangUp | Then::Ended => return self.hang_up(id, broker, leases, reuse),
        }
        self.update_interest(id, broker);
    }

    /// Hangs up on a peer that has leases. It may be copying: its leases end when it releases them or
    /// closes its end, which it does when it has unmapped the last.
    fn drain(&mut self, id: ConnectionId) {
        let Some(connection) = self.by_id.get_mut(&id) else { return };
        connection.is_draining = true;
        connection.outbox = Outbox::default();
        let _ = rustix::net::shutdown(&connection.socket, Shutdown::Write);
    }

    fn exchange(
        &mut self,
        id: ConnectionId,
        exporter: &Exporter,
        leases: &mut ExporterLeases<Offered, Reuse>,
        reuse: &mut Vec<Reuse>,
    ) -> Then {
        let Some(connection) = self.by_id.get_mut(&id) else { return Then::GoOn };
        if connection.flush(id, leases, reuse).is_err() {
            return Then::HangUp;
        }
        for _ in 0..MAX_AT_ONCE {
            let Some(connection) = self.by_id.get_mut(&id) else { return Then::GoOn };
            // Its requests are not read while replies to it wait for space.
            if !connection.outbox.is_empty() {
                return Then::GoOn;
            }
            // One byte more than a message, so that a longer one is seen to be.
            let mut message = [0; MAX_LEN + 1];
            match socket::receive(connection.socket.as_fd(), &mut message) {
                Err(Errno::AGAIN | Errno::INTR) => return Then::GoOn,
                // Longer than any message.
                Err(Errno::MSGSIZE) => return self.answer(id, None, leases, reuse),
                Ok((0, _)) | Err(_) => return Then::Ended,
                Ok((len, descriptor)) => match (Request::parse(&message[..len]), descriptor) {
                    (request, _) if connection.is_draining => {
                        if let Some(Request::Release { lease }) = request {
                            reuse.extend(leases.release(id, lease));
                        }
                    }
                    (Some(Request::Relay { key }), Some(ring))
                        if connection.deadline.is_some() && is_shared(&key, exporter, leases) =>
                    {
                        return Then::Relay(ring);
                    }
                    (request, _) => {
                        if let Then::HangUp = self.answer(id, request, leases, reuse) {
                            return Then::HangUp;
                        }
                    }
                },
            }
        }
        Then::GoOn
    }

    fn answer(
        &mut self,
        id: ConnectionId,
        request: Option<Request>,
        leases: &mut ExporterLeases<Offered, Reuse>,
        reuse: &mut Vec<Reuse>,
    ) -> Then {
        let has_capacity = self.has_capacity(id, leases);
        self.requests += 1;
        let now = self.requests;
        let Some(connection) = self.by_id.get_mut(&id) else { return Then::HangUp };
        connection.last_request = now;
        let is_new = connection.deadline.is_some();
        let (lease, answer) = match request {
            Some(Request::Release { lease }) if !is_new => {
                reuse.extend(leases.release(id, lease));
                return Then::GoOn;
            }
            Some(Request::Open { lease, key }) => {
                let base = Fields::parse(&key).map(|key| key.base);
                let answer = match base {
                    Ok(base) if has_capacity => leases.open(id, lease, base, &key),
                    Ok(_) => Err(Refusal::Crowded),
                    Err(_) => Err(Refusal::Unknown),
                };
                (lease, answer)
            }
            // One of which no memory is shared under this key.
            Some(Request::Relay { .. }) if is_new => (LeaseId::NONE, Err(Refusal::Unknown)),
            Some(Request::Release { .. } | Request::Relay { .. }) | None => {
                (LeaseId::NONE, Err(Refusal::Malformed))
            }
        };
        let answer = answer.and_then(|offered| {
            let none = || {
                reuse.extend(leases.release(id, lease));
                Refusal::NoDmabuf
            };
            offered.dmabuf.clone().ok_or_else(none)
        });
        let stays = match answer {
            Ok(descriptor) => {
                count(Counter::BrokerGranted);
                connection.deadline = None;
                // What fails is tried again below.
                let _ = connection.send(Reply::Grant { lease }, Some(descriptor));
                true
            }
            Err(why) => {
                count(match why {
                    Refusal::Unknown => Counter::BrokerRefusedToken,
                    Refusal::Malformed | Refusal::NoDmabuf => Counter::BrokerRefusedMessage,
                    Refusal::Crowded => Counter::BrokerRefusedCrowded,
                });
                let _ = connection.send(Reply::Refused { lease, why }, None);
                why != Refusal::Malformed && !is_new
            }
        };
        let sent = connection.flush(id, leases, reuse);
        if sent.is_ok() && stays { Then::GoOn } else { Then::HangUp }
    }

    /// Whether this connection is among those that were granted a lease, or may become one of them. At
    /// the limit, the least recent connection without leases is closed.
    fn has_capacity(
        &mut self,
        id: ConnectionId,
        leases: &mut ExporterLeases<Offered, Reuse>,
    ) -> bool {
        if self.by_id.get(&id).is_none_or(|connection| connection.deadline.is_none()) {
            return true;
        }
        let granted = || self.by_id.iter().filter(|(_, other)| other.deadline.is_none());
        if granted().count() < limits().1 {
            return true;
        }
        let idle = granted().filter(|(id, _)| !leases.has_leases(**id));
        let Some(idle) = idle.min_by_key(|(_, other)| other.last_request).map(|(id, _)| *id) else {
            return false;
        };
        let _none = leases.hang_up(idle);
        if let Some(mut idle) = self.by_id.remove(&idle) {
            // Notify it, so that it does not take EOF for our exit. Closing removes it from epoll.
            let why = Refusal::Crowded;
            let _ = idle.send(Reply::Refused { lease: LeaseId::NONE, why }, None);
        }
        true
    }

    /// Asks for a lease back. Whether that was sent or will be.
    pub(super) fn revoke(&mut self, id: ConnectionId, lease: LeaseId, broker: &Broker) -> bool {
        let connection = self.by_id.get_mut(&id).filter(|connection| !connection.is_draining);
        let Some(connection) = connection else { return false };
        let sent = connection.send(Reply::Revoke { lease }, None).is_ok();
        self.update_interest(id, broker);
        sent
    }

    /// Closes a connection whose peer has closed it or has no lease; all its leases end.
    pub(super) fn hang_up(
        &mut self,
        id: ConnectionId,
        broker: &Broker,
        leases: &mut ExporterLeases<Offered, Reuse>,
        reuse: &mut Vec<Reuse>,
    ) {
        if let Some(connection) = self.by_id.remove(&id) {
            // Remove from epoll explicitly: a child may still have the socket open.
            let _ = epoll::delete(&broker.epoll, &connection.socket);
        }
        reuse.extend(leases.hang_up(id));
    }

    /// Has the broker wake up when there is space in the peer's queue, as long as that matters.
    fn update_interest(&mut self, id: ConnectionId, broker: &Broker) {
        let Some(connection) = self.by_id.get_mut(&id) else { return };
        let waits = !connection.outbox.is_empty();
        if waits != connection.waits_for_space {
            // While it waits, its requests are not read.
            let flags = if waits { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            let data = epoll::EventData::new_u64(id.0);
            let _ = epoll::modify(&broker.epoll, &connection.socket, data, flags);
            connection.waits_for_space = waits;
        }
    }
}

/// Whether memory is shared under this key now, of a card or of the host.
fn is_shared(
    key: &[u8; KEY_LEN],
    exporter: &Exporter,
    leases: &ExporterLeases<Offered, Reuse>,
) -> bool {
    Fields::parse(key).is_ok_and(|fields| {
        leases.is_offered(fields.base, key) || exporter.host_shares().has(&fields)
    })
}

fn count(counter: Counter) {
    if let Some(counts) = Counts::process() {
        counts.add(counter, 1);
    }
}
