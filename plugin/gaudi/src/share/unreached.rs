//! Why an initiator cannot reach memory of another process, in words, and what to do about it.

use rustix::io::Errno;

use super::Identity;
use super::wire::Refusal;
use crate::stats::Counter;
use crate::{Error, ErrorKind};

const REACHING: &str = "reaching a peer's memory";

/// Why memory cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Unreached {
    /// The owner has ended.
    Ended,
    /// No memory is shared under this key: it is wrong, or was withdrawn.
    NotShared,
    /// No such socket, or not for us; `EAGAIN`: its queue is full.
    NobodyListens(Errno),
    /// The process that listens is not the owner, or not of our user.
    NotTheOwner,
    /// No answer in time.
    Silent,
    /// The owner closed the connection: it does so to other users, without an answer.
    HungUp,
    /// An answer that we do not understand, or it does not understand us.
    NotUnderstood,
    /// The owner lacks something.
    OwnerShort,
    /// The memory is reached through a relay only.
    NoDmabuf,
    /// What came is not what the key says.
    Mismatch(&'static str),
    /// This process lacks something.
    Ourselves(String),
}

impl From<Refusal> for Unreached {
    fn from(why: Refusal) -> Self {
        match why {
            Refusal::Unknown => Unreached::NotShared,
            Refusal::Malformed => Unreached::NotUnderstood,
            Refusal::Short => Unreached::OwnerShort,
            Refusal::NoDmabuf => Unreached::NoDmabuf,
        }
    }
}

impl Unreached {
    /// The same, unless the owner is known to have ended: that is the cause then.
    pub(super) fn of(self, owner: &Identity) -> Self {
        match self {
            Unreached::NotShared | Unreached::Mismatch(_) => self,
            _ if owner.has_surely_ended() => Unreached::Ended,
            why => why,
        }
    }

    pub(super) fn counter(&self) -> Counter {
        match self {
            Unreached::Ended => Counter::IpcRefusedEnded,
            Unreached::NotShared => Counter::IpcRefusedWithdrawn,
            Unreached::Mismatch(_) => Counter::IpcRefusedMismatch,
            _ => Counter::IpcRefusedUnreachable,
        }
    }

    /// For whoever wanted to reach memory of this process.
    pub(super) fn error(&self, owner: &Identity) -> Error {
        use ErrorKind::{ChannelFailed, InvalidParams, OutOfMemory, PermissionDenied, Timeout};
        const SAME_USER: &str =
            "run both as the same user, with a common network namespace or /dev/shm";
        const ITS_LIMITS: &str = "try again later, raise its limits of open files (ulimit -n), memory and threads, or have fewer processes use its memory";
        let (kind, what, remedy) = match self {
            Unreached::Ended => (ChannelFailed, "it has ended".to_owned(), ""),
            Unreached::NotShared => (
                ChannelFailed,
                "it does not share this memory (any more)".to_owned(),
                "it was freed or deregistered, or its card was reset or removed: use a key of memory that is registered there now",
            ),
            Unreached::NobodyListens(Errno::AGAIN) => {
                (ChannelFailed, "its queue of connections is full".to_owned(), ITS_LIMITS)
            }
            Unreached::NobodyListens(Errno::CONNREFUSED) => {
                (PermissionDenied, "nobody listens".to_owned(), SAME_USER)
            }
            Unreached::NobodyListens(errno) => {
                (PermissionDenied, format!("nobody listens ({errno})"), SAME_USER)
            }
            Unreached::NotTheOwner => {
                (PermissionDenied, "another process listens in its place".to_owned(), SAME_USER)
            }
            Unreached::HungUp => (PermissionDenied, "it hung up".to_owned(), SAME_USER),
            Unreached::Silent => (
                Timeout,
                "no answer in time".to_owned(),
                "it is stopped or very busy: continue it, or try again later",
            ),
            Unreached::NotUnderstood => (
                ChannelFailed,
                "it speaks another version".to_owned(),
                "use one version of ucx-gaudi in both processes",
            ),
            Unreached::OwnerShort => (
                OutOfMemory,
                "it lacks descriptors, memory or a thread, or has too many peers".to_owned(),
                ITS_LIMITS,
            ),
            Unreached::NoDmabuf => {
                (InvalidParams, "it exports no dma-buf".to_owned(), "reach it through a relay")
            }
            Unreached::Mismatch(what) => (ChannelFailed, format!("it sent {what}"), ""),
            Unreached::Ourselves(what) => (
                OutOfMemory,
                what.clone(),
                "raise this process's limits of open files (ulimit -n) and threads, or use fewer peers' memory",
            ),
        };
        let mut error = Error::new(kind, REACHING, format!("{owner}: {what}"), remedy);
        match self {
            Unreached::Ended => error.set_errno(libc::ESRCH),
            Unreached::NoDmabuf => error.set_errno(libc::EOPNOTSUPP),
            _ => {}
        }
        error
    }
}
