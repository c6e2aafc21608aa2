//! Notifications of a card: an eventfd that becomes readable, and a mask of the events.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};

use rustix::io::Errno;

/// Bits of the mask, as the kernel numbers them.
pub(crate) mod bit {
    pub(crate) const UNDEFINED_OPCODE: u64 = 1 << 1;
    pub(crate) const DEVICE_RESET: u64 = 1 << 2;
    pub(crate) const CS_TIMEOUT: u64 = 1 << 3;
    pub(crate) const USER_ENGINE_ERROR: u64 = 1 << 5;
    pub(crate) const RAZWI: u64 = 1 << 7;
    pub(crate) const PAGE_FAULT: u64 = 1 << 8;
}

#[derive(Debug, Default)]
struct State {
    notifier: Option<OwnedFd>,
    mask: u64,
}

/// Events of one context.
#[derive(Debug, Default)]
pub(crate) struct Events {
    state: Mutex<State>,
}

impl Events {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Registers an eventfd; one at a time.
    pub(crate) fn register(&self, eventfd: OwnedFd) -> Result<(), Errno> {
        let mut state = self.lock();
        if state.notifier.is_some() {
            return Err(Errno::INVAL);
        }
        state.notifier = Some(eventfd);
        Ok(())
    }

    /// Forgets the eventfd.
    pub(crate) fn unregister(&self) -> Result<(), Errno> {
        self.lock().notifier.take().map(drop).ok_or(Errno::INVAL)
    }

    /// Whether an eventfd is registered.
    pub(crate) fn is_registered(&self) -> bool {
        self.lock().notifier.is_some()
    }

    /// Adds events and signals the eventfd.
    pub(crate) fn raise(&self, bits: u64) {
        let mut state = self.lock();
        state.mask |= bits;
        if let Some(eventfd) = &state.notifier {
            // A full counter is readable anyway.
            let _ = rustix::io::write(eventfd.as_fd(), &1u64.to_ne_bytes());
        }
    }

    /// The events since the last call.
    pub(crate) fn take(&self) -> u64 {
        core::mem::take(&mut self.lock().mask)
    }
}
