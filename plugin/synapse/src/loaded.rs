//! Which libraries are in the process, without loading any and without touching a file.
//!
//! `dlopen` with `RTLD_NOLOAD` alone is not enough: it does not find a library that was loaded by path and has no
//! `SONAME`, and searches the file system for one that is not there. The loader's own list has all of them.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// A library of the process, which stays in it as long as this exists.
#[derive(Debug)]
pub struct Loaded {
    handle: *mut c_void,
    path: String,
}

// SAFETY: the loader's functions may be called from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Loaded {
    /// The library of the process whose file is called `name` (such as `libSynapse`): `name.so`, with a version
    /// behind it or not, or `name-….so`, as wheels rename what they bundle.
    pub fn find(name: &str) -> Option<Loaded> {
        let mut search = Search { name, found: None };
        // SAFETY: the callback has the type of the search that it gets.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        let path = search.found?;
        // SAFETY: nothing is loaded, so no initialiser runs.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let path = path.to_string_lossy().into_owned();
        (!handle.is_null()).then_some(Loaded { handle, path })
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The address of a function; null if there is none.
    pub fn function(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is ours, and the name is terminated.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: ours, and given up here.
        unsafe { libc::dlclose(self.handle) };
    }
}

struct Search<'a> {
    name: &'a str,
    found: Option<CString>,
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _len: usize,
    search: *mut c_void,
) -> c_int {
    // SAFETY: the loader's entry, and the search that was handed over with this function.
    let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
    if info.dlpi_name.is_null() {
        return 0;
    }
    // SAFETY: the loader's string.
    let path = unsafe { CStr::from_ptr(info.dlpi_name) };
    if is_named(&path.to_string_lossy(), search.name) {
        search.found = Some(path.to_owned());
        return 1;
    }
    0
}

/// Whether the file at `path` is called `name.so…` or `name-….so…`.
fn is_named(path: &str, name: &str) -> bool {
    let file = path.rsplit('/').next().unwrap_or_default();
    let Some(rest) = file.strip_prefix(name) else { return false };
    let versioned = |rest: &str| rest == ".so" || rest.starts_with(".so.");
    versioned(rest)
        || rest.starts_with('-') && rest.find(".so").is_some_and(|at| versioned(&rest[at..]))
}

/// How many libraries the process has loaded so far: while that is the same, none was added.
fn loads() -> u64 {
    let mut loads = 0_u64;
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, _: usize, to: *mut c_void) -> c_int {
        // SAFETY: the loader's entry, and the number that was handed over with this function.
        unsafe { *to.cast::<u64>() = (*info).dlpi_adds };
        1
    }
    // SAFETY: the callback has the type of the number that it gets.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut loads).cast()) };
    loads
}

/// Tells whether the list has to be searched again.
#[derive(Debug)]
pub(crate) struct Changes(AtomicU64);

impl Changes {
    pub(crate) const fn new() -> Self {
        Changes(AtomicU64::new(0))
    }

    /// Runs `look` if a library was loaded since the last finished search began. Returns what it found.
    pub(crate) fn look_if_any<T>(&self, look: impl FnOnce() -> T) -> Option<T> {
        let now = loads();
        if self.0.load(Ordering::Relaxed) == now {
            return None;
        }
        let found = look();
        // Stored after the search: another thread that asks meanwhile must not skip it.
        self.0.store(now, Ordering::Relaxed);
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_recognised_by_their_names() {
        for path in [
            "/usr/lib/habanalabs/libSynapse.so",
            "libSynapse.so",
            "/opt/libSynapse.so.1.21",
            "/wheel.libs/libSynapse-0a1b2c3d.so.1",
        ] {
            assert!(is_named(path, "libSynapse"), "{path}");
        }
        for path in [
            "/usr/lib/habanalabs/libSynapseMme.so",
            "/home/libSynapse.so/libhl-thunk.so",
            "/x/libSynapse.sofa",
            "/x/libSynapse-notes.txt",
            "",
        ] {
            assert!(!is_named(path, "libSynapse"), "{path}");
        }
    }

    #[test]
    fn what_is_loaded_is_found_and_nothing_else_is_loaded() {
        let libc = Loaded::find("libc").expect("this program has it");
        assert!(!libc.function(c"getpid").is_null());
        assert!(libc.function(c"synInitialize").is_null());
        assert!(Loaded::find("libSynapse").is_none());
    }

    #[test]
    fn a_library_that_is_loaded_is_a_change_once() {
        let changes = Changes::new();
        assert_eq!(changes.look_if_any(|| 1), Some(1), "the first look");
        assert_eq!(changes.look_if_any(|| 2), None);
        // SAFETY: a library of the system without initialisers that matter.
        let handle = unsafe { libc::dlopen(c"libresolv.so.2".as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            eprintln!("skipped: no libresolv.so.2 to load");
            return;
        }
        assert_eq!(changes.look_if_any(|| 3), Some(3));
    }
}
