//! Memory that the device shares with others: its own (BARs, HBM), which QEMU maps too, and the
//! guest's, which QEMU hands over.
//!
//! Others write to it at any time, so no reference to its bytes is ever made: words are accessed as
//! atomics, blocks are copied in and out.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::registers::PAGE;

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
    /// Memory of this size; it takes memory of the host only where it is written.
    pub fn new(name: &str, len: u64) -> io::Result<Self> {
        let name = CString::new(name)?;
        let fd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, len)?;
        let mapping = Mapping::new(fd.as_fd(), 0, len as usize)?;
        Ok(Self { fd, mapping })
    }

    /// The file, to hand to QEMU.
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

#[derive(Debug)]
struct Part {
    start: u64,
    size: u64,
    /// `None` for memory that the device cannot access.
    memory: Option<Mapping>,
}

impl Part {
    /// Does not overflow: `map` has checked it.
    fn end(&self) -> u64 {
        self.start + self.size
    }
}

/// The end of a range of whole pages.
fn end_of(start: u64, size: u64) -> io::Result<u64> {
    if size == 0 || !start.is_multiple_of(PAGE) || !size.is_multiple_of(PAGE) {
        return Err(io::Error::other("not whole pages"));
    }
    start.checked_add(size).ok_or_else(|| io::Error::other("beyond the last address"))
}

/// The guest's memory, by guest-physical address. QEMU changes the map while the guest's BIOS runs.
#[derive(Debug, Default)]
pub struct GuestMemory {
    parts: RwLock<Vec<Part>>,
}

impl GuestMemory {
    /// Adds what QEMU has mapped: a part of a file, or what the device cannot access.
    pub fn map(&self, start: u64, size: u64, memory: Option<(OwnedFd, u64)>) -> io::Result<()> {
        let end = end_of(start, size)?;
        let mut parts = self.parts.write().unwrap();
        if parts.iter().any(|part| part.start < end && start < part.end()) {
            return Err(io::Error::other("overlaps with what is mapped"));
        }
        let memory = match memory {
            Some((fd, offset)) => {
                let past = end_of(offset, size)?;
                // An access behind the end of the file would be SIGBUS.
                let file = u64::try_from(fstat(&fd)?.st_size).map_err(io::Error::other)?;
                if past > file {
                    return Err(io::Error::other(format!("file of {file:#x} bytes")));
                }
                let len = usize::try_from(size).map_err(io::Error::other)?;
                Some(Mapping::new(fd.as_fd(), offset, len)?)
            }
            None => None,
        };
        parts.push(Part { start, size, memory });
        Ok(())
    }

    /// Removes the mappings inside a range; a mapping must not lie there only in part.
    pub fn unmap(&self, start: u64, size: u64) -> io::Result<()> {
        let end = end_of(start, size)?;
        let mut parts = self.parts.write().unwrap();
        let mut touched = parts.iter().filter(|part| part.start < end && start < part.end());
        let inside = |part: &Part| start <= part.start && part.end() <= end;
        if touched.clone().next().is_none() {
            return Err(io::Error::other("nothing is mapped there"));
        }
        if !touched.all(inside) {
            return Err(io::Error::other("only a part of what is mapped"));
        }
        parts.retain(|part| !inside(part));
        Ok(())
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
            each(done, part.memory.as_ref()?, offset, piece)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: u64 = 8 * PAGE;

    fn file() -> OwnedFd {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, FILE).unwrap();
        fd
    }

    #[test]
    fn a_map_of_parts_of_pages_beyond_the_file_or_the_last_address_or_over_another_is_refused() {
        let guest = GuestMemory::default();
        guest.map(FILE, FILE, Some((file(), 0))).unwrap();
        guest.map(8 * FILE, FILE, None).unwrap();
        let last = 0u64.wrapping_sub(PAGE);
        for (start, size, offset) in [
            (0, 0, 0),
            (1, PAGE, 0),
            (0, PAGE + 1, 0),
            (0, PAGE, 8),
            (0, PAGE, FILE),
            (0, 2 * PAGE, 7 * PAGE),
            (0, PAGE, last),
            (last, PAGE, 0),
            (last, 2 * PAGE, 0),
            (2 * FILE - PAGE, PAGE, 0),
            (FILE - PAGE, 2 * PAGE, 0),
            (9 * FILE - PAGE, PAGE, 0),
        ] {
            let mapped = guest.map(start, size, Some((file(), offset)));
            assert!(mapped.is_err(), "{start:#x} {size:#x} {offset:#x}");
        }
        guest.map(0, PAGE, Some((file(), 7 * PAGE))).unwrap();
        guest.write(PAGE - 1, &[7]).unwrap();
        assert_eq!(guest.write(PAGE, &[7]), None);
        assert_eq!(guest.write(8 * FILE, &[7]), None, "there, but out of reach");
    }

    #[test]
    fn an_unmap_takes_whole_mappings_and_at_least_one() {
        let guest = GuestMemory::default();
        guest.map(0, FILE, Some((file(), 0))).unwrap();
        guest.map(2 * FILE, FILE, None).unwrap();
        for (start, size) in
            [(FILE, FILE), (0, PAGE), (PAGE, FILE), (0, 0), (PAGE, 0u64.wrapping_sub(PAGE))]
        {
            assert!(guest.unmap(start, size).is_err(), "{start:#x} {size:#x}");
        }
        guest.read(FILE - 1, &mut [0]).unwrap();
        guest.unmap(2 * FILE, FILE).unwrap();
        guest.unmap(0, 2 * FILE).unwrap();
        assert_eq!(guest.read(0, &mut [0]), None);
    }
}
