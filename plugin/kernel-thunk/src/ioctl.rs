//! The driver's calls: numbers, argument structures, and how a call is repeated.

use std::ffi::{c_int, c_ulong};
use std::mem::size_of;

/// An argument structure, with the number of the call it belongs to.
pub trait Argument: Copy {
    /// As DRM counts: direction, size, type and number.
    const NUMBER: c_ulong;
}

/// `DRM_IOCTL_HL_*`: both directions, type `d`, numbers from 0x40 on.
const fn number<T>(index: c_ulong) -> c_ulong {
    const BOTH: c_ulong = 3 << 30;
    BOTH | (size_of::<T>() as c_ulong) << 16 | (b'd' as c_ulong) << 8 | (0x40 + index)
}

macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident = $index:literal, $size:literal bytes {
        $($field:ident: $type:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default)]
            #[allow(missing_docs, reason = "the kernel's names")]
            pub struct $name { $(pub $field: $type,)* }
            const _: () = assert!(size_of::<$name>() == $size);
            impl Argument for $name {
                const NUMBER: c_ulong = number::<$name>($index);
            }
        )*
    };
}

arguments! {
    /// `struct hl_info_args`.
    Info = 0, 24 bytes { pointer: u64, size: u32, op: u32, argument: u32, pad: u32, }
    /// `union hl_cb_args`; in the answer the handle takes the place of the given one, and a count that of its first half.
    CommandBuffer = 1, 24 bytes { handle: u64, op: u32, size: u32, context: u32, flags: u32, }
    /// `union hl_cs_args`; the answer has the sequence number first, the status and counts after it.
    Submission = 2, 48 bytes {
        restore: u64, execute: u64, sequence: u64, restores: u32, executes: u32, timeout: u32,
        flags: u32, context: u32, pad: u32,
    }
    /// `union hl_wait_cs_args`; the answer: status and flags first, then a time.
    Wait = 3, 56 bytes {
        sequence: u64, timeout: u64, context: u32, flags: u32, interrupt_timeout: u64,
        counters_offset: u64, timestamps: u64, timestamps_offset: u64,
    }
    /// `union hl_mem_args`; what the first three mean depends on the operation.
    Memory = 4, 40 bytes {
        first: u64, second: u64, third: u64, op: u32, flags: u32, context: u32, elements: u32,
    }
}

/// Calls the driver, and repeats the call on `EINTR` and `EAGAIN`. Returns 0, or a negative errno, which is also in `errno`.
///
/// DRM copies the structure back even on failure, so each attempt starts with the original argument.
pub fn call<T: Argument>(fd: c_int, argument: &mut T) -> c_int {
    let question = *argument;
    loop {
        *argument = question;
        // SAFETY: the structure is the one this number stands for; what it points to is its maker's promise.
        if unsafe { libc::ioctl(fd, T::NUMBER, argument as *mut T) } != -1 {
            return 0;
        }
        match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            Some(errno) => return -errno,
            None => return -libc::EIO,
        }
    }
}

/// As [`call`], with the answer.
pub fn ask<T: Argument>(fd: c_int, mut argument: T) -> Result<T, c_int> {
    match call(fd, &mut argument) {
        0 => Ok(argument),
        error => Err(error),
    }
}

/// Writes the answer to `place`. If that is null, the driver is not called.
///
/// # Safety
/// `place` is null or valid for writing.
pub unsafe fn answer<T>(place: *mut T, ask: impl FnOnce() -> Result<T, c_int>) -> c_int {
    if place.is_null() {
        return -libc::EINVAL;
    }
    match ask() {
        Ok(value) => {
            // SAFETY: the caller's promise.
            unsafe { place.write(value) };
            0
        }
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_kernels() {
        let numbers =
            [Info::NUMBER, CommandBuffer::NUMBER, Submission::NUMBER, Wait::NUMBER, Memory::NUMBER];
        let kernel = [0xc018_6440, 0xc018_6441, 0xc030_6442, 0xc038_6443, 0xc028_6444];
        assert_eq!(numbers, kernel);
    }

    #[test]
    fn a_call_on_something_else_than_a_card_returns_its_errno() {
        let mut info = Info::default();
        assert_eq!(call(-1, &mut info), -libc::EBADF);
    }
}
