//! `ucx_perftest -m gaudi`: the allocator that the stock program asks its modules for.
//!
//! The program keeps an array of allocators, one slot per memory type, and loads modules to fill
//! it. UCP tests only need the slot to be filled (their buffers come from the memory domain); UCT
//! tests allocate, copy and fill through these functions.

use core::ffi::{c_int, c_void};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use gaudi::{Allocation, Device, DeviceAddr, Error, Side};
use uct::abi::{MemRegParams, RawComponent, RawMd};
use uct::{MemoryType, Status, Ucx, log};

use crate::domain::configured_device;
use crate::settings::chosen_device;
use crate::{memtype_cache, requested, status};

/// `ucx_perf_allocator_t`.
#[repr(C)]
struct Allocator {
    memory_type: MemoryType,
    init: unsafe extern "C" fn(*mut c_void) -> Status,
    uct_alloc: unsafe extern "C" fn(*const c_void, usize, u32, *mut AllocatedMemory) -> Status,
    uct_free: unsafe extern "C" fn(*const c_void, *mut AllocatedMemory),
    memcpy: unsafe extern "C" fn(*mut c_void, MemoryType, *const c_void, MemoryType, usize),
    memset: unsafe extern "C" fn(*mut c_void, c_int, usize) -> *mut c_void,
}
const _: () = assert!(size_of::<Allocator>() == 48);

/// `uct_allocated_memory_t`.
#[repr(C)]
struct AllocatedMemory {
    address: *mut c_void,
    length: usize,
    method: u32,
    memory_type: MemoryType,
    md: *mut RawMd,
    memh: *mut c_void,
    sys_device: u8,
}
const _: () = assert!(size_of::<AllocatedMemory>() == 48);

static ALLOCATOR: Allocator =
    Allocator { memory_type: MemoryType::GAUDI, init, uct_alloc, uct_free, memcpy, memset };

/// Offset in `ucx_perf_context_t` of a UCT test's component, which its memory domain follows. No header
/// has that structure, so what is found there is checked before it is used: see [`domain_in`].
const PERF_UCT_COMPONENT: usize = 17456;

/// What the allocator needs of the UCX in the perftest process.
struct Bench {
    ucx: &'static Ucx,
    /// UCT buffers by address, until the test frees them.
    buffers: Mutex<HashMap<usize, Allocation>>,
}

impl Bench {
    fn buffers(&self) -> MutexGuard<'_, HashMap<usize, Allocation>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory domain of a UCT test; `None` if the context is not laid out as we know it.
///
/// # Safety
/// `perf` must be the context of a UCT test of `ucx_perftest`, and `components` those of its libuct.
unsafe fn domain_in(perf: *const c_void, components: &[*mut RawComponent]) -> Option<*mut RawMd> {
    // SAFETY: inside the structure: the part for UCT tests begins with 17 KB of parameters and
    // the asynchronous context in every UCX that has this allocator interface.
    let [component, md] = unsafe { *perf.byte_add(PERF_UCT_COMPONENT).cast::<[*mut c_void; 2]>() };
    let md = md.cast::<RawMd>();
    if !components.contains(&component.cast()) || md.is_null() || !md.is_aligned() {
        return None;
    }
    // SAFETY: a live component lies in front of it, so this is a memory domain, which names its
    // component.
    let its_component = unsafe { (*md).component };
    (its_component.cast() == component).then_some(md)
}

static BENCH: OnceLock<Bench> = OnceLock::new();

/// Puts the allocator into the program's array, if this program is `ucx_perftest`.
pub(crate) fn offer(ucx: &'static Ucx) -> Result<(), Status> {
    // SAFETY: a look-up by name in the global scope.
    let array =
        unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ucx_perf_mem_type_allocators".as_ptr()) }
            .cast::<*const Allocator>();
    if array.is_null() {
        return Ok(());
    }
    BENCH.get_or_init(|| Bench { ucx, buffers: Mutex::default() });
    // SAFETY: the array has a slot for every memory type that its UCX knows, and this UCX knows
    // Gaudi's (checked when the plugin registered).
    unsafe {
        let slot = array.add(MemoryType::GAUDI.0 as usize);
        if (*slot).is_null() {
            *slot = &ALLOCATOR;
        }
    }
    Ok(())
}

/// Runs a callback of the test program: panics and errors become a log line and a status.
fn attempt<T>(
    what: &str,
    body: impl FnOnce(&'static Bench) -> Result<T, Error>,
) -> Result<T, Status> {
    let bench = BENCH.get().ok_or(Status::NO_DEVICE)?;
    match catch_unwind(AssertUnwindSafe(|| body(bench))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            log!(bench.ucx, Error, "{what}: {}", status::explain(&error));
            Err(status::of(&error))
        }
        Err(panic) => {
            core::mem::forget(panic);
            log!(bench.ucx, Error, "internal error: {what} (please report)");
            Err(Status::IO_ERROR)
        }
    }
}

unsafe extern "C" fn init(_perf: *mut c_void) -> Status {
    // UCP tests bring their own memory domain, which opens the card on demand. Here it is enough to
    // check that there is one, and that it copies. Without copies the program would retry for ever.
    let found = attempt("ucx_perftest -m gaudi", |bench| {
        let cards = gaudi::runtime().candidates(&chosen_device())?;
        requested::warn_if_excluded(bench.ucx, true);
        Ok((bench.ucx, cards.first().map(|card| card.generation)))
    });
    match found {
        Ok((ucx, Some(generation))) if !generation.accepts_submissions() => {
            log!(
                ucx,
                Error,
                "ucx_perftest -m gaudi needs copies, and a {generation} takes none through the driver"
            );
            Status::UNSUPPORTED
        }
        Ok(_) => Status::OK,
        Err(error) => error,
    }
}

unsafe extern "C" fn uct_alloc(
    perf: *const c_void,
    length: usize,
    flags: u32,
    out: *mut AllocatedMemory,
) -> Status {
    let allocated = attempt("cannot allocate a test buffer", |bench| {
        let allocation = configured_device()?.alloc(length.max(1) as u64, 1)?;
        let address = allocation.addr().0 as usize;
        memtype_cache::allocated(&allocation);
        let pointer = core::ptr::without_provenance_mut::<c_void>(address);
        // SAFETY: the context is the test program's, and this is called for UCT tests only.
        let Some(md) = (unsafe { domain_in(perf, &bench.ucx.components()) }) else {
            log!(
                bench.ucx,
                Error,
                "UCT tests of this ucx_perftest cannot use Gaudi memory: its test context is laid out \
                 differently than in UCX {}; UCP tests can",
                uct::SUPPORTED
            );
            return Ok(Status::UNSUPPORTED);
        };
        let (flags, mem_type) = (flags.into(), MemoryType::GAUDI);
        let params =
            MemRegParams { field_mask: 1, flags, dmabuf_fd: -1, dmabuf_offset: 0, mem_type };
        // SAFETY: an open domain; the address is registered, never accessed.
        let memh = match unsafe { bench.ucx.register(md, pointer, length, &params) } {
            Ok(memh) => memh,
            Err(status) => return Ok(status),
        };
        bench.buffers().insert(address, allocation);
        // SAFETY: the out-parameter is the caller's.
        unsafe {
            (*out).address = pointer;
            (*out).memory_type = MemoryType::GAUDI;
            (*out).md = md;
            (*out).memh = memh;
        }
        Ok(Status::OK)
    });
    allocated.unwrap_or_else(|error| error)
}

unsafe extern "C" fn uct_free(_perf: *const c_void, memory: *mut AllocatedMemory) {
    let _logged = attempt("cannot free a test buffer", |bench| {
        // SAFETY: what `uct_alloc` filled in, freed once.
        let address = unsafe {
            bench.ucx.deregister((*memory).md, (*memory).memh);
            (*memory).address.addr()
        };
        let freed = bench.buffers().remove(&address);
        if let Some(allocation) = freed {
            memtype_cache::freeing(&allocation);
        }
        Ok(())
    });
}

/// The device that a Gaudi address lies on.
fn device_at(address: u64, length: usize) -> Option<Arc<Device>> {
    gaudi::runtime().locate(address, length)?.device()
}

unsafe extern "C" fn memcpy(
    dst: *mut c_void,
    dst_type: MemoryType,
    src: *const c_void,
    src_type: MemoryType,
    length: usize,
) {
    if length == 0 {
        return;
    }
    let side = |pointer: *mut c_void, memory_type| match memory_type {
        MemoryType::GAUDI => Side::Device(DeviceAddr(pointer.addr() as u64)),
        _ => Side::Host(pointer.cast()),
    };
    let copied = attempt("ucx_perftest copy", |_| {
        let device = device_at(dst.addr() as u64, length)
            .or_else(|| device_at(src.addr() as u64, length))
            .map_or_else(configured_device, Ok)?;
        // SAFETY: the test program's own buffers of the types it names.
        unsafe { device.copy_blocking(side(dst, dst_type), side(src.cast_mut(), src_type), length) }
    });
    // This cannot report a failure to the program, and wrong bytes must not pass for right ones.
    if copied.is_err() {
        std::process::abort();
    }
}

unsafe extern "C" fn memset(dst: *mut c_void, value: c_int, length: usize) -> *mut c_void {
    if length != 0 {
        let filled = attempt("ucx_perftest fill", |_| {
            let address = dst.addr() as u64;
            let device = device_at(address, length).map_or_else(configured_device, Ok)?;
            device.fill(DeviceAddr(address), length as u64, value as u8)
        });
        if filled.is_err() {
            std::process::abort();
        }
    }
    dst
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr::without_provenance_mut;

    #[test]
    fn a_domain_is_taken_only_where_it_and_its_component_are() {
        let domain_of = |component: usize, md: *const RawMd| {
            let mut context = vec![0usize; PERF_UCT_COMPONENT / 8 + 2];
            context[PERF_UCT_COMPONENT / 8] = component;
            context[PERF_UCT_COMPONENT / 8 + 1] = md.expose_provenance();
            let components = [0x1000, 0x2000].map(without_provenance_mut);
            // SAFETY: a context of our own making, whose domain is one or is not looked into.
            let found = unsafe { domain_in(context.as_ptr().cast(), &components) };
            found.map(|md| md.addr())
        };
        let md = RawMd { ops: core::ptr::null(), component: without_provenance_mut(0x2000) };
        assert_eq!(domain_of(0x2000, &md), Some((&raw const md).addr()));
        assert_eq!(domain_of(0x1000, &md), None, "another component's");
        assert_eq!(domain_of(0x3000, &md), None, "no component");
        assert_eq!(domain_of(0x2000, core::ptr::null()), None);
        assert_eq!(domain_of(0x2000, core::ptr::without_provenance(3)), None);
    }
}
