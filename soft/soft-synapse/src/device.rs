//! The device that the process has acquired.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::hostmap::{HostMap, HostMaps, Overlap};
use crate::scal;
use crate::status::Status;
use crate::stream::Streams;
use crate::thunk::{self, Generation, HwIp};

/// HBM that Synapse keeps for itself.
const RESERVE: u64 = 16 << 20;
/// How long an acquire waits for a card that is being closed.
const PATIENCE: Duration = Duration::from_secs(30);
/// `HLTHUNK_DEVICE_DONT_CARE`.
const ANY: c_int = 4;
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// `synDeviceType` of a card.
pub(crate) fn device_type(generation: Generation) -> i32 {
    match generation {
        Generation::Gaudi2 => 4,
        Generation::Gaudi3 => 5,
    }
}

/// How many cards the machine has.
pub(crate) fn count() -> u32 {
    // SAFETY: takes a number.
    u32::try_from(unsafe { thunk::hlthunk_get_device_count(ANY) }).unwrap_or(0)
}

/// What cards there are, by index, as their control nodes say.
pub(crate) fn cards() -> Vec<HwIp> {
    let info = |index: u32| {
        // SAFETY: NULL leaves the choice to the index.
        let fd = unsafe { thunk::hlthunk_open_control(index as c_int, core::ptr::null()) };
        if fd < 0 {
            return None;
        }
        let info = thunk::hw_ip(fd);
        // SAFETY: opened above.
        unsafe { thunk::hlthunk_close(fd) };
        info
    };
    (0..count()).filter_map(info).collect()
}

/// An acquired device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) fd: c_int,
    pub(crate) info: HwIp,
    pub(crate) generation: Generation,
    pub(crate) bus: [u8; 16],
    pub(crate) index: u8,
    scal: scal::Handle,
    pool: scal::Handle,
    reserve: scal::Handle,
    process: u32,
    /// A failure that only a release clears.
    failed: AtomicBool,
    buffers: Mutex<HashMap<u64, scal::Handle>>,
    maps: Mutex<HostMaps>,
    pub(crate) streams: Streams,
}

// SAFETY: SCAL's handles are numbers, and its functions may be called from any thread.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens the card with this module id and starts SCAL on it; a failure to open is `unopened`.
    pub(crate) fn acquire(module: u32, unopened: Status) -> Result<Self, Status> {
        let since = Instant::now();
        let fd = loop {
            // SAFETY: takes a number.
            let fd = unsafe { thunk::hlthunk_open_by_module_id(module) };
            if fd >= 0 {
                break fd;
            }
            if fd != -libc::EAGAIN || since.elapsed() > PATIENCE {
                return Err(unopened);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let started = Self::start(fd);
        if started.is_err() {
            // SAFETY: opened above, and nobody has it.
            unsafe { thunk::hlthunk_close(fd) };
        }
        started
    }

    fn start(fd: c_int) -> Result<Self, Status> {
        let info = thunk::hw_ip(fd).ok_or(Status::FAIL)?;
        let generation = info.generation().ok_or(Status::DEVICE_TYPE_MISMATCH)?;
        let mut bus = [0_u8; 16];
        // SAFETY: so many bytes.
        unsafe {
            thunk::hlthunk_get_pci_bus_id_from_fd(fd, bus.as_mut_ptr().cast(), bus.len() as c_int)
        };
        // SAFETY: a C string.
        let index = unsafe { thunk::hlthunk_get_device_index_from_pci_bus_id(bus.as_ptr().cast()) };
        let null: scal::Handle = core::ptr::null_mut();
        let (mut handle, mut pool, mut reserve) = (null, null, null);
        // SAFETY: a C string and an out pointer.
        if unsafe { scal::scal_init(fd, c"".as_ptr(), &raw mut handle, null) } != 0 {
            return Err(Status::FAIL);
        }
        // SAFETY: as above; handles that SCAL gave.
        let found = unsafe {
            scal::scal_get_pool_handle_by_name(handle, c"global_hbm".as_ptr(), &raw mut pool) == 0
                && scal::scal_allocate_buffer(pool, RESERVE, &raw mut reserve) == 0
        };
        if !found {
            // SAFETY: as above.
            unsafe { scal::scal_destroy(handle) };
            return Err(Status::FAIL);
        }
        Ok(Self {
            fd,
            info,
            generation,
            bus,
            index: u8::try_from(index).unwrap_or(u8::MAX),
            scal: handle,
            pool,
            reserve,
            process: std::process::id(),
            failed: AtomicBool::new(false),
            buffers: Mutex::default(),
            maps: Mutex::default(),
            streams: Streams::default(),
        })
    }

    /// Ends everything on the device and closes it.
    pub(crate) fn release(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.streams.end(self);
        if thunk::hw_ip(self.fd).is_none_or(|info| info.module_id != self.info.module_id) {
            thunk::forbid(c"Synapse's descriptor of the card was closed");
            return;
        }
        let maps = core::mem::take(&mut *self.maps());
        for (ptr, map) in maps.0 {
            self.unmap(ptr, map);
        }
        // SAFETY: handles that SCAL gave; the descriptor is Synapse's own.
        unsafe {
            scal::scal_free_buffer(self.reserve);
            scal::scal_destroy(self.scal);
            thunk::hlthunk_close(self.fd);
        }
    }

    /// Whether the device can be used, in this process.
    pub(crate) fn check(&self) -> Result<(), Status> {
        if self.process != std::process::id() {
            // SAFETY: no arguments; a C string.
            unsafe {
                if thunk::soft_gaudi_is_guest() != 0 {
                    thunk::soft_gaudi_forbid(c"a guest called Synapse in a forked child".as_ptr());
                }
            }
            return Err(Status::FAIL);
        }
        if self.failed.load(Ordering::Acquire) { Err(Status::SYNAPSE_TERMINATED) } else { Ok(()) }
    }

    /// Marks the device as failed: from now on every call reports it.
    pub(crate) fn fail(&self) -> Status {
        self.failed.store(true, Ordering::Release);
        Status::SYNAPSE_TERMINATED
    }

    /// First address, size and free bytes of the pool of device memory; without Synapse's own part.
    pub(crate) fn memory(&self) -> (u64, u64, u64) {
        let mut info: scal::PoolInfo = [0; 8];
        // SAFETY: a handle that SCAL gave, and room for the structure.
        unsafe { scal::scal_pool_get_info(self.pool, &raw mut info) };
        (info[3], info[6].saturating_sub(RESERVE), info[7])
    }

    pub(crate) fn allocate(&self, size: u64) -> Result<u64, Status> {
        let mut buffer = core::ptr::null_mut();
        let mut info: scal::BufferInfo = [0; 4];
        // SAFETY: handles that SCAL gave, and out pointers.
        let allocated = unsafe {
            scal::scal_allocate_buffer(self.pool, size, &raw mut buffer) == 0
                && scal::scal_buffer_get_info(buffer, &raw mut info) == 0
        };
        if !allocated {
            return Err(Status::FAIL);
        }
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).insert(info[3], buffer);
        Ok(info[3])
    }

    pub(crate) fn free(&self, addr: u64) -> Result<(), Status> {
        let buffer = self.buffers.lock().unwrap_or_else(PoisonError::into_inner).remove(&addr);
        // SAFETY: a handle that SCAL gave.
        unsafe { scal::scal_free_buffer(buffer.ok_or(Status::FAIL)?) };
        Ok(())
    }

    pub(crate) fn maps(&self) -> MutexGuard<'_, HostMaps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_guest(&self) -> bool {
        // SAFETY: no arguments.
        unsafe { thunk::soft_gaudi_is_guest() != 0 }
    }

    fn map(
        &self,
        maps: &mut HostMaps,
        ptr: u64,
        len: u64,
        owned: Option<usize>,
    ) -> Result<(), Status> {
        // SAFETY: the driver refuses memory that is not there.
        let va = unsafe { thunk::hlthunk_host_memory_map(self.fd, ptr as *mut c_void, 0, len) };
        if va == 0 {
            return Err(Status::FAIL);
        }
        maps.0.insert(ptr, HostMap { len, va, owned, guest: self.is_guest() });
        Ok(())
    }

    fn unmap(&self, ptr: u64, map: HostMap) {
        // SAFETY: plain numbers.
        if unsafe { thunk::hlthunk_memory_unmap(self.fd, map.va) } != 0
            && !self.failed.load(Ordering::Acquire)
        {
            let what = c"host memory that Synapse had mapped was unmapped by someone else";
            thunk::forbid(what);
        }
        if let Some(len) = map.owned {
            // SAFETY: mapped by `host_alloc` with this length; its owner gives it up.
            unsafe { libc::munmap(ptr as *mut c_void, len) };
        }
    }

    /// `synHostMap`.
    pub(crate) fn host_map(&self, ptr: u64, len: u64) -> Result<(), Status> {
        let mut maps = self.maps();
        match maps.overlap(ptr, len) {
            Overlap::Inside => Ok(()),
            Overlap::Beginning => Err(Status::INVALID_ARGUMENT),
            // The real library also reports a failure to map as one of the device.
            Overlap::None => self.map(&mut maps, ptr, len, None),
        }
    }

    /// `synHostUnmap`: what is unknown is ignored.
    pub(crate) fn host_unmap(&self, ptr: u64) {
        let mut maps = self.maps();
        let Some(map) = maps.0.get(&ptr).copied().filter(|map| map.owned.is_none()) else { return };
        if !map.guest && self.is_guest() {
            let what = c"a guest unmapped host memory that the application had mapped";
            thunk::forbid(what);
        }
        maps.0.remove(&ptr);
        self.unmap(ptr, map);
    }

    /// `synHostMalloc`: shared memory that forked children do not have.
    pub(crate) fn host_alloc(&self, size: u64) -> Result<*mut c_void, Status> {
        let size =
            usize::try_from(size).ok().filter(|size| *size > 0).ok_or(Status::INVALID_ARGUMENT)?;
        let map = |unit: usize, flags: c_int| {
            let len = size.checked_next_multiple_of(unit)?;
            let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | flags;
            // SAFETY: a new mapping, wherever the kernel likes.
            let at = unsafe {
                libc::mmap(
                    core::ptr::null_mut(),
                    len,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                )
            };
            (at != libc::MAP_FAILED).then_some((at, len))
        };
        let huge = if size > 1 << 20 { map(HUGE, libc::MAP_HUGETLB) } else { None };
        let (at, len) = huge.or_else(|| map(PAGE, 0)).ok_or(Status::OUT_OF_HOST_MEMORY)?;
        // SAFETY: mapped above.
        unsafe { libc::madvise(at, len, libc::MADV_DONTFORK) };
        let mapped = self.map(&mut self.maps(), at as u64, size as u64, Some(len));
        if let Err(status) = mapped {
            // SAFETY: mapped above, and nobody has it.
            unsafe { libc::munmap(at, len) };
            return Err(status);
        }
        Ok(at)
    }

    /// `synHostFree`.
    pub(crate) fn host_free(&self, ptr: u64) -> Result<(), Status> {
        let mut maps = self.maps();
        let map = maps.0.get(&ptr).copied().filter(|map| map.owned.is_some());
        let map = map.ok_or(Status::INVALID_ARGUMENT)?;
        maps.0.remove(&ptr);
        self.unmap(ptr, map);
        Ok(())
    }
}

/// Copies a text with its end into a buffer of C; cut off where it is too long.
pub(crate) fn put_text(out: *mut c_char, len: c_int, text: &CStr) -> Result<(), Status> {
    let room = usize::try_from(len).ok().filter(|len| *len > 0 && !out.is_null());
    let room = room.ok_or(Status::INVALID_ARGUMENT)?;
    let count = text.count_bytes().min(room - 1);
    // SAFETY: the caller promises `len` bytes; the text and its end fit.
    unsafe {
        core::ptr::copy_nonoverlapping(text.as_ptr(), out, count);
        *out.add(count) = 0;
    }
    Ok(())
}
