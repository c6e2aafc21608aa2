//! Detects memory that the application maps on a card by itself.
//!
//! libucm makes the objects of the process call the functions below instead of the driver library's
//! (see `uct::Ucx::redirect`). It does so only if the application itself uses that library and a Gaudi
//! is in use, or if the user wants it. Each function calls the original, notifies the engine, and
//! preserves `errno`. Our own calls do not go through here: we found the library's functions with
//! `dlsym`.
//!
//! A framework (Synapse) maps its memory through these calls as well, from its libscal. We do not ask it for
//! its card here, inside one of its calls; but before it unmaps its memory, everything of ours on it is
//! given up (without calling the framework). Its functions that release the card are redirected, too: they fail while another thread, such as
//! ours, is inside a call of the framework. Calls through `dlsym` are not seen; then we see only the unmapping.
//!
//! There is no `libucm_gaudi`: every UCX program would load a module of that framework, before it is
//! known whether there is a Gaudi.

use core::ffi::{CStr, c_int, c_void};
use core::mem::transmute;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, OnceLock, PoisonError};

use gaudi::{DeviceAddr, Releasing, Runtime, runtime};
use uct::config::Ternary;
use uct::{Ucx, log};

use crate::{memtype_cache, status};

/// A library's own functions, and the functions of the same names here that replace them.
macro_rules! redirections {
    ($table:ident { $($function:ident = $name:literal: fn($($type:ty),*) -> $out:ty;)* }) => {
        struct $table { $($function: unsafe extern "C" fn($($type),*) -> $out,)* }

        impl $table {
            /// The library's own.
            fn own() -> &'static OnceLock<Self> {
                static OWN: OnceLock<$table> = OnceLock::new();
                &OWN
            }

            fn get() -> &'static Self {
                Self::own().get().expect("set before the first redirection")
            }

            /// Redirects the calls of all objects of the process, but not of the library itself: we
            /// would not see the counterparts of its calls.
            fn redirect(
                ucx: &Ucx,
                library: &str,
                find: impl Fn(&CStr) -> Option<*const c_void>,
            ) -> Result<(), String> {
                let find = |name: &CStr| {
                    find(name).ok_or_else(|| format!("{library} has no {}", name.to_string_lossy()))
                };
                // SAFETY: the types are those of the library's header.
                let own = Self { $($function: unsafe {
                    transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> $out>(find($name)?)
                },)* };
                let functions: &[(&'static CStr, *const c_void, *const c_void)] = &[
                    $(($name, own.$function as *const c_void, $function as *const c_void)),*
                ];
                let file = file_of(functions[0].1);
                let file = file.ok_or_else(|| format!("it is not known which file {library} is"))?;
                let _ = Self::own().set(own);
                for &(name, _, instead) in functions {
                    // SAFETY: same type, same effect, and this library is never unloaded.
                    unsafe { ucx.redirect(name, instead, file) }.map_err(|status| {
                        let name = name.to_string_lossy();
                        format!("UCX could not redirect {name}: {status:?}")
                    })?;
                }
                Ok(())
            }
        }
    };
}

redirections! { Driver {
    alloc = c"hlthunk_device_memory_alloc": fn(c_int, u64, u64, bool, bool) -> u64;
    free = c"hlthunk_device_memory_free": fn(c_int, u64) -> c_int;
    unmap = c"hlthunk_memory_unmap": fn(c_int, u64) -> c_int;
    close = c"hlthunk_close": fn(c_int) -> c_int;
    // Redirected last: once a mapping is seen, so is its unmapping.
    map = c"hlthunk_device_memory_map": fn(c_int, u64, u64) -> u64;
} }

// What releases the framework's card.
redirections! { ReleaseFunctions {
    device_release = c"synDeviceRelease": fn(u32) -> c_int;
    destroy = c"synDestroy": fn() -> c_int;
} }

/// The UCX through which hooks are installed, and whether they are wanted.
static WANTED: Mutex<Option<(&'static Ucx, Ternary)>> = Mutex::new(None);

/// Sets whether hooks are wanted, and installs them if they are needed now.
pub(crate) fn configure(ucx: &'static Ucx, wanted: Ternary) {
    *WANTED.lock().unwrap_or_else(PoisonError::into_inner) = Some((ucx, wanted));
    install_if_needed();
    // A framework's card that was found before this was announced before hooks could be installed.
    if runtime().devices().iter().any(|device| device.is_guest()) {
        install_for_framework();
    }
}

/// Installs the hooks if they are wanted and needed, and it was not done before. Call it whenever
/// that may have changed: a card was opened or lent, memory reported, or a framework's card found.
pub(crate) fn install_if_needed() {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    if *done {
        return;
    }
    let wanted = *WANTED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((ucx, wanted)) = wanted else { return };
    let due = match wanted {
        Ternary::Yes => true,
        Ternary::Try => runtime().application_uses_cards(),
        Ternary::No => false,
    };
    if !due {
        return;
    }
    // Only once, even if it fails: half of the functions may be redirected already.
    *done = true;
    let find = |name: &CStr| runtime().driver_function(name.to_str().ok()?);
    match Driver::redirect(ucx, "the driver library", find) {
        Ok(()) => log!(ucx, Info, "memory that this program maps on a Gaudi by itself is noticed"),
        Err(reason) if wanted == Ternary::Yes => {
            log!(ucx, Warn, "MEM_HOOKS=yes, but {reason}");
        }
        Err(reason) => log!(ucx, Info, "memory that this program maps is not noticed: {reason}"),
    }
}

/// As [`install_if_needed`], for the framework's own functions, once its card was found.
pub(crate) fn install_for_framework() {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(PoisonError::into_inner);
    let wanted = *WANTED.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((ucx, Ternary::Yes | Ternary::Try)) = wanted else { return };
    if std::mem::replace(&mut *done, true) {
        return;
    }
    let find = |name: &CStr| runtime().framework_function(name);
    if let Err(reason) = ReleaseFunctions::redirect(ucx, "libSynapse", find) {
        log!(ucx, Info, "a release of Synapse's card is noticed when it unmaps memory: {reason}");
    }
}

/// The file that a function is in, as the loader calls it.
fn file_of(function: *const c_void) -> Option<&'static CStr> {
    // SAFETY: plain data, for which zeroes are a value.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: any address may be asked about.
    let found = unsafe { libc::dladdr(function, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's string of a library that the engine never unloads.
    Some(unsafe { CStr::from_ptr(info.dli_fname) })
}

/// Reports a call to the engine. A failure in the engine does not affect the caller.
fn report<T>(fd: c_int, what: impl FnOnce(&'static Runtime, BorrowedFd<'_>) -> T) -> Option<T> {
    if fd < 0 {
        return None;
    }
    // SAFETY: not negative; the caller of the driver has it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    guarded(|| what(runtime(), fd))
}

/// Runs code of ours inside a call of the application: catches a panic, and preserves `errno`.
fn guarded<T>(what: impl FnOnce() -> T) -> Option<T> {
    // SAFETY: errno is this thread's own.
    let errno = unsafe { *libc::__errno_location() };
    let result = catch_unwind(AssertUnwindSafe(what)).ok();
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    result
}

fn log_failure(what: &str, error: &gaudi::Error) {
    let wanted = *WANTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((ucx, _)) = wanted {
        log!(ucx, Warn, "{what}: {}", status::explain(error));
    }
}

unsafe extern "C" fn alloc(fd: c_int, size: u64, page: u64, near: bool, shared: bool) -> u64 {
    // SAFETY: the caller's own arguments.
    let handle = unsafe { (Driver::get().alloc)(fd, size, page, near, shared) };
    if handle != 0 {
        report(fd, |runtime, fd| runtime.memory_allocated(fd, handle, size));
    }
    handle
}

unsafe extern "C" fn free(fd: c_int, handle: u64) -> c_int {
    // Reported first: once it is free, the driver may give the handle to another thread.
    let size = report(fd, |runtime, fd| runtime.memory_freeing(fd, handle)).flatten();
    // SAFETY: the caller's own arguments.
    let answer = unsafe { (Driver::get().free)(fd, handle) };
    if answer != 0
        && let Some(size) = size
    {
        report(fd, |runtime, fd| runtime.memory_allocated(fd, handle, size));
    }
    answer
}

unsafe extern "C" fn map(fd: c_int, handle: u64, hint: u64) -> u64 {
    // SAFETY: the caller's own arguments.
    let address = unsafe { (Driver::get().map)(fd, handle, hint) };
    if address != 0 {
        report(fd, |runtime, fd| {
            if runtime.has_framework() && !runtime.knows_card_of(fd) {
                // The framework is starting its card, and must not be asked yet: UCX asks us when it sees such an
                // address.
                let len = runtime.memory_behind(fd, handle).unwrap_or(1);
                memtype_cache::watch(&(address..address.saturating_add(len)));
            } else if let Err(error) = runtime.memory_mapped(fd, handle, DeviceAddr(address)) {
                log_failure("UCX will take this for host memory", &error);
            }
        });
    }
    address
}

unsafe extern "C" fn unmap(fd: c_int, address: u64) -> c_int {
    let start = DeviceAddr(address);
    let known = report(fd, |runtime, borrowed| {
        // The framework is ending: it cannot unmap what is exported or registered.
        if runtime.framework_unmapping(fd, Some(start)) {
            return None;
        }
        runtime.remove_memory(borrowed, start)
    });
    let known = known.flatten();
    // SAFETY: the caller's own arguments.
    let answer = unsafe { (Driver::get().unmap)(fd, address) };
    if answer != 0
        && let Some(memory) = known
    {
        report(fd, |runtime, fd| {
            if let Err(error) = runtime.keep_memory(fd, memory) {
                log_failure("memory that could not be unmapped", &error);
            }
        });
    }
    answer
}

unsafe extern "C" fn close(fd: c_int) -> c_int {
    report(fd, |runtime, borrowed| {
        if !runtime.framework_unmapping(fd, None) {
            runtime.card_closing(borrowed);
        }
    });
    // SAFETY: the caller's own arguments.
    unsafe { (Driver::get().close)(fd) }
}

/// Before a call that releases the framework's card.
fn releasing() -> Option<Releasing> {
    guarded(|| runtime().framework_releasing())
}

/// After it.
fn released(releasing: Option<Releasing>, answer: c_int) -> c_int {
    if answer != 0
        && let Some(releasing) = &releasing
    {
        guarded(|| releasing.refused());
    }
    answer
}

unsafe extern "C" fn device_release(device: u32) -> c_int {
    let releasing = releasing();
    // SAFETY: the caller's own argument.
    released(releasing, unsafe { (ReleaseFunctions::get().device_release)(device) })
}

unsafe extern "C" fn destroy() -> c_int {
    let releasing = releasing();
    // SAFETY: no arguments.
    released(releasing, unsafe { (ReleaseFunctions::get().destroy)() })
}
