//! Device memory between processes: keys, and how they are made good.
//!
//! An exporter shares an allocation ([`Device::share`]) and sends the [`Share::key`] to a peer by
//! whatever means. The peer parses it ([`RemoteKey::parse`]), opens it for one of its own devices
//! ([`RemoteKey::open`]) and copies between that device and what [`Opened::translate`] answers: one
//! DMA from card to card. No UCX here; `docs/ipc.md` has the path and the security model.
//!
//! | file | what |
//! |---|---|
//! | `identity`, `key`, `field`, `message` | what travels; pure, total functions over bytes |
//! | `export`, `ledger`, `sheet`, `broker`, `sessions`, `socket` | the exporter: what is shared, handing it out, and who has it |
//! | `handover`, `conversation`, `opened`, `cache` | the importer: fetching, importing, keeping |
//! | `watch`, `keeper`, `holds` | noticing that a peer has ended or takes memory back |
//! | `fork`, `thread`, `sync` | being a guest in a program that forks, takes signals and is model-checked |

mod broker;
mod cache;
#[cfg(test)]
mod cache_tests;
mod conversation;
mod export;
mod field;
mod handover;
mod holds;
mod identity;
mod keeper;
mod key;
mod ledger;
mod message;
mod opened;
mod sessions;
#[cfg(test)]
mod sessions_tests;
mod sheet;
mod socket;
mod sync;
mod watch;

pub use cache::Limits;
pub use export::Share;
pub(crate) use export::{freed, settle};
pub use handover::{Handover, allow_handover};
pub use identity::Identity;
pub use key::KEY_LEN;
pub(crate) use opened::Handles;
pub use opened::{DEFAULT_LIMITS, Opened, Relation, RemoteKey, set_handle_limits};
pub use watch::Watch;

use std::sync::Arc;

use crate::{Device, DeviceAddr, Error, runtime};

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
        let shared = self.check_own(addr, len, "sharing device memory").and_then(|_| {
            let location = runtime().locate(addr.0, len.max(1) as usize);
            let location = location.ok_or_else(|| self.gone(addr))?;
            export::share(self, location)
        });
        shared.map_err(|error| self.failed(error))
    }

    fn gone(&self, addr: DeviceAddr) -> Error {
        let detail = format!("{addr} was freed meanwhile");
        Error::new(crate::ErrorKind::InvalidParams, "sharing device memory", detail, "")
    }
}

/// Starts this process's broker, if it does not run yet: for those who want to be watched
/// ([`Identity::watch`]) from another pid namespace before they share anything.
pub fn start_broker() -> Result<(), Error> {
    export::Exporter::here()?.start_broker()
}
