//! The `ioctl` that this library exports, for operations that the driver library does not wrap.
//!
//! The import of a dma-buf is a raw ioctl on the device's descriptor. Callers find this function
//! by `dlsym` on the library's handle; with the real library they find libc's. Everything that is
//! not for a card of ours goes on to the kernel, so a program in which this symbol shadows libc's
//! does not notice.

use core::ffi::{c_int, c_ulong, c_void};

use hl_thunk::sys::{IOCTL_MEMORY, InfoArgs, MEM_OP_REG_DMABUF_FD, MemArgs};
use rustix::io::Errno;

use super::raw_info::info_ioctl;
use super::{borrow, get, guard, memory, set_errno};
use crate::node::node;

/// `DRM_IOCTL_HL_INFO`.
const IOCTL_INFO: c_ulong = 0xc018_6440;

/// `ioctl(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // The kernel looks at 32 bits; C callers may have sign-extended them.
    let request = request & 0xffff_ffff;
    if (request == IOCTL_MEMORY || request == IOCTL_INFO)
        && let Ok(done) = guard("ioctl", || {
            let node = node()?;
            node.identify(borrow(fd)?)?;
            Ok(if request == IOCTL_MEMORY {
                memory_ioctl(fd, argument.cast())
            } else {
                get(argument.cast::<InfoArgs>()).and_then(|args| info_ioctl(fd, &args))
            })
        })
    {
        return match done {
            Ok(()) => 0,
            Err(errno) => {
                set_errno(errno);
                -1
            }
        };
    }
    // SAFETY: the caller's own arguments, passed on unchanged.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) };
    result as c_int
}

/// The memory ioctl, as far as it is not wrapped by functions.
fn memory_ioctl(fd: c_int, args: *mut MemArgs) -> Result<(), Errno> {
    // SAFETY: C's callers promise a valid pointer or NULL.
    let args = unsafe { args.as_mut() }.ok_or(Errno::FAULT)?;
    match args.op {
        MEM_OP_REG_DMABUF_FD => {
            args.fd_or_device_va = memory::import(fd, args.fd_or_device_va, args.length)?;
            Ok(())
        }
        _ => Err(Errno::INVAL),
    }
}
