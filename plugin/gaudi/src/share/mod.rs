//! Memory between processes: keys, the leases that make them good, and relays where nothing can be imported.
//!
//! The *owner* of memory shares an allocation ([`Device::share`](crate::Device::share)) and sends the [`Share::key`] to a
//! peer by whatever means. The *initiator* of a copy parses it ([`RemoteKey::parse`]), opens it for one of its own devices
//! ([`RemoteKey::open`]) and copies between that device and what [`Opened::translate`] answers: one
//! DMA from card to card. Where no driver imports, and for host memory ([`HostShare`]), it copies through a [`Relay`].
//! No UCX here; `docs/ipc.md` has the security model.
//!
//! Each import has a connection of its own, and that is the *lease*: the owner hands a dma-buf out only over it, and keeps
//! the memory from reuse until the initiator closes it. What is freed is returned to the pool when all leases on it have
//! ended.
//!
//! | event | owner | initiator |
//! |---|---|---|
//! | memory is to be opened | | connects, and sends the key |
//! | the key of shared memory comes | keeps the memory, answers with a dma-buf | imports and caches it |
//! | any other message comes | answers with a refusal, and closes | |
//! | no answer in time, a second at most | | closes |
//! | memory is unshared or freed, or its card is lost | ends its direction of the connection (`shutdown`) | evicts it from the cache: unmaps it when its last user is done |
//! | the import is unmapped | | closes |
//! | the connection ends | the memory is not kept any more | the owner has ended; evicts it from the cache |
//!
//! | file | what |
//! |---|---|
//! | `identity`, `key`, `wire` | what travels; pure, total functions over bytes |
//! | `owner`, `listener` | what is shared; how peers get to it |
//! | `initiator`, `opened`, `cache` | connections to owners; keys, imports, and which are kept |
//! | `backoff`, `unreached` | how long an owner is waited for; why memory cannot be reached |
//! | `watcher` | the thread that waits for peers, of either side |
//! | `descriptors` | how many both sides keep, and leave to the application |
//! | `relay` | memory that cannot be imported, through shared host memory |
//! | `strangers` | closing connections of other users |
//! | `socket` | where owners listen, who is at the other end, sending and receiving |

mod backoff;
mod cache;
#[cfg(test)]
mod cache_tests;
mod descriptors;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod initiator;
mod key;
mod listener;
mod opened;
mod owner;
mod relay;
mod socket;
mod strangers;
mod sync;
mod unreached;
mod watcher;
mod wire;

pub use crate::options::Limits;
pub use identity::Identity;
pub use key::KEY_LEN;
pub(crate) use opened::peer_handles;
pub use opened::{Opened, RemoteKey};
pub use owner::{Share, listen};
pub(crate) use owner::{card_lost, freed};
pub use relay::{Access, HostShare, Relay, RelayPiece, Relayed, Wakeups, assist};
pub use socket::remove_leftovers;

/// Why bytes are no key, or no key for this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not as long as they should be.
    #[error("it has {found} bytes, not {expected}")]
    Length {
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// Made by another version of ucx-gaudi.
    #[error("it is of version {found}, this is version {expected}: use one version everywhere")]
    Version {
        /// The version they say.
        found: u8,
        /// Ours.
        expected: u8,
    },
    /// They contradict themselves.
    #[error("it makes no sense: {0}")]
    Malformed(&'static str),
    /// From another machine, or from before this one was started.
    #[error("it is of another host, or of an earlier boot of this one")]
    OtherHost,
    /// From a process that has ended: this one has its process id now.
    #[error("it is of a process that has ended")]
    Ended,
    /// From another user's process.
    #[error(
        "it is user {theirs}'s, and this process is user {ours}'s: memory is shared within a user only"
    )]
    OtherUser {
        /// The owner's user id.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// This process does not know who it is itself.
    #[error("this process cannot tell who it is: {0}")]
    OwnIdentity(String),
}
