//! dma-bufs of the kernel's own exporters that the processor may map, such as `/dev/udmabuf` and the dma-heaps.
//!
//! A real card reaches them by DMA; the software card maps them. A dma-buf that cannot be mapped (a GPU's), and a file
//! that is not a dma-buf, are refused as the driver refuses what it cannot attach to.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// Such a dma-buf, mapped whole. The mapping is its reference, as an attachment is.
#[derive(Debug)]
pub(crate) struct Foreign {
    base: usize,
    len: u64,
}

impl Foreign {
    pub(crate) fn map(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        // DMA_BUF_MAGIC
        if rustix::fs::fstatfs(fd).map_err(|_| Errno::INVAL)?.f_type != 0x444d_4142 {
            return Err(Errno::INVAL);
        }
        let len = rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0)).map_err(|_| Errno::INVAL)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(core::ptr::null_mut(), len as usize, access, MapFlags::SHARED, fd, 0)
        };
        let base = base.map_err(|error| match error {
            Errno::NOMEM => error,
            _ => Errno::INVAL,
        })?;
        Ok(Self { base: base as usize, len })
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: mapped with this length; a copy that still uses it faults, as one of a card does after an unmap.
        let _ = unsafe { rustix::mm::munmap(self.base as *mut _, self.len as usize) };
    }
}
