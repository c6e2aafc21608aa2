//! The CPU's part of a bounced copy: copies between a slot and the caller's memory.

use crate::Error;
use crate::error::Phase;

/// An address in host memory. Whether it is valid, only the caller of the copy can promise; guarded copies do not
/// rely on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostPtr(pub(crate) *mut u8);

// SAFETY: only an address; every dereference is unsafe and has its own argument.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    pub(crate) fn add(self, bytes: usize) -> Self {
        HostPtr(self.0.wrapping_add(bytes))
    }
}

/// Copies from host memory into a slot.
///
/// # Safety
/// `to` must be valid for writes of `len` bytes, and nothing else in this process may access it meanwhile. `from` must
/// be valid for reads of `len` bytes; if `guarded`, only where [`guarded_copy`] returns `None`.
pub(crate) unsafe fn copy_in(
    from: HostPtr,
    to: *mut u8,
    len: usize,
    guarded: bool,
) -> Result<(), Error> {
    if guarded && let Some(done) = guarded_copy(from.0, to, len, Access::Read) {
        return done;
    }
    // SAFETY: the caller's promise; a slot and the user's memory never overlap.
    unsafe { from.0.copy_to_nonoverlapping(to, len) };
    Ok(())
}

/// Copies from a slot to host memory.
///
/// # Safety
/// `from` must be valid for reads of `len` bytes. `to` must be valid for writes of `len` bytes; if `guarded`, only where
/// [`guarded_copy`] returns `None`.
pub(crate) unsafe fn copy_out(
    from: *mut u8,
    to: HostPtr,
    len: usize,
    guarded: bool,
) -> Result<(), Error> {
    if guarded && let Some(done) = guarded_copy(to.0, from, len, Access::Write) {
        return done;
    }
    // SAFETY: the caller's promise; a slot and the user's memory never overlap.
    unsafe { from.copy_to_nonoverlapping(to.0, len) };
    Ok(())
}

enum Access {
    Read,
    Write,
}

/// Copies between `theirs` and `ours` by a system call, so that memory which is not mapped, or is
/// read-only, causes an error and not a signal. `None` if the kernel lacks the call or does not permit it: then the
/// caller copies unguarded.
fn guarded_copy(
    theirs: *mut u8,
    ours: *mut u8,
    len: usize,
    access: Access,
) -> Option<Result<(), Error>> {
    let local = libc::iovec { iov_base: ours.cast(), iov_len: len };
    let remote = libc::iovec { iov_base: theirs.cast(), iov_len: len };
    // SAFETY: our own process; the kernel checks both ranges.
    let (call, copied) = unsafe {
        let me = libc::getpid();
        match access {
            Access::Read => {
                ("process_vm_readv", libc::process_vm_readv(me, &local, 1, &remote, 1, 0))
            }
            Access::Write => {
                ("process_vm_writev", libc::process_vm_writev(me, &local, 1, &remote, 1, 0))
            }
        }
    };
    if copied == len as isize {
        return Some(Ok(()));
    }
    let errno = if copied >= 0 {
        libc::EFAULT
    } else {
        std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EFAULT)
    };
    if matches!(errno, libc::ENOSYS | libc::EPERM) {
        return None;
    }
    Some(Err(Error::os(Phase::Copy, "copying host memory that cannot be pinned", call, errno)))
}
