//! The importer's memory of its peers: who they are, and that they still live.
//!
//! Importing keeps a peer's memory, and with it the peer's whole card, alive beyond the peer's end.
//! So when a peer ends, everything cached of it is let go at once: one thread, started with the first
//! import from another process, sleeps until a watched process ends.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::fork::PerProcess;
use super::{Identity, Watch, thread};
use crate::{Error, ErrorKind, runtime};

/// A process whose memory we use.
#[derive(Debug)]
pub(super) struct Peer {
    identity: Identity,
    watch: Watch,
    ended: AtomicBool,
}

impl Peer {
    /// Whether it was seen to end.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
struct Keeper {
    peers: Mutex<HashMap<Identity, Arc<Peer>>>,
    /// Tells the thread that there is one more.
    changed: OwnedFd,
}

static KEEPER: PerProcess<Keeper> = PerProcess::new();

/// The peer with this identity, watched from now on.
pub(super) fn keep(identity: &Identity) -> Result<Arc<Peer>, Error> {
    let keeper = match KEEPER.get() {
        Some(keeper) => keeper,
        None => start()?,
    };
    if let Some(peer) = keeper.peers().get(identity) {
        return Ok(Arc::clone(peer));
    }
    let watch = identity.watch()?;
    let mut peers = keeper.peers();
    let peer = peers.entry(*identity).or_insert_with(|| {
        Arc::new(Peer { identity: *identity, watch, ended: AtomicBool::new(false) })
    });
    let peer = Arc::clone(peer);
    drop(peers);
    keeper.wake();
    Ok(peer)
}

fn start() -> Result<&'static Keeper, Error> {
    static STARTING: Mutex<()> = Mutex::new(());
    let failed = |detail: String| {
        Error::new(ErrorKind::ChannelFailed, "watching a peer", detail, "raise the limits (ulimit)")
    };
    let _one_thread = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(keeper) = KEEPER.get() {
        return Ok(keeper);
    }
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let changed = eventfd(0, flags).map_err(|errno| failed(format!("eventfd: {errno}")))?;
    let keeper =
        KEEPER.get_or_make(|| Ok::<_, Error>(Keeper { peers: Mutex::default(), changed }))?;
    thread::start("gaudi-peers", || keeper.watch())
        .map_err(|error| failed(format!("no thread: {error}")))?;
    Ok(keeper)
}

impl Keeper {
    fn peers(&self) -> MutexGuard<'_, HashMap<Identity, Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // It cannot be full: the thread takes everything at once.
        let _ = rustix::io::write(&self.changed, &1_u64.to_ne_bytes());
    }

    fn watch(&self) {
        loop {
            let peers: Vec<Arc<Peer>> = self.peers().values().cloned().collect();
            let watched = peers.iter().map(|peer| peer.watch.as_fd());
            let all: Vec<BorrowedFd<'_>> = watched.chain([self.changed.as_fd()]).collect();
            let mut fds: Vec<PollFd<'_>> =
                all.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let _ = rustix::io::read(&self.changed, &mut [0; 8]);
            for (peer, fd) in peers.iter().zip(&fds) {
                if !fd.revents().is_empty() {
                    self.bury(peer);
                }
            }
        }
    }

    /// Lets go of everything of a peer that has ended.
    fn bury(&self, peer: &Peer) {
        peer.ended.store(true, Ordering::Release);
        self.peers().remove(&peer.identity);
        for device in runtime().devices() {
            device.handles().evict(|key| key.peer == peer.identity);
        }
    }
}
