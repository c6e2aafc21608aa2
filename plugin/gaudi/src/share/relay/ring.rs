//! The ring: memory that initiator and owner of a relay both have mapped. The copied bytes go through it, and nothing else.
//!
//! The initiator makes the ring and says which range a request uses, so neither side has to trust what is written in it. It
//! is a memfd of ordinary pages whose length is sealed: otherwise the initiator could make the owner's copies fault.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstatfs,
    ftruncate, memfd_create,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::super::descriptors::file_len;
use super::super::wire::Refusal;
use crate::HostRegion;

const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
/// Most bytes of a ring.
pub(super) const MAX_RING: usize = 16 << 20;

/// Mapped as long as this lives. Cards pin all of it when they first use it.
#[derive(Debug)]
pub(super) struct Ring {
    // Unpinned before it is unmapped: fields drop in order.
    region: Arc<HostRegion>,
    mapping: Mapping,
}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; all access goes through pointers, whose users are responsible for it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no card has a pin any more. Nothing can be done if it fails.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Ring {
    /// A new ring, and the descriptor for the owner.
    pub(super) fn new(len: usize) -> Result<(Arc<Self>, OwnedFd), (&'static str, Errno)> {
        let failed = |call: &'static str| move |errno: Errno| (call, errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Some systems require `MFD_NOEXEC_SEAL`; older kernels do not know it.
        let file = match memfd_create("gaudi-relay", flags | MemfdFlags::NOEXEC_SEAL) {
            Err(Errno::INVAL) => memfd_create("gaudi-relay", flags),
            made => made,
        }
        .map_err(failed("memfd_create"))?;
        ftruncate(&file, len as u64).map_err(failed("ftruncate"))?;
        // Allocate now: if there is no memory, this is an error, and the first access would be a signal.
        retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, len as u64))
            .map_err(failed("fallocate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        let ring = Self::map(file.as_fd(), len).map_err(failed("mmap"))?;
        Ok((ring, file))
    }

    /// Maps the ring that an initiator made. Refuses a file that does not have the right kind, length and seals.
    pub(super) fn of_peer(file: BorrowedFd<'_>) -> Result<Arc<Self>, Refusal> {
        // The seals first: without them, the peer may change the length after it was read. Only memory files have seals, so
        // no other file is asked for its length: a file system of the peer's own may never answer.
        let seals = fcntl_get_seals(file).map_err(|_| Refusal::Malformed)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Refusal::Malformed);
        }
        let len = file_len(file).ok().filter(|len| (1..=MAX_RING as u64).contains(len));
        // Huge pages may have run out when they are first accessed, which would be a signal.
        let is_plain = fstatfs(file).is_ok_and(|system| system.f_type == TMPFS_MAGIC);
        let len = len.filter(|_| is_plain).ok_or(Refusal::Malformed)?;
        Self::map(file, len as usize).map_err(|_| Refusal::Short)
    }

    fn map(file: BorrowedFd<'_>, len: usize) -> Result<Arc<Self>, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap(ptr::null_mut(), len, access, MapFlags::SHARED, file, 0) }?;
        let start = NonNull::new(start.cast()).ok_or(Errno::NOMEM)?;
        let mapping = Mapping { start, len };
        Ok(Arc::new(Self { region: HostRegion::of_engine(start.as_ptr(), len), mapping }))
    }

    pub(super) fn len(&self) -> usize {
        self.mapping.len
    }

    /// The region that copies pin.
    pub(super) fn region(&self) -> &Arc<HostRegion> {
        &self.region
    }

    /// The address of a range; `None` if it is not inside.
    pub(super) fn at(&self, at: u32, len: u32) -> Option<*mut u8> {
        let (at, len) = (at as usize, len as usize);
        let is_inside = at.checked_add(len).is_some_and(|end| end <= self.mapping.len);
        // SAFETY: inside the mapping.
        is_inside.then(|| unsafe { self.mapping.start.as_ptr().add(at) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_see_the_same_bytes_and_a_ring_that_can_shrink_is_refused() {
        let (ring, file) = Ring::new(64 << 10).unwrap();
        let other = Ring::of_peer(file.as_fd()).unwrap();
        assert_eq!((ring.len(), other.len()), (64 << 10, 64 << 10));
        let blocks = rustix::fs::fstat(&file).unwrap().st_blocks;
        assert_eq!(blocks * 512, 64 << 10, "its memory is there before it is touched");
        // SAFETY: inside both mappings, which nobody else uses.
        unsafe {
            ring.at(5, 1).unwrap().write(7);
            assert_eq!(other.at(5, 1).unwrap().read(), 7);
        }
        assert!(ring.at(0, 64 << 10).is_some() && ring.at(1, 64 << 10).is_none());
        assert!(ring.at(u32::MAX, u32::MAX).is_none());
        assert!(ftruncate(&file, 1).is_err());

        let unsealed = memfd_create("gaudi-test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        let refused = |file: BorrowedFd<'_>| Ring::of_peer(file).err() == Some(Refusal::Malformed);
        assert!(refused(unsealed.as_fd()), "not sealed");
        let (large, empty) = (
            Ring::new(MAX_RING + 1).unwrap().1,
            memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap(),
        );
        fcntl_add_seals(&empty, SealFlags::SHRINK).unwrap();
        assert!(refused(large.as_fd()) && refused(empty.as_fd()));
        // Pages of it may be missing when they are touched, which is a signal.
        match memfd_create("x", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB) {
            Ok(huge) => {
                ftruncate(&huge, 2 << 20).unwrap();
                fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
                assert!(refused(huge.as_fd()));
            }
            Err(errno) => println!("skipped: huge pages: {errno}"),
        }
        let no_memory = std::fs::File::open("/dev/null").unwrap();
        assert!(refused(no_memory.as_fd()));
    }
}
