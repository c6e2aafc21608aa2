//! How peers connect to this process: the sockets that the [watcher](super::watcher) polls, the first message of each
//! connection, and the connections that are leases.
//!
//! Only processes of the same user are served. When too many connections have not sent a message yet, the oldest is refused.

use std::collections::VecDeque;
use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with};

use super::owner::{Kept, Owner};
use super::relay::Service;
use super::watcher::{PAUSE, Watched, Watcher};
use super::wire::{Hello, Refusal, Way, pack_answer};
use super::{Identity, descriptors, socket, strangers};
use crate::process::{CloseOnFork, Instance};
use crate::stats::{Counter, Counts};

/// Most connections accepted from one socket before others have their turn.
const MAX_ACCEPTED: usize = 16;

/// Whether this process listens, and the connections that have not sent their first message yet.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    is_listening: Mutex<bool>,
    /// Their numbers in the watcher, the oldest first.
    pending: Mutex<VecDeque<u64>>,
    /// Closed when this process is out of descriptors, so that it can accept one more connection and refuse it.
    spare: Mutex<Option<CloseOnFork>>,
}

/// How many connections may exist that have not sent a message yet.
fn max_pending() -> usize {
    (descriptors::limit() / 32).clamp(2, 64)
}

impl Listeners {
    /// Starts to listen, unless it does already. The error says why it cannot; the next share tries again.
    pub(super) fn listen(&self, owner: &'static Owner, own: &Identity) -> Result<(), String> {
        let mut is_listening = self.is_listening.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_listening {
            return Ok(());
        }
        let watcher = Watcher::of_owner()?;
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
        let listeners = in_no_file.into_iter().chain(in_folder).map(descriptors::keep);
        for socket in listeners.collect::<Result<Vec<_>, _>>()? {
            *self.spare() = spare(socket.as_fd());
            watcher.add(Arc::new(Listener { owner, socket }), EventFlags::IN)?;
        }
        *is_listening = true;
        Ok(())
    }

    fn pending(&self) -> MutexGuard<'_, VecDeque<u64>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spare(&self) -> MutexGuard<'_, Option<CloseOnFork>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A descriptor to keep in reserve.
fn spare(socket: BorrowedFd<'_>) -> Option<CloseOnFork> {
    CloseOnFork::new(socket.try_clone_to_owned().ok()?)
}

/// Removes the socket's file when the program exits normally; if it does not, [`socket::remove_leftovers`] does later.
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
    // The file of a forked child that shares memory itself is left to `remove_leftovers`.
    if FILE.set((path, Instance::current())).is_ok() {
        // SAFETY: the handler takes no arguments, and the plugin is never unloaded.
        unsafe { libc::atexit(remove) };
    }
}

#[derive(Debug)]
struct Listener {
    owner: &'static Owner,
    socket: CloseOnFork,
}

impl Listener {
    fn accept(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    /// Out of descriptors: accepts one connection and refuses it, else its peer would wait. Returns one of another user.
    fn refuse_one(&self) -> Option<OwnedFd> {
        *self.owner.listeners.spare() = None;
        let socket = self.accept().ok()?;
        if strangers::is_one(&socket) {
            return Some(socket);
        }
        refuse(&socket, Refusal::Short);
        None
    }

    /// Serves a new connection, now or when its first message arrives.
    fn admit(&self, watcher: &Watcher, socket: OwnedFd) {
        if descriptors::check(socket.as_fd()).is_err() {
            return refuse(&socket, Refusal::Short);
        }
        let Some(socket) = CloseOnFork::new(socket).map(Arc::new) else { return };
        let pending = Pending { owner: self.owner, socket: Arc::clone(&socket) };
        // Usually the message has arrived already.
        if pending.serve(watcher, None) {
            return;
        }
        let Ok(number) = watcher.add(Arc::new(pending), EventFlags::IN) else {
            return refuse(&*socket, Refusal::Short);
        };
        let mut pending = self.owner.listeners.pending();
        pending.push_back(number);
        if pending.len() > max_pending()
            && let Some(oldest) = pending.pop_front().and_then(|oldest| watcher.remove(oldest))
        {
            refuse(oldest.socket(), Refusal::Short);
        }
    }
}

impl Watched for Listener {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn ready(&self, watcher: &'static Watcher, _: u64, _: EventFlags) {
        let (mut strangers, mut is_last) = (Vec::new(), false);
        for _ in 0..MAX_ACCEPTED {
            match self.accept() {
                Ok(socket) if strangers::is_one(&socket) => strangers.push(socket),
                Ok(socket) => self.admit(watcher, socket),
                Err(Errno::MFILE | Errno::NFILE) => {
                    strangers.extend(self.refuse_one());
                    break;
                }
                Err(errno) => {
                    is_last = errno == Errno::AGAIN;
                    break;
                }
            }
        }
        strangers.iter().for_each(|_| count(Counter::IpcPeersRefusedUser));
        is_last &= strangers.is_empty();
        strangers::close(strangers);
        let mut kept = self.owner.listeners.spare();
        if kept.is_none() {
            *kept = spare(self.socket());
        }
        drop(kept);
        // A process that connects again and again must not keep a core busy.
        if !is_last {
            std::thread::sleep(PAUSE);
        }
    }
}

/// A connection that has not sent its first message yet.
#[derive(Debug)]
struct Pending {
    owner: &'static Owner,
    socket: Arc<CloseOnFork>,
}

impl Watched for Pending {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn ready(&self, watcher: &'static Watcher, number: u64, _: EventFlags) {
        self.serve(watcher, Some(number));
    }
}

impl Pending {
    /// Receives the first message and acts on it; `false` if there is none yet. `number` is set if the watcher polls this.
    fn serve(&self, watcher: &Watcher, number: Option<u64>) -> bool {
        // One byte longer than a message, so that longer ones are noticed.
        let mut message = [0; Hello::LEN + 1];
        let received = socket::receive(self.socket(), &mut message);
        if let Err(Errno::AGAIN | Errno::INTR) = received {
            return false;
        }
        if let Some(number) = number {
            watcher.remove(number);
            self.owner.listeners.pending().retain(|other| *other != number);
        }
        let answer = match received {
            Ok((len @ 1.., descriptor)) => match Hello::parse(&message[..len]) {
                Some(hello) => self.grant(watcher, &hello, descriptor),
                None => Err(Refusal::Malformed),
            },
            Err(Errno::MSGSIZE) => Err(Refusal::Malformed),
            Ok((0, _)) | Err(_) => Ok(()), // it has hung up
        };
        if let Err(why) = answer {
            refuse(&*self.socket, why);
        }
        true
    }

    fn grant(
        &self,
        watcher: &Watcher,
        hello: &Hello,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), Refusal> {
        let socket = Arc::clone(&self.socket);
        match hello.way {
            Way::Import => {
                self.owner.grant(watcher, socket, &hello.key)?;
                count(Counter::IpcLeasesGranted);
                Ok(())
            }
            Way::Relay if !self.owner.shares(&hello.key) => Err(Refusal::Unknown),
            // If this process is out of descriptors, the message comes without its own.
            Way::Relay => Service::adopt(self.owner, socket, descriptor.ok_or(Refusal::Short)?),
        }
    }
}

/// Sends a refusal. If there is no memory to send it, the peer takes the end of the connection as a refusal.
pub(super) fn refuse(socket: impl AsFd, why: Refusal) {
    count(match why {
        Refusal::Unknown => Counter::IpcPeersRefusedKey,
        Refusal::Malformed | Refusal::NoDmabuf => Counter::IpcPeersRefusedMalformed,
        Refusal::Short => Counter::IpcPeersRefusedResources,
    });
    let _ = socket::send(socket.as_fd(), &pack_answer(Err(why)), None);
}

/// A lease of a peer that has memory of ours mapped. It lasts until the peer closes the connection.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) socket: Arc<CloseOnFork>,
    pub(super) _kept: Kept,
}

impl Lease {
    /// Asks the peer to unmap the memory.
    pub(super) fn revoke(&self) {
        let _ = rustix::net::shutdown(&*self.socket, Shutdown::Write);
    }
}

impl Watched for Lease {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Only the end of the connection is polled for. What the peer may send is never read.
    fn ready(&self, watcher: &'static Watcher, number: u64, _: EventFlags) {
        watcher.remove(number);
    }
}

fn count(counter: Counter) {
    if let Some(counts) = Counts::process() {
        counts.add(counter, 1);
    }
}
