//! How this process reaches memory of other processes: connections to owners, and the leases on what it imports.
//!
//! Imports and relays both begin with a connection, on which one message names the memory ([`Hello`]). The connection of an
//! import is the lease: it stays open as long as the dma-buf is mapped. The owner revokes the lease by shutting down its
//! direction of the connection; when the owner process ends, the kernel closes it. Nothing else is sent. The thread that
//! opens memory waits for the owner's answer itself, and not for long: the owner may be stopped, flooded or hostile.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;

use super::backoff::Backoff;
use super::key::Fields;
use super::socket::{Credentials, Unconnected};
use super::unreached::Unreached;
use super::watcher::{PAUSE, Watched, Watcher};
use super::wire::{Hello, Way, parse_answer};
use super::{Identity, descriptors, opened, socket};
use crate::device::Registry;
use crate::probes;
use crate::process::{CloseOnFork, PerProcess};

/// How long a relay waits at most while an owner's queue of connections is full.
const IN_QUEUE: Duration = Duration::from_millis(100);
/// How long an owner that is out of descriptors is given to notice which leases were released.
const TO_SEE_RELEASES: Duration = Duration::from_millis(100);

/// Timeouts of waits for grants.
static OF_LEASES: PerProcess<Mutex<Backoff>> = PerProcess::new();
/// Timeouts of waits for space in queues. Separate: an owner may still grant a lease after one of these short waits.
static OF_RELAYS: PerProcess<Mutex<Backoff>> = PerProcess::new();

fn backoff(of: &'static PerProcess<Mutex<Backoff>>) -> MutexGuard<'static, Backoff> {
    of.get_or_default().lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lease on memory of another process; released when dropped.
#[derive(Debug)]
pub(super) struct Lease {
    watcher: &'static Watcher,
    number: u64,
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    socket: CloseOnFork,
    key: Fields,
    /// Knows the devices that cache the import.
    registry: Arc<Registry>,
    has_ended: AtomicBool,
}

impl Lease {
    /// Whether the owner has ended.
    pub(super) fn has_owner_ended(&self) -> bool {
        self.held.has_ended.load(Ordering::Acquire)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        drop(self.watcher.remove(self.number));
        // Closing is not enough: a forked child may have the socket open.
        let _ = rustix::net::shutdown(&self.held.socket, Shutdown::Both);
    }
}

impl Watched for Held {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The owner has revoked the lease, or has ended: unmaps the import, at once or when its last user is done.
    fn ready(&self, watcher: &'static Watcher, number: u64, flags: EventFlags) {
        if flags.contains(EventFlags::HUP) {
            self.has_ended.store(true, Ordering::Release);
            self.key.peer.note_end();
            watcher.remove(number);
        } else {
            watcher.await_end(number);
        }
        opened::evict(&self.registry, |key| *key == self.key);
    }
}

/// Asks the owner for a lease, and for the dma-buf.
pub(super) fn lease(key: &Fields, registry: &Arc<Registry>) -> Result<(Lease, OwnedFd), Unreached> {
    probes::hand_over(|| {
        let lease = match try_lease(key, registry) {
            // Imports that are only cached take descriptors on both sides.
            Err(Unreached::Ourselves(_)) => {
                opened::evict_idle(registry, |_| true);
                try_lease(key, registry)
            }
            Err(Unreached::OwnerShort) => {
                let evicted = opened::evict_idle(registry, |other| other.peer == key.peer);
                // The owner may read the request before it sees that leases were released.
                let deadline = Instant::now() + TO_SEE_RELEASES;
                loop {
                    match try_lease(key, registry) {
                        Err(Unreached::OwnerShort) if evicted > 0 && Instant::now() < deadline => {
                            std::thread::sleep(PAUSE);
                        }
                        lease => break lease,
                    }
                }
            }
            lease => lease,
        };
        lease.map_err(|why| why.of(&key.peer))
    })
}

fn try_lease(key: &Fields, registry: &Arc<Registry>) -> Result<(Lease, OwnedFd), Unreached> {
    let watcher = Watcher::of_imports().map_err(Unreached::Ourselves)?;
    let now = Instant::now();
    let deadline = now + backoff(&OF_LEASES).wait_for(&key.peer, now)?;
    let asked = try_connect(key, Way::Import, None, deadline).and_then(|socket| {
        let dmabuf = receive_grant(&socket, deadline)?;
        Ok((socket, dmabuf))
    });
    if let Err(Unreached::Silent | Unreached::QueueFull) = &asked {
        backoff(&OF_LEASES).was_in_vain(key.peer, Instant::now());
    }
    let (socket, dmabuf) = asked?;
    let (key, registry) = (*key, Arc::clone(registry));
    let held = Arc::new(Held { socket, key, registry, has_ended: AtomicBool::new(false) });
    // From here on the watcher's thread sees events of this connection, also its end.
    let number = watcher.add(Arc::clone(&held) as _, EventFlags::RDHUP);
    let number = number.map_err(Unreached::Ourselves)?;
    Ok((Lease { watcher, number, held }, dmabuf))
}

/// Connects to the owner of memory for a relay, and sends it this ring. Does not wait for an answer.
pub(super) fn connect_relay(key: &Fields, ring: BorrowedFd<'_>) -> Result<CloseOnFork, Unreached> {
    in_queue(&key.peer, |deadline| try_connect(key, Way::Relay, Some(ring), deadline))
}

/// Checks that this owner could be asked for a relay.
pub(super) fn check(owner: &Identity) -> Result<(), Unreached> {
    in_queue(owner, |deadline| reach(owner, deadline)).map(drop)
}

/// Connects. Waits a moment if the owner's queue of connections is full.
fn in_queue<T>(
    owner: &Identity,
    connect: impl FnOnce(Instant) -> Result<T, Unreached>,
) -> Result<T, Unreached> {
    let now = Instant::now();
    let wait = backoff(&OF_RELAYS).wait_for(owner, now);
    // An owner that timed out is tried without a wait instead of refused: a relay may wait for an owner that is stopped.
    let connected = connect(now + wait.as_ref().map_or(Duration::ZERO, |wait| IN_QUEUE.min(*wait)));
    if let (Err(Unreached::QueueFull), Ok(_)) = (&connected, wait) {
        backoff(&OF_RELAYS).was_in_vain(*owner, Instant::now());
    }
    connected.map_err(|why| why.of(owner))
}

/// Connects to the owner of memory and names it.
fn try_connect(
    key: &Fields,
    way: Way,
    enclosed: Option<BorrowedFd<'_>>,
    deadline: Instant,
) -> Result<CloseOnFork, Unreached> {
    let socket = descriptors::keep(reach(&key.peer, deadline)?).map_err(Unreached::Ourselves)?;
    let hello = Hello { way, key: key.pack() }.pack();
    match socket::send(socket.as_fd(), &hello, enclosed) {
        // The owner may have sent a refusal before it closed the connection.
        Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(socket),
        Err(errno) => Err(Unreached::Ourselves(format!("sendmsg: {errno}"))),
    }
}

/// A connection on which nothing was sent yet.
fn reach(owner: &Identity, deadline: Instant) -> Result<OwnedFd, Unreached> {
    loop {
        match socket::connect(owner, is_owner(owner)) {
            Ok(socket) => return Ok(socket),
            Err(Unconnected::Nobody(Errno::AGAIN)) if Instant::now() + PAUSE < deadline => {
                std::thread::sleep(PAUSE);
            }
            Err(Unconnected::Nobody(Errno::AGAIN)) => return Err(Unreached::QueueFull),
            Err(Unconnected::NoSocket(errno)) => {
                return Err(Unreached::Ourselves(format!("socket: {errno}")));
            }
            Err(Unconnected::Nobody(errno)) => return Err(Unreached::NobodyListens(errno)),
            Err(Unconnected::Another) => return Err(Unreached::NotTheOwner),
        }
    }
}

/// Whether the listener is that process, and of our user.
pub(super) fn is_owner(owner: &Identity) -> impl Fn(Credentials) -> bool {
    let (anywhere, pid) = (!owner.is_in_our_pid_namespace(), owner.pid);
    move |listener| (anywhere || listener.pid == pid) && socket::is_same_user(listener)
}

/// Waits for the dma-buf.
fn receive_grant(socket: &CloseOnFork, deadline: Instant) -> Result<OwnedFd, Unreached> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Unreached::Silent)?;
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(Unreached::Silent),
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return Err(Unreached::HungUp),
        }
        let mut message = [0; 64];
        let (len, dmabuf) = match socket::receive(socket.as_fd(), &mut message) {
            // The owner closed the connection without reading our message; what it sent comes after this error.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => continue,
            Err(Errno::MSGSIZE) => return Err(Unreached::NotUnderstood),
            Ok((0, _)) | Err(_) => return Err(Unreached::HungUp),
            Ok(received) => received,
        };
        parse_answer(&message[..len]).ok_or(Unreached::NotUnderstood)??;
        return dmabuf.ok_or_else(|| Unreached::Ourselves("no free descriptor".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_is_waited_for_once_and_then_tried_without_a_wait() {
        let own = *Identity::own().unwrap();
        let owner = Identity { instance: [0xab; 6], ..own };
        let listener = socket::listen_abstract(&owner).unwrap();
        let connect = || socket::connect(&owner, is_owner(&owner));
        let crowd: Vec<_> = std::iter::from_fn(|| connect().ok()).collect();
        assert!(!crowd.is_empty());
        for _ in 0..3 {
            assert_eq!(check(&owner), Err(Unreached::QueueFull));
            let wait = backoff(&OF_RELAYS).wait_for(&owner, Instant::now());
            assert_eq!(wait, Err(Unreached::Silent));
            assert!(backoff(&OF_LEASES).wait_for(&owner, Instant::now()).is_ok());
        }
        let other = Identity { instance: [0xcd; 6], ..own };
        let halved = backoff(&OF_RELAYS).wait_for(&other, Instant::now());
        assert_eq!(halved, Ok(Duration::from_millis(500)), "it counts once");
        for _ in &crowd {
            rustix::net::accept(&listener).unwrap();
        }
        assert_eq!(check(&owner), Ok(()));
    }
}
