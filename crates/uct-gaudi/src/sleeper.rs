//! Threads that sleep until an interface has something to do.
//!
//! UCX sleeps on the interface's event fd after it armed it. It is rung by the engine when a copy gets
//! on, and by ourselves when a copy is posted while a thread sleeps (by another thread, or by another
//! interface's progress).

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use gaudi::Bell;
use uct::abi::event_flag;
use uct::{Status, Ucx, log};

use crate::copies::Copies;

/// The event fd of an interface.
pub(crate) struct Sleeper {
    /// Absent where the process is out of descriptors; then no event flag is advertised.
    bell: Option<Arc<Bell>>,
    /// A sleeper has to be woken when a copy is posted.
    armed: Cell<bool>,
}

impl Sleeper {
    pub(crate) fn new(ucx: &Ucx, transport: &str) -> Self {
        let bell = Bell::new()
            .inspect_err(|error| log!(ucx, Info, "{transport}: no event fd: {error}"))
            .ok();
        Sleeper { bell, armed: Cell::new(false) }
    }

    /// The event flags an interface may advertise. UCX picks no lane for a sleeping worker without
    /// them, and crashes where it has no other.
    pub(crate) fn event_flags(&self) -> u64 {
        match self.bell {
            Some(_) => event_flag::SEND_COMP | event_flag::RECV | event_flag::FD,
            None => 0,
        }
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(|bell| bell.as_fd())
    }

    /// Prepares for sleeping, unless there is something to progress.
    pub(crate) fn arm<T>(&self, copies: &Copies<T>) -> Result<(), Status> {
        let bell = self.bell.as_ref().ok_or(Status::UNSUPPORTED)?;
        // What woke the last sleeper.
        bell.silence();
        if !copies.is_idle() && !copies.ring_when_ready(bell) {
            return Err(Status::BUSY);
        }
        self.armed.set(true);
        Ok(())
    }

    /// A thread may sleep since before this copy: it has to come and progress it.
    pub(crate) fn wake(&self) {
        if self.armed.replace(false)
            && let Some(bell) = &self.bell
        {
            bell.ring();
        }
    }
}
