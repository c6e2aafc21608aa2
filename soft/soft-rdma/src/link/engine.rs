//! The thread behind the sockets: accepts, reads, writes, and wakes queue pairs when their timers are due.
//!
//! It sleeps in `epoll_wait` when there is nothing to do. A program that polls an empty completion queue does the same
//! work itself ([`Engine::progress`]). So it does not wait for the thread to be scheduled.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use rustix::process::Pid;

use super::connection::Connection;
use super::control::Control;
use super::descriptor::Descriptor;
use crate::config::{Config, log};
use crate::fabric::Owner;
use crate::hca::events::lock;
use crate::hca::qp::QueuePair;
use crate::hca::{Fabric, Hca, Link};
use crate::node::Node;

const WAKE: u64 = 0;
const LISTEN_UNIX: u64 = 1;
const LISTEN_TCP: u64 = 2;
const CONTROL: u64 = 3;
const FIRST_CONNECTION: u64 = 16;
/// Most connections of one process, both accepted and opened.
const MAX_CONNECTIONS: usize = 4096;

struct Timer {
    when: Instant,
    order: u64,
    qp: Weak<QueuePair>,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.when, self.order).cmp(&(other.when, other.order))
    }
}

/// Sockets, connections and timers of this process.
pub(crate) struct Engine {
    hca: Arc<Hca>,
    node: Node,
    /// This node's number.
    own: u16,
    nodes: &'static HashMap<u16, SocketAddr>,
    pollers_work: bool,
    epoll: Arc<Descriptor>,
    wake: Descriptor,
    unix: Descriptor,
    tcp: Option<Descriptor>,
    control: Control,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    /// Connections that we opened, by the process they lead to.
    links: Mutex<HashMap<Owner, Arc<Connection>>>,
    timers: Mutex<BinaryHeap<Reverse<Timer>>>,
    /// When to accept connections again, after a pause.
    resume: Mutex<Option<Instant>>,
    next: AtomicU64,
    /// Held by the thread that handles events.
    turn: Mutex<()>,
    /// How often a program found the turn taken since it last got it.
    refused: AtomicU32,
    /// When a program last polled, in microseconds since `epoch`; zero if it has stopped.
    polled: AtomicU64,
    epoch: Instant,
    /// Wakes the thread when a program stops polling.
    takeover: Condvar,
    idle: Mutex<()>,
}

/// Pause before connections are accepted again, when the process is out of file descriptors.
const PAUSE: Duration = Duration::from_millis(20);
/// While a program polls at least this often, the thread leaves the work to it.
const POLLING: Duration = Duration::from_micros(10);
/// How long the thread then waits before it checks again: at first, and at most.
const STAND_BACK: [Duration; 2] = [Duration::from_micros(10), Duration::from_micros(320)];

/// Where a process listens.
#[derive(Debug)]
pub(crate) struct Listeners {
    unix: Descriptor,
    /// Only if there are other nodes.
    tcp: Option<Descriptor>,
}

impl Listeners {
    /// Opens the listeners of a slot.
    pub(crate) fn open(node: &Node, config: &Config) -> Result<Self, Errno> {
        let tcp = listen_tcp(node, config)?;
        Ok(Self { unix: listen_unix(node, config)?, tcp })
    }
}

fn listen_unix(node: &Node, config: &Config) -> Result<Descriptor, Errno> {
    let path = node.socket_path(config.node, node.slot);
    let address = SocketAddrUnix::new(&path).inspect_err(|_| {
        eprintln!("soft-rdma: {} is too long for a socket: set SOFT_RDMA_DIR", path.display());
    })?;
    // The slot is ours, so a socket of that name was left by a dead process.
    let _ = rustix::fs::unlink(&path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let socket = Descriptor::from(socket);
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, 512)?;
    Ok(socket)
}

fn listen_tcp(node: &Node, config: &Config) -> Result<Option<Descriptor>, Errno> {
    let Some(base) = config.nodes.get(&config.node) else { return Ok(None) };
    let mut address = *base;
    address.set_port(base.port().checked_add(node.slot).ok_or(Errno::INVAL)?);
    if !address.ip().is_loopback() {
        log!(Info, "{address} is open to every process of the hosts in SOFT_RDMA_NODES");
    }
    let socket = tcp_socket(&address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, 512)?;
    Ok(Some(socket))
}

/// Process and user at the other end of a Unix socket. There is no process id for a peer in another pid namespace: the
/// kernel reports 0 (which `rustix`'s `UCred` cannot represent).
fn credentials(socket: &Descriptor) -> Result<(Option<Pid>, u32), Errno> {
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a structure of ours and its length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    Ok((Pid::from_raw(found.pid), found.uid))
}

fn tcp_socket(address: &SocketAddr) -> Result<Descriptor, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // A dead host sends nothing. With keepalive, a side that only waits for an answer notices after half a minute. A
    // stopped process does not count as dead: its kernel answers.
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, Duration::from_secs(15))?;
    sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(&socket, 3)?;
    Ok(socket.into())
}

impl Engine {
    /// Opens the sockets and starts the thread.
    pub(crate) fn start(
        hca: Arc<Hca>,
        node: Node,
        Listeners { unix, tcp }: Listeners,
        config: &'static Config,
    ) -> Result<Arc<Self>, Errno> {
        let epoll = Arc::new(Descriptor::from(epoll::create(epoll::CreateFlags::CLOEXEC)?));
        let wake: Descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?.into();
        let control = Control::open(config);
        control.changes(hca.ports);
        let listeners = [
            (Some(&wake), WAKE),
            (Some(&unix), LISTEN_UNIX),
            (tcp.as_ref(), LISTEN_TCP),
            (control.fd(), CONTROL),
        ];
        for (fd, id) in listeners {
            if let Some(fd) = fd {
                epoll::add(&*epoll, fd, epoll::EventData::new_u64(id), epoll::EventFlags::IN)?;
            }
        }
        let engine = Arc::new(Self {
            own: config.node,
            hca: hca.clone(),
            node,
            nodes: &config.nodes,
            pollers_work: config.pollers_work,
            epoll,
            wake,
            unix,
            tcp,
            control,
            connections: Mutex::default(),
            links: Mutex::default(),
            timers: Mutex::default(),
            resume: Mutex::default(),
            next: AtomicU64::new(FIRST_CONNECTION),
            turn: Mutex::default(),
            refused: AtomicU32::new(0),
            polled: AtomicU64::new(0),
            epoch: Instant::now(),
            takeover: Condvar::new(),
            idle: Mutex::default(),
        });
        hca.attach(engine.clone());
        let thread = engine.clone();
        std::thread::Builder::new()
            .name("soft-rdma".to_owned())
            .spawn(move || {
                block_signals();
                run_soon();
                thread.run();
            })
            .map_err(|_| Errno::AGAIN)?;
        Ok(engine)
    }

    fn run(&self) {
        let [mut stand_back, most] = STAND_BACK;
        loop {
            let timeout = self.next_timer().map(|when| {
                let left = when.saturating_duration_since(Instant::now());
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
            });
            let mut events = Vec::with_capacity(64);
            match epoll::wait(
                &*self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    eprintln!("soft-rdma: the engine stops: {error}");
                    return;
                }
            }
            {
                // Checked under the lock that `take_over` takes before it notifies: so no notification is lost.
                let idle = lock(&self.idle);
                if self.is_polled() {
                    // The program does the work. Two threads at the same work slow each other down.
                    drop(self.takeover.wait_timeout(idle, stand_back));
                    stand_back = most.min(stand_back * 2);
                    continue;
                }
            }
            stand_back = STAND_BACK[0];
            let _turn = lock(&self.turn);
            self.handle(&events);
        }
    }

    /// Takes the turn if it is free, also after a panic of the thread that had it.
    fn try_turn(&self) -> Option<MutexGuard<'_, ()>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether a program polled a moment ago.
    fn is_polled(&self) -> bool {
        let polled = self.polled.load(Ordering::Relaxed);
        let now = self.epoch.elapsed().as_micros() as u64;
        polled != 0 && now.saturating_sub(polled) < POLLING.as_micros() as u64
    }

    /// A program is about to sleep until it is notified: from now on the thread does the work.
    pub(crate) fn take_over(&self) {
        if self.polled.swap(0, Ordering::Relaxed) != 0 {
            drop(lock(&self.idle));
            self.takeover.notify_one();
        }
    }

    /// Does the thread's work, if there is any and no other thread is doing it.
    pub(crate) fn progress(&self) {
        if !self.pollers_work {
            return;
        }
        self.polled.store(self.epoch.elapsed().as_micros() as u64 | 1, Ordering::Relaxed);
        let Some(_turn) = self.try_turn() else {
            // A yield may keep the processor; only a sleep surely leaves it to the thread that has the turn.
            if self.refused.fetch_add(1, Ordering::Relaxed) % 16 == 15 {
                std::thread::sleep(Duration::from_micros(1));
            } else {
                std::thread::yield_now();
            }
            return;
        };
        self.refused.store(0, Ordering::Relaxed);
        let mut events = Vec::with_capacity(16);
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(&*self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&none))
            .is_ok()
        {
            self.handle(&events);
        }
    }

    /// Waits until requests that are being executed are answered. The process is about to end; a peer whose message was
    /// received must not see an error.
    pub(crate) fn finish(&self) {
        for _ in 0..1000 {
            // The thread that has the turn writes all answers before it releases the turn.
            if self.try_turn().is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn handle(&self, events: &[epoll::Event]) {
        for event in events {
            match event.data.u64() {
                WAKE => {
                    let mut count = [0; 8];
                    let _ = rustix::io::read(&self.wake, &mut count);
                }
                LISTEN_UNIX => self.accept(&self.unix, true),
                LISTEN_TCP => {
                    if let Some(tcp) = &self.tcp {
                        self.accept(tcp, false);
                    }
                }
                CONTROL => {
                    for (device, down) in self.control.changes(self.hca.ports) {
                        log!(Debug, "port of HCA {device} is {}", if down { "down" } else { "up" });
                        self.hca.port_changed(device, down);
                    }
                }
                id => self.serve(id, event.flags),
            }
        }
        self.fire_timers();
    }

    fn serve(&self, id: u64, flags: epoll::EventFlags) {
        let Some(connection) = lock(&self.connections).get(&id).cloned() else { return };
        let mut result = Ok(());
        if flags.intersects(epoll::EventFlags::OUT) {
            result = connection.writable(&self.hca);
        }
        // Read on errors and hang-ups, too: data that arrived before them counts.
        if result.is_ok()
            && flags
                .intersects(epoll::EventFlags::IN | epoll::EventFlags::ERR | epoll::EventFlags::HUP)
        {
            result = connection.readable(&self.hca);
        }
        if let Err(error) = result {
            self.end(&connection, error);
        }
    }

    fn end(&self, connection: &Arc<Connection>, why: Errno) {
        log!(Debug, "connection {} to {:?} ends: {why}", connection.id, connection.to);
        lock(&self.connections).remove(&connection.id);
        if let Some(to) = connection.to {
            lock(&self.links)
                .retain(|owner, other| *owner != to || !Arc::ptr_eq(other, connection));
        }
        connection.close();
    }

    /// Sets whether the listeners wake the engine.
    fn listen(&self, on: bool) {
        let flags = if on { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        for (listener, id) in [(Some(&self.unix), LISTEN_UNIX), (self.tcp.as_ref(), LISTEN_TCP)] {
            if let Some(listener) = listener {
                let _ = epoll::modify(&*self.epoll, listener, epoll::EventData::new_u64(id), flags);
            }
        }
        *lock(&self.resume) = (!on).then(|| Instant::now() + PAUSE);
        self.wake();
    }

    fn accept(&self, listener: &Descriptor, local: bool) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        loop {
            let (socket, address) = match rustix::net::acceptfrom_with(listener, flags) {
                Ok((socket, address)) => (Descriptor::from(socket), address),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                // Out of file descriptors. The pending connection would wake us again and again.
                Err(error) => {
                    log!(Debug, "no connection is accepted for now: {error}");
                    return self.listen(false);
                }
            };
            let mut peer = None;
            if local {
                // The folder is accessible to this user only; check the user id that the kernel reports as well.
                match credentials(&socket) {
                    Ok((pid, uid)) if uid == rustix::process::geteuid().as_raw() => peer = pid,
                    _ => continue,
                }
            } else {
                let host = address.and_then(|it| SocketAddr::try_from(it).ok()).map(|it| it.ip());
                if !self.nodes.values().any(|node| Some(node.ip()) == host) {
                    log!(Info, "{host:?} is no node of SOFT_RDMA_NODES: its connection is refused");
                    continue;
                }
                let _ = sockopt::set_tcp_nodelay(&socket, true);
            }
            if let Err(error) = self.add(socket, None, peer) {
                log!(Debug, "a connection was refused: {error}");
            }
        }
    }

    fn add(
        &self,
        socket: Descriptor,
        to: Option<Owner>,
        peer: Option<Pid>,
    ) -> Result<Arc<Connection>, Errno> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(Connection::new(id, socket, self.epoll.clone(), to, peer));
        let mut connections = lock(&self.connections);
        if connections.len() >= MAX_CONNECTIONS {
            return Err(Errno::MFILE);
        }
        connections.insert(id, connection.clone());
        drop(connections);
        connection.start().inspect_err(|_| drop(lock(&self.connections).remove(&id)))?;
        Ok(connection)
    }

    /// Opens a socket to a process; returns its process id, too, if it is on this node.
    fn connect(&self, to: Owner) -> Result<(Descriptor, Option<Pid>), Errno> {
        if to.node == self.own {
            let address = SocketAddrUnix::new(self.node.socket_path(to.node, to.slot))?;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = Descriptor::from(rustix::net::socket_with(
                AddressFamily::UNIX,
                SocketType::STREAM,
                flags,
                None,
            )?);
            rustix::net::connect(&socket, &address)?;
            let (pid, _) = credentials(&socket)?;
            return Ok((socket, pid));
        }
        let mut address = *self.nodes.get(&to.node).ok_or(Errno::HOSTUNREACH)?;
        address.set_port(address.port().checked_add(to.slot).ok_or(Errno::INVAL)?);
        let socket = tcp_socket(&address)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        // The other node accepts connections only from addresses of nodes: bind to ours.
        if let Some(own) = self.nodes.get(&self.own) {
            rustix::net::bind(&socket, &SocketAddr::new(own.ip(), 0))?;
        }
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok((socket, None)),
            Err(error) => Err(error),
        }
    }

    /// Makes the thread compute again how long it may sleep.
    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn next_timer(&self) -> Option<Instant> {
        let timer = lock(&self.timers).peek().map(|Reverse(timer)| timer.when);
        [timer, *lock(&self.resume)].into_iter().flatten().min()
    }

    fn fire_timers(&self) {
        if lock(&self.resume).is_some_and(|when| when <= Instant::now()) {
            self.listen(true);
        }
        loop {
            let due = {
                let mut timers = lock(&self.timers);
                match timers.peek() {
                    Some(Reverse(timer)) if timer.when <= Instant::now() => timers.pop(),
                    _ => None,
                }
            };
            let Some(Reverse(timer)) = due else { return };
            if let Some(qp) = timer.qp.upgrade() {
                qp.transmit_again(&self.hca);
            }
        }
    }
}

impl Fabric for Engine {
    fn link(&self, to: Owner) -> Result<Arc<dyn Link>, Errno> {
        let mut links = lock(&self.links);
        if let Some(link) = links.get(&to).filter(|link| !link.broken()) {
            return Ok(link.clone());
        }
        let connection = self
            .connect(to)
            .and_then(|(socket, peer)| self.add(socket, Some(to), peer))
            .inspect_err(|error| log!(Debug, "no connection to {to:?}: {error}"))?;
        links.insert(to, connection.clone());
        Ok(connection)
    }

    fn wake_at(&self, when: Instant, qp: &Arc<QueuePair>) {
        let order = self.next.fetch_add(1, Ordering::Relaxed);
        let timer = Timer { when: when + Duration::from_micros(1), order, qp: Arc::downgrade(qp) };
        lock(&self.timers).push(Reverse(timer));
        self.wake();
    }

    fn take_down(&self, device: u8) {
        self.control.take_down(device);
    }
}

/// Blocks all signals: the program's signals must not be handled on our thread.
fn block_signals() {
    // SAFETY: a zeroed set is filled before it is used; only this thread's mask changes.
    unsafe {
        let mut all: libc::sigset_t = core::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, core::ptr::null_mut());
    }
}

/// Asks the scheduler for short time slices that come soon: programs that wait for a write spin on memory, and would
/// otherwise keep the processor for milliseconds. If this is refused, everything works, but later.
fn run_soon() {
    let attributes = SchedulerAttributes {
        size: size_of::<SchedulerAttributes>() as u32,
        // SAFETY: asks about this thread.
        nice: unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) },
        runtime: 100_000,
        ..Default::default()
    };
    // SAFETY: a structure of its own size; only this thread is concerned.
    unsafe {
        libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0);
        libc::prctl(libc::PR_SET_TIMERSLACK, 1000);
    }
}

/// `struct sched_attr`, as far as kernels have known it from the beginning.
#[repr(C)]
#[derive(Default)]
struct SchedulerAttributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Engine of slot {} ({:?})", self.node.slot, self.unix.as_fd())
    }
}
