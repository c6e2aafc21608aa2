//! The driver library's symbols, found at run time.
//!
//! Nothing is loaded before [`Library::load`] is called. A library once loaded is never unloaded:
//! it may have started threads or registered handlers of its own.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use crate::error::check;
use crate::symbols::{Symbols, reason};
use crate::{Error, LoadError, trace};

/// The variable that names the only library to load. Ignored in setuid programs: their user must not
/// choose the code that runs with their rights.
const LIBRARY_VARIABLE: &str = "HL_THUNK_LIBRARY";
/// What is tried if the variable is not set, in this order. The vendor's package installs to a
/// directory that is usually not on the loader's path.
const NAMES: [&str; 3] =
    ["libhl-thunk.so", "libhl-thunk.so.1", "/usr/lib/habanalabs/libhl-thunk.so"];
/// What the software Gaudi calls itself in its version.
const SOFTWARE: &str = "soft-gaudi";
/// Failures in `drop` that are kept for a later query.
const KEPT_DROP_ERRORS: usize = 16;

/// The loaded driver library.
pub struct Library {
    pub(crate) symbols: Symbols,
    name: String,
    version: Option<String>,
    was_loaded: bool,
    drop_errors: Mutex<Vec<Error>>,
    /// Bytes of hardware info that the library wrote, if more than our structure has; else 0.
    hw_info_len: AtomicUsize,
    /// Whether the driver imports dma-bufs, once it has answered.
    pub(crate) imports: OnceLock<bool>,
    // The symbols point into it, and it may have threads of its own: never unloaded.
    _handle: ManuallyDrop<Handle>,
}

/// Whether the program has rights that the user who started it lacks (setuid, setgid, capabilities).
pub(crate) fn is_setuid() -> bool {
    // SAFETY: no requirements; an unknown entry is answered with 0.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name).field("version", &self.version).finish()
    }
}

impl Library {
    /// Loads the library: the one that `HL_THUNK_LIBRARY` names if it is set (and the program is not
    /// setuid), else the first found of `libhl-thunk.so`, `libhl-thunk.so.1` and the vendor's install
    /// directory.
    pub fn load() -> Result<Arc<Self>, LoadError> {
        match std::env::var(LIBRARY_VARIABLE) {
            // The user named this library; another in its place would mislead.
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
        let began = trace::begin();
        // SAFETY: nothing is loaded, so no initialiser runs; the reference is given back at once.
        let was_loaded = unsafe { Handle::open(Some(name), libc::RTLD_NOLOAD | RTLD_NOW) }.is_ok();
        // SAFETY: loading runs the initialisers of the driver library the user installed or named.
        let handle = unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
        // Whatever was loaded stays loaded, also when it turns out to be the wrong library.
        let handle = ManuallyDrop::new(handle.map_err(|error| reason(&error))?);
        let symbols = Symbols::find(&handle)?;
        let version = symbols.version();
        let name = name.to_owned();
        if let Some(began) = began {
            trace::record(began, "load", false, 0, |arguments| {
                trace::write_text(arguments.key("library"), &name);
                trace::write_text(arguments.key("version"), version.as_deref().unwrap_or(""));
            });
        }
        Ok(Self {
            symbols,
            name,
            version,
            was_loaded,
            drop_errors: Mutex::default(),
            hw_info_len: AtomicUsize::new(0),
            imports: OnceLock::new(),
            _handle: handle,
        })
    }

    /// The name or path under which it was found.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the library calls itself, such as `1.10.0-8636f13`.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Whether it is the software Gaudi, whose version string says so.
    pub fn is_software(&self) -> bool {
        self.version().is_some_and(|version| version.contains(SOFTWARE))
    }

    /// Whether other code of this process had loaded it before: an application that uses cards
    /// by itself.
    pub fn was_loaded(&self) -> bool {
        self.was_loaded
    }

    /// The address of one of the library's functions, to interpose on it.
    pub fn function(&self, name: &str) -> Option<*const c_void> {
        // SAFETY: only the address is taken; nothing is called.
        let found = unsafe { self._handle.get::<*const c_void>(name) };
        found.ok().map(|symbol| symbol.into_raw().cast_const())
    }

    /// How many cards there are, counted through their control nodes.
    ///
    /// `None` when the library has no such call.
    pub fn device_count(&self) -> Option<Result<u32, Error>> {
        self.symbols.hlthunk_get_device_count?;
        // SAFETY: takes a plain number.
        let answer = check("hlthunk_get_device_count", || unsafe {
            self.symbols.hlthunk_get_device_count(crate::sys::DEVICE_DONT_CARE).unwrap_or(0)
        });
        Some(answer.map(|count| count as u32))
    }

    /// Bytes of hardware info that the library wrote, if more than this crate knows: its structure is
    /// of another version. The known part is read as always.
    pub fn unknown_hw_info_len(&self) -> Option<usize> {
        Some(self.hw_info_len.load(Ordering::Relaxed)).filter(|&len| len != 0)
    }

    pub(crate) fn record_hw_info_len(&self, len: usize) {
        self.hw_info_len.fetch_max(len, Ordering::Relaxed);
    }

    /// The first failures that happened while things were dropped since the last call.
    pub fn take_drop_errors(&self) -> Vec<Error> {
        std::mem::take(&mut self.drop_errors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn record_drop_error(&self, error: Error) {
        let mut errors = self.drop_errors.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() < KEPT_DROP_ERRORS {
            errors.push(error);
        }
    }
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
