//! Host memory of every kind: anonymous, of files, readable, writable, neither. It is mapped and unmapped with the C
//! library's functions, as in applications: UCX hooks those.

use anyhow::{Result, ensure};
use std::ffi::{c_int, c_void};
use std::io::Error;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

pub(super) const READ: c_int = libc::PROT_READ;
pub(super) const WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;
pub(super) const NONE: c_int = libc::PROT_NONE;

/// A mapping, unmapped on drop.
pub(super) struct HostMap {
    start: *mut c_void,
    pub(super) length: usize,
}

impl HostMap {
    /// Private memory that uses no pages until it is touched.
    pub(super) fn anonymous(access: c_int, length: usize) -> Result<HostMap> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        HostMap::map(ptr::null_mut(), length, access, flags, -1)
    }

    /// The beginning of a file, private or shared.
    pub(super) fn file(
        file: impl AsFd,
        access: c_int,
        flags: c_int,
        length: usize,
    ) -> Result<HostMap> {
        HostMap::map(ptr::null_mut(), length, access, flags, file.as_fd().as_raw_fd())
    }

    /// Writable memory at exactly this address, where nothing is mapped.
    pub(super) fn at(address: u64, length: usize) -> Result<HostMap> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let map =
            HostMap::map(ptr::without_provenance_mut(address as usize), length, WRITE, flags, -1)?;
        ensure!(map.address() == address, "the kernel maps elsewhere");
        Ok(map)
    }

    fn map(
        at: *mut c_void,
        length: usize,
        access: c_int,
        flags: c_int,
        fd: c_int,
    ) -> Result<HostMap> {
        // SAFETY: a fresh mapping that replaces nothing.
        let start = unsafe { libc::mmap(at, length, access, flags, fd, 0) };
        ensure!(start != libc::MAP_FAILED, "mmap: {}", Error::last_os_error());
        Ok(HostMap { start, length })
    }

    /// Maps fresh memory in its place.
    pub(super) fn replace(&mut self) -> Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: our own memory, to which nothing refers.
        let start = unsafe { libc::mmap(self.start, self.length, WRITE, flags, -1, 0) };
        ensure!(start == self.start, "mmap: {}", Error::last_os_error());
        Ok(())
    }

    /// Makes the kernel drop a page, whose bytes become zero.
    pub(super) fn empty(&mut self, at: usize) -> Result<()> {
        // SAFETY: a page of our own memory.
        let done = unsafe { libc::madvise(self.start.byte_add(at), 4096, libc::MADV_DONTNEED) };
        ensure!(done == 0, "madvise: {}", Error::last_os_error());
        Ok(())
    }

    /// Moves the pages to the address of another mapping, which is replaced.
    pub(super) fn move_to(self, other: HostMap) -> Result<HostMap> {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both mappings are ours; the call replaces the one at the new address.
        let moved =
            unsafe { libc::mremap(self.start, self.length, other.length, flags, other.start) };
        ensure!(moved == other.start, "mremap: {}", Error::last_os_error());
        std::mem::forget(self); // nothing is mapped there any more
        Ok(other)
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The mapping must be readable, and nothing may write to it while the slice lives.
    pub(super) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as this value lives; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.length) }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The mapping must be writable and private.
    pub(super) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; we have exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.length) }
    }

    pub(super) fn address(&self) -> u64 {
        self.start.addr() as u64
    }
}

impl Drop for HostMap {
    fn drop(&mut self) {
        // SAFETY: mapped by us, and nothing refers to it.
        unsafe { libc::munmap(self.start, self.length) };
    }
}
