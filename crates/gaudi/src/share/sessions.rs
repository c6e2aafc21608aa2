//! Who has what open: the peers that are connected to the broker, what they hold, and memory that was
//! freed meanwhile and waits for them.
//!
//! The driver cannot take an export back. Memory that a peer has open and that is freed here must
//! therefore not become somebody else's before the peer has let it go: a late copy of the peer's
//! would land in it. Peers write down what they hold before they fetch it ([`HeldByPeer`]); when memory
//! is taken back, those that hold it are told, and say when they have let go. A peer that ends hangs
//! up. Peers that lie, or that cannot reach the broker, are not covered: see `docs/ipc.md`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::holds::HeldByPeer;
use super::message::{MESSAGE_LEN, Offered, Reply, Request};
use super::socket;
use crate::process::CloseOnFork;
use crate::stats::{Counter, Counts};

/// How long a peer may take to ask. It does so at once; those who wait for the place of one that
/// says nothing have a second (`conversation`).
const PATIENCE: Duration = Duration::from_millis(300);
/// Most peers that have not asked yet, or not enough.
const MAX_ASKING: usize = 64;
/// Most peers that stay connected.
const MAX_STAYING: usize = 512;
/// Most requests of a connection that does not stay.
const MAX_REQUESTS: u32 = 64;
/// Most messages taken from one connection before others have their turn.
const MAX_AT_ONCE: u32 = 256;

/// Says when memory may be given to others.
type Release = Box<dyn FnOnce() + Send>;

/// What a connection may be given: the exporter's answers.
pub(super) trait Offers {
    /// The dma-buf, for who knows the token.
    fn fetch(&self, offered: &Offered) -> Option<OwnedFd>;
}

/// Whoever holds memory: a connection, or this process itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder(u64);

impl Holder {
    /// This process, for another card of its own.
    pub(super) const OWN: Holder = Holder(0);
}

#[derive(Default)]
pub(super) struct Sessions {
    peers: Vec<Peer>,
    last: u64,
    /// What was taken back while peers held it, and what this process holds itself; by address.
    holds: BTreeMap<u64, Vec<(Holder, Offered)>>,
    /// Freed, and held by somebody.
    waiting: HashMap<u64, Release>,
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions").field("holds", &self.holds).finish_non_exhaustive()
    }
}

struct Peer {
    holder: Holder,
    connection: Arc<CloseOnFork>,
    stage: Stage,
    requests: u32,
    held: Option<HeldByPeer>,
    /// Taken back, but its queue was full when it was to be told.
    untold: VecDeque<Offered>,
}

impl Peer {
    /// Says what it was to be told, as far as its queue has room.
    fn catch_up(&mut self) {
        while let Some(offered) = self.untold.front() {
            let message = Reply::Withdrawn(*offered).pack();
            match socket::send(self.connection.as_fd(), &message, None) {
                Ok(()) => drop(self.untold.pop_front()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => return,
                // It hangs up, and what it held is let go with it.
                Err(_) => self.untold.clear(),
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Must say something by then.
    Asking(Instant),
    /// Stays until it hangs up.
    Staying,
    /// To be removed by the broker.
    Over,
}

/// Memory that nobody holds any more: call each without a lock.
#[must_use]
#[derive(Default)]
pub(super) struct Released(Vec<Release>);

impl Released {
    pub(super) fn run(self) {
        self.0.into_iter().for_each(|release| release());
    }
}

impl Sessions {
    /// The connections, in the order in which [`Sessions::listen`] wants to know about them, and
    /// whether there is something to say as soon as they have room.
    pub(super) fn connections(&self) -> Vec<(Arc<CloseOnFork>, bool)> {
        let connection = |peer: &Peer| (Arc::clone(&peer.connection), !peer.untold.is_empty());
        self.peers.iter().map(connection).collect()
    }

    /// Whether somebody could not be told yet.
    pub(super) fn is_behind(&self) -> bool {
        self.peers.iter().any(|peer| !peer.untold.is_empty())
    }

    /// How long until somebody's patience is at its end.
    pub(super) fn patience(&self) -> Option<Duration> {
        let now = Instant::now();
        let ends = self.peers.iter().filter_map(|peer| match peer.stage {
            Stage::Asking(end) => Some(end.saturating_duration_since(now)),
            Stage::Staying => None,
            Stage::Over => Some(Duration::ZERO),
        });
        ends.min().map(|left| left + Duration::from_millis(1))
    }

    /// Whether the newcomer may stay.
    pub(super) fn welcome(&mut self, connection: OwnedFd, counts: Option<Counts>) -> bool {
        let known = socket::credentials(connection.as_fd());
        if !known.is_ok_and(socket::is_same_user) {
            count(counts, Counter::BrokerRefusedUser);
            return false;
        }
        let asking = self.peers.iter().filter(|peer| matches!(peer.stage, Stage::Asking(_)));
        if asking.count() >= MAX_ASKING {
            count(counts, Counter::BrokerRefusedCrowded);
            let _ = socket::send(connection.as_fd(), &Reply::Crowded.pack(), None);
            return false;
        }
        let Some(connection) = CloseOnFork::new(connection) else { return false };
        self.last += 1;
        let stage = Stage::Asking(Instant::now() + PATIENCE);
        let (holder, connection) = (Holder(self.last), Arc::new(connection));
        let untold = VecDeque::new();
        self.peers.push(Peer { holder, connection, stage, requests: 0, held: None, untold });
        true
    }

    /// Answers those who spoke, and parts with those who hung up or said nothing for too long.
    pub(super) fn listen(
        &mut self,
        spoke: &[bool],
        offers: &impl Offers,
        counts: Option<Counts>,
    ) -> Released {
        let mut released = Released::default();
        for (at, _) in spoke.iter().enumerate().filter(|(_, spoke)| **spoke) {
            self.hear(at, offers, counts, &mut released);
        }
        self.peers.iter_mut().for_each(Peer::catch_up);
        let now = Instant::now();
        let is_over = |peer: &Peer| match peer.stage {
            Stage::Asking(end) => end <= now,
            Stage::Staying => false,
            Stage::Over => true,
        };
        let gone: Vec<Holder> =
            self.peers.iter().filter(|peer| is_over(peer)).map(|peer| peer.holder).collect();
        self.peers.retain(|peer| !gone.contains(&peer.holder));
        if !gone.is_empty() {
            let held: Vec<(Holder, Offered)> = self.holds.values().flatten().copied().collect();
            for (holder, offered) in held.into_iter().filter(|(holder, _)| gone.contains(holder)) {
                self.let_go(holder, &offered, &mut released);
            }
        }
        released
    }

    /// Takes in what everybody has said by now, and says what is left to say.
    pub(super) fn catch_up(&mut self, offers: &impl Offers, counts: Option<Counts>) -> Released {
        let mut released = Released::default();
        for at in 0..self.peers.len() {
            if self.peers[at].stage == Stage::Staying {
                self.hear(at, offers, counts, &mut released);
            }
        }
        self.peers.iter_mut().for_each(Peer::catch_up);
        released
    }

    /// Deals with all that one connection has said.
    fn hear(
        &mut self,
        at: usize,
        offers: &impl Offers,
        counts: Option<Counts>,
        released: &mut Released,
    ) {
        for _ in 0..MAX_AT_ONCE {
            let peer = &self.peers[at];
            // One byte more than a message, so that a longer one is seen to be.
            let mut message = [0; MESSAGE_LEN + 1];
            let heard = match socket::receive(peer.connection.as_fd(), &mut message) {
                Err(Errno::AGAIN | Errno::INTR) => return,
                // What does not even fit is no message.
                Err(Errno::MSGSIZE) => Some((None, None)),
                Ok((0, _)) | Err(_) => None,
                Ok((len, file)) => Some((message.get(..len).and_then(Request::parse), file)),
            };
            let goes_on = heard.is_some_and(|(request, file)| {
                self.answer(at, request, file, offers, counts, released)
            });
            if !goes_on {
                self.peers[at].stage = Stage::Over;
                return;
            }
        }
    }

    /// Whether the conversation goes on.
    fn answer(
        &mut self,
        at: usize,
        request: Option<Request>,
        file: Option<OwnedFd>,
        offers: &impl Offers,
        counts: Option<Counts>,
        released: &mut Released,
    ) -> bool {
        let staying = self.peers.iter().filter(|peer| peer.stage == Stage::Staying).count();
        let peer = &mut self.peers[at];
        let mut dmabuf = None;
        let (reply, counter) = match request {
            Some(Request::LetGo(offered)) if peer.stage == Stage::Staying => {
                let holder = peer.holder;
                self.let_go(holder, &offered, released);
                return true;
            }
            Some(Request::Fetch(offered)) => {
                dmabuf = offers.fetch(&offered);
                match dmabuf {
                    Some(_) => (Reply::Granted, Counter::BrokerGranted),
                    None => (Reply::Unknown, Counter::BrokerRefusedToken),
                }
            }
            Some(Request::Stay) if peer.stage == Stage::Staying || staying < MAX_STAYING => {
                peer.stage = Stage::Staying;
                peer.held = file.and_then(HeldByPeer::new);
                (Reply::Granted, Counter::BrokerWatched)
            }
            Some(Request::Stay) => (Reply::Crowded, Counter::BrokerRefusedCrowded),
            Some(Request::LetGo(_)) | None => (Reply::NotUnderstood, Counter::BrokerRefusedMessage),
        };
        count(counts, counter);
        let fd = dmabuf.as_ref().map(AsFd::as_fd);
        // Who does not take its answers has had them all.
        let sent = socket::send(peer.connection.as_fd(), &reply.pack(), fd).is_ok();
        peer.requests += 1;
        let enough = match &mut peer.stage {
            Stage::Asking(end) => {
                *end = Instant::now() + PATIENCE;
                peer.requests >= MAX_REQUESTS
            }
            Stage::Staying | Stage::Over => false,
        };
        sent && reply == Reply::Granted && !enough
    }

    /// Notes that somebody has memory open.
    pub(super) fn hold(&mut self, holder: Holder, offered: Offered) {
        self.holds.entry(offered.base).or_default().push((holder, offered));
    }

    /// Notes that somebody has closed it, once.
    pub(super) fn let_go(&mut self, holder: Holder, offered: &Offered, released: &mut Released) {
        let Some(holds) = self.holds.get_mut(&offered.base) else { return };
        let Some(at) = holds.iter().position(|hold| *hold == (holder, *offered)) else { return };
        holds.swap_remove(at);
        if holds.is_empty() {
            self.holds.remove(&offered.base);
            released.0.extend(self.waiting.remove(&offered.base));
        }
    }

    /// Nobody can open this any more. Notes which peers have it open, and tells them, or will
    /// ([`Sessions::is_behind`]); whether this process itself has.
    pub(super) fn withdrawn(&mut self, offered: &Offered) -> bool {
        let holds = self.holds.get(&offered.base).into_iter().flatten();
        let own = holds.into_iter().any(|hold| *hold == (Holder::OWN, *offered));
        let has_it = |peer: &&mut Peer| peer.held.as_ref().is_some_and(|held| held.lists(offered));
        let tell = |peer: &mut Peer| {
            peer.untold.push_back(*offered);
            peer.catch_up();
            peer.holder
        };
        let holders: Vec<Holder> = self.peers.iter_mut().filter(has_it).map(tell).collect();
        holders.into_iter().for_each(|holder| self.hold(holder, *offered));
        own
    }

    /// The memory at `base` is free: `release` is called when nobody holds it. `Some` gives it back
    /// if nobody does.
    pub(super) fn freed(&mut self, base: u64, release: Release) -> Option<Release> {
        if self.holds.contains_key(&base) {
            self.waiting.insert(base, release);
            return None;
        }
        Some(release)
    }
}

fn count(counts: Option<Counts>, counter: Counter) {
    if let Some(counts) = counts {
        counts.add(counter, 1);
    }
}
