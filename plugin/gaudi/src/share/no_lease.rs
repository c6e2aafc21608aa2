//! Why an importer got no lease, in words, and what to do about it.

use std::fmt;

use rustix::io::Errno;

use super::leases::Denied;
use super::wire::Refusal;
use crate::ErrorKind;

/// Why there is no lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoLease {
    /// No such socket, or not for us.
    NobodyListens(Errno),
    /// The process that listens is not the exporter, or not of our user.
    NotTheExporter,
    /// No answer in time.
    Silent,
    /// The exporter ended, or closed the connection: it does so to other users, without a reply.
    HungUp,
    /// Memory that is not shared under this key, or no more.
    Unknown,
    /// An answer that we do not understand, or it does not understand us.
    NotUnderstood,
    /// The exporter has too many peers.
    Crowded,
    /// The memory is reached through a relay only.
    NoDmabuf,
    /// This process lacks something.
    Ourselves(String),
}

impl fmt::Display for NoLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoLease::NobodyListens(Errno::CONNREFUSED) => f.write_str("nobody listens"),
            NoLease::NobodyListens(errno) => write!(f, "nobody listens ({errno})"),
            NoLease::NotTheExporter => f.write_str("the listener is not the exporter"),
            NoLease::Silent => f.write_str("no answer in time"),
            NoLease::HungUp => f.write_str("it hung up"),
            NoLease::Unknown => f.write_str("this memory is not shared (any more)"),
            NoLease::NotUnderstood => f.write_str("it speaks another version"),
            NoLease::Crowded => f.write_str("it has too many peers"),
            NoLease::NoDmabuf => {
                f.write_str("its driver has no dma-buf import, so it exports none")
            }
            NoLease::Ourselves(what) => f.write_str(what),
        }
    }
}

impl NoLease {
    /// What kind of failure this is to who opens memory, and what to do about it.
    pub(super) fn remedy(&self) -> (ErrorKind, &'static str) {
        match self {
            NoLease::NobodyListens(Errno::AGAIN) | NoLease::Crowded => (
                ErrorKind::ChannelFailed,
                "try again later, have fewer processes use its memory, or raise its limit of open files",
            ),
            // It hangs up on other users without a reply.
            NoLease::NobodyListens(_) | NoLease::NotTheExporter | NoLease::HungUp => (
                ErrorKind::PermissionDenied,
                "run both as the same user, with a common network namespace or /dev/shm",
            ),
            NoLease::Silent => {
                (ErrorKind::Timeout, "it is stopped or very busy: continue it, or try again later")
            }
            NoLease::Unknown => (ErrorKind::ChannelFailed, ""),
            NoLease::NoDmabuf => (ErrorKind::InvalidParams, "reach this memory through a relay"),
            NoLease::NotUnderstood => {
                (ErrorKind::ChannelFailed, "use one version of ucx-gaudi in both processes")
            }
            NoLease::Ourselves(_) => (
                ErrorKind::OutOfMemory,
                "raise this process's limits of open files (ulimit -n) and threads, or use fewer peers' memory",
            ),
        }
    }
}

impl From<Denied> for NoLease {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Refused(why) => why.into(),
            Denied::NoDescriptor => NoLease::Ourselves("no free descriptor".into()),
        }
    }
}

impl From<Refusal> for NoLease {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Unknown => NoLease::Unknown,
            Refusal::Malformed => NoLease::NotUnderstood,
            Refusal::Crowded => NoLease::Crowded,
            Refusal::NoDmabuf => NoLease::NoDmabuf,
        }
    }
}
