//! MSI-X vectors: an eventfd each, given by QEMU.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{Ordering, fence};

use crate::pci_config::VECTORS;
use crate::vfio_user::Irqs;

/// The vectors.
#[derive(Debug)]
pub struct Interrupts(Mutex<Vec<Option<OwnedFd>>>);

impl Interrupts {
    /// None connected.
    pub fn new() -> Self {
        Self(Mutex::new((0..VECTORS).map(|_| None).collect()))
    }

    /// Connects or disconnects vectors.
    pub fn set(&self, irqs: Irqs) {
        let mut vectors = self.0.lock().unwrap();
        match irqs {
            Irqs::Clear(range) => {
                for vector in &mut vectors[range.start as usize..range.end as usize] {
                    *vector = None;
                }
            }
            Irqs::Eventfds(start, fds) => {
                for (vector, fd) in vectors[start as usize..].iter_mut().zip(fds) {
                    *vector = Some(fd);
                }
            }
        }
    }

    /// Raises a vector, after everything that was written to guest memory. False if no eventfd is connected.
    pub fn raise(&self, vector: u32) -> bool {
        fence(Ordering::SeqCst);
        let vectors = self.0.lock().unwrap();
        let Some(Some(fd)) = vectors.get(vector as usize) else { return false };
        rustix::io::write(fd, &1u64.to_ne_bytes()).is_ok()
    }
}

impl Default for Interrupts {
    fn default() -> Self {
        Self::new()
    }
}
