//! The user of a process.

use std::ffi::CStr;
use std::os::unix::fs::MetadataExt;

/// The user of a process by name, or by number if it has none; empty if the process has ended.
pub(super) fn of_process(pid: u32) -> String {
    let Ok(about) = std::fs::metadata(format!("/proc/{pid}")) else { return String::new() };
    name(about.uid()).unwrap_or_else(|| about.uid().to_string())
}

/// Asks the system's user database, which on a cluster is rarely a file.
fn name(user: u32) -> Option<String> {
    let mut text = [0 as libc::c_char; 4096];
    // SAFETY: only numbers and pointers, so all zeroes is a valid value.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are valid during the call, and the length is that of the text.
    let error = unsafe {
        libc::getpwuid_r(user, &raw mut entry, text.as_mut_ptr(), text.len(), &raw mut found)
    };
    if error != 0 || found.is_null() {
        return None;
    }
    // SAFETY: a terminated string inside the text, which is still alive.
    let name = unsafe { CStr::from_ptr(entry.pw_name) };
    Some(name.to_string_lossy().escape_debug().to_string())
}

#[cfg(test)]
mod tests {
    #[test]
    fn users_have_names_or_numbers() {
        assert_eq!(super::name(0).as_deref(), Some("root"));
        assert_eq!(super::name(u32::MAX - 7), None);
        assert!(!super::of_process(std::process::id()).is_empty());
        assert_eq!(super::of_process(u32::MAX), "");
    }
}
