//! Page-aligned host memory of our own, for command buffers and bounce buffers.

use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A page of the host, which the driver pins as a whole; also the unit in which it exports device
/// memory. Cards are in x86-64 hosts, where it is the same everywhere.
pub const PAGE_SIZE: u64 = 4096;

/// Zeroed, page-aligned anonymous memory, given back when dropped.
///
/// It is not copied to children: a fork would otherwise leave the parent with fresh pages while
/// the device keeps writing to the old ones.
#[derive(Debug)]
pub struct HostPages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: only an address and a length; all access goes through raw pointers, whose users answer
// for it.
unsafe impl Send for HostPages {}
// SAFETY: as above.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// At least `len` bytes, rounded up to whole pages.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE_SIZE as usize);
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let start = NonNull::new(start.cast()).expect("mmap does not return null");
        let pages = Self { start, len };
        // SAFETY: exactly the mapping just made.
        unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontFork)? };
        Ok(pages)
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody holds a reference into it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_zeroed_and_writable() {
        let pages = HostPages::new(5000).unwrap();
        assert_eq!(pages.len(), 8192);
        assert_eq!(pages.as_ptr() as usize % PAGE_SIZE as usize, 0);
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe {
            assert_eq!(pages.as_ptr().add(8191).read(), 0);
            pages.as_ptr().add(8191).write(7);
            assert_eq!(pages.as_ptr().add(8191).read(), 7);
        }
    }
}
