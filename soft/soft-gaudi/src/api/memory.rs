//! Device and host memory, and dma-bufs.

use core::ffi::{c_int, c_void};
use std::os::fd::IntoRawFd;

use rustix::io::Errno;

use super::{borrow, put};
use crate::abi;
use crate::asic::Generation;
use crate::blocks;
use crate::context::{self, Context};
use crate::dmabuf;
use crate::foreign::Foreign;
use crate::pinning;
use crate::va::Hint;

fn map_host(fd: c_int, ptr: u64, hint: Hint, size: u64) -> Result<u64, Errno> {
    let context = context::operational(borrow(fd)?)?;
    let memory = pinning::pin(ptr, size, !context.node.config.lenient.unpinned);
    let memory = context.log_refusal("pin", memory)?;
    context.model_mapping(size);
    let mapped = context.space_mut().map_host(ptr, memory, hint);
    context.log_refusal("map", mapped)
}

fn export(context: &Context, addr: u64, size: u64, offset: u64) -> Result<c_int, Errno> {
    let mut space = context.space_mut();
    let range = space.export(addr, size, offset)?;
    let (fd, path) = dmabuf::export(context.node, context.device, context.memory, &range.segments)?;
    range.segments.iter().for_each(|part| context.memory.leave_to_others(part.offset, part.len));
    space.exported(addr, path);
    Ok(fd.into_raw_fd())
}

/// Import of a dma-buf, which the library does not wrap (see [`super::ioctl`]).
pub(super) fn import(fd: c_int, dmabuf_fd: u64, length: u64) -> Result<u64, Errno> {
    let context = context::operational(borrow(fd)?)?;
    if !context.node.config.lenient.import {
        return context.log_refusal("opcode", Err(Errno::INVAL));
    }
    let dmabuf_fd = c_int::try_from(dmabuf_fd).map_err(|_| Errno::BADF)?;
    let dmabuf_fd = borrow(dmabuf_fd)?;
    let addr = match dmabuf::Exported::from_fd(dmabuf_fd) {
        Err(Errno::INVAL) => {
            let foreign = Foreign::map(dmabuf_fd)?;
            context.space_mut().map_foreign(foreign, length)?
        }
        exported => context.space_mut().map_import(exported?, length)?,
    };
    context.model_mapping(0);
    Ok(addr)
}

c_functions! {
    /// 0 on failure, and always on Gaudi1.
    fn hlthunk_device_memory_alloc(fd: c_int, size: u64, _page_size: u64, contiguous: bool, _shared: bool) -> handle {
        let context = context::operational(borrow(fd)?)?;
        let mut space = context.space_mut();
        let handle = context.log_refusal("alloc", space.alloc(size, contiguous))?;
        context.account(&space);
        Ok(handle)
    }

    fn hlthunk_device_memory_free(fd: c_int, handle: u64) -> done {
        let context = context::operational(borrow(fd)?)?;
        let mut space = context.space_mut();
        // On a real card, earlier writes of other devices have arrived long before.
        context.flush_peer_writes()?;
        context.log_refusal("free", space.free(handle))?;
        context.account(&space);
        Ok(())
    }

    fn hlthunk_device_memory_map(fd: c_int, alloc: u64, hint_addr: u64) -> handle {
        let context = context::operational(borrow(fd)?)?;
        let hint = Hint { addr: hint_addr, force: false };
        let mapped = context.space_mut().map_device(alloc, hint);
        let addr = context.log_refusal("map", mapped)?;
        context.model_mapping(0);
        Ok(addr)
    }

    fn hlthunk_host_memory_map(fd: c_int, host_virt_addr: *mut c_void, hint_addr: u64, host_size: u64) -> handle {
        map_host(fd, host_virt_addr as u64, Hint { addr: hint_addr, force: false }, host_size)
    }

    fn hlthunk_host_memory_map_flags(
        fd: c_int, host_virt_addr: *mut c_void, hint_addr: u64, host_size: u64, flags: u32,
    ) -> handle {
        let hint = Hint { addr: hint_addr, force: flags & abi::MEM_FORCE_HINT != 0 };
        map_host(fd, host_virt_addr as u64, hint, host_size)
    }

    fn hlthunk_memory_unmap(fd: c_int, device_virt_addr: u64) -> done {
        let context = context::operational(borrow(fd)?)?;
        let unmapped = context.space_mut().unmap(device_virt_addr);
        context.model_mapping(context.log_refusal("unmap", unmapped)?);
        Ok(())
    }

    /// By address; the flags are ignored.
    fn hlthunk_device_memory_export_dmabuf_fd(fd: c_int, addr: u64, size: u64, _flags: u32) -> status {
        export(&*context::operational(borrow(fd)?)?, addr, size, 0)
    }

    /// A part of a mapping.
    fn hlthunk_device_mapped_memory_export_dmabuf_fd(
        fd: c_int, addr: u64, size: u64, offset: u64, flags: u32,
    ) -> status {
        if flags != abi::DMABUF_FLAGS {
            return Err(Errno::INVAL);
        }
        export(&*context::operational(borrow(fd)?)?, addr, size, offset)
    }

    /// No choice of page size on these generations.
    fn hlthunk_get_dev_memalloc_page_orders(fd: c_int, mask: *mut u64) -> done {
        super::nodes::index_from_fd(fd)?;
        put(mask, 0)
    }

    /// How large a register block is, and where in the descriptor to map it.
    fn hlthunk_get_hw_block(fd: c_int, block_address: u64, block_size: *mut u32, handle: *mut u64) -> done {
        if block_size.is_null() || handle.is_null() {
            return Err(Errno::INVAL);
        }
        let context = context::operational(borrow(fd)?)?;
        if context.profile.generation == Generation::Gaudi1 {
            return Err(Errno::PERM);
        }
        let (size, offset) = blocks::find(context.profile, block_address)?;
        put(block_size, size)?;
        put(handle, offset)
    }
}
