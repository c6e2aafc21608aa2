//! State that exists once per process: whether Synapse is initialised, and the device.
//!
//! Every call holds the lock for reading. A release is refused while a call is running, as by the real library.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, RwLock, TryLockError};

use crate::device::Device;
use crate::status::Status;
use crate::thunk;

#[derive(Debug)]
struct Process {
    initialised: bool,
    device: Option<Arc<Device>>,
}

static PROCESS: RwLock<Process> = RwLock::new(Process { initialised: false, device: None });

/// Runs the body of a C function; a panic becomes `Fail`.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Status>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status.0,
        Err(_) => {
            eprintln!("soft-synapse: a call panicked; this is a bug in the software Synapse");
            Status::FAIL.0
        }
    }
}

/// A call that needs no device.
pub(crate) fn initialised<T>(
    body: impl FnOnce(Option<&Arc<Device>>) -> Result<T, Status>,
) -> Result<T, Status> {
    let process = PROCESS.read().unwrap_or_else(PoisonError::into_inner);
    if !process.initialised {
        return Err(Status::UNINITIALIZED);
    }
    body(process.device.as_ref())
}

/// A call on the device; returns `absent` if there is none.
pub(crate) fn device_or<T>(
    absent: Status,
    body: impl FnOnce(&Arc<Device>) -> Result<T, Status>,
) -> Result<T, Status> {
    initialised(|device| {
        let device = device.ok_or(absent)?;
        device.check()?;
        body(device)
    })
}

/// The body of a C function on the device; `Fail` if there is none.
pub(crate) fn on_device(body: impl FnOnce(&Arc<Device>) -> Result<(), Status>) -> i32 {
    guard(|| device_or(Status::FAIL, body))
}

/// `synInitialize`: without a reference count.
pub(crate) fn initialise() -> Result<(), Status> {
    thunk::owner_call(c"synInitialize");
    PROCESS.write().unwrap_or_else(PoisonError::into_inner).initialised = true;
    Ok(())
}

/// `synDestroy`: takes effect for everybody in the process.
pub(crate) fn destroy() -> Result<(), Status> {
    thunk::owner_call(c"synDestroy");
    let mut process = PROCESS.write().unwrap_or_else(PoisonError::into_inner);
    if !process.initialised {
        return Err(Status::UNINITIALIZED);
    }
    if let Some(device) = process.device.take() {
        device.release();
    }
    process.initialised = false;
    Ok(())
}

/// Acquires the device that `find` returns.
pub(crate) fn acquire(
    name: &core::ffi::CStr,
    find: impl FnOnce() -> Result<Device, Status>,
) -> Result<(), Status> {
    thunk::owner_call(name);
    let mut process = PROCESS.write().unwrap_or_else(PoisonError::into_inner);
    if !process.initialised {
        return Err(Status::UNINITIALIZED);
    }
    if process.device.is_some() {
        return Err(Status::DEVICE_ALREADY_ACQUIRED);
    }
    process.device = Some(Arc::new(find()?));
    Ok(())
}

/// `synDeviceRelease`: refused while another thread is inside a call.
pub(crate) fn release() -> Result<(), Status> {
    thunk::owner_call(c"synDeviceRelease");
    let mut process = match PROCESS.try_write() {
        Ok(process) => process,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(Status::FAIL),
    };
    if !process.initialised {
        return Err(Status::UNINITIALIZED);
    }
    process.device.take().ok_or(Status::NO_DEVICE_FOUND)?.release();
    Ok(())
}
