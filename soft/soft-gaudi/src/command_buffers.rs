//! Command buffers that the driver allocates: handles that are offsets into the compute node's
//! file, so that a plain `mmap` of the descriptor shows them.
//!
//! The library has one mapping of its own, made from a second open of the file: a mapping made from the user's
//! descriptor would keep the card busy after the user closed it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::address_space::HOST_PAGE;

/// Marks a handle as a command buffer's; also where they begin in the file: beyond any other handle, and
/// below 16 TiB, where files of ext4 end.
pub(crate) const HANDLES: u64 = 4 << 40;
/// Bytes of command buffers a context may have.
const CAPACITY: u64 = 16 << 30;
/// A destroyed buffer is not reused before this many bytes were destroyed after it, because the program may still have it mapped.
const QUARANTINE: u64 = 64 << 20;

/// A command buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommandBuffer {
    /// Usable bytes.
    pub(crate) size: u32,
    /// Its address in this process.
    pub(crate) ptr: usize,
    /// Its device address, if it has one.
    pub(crate) va: Option<u64>,
    pages: u64,
}

impl CommandBuffer {
    /// Whole pages of it.
    pub(crate) fn mapped_len(&self) -> u64 {
        self.pages * HOST_PAGE
    }
}

/// The command buffers of one context.
#[derive(Debug)]
pub(crate) struct CommandBuffers {
    file: OwnedFd,
    base: usize,
    next_page: u64,
    buffers: HashMap<u64, CommandBuffer>,
    /// (first page, pages) in the order they were destroyed.
    destroyed: VecDeque<(u64, u64)>,
    quarantined: u64,
    reusable: HashMap<u64, Vec<u64>>,
}

impl CommandBuffers {
    /// Prepares the file behind `file`, which must not be the user's descriptor.
    pub(crate) fn new(file: OwnedFd) -> Result<Self, Errno> {
        rustix::fs::ftruncate(&file, 0)?;
        rustix::fs::ftruncate(&file, HANDLES + CAPACITY)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                CAPACITY as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                HANDLES,
            )
        }?;
        // SAFETY: the range was just mapped; leaving it out of core dumps changes nothing else.
        unsafe { libc::madvise(base, CAPACITY as usize, libc::MADV_DONTDUMP) };
        Ok(Self {
            file,
            base: base as usize,
            next_page: 1,
            buffers: HashMap::new(),
            destroyed: VecDeque::new(),
            quarantined: 0,
            reusable: HashMap::new(),
        })
    }

    /// The node's file, by a descriptor that does not own the card.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Makes a buffer of at least a page.
    pub(crate) fn create(&mut self, size: u32) -> Result<(u64, CommandBuffer), Errno> {
        if size > crate::abi::MAX_CB_SIZE {
            return Err(Errno::INVAL);
        }
        self.create_any(size.into())
    }

    /// Makes a buffer of at least a page for the driver's own purposes, of any size.
    pub(crate) fn create_any(&mut self, size: u64) -> Result<(u64, CommandBuffer), Errno> {
        let size = size.max(HOST_PAGE);
        let pages = size.div_ceil(HOST_PAGE);
        let page = match self.reusable.get_mut(&pages).and_then(Vec::pop) {
            Some(page) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.fallocate(flags, page, pages)?;
                page
            }
            None => {
                let page = self.next_page;
                if (page + pages) * HOST_PAGE > CAPACITY {
                    return Err(Errno::NOMEM);
                }
                page
            }
        };
        // Allocate the pages now: at the program's first store, a lack of memory would be a SIGBUS.
        if let Err(errno) = self.fallocate(FallocateFlags::KEEP_SIZE, page, pages) {
            if page != self.next_page {
                self.reusable.entry(pages).or_default().push(page);
            }
            return Err(errno);
        }
        if page == self.next_page {
            self.next_page += pages;
        }
        let ptr = self.base + (page * HOST_PAGE) as usize;
        let buffer = CommandBuffer { size: size as u32, ptr, va: None, pages };
        let handle = HANDLES + page * HOST_PAGE;
        self.buffers.insert(handle, buffer);
        Ok((handle, buffer))
    }

    fn fallocate(&self, flags: FallocateFlags, page: u64, pages: u64) -> Result<(), Errno> {
        let (at, len) = (HANDLES + page * HOST_PAGE, pages * HOST_PAGE);
        rustix::fs::fallocate(&self.file, flags, at, len).map_err(|_| Errno::NOMEM)
    }

    /// Sets the device address of a buffer.
    pub(crate) fn set_va(&mut self, handle: u64, va: u64) {
        if let Some(buffer) = self.buffers.get_mut(&handle) {
            buffer.va = Some(va);
        }
    }

    pub(crate) fn get(&self, handle: u64) -> Result<CommandBuffer, Errno> {
        self.buffers.get(&handle).copied().ok_or(Errno::INVAL)
    }

    /// Destroys a buffer; its memory stays for programs that have it mapped.
    pub(crate) fn destroy(&mut self, handle: u64) -> Result<CommandBuffer, Errno> {
        let buffer = self.buffers.remove(&handle).ok_or(Errno::INVAL)?;
        self.destroyed.push_back(((handle - HANDLES) / HOST_PAGE, buffer.pages));
        self.quarantined += buffer.mapped_len();
        while self.quarantined > QUARANTINE {
            let Some((page, pages)) = self.destroyed.pop_front() else { break };
            self.quarantined -= pages * HOST_PAGE;
            self.reusable.entry(pages).or_default().push(page);
        }
        Ok(buffer)
    }
}

impl Drop for CommandBuffers {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no pointer into it is used after its context.
        let _ = unsafe { rustix::mm::munmap(self.base as *mut _, CAPACITY as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_memory_and_one_on_disk_hold_command_buffers() {
        for folder in [std::env::temp_dir(), "/dev/shm".into()] {
            let path = folder.join(format!("soft-gaudi-buffers-{}", std::process::id()));
            let file = std::fs::File::create_new(&path);
            let Ok(file) =
                file.inspect_err(|error| println!("skipped: {}: {error}", path.display()))
            else {
                continue;
            };
            drop(file);
            let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            let mut buffers = CommandBuffers::new(file.into())
                .unwrap_or_else(|errno| panic!("{}: {errno}", path.display()));
            let (handle, buffer) = buffers.create(4096).unwrap();
            assert_eq!(handle, HANDLES + HOST_PAGE);
            // SAFETY: the buffer is a page of the mapping that `buffers` holds.
            unsafe { core::ptr::write_bytes(buffer.ptr as *mut u8, 0x5a, 4096) };
            let mut byte = [0];
            rustix::io::pread(&buffers.file, &mut byte, handle + 4095).unwrap();
            assert_eq!(byte, [0x5a], "{}", path.display());
        }
    }
}
