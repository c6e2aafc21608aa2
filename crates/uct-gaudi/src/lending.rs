//! The C functions for programs that open a card by themselves: `include/ucx_gaudi.h`.
//!
//! They are found in this very library, which the program may load before UCX does
//! (`dlopen("libucx_gaudi.so", RTLD_NOW)`): nothing happens by that.

use core::ffi::{c_char, c_int};
use std::cell::RefCell;
use std::ffi::CString;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use gaudi::{DeviceAddr, Error, ErrorKind, runtime};

use crate::{environment, hooks, status};

thread_local! {
    /// What went wrong last on this thread.
    static REASON: RefCell<CString> = RefCell::new(CString::default());
}

/// A code of docs/errors.md, and words.
pub(crate) struct Failure(pub(crate) c_int, pub(crate) String);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error.kind().code(), status::explain(&error).to_string())
    }
}

/// Runs the body of a C function: 0, or the code of what went wrong, whose words are kept for
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
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    REASON.with(|reason| *reason.borrow_mut() = text);
    code
}

fn run(fd: c_int, body: impl FnOnce(BorrowedFd<'_>) -> Result<(), Error>) -> c_int {
    guarded(|| {
        if fd < 0 {
            let invalid = ErrorKind::InvalidParams.code();
            return Err(Failure(invalid, format!("{fd} is no descriptor")));
        }
        // SAFETY: not negative; whether it is open, the first call on it finds out.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(body(fd)?)
    })
}

/// Lends a card.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_lend(fd: c_int) -> c_int {
    run(fd, |fd| {
        runtime().lend(fd)?;
        hooks::install_if_needed();
        Ok(())
    })
}

/// Ends the loan.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_take_back(fd: c_int) -> c_int {
    run(fd, |fd| runtime().take_back(fd))
}

/// Says that `length` bytes of device memory are mapped at `address`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_memory_mapped(fd: c_int, address: u64, length: u64) -> c_int {
    run(fd, |fd| {
        runtime().add_memory(fd, DeviceAddr(address), length)?;
        hooks::install_if_needed();
        Ok(())
    })
}

/// Says that the memory at `address` is about to be unmapped.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_memory_unmapping(fd: c_int, address: u64) -> c_int {
    let start = DeviceAddr(address);
    run(fd, |fd| {
        let known = runtime().remove_memory(fd, start);
        known.map(drop).ok_or_else(|| Error::unknown_memory(start))
    })
}

/// Why the last call on this thread failed; empty if it did not. Good until the next one.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ucx_gaudi_error() -> *const c_char {
    REASON.with(|reason| reason.borrow().as_ptr())
}
