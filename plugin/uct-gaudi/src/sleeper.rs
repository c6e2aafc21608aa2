//! Threads that sleep until an interface has something to do.
//!
//! UCX arms the interface's event fd, then sleeps on it. The engine notifies it when a copy makes
//! progress. We notify it when a copy is posted while a thread sleeps (by another thread, or by another
//! interface's progress).

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use gaudi::Notifier;
use uct::abi::event_flag;
use uct::{Status, Ucx, log};

use crate::copies::Copies;

/// The event fd of an interface.
pub(crate) struct Sleeper {
    /// Absent where the process is out of descriptors; then no event flag is advertised.
    notifier: Option<Arc<Notifier>>,
    /// Whether a sleeper has to be woken when a copy is posted.
    armed: Cell<bool>,
}

impl Sleeper {
    pub(crate) fn new(ucx: &Ucx, transport: &str) -> Self {
        let notifier = Notifier::new()
            .map(Arc::new)
            .inspect_err(|error| log!(ucx, Info, "{transport}: no event fd: {error}"))
            .ok();
        Sleeper { notifier, armed: Cell::new(false) }
    }

    /// The event flags an interface may advertise. UCX picks no lane for a sleeping worker without
    /// them, and crashes where it has no other.
    pub(crate) fn event_flags(&self) -> u64 {
        match self.notifier {
            Some(_) => event_flag::SEND_COMP | event_flag::RECV | event_flag::FD,
            None => 0,
        }
    }

    pub(crate) fn notifier(&self) -> Option<&Arc<Notifier>> {
        self.notifier.as_ref()
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.notifier.as_ref().map(|notifier| notifier.as_fd())
    }

    /// Prepares for sleeping, unless there is something to progress.
    pub(crate) fn arm<'a, T: 'a>(
        &self,
        copies: impl IntoIterator<Item = &'a Copies<T>>,
    ) -> Result<(), Status> {
        let notifier = self.notifier.as_ref().ok_or(Status::UNSUPPORTED)?;
        // Clears the notification that woke the last sleeper.
        notifier.clear();
        for copies in copies.into_iter().filter(|copies| !copies.is_idle()) {
            if !copies.notify_when_ready(notifier) {
                return Err(Status::BUSY);
            }
        }
        self.armed.set(true);
        Ok(())
    }

    /// Wakes a thread that has slept since before this copy was posted, so that it progresses the copy.
    pub(crate) fn wake(&self) {
        if self.armed.replace(false)
            && let Some(notifier) = &self.notifier
        {
            notifier.notify();
        }
    }
}
