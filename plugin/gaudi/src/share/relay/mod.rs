//! The relay: reaches memory of another process without importing it, through a [`ring`] of shared host memory.
//!
//! No upstream driver imports dma-bufs, and no driver imports a peer's host memory. In these cases the *initiator* of a put
//! or get asks the *owner* of the memory to do half of the work: the owner's [`service`], a thread, copies between its memory
//! and the ring, and the initiator copies between the ring and its own memory. The halves are pipelined: while one chunk is
//! in one half, the next is in the other. The initiator fills the ring for a put, the owner for a get.
//!
//! | step | put | get |
//! |---|---|---|
//! | 1 | the initiator fills a range of the ring | the initiator asks for pieces of memory |
//! | 2 | and asks for it to be written | the owner fills the range, and answers |
//! | 3 | the owner writes its memory, and answers | the initiator empties the range |
//!
//! A relay is a connection to the owner, handed to the service after one message that names memory which is shared at that
//! moment ([`Way::Relay`](super::wire::Way)). The initiator receives answers itself, while it is polled, and needs neither a
//! thread nor a lock shared with leases. When the connection ends, all requests on it end. Requests name memory by the token
//! of its key; the owner trusts nothing else.
//!
//! Many small pieces travel in one request; a large one is cut into chunks ([`transfer`]).

mod chunks;
#[cfg(test)]
mod chunks_tests;
#[cfg(feature = "fuzzing")]
pub(super) mod fuzzing;
mod host;
mod ring;
mod service;
mod transfer;
mod wakeups;
mod wire;

use std::sync::atomic::{AtomicUsize, Ordering};

pub use host::HostShare;
pub(super) use host::HostShares;
pub(super) use service::Service;
pub use service::assist;
pub use transfer::{Relay, RelayPiece, Relayed};
pub use wakeups::Wakeups;
pub use wire::Access;

/// How many relays a process may have to others, and others to it. Each has a ring that cards pin, of 8 MiB when it has
/// copied much: one GiB together.
const MAX_RELAYS: usize = 128;

/// A permit: there are at most [`MAX_RELAYS`].
#[derive(Debug)]
struct Counted(&'static AtomicUsize);

impl Counted {
    fn new(all: &'static AtomicUsize) -> Option<Self> {
        let more = |now| (now < MAX_RELAYS).then_some(now + 1);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(all))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
