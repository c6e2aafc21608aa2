//! Pages that the kernel pins for the card, and copies to and from those pages.
//!
//! The driver pins host memory when it is mapped, and the card keeps using these pages whatever the program does with
//! the addresses afterwards. A process cannot pin pages itself, but io_uring pins its *registered buffers*, with the
//! flag that the driver uses (FOLL_LONGTERM). A file read or write with such a buffer moves the bytes of the pinned
//! pages, not those of what is mapped there by then. The file is the card's memory, or a small staging file.
//!
//! One ring per process, leaked; one operation at a time.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once};

use rustix::fs::{MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::io_uring::{
    IORING_OFF_SQ_RING, IORING_OFF_SQES, IoringEnterFlags, IoringFeatureFlags, IoringOp,
    IoringRegisterOp, IoringRsrcFlags, io_uring_cqe, io_uring_enter, io_uring_params, io_uring_ptr,
    io_uring_register, io_uring_rsrc_register, io_uring_rsrc_update2, io_uring_setup, io_uring_sqe,
};
use rustix::mm::{MapFlags, ProtFlags};

use crate::guarded::{self, BadAddress};
use crate::workers;

/// Most buffers of a ring.
const SLOTS: u32 = 1 << 14;
/// Most bytes of a buffer.
pub(crate) const MAX_PIN: u64 = 1 << 30;
/// Bytes of the staging file, for copies that do not involve the card's memory.
const STAGING: usize = 256 << 10;

/// The ring of this process.
#[derive(Debug)]
pub(crate) struct Ring {
    fd: OwnedFd,
    free: Mutex<Vec<u16>>,
    queue: Mutex<RingQueue>,
}

/// The submission and completion rings in shared memory (one entry is in use at a time), and the staging file.
#[derive(Debug)]
struct RingQueue {
    sq_tail: &'static AtomicU32,
    sq_mask: u32,
    sqes: *mut io_uring_sqe,
    cq_head: &'static AtomicU32,
    cq_tail: &'static AtomicU32,
    cq_mask: u32,
    cqes: *const io_uring_cqe,
    staging: OwnedFd,
    staging_ptr: *mut u8,
}

// SAFETY: the pointers are to mappings that are never undone, and used under the lock only.
unsafe impl Send for RingQueue {}

/// Pinned pages; unpinned when it is dropped.
#[derive(Debug)]
pub(crate) struct Pin {
    ring: &'static Ring,
    slot: u16,
    forks: u64,
}

/// Names the pages of a [`Pin`]. If the pin was dropped meanwhile, copies fail.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PinId {
    ring: &'static Ring,
    slot: u16,
}

/// Null before the first use, and in a forked child: the pins of an inherited ring would be its parent's.
static RING: AtomicPtr<Ring> = AtomicPtr::new(core::ptr::null_mut());

/// Makes a forked child create a ring of its own.
pub(crate) fn forget_after_fork() {
    RING.store(core::ptr::null_mut(), Ordering::Relaxed);
}

fn ring() -> Result<&'static Ring, Errno> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // SAFETY: null, or leaked below.
    if let Some(ring) = unsafe { RING.load(Ordering::Acquire).as_ref() } {
        return Ok(ring);
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // SAFETY: as above.
    if let Some(ring) = unsafe { RING.load(Ordering::Acquire).as_ref() } {
        return Ok(ring);
    }
    let ring = Box::leak(Box::new(Ring::new()?));
    RING.store(ring, Ordering::Release);
    Ok(ring)
}

/// Creates the ring, so that an open card has all its descriptors. If that fails, the first pin reports it.
pub(crate) fn prepare() {
    let _ = ring();
}

/// Pins `len` bytes from `start`, both multiples of a page, `len` at most [`MAX_PIN`].
///
/// `Ok(None)` if the kernel does not let this process pin; reported once.
pub(crate) fn pin(start: u64, len: u64) -> Result<Option<Pin>, Errno> {
    let pinned = ring().and_then(|ring| {
        let slot = ring.lock_free().pop().ok_or(Errno::NOSPC)?;
        let pin = Pin { ring, slot, forks: workers::fork_generation() };
        ring.update(slot, start, len).map(|()| pin)
    });
    match pinned {
        Ok(pin) => Ok(Some(pin)),
        // Not writable memory: the driver returns the same error.
        Err(Errno::FAULT) => Err(Errno::FAULT),
        Err(errno) => {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                eprintln!(
                    "soft-gaudi: the kernel does not pin {len} bytes for this process ({errno}): copies resolve \
                     addresses when they run, so that stale pins go unnoticed (see SOFT_GAUDI_LENIENT=unpinned)"
                );
            });
            Ok(None)
        }
    }
}

impl Pin {
    pub(crate) fn id(&self) -> PinId {
        PinId { ring: self.ring, slot: self.slot }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // In a forked child the ring is the parent's, and so are the pages.
        if self.forks == workers::fork_generation() {
            let _ = self.ring.update(self.slot, 0, 0);
            self.ring.lock_free().push(self.slot);
        }
    }
}

/// The end of a copy that is not pinned host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyEnd<'a> {
    /// A part of a file of shared memory.
    File(BorrowedFd<'a>, u64),
    /// Memory that [`guarded::copy`] may be used on.
    Memory(*mut u8),
}

impl PinId {
    /// Copies between the pinned page at `host` (its address when it was pinned) and the other side.
    pub(crate) fn copy(
        self,
        host: u64,
        other: CopyEnd<'_>,
        len: usize,
        into_host: bool,
    ) -> Result<(), BadAddress> {
        let mut queue = self.ring.lock_queue();
        let mut done = 0;
        while done < len {
            let at = host + done as u64;
            let moved = match other {
                CopyEnd::File(file, offset) => {
                    let from = offset + done as u64;
                    self.transfer(&mut queue, at, len - done, (file.as_raw_fd(), from), into_host)?
                }
                CopyEnd::Memory(ptr) => {
                    let part = (len - done).min(STAGING);
                    let (ptr, staging) = (ptr.wrapping_add(done), queue.staging_ptr);
                    let file = (queue.staging.as_raw_fd(), 0);
                    if into_host {
                        // SAFETY: ours, and the caller's promise.
                        unsafe { guarded::copy(staging, ptr, part) }?;
                    }
                    let moved = self.transfer(&mut queue, at, part, file, into_host)?;
                    if !into_host {
                        // SAFETY: as above.
                        unsafe { guarded::copy(ptr, staging, moved) }?;
                    }
                    moved
                }
            };
            done += moved;
        }
        Ok(())
    }

    /// One operation; returns how many bytes it moved, never zero.
    fn transfer(
        self,
        queue: &mut RingQueue,
        host: u64,
        len: usize,
        (file, offset): (i32, u64),
        into_host: bool,
    ) -> Result<usize, BadAddress> {
        let mut sqe = io_uring_sqe {
            opcode: if into_host { IoringOp::ReadFixed } else { IoringOp::WriteFixed },
            fd: file,
            ..io_uring_sqe::default()
        };
        sqe.off_or_addr2.off = offset;
        sqe.addr_or_splice_off_in.addr = io_uring_ptr::new(host as *mut _);
        sqe.len.len = len.min(MAX_PIN as usize) as u32;
        sqe.buf.buf_index = self.slot;
        match queue.run(&self.ring.fd, sqe) {
            Ok(moved) if moved > 0 => Ok(moved),
            _ => Err(BadAddress),
        }
    }
}

impl RingQueue {
    fn run(&mut self, ring: &OwnedFd, sqe: io_uring_sqe) -> Result<usize, Errno> {
        let tail = self.sq_tail.load(Ordering::Relaxed);
        // SAFETY: inside the array; the kernel reads the entry after the tail was moved.
        unsafe { self.sqes.add((tail & self.sq_mask) as usize).write(sqe) };
        self.sq_tail.store(tail.wrapping_add(1), Ordering::Release);
        let head = self.cq_head.load(Ordering::Relaxed);
        let mut to_submit = 1;
        while self.cq_tail.load(Ordering::Acquire) == head {
            // SAFETY: the entry describes a buffer that the kernel holds and a file that the caller borrows.
            match unsafe { io_uring_enter(ring, to_submit, 1, IoringEnterFlags::GETEVENTS) } {
                Ok(submitted) => to_submit -= submitted.min(to_submit),
                Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                Err(errno) => {
                    if to_submit > 0 {
                        self.sq_tail.store(tail, Ordering::Release);
                    }
                    return Err(errno);
                }
            }
        }
        // SAFETY: the kernel has written this entry before it moved the tail.
        let result = unsafe { (*self.cqes.add((head & self.cq_mask) as usize)).res };
        self.cq_head.store(head.wrapping_add(1), Ordering::Release);
        usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
    }
}

impl Ring {
    fn new() -> Result<Self, Errno> {
        let mut params = io_uring_params::default();
        // SAFETY: the parameters are valid and ask for nothing that refers to memory.
        let fd = unsafe { io_uring_setup(1, &mut params) }?;
        if !params.features.contains(IoringFeatureFlags::SINGLE_MMAP) {
            return Err(Errno::NOSYS);
        }
        let (sq, cq) = (params.sq_off, params.cq_off);
        let array_end = sq.array as usize + 4 * params.sq_entries as usize;
        let cqes_end = cq.cqes as usize + params.cq_entries as usize * size_of::<io_uring_cqe>();
        let shared = map(&fd, array_end.max(cqes_end), IORING_OFF_SQ_RING)?;
        let sqes = params.sq_entries as usize * size_of::<io_uring_sqe>();
        let sqes = map(&fd, sqes, IORING_OFF_SQES)?.cast();
        // SAFETY: offsets that the kernel gave, in a mapping that is never undone.
        let word = |offset: u32| unsafe { &*shared.add(offset as usize).cast::<AtomicU32>() };
        for entry in 0..params.sq_entries {
            word(sq.array + 4 * entry).store(entry, Ordering::Relaxed);
        }
        // Sparse: slots are filled one by one, when they are needed.
        let mut sparse = io_uring_rsrc_register::default();
        (sparse.nr, sparse.flags) = (SLOTS, IoringRsrcFlags::REGISTER_SPARSE);
        let (arg, size) = ((&raw const sparse).cast(), size_of_val(&sparse) as u32);
        // SAFETY: a valid structure of the size given.
        unsafe { io_uring_register(&fd, IoringRegisterOp::RegisterBuffers2, arg, size) }?;
        let staging = rustix::fs::memfd_create("soft-gaudi-staging", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&staging, STAGING as u64)?;
        // A new memfd cannot use direct I/O; a second open of it can.
        let path = format!("/proc/self/fd/{}", staging.as_raw_fd());
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let staging = rustix::fs::open(path, flags, Mode::empty()).unwrap_or(staging);
        serve_at_once(&staging);
        let queue = RingQueue {
            sq_tail: word(sq.tail),
            sq_mask: word(sq.ring_mask).load(Ordering::Relaxed),
            sqes,
            cq_head: word(cq.head),
            cq_tail: word(cq.tail),
            cq_mask: word(cq.ring_mask).load(Ordering::Relaxed),
            cqes: shared.wrapping_add(cq.cqes as usize).cast(),
            staging_ptr: map(&staging, STAGING, 0)?,
            staging,
        };
        let free = Mutex::new((0..SLOTS as u16).rev().collect());
        Ok(Self { fd, free, queue: Mutex::new(queue) })
    }

    fn lock_free(&self) -> MutexGuard<'_, Vec<u16>> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn lock_queue(&self) -> MutexGuard<'_, RingQueue> {
        self.queue.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Pins the range as this slot's buffer; a length of 0 unpins the slot's buffer.
    fn update(&self, slot: u16, start: u64, len: u64) -> Result<(), Errno> {
        let buffer = libc::iovec { iov_base: start as *mut _, iov_len: len as usize };
        let mut update = io_uring_rsrc_update2::default();
        (update.offset, update.nr) = (slot.into(), 1);
        update.data = io_uring_ptr::new((&raw const buffer).cast_mut().cast());
        let (arg, size) = ((&raw const update).cast(), size_of_val(&update) as u32);
        let op = IoringRegisterOp::RegisterBuffersUpdate;
        // SAFETY: valid structures; the kernel checks the range.
        unsafe { io_uring_register(&self.fd, op, arg, size) }.map(drop)
    }
}

/// Maps a file for good.
fn map(file: &OwnedFd, len: usize, offset: u64) -> Result<*mut u8, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::SHARED | MapFlags::POPULATE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let ptr =
        unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, protection, flags, file, offset) };
    ptr.map(|ptr| ptr.cast())
}

/// Makes the kernel do operations on a shared-memory file inside the call. Otherwise it hands them to a thread.
pub(crate) fn serve_at_once(file: &OwnedFd) {
    // On shared memory, direct I/O only means that writes need not be handed over (since Linux 6.6). On a disk it would
    // refuse odd lengths and bypass the pages that others have mapped.
    let is_shared_memory = rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC);
    let direct = if is_shared_memory { OFlags::DIRECT } else { OFlags::empty() };
    let _ = rustix::fs::fcntl_setfl(file, OFlags::NONBLOCK | direct)
        .or_else(|_| rustix::fs::fcntl_setfl(file, OFlags::NONBLOCK));
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const LEN: usize = 8192;

    #[test]
    fn pinned_pages_are_reached_after_they_were_replaced() {
        let ptr = pages();
        let Some(pin) = pin(ptr as u64, LEN as u64).unwrap() else {
            return eprintln!("skipped: no pins by io_uring here");
        };
        // SAFETY: the mapping just made, replaced in place.
        unsafe {
            ptr.write_bytes(7, LEN);
            let fixed = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let both = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mmap(ptr.cast(), LEN, both, fixed, -1, 0), ptr.cast());
            ptr.write_bytes(9, LEN);
        }
        let mut seen = vec![0u8; 5000];
        let memory = CopyEnd::Memory(seen.as_mut_ptr());
        pin.id().copy(ptr as u64 + 100, memory, 5000, false).unwrap();
        assert!(seen.iter().all(|byte| *byte == 7));
        pin.id().copy(ptr as u64, memory, 5000, true).unwrap();
        // SAFETY: as above.
        assert!((0..LEN).all(|at| unsafe { ptr.add(at).read() } == 9));
        assert!(pin.id().copy(ptr as u64 + 4000, memory, 5000, false).is_err(), "past its end");
        let id = pin.id();
        drop(pin);
        assert!(id.copy(ptr as u64, memory, 8, false).is_err(), "unpinned");
    }

    #[test]
    fn odd_lengths_reach_a_file_on_any_file_system() {
        let ptr = pages();
        let Some(pin) = pin(ptr as u64, LEN as u64).unwrap() else {
            return eprintln!("skipped: no pins by io_uring here");
        };
        // SAFETY: the mapping just made.
        unsafe { ptr.write_bytes(7, LEN) };
        for folder in [std::env::temp_dir(), "/dev/shm".into()] {
            let path = folder.join(format!("soft-gaudi-odd-{}", std::process::id()));
            let Ok(file) =
                std::fs::File::options().create_new(true).read(true).write(true).open(&path)
            else {
                eprintln!("skipped: no file in {}", folder.display());
                continue;
            };
            file.set_len(LEN as u64).unwrap();
            let file = OwnedFd::from(file);
            serve_at_once(&file);
            pin.id().copy(ptr as u64 + 3, CopyEnd::File(file.as_fd(), 13), 77, false).unwrap();
            let seen = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            assert!(
                seen.iter()
                    .enumerate()
                    .all(|(at, byte)| *byte == 7 * u8::from((13..90).contains(&at)))
            );
        }
    }

    fn pages() -> *mut u8 {
        let flags = MapFlags::PRIVATE;
        // SAFETY: a fresh mapping, leaked.
        let ptr = unsafe {
            let both = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(core::ptr::null_mut(), LEN, both, flags)
        };
        ptr.unwrap().cast()
    }

    #[test]
    fn memory_that_cannot_be_written_is_not_pinned() {
        let Ok(Some(_)) = pin(pages() as u64, LEN as u64) else {
            return eprintln!("skipped: no pins by io_uring here");
        };
        static CONSTANT: [u8; 3 * 4096] = [7; 3 * 4096];
        let start = (CONSTANT.as_ptr() as u64).next_multiple_of(4096);
        assert_eq!(pin(start, 4096).unwrap_err(), Errno::FAULT);
        assert_eq!(pin(0x10000, 4096).unwrap_err(), Errno::FAULT);
    }
}
