//! Connections from other hosts that have not proved yet that they know the secret: they are few,
//! and not for long. Anybody who reaches the port can open one. (Those on the node's Unix socket are
//! of our own user, as the kernel says, and do not count.)

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use super::connection::Connection;
use crate::hca::events::lock;

/// How long a connection may take to prove it.
const DEADLINE: Duration = Duration::from_secs(5);

/// Strangers, in the order in which they came.
#[derive(Default)]
pub(super) struct Admission {
    strangers: Mutex<VecDeque<(Instant, Arc<Connection>)>>,
}

impl Admission {
    /// How many are admitted at a time: a small part of what the process may open.
    fn limit() -> usize {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(1 << 20) as usize;
        (files / 32).clamp(2, 64)
    }

    /// Whether one more is admitted.
    pub(super) fn has_capacity(&self) -> bool {
        let mut strangers = lock(&self.strangers);
        strangers.retain(|(_, connection)| connection.is_stranger());
        strangers.len() < Self::limit()
    }

    /// Admits one.
    pub(super) fn add(&self, connection: Arc<Connection>) {
        lock(&self.strangers).push_back((Instant::now() + DEADLINE, connection));
    }

    /// When the oldest must have proved it.
    pub(super) fn deadline(&self) -> Option<Instant> {
        lock(&self.strangers).front().map(|(deadline, _)| *deadline)
    }

    /// The next one whose time is over.
    pub(super) fn overdue(&self) -> Option<Arc<Connection>> {
        let mut strangers = lock(&self.strangers);
        while let Some((deadline, _)) = strangers.front() {
            if *deadline > Instant::now() {
                return None;
            }
            let stranger = strangers.pop_front().map(|(_, connection)| connection);
            if let Some(stranger) = stranger.filter(|connection| connection.is_stranger()) {
                return Some(stranger);
            }
        }
        None
    }
}
