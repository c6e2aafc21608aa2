//! The C functions for Gaudi memory without a UCP context: `include/ucx_gaudi.h`, and the Python module.
//!
//! Memory from here is Gaudi memory to every UCX of the process, as if UCX had allocated it. Imported memory
//! is not: it belongs to no card, and two cards may have it at the same address. It can be copied here.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaudi::{
    Allocation, DeviceAddr, DeviceChoice, ErrorKind, HostRegion, Import, Location, Segment, Side,
    SubmitError, Transfer, runtime,
};

use crate::addresses::is_host_memory;
use crate::c_errors::{Failure, guarded};
use crate::{domain, environment, memtype_cache};

/// Version of these functions: one more when one is added; none is changed or removed.
const API_VERSION: c_int = 4;

/// Allocations by address, until they are freed.
static OWNED: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

fn owned() -> MutexGuard<'static, BTreeMap<u64, Allocation>> {
    OWNED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Imports by address, until they are unmapped. No two overlap.
static IMPORTED: Mutex<BTreeMap<u64, Arc<Import>>> = Mutex::new(BTreeMap::new());

fn imported() -> MutexGuard<'static, BTreeMap<u64, Arc<Import>>> {
    IMPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The import that an address lies in.
fn import_at(imports: &BTreeMap<u64, Arc<Import>>, address: u64) -> Option<&Arc<Import>> {
    let (start, import) = imports.range(..=address).next_back()?;
    (address - start < import.len()).then_some(import)
}

/// Registered host memory by address, until it is unregistered. No two begin at one address.
static REGISTERED: Mutex<BTreeMap<u64, Arc<HostRegion>>> = Mutex::new(BTreeMap::new());

fn registered() -> MutexGuard<'static, BTreeMap<u64, Arc<HostRegion>>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies up to this are faster through bounce buffers, and do not look for registered memory.
const SHORT: usize = 64 << 10;

/// The registered host memory that one of two ranges lies in.
fn region_of(to: u64, from: u64, len: usize) -> Option<Arc<HostRegion>> {
    let regions = registered();
    [to, from].into_iter().find_map(|at| {
        let (_, region) = regions.range(..=at).next_back()?;
        region.contains(at as usize, len).then(|| Arc::clone(region))
    })
}

/// Copies if one of the addresses lies in an import; otherwise does nothing and returns `None`.
///
/// # Safety
/// As for [`ucx_gaudi_copy`].
unsafe fn copy_imported(to: u64, from: u64, length: usize) -> Option<Result<(), Failure>> {
    let (dst, src) = {
        let imports = imported();
        (import_at(&imports, to).cloned(), import_at(&imports, from).cloned())
    };
    let device = Arc::clone(dst.as_ref().or(src.as_ref())?.device());
    if let (Some(dst), Some(src)) = (&dst, &src)
        && dst.device().id() != src.device().id()
    {
        let cards = (dst.device(), src.device());
        let text =
            format!("imported for {} and for {}: import both for one card", cards.0, cards.1);
        return Some(Err(invalid(text)));
    }
    let side = |address: u64, import: &Option<Arc<Import>>| match import {
        Some(import) if length as u64 > import.addr().0 + import.len() - address => {
            Err(invalid(format!("{address:#x}, {length} bytes: past the end of what was imported")))
        }
        None if runtime().locate(address, length).is_none() => {
            Ok(Side::Host(core::ptr::with_exposed_provenance_mut(address as usize)))
        }
        _ => Ok(Side::Device(DeviceAddr(address))),
    };
    let sides = side(to, &dst).and_then(|to| Ok((to, side(from, &src)?)));
    Some(sides.and_then(|(to, from)| {
        // SAFETY: the caller's promise; imports last until this returns.
        Ok(unsafe { device.copy_blocking(to, from, length) }?)
    }))
}

fn invalid(text: impl Into<String>) -> Failure {
    Failure(ErrorKind::InvalidParams.code(), text.into())
}

/// The card that a caller names; without a name, the one this process is configured for.
fn choice(card: Option<&CStr>) -> Result<DeviceChoice, Failure> {
    let text = match card {
        Some(card) => card.to_string_lossy().into_owned(),
        None => match runtime().options().device.clone() {
            Some(configured) => return Ok(configured),
            None => environment::variable("COPY_DEVICE").unwrap_or_default(),
        },
    };
    Ok(text.parse::<DeviceChoice>()?)
}

/// The allocation that contains all of these bytes.
fn located(address: u64, length: usize) -> Result<Location, Failure> {
    runtime().locate(address, length).ok_or_else(|| {
        invalid(format!("{address:#x}, {length} bytes: not inside Gaudi memory of this process"))
    })
}

/// The version of these functions.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_api_version() -> c_int {
    API_VERSION
}

/// The card that a C caller names.
///
/// # Safety
/// A C string or null.
unsafe fn card_choice(card: *const c_char) -> Result<DeviceChoice, Failure> {
    // SAFETY: the caller's promise.
    choice((!card.is_null()).then(|| unsafe { CStr::from_ptr(card) }))
}

/// Allocates.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ucx_gaudi_alloc(
    card: *const c_char,
    length: usize,
    address: *mut *mut c_void,
) -> c_int {
    guarded(|| {
        if address.is_null() || length == 0 {
            return Err(invalid("give a length above 0, and where to store the address"));
        }
        // SAFETY: by the header a C string or null.
        let device = domain::open(&unsafe { card_choice(card) }?)?;
        let allocation = device.alloc(length as u64, 1)?;
        let start = allocation.addr().0;
        memtype_cache::allocated(&allocation);
        owned().insert(start, allocation);
        // SAFETY: by the header a place for a pointer; checked for null above.
        unsafe { *address = core::ptr::without_provenance_mut(start as usize) };
        Ok(())
    })
}

/// Frees what [`ucx_gaudi_alloc`] gave.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_free(address: *mut c_void) -> c_int {
    guarded(|| {
        let start = address.addr() as u64;
        let found = owned().remove(&start);
        let allocation = found
            .ok_or_else(|| invalid(format!("{start:#x} did not come from ucx_gaudi_alloc")))?;
        memtype_cache::freeing(&allocation);
        drop(allocation);
        Ok(())
    })
}

/// Copies, and returns when the bytes have arrived.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ucx_gaudi_copy(
    destination: *mut c_void,
    source: *const c_void,
    length: usize,
) -> c_int {
    let (to, from) = (destination.expose_provenance() as u64, source.expose_provenance() as u64);
    guarded(|| {
        if length <= SHORT || region_of(to, from, length).is_none() {
            // SAFETY: by the header, what is not Gaudi memory is the caller's host memory of that length, and
            // stays until this returns.
            return unsafe { copy_now(to, from, length) };
        }
        // SAFETY: the same.
        let transfer = unsafe { start(to, from, length) }?;
        Ok(transfer.map_or(Ok(()), |mut transfer| transfer.wait())?)
    })
}

/// Copies, and returns when the bytes have arrived.
///
/// # Safety
/// What is not Gaudi memory is host memory of that length.
unsafe fn copy_now(to: u64, from: u64, length: usize) -> Result<(), Failure> {
    if length == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    if let Some(copied) = unsafe { copy_imported(to, from, length) } {
        return copied;
    }
    // SAFETY: the caller's promise.
    let copied = unsafe { runtime().copy(to, from, length) };
    let neither =
        || invalid(format!("neither {to:#x} nor {from:#x} with {length} bytes is Gaudi memory"));
    Ok(copied.ok_or_else(neither)??)
}

/// Starts a copy, and stores what [`ucx_gaudi_copy_wait`] takes: a transfer, or null where it has ended already.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ucx_gaudi_copy_start(
    destination: *mut c_void,
    source: *const c_void,
    length: usize,
    copy: *mut *mut c_void,
) -> c_int {
    guarded(|| {
        if copy.is_null() {
            return Err(invalid("give where to store the copy"));
        }
        let (to, from) = (destination.expose_provenance(), source.expose_provenance());
        // SAFETY: by the header, what is not Gaudi memory is the caller's host memory of that length, and
        // stays until the copy was waited for.
        let transfer = unsafe { start(to as u64, from as u64, length) }?;
        let transfer = transfer.map_or(core::ptr::null_mut(), |it| Box::into_raw(Box::new(it)));
        // SAFETY: by the header a place for a pointer; checked for null above.
        unsafe { *copy = transfer.cast() };
        Ok(())
    })
}

/// Starts a copy; `None` if it had to be made at once.
///
/// # Safety
/// As for [`gaudi::Device::copy`].
unsafe fn start(to: u64, from: u64, len: usize) -> Result<Option<Transfer>, Failure> {
    let (dst, src) = (runtime().find(to, len), runtime().find(from, len));
    let device = dst.device_id().or(src.device_id()).and_then(|id| runtime().device(id));
    // The runtime does not know an import as memory of a card.
    let is_imported = {
        let imports = imported();
        [to, from].iter().any(|at| import_at(&imports, *at).is_some())
    };
    if let Some(device) = device.filter(|_| len > 0 && !is_imported) {
        let segment = Segment { dst, src, len, host_region: region_of(to, from, len) };
        // SAFETY: the caller's promise.
        match unsafe { device.copy(&[segment]) } {
            Ok(transfer) => return Ok(Some(transfer)),
            Err(SubmitError::Failed(error)) => return Err(error.into()),
            Err(SubmitError::Busy) => {}
        }
    }
    // SAFETY: the caller's promise.
    unsafe { copy_now(to, from, len) }.map(|()| None)
}

/// Waits for a copy of [`ucx_gaudi_copy_start`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ucx_gaudi_copy_wait(copy: *mut c_void) -> c_int {
    guarded(|| {
        if copy.is_null() {
            return Ok(());
        }
        // SAFETY: by the header it came from there and was not waited for.
        Ok(unsafe { Box::from_raw(copy.cast::<Transfer>()) }.wait()?)
    })
}

/// Any thread may wait.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Transfer>();
};

/// Registers host memory that copies will use often.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_host_register(address: *mut c_void, length: usize) -> c_int {
    guarded(|| {
        let start = address.expose_provenance() as u64;
        if length == 0 || !is_host_memory(start, length) {
            return Err(invalid(format!("{length} bytes at {start:#x} are no host memory")));
        }
        match registered().entry(start) {
            Entry::Occupied(_) => Err(invalid(format!("{start:#x} is registered already"))),
            Entry::Vacant(place) => {
                place.insert(HostRegion::record(address.cast(), length));
                Ok(())
            }
        }
    })
}

/// Undoes [`ucx_gaudi_host_register`].
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_host_unregister(address: *mut c_void) -> c_int {
    guarded(|| {
        let start = address.addr() as u64;
        let found = registered().remove(&start);
        // The lock is released before the pins are.
        found.map(drop).ok_or_else(|| invalid(format!("{start:#x} is not registered")))
    })
}

/// Sets Gaudi memory to a byte.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_fill(address: *mut c_void, byte: c_int, length: usize) -> c_int {
    guarded(|| {
        let start = address.addr() as u64;
        let place = located(start, length)?;
        let byte = u8::try_from(byte).map_err(|_| invalid(format!("{byte} is not a byte")))?;
        let device = place.device().ok_or_else(|| invalid("the card was closed"))?;
        Ok(device.fill(DeviceAddr(start), length as u64, byte)?)
    })
}

/// Whether all of this is Gaudi memory of this process: 1 or 0.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_is_device_memory(
    address: *const c_void,
    length: usize,
) -> c_int {
    let mut found = false;
    guarded(|| {
        found = runtime().locate(address.addr() as u64, length).is_some();
        Ok(())
    });
    c_int::from(found)
}

/// Lets the card's engines see what other devices wrote: 0, or 1 where the driver has no call for it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_flush_peer_writes(address: *const c_void) -> c_int {
    let mut flushed = true;
    let code = guarded(|| {
        let place = located(address.addr() as u64, 1)?;
        flushed =
            place.device().ok_or_else(|| invalid("the card was closed"))?.flush_peer_writes()?;
        Ok(())
    });
    if flushed { code } else { 1 }
}

/// Exports Gaudi memory as a dma-buf.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ucx_gaudi_export_dmabuf(
    address: *const c_void,
    length: usize,
    fd: *mut c_int,
    offset: *mut u64,
) -> c_int {
    guarded(|| {
        if fd.is_null() || offset.is_null() {
            return Err(invalid("give where to store descriptor and offset"));
        }
        let start = address.addr() as u64;
        let place = located(start, length)?;
        let device = place.device().ok_or_else(|| invalid("the card was closed"))?;
        let (exported, at) = device.export(DeviceAddr(start), length as u64)?;
        // SAFETY: by the header places for both; checked for null above.
        unsafe { (*fd, *offset) = (exported.into_raw_fd(), at) };
        Ok(())
    })
}

/// Maps a part of a dma-buf for a card.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ucx_gaudi_import_dmabuf(
    card: *const c_char,
    fd: c_int,
    offset: u64,
    length: usize,
    address: *mut *mut c_void,
) -> c_int {
    guarded(|| {
        if address.is_null() || fd < 0 {
            return Err(invalid("give a descriptor, and where to store the address"));
        }
        // SAFETY: not negative; whether it is open, the first call on it finds out.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        // SAFETY: by the header a C string or null.
        let device = domain::open(&unsafe { card_choice(card) }?)?;
        // Cards share no address space, so an import may overlap another card's. Keep such ones until one does not overlap.
        let mut elsewhere = Vec::new();
        let start = loop {
            let import = device.import(fd, offset, length as u64)?;
            let (start, last) = (import.addr().0, import.addr().0 + (import.len() - 1));
            let mut imports = imported();
            let before = imports.range(..=last).next_back();
            if before.is_none_or(|(at, other)| at + (other.len() - 1) < start) {
                imports.insert(start, Arc::new(import));
                break start;
            }
            elsewhere.push(import);
        };
        // SAFETY: by the header a place for a pointer; checked for null above.
        unsafe { *address = core::ptr::without_provenance_mut(start as usize) };
        Ok(())
    })
}

/// Unmaps what [`ucx_gaudi_import_dmabuf`] mapped.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_unmap_dmabuf(address: *mut c_void) -> c_int {
    guarded(|| {
        let start = address.addr() as u64;
        let found = imported().remove(&start);
        let wrong = || invalid(format!("{start:#x} did not come from ucx_gaudi_import_dmabuf"));
        // Unmapping is a driver call: not under the lock.
        found.map(drop).ok_or_else(wrong)
    })
}
