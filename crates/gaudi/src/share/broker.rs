//! The broker: a thread in the exporter that hands descriptors to peers that may not take them.
//!
//! It is started when the first memory is shared, sleeps until somebody connects, and never blocks on
//! anybody: every socket is non-blocking, who says nothing is sent away after a while, and there are
//! never more than a fixed number of connections. It answers processes of its own user only, and
//! these only if they know the token. All it can hand out are dma-bufs of single shared allocations.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::export::Exporter;
use super::fork::Private;
use super::message::{REQUEST_LEN, Reply, Request};
use super::{socket, thread};
use crate::stats::{Counter, Counts};

/// How long a peer may take to ask.
const PATIENCE: Duration = Duration::from_secs(1);
/// Most peers that have not asked yet, or not enough.
const MAX_ASKING: usize = 64;
/// Most peers that stay connected to see us end.
const MAX_WATCHING: usize = 512;
/// Most requests of one connection.
const MAX_REQUESTS: u32 = 64;
/// Most connections taken from one socket before others have their turn.
const MAX_ACCEPTED: usize = 16;
/// Pause after a round in which as many were sent away: strangers cannot keep a core busy.
const PAUSE: Duration = Duration::from_millis(2);

/// Starts the thread; the reason if there can be none.
pub(super) fn start(exporter: &'static Exporter) -> Result<(), String> {
    let own = exporter.identity();
    let in_no_file = socket::listen_abstract(own);
    socket::remove_leftovers();
    let in_folder = socket::listen_in_folder(own);
    if let (Err(one), Err(other)) = (&in_no_file, &in_folder) {
        return Err(format!("abstract socket: {one}; socket in /dev/shm or /tmp: {other}"));
    }
    let in_folder = in_folder.ok().map(|(socket, path)| {
        remove_at_exit(path.as_os_str().as_bytes(), own.pid);
        socket
    });
    let listeners = in_no_file.into_iter().chain(in_folder).filter_map(Private::new).collect();
    let mut broker = Broker { exporter, listeners, peers: Vec::new(), counts: Counts::process() };
    thread::start("gaudi-broker", move || {
        while exporter.is_here() {
            broker.round();
        }
    })
    .map_err(|error| format!("no thread: {error}"))
}

/// Removes the socket's file when the program ends in an orderly way; see also
/// [`socket::remove_leftovers`].
fn remove_at_exit(path: &[u8], pid: u32) {
    static FILES: OnceLock<(CString, u32)> = OnceLock::new();
    extern "C" fn remove() {
        if let Some((path, pid)) = FILES.get()
            && std::process::id() == *pid
        {
            // SAFETY: a string that lives for ever.
            unsafe { libc::unlink(path.as_ptr()) };
        }
    }
    let Ok(path) = CString::new(path) else { return };
    // A forked child that shares on its own leaves its file to `remove_leftovers`.
    if FILES.set((path, pid)).is_ok() {
        // SAFETY: the handler takes no arguments, and the plugin is never unloaded.
        unsafe { libc::atexit(remove) };
    }
}

struct Broker {
    exporter: &'static Exporter,
    listeners: Vec<Private>,
    peers: Vec<Peer>,
    counts: Option<Counts>,
}

struct Peer {
    connection: Private,
    stage: Stage,
    requests: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Must say something by then.
    Asking(Instant),
    /// Stays until it hangs up.
    Watching,
}

impl Broker {
    /// Waits for something to happen, and deals with all that has.
    fn round(&mut self) {
        let now = Instant::now();
        let ends = self.peers.iter().filter_map(|peer| match peer.stage {
            Stage::Asking(end) => Some(end.saturating_duration_since(now)),
            Stage::Watching => None,
        });
        let timeout = ends.min().map(|left| left + Duration::from_millis(1));
        let timeout = timeout.and_then(|left| Timespec::try_from(left).ok());
        let listeners = self.listeners.iter().map(AsFd::as_fd);
        let peers = self.peers.iter().map(|peer| peer.connection.as_fd());
        let mut fds: Vec<PollFd<'_>> =
            listeners.chain(peers).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // A signal, or no memory: neither lasts.
            std::thread::sleep(PAUSE);
            return;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (knocking, speaking) = ready.split_at(self.listeners.len());
        self.listen(speaking);
        let sent_away: usize =
            (0..self.listeners.len()).filter(|&at| knocking[at]).map(|at| self.accept(at)).sum();
        if sent_away >= MAX_ACCEPTED {
            std::thread::sleep(PAUSE);
        }
    }

    /// Answers those who spoke, and parts with those who hung up or said nothing for too long.
    fn listen(&mut self, speaking: &[bool]) {
        let now = Instant::now();
        let mut speaking = speaking.iter();
        let watching = self.peers.iter().filter(|peer| peer.stage == Stage::Watching).count();
        let mut room = MAX_WATCHING.saturating_sub(watching);
        let Self { exporter, peers, counts, .. } = self;
        peers.retain_mut(|peer| {
            if *speaking.next().unwrap_or(&false) {
                return peer.answer(exporter, *counts, &mut room).is_ok();
            }
            !matches!(peer.stage, Stage::Asking(end) if end <= now)
        });
    }

    /// Takes new connections; returns how many were sent away.
    fn accept(&mut self, listener: usize) -> usize {
        let mut sent_away = 0;
        for _ in 0..MAX_ACCEPTED {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.listeners[listener], flags) {
                Ok(connection) => sent_away += usize::from(!self.welcome(connection)),
                Err(Errno::AGAIN) => break,
                // Out of descriptors, or the other end is gone again.
                Err(_) => return MAX_ACCEPTED,
            }
        }
        sent_away
    }

    /// Whether the newcomer may stay.
    fn welcome(&mut self, connection: OwnedFd) -> bool {
        let known = socket::credentials(connection.as_fd());
        if !known.is_ok_and(socket::is_same_user) {
            count(self.counts, Counter::BrokerRefusedUser);
            return false;
        }
        let asking = |peer: &Peer| matches!(peer.stage, Stage::Asking(_));
        if self.peers.iter().filter(|peer| asking(peer)).count() >= MAX_ASKING {
            count(self.counts, Counter::BrokerRefusedCrowded);
            let _ = socket::send(connection.as_fd(), &Reply::Crowded.pack(), None);
            return false;
        }
        let Some(connection) = Private::new(connection) else { return false };
        let stage = Stage::Asking(Instant::now() + PATIENCE);
        self.peers.push(Peer { connection, stage, requests: 0 });
        true
    }
}

/// The conversation is over.
struct Over;

impl Peer {
    fn answer(
        &mut self,
        exporter: &Exporter,
        counts: Option<Counts>,
        room: &mut usize,
    ) -> Result<(), Over> {
        // One byte more than a request, so that a longer one is seen to be.
        let mut message = [0; REQUEST_LEN + 1];
        let len = match socket::receive_plain(&self.connection, &mut message) {
            Ok(0) => return Err(Over),
            Ok(len) => len,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(_) => return Err(Over),
        };
        self.requests += 1;
        let request = message.get(..len).and_then(Request::parse);
        let (reply, dmabuf, counter) = match request {
            Some(Request::Fetch { base, token }) => match exporter.fetch(base, &token) {
                Some(dmabuf) => (Reply::Granted, Some(dmabuf), Counter::BrokerGranted),
                None => (Reply::Unknown, None, Counter::BrokerRefusedToken),
            },
            Some(Request::Watch) if self.stage == Stage::Watching || *room > 0 => {
                if self.stage != Stage::Watching {
                    *room -= 1;
                    self.stage = Stage::Watching;
                }
                (Reply::Granted, None, Counter::BrokerWatched)
            }
            Some(Request::Watch) => (Reply::Crowded, None, Counter::BrokerRefusedCrowded),
            None => (Reply::NotUnderstood, None, Counter::BrokerRefusedMessage),
        };
        count(counts, counter);
        let fd = dmabuf.as_ref().map(AsFd::as_fd);
        // Who does not take its answers has had them all.
        socket::send(self.connection.as_fd(), &reply.pack(), fd).map_err(|_| Over)?;
        if reply != Reply::Granted || self.requests >= MAX_REQUESTS {
            return Err(Over);
        }
        if let Stage::Asking(end) = &mut self.stage {
            *end = Instant::now() + PATIENCE;
        }
        Ok(())
    }
}

fn count(counts: Option<Counts>, counter: Counter) {
    if let Some(counts) = counts {
        counts.add(counter, 1);
    }
}
