//! What a guest makes on the framework's card. Each is given back when dropped; once the framework has released
//! the card it must be forgotten instead (`mem::forget`), since its number may be in use again by then.

use std::ffi::c_void;
use std::sync::Arc;

use crate::Framework;
use crate::framework::{DEVICE, call};
use crate::status::{CallError, Status};
use crate::sys::{DmaDir, Handle};

/// A stream of our own.
#[derive(Debug)]
pub struct Stream {
    framework: Arc<Framework>,
    handle: Handle,
}

// SAFETY: a key; the library takes it from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// One copy of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// From where: a device address, or a pointer to host memory.
    pub src: u64,
    /// To where.
    pub dst: u64,
    /// How many bytes.
    pub len: u64,
}

/// Most copies that one call takes.
const MOST: usize = 64;

impl Stream {
    /// Makes one.
    pub fn new(framework: &Arc<Framework>) -> Result<Stream, CallError> {
        let mut handle = std::ptr::null_mut();
        // Room for the handle.
        call!(framework, synStreamCreateGeneric(&raw mut handle, DEVICE, 0))?;
        Ok(Stream { framework: Arc::clone(framework), handle })
    }

    /// Starts copies, all in the same direction.
    ///
    /// # Safety
    /// The device addresses are not checked: a wrong one resets the card. Host memory is mapped. All of it stays
    /// valid until the copies have ended.
    pub unsafe fn copy(&self, copies: &[Copied], direction: DmaDir) -> Result<(), CallError> {
        if copies.len() > 1 && self.framework.functions.synMemCopyAsyncMultiple.is_some() {
            for part in copies.chunks(MOST) {
                let mut lists = [[0_u64; MOST]; 3];
                for (at, copy) in part.iter().enumerate() {
                    (lists[0][at], lists[1][at], lists[2][at]) = (copy.src, copy.len, copy.dst);
                }
                let [src, len, dst] = &lists;
                let count = part.len() as u64;
                // The lists have `count` entries; the caller answers for what is in them.
                call!(
                    self.framework,
                    synMemCopyAsyncMultiple(
                        self.handle,
                        src.as_ptr(),
                        len.as_ptr(),
                        dst.as_ptr(),
                        direction,
                        count
                    )
                )?;
            }
            return Ok(());
        }
        for copy in copies {
            // The caller answers for the addresses.
            call!(
                self.framework,
                synMemCopyAsync(self.handle, copy.src, copy.len, copy.dst, direction)
            )?;
        }
        Ok(())
    }

    /// Starts to set device memory to `byte`.
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    pub unsafe fn fill(&self, dst: u64, byte: u8, len: usize) -> Result<(), CallError> {
        // The caller answers for the address.
        call!(self.framework, synMemsetD8Async(dst, byte, len, self.handle))
    }

    /// Waits until all that was started has ended.
    pub fn synchronize(&self) -> Result<(), CallError> {
        // The handle is live.
        call!(self.framework, synStreamSynchronize(self.handle))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // The handle is live, and given up here.
        let _ = call!(self.framework, synStreamDestroy(self.handle));
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    framework: Arc<Framework>,
    handle: Handle,
    recorded: bool,
}

// SAFETY: a key; the library takes it from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Makes one.
    pub fn new(framework: &Arc<Framework>) -> Result<Event, CallError> {
        let mut handle = std::ptr::null_mut();
        // Room for the handle.
        call!(framework, synEventCreate(&raw mut handle, DEVICE, 0))?;
        Ok(Event { framework: Arc::clone(framework), handle, recorded: false })
    }

    /// Records all that was started on the stream so far.
    pub fn record(&mut self, stream: &Stream) -> Result<(), CallError> {
        // Both are live, and the event is ours alone.
        call!(self.framework, synEventRecord(self.handle, stream.handle))?;
        self.recorded = true;
        Ok(())
    }

    /// Whether the recorded work has ended. True for an event that was never recorded: the library must not be asked.
    pub fn has_ended(&self) -> Result<bool, CallError> {
        if !self.recorded {
            return Ok(true);
        }
        // The handle is live, and recorded.
        match call!(self.framework, synEventQuery(self.handle)) {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Some(Status::BUSY) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // The handle is live, and given up here.
        let _ = call!(self.framework, synEventDestroy(self.handle));
    }
}

/// Host memory of our own that copies may use. Never the application's: mappings are not reference-counted, so that
/// unmapping ours could remove theirs.
#[derive(Debug)]
pub struct HostMapping {
    framework: Arc<Framework>,
    start: *mut u8,
}

// SAFETY: an address, which is only handed back to the library.
unsafe impl Send for HostMapping {}
// SAFETY: as above.
unsafe impl Sync for HostMapping {}

impl HostMapping {
    /// Maps `len` bytes.
    ///
    /// # Safety
    /// The memory is ours alone, none of it is mapped elsewhere, and it stays allocated as long as this lives and copies
    /// use it.
    pub unsafe fn new(
        framework: &Arc<Framework>,
        start: *mut u8,
        len: usize,
    ) -> Result<HostMapping, CallError> {
        // The caller's promise.
        call!(framework, synHostMap(DEVICE, len as u64, start.cast::<c_void>().cast_const()))?;
        Ok(HostMapping { framework: Arc::clone(framework), start })
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // Exactly what was mapped.
        let _ =
            call!(self.framework, synHostUnmap(DEVICE, self.start.cast::<c_void>().cast_const()));
    }
}

/// Device memory from the framework's pool.
#[derive(Debug)]
pub struct DeviceBlock {
    framework: Arc<Framework>,
    addr: u64,
}

impl DeviceBlock {
    /// Takes `len` bytes (not 0), aligned to 128.
    pub fn new(framework: &Arc<Framework>, len: u64) -> Result<DeviceBlock, CallError> {
        let mut addr = 0;
        // Room for the address.
        call!(framework, synDeviceMalloc(DEVICE, len, 0, 0, &raw mut addr))?;
        Ok(DeviceBlock { framework: Arc::clone(framework), addr })
    }

    /// First address.
    pub fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        // Exactly what was allocated.
        let _ = call!(self.framework, synDeviceFree(DEVICE, self.addr, 0));
    }
}
