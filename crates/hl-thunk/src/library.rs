//! The driver library's symbols, found at run time.
//!
//! Nothing is loaded before [`Library::load`] is called. A library once loaded is never unloaded:
//! it may have started threads or registered handlers of its own.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

/// Finds only what is loaded already.
const RTLD_NOLOAD: c_int = libc::RTLD_NOLOAD;

use crate::error::check;
use crate::sys::{CsIn, CsOut, DeviceName, HwIpInfo};
use crate::{Error, LoadError};

/// Names the library to load, and no other, when set. Ignored in setuid programs: their user must not
/// choose the code that runs with their rights.
const LIBRARY_VARIABLE: &str = "HL_THUNK_LIBRARY";
/// Where the loader is asked for the library otherwise, in this order. The vendor's package
/// installs to a directory that is usually not on the loader's path.
const NAMES: [&str; 3] =
    ["libhl-thunk.so", "libhl-thunk.so.1", "/usr/lib/habanalabs/libhl-thunk.so"];
/// What the software Gaudi calls itself in its version.
const SOFTWARE: &str = "soft-gaudi";
/// Failures in `drop` that are kept for whoever asks; more are only counted.
const KEPT_DROP_ERRORS: usize = 16;

macro_rules! symbols {
    (
        required { $($name:ident: $type:ty;)* }
        optional { $($optional:ident: $optional_type:ty;)* }
    ) => {
        /// The functions of the library, each with its C signature.
        pub(crate) struct Symbols {
            $(pub(crate) $name: $type,)*
            $(pub(crate) $optional: Option<$optional_type>,)*
        }

        impl Symbols {
            fn find(handle: &Handle) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the signature that hlthunk.h gives this function.
                        let found = unsafe { handle.get::<$type>(stringify!($name)) };
                        *found.map_err(|error| reason(&error))?
                    },)*
                    $($optional: {
                        // SAFETY: as above.
                        let found = unsafe { handle.get::<$optional_type>(stringify!($optional)) };
                        found.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

symbols! {
    required {
        hlthunk_open: unsafe extern "C" fn(DeviceName, *const c_char) -> c_int;
        hlthunk_open_control: unsafe extern "C" fn(c_int, *const c_char) -> c_int;
        hlthunk_close: unsafe extern "C" fn(c_int) -> c_int;
        hlthunk_get_pci_bus_id_from_fd: unsafe extern "C" fn(c_int, *mut c_char, c_int) -> c_int;
        hlthunk_get_hw_ip_info: unsafe extern "C" fn(c_int, *mut HwIpInfo) -> c_int;
        hlthunk_device_memory_alloc: unsafe extern "C" fn(c_int, u64, u64, bool, bool) -> u64;
        hlthunk_device_memory_free: unsafe extern "C" fn(c_int, u64) -> c_int;
        hlthunk_device_memory_map: unsafe extern "C" fn(c_int, u64, u64) -> u64;
        hlthunk_host_memory_map: unsafe extern "C" fn(c_int, *mut c_void, u64, u64) -> u64;
        hlthunk_memory_unmap: unsafe extern "C" fn(c_int, u64) -> c_int;
        hlthunk_request_command_buffer: unsafe extern "C" fn(c_int, u32, *mut u64) -> c_int;
        hlthunk_destroy_command_buffer: unsafe extern "C" fn(c_int, u64) -> c_int;
        hlthunk_command_submission: unsafe extern "C" fn(c_int, *mut CsIn, *mut CsOut) -> c_int;
        hlthunk_wait_for_cs: unsafe extern "C" fn(c_int, u64, u64, *mut u32) -> c_int;
        hlthunk_device_memory_export_dmabuf_fd:
            unsafe extern "C" fn(c_int, u64, u64, u32) -> c_int;
    }
    optional {
        hlthunk_device_mapped_memory_export_dmabuf_fd:
            unsafe extern "C" fn(c_int, u64, u64, u64, u32) -> c_int;
        hlthunk_get_device_count: unsafe extern "C" fn(DeviceName) -> c_int;
        hlthunk_get_hw_block: unsafe extern "C" fn(c_int, u64, *mut u32, *mut u64) -> c_int;
        hlthunk_get_version: unsafe extern "C" fn() -> *mut c_char;
        hlthunk_free: unsafe extern "C" fn(*mut c_void);
        // Not the library's own, but what its calls use: libc's behind the real library, the
        // software device's behind that one. Operations without a wrapper must go the same way.
        ioctl: unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int;
    }
}

/// The loaded driver library.
pub struct Library {
    pub(crate) symbols: Symbols,
    name: String,
    version: Option<String>,
    was_loaded: bool,
    drop_errors: Mutex<DropErrors>,
    // The symbols point into it, and it may have threads of its own: never unloaded.
    _handle: ManuallyDrop<Handle>,
}

/// Whether the program has rights that the user who started it lacks (setuid, setgid, capabilities).
fn is_setuid() -> bool {
    // SAFETY: no requirements; an unknown entry is answered with 0.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

#[derive(Debug, Default)]
struct DropErrors {
    kept: Vec<Error>,
    lost: usize,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish()
    }
}

impl Library {
    /// Loads the library: the one that `HL_THUNK_LIBRARY` names if it is set (and the program is not
    /// setuid), else the first found
    /// of `libhl-thunk.so`, `libhl-thunk.so.1` and the vendor's install directory.
    pub fn load() -> Result<Arc<Self>, LoadError> {
        match std::env::var(LIBRARY_VARIABLE) {
            // Whoever names a library means that one; another in its place would mislead.
            Ok(name) if !name.is_empty() && !is_setuid() => Self::load_first(&[&name])
                .map_err(|error| LoadError { named_by_variable: true, ..error }),
            _ => Self::load_first(&NAMES),
        }
    }

    /// Loads the first of `names` that is a driver library.
    pub fn load_first(names: &[&str]) -> Result<Arc<Self>, LoadError> {
        let mut tried = Vec::new();
        for name in names {
            match Self::load_one(name) {
                Ok(library) => return Ok(Arc::new(library)),
                Err(reason) => tried.push(((*name).to_owned(), reason)),
            }
        }
        Err(LoadError { tried, named_by_variable: false })
    }

    fn load_one(name: &str) -> Result<Self, String> {
        // SAFETY: nothing is loaded, so no initialiser runs; the reference is given back at once.
        let was_loaded = unsafe { Handle::open(Some(name), RTLD_NOLOAD | RTLD_NOW) }.is_ok();
        // SAFETY: loading runs the initialisers of the driver library the user installed or named.
        let handle = unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
        // Whatever was loaded stays loaded, also when it turns out to be the wrong library.
        let handle = ManuallyDrop::new(handle.map_err(|error| reason(&error))?);
        let symbols = Symbols::find(&handle)?;
        let version = version_of(&symbols);
        let drop_errors = Mutex::default();
        let name = name.to_owned();
        Ok(Self { symbols, name, version, was_loaded, drop_errors, _handle: handle })
    }

    /// The name or path under which it was found.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the library calls itself, such as `1.10.0-8636f13`.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Whether it is the software Gaudi: that says so in its version.
    pub fn is_software(&self) -> bool {
        self.version().is_some_and(|version| version.contains(SOFTWARE))
    }

    /// Whether somebody else in this process had loaded it before: an application that uses cards
    /// by itself.
    pub fn was_loaded(&self) -> bool {
        self.was_loaded
    }

    /// The address of one of the library's functions, for whoever stands in for it.
    pub fn function(&self, name: &str) -> Option<*const c_void> {
        // SAFETY: only the address is taken; nothing is called.
        let found = unsafe { self._handle.get::<*const c_void>(name) };
        found.ok().map(|symbol| symbol.into_raw().cast_const())
    }

    /// How many cards there are, counted through their control nodes.
    ///
    /// `None` when the library has no such call.
    pub fn device_count(&self) -> Option<Result<u32, Error>> {
        let count = self.symbols.hlthunk_get_device_count?;
        // SAFETY: takes a plain number.
        let answer =
            check("hlthunk_get_device_count", || unsafe { count(crate::sys::DEVICE_DONT_CARE) });
        Some(answer.map(|count| count as u32))
    }

    /// The failures that happened while things were dropped since the last call, and how many more
    /// there were than could be kept.
    pub fn take_drop_errors(&self) -> (Vec<Error>, usize) {
        let errors = &mut *self.drop_errors.lock().unwrap_or_else(PoisonError::into_inner);
        let DropErrors { kept, lost } = std::mem::take(errors);
        (kept, lost)
    }

    pub(crate) fn record_drop_error(&self, error: Error) {
        let errors = &mut *self.drop_errors.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.kept.len() < KEPT_DROP_ERRORS {
            errors.kept.push(error);
        } else {
            errors.lost += 1;
        }
    }
}

/// The loader's own words, which libloading keeps as the source of its error.
fn reason(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| source.to_string())
}

fn version_of(symbols: &Symbols) -> Option<String> {
    let get = symbols.hlthunk_get_version?;
    // SAFETY: no arguments; the result is a string the caller owns, or null.
    let text = unsafe { get() };
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and the library terminates it.
    let version = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    if let Some(free) = symbols.hlthunk_free {
        // SAFETY: allocated by the library for its caller and not used any more.
        unsafe { free(text.cast()) };
    }
    Some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_load_says_everything_that_was_tried() {
        let error = Library::load_first(&["libno-such-1.so", "libno-such-2.so"]).unwrap_err();
        assert_eq!(error.tried.len(), 2);
        let text = error.to_string();
        assert!(text.contains("libno-such-1.so") && text.contains("libno-such-2.so"), "{text}");
    }

    #[test]
    fn a_library_without_the_calls_is_refused_by_naming_one() {
        let error = Library::load_first(&["libc.so.6"]).unwrap_err();
        assert!(error.to_string().contains("hlthunk_open"), "{error}");
    }
}
