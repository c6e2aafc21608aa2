//! The process behind an endpoint, the relay to it, and the memory that copies in progress hold.

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use gaudi::share::{Identity, Opened, Relay, RemoteKey, Wakeups};
use gaudi::{Error, Notifier};
use uct::{Link, Status};

use crate::copies::Copies;

/// An endpoint. Each has its own queue of copies, so that a stopped peer blocks no other.
pub(crate) struct PeerEndpoint {
    pub(super) process: Arc<PeerProcess>,
    pub(super) copies: Arc<Copies<InFlight>>,
}

/// A peer, shared by its endpoint and the copies in progress to it.
pub(crate) struct PeerProcess {
    identity: Identity,
    /// The endpoint as UCX knows it.
    pub(super) link: Link,
    /// Copies may outlast the endpoint, and need it until they end.
    pub(super) relay: Arc<PeerRelay>,
    /// Why the endpoint has failed.
    failure: OnceLock<Status>,
}

impl PeerProcess {
    pub(super) fn new(identity: Identity, link: Link, relay: Arc<PeerRelay>) -> Self {
        PeerProcess { identity, link, relay, failure: OnceLock::new() }
    }

    /// The status to report for a copy. UCX cancels the other copies of a failed endpoint: they get the cause of its failure.
    pub(super) fn status_of(&self, status: Status) -> Status {
        match status {
            Status::CANCELED => self.failure.get().copied().unwrap_or(status),
            status => {
                let _ = self.failure.set(status);
                status
            }
        }
    }

    pub(super) fn is(&self, identity: &Identity) -> bool {
        self.identity == *identity
    }

    /// Whether the process is known to have ended. Asks the system.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self.identity.is_alive(), Ok(false))
    }
}

impl fmt::Display for PeerProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.identity.fmt(f)
    }
}

/// The relay to a process, made by the first copy that needs one. All endpoints of an interface to that
/// process share it, and it is closed with the last of them.
pub(crate) struct PeerRelay {
    identity: Identity,
    relay: Mutex<Option<Arc<Relay>>>,
}

impl PeerRelay {
    fn forget(&self, closed: &Arc<Relay>) {
        let mut relay = self.relay.lock().unwrap_or_else(PoisonError::into_inner);
        relay.take_if(|relay| Arc::ptr_eq(relay, closed));
    }

    fn current(&self) -> Option<Arc<Relay>> {
        self.relay.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The relays of an interface.
pub(super) struct Relays {
    peers: RefCell<Vec<Weak<PeerRelay>>>,
    /// What wakes a sleeper; absent where the process is out of descriptors.
    wakeups: Option<Wakeups>,
}

impl Relays {
    pub(super) fn new(notifier: Option<&Arc<Notifier>>) -> Self {
        let wakeups = notifier.and_then(|notifier| Wakeups::new(notifier).ok());
        Relays { peers: RefCell::default(), wakeups }
    }

    pub(super) fn wakeups(&self) -> Option<&Wakeups> {
        self.wakeups.as_ref()
    }

    /// The relay that all endpoints to this process share.
    pub(super) fn of(&self, identity: &Identity) -> Arc<PeerRelay> {
        let mut peers = self.peers.borrow_mut();
        peers.retain(|peer| peer.strong_count() > 0);
        let found = peers.iter().filter_map(Weak::upgrade).find(|peer| peer.identity == *identity);
        found.unwrap_or_else(|| {
            let new = Arc::new(PeerRelay { identity: *identity, relay: Mutex::default() });
            peers.push(Arc::downgrade(&new));
            new
        })
    }

    /// The relay to a process. If there is none, or it was closed, connects to the owner of this key's memory.
    pub(super) fn open(&self, peer: &PeerRelay, key: &RemoteKey) -> Result<Arc<Relay>, Error> {
        let mut relay = peer.relay.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(relay) = relay.as_ref().filter(|relay| !relay.is_closed()) {
            return Ok(Arc::clone(relay));
        }
        let new = Relay::new(key)?;
        if let Some(wakeups) = &self.wakeups {
            wakeups.add(&new)?;
        }
        Ok(Arc::clone(relay.insert(new)))
    }

    /// Advances all relays, and removes those that are closed.
    pub(super) fn advance(&self) {
        let peers: Vec<_> = self.peers.borrow().iter().filter_map(Weak::upgrade).collect();
        for peer in peers {
            let Some(relay) = peer.current() else { continue };
            relay.advance();
            if relay.is_closed() {
                // A closed relay's socket stays readable: do not poll it. Jobs left on it advance when they are polled.
                self.wakeups.iter().for_each(|wakeups| wakeups.remove(&relay));
                peer.forget(&relay);
            }
        }
    }
}

/// Peers' memory that a copy uses; it stays mapped as long as this lives.
#[derive(Default)]
pub(super) struct Reached {
    /// The remote side: memory of the endpoint's process.
    pub(super) there: Vec<Arc<Opened>>,
    /// The local side where that is attached memory, of whatever process.
    pub(super) attached: Vec<Arc<Opened>>,
}

/// Kept with a copy until it has ended.
pub(crate) struct InFlight {
    pub(super) remote: Arc<PeerProcess>,
    /// Empty if it could not be opened.
    reached: Reached,
}

impl InFlight {
    pub(super) fn new(remote: &Arc<PeerProcess>, reached: Reached) -> Self {
        InFlight { remote: Arc::clone(remote), reached }
    }

    /// Whether the engine has noticed that the peer ended. It notices within moments, and this check
    /// costs nothing.
    pub(super) fn has_peer_ended(&self) -> bool {
        self.reached.there.iter().any(|opened| opened.has_peer_ended())
    }
}
