//! Threads that sleep until an interface has something to do.
//!
//! UCX sleeps on the interface's event fd after it armed it. It is notified by the engine when a copy gets
//! on, and by ourselves when a copy is posted while a thread sleeps (by another thread, or by another
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
    /// A sleeper has to be woken when a copy is posted.
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
        // What woke the last sleeper.
        notifier.clear();
        for copies in copies.into_iter().filter(|copies| !copies.is_idle()) {
            if !copies.notify_when_ready(notifier) {
                return Err(Status::BUSY);
            }
        }
        self.armed.set(true);
        Ok(())
    }

    /// A thread may sleep since before this copy: it has to come and progress it.
    pub(crate) fn wake(&self) {
        if self.armed.replace(false)
            && let Some(notifier) = &self.notifier
        {
            notifier.notify();
        }
    }
}
