//! The events of UCX's libucm: notification of host memory that is unmapped, and reports of device memory.
//!
//! libucm hooks the calls by which a process gives memory back (`munmap`, `brk`, `madvise`, …) and
//! calls its handlers before the kernel does it. The same handlers are called for device memory that is
//! allocated and freed, if its allocator dispatches the events. Every copy of UCX has its own libucm.
//! Its functions are found through the copy's libucs, whatever the file is called.

use core::ffi::{c_int, c_void};
use std::panic::catch_unwind;

use crate::abi::{
    MemTypeEvent, MemoryType, Status, SysDevice, UCM_EVENT_MEM_TYPE_ALLOC, UCM_EVENT_MEM_TYPE_FREE,
    mem_flags,
};
use crate::ucx::Ucx;

/// `UCM_EVENT_VM_UNMAPPED`: a range of addresses is about to be unmapped.
const VM_UNMAPPED: c_int = 1 << 17;

/// `ucm_event_t` as far as [`VM_UNMAPPED`] fills it.
#[repr(C)]
struct UnmappedEvent {
    address: *mut c_void,
    size: usize,
}

type Callback = unsafe extern "C" fn(c_int, *mut UnmappedEvent, *mut c_void);
type SetEventHandler = unsafe extern "C" fn(c_int, c_int, Callback, *mut c_void) -> Status;

/// Is called with the start and the length of memory that is about to be unmapped.
///
/// It runs inside `munmap`, `free` and the like, on any thread, perhaps with the lock of the memory
/// allocator held, and at any time until the process ends. So it must not allocate or free memory,
/// must not wait for a lock that a thread holds while allocating, and must not panic.
pub type Unmapped = fn(usize, usize);

impl Ucx {
    /// Calls `unmapped` for memory that is about to be unmapped, from now on.
    ///
    /// # Errors
    /// UCX's reason: [`Status::UNSUPPORTED`] where memory events are turned off
    /// (`UCX_MEM_EVENTS=n`), or this UCX has no libucm.
    pub fn watch_unmapped(&'static self, priority: i32, unmapped: Unmapped) -> Result<(), Status> {
        let set = self.symbol(c"ucm_set_event_handler").ok_or(Status::UNSUPPORTED)?;
        // SAFETY: the function has had this type in every UCX since 1.3.
        let set = unsafe { core::mem::transmute::<*mut c_void, SetEventHandler>(set) };
        // SAFETY: the callback has UCX's type, and its argument is the function that it takes it for.
        let status = unsafe { set(VM_UNMAPPED, priority, forward, unmapped as *mut c_void) };
        if status == Status::OK { Ok(()) } else { Err(status) }
    }
}

/// A range of device memory in an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: usize,
    /// Type of the memory.
    pub memory_type: MemoryType,
    /// Device in UCX's topology.
    pub device: SysDevice,
    /// Whether network devices can register it.
    pub registrable: bool,
}

impl Ucx {
    /// Reports device memory that was just allocated to all event handlers of UCX. Also puts it into
    /// the memory-type cache, if UCX has created that already.
    pub fn memory_allocated(&self, range: &DeviceRange) {
        self.memory_event(UCM_EVENT_MEM_TYPE_ALLOC, range);
        if !self.variant().memory_flags {
            // These events carry no device: the cache stored it as unknown, also for ranges that it merged with this one.
            self.memory_type_cache_insert(range);
        }
    }

    /// Reports device memory that is about to be freed, so that registrations of it (a network device's,
    /// say) are dropped. Also takes it out of the memory-type cache.
    pub fn memory_freed(&self, range: &DeviceRange) {
        self.memory_event(UCM_EVENT_MEM_TYPE_FREE, range);
    }

    fn memory_event(&self, what: u32, range: &DeviceRange) {
        let mut event = MemTypeEvent {
            address: core::ptr::without_provenance_mut(range.start as usize),
            size: range.len,
            mem_type: range.memory_type,
            sys_dev: range.device,
            mem_flags: mem_flags(range.registrable),
            spare: [0; 3],
        };
        // SAFETY: the event is as long as UCX's union; handlers may run between enter and leave
        // only, and take addresses as numbers.
        unsafe {
            (self.symbols.ucm_event_enter)();
            (self.symbols.ucm_event_dispatch)(what, &mut event);
            (self.symbols.ucm_event_leave)();
        }
    }
}

unsafe extern "C" fn forward(_: c_int, event: *mut UnmappedEvent, unmapped: *mut c_void) {
    // SAFETY: libucm passes an event of the kind that was asked for, and the argument it was given.
    let (start, len, unmapped) = unsafe {
        let unmapped = core::mem::transmute::<*mut c_void, Unmapped>(unmapped);
        ((*event).address.addr(), (*event).size, unmapped)
    };
    // A panic must not pass into libucm. It is not logged: writing a log allocates.
    let _ = catch_unwind(|| unmapped(start, len));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn an_event_reaches_the_function_with_its_range_and_panics_stop_here() {
        static SEEN: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
        fn note(start: usize, len: usize) {
            SEEN[0].store(start, Ordering::Relaxed);
            SEEN[1].store(len, Ordering::Relaxed);
            assert_ne!(len, 13, "a panic, to see that it goes no further");
        }
        let dispatch = |address, size| {
            let address = core::ptr::without_provenance_mut(address);
            let mut event = UnmappedEvent { address, size };
            // SAFETY: an event and a function of the types that the callback expects.
            unsafe { forward(VM_UNMAPPED, &mut event, note as *mut c_void) };
        };
        dispatch(0x5000, 13);
        dispatch(0x7000, 4096);
        let seen = SEEN.each_ref().map(|number| number.load(Ordering::Relaxed));
        assert_eq!(seen, [0x7000, 4096]);
    }
}
