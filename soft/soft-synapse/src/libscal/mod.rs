//! SCAL in software: a drop-in `libscal.so` on the software Gaudi.
//!
//! It has the functions by which a communication library learns where the framework's memory is, and those with which
//! the software Synapse starts a card. Like the real one, it takes all HBM, at addresses of its own. No firmware is
//! loaded and there are no streams; `docs/design/software-synapse.md` says what else is missing. Facts: each
//! `scal_…` function behaves as scal.h and its implementation do, including the absence of reference counts.

#![allow(clippy::not_unsafe_ptr_arg_deref)] // C functions: their callers promise what C promises.
#![allow(non_snake_case)] // Their names.

mod instance;
mod pool;

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use instance::Instance;
use pool::Pool;

use crate::thunk;

const SUCCESS: c_int = 0;
const FAILURE: c_int = -1;
const INVALID_PARAM: c_int = -4;
const OUT_OF_MEMORY: c_int = -5;
const NOT_FOUND: c_int = -11;

/// `scal_handle_t`, `scal_pool_handle_t` and `scal_buffer_handle_t`: numbers, never addresses.
type Handle = *mut c_void;

/// `scal_memory_pool_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PoolInfo {
    pub scal: Handle,
    pub name: *const c_char,
    pub idx: c_uint,
    pub device_base_address: u64,
    pub host_base_address: *mut c_void,
    pub core_base_address: u32,
    pub total_size: u64,
    pub free_size: u64,
}

/// `scal_memory_pool_infoV2`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct PoolInfoV2 {
    pub v1: PoolInfo,
    pub device_base_allocated_address: u64,
}

/// `scal_buffer_info_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct BufferInfo {
    pub pool: Handle,
    pub core_address: u32,
    pub host_address: *mut c_void,
    pub device_address: u64,
}

const _: () = assert!(size_of::<PoolInfo>() == 64 && size_of::<PoolInfoV2>() == 72);
const _: () = assert!(size_of::<BufferInfo>() == 32);

/// Every running instance, and the next number for handles.
static INSTANCES: Mutex<Vec<Instance>> = Mutex::new(Vec::new());

fn instances() -> MutexGuard<'static, Vec<Instance>> {
    INSTANCES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the body of a C function; a panic becomes `FAILURE`.
fn guard(body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => FAILURE,
    }
}

/// Writes through an out pointer.
fn put<T>(out: *mut T, value: T) -> Result<(), c_int> {
    if out.is_null() {
        return Err(INVALID_PARAM);
    }
    // SAFETY: not NULL; C's callers promise room for one.
    unsafe { out.write(value) };
    Ok(())
}

fn with_instance<T>(
    scal: Handle,
    body: impl FnOnce(&mut Instance) -> Result<T, c_int>,
) -> Result<T, c_int> {
    let mut instances = instances();
    let found = instances.iter_mut().find(|instance| instance.handle() == scal as usize);
    body(found.ok_or(INVALID_PARAM)?)
}

fn with_pool<T>(
    pool: Handle,
    body: impl FnOnce(Handle, &mut Pool) -> Result<T, c_int>,
) -> Result<T, c_int> {
    let mut instances = instances();
    for instance in instances.iter_mut() {
        let scal = instance.handle() as Handle;
        if let Some(found) = instance.pools.iter_mut().find(|p| p.handle == pool as usize) {
            return body(scal, found);
        }
    }
    Err(INVALID_PARAM)
}

/// `scal_destroy`: takes effect at once, even if others still use the instance.
#[unsafe(no_mangle)]
pub extern "C" fn scal_destroy(scal: Handle) {
    guard(|| {
        thunk::owner_call(c"scal_destroy");
        let mut instances = instances();
        let at = instances.iter().position(|instance| instance.handle() == scal as usize);
        instances.swap_remove(at.ok_or(INVALID_PARAM)?).stop();
        Ok(())
    });
}

fn info(pool: Handle) -> Result<PoolInfoV2, c_int> {
    with_pool(pool, |scal, pool| {
        let v1 = PoolInfo {
            scal,
            name: pool.name.as_ptr(),
            idx: pool.index,
            device_base_address: pool.base,
            // For HBM, this is the driver's handle, not an address.
            host_base_address: pool.allocation as *mut c_void,
            core_base_address: 0,
            total_size: pool.total,
            free_size: pool.free_bytes(),
        };
        Ok(PoolInfoV2 { v1, device_base_allocated_address: pool.mapping })
    })
}

fn with_buffer<T>(buffer: Handle, body: impl FnOnce(&mut Pool, usize) -> T) -> Result<T, c_int> {
    let mut instances = instances();
    let mut pools = instances.iter_mut().flat_map(|instance| &mut instance.pools);
    let pool = pools.find(|pool| pool.has(buffer as usize)).ok_or(INVALID_PARAM)?;
    Ok(body(pool, buffer as usize))
}

c_functions! {
    /// An instance that exists for the descriptor is returned as it is, without a reference count.
    fn scal_init(fd: c_int, config: *const c_char, scal: *mut Handle, _firmware: *mut c_void) = guard(|| {
        thunk::owner_call(c"scal_init");
        if fd <= 0 || config.is_null() || scal.is_null() {
            return Err(INVALID_PARAM);
        }
        let mut instances = instances();
        if let Some(instance) = instances.iter().find(|instance| instance.fd == fd) {
            return put(scal, instance.handle() as Handle);
        }
        let instance = Instance::start(fd)?;
        put(scal, instance.handle() as Handle)?;
        instances.push(instance);
        Ok(())
    });

    fn scal_get_fd(scal: Handle) = with_instance(scal, |instance| Ok(instance.fd)).unwrap_or(FAILURE);

    /// By the number of the descriptor; a duplicate is not recognised.
    fn scal_get_handle_from_fd(fd: c_int, scal: *mut Handle) = guard(|| {
        let instances = instances();
        let found = instances.iter().find(|instance| instance.fd == fd).ok_or(FAILURE)?;
        put(scal, found.handle() as Handle)
    });

    fn scal_get_sram_size(scal: Handle) -> u32 = with_instance(scal, |instance| Ok(instance.sram_size)).unwrap_or(0);

    fn scal_get_pool_handle_by_name(scal: Handle, name: *const c_char, pool: *mut Handle) = guard(|| {
        if name.is_null() {
            return Err(INVALID_PARAM);
        }
        // SAFETY: C's callers promise a NUL-terminated string.
        let name = unsafe { CStr::from_ptr(name) };
        let handle = with_instance(scal, |instance| {
            let found = instance.pools.iter().find(|pool| pool.name == name);
            found.map(|pool| pool.handle).ok_or(NOT_FOUND)
        })?;
        put(pool, handle as Handle)
    });

    fn scal_get_pool_handle_by_id(scal: Handle, id: c_uint, pool: *mut Handle) = guard(|| {
        let handle = with_instance(scal, |instance| {
            instance.pools.get(id as usize).map(|pool| pool.handle).ok_or(NOT_FOUND)
        })?;
        put(pool, handle as Handle)
    });

    fn scal_pool_get_info(pool: Handle, out: *mut PoolInfo) = guard(|| put(out, info(pool)?.v1));
    fn scal_pool_get_infoV2(pool: Handle, out: *mut PoolInfoV2) = guard(|| put(out, info(pool)?));

    /// Aligned to 128 bytes.
    fn scal_allocate_buffer(pool: Handle, size: u64, buffer: *mut Handle) =
        scal_allocate_aligned_buffer(pool, size, pool::ALIGNMENT, buffer);

    /// First fit.
    fn scal_allocate_aligned_buffer(pool: Handle, size: u64, alignment: u64, buffer: *mut Handle) = guard(|| {
        if buffer.is_null() || !alignment.is_power_of_two() {
            return Err(INVALID_PARAM);
        }
        let handle =
            with_pool(pool, |_, pool| pool.allocate(size, alignment).ok_or(OUT_OF_MEMORY))?;
        put(buffer, handle as Handle)
    });

    fn scal_free_buffer(buffer: Handle) = guard(|| with_buffer(buffer, Pool::free));

    fn scal_buffer_get_info(buffer: Handle, out: *mut BufferInfo) = guard(|| {
        let info = with_buffer(buffer, |pool, buffer| BufferInfo {
            pool: pool.handle as Handle,
            core_address: 0,
            host_address: core::ptr::null_mut(),
            device_address: pool.address(buffer),
        })?;
        put(out, info)
    });

    /// Says that this is software.
    fn scal_get_version_sha1() -> *const c_char =
        concat!("soft-scal ", env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast();
}
