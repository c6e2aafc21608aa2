//! The C functions of the driver library, by subject.
//!
//! Each one translates: C arguments in, a call into the crate, an errno out. Like the library
//! over the kernel, they leave the cause in `errno` as well as in the result.

#![allow(clippy::not_unsafe_ptr_arg_deref)] // C functions: their callers promise what C promises.

/// Exports C functions. The name after the arrow is the wrapper that runs the body (fault rules find the function by
/// its name) and converts its result: [`status`], [`done`], [`or_minus_one`] or [`handle`].
macro_rules! c_functions {
    (@returns handle) => { u64 };
    (@returns $run:ident) => { core::ffi::c_int };
    ($(
        $(#[doc = $doc:literal])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $run:ident $body:block
    )*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        $(#[doc = $doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> c_functions!(@returns $run) {
            super::$run(stringify!($name), || $body)
        }
    )*};
}

mod commands;
mod events;
mod info;
mod ioctl;
mod memory;
mod nodes;
mod raw_info;
mod refused;
mod scal;
mod signals;
mod telemetry;
mod waits;

pub use commands::*;
pub use events::*;
pub use info::*;
pub use ioctl::*;
pub use memory::*;
pub use nodes::*;
pub use raw_info::*;
pub use refused::*;
pub use scal::*;
pub use signals::*;
pub use telemetry::*;
pub use waits::*;

use core::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

use crate::abi::Value;
use crate::faults::Action;
use crate::guarded;

/// Sets `errno`.
fn set_errno(errno: Errno) {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
}

/// Runs the body of a C function; a panic becomes `EIO` and a line on stderr.
fn guard<T>(name: &str, body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let body = || {
        inject_fault(name)?;
        body()
    };
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        eprintln!("soft-gaudi: {name} panicked; this is a bug in the software device");
        Err(Errno::IO)
    })
}

/// Applies the fault rule for this function, if there is one.
fn inject_fault(name: &str) -> Result<(), Errno> {
    let Ok(node) = crate::node::node() else { return Ok(()) };
    match node.fault(name) {
        None => Ok(()),
        Some(Action::Fail(errno)) => Err(errno),
        Some(Action::Slow(time)) => {
            std::thread::sleep(time);
            Ok(())
        }
        Some(Action::Reset) => {
            crate::context::reset_all();
            Ok(())
        }
        Some(Action::Remove) => {
            crate::context::remove_all();
            Ok(())
        }
        Some(Action::Hang | Action::Late(_) | Action::Flip(_)) => {
            eprintln!(
                "soft-gaudi: faults: {name} can fail or be slow, not hang, be late or flip bits"
            );
            Ok(())
        }
    }
}

/// For functions that return 0 or a descriptor, or a negative errno.
fn status(name: &str, body: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    guard(name, body).unwrap_or_else(|errno| {
        set_errno(errno);
        -errno.raw_os_error()
    })
}

/// For functions that return 0, or a negative errno.
fn done(name: &str, body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    status(name, || body().map(|()| 0))
}

/// For functions that return a value, or -1 with the cause in `errno`.
fn or_minus_one(name: &str, body: impl FnOnce() -> Result<c_int, Errno>) -> c_int {
    guard(name, body).unwrap_or_else(|errno| {
        set_errno(errno);
        -1
    })
}

/// For functions that return a handle or an address, or 0 with the cause in `errno`.
fn handle(name: &str, body: impl FnOnce() -> Result<u64, Errno>) -> u64 {
    guard(name, body).unwrap_or_else(|errno| {
        set_errno(errno);
        0
    })
}

/// A descriptor as C hands it over.
fn borrow<'a>(fd: c_int) -> Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: not -1; whether it is open is found out by the first system call on it, and the
    // borrow ends before the C function returns.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Writes through an out pointer of C: `EINVAL` for NULL, `EFAULT` if it cannot be written.
///
/// Guarded, because a lock may be held: if the program's handler left by `siglongjmp`, the lock would stay locked.
fn put<T>(out: *mut T, value: T) -> Result<(), Errno> {
    if out.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the source is ours, the destination the caller's; a bad one comes back as an error.
    unsafe { guarded::copy(out.cast(), (&raw const value).cast(), size_of::<T>()) }
        .map_err(|_| Errno::FAULT)
}

/// Reads a structure of C; `EINVAL` for NULL, `EFAULT` if it cannot be read.
fn get<T: Value>(input: *const T) -> Result<T, Errno> {
    if input.is_null() {
        return Err(Errno::INVAL);
    }
    const LARGEST: usize = 64;
    const { assert!(T::SIZE <= LARGEST) };
    let mut bytes = [0; LARGEST];
    // SAFETY: the destination is ours, the source the caller's; a bad one comes back as an error.
    unsafe { guarded::copy(bytes.as_mut_ptr(), input.cast(), T::SIZE) }
        .map_err(|_| Errno::FAULT)?;
    Ok(T::load(&bytes))
}
