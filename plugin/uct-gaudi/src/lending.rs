//! The C functions for programs that open a card by themselves: `include/ucx_gaudi.h`.
//!
//! This library exports them. The program may load it before UCX does
//! (`dlopen("libucx_gaudi.so", RTLD_NOW)`); that alone has no effect.

use core::ffi::c_int;
use std::os::fd::BorrowedFd;

use gaudi::{DeviceAddr, Error, ErrorKind, runtime};

use crate::c_errors::{Failure, guarded};
use crate::hooks;

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
