//! The engine, called through its C functions (`include/ucx_gaudi.h`).

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

type Copy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int;

/// Its functions that are called.
#[derive(Debug)]
pub(crate) struct Engine {
    is_device_memory: unsafe extern "C" fn(*const c_void, usize) -> c_int,
    copy: Copy,
    copy_start: unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut *mut c_void) -> c_int,
    copy_wait: unsafe extern "C" fn(*mut c_void) -> c_int,
    host_register: unsafe extern "C" fn(*mut c_void, usize) -> c_int,
    host_unregister: unsafe extern "C" fn(*mut c_void) -> c_int,
    alloc: unsafe extern "C" fn(*const c_char, usize, *mut *mut c_void) -> c_int,
    free: unsafe extern "C" fn(*mut c_void) -> c_int,
    error: unsafe extern "C" fn() -> *const c_char,
}

static ENGINE: OnceLock<Result<Engine, String>> = OnceLock::new();

/// The engine, loaded at the first call; else why there is none.
pub(crate) fn load() -> Result<&'static Engine, &'static str> {
    ENGINE.get_or_init(Engine::load).as_ref().map_err(String::as_str)
}

/// The engine, if it was loaded.
pub(crate) fn get() -> Option<&'static Engine> {
    ENGINE.get()?.as_ref().ok()
}

/// The file that this library was loaded from.
fn own_file() -> Option<PathBuf> {
    let mut own = core::mem::MaybeUninit::<libc::Dl_info>::uninit();
    let here = own_file as *const c_void;
    // SAFETY: `own` has place for the answer.
    if unsafe { libc::dladdr(here, own.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr succeeded, so the name is a C string that lives as long as this library.
    let name = unsafe { CStr::from_ptr(own.assume_init().dli_fname) };
    Path::new(OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
}

impl Engine {
    fn load() -> Result<Self, String> {
        let own = own_file().ok_or("this library cannot find itself")?;
        let path = own.ancestors().nth(2).unwrap_or(&own).join("libucx_gaudi.so");
        // SAFETY: its constructors may run at any time, as UCX loads it too.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|error| format!("{error}: install all of ucx-gaudi under one prefix"))?;
        // SAFETY: the signatures are those of the header.
        let engine = unsafe {
            let missing = |error: libloading::Error| format!("{}: {error}", path.display());
            Self {
                is_device_memory: *library.get(b"ucx_gaudi_is_device_memory").map_err(missing)?,
                copy: *library.get(b"ucx_gaudi_copy").map_err(missing)?,
                copy_start: *library.get(b"ucx_gaudi_copy_start").map_err(missing)?,
                copy_wait: *library.get(b"ucx_gaudi_copy_wait").map_err(missing)?,
                host_register: *library.get(b"ucx_gaudi_host_register").map_err(missing)?,
                host_unregister: *library.get(b"ucx_gaudi_host_unregister").map_err(missing)?,
                alloc: *library.get(b"ucx_gaudi_alloc").map_err(missing)?,
                free: *library.get(b"ucx_gaudi_free").map_err(missing)?,
                error: *library.get(b"ucx_gaudi_error").map_err(missing)?,
            }
        };
        core::mem::forget(library); // It is never unloaded.
        Ok(engine)
    }

    /// Whether an address is in Gaudi memory of this process.
    pub(crate) fn owns(&self, address: *const c_void) -> bool {
        // SAFETY: it only looks the address up.
        unsafe { (self.is_device_memory)(address, 1) == 1 }
    }

    /// Copies between host and Gaudi memory, in any direction; the ranges do not overlap.
    ///
    /// # Safety
    /// Host memory must be valid for it.
    pub(crate) unsafe fn copy(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
    ) -> Result<(), String> {
        if len == 0 {
            return Ok(());
        }
        if !self.owns(to) && !self.owns(from) {
            // SAFETY: both are host memory, and the caller's promise.
            unsafe { core::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), len) };
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_of_card(to, from, len) }
    }

    /// The same where one side is known to be Gaudi memory.
    ///
    /// # Safety
    /// Host memory must be valid for it.
    pub(crate) unsafe fn copy_of_card(
        &self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
    ) -> Result<(), String> {
        // SAFETY: the caller's promise.
        match unsafe { (self.copy)(to, from, len) } {
            0 => Ok(()),
            _ => Err(self.why()),
        }
    }

    /// Starts a copy of which one side is Gaudi memory.
    ///
    /// # Safety
    /// Both sides must be valid for it until it was waited for.
    pub(crate) unsafe fn start_copy(
        &'static self,
        to: *mut c_void,
        from: *const c_void,
        len: usize,
    ) -> Result<Copying, String> {
        let mut copy = core::ptr::null_mut();
        // SAFETY: the caller's promise, and a place for what is to be waited for.
        match unsafe { (self.copy_start)(to, from, len, &mut copy) } {
            0 => Ok(Copying(Some((self, copy)))),
            _ => Err(self.why()),
        }
    }

    /// Says that copies will use this host memory often.
    ///
    /// # Safety
    /// It must be unregistered before it is freed.
    pub(crate) unsafe fn register(&self, at: *mut c_void, len: usize) -> Result<(), String> {
        // SAFETY: the caller's promise.
        match unsafe { (self.host_register)(at, len) } {
            0 => Ok(()),
            _ => Err(self.why()),
        }
    }

    /// Undoes [`register`](Self::register).
    pub(crate) fn unregister(&self, at: *mut c_void) -> Result<(), String> {
        // SAFETY: what is not registered is refused.
        match unsafe { (self.host_unregister)(at) } {
            0 => Ok(()),
            _ => Err(self.why()),
        }
    }

    /// Allocates on the card of this process.
    pub(crate) fn alloc(&self, len: usize) -> Result<*mut c_void, String> {
        let mut address = core::ptr::null_mut();
        // SAFETY: no name, and a place for the address.
        match unsafe { (self.alloc)(core::ptr::null(), len.max(1), &mut address) } {
            0 => Ok(address),
            _ => Err(self.why()),
        }
    }

    /// Frees what was allocated here.
    pub(crate) fn free(&self, address: *mut c_void) -> Result<(), String> {
        // SAFETY: an address that is not from there is refused.
        match unsafe { (self.free)(address) } {
            0 => Ok(()),
            _ => Err(self.why()),
        }
    }

    /// Why the last call of this thread failed.
    fn why(&self) -> String {
        // SAFETY: a C string that is good until the thread's next call.
        unsafe { CStr::from_ptr((self.error)()) }.to_string_lossy().into_owned()
    }
}

/// A copy in progress, or none. Dropping it waits for the copy.
#[derive(Debug, Default)]
pub(crate) struct Copying(Option<(&'static Engine, *mut c_void)>);

impl Copying {
    /// Waits until the bytes have arrived.
    pub(crate) fn wait(&mut self) -> Result<(), String> {
        let Some((engine, copy)) = self.0.take() else { return Ok(()) };
        // SAFETY: it was started and not waited for yet.
        match unsafe { (engine.copy_wait)(copy) } {
            0 => Ok(()),
            _ => Err(engine.why()),
        }
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        // Something else has failed before, and is reported.
        let _ = self.wait();
    }
}
