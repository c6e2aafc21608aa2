//! Shared memory without a name: a file that the kernel keeps while it is open, and that
//! can neither shrink nor be written by those who are given its descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Zeroed memory, mapped for reading and writing as long as this lives. Other processes may map or
/// read it through its descriptor.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    file: OwnedFd,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; all access goes through pointers, whose users are responsible for it.
unsafe impl Send for MemoryFile {}
// SAFETY: as above.
unsafe impl Sync for MemoryFile {}

impl MemoryFile {
    /// Memory of `len` bytes, or the call that failed and its errno. `/proc/PID/fd` shows the name.
    pub(crate) fn new(name: &str, len: usize) -> Result<Self, (&'static str, Errno)> {
        let failed = |call: &'static str| move |errno: Errno| (call, errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems require memory files to be marked as not executable; older kernels do not know the flag.
        let file = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create(name, flags),
            made => made,
        }
        .map_err(failed("memfd_create"))?;
        ftruncate(&file, len as u64).map_err(failed("ftruncate"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }
            .map_err(failed("mmap"))?;
        let start = NonNull::new(start.cast()).expect("mmap gives no null");
        let made = Self { file, start, len };
        // Others map it: it must not shrink under them. Others may not write to it, where the
        // kernel can forbid that (5.1).
        let size = SealFlags::SHRINK | SealFlags::GROW;
        fcntl_add_seals(&made.file, size | SealFlags::FUTURE_WRITE)
            .or_else(|_| fcntl_add_seals(&made.file, size))
            .map_err(failed("fcntl(F_ADD_SEALS)"))?;
        let _ = fcntl_add_seals(&made.file, SealFlags::SEAL);
        Ok(made)
    }

    /// Its first byte; page-aligned.
    pub(crate) fn as_ptr(&self) -> NonNull<u8> {
        self.start
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // SAFETY: our own mapping, without references into it. Nothing can be done if it fails.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fcntl_get_seals;
    use rustix::io::write;

    use super::*;

    #[test]
    fn the_memory_is_zeroed_and_others_can_neither_shrink_nor_write_it() {
        let file = MemoryFile::new("gaudi-test", 5000).unwrap();
        // SAFETY: inside the mapping, which nothing else uses.
        unsafe {
            assert_eq!(file.as_ptr().add(4999).read(), 0);
            file.as_ptr().write(7);
        }
        assert!(ftruncate(&file, 1).is_err() && ftruncate(&file, 8192).is_err());
        if fcntl_get_seals(&file).unwrap().contains(SealFlags::FUTURE_WRITE) {
            assert_eq!(write(&file, b"x"), Err(Errno::PERM));
        }
        let mut byte = [0];
        rustix::io::pread(&file, &mut byte, 0).unwrap();
        assert_eq!(byte, [7]);
    }
}
