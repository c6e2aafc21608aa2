//! Connections from other hosts that have not proved yet that they know the secret. Anybody who reaches the port can
//! open one, so they are few: where there are too many, the oldest goes. A process that knows the secret proves it
//! at once. (Those on the node's Unix socket are of our own user, as the kernel says, and do not count.)

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use rustix::process::{Resource, getrlimit};

use super::connection::Connection;
use crate::hca::events::lock;

/// Strangers, in the order in which they came.
#[derive(Default)]
pub(super) struct Admission {
    strangers: Mutex<VecDeque<Arc<Connection>>>,
}

impl Admission {
    /// How many there may be at a time: a small part of what the process may open.
    fn limit() -> usize {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(1 << 20) as usize;
        (files / 32).clamp(2, 64)
    }

    /// Admits one; returns the one that has to go for it.
    pub(super) fn add(&self, connection: Arc<Connection>) -> Option<Arc<Connection>> {
        let mut strangers = lock(&self.strangers);
        strangers.retain(|connection| connection.is_stranger());
        strangers.push_back(connection);
        if strangers.len() > Self::limit() { strangers.pop_front() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::epoll;

    use super::*;

    #[test]
    fn a_newcomer_is_admitted_at_once_and_the_oldest_stranger_goes() {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap().into());
        let admission = Admission::default();
        let limit = Admission::limit() as u64;
        let gone = |id| {
            let (ours, _) = UnixStream::pair().unwrap();
            let ours = OwnedFd::from(ours).into();
            let newcomer = Connection::new(id, ours, Arc::clone(&epoll), None, None);
            admission.add(Arc::new(newcomer)).map(|connection| connection.id)
        };
        let first: Vec<_> = (0..limit).map(gone).collect();
        assert!(first.iter().all(Option::is_none), "{first:?}");
        assert_eq!([gone(limit), gone(limit + 1)], [Some(0), Some(1)]);
    }
}
