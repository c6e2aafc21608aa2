//! The importer's memory of its peers: who they are, that they still live, and what they take back.
//!
//! Importing keeps a peer's memory, and with it the peer's whole card, in use beyond the peer's end.
//! So when a peer ends or withdraws memory, what is cached of it is let go at once: one thread,
//! started with the first import from another process, sleeps until something of this happens.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::handover::Failure;
use super::holds::{self, HoldLine, Holds};
use super::message::{MESSAGE_LEN, Offered, Reply, Request};
use super::watch::NotWatched;
use super::{Identity, Watch, conversation, socket};
use crate::process::{CloseOnFork, Notifier, PerProcess, thread};
use crate::runtime;

/// A process whose memory we use.
#[derive(Debug)]
pub(super) struct Peer {
    identity: Identity,
    /// Tells its end; or why it cannot be watched so.
    watch: Result<Watch, String>,
    /// What it shares, where it may be looked into.
    ledger: OnceLock<OwnedFd>,
    /// Connected to its broker: tells its end too, and what is withdrawn. At least one of the two is
    /// there. While this is not, freed memory does not wait for us; see [`Peer::reach`].
    session: OnceLock<CloseOnFork>,
    /// What it must not give to others.
    held: Mutex<Held>,
    /// To be said to its broker when its queue has room.
    unsaid: Mutex<VecDeque<Request>>,
    ended: AtomicBool,
    /// The broker has hung up: no more news from it.
    hung_up: AtomicBool,
}

/// Memory of a peer that we hold: from before it is first opened until it is withdrawn and closed. In
/// between it may be closed and opened again without a word.
#[derive(Debug)]
struct Held {
    holds: HashMap<Offered, Hold>,
    /// Where the peer looks; `None` if there could be none.
    sheet: Option<Holds>,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    users: usize,
    withdrawn: bool,
    /// Where it is written down.
    line: Option<HoldLine>,
}

impl Held {
    fn remove(&mut self, offered: &Offered) {
        let line = self.holds.remove(offered).and_then(|hold| hold.line);
        if let (Some(sheet), Some(line)) = (&mut self.sheet, line) {
            sheet.strike(line);
        }
    }

    /// Writes down that this is held; in place of something that is not open, if the sheet is full.
    fn write_down(&mut self, offered: Offered) -> Option<HoldLine> {
        if self.holds.len() >= holds::LINES {
            let idle = self.holds.iter().find(|(_, hold)| hold.users == 0);
            if let Some(idle) = idle.map(|(offered, _)| *offered) {
                self.remove(&idle);
            }
        }
        self.sheet.as_mut()?.add(offered)
    }
}

impl Peer {
    fn meet(identity: &Identity) -> Result<Self, Failure> {
        let sheet = Holds::new().ok();
        let enclosed = sheet.as_ref().map(AsFd::as_fd);
        let asked = conversation::ask(identity, Request::Stay, enclosed);
        let refusal = asked.as_ref().err().copied();
        let session = OnceLock::new();
        if let Some(met) = asked.ok().and_then(|(connection, _)| CloseOnFork::new(connection)) {
            session.get_or_init(|| met);
        }
        let watch = match identity.watch_pid() {
            Ok(watch) => Ok(watch),
            Err(NotWatched::Ended) => return Err(Failure::Ended),
            // The session will tell, if there is one.
            Err(NotWatched::NoWay(why)) if session.get().is_some() => Err(why),
            Err(NotWatched::NoWay(why)) => {
                let broker = refusal.map_or("too many peers".to_owned(), |why| why.to_string());
                return Err(Failure::NoWay(format!(
                    "its end could not be seen: {why}; broker: {broker}"
                )));
            }
        };
        let (ended, hung_up) = (AtomicBool::new(false), AtomicBool::new(false));
        let held = Mutex::new(Held { holds: HashMap::new(), sheet });
        let ledger = OnceLock::new();
        let unsaid = Mutex::default();
        Ok(Self { identity: *identity, watch, ledger, session, held, unsaid, ended, hung_up })
    }

    /// Tries its broker again, where it could not be reached before; whether that is news. From then
    /// on it sees all that we hold, also what we opened before.
    fn reach(&self) -> bool {
        if self.is_guarded() {
            return false;
        }
        let sheet = self.held().sheet.as_ref().map(|sheet| sheet.as_fd().try_clone_to_owned());
        let Some(Ok(sheet)) = sheet else { return false };
        let asked = conversation::ask(&self.identity, Request::Stay, Some(sheet.as_fd()));
        let session = asked.ok().and_then(|(connection, _)| CloseOnFork::new(connection));
        // Another thread may have been faster: then ours hangs up again.
        session.is_some_and(|session| self.session.set(session).is_ok())
    }

    /// Whether its broker knows of us: memory that we hold and that is freed there waits for us.
    pub(super) fn is_guarded(&self) -> bool {
        self.session.get().is_some()
    }

    /// Its pidfd; or why there is none.
    pub(super) fn process(&self) -> Result<BorrowedFd<'_>, &str> {
        self.watch.as_ref().map(AsFd::as_fd).map_err(String::as_str)
    }

    /// Its ledger, which `fetch` gets the first time.
    pub(super) fn ledger<E>(
        &self,
        fetch: impl FnOnce() -> Result<OwnedFd, E>,
    ) -> Result<&OwnedFd, E> {
        match self.ledger.get() {
            Some(ledger) => Ok(ledger),
            None => {
                let fetched = fetch()?;
                Ok(self.ledger.get_or_init(|| fetched))
            }
        }
    }

    /// Whether it was seen to end.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// We are about to open its memory: written down before it is fetched.
    pub(super) fn hold(&self, offered: Offered) {
        let mut held = self.held();
        if let Some(hold) = held.holds.get_mut(&offered) {
            hold.users += 1;
            return;
        }
        let line = held.write_down(offered);
        held.holds.insert(offered, Hold { users: 1, withdrawn: false, line });
    }

    /// We have closed it, or (`opened` is false) not opened it after all.
    pub(super) fn let_go(&self, offered: Offered, opened: bool) {
        let mut held = self.held();
        let Some(hold) = held.holds.get_mut(&offered) else { return };
        hold.users -= 1;
        let Hold { users, withdrawn, .. } = *hold;
        if users == 0 && (withdrawn || !opened) {
            held.remove(&offered);
        }
        drop(held);
        if users == 0 && withdrawn {
            self.say(Request::LetGo(offered));
        }
    }

    /// It is not shared any more, and its owner waits for us to let it go.
    fn withdrawn(&self, offered: Offered) {
        let mut held = self.held();
        let in_use = match held.holds.get_mut(&offered) {
            Some(hold) => {
                hold.withdrawn = true;
                hold.users > 0
            }
            None => false,
        };
        if !in_use {
            held.remove(&offered);
        }
        drop(held);
        if in_use {
            // What was only kept for later is closed by this, and let go.
            forget(|peer, held| *peer == self.identity && *held == offered);
        } else {
            self.say(Request::LetGo(offered));
        }
    }

    fn unsaid(&self) -> MutexGuard<'_, VecDeque<Request>> {
        self.unsaid.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says it now, or has the keeper's thread say it when there is room: never waits.
    fn say(&self, request: Request) {
        self.unsaid().push_back(request);
        if self.say_more()
            && let Some(keeper) = KEEPER.get()
        {
            keeper.wake();
        }
    }

    /// Says what is left to say, as far as there is room; whether something is left still.
    fn say_more(&self) -> bool {
        let mut unsaid = self.unsaid();
        while let (Some(session), Some(request)) = (self.session.get(), unsaid.front()) {
            match socket::send(session.as_fd(), &request.pack(), None) {
                Ok(()) => drop(unsaid.pop_front()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => return true,
                // It has hung up, and takes it that we hold nothing.
                Err(_) => break,
            }
        }
        unsaid.clear();
        false
    }

    /// Takes in what its broker has said.
    fn hear(&self) {
        let Some(session) = self.session.get() else { return };
        let mut message = [0; MESSAGE_LEN];
        loop {
            match socket::receive_plain(session, &mut message) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                Ok(0) | Err(_) => return self.hung_up.store(true, Ordering::Release),
                Ok(len) => {
                    if let Some(Reply::Withdrawn(offered)) = Reply::parse(&message[..len]) {
                        self.withdrawn(offered);
                    }
                }
            }
        }
    }

    /// What to sleep on.
    fn news(&self) -> impl Iterator<Item = PollFd<'_>> {
        let hung_up = self.hung_up.load(Ordering::Acquire);
        let session = self.session.get().filter(|_| !hung_up);
        let flags = match self.unsaid().is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        };
        let process = self.process().into_iter();
        let process = process.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        process.chain(session.map(move |session| PollFd::new(session, flags)))
    }

    /// How it is, as far as is known now.
    fn look(&self) -> Health {
        self.hear();
        self.say_more();
        let hung_up = self.hung_up.load(Ordering::Acquire);
        match &self.watch {
            Ok(watch) if watch.has_ended() => Health::Ended,
            Err(_) if hung_up => Health::Ended,
            _ if hung_up => Health::Estranged,
            _ => Health::Well,
        }
    }
}

/// How a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Well,
    /// It lives, but its broker has hung up, and takes it that we hold nothing any more.
    Estranged,
    Ended,
}

/// Lets go of what is kept of some process's memory: at once, or when its last user has.
pub(super) fn forget(which: impl Fn(&Identity, &Offered) -> bool) {
    for device in runtime().devices() {
        device.handles().evict(|key| which(&key.peer, &key.offered));
    }
}

#[derive(Debug, Default)]
struct Peers {
    known: HashMap<Identity, Arc<Peer>>,
    /// Met anew since, but some of their memory is still in use: their end is of interest.
    former: Vec<Weak<Peer>>,
}

#[derive(Debug)]
struct Keeper {
    peers: Mutex<Peers>,
    /// Whether its thread was started.
    runs: Mutex<bool>,
    /// Tells the thread that there is one more.
    changed: Notifier,
}

static KEEPER: PerProcess<Keeper> = PerProcess::new();

/// The peer with this identity, watched from now on.
pub(super) fn keep(identity: &Identity) -> Result<Arc<Peer>, Failure> {
    let keeper = keeper()?;
    let known = keeper.peers().known.get(identity).map(Arc::clone);
    if let Some(peer) = known {
        if peer.reach() {
            keeper.wake();
        }
        return Ok(peer);
    }
    let met = Arc::new(Peer::meet(identity)?);
    // Another thread may have met it meanwhile: then ours hangs up again.
    let peer = Arc::clone(keeper.peers().known.entry(*identity).or_insert(met));
    keeper.wake();
    Ok(peer)
}

fn keeper() -> Result<&'static Keeper, Failure> {
    let keeper = KEEPER.get_or_make(|| {
        let changed =
            Notifier::new().map_err(|error| Failure::NoWay(format!("eventfd: {error}")))?;
        Ok(Keeper { peers: Mutex::default(), runs: Mutex::default(), changed })
    })?;
    let mut runs = keeper.runs.lock().unwrap_or_else(PoisonError::into_inner);
    if !*runs {
        thread::spawn("gaudi-peers", || keeper.watch())
            .map_err(|error| Failure::NoWay(format!("no thread: {error}")))?;
        *runs = true;
    }
    Ok(keeper)
}

impl Keeper {
    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed.notify();
    }

    fn watch(&self) {
        loop {
            let peers = self.peers().all();
            let news = peers.iter().flat_map(|peer| peer.news());
            let changed = PollFd::new(&self.changed, PollFlags::IN);
            let mut fds: Vec<PollFd<'_>> = news.chain([changed]).collect();
            if poll(&mut fds, None).is_err() {
                continue;
            }
            self.changed.clear();
            for peer in &peers {
                let health = peer.look();
                if health == Health::Ended {
                    peer.ended.store(true, Ordering::Release);
                }
                if health != Health::Well && self.peers().part_with(peer) {
                    forget(|identity, _| *identity == peer.identity);
                }
            }
        }
    }
}

impl Peers {
    /// All whose end is of interest.
    fn all(&mut self) -> Vec<Arc<Peer>> {
        self.former.retain(|peer| peer.strong_count() > 0);
        let former = self.former.iter().filter_map(Weak::upgrade);
        self.known.values().cloned().chain(former).collect()
    }

    /// Should it be needed again, it is met anew. Whether that is news.
    fn part_with(&mut self, peer: &Arc<Peer>) -> bool {
        let is_it = |known: &Arc<Peer>| Arc::ptr_eq(known, peer);
        let is_known = self.known.get(&peer.identity).is_some_and(is_it);
        if is_known {
            self.known.remove(&peer.identity);
        }
        self.former.retain(|former| !ptr::eq(former.as_ptr(), Arc::as_ptr(peer)));
        if !peer.has_ended() {
            self.former.push(Arc::downgrade(peer));
        }
        is_known
    }
}
