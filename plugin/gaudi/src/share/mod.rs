//! Memory between processes: keys, the leases that make them good, and relays where nothing can be imported.
//!
//! An exporter shares an allocation ([`Device::share`]) and sends the [`Share::key`] to a peer by
//! whatever means. The peer parses it ([`RemoteKey::parse`]), opens it for one of its own devices
//! ([`RemoteKey::open`]) and copies between that device and what [`Opened::translate`] answers: one
//! DMA from card to card. Where no driver imports, and for host memory ([`HostShare`]), it copies through a [`Relay`].
//! No UCX here; `docs/ipc.md` has the security model.
//!
//! There is one connection from an importing process to each exporting one. The exporter hands a
//! dma-buf out only over it, and records a *lease* on the connection in the same step. What is freed
//! is returned to the pool when all leases on it have ended. A lease, on both sides:
//!
//! | event | exporter (`ExporterLeases`) | importer (`ImporterLeases`) |
//! |---|---|---|
//! | memory is to be shared | exported without the lock; if it was freed meanwhile it is not offered | |
//! | memory is to be opened | | sends `Open`: *requested* |
//! | `Open` with the key of shared memory | *leased*; sends `Grant` with the dma-buf | |
//! | `Open` with any other key | sends `Refused`; hangs up if nothing was ever leased to this peer | |
//! | `Grant` | | *requested* → *answered*; *abandoned* → none, sends `Release` |
//! | `Refused` | | *requested* → *answered*; *abandoned* → none |
//! | the requester takes the answer | | *answered* → *held* and imported, or none if it was refused |
//! | no answer in time, a second at most | | *requested* → *abandoned* |
//! | memory is unshared or freed, or its card is lost | stays *leased*; sends `Revoke` | |
//! | `Revoke` | | evicted from the cache; *held* until its last user is done. Ignored if it was released |
//! | the import is unmapped | | *held* → none; sends `Release` |
//! | `Release` | *leased* → none; ignored if there is no such lease (but not before the first `Grant`) | |
//! | the connection ends | all its leases → none | evicted from the cache; the exporter counts as ended |
//! | anything else | hangs up | hangs up |
//!
//! | file | what |
//! |---|---|
//! | `identity`, `key`, `wire` | what travels; pure, total functions over bytes |
//! | `leases` | both state machines, without sockets |
//! | `exporter`, `broker` | what is shared; the thread that grants leases |
//! | `importer`, `opened`, `cache` | connections to exporters; keys, imports, and which are kept |
//! | `patience`, `no_lease` | how long an exporter is waited for; why there is no lease |
//! | `descriptors` | how many both sides keep, and leave to the application |
//! | `relay` | memory that cannot be imported, through shared host memory |
//! | `socket` | where brokers listen, who is at the other end, sending and receiving |

mod broker;
mod cache;
#[cfg(test)]
mod cache_tests;
mod descriptors;
mod exporter;
mod identity;
mod importer;
mod key;
mod leases;
#[cfg(test)]
mod leases_model;
mod no_lease;
mod opened;
mod patience;
mod relay;
mod socket;
mod sync;
mod wire;

pub use crate::options::Limits;
pub use exporter::{Share, start_broker};
pub(crate) use exporter::{card_lost, freed, reclaim};
pub use identity::Identity;
pub use key::KEY_LEN;
pub(crate) use opened::peer_handles;
pub use opened::{Opened, RemoteKey};
pub use relay::{Access, HostShare, Relay, RelayPiece, Relayed, Wakeups, assist};
pub use socket::remove_leftovers;

use std::sync::Arc;

use crate::{Device, DeviceAddr, Error};

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
        /// The exporter's user id.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// This process does not know who it is itself.
    #[error("this process cannot tell who it is: {0}")]
    OwnIdentity(String),
}

impl Device {
    /// Offers the allocation in which `[addr, addr + len)` lies to other processes of this user that
    /// are given the key. What leaves the process is a dma-buf of this allocation alone.
    ///
    /// The first call starts the broker, a thread that sleeps until a peer comes.
    pub fn share(self: &Arc<Self>, addr: DeviceAddr, len: u64) -> Result<Share, Error> {
        let checked = self.check_own(addr, len, "sharing device memory");
        let shared = checked.and_then(|_| exporter::share(self, addr));
        shared.map_err(|error| self.failed(error))
    }

    fn freed_meanwhile(&self, addr: DeviceAddr) -> Error {
        let detail = format!("{addr} was freed meanwhile");
        Error::new(crate::ErrorKind::InvalidParams, "sharing device memory", detail, "")
    }
}
