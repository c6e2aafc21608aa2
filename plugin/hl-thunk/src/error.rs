//! Failures of driver calls: the call's name and its errno, never reduced to anything coarser.

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

/// The driver library could not be loaded: every place that was tried, and the reason why it failed.
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

/// What a call returns.
pub(crate) trait Outcome: Copy {
    /// The errno, if it failed; `errno` is the thread's, 0 where the call did not set it.
    fn failure(self, errno: i32) -> Option<i32>;
}

/// A value >= 0, or -errno, or -1 with errno set. The library mixes the last two even within one function; -1 without
/// errno can only be -EPERM.
impl Outcome for i32 {
    fn failure(self, errno: i32) -> Option<i32> {
        match self {
            0.. => None,
            -1 => Some(if errno == 0 { libc::EPERM } else { errno }),
            code => Some(code.checked_neg().unwrap_or(libc::EIO)),
        }
    }
}

/// 0 for any failure, with the cause in errno.
impl Outcome for u64 {
    fn failure(self, errno: i32) -> Option<i32> {
        (self == 0).then_some(if errno == 0 { libc::EIO } else { errno })
    }
}

/// Makes a call, with errno cleared before it.
pub(crate) fn check<T: Outcome>(call: &'static str, f: impl FnOnce() -> T) -> Result<T, Error> {
    // SAFETY: errno is this thread's own and always writable.
    unsafe { *libc::__errno_location() = 0 };
    let ret = f();
    // SAFETY: as above.
    match ret.failure(unsafe { *libc::__errno_location() }) {
        None => Ok(ret),
        Some(errno) => Err(Error::new(call, errno)),
    }
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
        assert_eq!(check("g", || 0_u64), Err(Error::new("g", libc::EIO)));
        let failed = check("g", || {
            set_errno(libc::ENOMEM);
            0_u64
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
