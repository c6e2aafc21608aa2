//! Memory: allocation, mapping, export.

use std::ffi::{c_int, c_void};

use crate::ioctl::{self, Memory};

mod op {
    pub(super) const ALLOC: u32 = 0;
    pub(super) const FREE: u32 = 1;
    pub(super) const MAP: u32 = 2;
    pub(super) const UNMAP: u32 = 3;
    pub(super) const MAP_BLOCK: u32 = 4;
    pub(super) const EXPORT: u32 = 5;
}

const CONTIGUOUS: u32 = 1;
const SHARED: u32 = 2;
const USER_POINTER: u32 = 4;
/// The only flags of an export.
const DMABUF_FLAGS: u32 = (libc::O_RDWR | libc::O_CLOEXEC) as u32;

/// The first word of the answer; 0 on failure, with `errno` as the driver has set it.
fn first(fd: c_int, args: Memory) -> u64 {
    ioctl::ask(fd, args).map_or(0, |answer| answer.first)
}

/// Allocates device memory: its handle, or 0.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_device_memory_alloc(
    fd: c_int,
    size: u64,
    page_size: u64,
    contiguous: bool,
    shared: bool,
) -> u64 {
    let flags = if contiguous { CONTIGUOUS } else { 0 } | if shared { SHARED } else { 0 };
    first(fd, Memory { first: size, second: page_size, op: op::ALLOC, flags, ..Memory::default() })
}

/// Frees device memory that is no longer mapped.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_device_memory_free(fd: c_int, handle: u64) -> c_int {
    ioctl::call(fd, &mut Memory { first: handle, op: op::FREE, ..Memory::default() })
}

/// Maps device memory, at the hint if that is possible: its address, or 0.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_device_memory_map(fd: c_int, handle: u64, hint_addr: u64) -> u64 {
    first(fd, Memory { first: hint_addr, second: handle, op: op::MAP, ..Memory::default() })
}

/// Maps host memory, which the driver pins: its address, or 0.
///
/// # Safety
/// The card may read and write the memory until the mapping ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_host_memory_map(
    fd: c_int,
    host_virt_addr: *mut c_void,
    hint_addr: u64,
    host_size: u64,
) -> u64 {
    let args = Memory {
        first: host_virt_addr as u64,
        second: hint_addr,
        third: host_size,
        op: op::MAP,
        flags: USER_POINTER,
        ..Memory::default()
    };
    first(fd, args)
}

/// Ends a mapping.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_memory_unmap(fd: c_int, device_virt_addr: u64) -> c_int {
    ioctl::call(fd, &mut Memory { first: device_virt_addr, op: op::UNMAP, ..Memory::default() })
}

fn export(fd: c_int, addr: u64, size: u64, offset: u64) -> c_int {
    let args = Memory {
        first: addr,
        second: size,
        third: offset,
        op: op::EXPORT,
        flags: DMABUF_FLAGS,
        ..Memory::default()
    };
    ioctl::ask(fd, args).map_or_else(|error| error, |answer| answer.first as i32)
}

/// Exports memory from an address on as a dma-buf.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_device_memory_export_dmabuf_fd(
    fd: c_int,
    addr: u64,
    size: u64,
    _flags: u32,
) -> c_int {
    export(fd, addr, size, 0)
}

/// Exports a part of a mapping as a dma-buf.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_device_mapped_memory_export_dmabuf_fd(
    fd: c_int,
    addr: u64,
    size: u64,
    offset: u64,
    flags: u32,
) -> c_int {
    if flags != DMABUF_FLAGS {
        return -libc::EINVAL;
    }
    export(fd, addr, size, offset)
}

/// A block of registers that a user may map: its size, and the offset for mmap.
///
/// # Safety
/// The pointers are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_hw_block(
    fd: c_int,
    block_address: u64,
    block_size: *mut u32,
    handle: *mut u64,
) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(size), Some(handle)) = (unsafe { (block_size.as_mut(), handle.as_mut()) }) else {
        return -libc::EINVAL;
    };
    let mut args = Memory { first: block_address, op: op::MAP_BLOCK, ..Memory::default() };
    let ret = ioctl::call(fd, &mut args);
    if ret == 0 {
        *handle = args.first;
        *size = args.second as u32;
    }
    ret
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_with_other_flags_is_refused_before_the_driver_is_asked() {
        let other = hlthunk_device_mapped_memory_export_dmabuf_fd(-1, 0, 4096, 0, 0);
        assert_eq!(other, -libc::EINVAL);
        let asked = hlthunk_device_mapped_memory_export_dmabuf_fd(-1, 0, 4096, 0, DMABUF_FLAGS);
        assert_eq!(asked, -libc::EBADF);
    }

    #[test]
    fn a_failed_allocation_is_zero_and_leaves_errno() {
        assert_eq!(hlthunk_device_memory_alloc(-1, 4096, 0, false, false), 0);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
    }
}
