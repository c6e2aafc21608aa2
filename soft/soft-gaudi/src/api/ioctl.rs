//! The `ioctl` that this library exports, for operations that the driver library does not wrap.
//!
//! The import of a dma-buf is a raw ioctl on the device's descriptor. Callers find this function
//! by `dlsym` on the library's handle; with the real library they find libc's. Everything that is
//! not for a card of ours goes on to the kernel, so a program in which this symbol shadows libc's
//! does not notice.

use core::ffi::{c_int, c_ulong, c_void};

use rustix::io::Errno;

use super::raw_info::info_ioctl;
use super::{borrow, get, guard, memory, put, set_errno};
use crate::abi::{IOCTL_INFO, IOCTL_MEMORY, InfoArgs, MEM_OP_REG_DMABUF_FD, MemArgs};
use crate::node::node;

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
    let given = get(args).map_err(|_| Errno::FAULT)?;
    match given.get(MemArgs::OP) {
        MEM_OP_REG_DMABUF_FD => {
            let dmabuf = given.get(MemArgs::FD_OR_DEVICE_VA);
            let va = memory::import(fd, dmabuf, given.get(MemArgs::LENGTH))?;
            put(args, given.with(MemArgs::FD_OR_DEVICE_VA, va))
        }
        _ => Err(Errno::INVAL),
    }
}
