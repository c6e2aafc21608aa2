//! Sharing memory between processes: keys, leases on imported memory, and relays where nothing can be imported.
//!
//! The *owner* of memory shares an allocation ([`Device::share`](crate::Device::share)) and sends the [`Share::key`] to a
//! peer over any channel. The *initiator* of a copy parses the key ([`RemoteKey::parse`]), opens it for one of its own
//! devices ([`RemoteKey::open`]) and copies between that device and the address that [`Opened::translate`] returns: one DMA
//! from card to card. Where no driver imports, and for host memory ([`HostShare`]), it copies through a [`Relay`]. Nothing
//! here knows UCX; `docs/ipc.md` has the security model.
//!
//! Each import has a connection of its own, and that connection is the *lease*: the owner sends a dma-buf only over it, and
//! does not reuse the memory until the initiator closes it. Freed memory returns to the pool when all leases on it have
//! ended.
//!
//! | event | owner | initiator |
//! |---|---|---|
//! | the initiator opens memory | | connects, and sends the key |
//! | the key of shared memory arrives | keeps the memory out of the pool, answers with a dma-buf | imports and caches it |
//! | any other message arrives | answers with a refusal, and closes | |
//! | no answer in time (a second at most) | | closes |
//! | memory is unshared or freed, or its card lost | revokes: `shutdown(SHUT_WR)` | evicts it: unmaps it after its last user |
//! | the import is unmapped | | closes |
//! | the connection ends | does not keep the memory any more | the owner has ended: evicts the import from the cache |
//!
//! | file | what |
//! |---|---|
//! | `identity`, `key`, `wire` | what is sent; pure, total functions over bytes |
//! | `owner`, `listener` | what this process shares; how peers connect to it |
//! | `initiator`, `opened`, `cache` | connections to owners; opened keys and their imports; the cache of imports |
//! | `backoff`, `unreached` | how long to wait for an owner; why memory cannot be reached |
//! | `watcher` | the threads that wait for peers, one for each side |
//! | `descriptors` | how many descriptors both sides may keep, and how many are left to the application |
//! | `relay` | memory that cannot be imported, through shared host memory |
//! | `strangers` | closing connections of other users |
//! | `socket` | socket addresses, credentials of the other end, sending and receiving |

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

/// Why bytes are not a key, or not a key for this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The length is wrong.
    #[error("it has {found} bytes, not {expected}")]
    Length {
        /// How many bytes there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// Made by another version of ucx-gaudi.
    #[error("it is of version {found}, this is version {expected}: use one version everywhere")]
    Version {
        /// Their version.
        found: u8,
        /// Ours.
        expected: u8,
    },
    /// The fields make no sense.
    #[error("it makes no sense: {0}")]
    Malformed(&'static str),
    /// From another machine, or from before this one was started.
    #[error("it is of another host, or of an earlier boot of this one")]
    OtherHost,
    /// From a process that has ended: this process has its process id now.
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
    /// This process cannot find out its own identity.
    #[error("this process cannot tell who it is: {0}")]
    OwnIdentity(String),
}
