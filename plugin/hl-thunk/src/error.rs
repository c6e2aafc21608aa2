//! What a driver call answered: its name and its errno, never flattened into anything coarser.

use std::fmt;

/// A driver call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    /// The C function, or the ioctl, that failed.
    pub call: &'static str,
    /// What it answered, as a positive errno.
    pub errno: i32,
}

impl Error {
    pub(crate) fn new(call: &'static str, errno: i32) -> Self {
        Self { call, errno }
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The text ends in "(os error N)".
        write!(f, "{}: {}", self.call, std::io::Error::from_raw_os_error(self.errno))
    }
}

/// The driver library could not be loaded: every place that was tried, and why it did not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// Name or path, and the reason.
    pub tried: Vec<(String, String)>,
    /// Whether it was the one that `HL_THUNK_LIBRARY` names.
    pub named_by_variable: bool,
}

impl std::error::Error for LoadError {}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no usable Gaudi driver library (")?;
        for (at, (name, reason)) in self.tried.iter().enumerate() {
            // The loader repeats the name in front of its reason.
            let reason = reason.strip_prefix(&format!("{name}: ")).unwrap_or(reason);
            write!(f, "{}{name}: {reason}", if at == 0 { "" } else { "; " })?;
        }
        f.write_str(")")
    }
}

/// Reads the answer of a call that returns a value >= 0, or -errno, or -1 with errno set.
///
/// The library mixes the last two conventions even within one function; with errno cleared before
/// the call they can be told apart: -1 with errno 0 can only be -EPERM.
pub(crate) fn check(call: &'static str, f: impl FnOnce() -> i32) -> Result<i32, Error> {
    clear_errno();
    let rc = f();
    match rc {
        0.. => Ok(rc),
        -1 => Err(Error::new(call, last_errno().unwrap_or(libc::EPERM))),
        _ => Err(Error::new(call, rc.checked_neg().unwrap_or(libc::EIO))),
    }
}

/// Reads the answer of a call that returns 0 for any failure and leaves the cause in errno.
pub(crate) fn check_nonzero(call: &'static str, f: impl FnOnce() -> u64) -> Result<u64, Error> {
    clear_errno();
    match f() {
        0 => Err(Error::new(call, last_errno().unwrap_or(libc::EIO))),
        value => Ok(value),
    }
}

fn clear_errno() {
    // SAFETY: errno is this thread's own and always writable.
    unsafe { *libc::__errno_location() = 0 };
}

fn last_errno() -> Option<i32> {
    // SAFETY: errno is this thread's own and always readable.
    let errno = unsafe { *libc::__errno_location() };
    (errno != 0).then_some(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_errno(errno: i32) {
        // SAFETY: errno is this thread's own and always writable.
        unsafe { *libc::__errno_location() = errno };
    }

    #[test]
    fn both_failure_conventions_keep_their_errno() {
        assert_eq!(check("f", || 7), Ok(7));
        assert_eq!(check("f", || -libc::EBUSY), Err(Error::new("f", libc::EBUSY)));
        let both = check("f", || {
            set_errno(libc::EBUSY);
            -1
        });
        assert_eq!(both, Err(Error::new("f", libc::EBUSY)));
        assert_eq!(check("f", || -libc::EPERM), Err(Error::new("f", libc::EPERM)));
        assert_eq!(check("f", || i32::MIN), Err(Error::new("f", libc::EIO)));
    }

    #[test]
    fn errno_left_over_from_earlier_is_not_mistaken_for_this_call() {
        set_errno(libc::ENOENT);
        assert_eq!(check_nonzero("g", || 0), Err(Error::new("g", libc::EIO)));
        let failed = check_nonzero("g", || {
            set_errno(libc::ENOMEM);
            0
        });
        assert_eq!(failed, Err(Error::new("g", libc::ENOMEM)));
    }

    #[test]
    fn load_error_names_everything_tried_once() {
        let error = LoadError {
            tried: vec![
                ("a.so".into(), "a.so: cannot open".into()),
                ("b.so".into(), "symbol x missing".into()),
            ],
            named_by_variable: false,
        };
        assert_eq!(
            error.to_string(),
            "no usable Gaudi driver library (a.so: cannot open; b.so: symbol x missing)"
        );
    }
}
