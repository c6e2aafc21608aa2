//! Command buffers, their submission, and waiting for its completion.

use std::time::Instant;

use crate::error::check;
use crate::packet::LIN_DMA_LEN;
use crate::sys::{self, CsChunk, CsIn, CsOut};
use crate::{Device, Error, HostMapping, HostPages, trace};

/// How many packets of a submission a trace records.
const RECORDED_PACKETS: usize = 4;

/// Memory for packets, in the form that the generation needs: a buffer of the kernel on a Gaudi, host
/// memory of ours that is mapped for the device on later ones.
#[derive(Debug)]
pub struct CommandBuffer {
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    // Dropped first (fields drop in order): the pages map the device's descriptor, and hold the card open.
    Kernel { pages: HostPages, handle: KernelHandle },
    // The mapping goes before the pages it maps.
    Mapped { mapping: HostMapping, pages: HostPages },
}

impl CommandBuffer {
    /// A buffer of at least `size` bytes, zeroed.
    pub fn new(device: &Device, size: u32) -> Result<Self, Error> {
        let memory = if device.generation().has_dram_mmu() {
            let pages = HostPages::new(size as usize).map_err(|error| {
                Error::new("mmap", error.raw_os_error().unwrap_or(libc::ENOMEM))
            })?;
            // SAFETY: the pages are stored with the mapping and outlive it.
            let mapping = unsafe { HostMapping::new(device, pages.as_ptr(), pages.len() as u64)? };
            Memory::Mapped { mapping, pages }
        } else {
            let mut handle = 0;
            // SAFETY: the fd is open and the handle is a place to write to.
            check("hlthunk_request_command_buffer", || unsafe {
                device.symbols().hlthunk_request_command_buffer(device.raw_fd(), size, &mut handle)
            })?;
            let handle = KernelHandle { device: device.clone(), handle };
            let len = (size as usize).max(1).next_multiple_of(crate::PAGE_SIZE as usize);
            // The handle is the offset.
            let pages = HostPages::of_file(device, len, handle.handle)
                .map_err(|errno| Error::new("mmap of a command buffer", errno.raw_os_error()))?;
            Memory::Kernel { pages, handle }
        };
        Ok(Self { memory })
    }

    /// Bytes it holds.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.pages().len()
    }

    /// Writes packets at `offset`.
    ///
    /// # Panics
    /// If they do not fit.
    ///
    /// # Safety
    /// No submission that is still in flight may contain these bytes, and no other thread may
    /// write them at the same time. Not in a forked child, which does not have the memory.
    pub unsafe fn write(&self, offset: usize, packets: &[u8]) {
        let end = offset.checked_add(packets.len());
        assert!(end.is_some_and(|end| end <= self.len()), "packets beyond the command buffer");
        // SAFETY: inside the buffer by the check above; exclusive by the caller's promise.
        unsafe {
            let place = self.pages().as_ptr().add(offset);
            place.copy_from_nonoverlapping(packets.as_ptr(), packets.len());
        }
    }

    fn pages(&self) -> &HostPages {
        match &self.memory {
            Memory::Kernel { pages, .. } | Memory::Mapped { pages, .. } => pages,
        }
    }
}

/// A command buffer of the kernel's.
#[derive(Debug)]
struct KernelHandle {
    device: Device,
    handle: u64,
}

impl Drop for KernelHandle {
    fn drop(&mut self) {
        // SAFETY: plain numbers on an open fd; the handle is ours.
        self.device.give_back("hlthunk_destroy_command_buffer", |symbols, fd| unsafe {
            symbols.hlthunk_destroy_command_buffer(fd, self.handle)
        });
    }
}

/// A piece of a command buffer for one queue.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The buffer.
    pub buffer: &'a CommandBuffer,
    /// Where in it the packets start. Must be zero for a kernel buffer (Gaudi).
    pub offset: usize,
    /// Bytes of packets.
    pub len: usize,
    /// The queue that carries them out.
    pub queue: u32,
}

impl Chunk<'_> {
    /// Records the packets that are about to be submitted: the call's arguments only point to them.
    fn record_packets(&self, began: Instant) {
        let len = self.len.min(RECORDED_PACKETS * LIN_DMA_LEN);
        // SAFETY: inside the buffer, as `submit_by` has checked; not written to meanwhile.
        let bytes = unsafe {
            std::slice::from_raw_parts(self.buffer.pages().as_ptr().add(self.offset), len)
        };
        trace::record(began, "packets", true, 0, |arguments| {
            arguments.numbers([("queue", self.queue.into()), ("size", self.len as u64)]);
            trace::write_hex(arguments.key("bytes"), bytes);
        });
    }
}

/// What waiting found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitStatus {
    /// The device is done.
    Completed,
    /// Not yet.
    Busy,
}

impl Device {
    /// Hands packets to the device and returns the submission's sequence number.
    ///
    /// The library spins when the driver already has [`max_pending_submissions`] in flight: keep
    /// below that.
    ///
    /// [`max_pending_submissions`]: crate::Generation::max_pending_submissions
    ///
    /// # Safety
    /// The packets make the device read and write memory. All of it, and the command buffers, must
    /// stay mapped and unchanged until the submission has completed.
    pub unsafe fn submit(&self, chunk: Chunk<'_>) -> Result<u64, Error> {
        self.submit_by("hlthunk_command_submission", chunk, 0, |cs_in, out| {
            // SAFETY: both structures and the chunk live across the call; what the packets do
            // is the caller's promise.
            unsafe { self.symbols().hlthunk_command_submission(self.raw_fd(), cs_in, out) }
        })
    }

    /// As [`submit`](Device::submit), with its own time limit; when that expires, the driver does not reset
    /// the card. The submission may then stay in flight for ever. `EOPNOTSUPP`: the library has no such call.
    ///
    /// # Safety
    /// As for [`submit`](Device::submit).
    pub unsafe fn submit_without_reset(
        &self,
        chunk: Chunk<'_>,
        seconds: u32,
    ) -> Result<u64, Error> {
        let (call, flags) = ("hlthunk_command_submission_timeout", sys::CS_SKIP_RESET_ON_TIMEOUT);
        self.submit_by(call, chunk, flags, |cs_in, out| {
            let (symbols, fd) = (self.symbols(), self.raw_fd());
            // SAFETY: as in `submit`.
            let ret =
                unsafe { symbols.hlthunk_command_submission_timeout(fd, cs_in, out, seconds) };
            ret.unwrap_or(-libc::EOPNOTSUPP)
        })
    }

    fn submit_by(
        &self,
        name: &'static str,
        chunk: Chunk<'_>,
        flags: u32,
        call: impl FnOnce(&mut CsIn, &mut CsOut) -> i32,
    ) -> Result<u64, Error> {
        let Chunk { buffer, offset, len, queue } = chunk;
        let (cb_handle, cs_chunk_flags) = match &buffer.memory {
            Memory::Mapped { mapping, .. }
                if offset.checked_add(len).is_some_and(|end| end <= buffer.len()) =>
            {
                (mapping.addr().0 + offset as u64, sys::CS_CHUNK_USER_ALLOC_CB)
            }
            Memory::Kernel { handle, .. } if offset == 0 && len <= buffer.len() => {
                (handle.handle, 0)
            }
            _ => return Err(Error::new(name, libc::EINVAL)),
        };
        let mut raw = CsChunk {
            cb_handle,
            queue_index: queue,
            cb_size: len as u32,
            cs_chunk_flags,
            ..CsChunk::default()
        };
        let mut cs_in = CsIn {
            chunks_restore: std::ptr::null_mut(),
            chunks_execute: (&raw mut raw).cast(),
            num_chunks_restore: 0,
            num_chunks_execute: 1,
            flags,
        };
        let mut out = CsOut::default();
        if let Some(began) = trace::begin() {
            chunk.record_packets(began);
        }
        // The packets must be in memory before they are submitted.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        check(name, || call(&mut cs_in, &mut out))?;
        Ok(out.seq)
    }

    /// Returns when all that other devices have written to this card's memory over PCI Express is visible to
    /// its engines. Uses no queue and no submission. `EOPNOTSUPP`: the library or the driver has no such call.
    pub fn flush_peer_writes(&self) -> Result<(), Error> {
        let call = "hlthunk_cs_flush_pci_hbw_writes";
        check(call, || {
            // SAFETY: a number.
            let ret = unsafe { self.symbols().hlthunk_cs_flush_pci_hbw_writes(self.raw_fd()) };
            ret.unwrap_or(-libc::EOPNOTSUPP)
        })
        .map(drop)
    }

    /// Waits up to `timeout_us` microseconds (zero: polls once) for a submission.
    ///
    /// `ETIMEDOUT`: the driver gave the submission up. `EIO`: it was aborted by a reset.
    pub fn wait(&self, sequence: u64, timeout_us: u32) -> Result<WaitStatus, Error> {
        let call = "hlthunk_wait_for_cs";
        let mut status = sys::WAIT_BUSY;
        // SAFETY: the fd is open and the status is a place to write to.
        check(call, || unsafe {
            self.symbols().hlthunk_wait_for_cs(
                self.raw_fd(),
                sequence,
                timeout_us.into(),
                &mut status,
            )
        })?;
        match status {
            sys::WAIT_COMPLETED => Ok(WaitStatus::Completed),
            sys::WAIT_BUSY => Ok(WaitStatus::Busy),
            sys::WAIT_TIMEDOUT => Err(Error::new(call, libc::ETIMEDOUT)),
            _ => Err(Error::new(call, libc::EIO)),
        }
    }
}
