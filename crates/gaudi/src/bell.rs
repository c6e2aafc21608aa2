//! What wakes a thread that sleeps in `poll` or `epoll`: an event descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// A descriptor that becomes readable when it is rung, and stays so until it is silenced.
///
/// [`Transfer::ring_when_done`](crate::Transfer::ring_when_done) and
/// [`Device::ring_on_completion`](crate::Device::ring_on_completion) have it rung by the hardware.
#[derive(Debug)]
pub struct Bell {
    fd: OwnedFd,
}

impl Bell {
    /// A silent bell; an error where the process is out of descriptors.
    pub fn new() -> std::io::Result<Arc<Self>> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { fd }))
    }

    /// Makes the descriptor readable.
    pub fn ring(&self) {
        // A full counter means that it rings already.
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until it is rung again.
    pub fn silence(&self) {
        // An empty counter is fine.
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn rings(bell: &Bell) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&now)).unwrap() > 0
    }

    #[test]
    fn a_bell_rings_until_it_is_silenced_however_often_it_was_rung() {
        let bell = Bell::new().unwrap();
        assert!(!rings(&bell));
        bell.silence();
        bell.ring();
        bell.ring();
        assert!(rings(&bell) && rings(&bell));
        bell.silence();
        assert!(!rings(&bell));
    }
}
