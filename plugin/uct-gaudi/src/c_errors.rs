//! How the C functions of `include/ucx_gaudi.h` fail: a code, its text, and the reason of the last failure.

use core::ffi::{CStr, c_char, c_int};
use std::cell::{Cell, OnceCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gaudi::{Error, ErrorKind};

use crate::{environment, status};

/// Bytes of the longest reason, with the zero at its end. Longer ones are cut.
const LONGEST: usize = 2048;

thread_local! {
    /// Why the last call on this thread failed. It stays at one address as long as the thread lives: C programs
    /// keep the pointer longer than they should.
    static REASON: OnceCell<Box<[Cell<u8>; LONGEST]>> = const { OnceCell::new() };
}

/// An error code of docs/errors.md, and its text.
pub(crate) struct Failure(pub(crate) c_int, pub(crate) String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error.kind().code(), status::explain(&error).to_string())
    }
}

/// Runs the body of a C function. Returns 0 or an error code, and keeps the text of the error for
/// [`ucx_gaudi_error`].
pub(crate) fn guarded(body: impl FnOnce() -> Result<(), Failure>) -> c_int {
    let invalid = ErrorKind::InvalidParams.code();
    let bug = |_| Err(Failure(invalid, String::from("internal error (please report)")));
    let body = || {
        environment::take_over();
        body()
    };
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(bug);
    let Failure(code, text) = outcome.err().unwrap_or(Failure(0, String::new()));
    keep(&text);
    code
}

fn keep(reason: &str) {
    // Fails only on a thread that is ending, whose thread-local storage is gone.
    let _ = REASON.try_with(|place| {
        if reason.is_empty() && place.get().is_none() {
            return;
        }
        let place = place.get_or_init(|| Box::new([const { Cell::new(0) }; LONGEST]));
        let longest = reason.len().min(LONGEST - 1);
        let end = (0..=longest).rev().find(|&end| reason.is_char_boundary(end)).unwrap_or(0);
        let bytes =
            reason.as_bytes()[..end].iter().map(|&byte| if byte == 0 { b' ' } else { byte });
        for (cell, byte) in place.iter().zip(bytes.chain([0])) {
            cell.set(byte);
        }
    });
}

/// Why the last call on this thread failed; empty if it did not.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_error() -> *const c_char {
    let reason = REASON.try_with(|place| match place.get() {
        Some(place) => place.as_ptr().cast(),
        None => c"".as_ptr(),
    });
    reason.unwrap_or(c"the thread is ending; see ucx_gaudi_error_string() for the code".as_ptr())
}

/// What a code means, and what to do.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_error_string(code: c_int) -> *const c_char {
    let kind = ErrorKind::ALL.into_iter().find(|kind| kind.code() == code);
    let text = match (kind, code) {
        (Some(kind), _) => text(kind),
        (None, 0) => c"OK: no error",
        (None, _) => c"UNKNOWN: not a code of ucx_gaudi.h; use a header as new as the library",
    };
    text.as_ptr()
}

fn text(kind: ErrorKind) -> &'static CStr {
    match kind {
        ErrorKind::DeviceNotFound => {
            c"DEVICE_NOT_FOUND: no driver library, no card, or none that matches the choice; check `ucx-gaudi doctor`, UCX_GAUDI_COPY_DEVICE and HL_THUNK_LIBRARY"
        }
        ErrorKind::OutOfMemory => {
            c"OUT_OF_MEMORY: no device memory, lockable host memory or file descriptors left; free some, use another card, or raise `ulimit -l` or `ulimit -n`"
        }
        ErrorKind::InvalidParams => {
            c"INVALID_PARAMS: the request is invalid, or this card, driver or generation cannot do it; correct the arguments as ucx_gaudi_error() says"
        }
        ErrorKind::DeviceBusy => {
            c"DEVICE_BUSY: another process owns the card, or it is in reset; end the owner, choose another card, or try again later"
        }
        ErrorKind::DmaFailed => {
            c"DMA_FAILED: the card accepted a copy and failed to execute it, or was reset; look into the kernel log and restart the job"
        }
        ErrorKind::Timeout => {
            c"TIMEOUT: the card or a peer did not answer in time; look into the kernel log and restart the job, or continue the peer if it is stopped"
        }
        ErrorKind::PermissionDenied => {
            c"PERMISSION_DENIED: the driver or the system forbids it; check group and mode of the nodes in /dev/accel, and open cards after a fork"
        }
        ErrorKind::ChannelFailed => {
            c"CHANNEL_FAILED: sharing memory with another device or process failed; as ucx_gaudi_error() says, mostly alignment, the PCI BAR or a limit of the peer"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason() -> String {
        // SAFETY: it ends with a zero, and stays until the next call on this thread.
        unsafe { CStr::from_ptr(ucx_gaudi_error()) }.to_str().expect("UTF-8").to_owned()
    }

    #[test]
    fn the_header_has_the_codes_and_texts_begin_with_their_names() {
        let header = include_str!("../include/ucx_gaudi.h");
        for kind in ErrorKind::ALL {
            let constant = format!("UCX_GAUDI_ERR_{} ", kind.name());
            let line = header.lines().find(|line| line.trim_start().starts_with(&constant));
            let value = line.and_then(|line| line.split_whitespace().nth(2));
            let value = value.and_then(|value| value.trim_end_matches(',').parse().ok());
            assert_eq!(value, Some(kind.code()), "{constant}");
            let text = text(kind).to_str().expect("UTF-8");
            assert!(text.starts_with(&format!("{}: ", kind.name())), "{text}");
            assert!(text.contains("; "), "no remedy: {text}");
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters_and_a_short_one_replaces_it() {
        keep(&"µ".repeat(LONGEST));
        assert_eq!(reason(), "µ".repeat((LONGEST - 1) / 2));
        keep(&"x".repeat(LONGEST));
        assert_eq!(reason().len(), LONGEST - 1);
        keep("a\0b");
        assert_eq!(reason(), "a b");
        keep("");
        assert_eq!(reason(), "");
    }
}
