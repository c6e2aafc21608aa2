//! Protection domains and memory regions.

use core::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::{Domain, MemoryRegion, Users, context_of, dmabuf, from_c, object, status};
use crate::abi::*;
use crate::config::{self, DmabufSupport};
use crate::hca::copy;
use crate::hca::memory::{Registration, check_access};
use crate::hca::pinned::Account;
use crate::node::random;
use crate::wire::Segment;

/// Memory of this process that is pinned.
static PINNED: Account = Account::new();

/// Allocates a protection domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    object(|| {
        // SAFETY: the caller's promise.
        let open = unsafe { context_of(context) }?;
        open.objects.fetch_add(1, Ordering::AcqRel);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(Domain { c: ibv_pd { context, handle: id }, id, users: Users::default() }))
    })
}

/// Frees a protection domain; refused while something uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let domain: &Domain = unsafe { from_c(pd) }?;
        domain.users.check_none()?;
        // SAFETY: a live domain's context is open.
        let open = unsafe { context_of(domain.c.context) }?;
        // SAFETY: it came from `ibv_alloc_pd` and nothing uses it.
        drop(unsafe { Box::from_raw(pd.cast::<Domain>()) });
        open.objects.fetch_sub(1, Ordering::AcqRel);
        Ok(())
    })
}

unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    object(|| {
        // SAFETY: the caller's promise.
        let domain: &Domain = unsafe { from_c(pd) }?;
        if access & IBV_ACCESS_ZERO_BASED != 0 || length == 0 {
            return Err(Errno::INVAL);
        }
        let piece = Segment { addr: addr as u64, len: length as u64 };
        piece.addr.checked_add(piece.len).ok_or(Errno::INVAL)?;
        check_access(access)?;
        if !copy::is_mapped(&[piece]) {
            return Err(Errno::FAULT);
        }
        let pinned = PINNED.pin(&piece, config::get().memlock)?;
        let what =
            Registration { domain: domain.id, access, iova, pieces: vec![piece], backing: None };
        let mut region = finish(domain, pd, addr, length, what)?;
        region._pinned = Some(pinned);
        crate::stats::STATS.host_regions.fetch_add(1, Ordering::Relaxed);
        Ok(region)
    })
}

fn finish(
    domain: &Domain,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    what: Registration,
) -> Result<Box<MemoryRegion>, Errno> {
    // SAFETY: a live domain's context is open.
    let open = unsafe { context_of(domain.c.context) }?;
    let region = open.process.hca.regions.register(what, || u32::from_ne_bytes(random()))?;
    domain.users.add();
    let key = region.key();
    let c =
        ibv_mr { context: domain.c.context, pd, addr, length, handle: key, lkey: key, rkey: key };
    Ok(Box::new(MemoryRegion { c, region, _pinned: None }))
}

/// Registers memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: passed on.
    unsafe { register(pd, addr, length, addr as u64, access as c_uint) }
}

/// Registers memory under other addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: passed on.
    unsafe { register(pd, addr, length, iova, access as c_uint) }
}

/// Registers memory under other addresses; unknown optional access flags are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: passed on.
    unsafe { register(pd, addr, length, iova, access & !IBV_ACCESS_OPTIONAL_RANGE) }
}

/// Registers memory of a device by its dma-buf.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    object(|| {
        // SAFETY: the caller's promise.
        let domain: &Domain = unsafe { from_c(pd) }?;
        if config::get().dmabuf == DmabufSupport::Off {
            return Err(Errno::OPNOTSUPP);
        }
        let access = access as c_uint & !IBV_ACCESS_OPTIONAL_RANGE;
        check_access(access)?;
        // The kernel's rules: same place inside a page, some bytes, inside the dma-buf.
        if offset % 4096 != iova % 4096 || length == 0 {
            return Err(Errno::INVAL);
        }
        if fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: a live domain's context is open.
        let open = unsafe { context_of(domain.c.context) }?;
        // SAFETY: borrowed for this call only; a wrong number gives EBADF from the kernel.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let (pieces, backing) = dmabuf::import(fd, offset, length as u64, &open.device.place)?;
        let what = Registration { domain: domain.id, access, iova, pieces, backing: Some(backing) };
        let region = finish(domain, pd, core::ptr::null_mut(), length, what)?;
        crate::stats::STATS.dmabuf_regions.fetch_add(1, Ordering::Relaxed);
        Ok(region)
    })
}

/// Ends a registration. When it returns, the memory is no longer accessed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let region: &MemoryRegion = unsafe { from_c(mr) }?;
        // SAFETY: context and domain outlive the region.
        let (open, domain) =
            unsafe { (context_of(region.c.context)?, from_c::<Domain, _>(region.c.pd)?) };
        open.process.hca.regions.deregister(region.region.key());
        // SAFETY: it came from one of the functions above.
        drop(unsafe { Box::from_raw(mr.cast::<MemoryRegion>()) });
        domain.users.remove();
        Ok(())
    })
}
