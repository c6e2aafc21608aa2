//! A `libhl-thunk.so` for the kernel's own `habanalabs` driver, from Linux 6.8 on.
//!
//! The vendor's published library speaks the ioctls of older kernels; on a newer one every call of it fails. This
//! one speaks the DRM ioctls that replaced them, and looks for sysfs attributes where those kernels have them.
//! Otherwise it behaves as the vendor's: results, `errno` and repetition are part of the contract. It has the
//! functions that the plugin uses, and no others.
//!
//! Functions are thin: [`ioctl`] has the calls, [`nodes`] finds and opens cards, [`info`] asks, [`memory`]
//! and [`commands`] act, [`waits`] waits. No function panics; a null pointer for an answer is `-EINVAL`.

pub mod commands;
pub mod info;
pub mod ioctl;
pub mod memory;
pub mod nodes;
pub mod waits;

use std::ffi::{c_char, c_void};

/// What this library calls itself.
const VERSION: &std::ffi::CStr = c"1.10.0-kernel-thunk";

/// The version, to be released with [`hlthunk_free`].
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_version() -> *mut c_char {
    // SAFETY: a terminated string.
    unsafe { libc::strdup(VERSION.as_ptr()) }
}

/// Releases what this library has allocated for its caller.
///
/// # Safety
/// `memory` is null or comes from a function here, and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_free(memory: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { libc::free(memory) };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    #[test]
    fn it_has_the_functions_that_the_plugin_uses_and_no_others() {
        let words = |text: &'static str| {
            text.split(|it: char| !it.is_alphanumeric() && it != '_')
                .filter(|word| word.starts_with("hlthunk_"))
        };
        let used: BTreeSet<_> = words(include_str!("../../hl-thunk/src/symbols.rs")).collect();
        let sources = [
            include_str!("commands.rs"),
            include_str!("info.rs"),
            include_str!("lib.rs"),
            include_str!("memory.rs"),
            include_str!("nodes.rs"),
            include_str!("waits.rs"),
        ];
        let exported = sources.iter().flat_map(|text| text.split("extern \"C\" fn ").skip(1));
        let exported: BTreeSet<_> = exported.filter_map(|text| words(text).next()).collect();
        assert_eq!(exported, used);
    }
}
