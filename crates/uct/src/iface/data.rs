//! The calls that move data: put, get, flush, fence, progress, pending.

use core::ffi::{c_uint, c_void};

use super::endpoint::{ep_heads, iface_of};
use super::object::{iface_head, needs_progress};
use super::{Buffer, Buffers, Interface};
use crate::abi::{IFACE_OP_SLOTS, Iov, PendingReq, PurgeCallback, RawCompletion, Status, iface_op};
use crate::border::{guarded, guarded_status};
use crate::completion::{Completion, Posted};
use crate::component::borrow_key;

/// Puts these calls into an operation table.
pub(super) fn fill<I: Interface>(slots: &mut [*const c_void; IFACE_OP_SLOTS]) {
    slots[iface_op::EP_PUT_SHORT] = put_short::<I> as *const c_void;
    slots[iface_op::EP_GET_SHORT] = get_short::<I> as *const c_void;
    slots[iface_op::EP_PUT_ZCOPY] = put_zcopy::<I> as *const c_void;
    slots[iface_op::EP_GET_ZCOPY] = get_zcopy::<I> as *const c_void;
    slots[iface_op::EP_FLUSH] = ep_flush::<I> as *const c_void;
    slots[iface_op::EP_FENCE] = ep_fence::<I> as *const c_void;
    slots[iface_op::EP_PENDING_ADD] = pending_add::<I> as *const c_void;
    slots[iface_op::EP_PENDING_PURGE] = pending_purge::<I> as *const c_void;
    slots[iface_op::IFACE_FLUSH] = iface_flush::<I> as *const c_void;
    slots[iface_op::IFACE_FENCE] = iface_fence::<I> as *const c_void;
    slots[iface_op::IFACE_PROGRESS] = progress::<I> as *const c_void;
}

/// # Safety
/// The caller is an operation on the open interface `iface` of type `I`.
unsafe fn status_of<I: Interface>(iface: *mut c_void, posted: Posted) -> Status {
    match posted {
        // The operation is complete and the completion was never used: UCX must not hear of it.
        Posted::Done(_unused) => Status::OK,
        Posted::Later => {
            // SAFETY: as the caller promises.
            unsafe { needs_progress::<I>(iface) };
            Status::INPROGRESS
        }
    }
}

unsafe extern "C" fn put_short<I: Interface>(
    ep: *mut c_void,
    buffer: *const c_void,
    length: c_uint,
    remote: u64,
    rkey: usize,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (iface, ep) = unsafe { ep_heads::<I>(ep) };
    guarded_status(iface.ucx, "put_short", || {
        let local = Buffer { address: buffer.addr() as u64, length: length as usize };
        // SAFETY: UCX passes a key of this component, or an invalid one.
        let key = unsafe { borrow_key::<I::Component>(rkey) };
        iface.interface.put_short(&ep.endpoint, local, remote, key).map(|()| Status::OK)
    })
}

unsafe extern "C" fn get_short<I: Interface>(
    ep: *mut c_void,
    buffer: *mut c_void,
    length: c_uint,
    remote: u64,
    rkey: usize,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (iface, ep) = unsafe { ep_heads::<I>(ep) };
    guarded_status(iface.ucx, "get_short", || {
        let local = Buffer { address: buffer.addr() as u64, length: length as usize };
        // SAFETY: UCX passes a key of this component, or an invalid one.
        let key = unsafe { borrow_key::<I::Component>(rkey) };
        iface.interface.get_short(&ep.endpoint, local, remote, key).map(|()| Status::OK)
    })
}

/// # Safety
/// `iov` is valid for `count` entries.
unsafe fn iov_slice<'a>(iov: *const Iov, count: usize) -> &'a [Iov] {
    if count == 0 {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { core::slice::from_raw_parts(iov, count) }
}

unsafe extern "C" fn put_zcopy<I: Interface>(
    ep: *mut c_void,
    iov: *const Iov,
    count: usize,
    remote: u64,
    rkey: usize,
    completion: *mut RawCompletion,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (raw, (iface, ep)) = unsafe { (iface_of(ep), ep_heads::<I>(ep)) };
    guarded_status(iface.ucx, "put_zcopy", || {
        // SAFETY: UCX passes handles and keys of this domain and component, and a completion
        // that lives until it is finished.
        let (local, key, completion) = unsafe {
            (
                Buffers::new(iov_slice(iov, count)),
                borrow_key::<I::Component>(rkey),
                Completion::from_raw(completion),
            )
        };
        let posted = iface.interface.put_zcopy(&ep.endpoint, local, remote, key, completion)?;
        // SAFETY: this is an operation on that interface.
        Ok(unsafe { status_of::<I>(raw, posted) })
    })
}

unsafe extern "C" fn get_zcopy<I: Interface>(
    ep: *mut c_void,
    iov: *const Iov,
    count: usize,
    remote: u64,
    rkey: usize,
    completion: *mut RawCompletion,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (raw, (iface, ep)) = unsafe { (iface_of(ep), ep_heads::<I>(ep)) };
    guarded_status(iface.ucx, "get_zcopy", || {
        // SAFETY: as for put_zcopy.
        let (local, key, completion) = unsafe {
            (
                Buffers::new(iov_slice(iov, count)),
                borrow_key::<I::Component>(rkey),
                Completion::from_raw(completion),
            )
        };
        let posted = iface.interface.get_zcopy(&ep.endpoint, local, remote, key, completion)?;
        // SAFETY: this is an operation on that interface.
        Ok(unsafe { status_of::<I>(raw, posted) })
    })
}

unsafe extern "C" fn ep_flush<I: Interface>(
    ep: *mut c_void,
    _flags: c_uint,
    completion: *mut RawCompletion,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (raw, (iface, ep)) = unsafe { (iface_of(ep), ep_heads::<I>(ep)) };
    guarded_status(iface.ucx, "ep_flush", || {
        // SAFETY: a completion that lives until it is finished, or null.
        let completion = unsafe { Completion::from_raw(completion) };
        let posted = iface.interface.flush(Some(&ep.endpoint), completion)?;
        // SAFETY: this is an operation on that interface.
        Ok(unsafe { status_of::<I>(raw, posted) })
    })
}

unsafe extern "C" fn iface_flush<I: Interface>(
    iface: *mut c_void,
    _flags: c_uint,
    completion: *mut RawCompletion,
) -> Status {
    let raw = iface;
    // SAFETY: an open interface of this type.
    let iface = unsafe { iface_head::<I>(iface) };
    guarded_status(iface.ucx, "iface_flush", || {
        if !completion.is_null() {
            // As every transport of UCX: an interface flush is polled.
            return Err(Status::UNSUPPORTED);
        }
        // SAFETY: a null completion is one nobody waits for.
        let completion = unsafe { Completion::from_raw(completion) };
        let posted = iface.interface.flush(None, completion)?;
        // SAFETY: this is an operation on that interface.
        Ok(unsafe { status_of::<I>(raw, posted) })
    })
}

unsafe extern "C" fn ep_fence<I: Interface>(ep: *mut c_void, _flags: c_uint) -> Status {
    // SAFETY: a live endpoint of this type.
    let (iface, _) = unsafe { ep_heads::<I>(ep) };
    guarded_status(iface.ucx, "ep_fence", || iface.interface.fence().map(|()| Status::OK))
}

unsafe extern "C" fn iface_fence<I: Interface>(iface: *mut c_void, _flags: c_uint) -> Status {
    // SAFETY: an open interface of this type.
    let iface = unsafe { iface_head::<I>(iface) };
    guarded_status(iface.ucx, "iface_fence", || iface.interface.fence().map(|()| Status::OK))
}

unsafe extern "C" fn progress<I: Interface>(iface: *mut c_void) -> c_uint {
    // SAFETY: an open interface of this type.
    let head = unsafe { iface_head::<I>(iface) };
    guarded(head.ucx, "progress", 0, || {
        let mut events = head.interface.progress();
        if !head.pending.is_empty() && head.interface.has_room() {
            // SAFETY: UCX keeps requests alive until they succeed or are purged.
            events += unsafe { head.pending.dispatch() };
        }
        events
    })
}

unsafe extern "C" fn pending_add<I: Interface>(
    ep: *mut c_void,
    request: *mut PendingReq,
    _flags: c_uint,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (raw, (iface, _)) = unsafe { (iface_of(ep), ep_heads::<I>(ep)) };
    guarded_status(iface.ucx, "pending_add", || {
        if iface.pending.is_empty() && iface.interface.has_room() {
            // Room appeared meanwhile: UCX is to try again at once.
            return Err(Status::BUSY);
        }
        iface.pending.add(ep, request);
        // SAFETY: this is an operation on that interface.
        unsafe { needs_progress::<I>(raw) };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn pending_purge<I: Interface>(
    ep: *mut c_void,
    callback: Option<PurgeCallback>,
    argument: *mut c_void,
) {
    // SAFETY: a live endpoint of this type.
    let (iface, _) = unsafe { ep_heads::<I>(ep) };
    guarded(iface.ucx, "pending_purge", (), || {
        // SAFETY: UCX's requests and its own callback for them.
        unsafe { iface.pending.purge(ep, callback, argument) };
    });
}
