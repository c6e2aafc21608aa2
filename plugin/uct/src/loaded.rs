//! Finding the libraries of *the* UCX that called us, among possibly several in the process.
//!
//! Wheels mangle library names and map them with `RTLD_LOCAL`, so neither names nor the global
//! symbol scope can be relied on. What is reliable is the address we were called from: it lies in
//! the libucs that loads us, and every other library of the same copy resolves `ucs_*` symbols
//! to that very libucs.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;

/// A symbol of libucs that every build exports.
const UCS_WITNESS: &CStr = c"ucs_log_dispatch";
/// The same of libuct.
const UCT_WITNESS: &CStr = c"uct_component_register";

/// A handle on a library that was mapped already; pinned, never closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded {
    /// Where symbols are looked up: the library, or the global scope if the library is in it.
    scope: *mut c_void,
}

// SAFETY: a dlopen handle may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above; dlsym is thread-safe.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// Opens the library that is mapped under `path`, and pins it for ever if `wanted` accepts it.
    /// Loads nothing.
    fn pin_if(path: &CStr, wanted: impl FnOnce(Loaded) -> bool) -> Option<Loaded> {
        let look = |more| {
            // SAFETY: RTLD_NOLOAD only ever finds what is mapped; no constructor runs.
            let scope =
                unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD | more) };
            (!scope.is_null()).then_some(Loaded { scope })
        };
        let library = look(0)?;
        let pinned = if wanted(library) { look(libc::RTLD_NODELETE) } else { None };
        // SAFETY: gives back the reference taken above; a pinned library has another.
        unsafe { libc::dlclose(library.scope) };
        pinned
    }

    /// Loads a library, for ever.
    pub(crate) fn open(path: &std::path::Path) -> Result<Loaded, String> {
        use std::os::unix::ffi::OsStrExt;
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the caller names a library of UCX, whose constructors may run at any time.
        let scope = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if scope.is_null() {
            // SAFETY: dlopen failed on this thread, so there is a message.
            let reason = unsafe { CStr::from_ptr(libc::dlerror()) };
            return Err(reason.to_string_lossy().into_owned());
        }
        Ok(Loaded { scope })
    }

    /// Looks symbols up the way the library itself does. A program that is linked to UCX and uses one
    /// of its variables has a copy of it ("copy relocation"). From then on the library uses that copy,
    /// too. The library's own variable is dead, but its handle still finds it.
    ///
    /// `own` is a function of the library. If the global scope resolves it to the same address, the
    /// library is in the global scope.
    fn as_seen_by_itself(self, own: &CStr) -> Loaded {
        let global = Loaded { scope: libc::RTLD_DEFAULT };
        if global.symbol(own) == self.symbol(own) { global } else { self }
    }

    /// The address of a symbol of the library.
    pub(crate) fn symbol(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the scope is valid for ever (never closed) and the name is a C string.
        let address = unsafe { libc::dlsym(self.scope, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

/// Where an address is mapped: base and path of its library.
fn object_of(address: *const c_void) -> Option<(*mut c_void, CString)> {
    let mut info = core::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr only looks the address up; `info` is written when it returns non-zero.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
    if found == 0 {
        return None;
    }
    // SAFETY: dladdr succeeded (and the structure was zeroed before).
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives a NUL-terminated path owned by the loader.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_owned();
    Some((info.dli_fbase, path))
}

/// The libraries of one UCX copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Libraries {
    /// Load address of libucs: the identity of the copy.
    pub(crate) ucs_base: usize,
    pub(crate) ucs: Loaded,
    pub(crate) uct: Loaded,
}

/// Why the caller's UCX could not be found.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The caller of our entry point is not libucs.
    #[error("not called from libucs but from {0}")]
    NotUcs(String),
    /// libucs is there, but no libuct that belongs to it.
    #[error("no libuct mapped that belongs to {0}")]
    NoUct(String),
}

/// Finds libucs and libuct of the copy that `caller` (a return address) belongs to.
pub(crate) fn find(caller: *const c_void) -> Result<Libraries, FindError> {
    let unknown = || FindError::NotUcs(String::from("an address in no library"));
    let (ucs_base, path) = object_of(caller).ok_or_else(unknown)?;
    let name = || path.to_string_lossy().into_owned();
    let is_ucs = |library| witness_base(library) == Some(ucs_base);
    let ucs = Loaded::pin_if(&path, is_ucs).ok_or_else(|| FindError::NotUcs(name()))?;
    let uct = belonging(ucs_base, "libuct").ok_or_else(|| FindError::NoUct(name()))?;
    Ok(Libraries {
        ucs_base: ucs_base as usize,
        ucs: ucs.as_seen_by_itself(UCS_WITNESS),
        uct: uct.as_seen_by_itself(UCT_WITNESS),
    })
}

/// The mapped library called `prefix` (`libuct.so.0`, `libuct-1a2b3c.so.0.0.0`, but not
/// `libuct_cma…`) whose libucs is the one at `ucs_base`.
pub(crate) fn belonging(ucs_base: *mut c_void, prefix: &str) -> Option<Loaded> {
    mapped_paths()
        .iter()
        .filter(|path| is_library(path, prefix))
        .find_map(|path| Loaded::pin_if(path, |library| witness_base(library) == Some(ucs_base)))
}

fn witness_base(library: Loaded) -> Option<*mut c_void> {
    object_of(library.symbol(UCS_WITNESS)?).map(|(base, _)| base)
}

fn is_library(path: &CStr, prefix: &str) -> bool {
    let path = path.to_bytes();
    let start = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    path[start..]
        .strip_prefix(prefix.as_bytes())
        .is_some_and(|rest| matches!(rest.first(), Some(b'.' | b'-')))
}

/// Paths of everything the loader has mapped.
fn mapped_paths() -> Vec<CString> {
    unsafe extern "C" fn collect(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        paths: *mut c_void,
    ) -> c_int {
        // SAFETY: the loader passes a valid entry, and `paths` is the vector given below.
        let (name, paths) =
            unsafe { ((*info).dlpi_name.cast::<c_char>(), &mut *paths.cast::<Vec<CString>>()) };
        if !name.is_null() {
            // SAFETY: the loader's names are NUL-terminated.
            paths.push(unsafe { CStr::from_ptr(name) }.to_owned());
        }
        0
    }
    let mut paths = Vec::new();
    // SAFETY: `collect` matches the callback type and `paths` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut paths).cast()) };
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_names_are_not_the_library_itself() {
        assert!(is_library(c"/usr/lib/libuct.so.0", "libuct"));
        assert!(is_library(c"libuct-14c218c5.so.0.0.0", "libuct"));
        assert!(!is_library(c"/usr/lib/ucx/libuct_cma.so.0", "libuct"));
        assert!(!is_library(c"/usr/lib/libucs.so.0", "libuct"));
        assert!(!is_library(c"/opt/libuct.so.0/other.so", "libuct"));
    }

    #[test]
    fn a_caller_outside_libucs_is_refused() {
        let here = a_caller_outside_libucs_is_refused as *const c_void;
        assert!(matches!(find(here), Err(FindError::NotUcs(_))));
    }
}
