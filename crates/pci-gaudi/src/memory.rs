//! Memory that the device shares with others: its own (BARs, HBM), which QEMU maps too, and the
//! guest's, which QEMU hands over.
//!
//! Others write to it at any time, so no reference to its bytes is ever made: words are accessed as
//! atomics, blocks are copied in and out.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, RwLock};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping.
#[derive(Debug)]
pub struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the value; its bytes are accessed through atomics and raw copies only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, flags, fd, offset)? };
        Ok(Self { base: base.cast(), len })
    }

    fn at(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let end = usize::try_from(offset).ok()?.checked_add(len)?;
        // SAFETY: inside the mapping.
        (end <= self.len).then(|| unsafe { self.base.add(offset as usize) })
    }

    /// Copies from `offset` on; `None` outside of the mapping.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Option<()> {
        let from = self.at(offset, into.len())?;
        // SAFETY: both have the length; a concurrent writer may tear the bytes, as on a bus.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Copies to `offset`; `None` outside of the mapping.
    pub fn write(&self, offset: u64, data: &[u8]) -> Option<()> {
        let to = self.at(offset, data.len())?;
        // SAFETY: both have the length; a concurrent reader may see a part, as on a bus.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Some(())
    }

    fn word(&self, offset: u64) -> Option<&AtomicU32> {
        let at = self.at(offset & !3, 4)?;
        // SAFETY: aligned (mappings begin on a page), inside, and lives as long as the mapping.
        Some(unsafe { AtomicU32::from_ptr(at.cast()) })
    }

    /// The word at an offset; 0 outside of the mapping.
    pub fn load(&self, offset: u64) -> u32 {
        self.word(offset).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Sets the word at an offset.
    pub fn store(&self, offset: u64, value: u32) {
        if let Some(word) = self.word(offset) {
            word.store(value, Ordering::Release);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody else knows of it.
        let _ = unsafe { munmap(self.base.cast(), self.len) };
    }
}

/// Memory of the device itself: sparse, zero at first.
#[derive(Debug)]
pub struct OwnMemory {
    fd: OwnedFd,
    mapping: Mapping,
}

impl OwnMemory {
    /// Of a size; it takes memory of the host only where it is written.
    pub fn new(name: &str, len: u64) -> io::Result<Self> {
        let name = CString::new(name)?;
        let fd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, len)?;
        let mapping = Mapping::new(fd.as_fd(), 0, len as usize)?;
        Ok(Self { fd, mapping })
    }

    /// To hand to QEMU.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Makes a part zero again, for everyone who maps it, and gives its pages back.
    pub fn clear(&self, offset: u64, len: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&self.fd, flags, offset, len);
    }
}

impl std::ops::Deref for OwnMemory {
    type Target = Mapping;
    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

#[derive(Clone, Debug)]
struct Part {
    start: u64,
    size: u64,
    memory: Arc<Mapping>,
}

/// The guest's memory, by guest-physical address. QEMU changes the map while the guest's BIOS runs.
#[derive(Debug, Default)]
pub struct GuestMemory {
    parts: RwLock<Vec<Part>>,
}

impl GuestMemory {
    /// Adds what QEMU has mapped.
    pub fn map(&self, start: u64, size: u64, fd: OwnedFd, offset: u64) -> io::Result<()> {
        let len = usize::try_from(size).map_err(io::Error::other)?;
        let memory = Arc::new(Mapping::new(fd.as_fd(), offset, len)?);
        self.parts.write().unwrap().push(Part { start, size, memory });
        Ok(())
    }

    /// Removes what lies inside a range.
    pub fn unmap(&self, start: u64, size: u64) {
        let end = start.saturating_add(size);
        self.parts
            .write()
            .unwrap()
            .retain(|part| part.start < start || part.start + part.size > end);
    }

    /// Calls `each` with every piece of a range: offset from `addr`, mapping, offset in it, bytes.
    fn pieces(
        &self,
        addr: u64,
        len: usize,
        mut each: impl FnMut(usize, &Mapping, u64, usize) -> Option<()>,
    ) -> Option<()> {
        let parts = self.parts.read().unwrap();
        let mut done = 0;
        while done < len {
            let at = addr.checked_add(done as u64)?;
            let part = parts.iter().find(|p| p.start <= at && at - p.start < p.size)?;
            let offset = at - part.start;
            let piece = (part.size - offset).min((len - done) as u64) as usize;
            each(done, &part.memory, offset, piece)?;
            done += piece;
        }
        Some(())
    }

    /// Reads; `None` where there is no memory.
    pub fn read(&self, addr: u64, into: &mut [u8]) -> Option<()> {
        self.pieces(addr, into.len(), |done, memory, offset, len| {
            memory.read(offset, &mut into[done..done + len])
        })
    }

    /// Writes; `None` where there is no memory. Ordered after everything written before, so that a guest
    /// that polls the last word finds the others.
    pub fn write(&self, addr: u64, data: &[u8]) -> Option<()> {
        fence(Ordering::SeqCst);
        if let (Ok(word), 0) = (<[u8; 4]>::try_from(data), addr % 4) {
            return self.pieces(addr, 4, |_, memory, offset, _| {
                memory.store(offset, u32::from_le_bytes(word));
                Some(())
            });
        }
        self.pieces(addr, data.len(), |done, memory, offset, len| {
            memory.write(offset, &data[done..done + len])
        })
    }

    /// The 64-bit word at an address.
    pub fn long(&self, addr: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(addr, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }
}
