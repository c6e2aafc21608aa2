//! Noticing memory that the application maps on a card by itself.
//!
//! libucm makes the objects of the process call the functions below instead of the driver library's
//! (see `uct::Ucx::redirect`), and only if the application has that library on its own account and
//! a Gaudi is in use, or the user wants it. Each does what the original does, notifies the
//! engine, and leaves `errno` alone. Our own calls do not come through here: we have found the
//! library's functions with `dlsym`.
//!
//! A framework (Synapse) maps its memory through these calls as well, made by its libscal. It is not asked for its card
//! here, in the middle of a call of its own; but before it unmaps its memory, everything of ours on it is given up.
//! Its own calls that release the card are redirected as well, because it refuses them while another thread, such as
//! ours, is in a call of its. Calls through `dlsym` are not seen; then the unmapping is.
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

type Alloc = unsafe extern "C" fn(c_int, u64, u64, bool, bool) -> u64;
type Map = unsafe extern "C" fn(c_int, u64, u64) -> u64;
/// Free and unmap.
type Give = unsafe extern "C" fn(c_int, u64) -> c_int;
type Close = unsafe extern "C" fn(c_int) -> c_int;

/// The driver library's own functions.
struct Originals {
    alloc: Alloc,
    free: Give,
    map: Map,
    unmap: Give,
    close: Close,
}

static ORIGINALS: OnceLock<Originals> = OnceLock::new();

type Release = unsafe extern "C" fn(u32) -> c_int;
type Destroy = unsafe extern "C" fn() -> c_int;

/// The framework's own functions that release its card.
struct ReleaseFunctions {
    release: Release,
    destroy: Destroy,
}

static RELEASE_FUNCTIONS: OnceLock<ReleaseFunctions> = OnceLock::new();

/// Through which UCX hooks are set, and whether they are wanted.
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
    // Once, whatever comes of it: half of the functions may be redirected already.
    *done = true;
    match install(ucx) {
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
    if let Err(reason) = install_on_framework(ucx) {
        log!(ucx, Info, "a release of Synapse's card is noticed when it unmaps memory: {reason}");
    }
}

fn install_on_framework(ucx: &Ucx) -> Result<(), String> {
    let find = |name: &CStr| {
        let found = runtime().framework_function(name);
        found.ok_or_else(|| format!("libSynapse has no {}", name.to_string_lossy()))
    };
    // SAFETY: the types are those of synapse_api.h.
    let endings = unsafe {
        ReleaseFunctions {
            release: transmute::<*const c_void, Release>(find(c"synDeviceRelease")?),
            destroy: transmute::<*const c_void, Destroy>(find(c"synDestroy")?),
        }
    };
    let library = file_of(endings.release as *const c_void);
    let library = library.ok_or("it is not known which file libSynapse is")?;
    let _ = RELEASE_FUNCTIONS.set(endings);
    redirect(ucx, c"synDeviceRelease", device_release as *const c_void, library)?;
    redirect(ucx, c"synDestroy", destroy as *const c_void, library)
}

fn redirect(
    ucx: &Ucx,
    name: &'static CStr,
    function: *const c_void,
    except: &'static CStr,
) -> Result<(), String> {
    // SAFETY: same type, same effect, and this library is never unloaded.
    unsafe { ucx.redirect(name, function, except) }
        .map_err(|status| format!("UCX could not redirect {}: {status:?}", name.to_string_lossy()))
}

fn install(ucx: &Ucx) -> Result<(), String> {
    let find = |name: &str| {
        let found = runtime().driver_function(name);
        found.ok_or_else(|| format!("the driver library has no {name}"))
    };
    // SAFETY: the types are those of hlthunk.h.
    let originals = unsafe {
        Originals {
            alloc: transmute::<*const c_void, Alloc>(find("hlthunk_device_memory_alloc")?),
            free: transmute::<*const c_void, Give>(find("hlthunk_device_memory_free")?),
            map: transmute::<*const c_void, Map>(find("hlthunk_device_memory_map")?),
            unmap: transmute::<*const c_void, Give>(find("hlthunk_memory_unmap")?),
            close: transmute::<*const c_void, Close>(find("hlthunk_close")?),
        }
    };
    // The driver library's own calls are not redirected: it closes control nodes whose opening was not
    // seen here.
    let driver = file_of(originals.close as *const c_void);
    let driver = driver.ok_or("it is not known which file the driver library is")?;
    let _ = ORIGINALS.set(originals);
    let functions: [(&CStr, *const c_void); 5] = [
        (c"hlthunk_device_memory_alloc", alloc as *const c_void),
        (c"hlthunk_device_memory_free", free as *const c_void),
        (c"hlthunk_memory_unmap", unmap as *const c_void),
        (c"hlthunk_close", close as *const c_void),
        // Last: where a mapping is seen, its unmapping is seen, too.
        (c"hlthunk_device_memory_map", map as *const c_void),
    ];
    for (name, function) in functions {
        redirect(ucx, name, function, driver)?;
    }
    Ok(())
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

fn originals() -> &'static Originals {
    ORIGINALS.get().expect("set before the first redirection")
}

/// Reports a call to the engine. A failure of that is logged, and not the caller's.
fn report<T>(fd: c_int, what: impl FnOnce(&'static Runtime, BorrowedFd<'_>) -> T) -> Option<T> {
    if fd < 0 {
        return None;
    }
    // SAFETY: not negative; the caller of the driver has it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    guarded(|| what(runtime(), fd))
}

/// Runs something of ours within a call of the application's: a panic ends here, and `errno` stays.
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
    let handle = unsafe { (originals().alloc)(fd, size, page, near, shared) };
    if handle != 0 {
        report(fd, |runtime, fd| runtime.memory_allocated(fd, handle, size));
    }
    handle
}

unsafe extern "C" fn free(fd: c_int, handle: u64) -> c_int {
    // Before the driver can give the handle to another thread.
    let size = report(fd, |runtime, fd| runtime.memory_freeing(fd, handle)).flatten();
    // SAFETY: the caller's own arguments.
    let answer = unsafe { (originals().free)(fd, handle) };
    if answer != 0
        && let Some(size) = size
    {
        report(fd, |runtime, fd| runtime.memory_allocated(fd, handle, size));
    }
    answer
}

unsafe extern "C" fn map(fd: c_int, handle: u64, hint: u64) -> u64 {
    // SAFETY: the caller's own arguments.
    let address = unsafe { (originals().map)(fd, handle, hint) };
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
    let answer = unsafe { (originals().unmap)(fd, address) };
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
    unsafe { (originals().close)(fd) }
}

fn release_functions() -> &'static ReleaseFunctions {
    RELEASE_FUNCTIONS.get().expect("set before the first redirection")
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
    released(releasing, unsafe { (release_functions().release)(device) })
}

unsafe extern "C" fn destroy() -> c_int {
    let releasing = releasing();
    // SAFETY: no arguments.
    released(releasing, unsafe { (release_functions().destroy)() })
}
