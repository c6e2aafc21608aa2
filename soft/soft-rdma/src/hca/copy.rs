//! Copies between processes, by the kernel: `process_vm_readv` and `process_vm_writev`.
//!
//! A copy goes from one address space to the other directly. Memory that is no longer mapped gives `EFAULT` instead of
//! a signal. That is why copies inside the process use the same calls: a program may unmap registered memory, and the
//! HCA must survive that.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::process::Pid;

use crate::wire::{MAX_TOKENS, Reference, Segment};

/// Most segments in one call.
const MAX_IOV: usize = 1024;

/// From the other process, or to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Pull,
    Push,
}

fn iovec(segment: &Segment) -> libc::iovec {
    libc::iovec { iov_base: segment.addr as *mut libc::c_void, iov_len: segment.len as usize }
}

/// Takes `count` bytes off the front of a list.
fn advance(list: &mut &[Segment], first: &mut u64, mut count: u64) {
    while let Some(segment) = list.first() {
        let left = segment.len - *first;
        if count < left {
            *first += count;
            return;
        }
        (count, *first) = (count - left, 0);
        *list = &list[1..];
    }
}

fn window(list: &[Segment], first: u64) -> Vec<libc::iovec> {
    let mut iov: Vec<_> = list.iter().take(MAX_IOV).map(iovec).collect();
    if let (Some(front), Some(segment)) = (iov.first_mut(), list.first()) {
        let rest = Segment { addr: segment.addr + first, len: segment.len - first };
        *front = iovec(&rest);
    }
    iov
}

/// Copies between memory of this process and of `pid`. Both lists have the same length in bytes.
///
/// # Safety
/// What the `local` list names may be overwritten (when pulling): it is memory that the program
/// registered for that.
pub(crate) unsafe fn transfer(
    direction: Direction,
    pid: Pid,
    local: &[Segment],
    remote: &[Segment],
) -> Result<(), Errno> {
    let (mut local, mut remote) = (local, remote);
    let (mut local_first, mut remote_first) = (0, 0);
    advance(&mut local, &mut local_first, 0);
    advance(&mut remote, &mut remote_first, 0);
    while !local.is_empty() && !remote.is_empty() {
        let ours = window(local, local_first);
        let theirs = window(remote, remote_first);
        let pid = pid.as_raw_nonzero().get();
        let (count_ours, count_theirs) =
            (ours.len() as libc::c_ulong, theirs.len() as libc::c_ulong);
        // SAFETY: the kernel checks every address; the caller answers for what is overwritten.
        let done = unsafe {
            match direction {
                Direction::Pull => libc::process_vm_readv(
                    pid,
                    ours.as_ptr(),
                    count_ours,
                    theirs.as_ptr(),
                    count_theirs,
                    0,
                ),
                Direction::Push => libc::process_vm_writev(
                    pid,
                    ours.as_ptr(),
                    count_ours,
                    theirs.as_ptr(),
                    count_theirs,
                    0,
                ),
            }
        };
        match u64::try_from(done) {
            Ok(0) => return Err(Errno::FAULT),
            Ok(done) => {
                advance(&mut local, &mut local_first, done);
                advance(&mut remote, &mut remote_first, done);
            }
            Err(_) => return Err(last_error()),
        }
    }
    if local.is_empty() && remote.is_empty() { Ok(()) } else { Err(Errno::INVAL) }
}

/// What the tokens of a reference said after its bytes were copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pulled {
    /// The bytes are valid.
    Valid,
    /// The owner has flushed the work meanwhile.
    WorkGone,
    /// The owner has deregistered a region meanwhile.
    RegionGone,
}

/// Copies the bytes that `pid` offers (as many as `local` has) and then reads its tokens: the kernel goes through the
/// list in order.
///
/// # Safety
/// As [`transfer`]: `local` may be overwritten.
pub(crate) unsafe fn pull(
    pid: Pid,
    local: &[Segment],
    theirs: &Reference,
) -> Result<Pulled, Errno> {
    let mut values = [0u64; MAX_TOKENS];
    let values = values.get_mut(..theirs.tokens.len()).ok_or(Errno::INVAL)?;
    let mut local = local.to_vec();
    local.push(Segment { addr: values.as_mut_ptr() as u64, len: size_of_val(values) as u64 });
    let tokens = theirs.tokens.iter().map(|token| Segment { addr: token.addr, len: 8 });
    let remote: Vec<_> = theirs.segments.iter().copied().chain(tokens).collect();
    // SAFETY: the caller answers for the memory, and `values` is ours.
    unsafe { transfer(Direction::Pull, pid, &local, &remote)? };
    let changed = theirs.tokens.iter().zip(&*values).position(|(token, now)| token.value != *now);
    Ok(match changed {
        None => Pulled::Valid,
        Some(0) => Pulled::WorkGone,
        Some(_) => Pulled::RegionGone,
    })
}

/// Copies registered memory of this process into `bytes`, which is as long.
pub(crate) fn gather(from: &[Segment], bytes: &mut [u8]) -> Result<(), Errno> {
    let own = Segment { addr: bytes.as_mut_ptr() as u64, len: bytes.len() as u64 };
    // SAFETY: `bytes` is ours to overwrite; `from` is only read.
    unsafe { transfer(Direction::Pull, rustix::process::getpid(), &[own], from) }
}

/// Copies `bytes` into registered memory of this process, which is as long.
pub(crate) fn scatter(bytes: &[u8], to: &[Segment]) -> Result<(), Errno> {
    let own = Segment { addr: bytes.as_ptr() as u64, len: bytes.len() as u64 };
    // SAFETY: `bytes` is only read; `to` is memory registered to be written.
    unsafe { transfer(Direction::Push, rustix::process::getpid(), &[own], to) }
}

/// Whether memory of this process is mapped: the first and last byte of every segment can be read.
pub(crate) fn is_mapped(list: &[Segment]) -> bool {
    let ends = |segment: &Segment| [segment.addr, segment.addr + segment.len.saturating_sub(1)];
    let mut byte = [0];
    list.iter().flat_map(ends).all(|addr| gather(&[Segment { addr, len: 1 }], &mut byte).is_ok())
}

/// Writes registered memory to a stream, as much as it takes. The kernel reads the memory: unmapped memory gives `EFAULT`.
pub(crate) fn write_to(fd: BorrowedFd<'_>, from: &[Segment]) -> Result<u64, Errno> {
    let iov: Vec<_> = from.iter().take(MAX_IOV).map(iovec).collect();
    // SAFETY: all zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (iov.as_ptr().cast_mut(), iov.len());
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: memory is only read, by the kernel, which checks every address.
    let done = unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) };
    u64::try_from(done).map_err(|_| last_error())
}

/// Reads from a stream into registered memory, as much as there is.
///
/// # Safety
/// As [`transfer`]: the memory may be overwritten.
pub(crate) unsafe fn read_from(fd: BorrowedFd<'_>, to: &[Segment]) -> Result<u64, Errno> {
    let iov: Vec<_> = to.iter().take(MAX_IOV).map(iovec).collect();
    // SAFETY: the caller answers for what is overwritten; the kernel checks every address.
    let done = unsafe { libc::readv(fd.as_raw_fd(), iov.as_ptr(), iov.len() as libc::c_int) };
    u64::try_from(done).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::FAULT)
}

/// The segments without their first `count` bytes.
pub(crate) fn skip(list: &[Segment], count: u64) -> Vec<Segment> {
    let (mut rest, mut first) = (list, 0);
    advance(&mut rest, &mut first, count);
    let mut rest = rest.to_vec();
    if let Some(front) = rest.first_mut() {
        *front = Segment { addr: front.addr + first, len: front.len - first };
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(buffer: &mut [u8], lens: &[usize]) -> Vec<Segment> {
        let mut at = buffer.as_mut_ptr() as u64;
        let mut list = Vec::new();
        for &len in lens {
            list.push(Segment { addr: at, len: len as u64 });
            at += len as u64 + 3;
        }
        list
    }

    #[test]
    fn lists_cut_differently_are_copied_byte_for_byte() {
        let mut from: Vec<u8> = (0..=255).collect();
        let mut to = vec![0u8; 256];
        let source = segments(&mut from, &[5, 0, 20, 7]);
        let target = segments(&mut to, &[1, 30, 1]);
        // SAFETY: `to` is ours.
        unsafe { transfer(Direction::Pull, rustix::process::getpid(), &target, &source) }.unwrap();
        let expected: Vec<u8> = (0..5).chain(11..31).chain(34..41).collect();
        let got: Vec<u8> = [&to[0..1], &to[4..34], &to[37..38]].concat();
        assert_eq!(got, expected);
        assert!(to[1..4].iter().chain(&to[34..37]).chain(&to[38..]).all(|byte| *byte == 0));
    }

    #[test]
    fn memory_that_is_not_there_gives_an_error() {
        let nowhere = [Segment { addr: 8, len: 16 }];
        assert_eq!(scatter(&[0; 16], &nowhere), Err(Errno::FAULT));
        assert_eq!(gather(&nowhere, &mut [0; 16]), Err(Errno::FAULT));
    }

    #[test]
    fn lists_of_different_length_are_refused() {
        let mut to = [0u8; 8];
        let target = segments(&mut to, &[8]);
        assert_eq!(scatter(&[1; 4], &target), Err(Errno::INVAL));
    }
}
