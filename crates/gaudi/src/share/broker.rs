//! The broker: a thread in the exporter that hands descriptors to peers that may not take them.
//!
//! It is started when the first memory is shared, sleeps until somebody connects, and never blocks on
//! anybody: every socket is non-blocking, who says nothing is sent away after a while, and there are
//! never more than a fixed number of connections. It answers processes of its own user only, and
//! these only if they know the token. All it can hand out are dma-bufs of single shared allocations.

use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::export::Exporter;
use super::socket;
use crate::process::{CloseOnFork, thread};
use crate::stats::Counts;

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
    let listeners = in_no_file.into_iter().chain(in_folder).filter_map(CloseOnFork::new).collect();
    let broker = Broker { exporter, listeners };
    thread::spawn("gaudi-broker", move || {
        loop {
            broker.round();
        }
    })
    .map(drop)
    .map_err(|error| format!("no thread: {error}"))
}

/// Removes the socket's file when the program ends in an orderly way; see also
/// [`socket::remove_leftovers`].
fn remove_at_exit(path: &[u8], pid: u32) {
    static FILE: OnceLock<(CString, u32)> = OnceLock::new();
    extern "C" fn remove() {
        if let Some((path, pid)) = FILE.get()
            && std::process::id() == *pid
        {
            // SAFETY: a string that lives for ever.
            unsafe { libc::unlink(path.as_ptr()) };
        }
    }
    let Ok(path) = CString::new(path) else { return };
    // A forked child that shares on its own leaves its file to `remove_leftovers`.
    if FILE.set((path, pid)).is_ok() {
        // SAFETY: the handler takes no arguments, and the plugin is never unloaded.
        unsafe { libc::atexit(remove) };
    }
}

struct Broker {
    exporter: &'static Exporter,
    listeners: Vec<CloseOnFork>,
}

impl Broker {
    /// Waits for something to happen, and deals with all that has.
    fn round(&self) {
        // Only this thread adds and removes connections: they are the same after the poll.
        let (connections, patience) = {
            let sessions = self.exporter.sessions();
            (sessions.connections(), sessions.patience())
        };
        let timeout = patience.and_then(|left| Timespec::try_from(left).ok());
        let listeners = self.listeners.iter().map(AsFd::as_fd);
        let incoming = listeners.map(|fd| (fd, PollFlags::IN));
        let peers = connections.iter().map(|(connection, behind)| {
            let flags = if *behind { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            (connection.as_fd(), flags)
        });
        let behind = (self.exporter.behind(), PollFlags::IN);
        let mut fds: Vec<PollFd<'_>> = incoming
            .chain(peers)
            .chain([behind])
            .map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags))
            .collect();
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // A signal, or no memory: neither lasts.
            std::thread::sleep(PAUSE);
            return;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (knocking, spoke) = ready.split_at(self.listeners.len());
        self.exporter.listen(&spoke[..connections.len()]);
        let sent_away: usize = self
            .listeners
            .iter()
            .zip(knocking)
            .filter(|(_, knocking)| **knocking)
            .map(|(listener, _)| self.accept(listener))
            .sum();
        if sent_away >= MAX_ACCEPTED {
            std::thread::sleep(PAUSE);
        }
    }

    /// Takes new connections; returns how many were sent away.
    fn accept(&self, listener: &CloseOnFork) -> usize {
        let mut sent_away = 0;
        for _ in 0..MAX_ACCEPTED {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(listener, flags) {
                Ok(connection) => {
                    let welcome = self.exporter.sessions().welcome(connection, Counts::process());
                    sent_away += usize::from(!welcome);
                }
                Err(Errno::AGAIN) => break,
                // Out of descriptors, or the other end is gone again.
                Err(_) => return MAX_ACCEPTED,
            }
        }
        sent_away
    }
}
