//! The file that UCX finds in `UCX_PLUGIN_PATH`: it opens the engine, `../libucx_gaudi.so` as seen from
//! itself, and passes UCX's call on.
//!
//! UCX looks for the plugin under several names. If the engine itself were copied to each of them, a process would
//! have several engines, none of which knows the others' memory; links do not survive every package format. This
//! library has no state, so any number of copies is harmless. A dependency on the engine instead of code would not
//! work: UCX ignores an entry point that it finds in a dependency, and reports nothing if a dependency is missing.
//!
//! The same file is for `LD_PRELOAD`, with a UCX that has no `UCX_PLUGIN_PATH` (`preloaded.rs`).
//!
//! `cargo xtask build` compiles it with `panic=abort` and without the standard library, to a few kilobytes;
//! the workspace, which unwinds, can only check it with the standard library.

#![cfg_attr(panic = "abort", no_std)]

mod preloaded;

use core::arch::naked_asm;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

/// `UCS_ERR_UNSUPPORTED`: UCX unloads this file and goes on without it.
const UNSUPPORTED: c_int = -22;

/// Called by libucs after it loaded this library.
///
/// The engine finds that libucs by the return address on the stack, so this function must jump to it, not call it.
///
/// # Safety
/// For UCX only, after it loaded this file.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucs_module_global_init() -> c_int {
    // The stack is 8 bytes off its alignment on entry.
    naked_asm!("sub rsp, 8", "call {find}", "add rsp, 8", "jmp rax", find = sym find)
}

unsafe extern "C" {
    fn dprintf(fd: c_int, format: *const c_char, ...) -> c_int;
}

/// Nothing here panics.
#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: has no preconditions.
    unsafe { libc::abort() }
}

extern "C" fn refuse() -> c_int {
    UNSUPPORTED
}

/// The engine's entry point, or one that refuses, after a line that says why.
extern "C" fn find() -> *const c_void {
    match engine(c"ucs_module_global_init") {
        entry if entry.is_null() => refuse as *const c_void,
        entry => entry,
    }
}

/// An entry point of the engine, or null after a line that says why.
fn engine(entry: &CStr) -> *const c_void {
    let mut path = [0 as c_char; libc::PATH_MAX as usize];
    let mut own = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: `own` and `path` are as large as the functions want. Where one of them fails, the next is not
    // called. `path` holds an absolute path of two components at least, so that `strrchr` finds a slash
    // twice; `snprintf` ends it within the array. The engine's constructors may run at any time.
    unsafe {
        // This function's own address: the exported one might be another library's.
        if libc::dladdr(find as *const c_void, &mut own) == 0
            || libc::realpath(own.dli_fname, path.as_mut_ptr()).is_null()
        {
            return ptr::null();
        }
        for _ in 0..2 {
            let slash = libc::strrchr(path.as_ptr(), c_int::from(b'/'));
            if slash.is_null() {
                return ptr::null();
            }
            *slash = 0;
        }
        let end = libc::strlen(path.as_ptr());
        let name = c"/libucx_gaudi.so";
        libc::snprintf(path.as_mut_ptr().add(end), path.len() - end, c"%s".as_ptr(), name.as_ptr());
        let engine = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if !engine.is_null() {
            let entry = libc::dlsym(engine, entry.as_ptr());
            if !entry.is_null() {
                return entry;
            }
        }
        // ucx_perftest loads both plugins; one line is enough. A path without a slash is a name.
        let slash = libc::strrchr(own.dli_fname, c_int::from(b'/'));
        let file = if slash.is_null() { own.dli_fname } else { slash.cast_const() };
        if libc::strstr(file, c"perftest".as_ptr()).is_null() {
            dprintf(
                libc::STDERR_FILENO,
                c"ucx-gaudi: not loaded: %s (the engine belongs one folder above %s: install all of \
                  ucx-gaudi under one prefix)\n"
                    .as_ptr(),
                libc::dlerror(),
                own.dli_fname,
            );
        }
    }
    ptr::null()
}
