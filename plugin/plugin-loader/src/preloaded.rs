//! The entry for UCX 1.21, which loads only the modules it was built with. libuct and `ucx_perftest` have libucs load
//! their modules by `ucs_load_modules`. This file, when preloaded, defines that function: it registers the engine
//! first, then calls the function of the libucs that was meant.
//!
//! A UCX that looks for plugins itself is left alone. Another UCX may be too old: then the engine says so.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use core::ptr;

/// `ucs_init_once_t`.
#[repr(C)]
struct Once {
    lock: libc::pthread_mutex_t,
    initialised: c_int,
}

type LoadModules = unsafe extern "C" fn(*const c_char, *const c_char, *mut Once, c_uint);
type HasField = unsafe extern "C" fn(*const c_char) -> c_int;
type Enter = unsafe extern "C" fn(*const c_void) -> i8;

/// Of libucs: loads the modules of a framework, once. `once` is a variable of the calling library, and identifies its
/// copy of UCX. The return address does not: libuct_ib calls at the end of its constructor, by a jump.
///
/// # Safety
/// For UCX to call.
#[unsafe(no_mangle)]
unsafe extern "C" fn ucs_load_modules(
    framework: *const c_char,
    modules: *const c_char,
    once: *mut Once,
    flags: c_uint,
) {
    let theirs = meant_by(once.cast());
    if theirs.is_null() {
        return;
    }
    // SAFETY: the function of libucs in whose place UCX called ours. Strings and lock are UCX's own.
    unsafe {
        let uct = libc::strcmp(framework, c"uct".as_ptr()) == 0;
        let served = (uct || libc::strcmp(framework, c"ucx_perftest".as_ptr()) == 0)
            && !looks_for_plugins(theirs)
            && register(once, theirs);
        let mut others = [0; 512];
        let modules = if served && uct { without_gaudi(modules, &mut others) } else { modules };
        let theirs = core::mem::transmute::<*mut c_void, LoadModules>(theirs);
        theirs(framework, modules, once, flags);
    }
}

/// A symbol of the library at this address, or of its dependencies.
fn symbol(address: *const c_void, name: &CStr) -> *mut c_void {
    let mut library = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: a look-up, a handle on what is loaded already, and that handle given back.
    unsafe {
        if libc::dladdr(address, &mut library) == 0 {
            return ptr::null_mut();
        }
        let handle = libc::dlopen(library.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if handle.is_null() {
            return ptr::null_mut();
        }
        let found = libc::dlsym(handle, name.as_ptr());
        libc::dlclose(handle);
        found
    }
}

/// The `ucs_load_modules` that this caller would call without us: several copies of UCX may be loaded.
fn meant_by(caller: *const c_void) -> *mut c_void {
    let found = symbol(caller, c"ucs_load_modules");
    if !found.is_null() && found != ucs_load_modules as *mut c_void {
        return found;
    }
    // The caller is the program itself: take the next definition in the global scope after ours.
    // SAFETY: a look-up by name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, c"ucs_load_modules".as_ptr()) }
}

/// Whether the UCX with this libucs has `UCX_PLUGIN_PATH`.
fn looks_for_plugins(ucs: *const c_void) -> bool {
    let has_field = symbol(ucs, c"ucs_config_global_list_has_field");
    // SAFETY: libucs declares the function so; it reads lists that were made when libucs was loaded.
    !has_field.is_null()
        && unsafe {
            let has_field = core::mem::transmute::<*mut c_void, HasField>(has_field);
            has_field(c"PLUGIN_PATH".as_ptr()) != 0
        }
}

/// Registers the engine with this libucs' UCX, unless UCX has loaded its modules already. Returns whether it did.
///
/// # Safety
/// UCX's own `once`.
unsafe fn register(once: *mut Once, ucs: *const c_void) -> bool {
    // SAFETY: as the caller promises. A thread that waits for the lock finds the engine registered.
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*once).lock);
        let enter = match (*once).initialised {
            0 => crate::engine(c"__uct_plugin_entry"),
            _ => ptr::null(),
        };
        let registered =
            !enter.is_null() && core::mem::transmute::<*const c_void, Enter>(enter)(ucs) == 0;
        libc::pthread_mutex_unlock(&raw mut (*once).lock);
        registered
    }
}

/// A list such as `:cuda:gaudi:cma` without UCX's own module for Gaudis, which we replace.
///
/// # Safety
/// `list` is a C string; the result lives as long as both arguments.
unsafe fn without_gaudi(list: *const c_char, others: &mut [c_char; 512]) -> *const c_char {
    const OWN: &CStr = c":gaudi";
    // SAFETY: inside the string, which is shorter than the array where it is copied.
    unsafe {
        let at = libc::strstr(list, OWN.as_ptr());
        let rest = if at.is_null() { at } else { at.add(OWN.count_bytes()) };
        let is_it = !at.is_null() && (*rest == 0 || *rest == b':' as c_char);
        if !is_it || libc::strlen(list) >= others.len() {
            return list;
        }
        let before = at.offset_from_unsigned(list);
        ptr::copy_nonoverlapping(list, others.as_mut_ptr(), before);
        libc::strcpy(others.as_mut_ptr().add(before), rest);
    }
    others.as_ptr()
}
