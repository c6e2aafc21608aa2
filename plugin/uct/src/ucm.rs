//! The events of UCX's libucm: notification of host memory that is unmapped, and reports of device memory.
//!
//! libucm hooks the calls by which a process gives memory back (`munmap`, `brk`, `madvise`, …) and
//! calls its handlers before the kernel does it. The same handlers are called for device
//! memory that is allocated and freed, if its allocator dispatches the events. Every copy of UCX has a libucm of
//! its own; the functions are found through the libucs that belongs to the copy, whatever the file is
//! called.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use crate::abi::{
    ListLink, MemTypeEvent, MemoryType, Status, SysDevice, UCM_EVENT_MEM_TYPE_ALLOC,
    UCM_EVENT_MEM_TYPE_FREE, mem_flags,
};
use crate::ucx::Ucx;

/// `UCM_EVENT_VM_UNMAPPED`: a range of addresses is about to lose its memory.
const VM_UNMAPPED: c_int = 1 << 17;

/// `ucm_event_t` as far as [`VM_UNMAPPED`] fills it.
#[repr(C)]
struct UnmappedEvent {
    address: *mut c_void,
    size: usize,
}

type Callback = unsafe extern "C" fn(c_int, *mut UnmappedEvent, *mut c_void);
type SetEventHandler = unsafe extern "C" fn(c_int, c_int, Callback, *mut c_void) -> Status;

/// What is called with the start and the length of memory that is about to go.
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

impl DeviceRange {
    fn event(&self) -> MemTypeEvent {
        MemTypeEvent {
            address: core::ptr::without_provenance_mut(self.start as usize),
            size: self.len,
            mem_type: self.memory_type,
            sys_dev: self.device,
            mem_flags: mem_flags(self.registrable),
            spare: [0; 3],
        }
    }
}

/// What lists the device memory there is, see [`Ucx::report_existing`]. It is called on any thread, and
/// must not wait for a lock that a thread holds while calling UCX.
pub type Existing = Box<dyn Fn() -> Vec<DeviceRange> + Send + Sync>;

/// `ucm_event_handler_t`.
#[repr(C)]
struct Handler {
    list: ListLink,
    events: c_int,
    priority: c_int,
    callback: unsafe extern "C" fn(c_int, *mut MemTypeEvent, *mut c_void),
    argument: *mut c_void,
}

/// `ucm_event_installer_t`.
#[repr(C)]
struct Installer {
    install: unsafe extern "C" fn(c_int) -> Status,
    get_existing_alloc: unsafe extern "C" fn(*mut Handler),
    list: ListLink,
}

/// Copies of UCX that can report existing memory: libucm passes nothing by which to tell who asks, so
/// each copy has a function of its own.
const REPORTERS: usize = 4;

static EXISTING: [OnceLock<Existing>; REPORTERS] = [const { OnceLock::new() }; REPORTERS];

impl Ucx {
    /// Reports device memory that was just allocated to all event handlers of UCX. Also puts it into
    /// the memory-type cache, if UCX has made that one already.
    pub fn memory_allocated(&self, range: &DeviceRange) {
        self.memory_event(UCM_EVENT_MEM_TYPE_ALLOC, range);
    }

    /// Reports device memory that is about to be freed, so that registrations of it (a network device's,
    /// say) are dropped. Also takes it out of the memory-type cache.
    pub fn memory_freed(&self, range: &DeviceRange) {
        self.memory_event(UCM_EVENT_MEM_TYPE_FREE, range);
    }

    fn memory_event(&self, what: u32, range: &DeviceRange) {
        let mut event = range.event();
        // SAFETY: the event is as long as UCX's union; handlers may run between enter and leave
        // only, and take addresses as numbers.
        unsafe {
            (self.symbols.ucm_event_enter)();
            (self.symbols.ucm_event_dispatch)(what, &mut event);
            (self.symbols.ucm_event_leave)();
        }
    }

    /// Calls `existing`, from now on, when code of UCX begins to listen to
    /// memory-type events and wants to know of memory from before. UCX's memory-type cache does when it
    /// is made, which may happen again after `ucs_memtype_cache_cleanup`. Call it once for a copy of
    /// UCX. `false` where it cannot be done.
    pub fn report_existing(&'static self, existing: Existing) -> bool {
        const REPORT: [unsafe extern "C" fn(*mut Handler); REPORTERS] =
            [report::<0>, report::<1>, report::<2>, report::<3>];
        let Some(head) = self.symbol(c"ucm_event_installer_list") else { return false };
        let mut existing = existing;
        for (slot, get_existing_alloc) in EXISTING.iter().zip(REPORT) {
            match slot.set(existing) {
                Ok(()) => {
                    // SAFETY: the list of this copy's libucm, which is never unmapped. Modules of UCX
                    // that append to it meanwhile cannot be kept out, see `append`.
                    return unsafe { append(head.cast(), get_existing_alloc) };
                }
                Err(taken) => existing = taken,
            }
        }
        false
    }
}

/// Appends an installer to libucm's list, for ever. `false` if another append seems not to end.
///
/// libucm has no lock for this list. It walks it without one, so the node is complete before it can be
/// reached, by the one store that links it. UCX's own modules (CUDA, ROCm, Level Zero) append to it
/// with plain stores when they are loaded, once for a copy of UCX: by the first thread that sets an
/// event handler which needs hooks. Loading them here first does not help, since that installs
/// the hooks, also for a user who turned off what needs them.
///
/// So the node is linked by a compare-exchange, which fails when another append has come in between
/// or is half done. One case remains: a module that read the end of the list before the exchange and
/// writes it after. Its node then replaces ours, or ours hides nodes that come later. Every link still
/// points to a node or the head, so a walk ends; what is lost is the report of existing memory, or a
/// module's hooks.
///
/// # Safety
/// `head` is the list of a libucm that stays mapped. Calls for one list do not overlap.
unsafe fn append(
    head: *mut ListLink,
    get_existing_alloc: unsafe extern "C" fn(*mut Handler),
) -> bool {
    /// Another thread needs two stores to end its append.
    const ATTEMPTS: usize = 1000;
    unsafe extern "C" fn install(_events: c_int) -> Status {
        Status::OK // memory-type events of ours need no hooks
    }
    let list = ListLink { prev: head, next: head };
    let node = Box::into_raw(Box::new(Installer { install, get_existing_alloc, list }));
    for _ in 0..ATTEMPTS {
        // SAFETY: the list and its nodes stay mapped; the node is not shared until it is linked.
        unsafe {
            let link = &raw mut (*node).list;
            let end = AtomicPtr::from_ptr(&raw mut (*head).prev);
            let last = end.load(Ordering::Acquire);
            (*link).prev = last;
            // Release: who reaches the node through this pointer sees it filled in.
            let next = AtomicPtr::from_ptr(&raw mut (*last).next);
            if next.compare_exchange(head, link, Ordering::Release, Ordering::Relaxed).is_ok() {
                end.store(link, Ordering::Release);
                return true; // the node is leaked, as the list needs it
            }
        }
        std::thread::yield_now();
    }
    // SAFETY: made above, and not linked.
    drop(unsafe { Box::from_raw(node) });
    false
}

/// Reports the existing memory of one copy of UCX to a handler that was just set.
unsafe extern "C" fn report<const SLOT: usize>(handler: *mut Handler) {
    // SAFETY: libucm passes the handler that it has just set.
    let (events, callback, argument) =
        unsafe { ((*handler).events, (*handler).callback, (*handler).argument) };
    let alloc = UCM_EVENT_MEM_TYPE_ALLOC as c_int;
    let Some(existing) = EXISTING[SLOT].get() else { return };
    if events & alloc == 0 {
        return;
    }
    // A panic must not pass into libucm.
    let ranges = catch_unwind(AssertUnwindSafe(existing)).unwrap_or_default();
    for range in ranges {
        // SAFETY: a handler for events of this kind, with the argument it was set with.
        unsafe { callback(alloc, &mut range.event(), argument) };
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
    use std::sync::atomic::AtomicUsize;

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

    #[test]
    fn a_new_alloc_handler_is_called_for_existing_memory_and_others_are_not() {
        unsafe extern "C" fn record(_: c_int, event: *mut MemTypeEvent, recorded: *mut c_void) {
            // SAFETY: the test passes a vector and events.
            unsafe { (*recorded.cast::<Vec<usize>>()).push((*event).address.addr()) };
        }
        const SLOT: usize = REPORTERS - 1;
        let range = DeviceRange {
            start: 0x9000,
            len: 64,
            memory_type: MemoryType::GAUDI,
            device: SysDevice::UNKNOWN,
            registrable: true,
        };
        let set = EXISTING[SLOT]
            .set(Box::new(move || vec![range, DeviceRange { start: 0xa000, ..range }]));
        assert!(set.is_ok());
        let mut recorded: Vec<usize> = Vec::new();
        let null = ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() };
        let mut handler = Handler {
            list: null,
            events: VM_UNMAPPED,
            priority: 0,
            callback: record,
            argument: (&raw mut recorded).cast(),
        };
        // SAFETY: a handler of the test's own.
        unsafe { report::<SLOT>(&mut handler) };
        assert!(recorded.is_empty(), "it asked for something else");
        handler.events |= UCM_EVENT_MEM_TYPE_ALLOC as c_int;
        // SAFETY: as above.
        unsafe { report::<SLOT>(&mut handler) };
        assert_eq!(recorded, [0x9000, 0xa000]);
    }

    #[test]
    fn installers_are_appended_in_order_and_the_list_stays_closed() {
        let mut head =
            Box::new(ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() });
        let head: *mut ListLink = &raw mut *head;
        // SAFETY: a list of the test's own.
        unsafe {
            *head = ListLink { prev: head, next: head };
            assert!(append(head, report::<0>));
            let first = (*head).next;
            assert!(append(head, report::<1>));
            let second = (*head).prev;
            assert_eq!((*first).next, second);
            assert_eq!((*second).prev, first);
            assert_eq!(((*second).next, (*first).prev), (head, head));
        }
    }

    #[test]
    fn an_append_of_another_thread_that_is_half_done_is_left_alone() {
        let null = || ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() };
        let (mut head, mut other) = (null(), null());
        let (head, other) = (&raw mut head, &raw mut other);
        // SAFETY: a list of the test's own.
        unsafe {
            *other = ListLink { prev: head, next: head };
            // The other thread's last store, to `head.prev`, is missing.
            *head = ListLink { prev: head, next: other };
            assert!(!append(head, report::<0>));
            assert_eq!(((*head).prev, (*head).next), (head, other));
            (*head).prev = other;
            assert!(append(head, report::<0>));
            assert_eq!(((*other).next, (*(*head).prev).prev), ((*head).prev, other));
        }
    }
}
