//! The importer's memory of its peers: who they are, that they still live, and what they take back.
//!
//! Importing keeps a peer's memory, and with it the peer's whole card, in use beyond the peer's end.
//! So when a peer ends or withdraws memory, what is cached of it is let go at once: one thread,
//! started with the first import from another process, sleeps until something of this happens.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use super::fork::{PerProcess, Private};
use super::message::{MESSAGE_LEN, Offered, Reply, Request};
use super::{Identity, Watch, conversation, socket, thread};
use crate::{Error, ErrorKind, runtime};

/// How long a broker may take to make room in its queue.
const PATIENCE: Duration = Duration::from_secs(1);

/// A process whose memory we use.
#[derive(Debug)]
pub(super) struct Peer {
    identity: Identity,
    /// Tells its end.
    watch: Option<Watch>,
    /// Connected to its broker: tells its end too, and what is withdrawn. At least one of the two is
    /// there.
    session: Option<Private>,
    ended: AtomicBool,
    /// The broker has hung up: no more news from it.
    hung_up: AtomicBool,
}

impl Peer {
    fn meet(identity: &Identity) -> Result<Self, Error> {
        let session = conversation::ask(identity, Request::Stay);
        let session = session.ok().and_then(|(connection, _)| Private::new(connection));
        let watch = match &session {
            // The session will tell, where the process id does not.
            Some(_) => identity.watch_pid().ok(),
            None => Some(identity.watch()?),
        };
        let (ended, hung_up) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { identity: *identity, watch, session, ended, hung_up })
    }

    /// Whether it was seen to end.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Says that we are about to open its memory. To be said before it is fetched.
    pub(super) fn hold(&self, offered: Offered) {
        self.say(Request::Hold(offered));
    }

    /// Says that we have closed it.
    pub(super) fn let_go(&self, offered: Offered) {
        self.say(Request::LetGo(offered));
    }

    /// What cannot be said is lost: memory that was let go then waits for us to hang up.
    fn say(&self, request: Request) {
        let Some(session) = &self.session else { return };
        let end = Instant::now() + PATIENCE;
        while socket::send(session.as_fd(), &request.pack(), None) == Err(Errno::AGAIN) {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
            let ready = poll(&mut [PollFd::new(session, PollFlags::OUT)], Some(&timeout));
            if ready == Ok(0) {
                return;
            }
        }
    }

    /// Takes in what its broker has said.
    fn hear(&self) {
        let Some(session) = &self.session else { return };
        let mut message = [0; MESSAGE_LEN];
        loop {
            match socket::receive_plain(session, &mut message) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok(0) | Err(_) => return self.hung_up.store(true, Ordering::Release),
                Ok(len) => {
                    if let Some(Reply::Withdrawn(offered)) = Reply::parse(&message[..len]) {
                        forget(|peer, held| *peer == self.identity && *held == offered);
                    }
                }
            }
        }
    }

    /// What to sleep on.
    fn news(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let hung_up = self.hung_up.load(Ordering::Acquire);
        let session = self.session.as_ref().filter(|_| !hung_up);
        let watch = self.watch.as_ref().map(AsFd::as_fd);
        watch.into_iter().chain(session.map(AsFd::as_fd))
    }

    /// Whether it lives, as far as is known now.
    fn look(&self) -> bool {
        self.hear();
        match &self.watch {
            Some(watch) => !watch.has_ended(),
            None => !self.hung_up.load(Ordering::Acquire),
        }
    }
}

/// Lets go of what is kept of some peer's memory.
fn forget(which: impl Fn(&Identity, &Offered) -> bool) {
    for device in runtime().devices() {
        device.handles().evict(|key| which(&key.peer, &key.offered));
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
    let met = Arc::new(Peer::meet(identity)?);
    // Another thread may have met it meanwhile: then ours hangs up again.
    let peer = Arc::clone(keeper.peers().entry(*identity).or_insert(met));
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
    let made = || Ok::<_, Error>(Keeper { peers: Mutex::default(), changed });
    let keeper = KEEPER.get_or_make(made)?;
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
            let news = peers.iter().flat_map(|peer| peer.news());
            let mut fds: Vec<PollFd<'_>> = news
                .chain([self.changed.as_fd()])
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
                .collect();
            if poll(&mut fds, None).is_err() {
                continue;
            }
            let _ = rustix::io::read(&self.changed, &mut [0; 8]);
            peers.iter().filter(|peer| !peer.look()).for_each(|peer| self.bury(peer));
        }
    }

    /// Lets go of everything of a peer that has ended.
    fn bury(&self, peer: &Peer) {
        peer.ended.store(true, Ordering::Release);
        self.peers().remove(&peer.identity);
        forget(|identity, _| *identity == peer.identity);
    }
}
