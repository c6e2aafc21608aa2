//! Threads that sleep until an interface has something to do.
//!
//! UCX sleeps on the interface's event fd after it armed it, which is refused while copies are under
//! way: they are progressed, not waited for. A copy that is posted while a thread sleeps (by another
//! thread, or by another interface's progress) wakes it.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use uct::abi::event_flag;
use uct::{Status, Ucx, log};

/// The event fd of an interface.
pub(crate) struct Sleeper {
    /// Absent where the process is out of descriptors; then no event flag is advertised.
    fd: Option<OwnedFd>,
    /// A sleeper has to be woken when a copy is posted.
    armed: Cell<bool>,
}

impl Sleeper {
    pub(crate) fn new(ucx: &Ucx, transport: &str) -> Self {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .inspect_err(|error| log!(ucx, Info, "{transport}: no event fd: {error}"))
            .ok();
        Sleeper { fd, armed: Cell::new(false) }
    }

    /// The event flags an interface may advertise. UCX picks no lane for a sleeping worker without
    /// them, and crashes where it has no other.
    pub(crate) fn event_flags(&self) -> u64 {
        match self.fd {
            Some(_) => event_flag::SEND_COMP | event_flag::RECV | event_flag::FD,
            None => 0,
        }
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Prepares for sleeping, unless there is something to progress.
    pub(crate) fn arm(&self, idle: bool) -> Result<(), Status> {
        let fd = self.fd.as_ref().ok_or(Status::UNSUPPORTED)?;
        // Clear what woke the last sleeper; an empty counter is fine.
        let _ = rustix::io::read(fd, &mut [0; 8]);
        if !idle {
            return Err(Status::BUSY);
        }
        self.armed.set(true);
        Ok(())
    }

    /// A thread may sleep since before this copy: it has to come and progress it.
    pub(crate) fn wake(&self) {
        if self.armed.replace(false)
            && let Some(fd) = &self.fd
        {
            // A full counter means that the sleeper is being woken already.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }
}
