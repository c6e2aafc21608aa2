//! Why an initiator cannot reach memory of another process, in words, and what to do about it.

use rustix::io::Errno;

use super::Identity;
use super::wire::Refusal;
use crate::stats::Counter;
use crate::{Error, ErrorKind};

const REACHING: &str = "reaching a peer's memory";

/// Why memory cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unreached {
    #[error("it has ended")]
    Ended,
    /// The key is wrong, or the memory was withdrawn.
    #[error("it does not share this memory (any more)")]
    NotShared,
    #[error("its queue of connections is full")]
    QueueFull,
    /// No such socket, no process listens on it, or there is no permission to connect to it.
    #[error("nobody listens ({0})")]
    NobodyListens(Errno),
    /// Or one of another user.
    #[error("another process listens in its place")]
    NotTheOwner,
    #[error("no answer in time")]
    Silent,
    /// An owner does so to other users, without an answer.
    #[error("it hung up")]
    HungUp,
    /// The owner runs, and gave no reason.
    #[error("it closed the relay")]
    RelayEnded,
    /// We do not understand its answer, or it does not understand us.
    #[error("it speaks another version")]
    NotUnderstood,
    #[error("it lacks descriptors, memory or a thread, or has too many peers")]
    OwnerShort,
    /// Only a relay reaches the memory.
    #[error("it exports no dma-buf")]
    NoDmabuf,
    /// What the owner sent does not match the key.
    #[error("it sent {0}")]
    Mismatch(&'static str),
    /// This process is out of a resource.
    #[error("{0}")]
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
    /// The same reason, unless the owner is known to have ended, which then is the cause.
    pub(super) fn of(self, owner: &Identity) -> Self {
        match self {
            Unreached::NotShared | Unreached::Mismatch(_) => self,
            Unreached::NobodyListens(_) | Unreached::HungUp if owner.is_ending() => {
                Unreached::Ended
            }
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

    /// The error for a caller that wanted to reach memory of `owner`.
    pub(super) fn error(&self, owner: &Identity) -> Error {
        use ErrorKind::{ChannelFailed, InvalidParams, OutOfMemory, PermissionDenied, Timeout};
        use Unreached::{HungUp, NobodyListens, NotTheOwner, OwnerShort, QueueFull};
        let (kind, remedy) = match self {
            Unreached::Ended | Unreached::Mismatch(_) => (ChannelFailed, ""),
            Unreached::RelayEnded => (
                ChannelFailed,
                "the standard error of that process may say why; a new endpoint has a new relay",
            ),
            Unreached::NotShared => (
                ChannelFailed,
                "it was freed or deregistered, or its card was reset or removed: use a key of memory that is registered there now",
            ),
            NobodyListens(_) | NotTheOwner | HungUp => (
                PermissionDenied,
                "run both as the same user, with a common network namespace or /dev/shm",
            ),
            QueueFull | OwnerShort => (
                OutOfMemory,
                "try again later, raise its limits of open files (ulimit -n), memory and threads, or have fewer processes use its memory",
            ),
            Unreached::Silent => {
                (Timeout, "it is stopped or very busy: continue it, or try again later")
            }
            Unreached::NotUnderstood => {
                (ChannelFailed, "use one version of ucx-gaudi in both processes")
            }
            Unreached::NoDmabuf => (InvalidParams, "reach it through a relay"),
            Unreached::Ourselves(_) => (
                OutOfMemory,
                "raise this process's limits of open files (ulimit -n) and threads, or use fewer peers' memory",
            ),
        };
        let mut error = Error::new(kind, REACHING, format!("{owner}: {self}"), remedy);
        match self {
            Unreached::Ended => error.set_errno(libc::ESRCH),
            Unreached::NoDmabuf => error.set_errno(libc::EOPNOTSUPP),
            _ => {}
        }
        error
    }
}
