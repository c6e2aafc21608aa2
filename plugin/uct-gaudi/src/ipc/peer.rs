//! The process behind an endpoint, and what copies under way to it hold.

use std::fmt;
use std::sync::Arc;

use gaudi::share::{Identity, Opened};
use uct::Link;

/// A peer, shared by its endpoint and the copies under way to it.
pub(crate) struct PeerProcess {
    identity: Identity,
    /// The endpoint as UCX knows it.
    pub(super) link: Link,
}

impl PeerProcess {
    pub(super) fn new(identity: Identity, link: Link) -> Self {
        PeerProcess { identity, link }
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

/// What a copy reaches of peers' memory; it stays mapped as long as this lives.
#[derive(Default)]
pub(super) struct Reached {
    /// The far side: memory of the endpoint's process.
    pub(super) there: Vec<Arc<Opened>>,
    /// The local side where that is attached memory, of whatever process.
    pub(super) attached: Vec<Arc<Opened>>,
}

/// What goes with a copy until it has ended.
pub(super) struct InFlight {
    pub(super) remote: Arc<PeerProcess>,
    /// Empty if it could not be opened.
    reached: Reached,
}

impl InFlight {
    pub(super) fn new(remote: &Arc<PeerProcess>, reached: Reached) -> Self {
        InFlight { remote: Arc::clone(remote), reached }
    }

    /// Whether the peer has ended, as far as the engine has noticed: it does within moments, and
    /// asking costs nothing.
    pub(super) fn has_peer_ended(&self) -> bool {
        self.reached.there.iter().any(|opened| opened.has_peer_ended())
    }
}
