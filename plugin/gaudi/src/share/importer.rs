//! The importer's side of the protocol: one connection to each exporter, over which leases are asked
//! for, revoked and released, and whose end is the exporter's end.
//!
//! Whoever opens memory asks and waits for the answer itself, one at a time per connection, and not for
//! long: the exporter may be stopped, flooded or hostile. Everything else that comes in is received by
//! one thread, started with the first lease. Nothing is kept of an exporter before it has granted one.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::key::Fields;
use super::leases::{Action, ImporterLeases, Violation};
use super::no_lease::NoLease;
use super::patience::Patience;
use super::socket::{Credentials, Outbox, Unconnected};
use super::wire::{LeaseId, MAX_LEN, Refusal, Reply, Request};
use super::{Identity, descriptors, opened, socket};
use crate::device::Registry;
use crate::probes;
use crate::process::{CloseOnFork, PerProcess, thread};

/// Between two attempts at a broker that is crowded.
const PAUSE: Duration = Duration::from_millis(2);
/// Most messages taken from one exporter before others have their turn.
const MAX_AT_ONCE: u32 = 256;
/// Most exporters of which it is remembered that they have ended.
const MAX_ENDED: usize = 64;

/// A lease on memory of another process; released when dropped.
#[derive(Debug)]
pub(super) struct Lease {
    connection: Arc<Connection>,
    id: LeaseId,
}

impl Lease {
    /// Whether the exporter has ended; its leases are void. Also if it only closed the connection.
    pub(super) fn has_exporter_ended(&self) -> bool {
        self.connection.is_closed()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.connection.release(self.id);
    }
}

/// Asks the exporter for a lease, on the connection there is or on a new one.
pub(super) fn lease(key: &Fields, registry: &Arc<Registry>) -> Result<(Lease, OwnedFd), NoLease> {
    probes::hand_over(|| ask_for_lease(key, Importer::current(registry)?))
}

fn ask_for_lease(key: &Fields, importer: &'static Importer) -> Result<(Lease, OwnedFd), NoLease> {
    if let Some(connection) = importer.find(&key.peer) {
        match connection.request(key) {
            // It refused this lease, and stays connected.
            Err(NoLease::Crowded) if !connection.closed_for_capacity.load(Ordering::Relaxed) => {
                return Err(NoLease::Crowded);
            }
            // It may have closed a connection without leases for capacity: try a new one.
            Err(NoLease::HungUp | NoLease::Crowded | NoLease::NotUnderstood) => {
                importer.drop_connection(&connection);
            }
            answer => return answer,
        }
    }
    importer.connect(key)
}

/// Whether who listens is this process, and of our user.
pub(super) fn is_exporter(exporter: &Identity) -> impl Fn(Credentials) -> bool {
    let (anywhere, pid) = (!exporter.is_in_our_pid_namespace(), exporter.pid);
    move |listener| (anywhere || listener.pid == pid) && socket::is_same_user(listener)
}

/// Whether the exporter lives, by the state of its connection: `None` if there never was one.
pub(super) fn is_connected(exporter: &Identity) -> Option<bool> {
    let table = IMPORTER.get()?.table();
    let has_ended = table.ended.contains(exporter).then_some(false);
    table.connections.contains_key(exporter).then_some(true).or(has_ended)
}

/// This process as an importer.
#[derive(Debug)]
struct Importer {
    epoll: CloseOnFork,
    /// Has the devices that keep what is leased.
    registry: Arc<Registry>,
    table: Mutex<Table>,
    /// A [`FirstContact`] has ended.
    contacted: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    /// Those with which a thread makes the first contact.
    contacting: HashSet<Identity>,
    /// All have granted a lease.
    connections: HashMap<Identity, Arc<Connection>>,
    last: u64,
    patience: Patience,
    /// Whose connections have ended.
    ended: VecDeque<Identity>,
    thread_runs: bool,
}

static IMPORTER: PerProcess<Importer> = PerProcess::new();

/// Most exporters this process is connected to.
fn max_connections() -> usize {
    (descriptors::limit() / 8).clamp(4, 512)
}

impl Importer {
    fn current(registry: &Arc<Registry>) -> Result<&'static Importer, NoLease> {
        IMPORTER.get_or_make(|| {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
            let epoll = epoll.map_err(|errno| NoLease::Ourselves(format!("epoll: {errno}")))?;
            let epoll = descriptors::keep(epoll).map_err(NoLease::Ourselves)?;
            let registry = Arc::clone(registry);
            Ok(Self { epoll, registry, table: Mutex::default(), contacted: Condvar::new() })
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, exporter: &Identity) -> Option<Arc<Connection>> {
        self.table().connections.get(exporter).cloned()
    }

    /// Connects to an exporter. The connection stays only if it grants the lease.
    fn connect(&'static self, key: &Fields) -> Result<(Lease, OwnedFd), NoLease> {
        let _contact = self.first_contact(&key.peer);
        if let Some(connection) = self.find(&key.peer) {
            return connection.request(key);
        }
        let deadline = self.deadline(&key.peer)?;
        self.make_capacity()?;
        self.start_thread()?;
        loop {
            match self.try_connect(key, deadline) {
                // Its queue is full, or it has too many connections at the moment.
                Err(NoLease::NobodyListens(Errno::AGAIN) | NoLease::Crowded)
                    if Instant::now() + PAUSE < deadline =>
                {
                    std::thread::sleep(PAUSE);
                }
                answer => return self.noted(&key.peer, answer),
            }
        }
    }

    /// Until when to wait for an answer of this exporter; or why not at all.
    fn deadline(&self, exporter: &Identity) -> Result<Instant, NoLease> {
        let now = Instant::now();
        self.table().patience.with(exporter, now).map(|wait| now + wait)
    }

    /// Takes note of a wait until the [`Importer::deadline`] in vain.
    fn noted<T>(&self, exporter: &Identity, answer: Result<T, NoLease>) -> Result<T, NoLease> {
        use NoLease::{Crowded, NobodyListens, Silent};
        if let Err(why @ (Silent | Crowded | NobodyListens(Errno::AGAIN))) = &answer {
            self.table().patience.was_in_vain(*exporter, Instant::now(), why);
        }
        answer
    }

    /// Waits until no other thread makes contact with this exporter: there is one connection to each.
    fn first_contact(&'static self, exporter: &Identity) -> FirstContact {
        let mut table = self.table();
        while !table.contacting.insert(*exporter) {
            table = self.contacted.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
        FirstContact { importer: self, exporter: *exporter }
    }

    fn try_connect(
        &'static self,
        key: &Fields,
        deadline: Instant,
    ) -> Result<(Lease, OwnedFd), NoLease> {
        let exporter = key.peer;
        let socket =
            socket::connect(&exporter, is_exporter(&exporter)).map_err(|why| match why {
                Unconnected::Nobody(errno) => NoLease::NobodyListens(errno),
                Unconnected::Another => NoLease::NotTheExporter,
            })?;
        let socket = descriptors::keep(socket).map_err(NoLease::Ourselves)?;
        let number = {
            let mut table = self.table();
            table.last += 1;
            table.last
        };
        let connection = Arc::new(Connection {
            importer: self,
            number,
            exporter,
            socket,
            receiving: Mutex::default(),
            state: Mutex::default(),
            is_closed: AtomicBool::new(false),
            closed_for_capacity: AtomicBool::new(false),
        });
        // Nobody else receives from it yet.
        let granted = connection.request_until(key, deadline)?;
        let mut table = self.table();
        table.ended.retain(|ended| *ended != exporter);
        table.connections.insert(exporter, Arc::clone(&connection));
        drop(table);
        // From here on the thread sees what comes in, also if it is the end.
        connection.watch().inspect_err(|_| self.drop_connection(&connection))?;
        Ok(granted)
    }

    /// Closes a connection without leases if there are too many.
    fn make_capacity(&self) -> Result<(), NoLease> {
        for attempt in 0..2 {
            let table = self.table();
            if table.connections.len() + table.contacting.len() <= max_connections() {
                return Ok(());
            }
            drop(table);
            if attempt == 0 {
                // Leases that are only kept for later are released.
                opened::evict(&self.registry, |_| true);
            }
            let closed = |connection: &&Arc<Connection>| connection.close_if_idle();
            let idle = self.table().connections.values().find(closed).cloned();
            if let Some(idle) = idle {
                self.drop_connection(&idle);
            }
        }
        let what = format!("memory of {} processes is in use already", max_connections());
        Err(NoLease::Ourselves(what))
    }

    fn start_thread(&'static self) -> Result<(), NoLease> {
        let mut table = self.table();
        if !table.thread_runs {
            thread::spawn("gaudi-peers", || self.run())
                .map_err(|error| NoLease::Ourselves(format!("no thread: {error}")))?;
            table.thread_runs = true;
        }
        Ok(())
    }

    /// Sleeps and receives, for ever.
    fn run(&self) -> ! {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let events_here = rustix::buffer::spare_capacity(&mut events);
            if epoll::wait(&self.epoll, events_here, None).is_err() {
                std::thread::sleep(PAUSE);
                continue;
            }
            for event in &events {
                let number = event.data.u64();
                let is_it = |connection: &&Arc<Connection>| connection.number == number;
                let connection = self.table().connections.values().find(is_it).cloned();
                if let Some(connection) = connection {
                    connection.serve();
                }
            }
        }
    }

    /// Closes a connection, from this side or after the exporter has: what is mapped of the exporter's
    /// memory is unmapped, at once or when its last user is done.
    fn drop_connection(&self, connection: &Arc<Connection>) {
        connection.close();
        let mut table = self.table();
        let exporter = connection.exporter;
        let listed = table.connections.get(&exporter);
        if !listed.is_some_and(|listed| Arc::ptr_eq(listed, connection)) {
            return;
        }
        table.connections.remove(&exporter);
        if !connection.closed_for_capacity.load(Ordering::Relaxed) {
            if table.ended.len() >= MAX_ENDED {
                table.ended.pop_front();
            }
            table.ended.push_back(exporter);
        }
        drop(table);
        opened::evict(&self.registry, |key| key.peer == exporter);
    }
}

/// A thread makes the first contact with an exporter.
struct FirstContact {
    importer: &'static Importer,
    exporter: Identity,
}

impl Drop for FirstContact {
    fn drop(&mut self) {
        self.importer.table().contacting.remove(&self.exporter);
        self.importer.contacted.notify_all();
    }
}

/// How long an exporter may still take.
fn time_left(deadline: Instant) -> Result<Duration, NoLease> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(NoLease::Silent) } else { Ok(left) }
}

/// A connection to an exporter's broker.
#[derive(Debug)]
struct Connection {
    importer: &'static Importer,
    number: u64,
    exporter: Identity,
    socket: CloseOnFork,
    /// The right to receive. Whoever waits for an answer has it throughout: were the answer received
    /// by another thread, the one that polls the socket would not wake up.
    receiving: Mutex<()>,
    state: Mutex<State>,
    /// Hung up, by either side: nothing is requested any more. Set under `state`.
    is_closed: AtomicBool,
    /// Closed because one side needs the descriptor for other connections: the exporter has not ended.
    closed_for_capacity: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    leases: ImporterLeases<Fields, OwnedFd>,
    outbox: Outbox<OwnedFd>,
    /// Whether the thread's `epoll` has it.
    is_watched: bool,
    /// Somebody waits for an answer and receives by itself: the thread need not wake up.
    is_muted: bool,
}

impl State {
    fn interest(&self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, !self.is_muted);
        flags.set(epoll::EventFlags::OUT, !self.outbox.is_empty());
        flags
    }
}

impl Connection {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    fn watch(&self) -> Result<(), NoLease> {
        let mut state = self.state();
        // Another thread may have found it in the table and dropped it.
        if self.is_closed() {
            return Err(NoLease::HungUp);
        }
        let data = epoll::EventData::new_u64(self.number);
        epoll::add(&self.importer.epoll, &self.socket, data, state.interest())
            .map_err(|errno| NoLease::Ourselves(format!("epoll: {errno}")))?;
        state.is_watched = true;
        Ok(())
    }

    /// Requests nothing any more. The exporter takes the end of the connection for the end of its
    /// leases: while there are any it stays open, and is closed with the last [`Lease`].
    fn close(&self) {
        self.close_locked(&mut self.state());
    }

    /// Closes it for its descriptor, if it has no leases and nobody waits for one.
    fn close_if_idle(&self) -> bool {
        let mut state = self.state();
        let is_idle = state.leases.is_idle();
        if is_idle {
            self.closed_for_capacity.store(true, Ordering::Relaxed);
            self.close_locked(&mut state);
        }
        is_idle
    }

    fn close_locked(&self, state: &mut State) {
        self.is_closed.store(true, Ordering::Release);
        if std::mem::take(&mut state.is_watched) {
            // Remove from epoll explicitly: a child may still have the socket open.
            let _ = epoll::delete(&self.importer.epoll, &self.socket);
        }
        if state.leases.is_idle() {
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// Sets what the thread's `epoll` waits for.
    fn update_interest(&self, state: &State) {
        if state.is_watched {
            let data = epoll::EventData::new_u64(self.number);
            // Fails only for one that was dropped meanwhile.
            let epoll = &self.importer.epoll;
            let _ = epoll::modify(epoll, &self.socket, data, state.interest());
        }
    }

    fn set_muted(&self, is_muted: bool) {
        let mut state = self.state();
        state.is_muted = is_muted;
        self.update_interest(&state);
    }

    /// Asks for a lease and waits for the answer.
    fn request(self: &Arc<Self>, key: &Fields) -> Result<(Lease, OwnedFd), NoLease> {
        let _receiving = self.receiving.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = self.importer.deadline(&self.exporter)?;
        match self.request_until(key, deadline) {
            // It answers.
            Err(NoLease::Crowded) => Err(NoLease::Crowded),
            answer => self.importer.noted(&self.exporter, answer),
        }
    }

    /// For whoever has the right to receive.
    fn request_until(
        self: &Arc<Self>,
        key: &Fields,
        deadline: Instant,
    ) -> Result<(Lease, OwnedFd), NoLease> {
        let id = {
            let mut state = self.state();
            if self.is_closed() {
                return Err(NoLease::HungUp);
            }
            state.leases.request(*key)
        };
        self.set_muted(true);
        let answer = self.ask(id, key, deadline);
        self.set_muted(false);
        if answer.is_err() && self.state().leases.abandon(id) {
            self.send(Request::Release { lease: id });
        }
        let dmabuf = answer?;
        Ok((Lease { connection: Arc::clone(self), id }, dmabuf))
    }

    fn ask(&self, lease: LeaseId, key: &Fields, deadline: Instant) -> Result<OwnedFd, NoLease> {
        let open = Request::Open { lease, key: key.pack() }.pack();
        loop {
            match socket::send(self.socket.as_fd(), open.as_ref(), None) {
                // It may have sent the reason before it closed the connection.
                Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => break,
                Err(Errno::AGAIN | Errno::INTR) => self.wait(PollFlags::OUT, deadline)?,
                Err(Errno::NOBUFS | Errno::NOMEM) => {
                    // The socket is writable: there is nothing to wait for.
                    time_left(deadline)?;
                    std::thread::sleep(PAUSE);
                }
                Err(_) => return Err(NoLease::HungUp),
            }
        }
        loop {
            if let Some(answer) = self.state().leases.answer(lease) {
                return answer.map_err(NoLease::from);
            }
            // An exporter that sends other things without end does not keep us.
            time_left(deadline)?;
            if !self.receive()? {
                self.wait(PollFlags::IN, deadline)?;
            }
        }
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> Result<(), NoLease> {
        let timeout = Timespec::try_from(time_left(deadline)?).map_err(|_| NoLease::Silent)?;
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&timeout)) {
            Ok(0) => Err(NoLease::Silent),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(_) => Err(NoLease::HungUp),
        }
    }

    /// Receives one message and does what it asks for; `false` if there is none. For whoever has the
    /// right to receive.
    fn receive(&self) -> Result<bool, NoLease> {
        let mut message = [0; MAX_LEN + 1];
        let received = match socket::receive(self.socket.as_fd(), &mut message) {
            // It hung up without reading what we sent; what it sent comes after this error.
            Err(Errno::CONNRESET) => socket::receive(self.socket.as_fd(), &mut message),
            received => received,
        };
        let (len, descriptor) = match received {
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(Errno::MSGSIZE) => return Err(NoLease::NotUnderstood),
            Ok((0, _)) | Err(_) => return Err(NoLease::HungUp),
            Ok(received) => received,
        };
        let reply = Reply::parse(&message[..len]).ok_or(NoLease::NotUnderstood)?;
        if let Reply::Refused { lease: LeaseId::NONE, why } = reply {
            // The answer to nothing: it hangs up.
            self.closed_for_capacity.store(why == Refusal::Crowded, Ordering::Relaxed);
            return Err(why.into());
        }
        let action = self.state().leases.receive(reply, descriptor);
        match action {
            Ok(Action::Nothing) => {}
            Ok(Action::Release(lease)) => self.send(Request::Release { lease }),
            Ok(Action::Evict(revoked)) => {
                opened::evict(&self.importer.registry, |key| *key == revoked);
            }
            Err(Violation) => return Err(NoLease::NotUnderstood),
        }
        Ok(true)
    }

    /// Sends now, or has the thread send when there is space: never waits.
    fn send(&self, request: Request) {
        let mut state = self.state();
        let had_space = state.outbox.is_empty();
        // An error shows at the next receive too.
        let _ = state.outbox.send(self.socket.as_fd(), request.pack(), None);
        if had_space != state.outbox.is_empty() {
            self.update_interest(&state);
        }
    }

    /// The import is unmapped.
    fn release(&self, lease: LeaseId) {
        if self.state().leases.release(lease) {
            self.send(Request::Release { lease });
        }
    }

    /// Sends what waits for space, and takes in what has come.
    fn serve(self: &Arc<Self>) {
        let flushed = {
            let mut state = self.state();
            let flushed = state.outbox.flush(self.socket.as_fd());
            self.update_interest(&state);
            flushed
        };
        if self.state().outbox.lacks_memory() {
            // The socket is writable: the thread wakes up at once.
            std::thread::sleep(PAUSE);
        }
        let mut alive = flushed.is_ok();
        // Else somebody waits for an answer, and takes in the rest as well.
        if let Ok(_receiving) = self.receiving.try_lock() {
            let mut left = MAX_AT_ONCE;
            while alive && left > 0 {
                left -= 1;
                match self.receive() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) => alive = false,
                }
            }
        }
        if !alive {
            self.importer.drop_connection(self);
        }
    }
}

#[cfg(test)]
#[path = "importer_tests.rs"]
mod tests;
