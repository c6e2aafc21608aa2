//! Memory that is mapped into this process: pages of our own for command buffers and bounce buffers, and what the
//! driver maps of its files.

use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::io::Result;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::ProcessInstance;

/// A page of the host, which the driver pins as a whole; also the unit in which it exports device
/// memory. Cards are in x86-64 hosts, where it is the same everywhere.
pub const PAGE_SIZE: u64 = 4096;

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Page-aligned memory, unmapped when dropped.
///
/// Forked children do not inherit it. Otherwise, after a fork, the parent could write to new copies of pages while
/// the device keeps using the old ones; and a child's mapping of a device's file would keep the device open.
#[derive(Debug)]
pub struct HostPages {
    start: NonNull<u8>,
    len: usize,
    made_by: ProcessInstance,
}

// SAFETY: only an address and a length; all access goes through raw pointers, whose users answer
// for it.
unsafe impl Send for HostPages {}
// SAFETY: as above.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// At least `len` bytes of our own, zeroed, rounded up to whole pages.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE_SIZE as usize);
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ACCESS, MapFlags::PRIVATE)? };
        let pages = Self::mapped(start.cast(), len);
        pages.keep_from_children()?;
        Ok(pages)
    }

    /// Bytes of a device's file from `offset` on.
    pub(crate) fn of_file(file: impl AsFd, len: usize, offset: u64) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, ACCESS, MapFlags::SHARED, file, offset)? };
        let pages = Self::mapped(start.cast(), len);
        // If this is refused, children inherit it.
        let _ = pages.keep_from_children();
        Ok(pages)
    }

    fn mapped(start: *mut u8, len: usize) -> Self {
        let start = NonNull::new(start).expect("mmap does not return null");
        Self { start, len, made_by: ProcessInstance::current() }
    }

    fn keep_from_children(&self) -> Result<()> {
        // SAFETY: our own mapping; the advice changes nothing in this process.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxDontFork) }
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
        if self.made_by != ProcessInstance::current() {
            // A forked child does not have the pages, and may have something else there.
            return;
        }
        // SAFETY: the mapping is ours and has no references into it.
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
        // SAFETY: inside the mapping, which nothing else uses.
        unsafe {
            assert_eq!(pages.as_ptr().add(8191).read(), 0);
            pages.as_ptr().add(8191).write(7);
            assert_eq!(pages.as_ptr().add(8191).read(), 7);
        }
    }

    #[test]
    fn a_forked_child_that_drops_them_keeps_what_it_has_mapped_there() {
        let mut pages = Some(HostPages::new(4096).unwrap());
        let start = pages.as_ref().unwrap().as_ptr();
        // SAFETY: the child makes system calls and drops the pages.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
            // SAFETY: the address is free in the child; nothing is replaced.
            let own = unsafe { mmap_anonymous(start.cast(), 4096, access, flags) };
            drop(pages.take());
            // SAFETY: mapped just above, if it still is.
            let kept =
                own.is_ok() && unsafe { madvise(start.cast(), 4096, Advice::Normal) }.is_ok();
            // SAFETY: ends the process.
            unsafe { libc::_exit(if kept { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
