//! Host memory of every kind: anonymous, of files, readable, writable, neither.

use anyhow::Result;
use rustix::mm::{MapFlags, ProtFlags};

/// A mapping, undone when dropped.
pub(super) struct Map {
    start: *mut std::ffi::c_void,
    pub(super) length: usize,
}

impl Map {
    /// Private memory that takes up nothing until it is touched.
    pub(super) fn anonymous(prot: ProtFlags, length: usize) -> Result<Map> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, prot, flags) }?;
        Ok(Map { start, length })
    }

    /// The beginning of a file.
    pub(super) fn file(
        file: impl std::os::fd::AsFd,
        prot: ProtFlags,
        flags: MapFlags,
        length: usize,
    ) -> Result<Map> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, prot, flags, file, 0) }?;
        Ok(Map { start, length })
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The mapping must be readable, and nobody may write to it meanwhile.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as this value lives; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.length) }
    }

    /// First address.
    pub(super) fn address(&self) -> u64 {
        self.start.addr() as u64
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // The C library's function, as programs call it: that is what UCX hooks to learn of it.
        // SAFETY: mapped by us, and nothing refers to it.
        unsafe { libc::munmap(self.start, self.length) };
    }
}
