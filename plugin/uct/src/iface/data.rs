//! The calls that move data: put, get, flush, fence, progress.
//!
//! Each put and get is logged as UCX's own transports do (`UCX_LOG_LEVEL=data`).

use core::ffi::{c_uint, c_void};

use super::endpoint::EpRef;
use super::object::IfaceRef;
use super::{Buffer, Buffers, Interface, RmaOp};
use crate::abi::{IFACE_OP_SLOTS, Iov, RawCompletion, Status, iface_op};
use crate::completion::{Completion, Posted};
use crate::component::borrow_key;
use crate::panic_guard::{guarded, guarded_status};
use crate::ucx::Level;

/// Puts these calls into an operation table.
pub(super) fn fill<I: Interface>(slots: &mut [*const c_void; IFACE_OP_SLOTS]) {
    slots[iface_op::EP_PUT_SHORT] = short::<I, PUT> as *const c_void;
    slots[iface_op::EP_GET_SHORT] = short::<I, GET> as *const c_void;
    slots[iface_op::EP_PUT_ZCOPY] = zcopy::<I, PUT> as *const c_void;
    slots[iface_op::EP_GET_ZCOPY] = zcopy::<I, GET> as *const c_void;
    slots[iface_op::EP_FLUSH] = ep_flush::<I> as *const c_void;
    slots[iface_op::EP_FENCE] = ep_fence::<I> as *const c_void;
    slots[iface_op::IFACE_FLUSH] = iface_flush::<I> as *const c_void;
    slots[iface_op::IFACE_FENCE] = iface_fence::<I> as *const c_void;
    slots[iface_op::IFACE_PROGRESS] = progress::<I> as *const c_void;
}

fn status_of<I: Interface>(iface: IfaceRef<'_, I>, posted: Posted) -> Status {
    match posted {
        // The operation is complete and the completion was never used: it must not be finished.
        Posted::Done(_unused) => Status::OK,
        Posted::Later => {
            iface.needs_progress();
            Status::INPROGRESS
        }
    }
}

/// Logs an operation and its status. When that is off, it costs one check of `traces_data`.
fn trace<I: Interface>(
    iface: IfaceRef<'_, I>,
    op: RmaOp,
    what: &str,
    bytes: impl FnOnce() -> usize,
    (local, remote): (u64, u64),
    status: Status,
) -> Status {
    if iface.traces_data {
        let (to, from) = op.sides(local, remote);
        let (transport, bytes) = (I::TRANSPORT, bytes());
        let line =
            format_args!("{transport} {what} size {bytes} from {from:#x} to {to:#x}: {status:?}");
        iface.ucx.log(Level::TraceData, file!(), line!(), line);
    }
    status
}

/// `bool`s, because the compiler takes no enums as const parameters.
const PUT: bool = true;
const GET: bool = false;

const fn operation(is_put: bool) -> RmaOp {
    if is_put { RmaOp::Put } else { RmaOp::Get }
}

/// UCX keeps the buffer valid until this returns.
unsafe extern "C" fn short<I: Interface, const IS_PUT: bool>(
    ep: EpRef<'_, I>,
    buffer: *const c_void,
    length: c_uint,
    remote: u64,
    rkey: usize,
) -> Status {
    let (iface, op) = (ep.iface(), const { operation(IS_PUT) });
    let name = op.choose("PUT_SHORT", "GET_SHORT");
    let status = guarded_status(iface.ucx, name, || {
        // SAFETY: a buffer of this length, and a key of this component, or an invalid one.
        let (local, key) = unsafe {
            let local = Buffer::new(buffer.addr() as u64, length as usize);
            (local, borrow_key::<I::Component>(rkey))
        };
        iface.interface.short(op, &ep.endpoint, local, remote, key).map(|()| Status::OK)
    });
    trace(iface, op, name, || length as usize, (buffer.addr() as u64, remote), status)
}

/// First address and total length of a list, for the log.
fn extent(iov: &[Iov]) -> (u64, impl FnOnce() -> usize + use<'_>) {
    let first = iov.first().map_or(0, |iov| iov.buffer.addr() as u64);
    (first, || iov.iter().map(|iov| iov.length * iov.count as usize).sum())
}

/// UCX keeps the buffers and the completion valid until the completion is finished.
unsafe extern "C" fn zcopy<I: Interface, const IS_PUT: bool>(
    ep: EpRef<'_, I>,
    iov: *const Iov,
    count: usize,
    remote: u64,
    rkey: usize,
    completion: *mut RawCompletion,
) -> Status {
    let (iface, op) = (ep.iface(), const { operation(IS_PUT) });
    let name = op.choose("PUT_ZCOPY", "GET_ZCOPY");
    let iov = match count {
        0 => &[],
        // SAFETY: UCX passes as many entries as it says.
        _ => unsafe { core::slice::from_raw_parts(iov, count) },
    };
    let status = guarded_status(iface.ucx, name, || {
        // SAFETY: handles and keys of this domain and component, and a completion.
        let (local, key, completion) = unsafe {
            let completion = Completion::from_raw(completion);
            (Buffers::new(iov), borrow_key::<I::Component>(rkey), completion)
        };
        let posted = iface.interface.zcopy(op, &ep.endpoint, local, remote, key, completion)?;
        Ok(status_of(iface, posted))
    });
    let (first, bytes) = extent(iov);
    trace(iface, op, name, bytes, (first, remote), status)
}

/// `UCT_FLUSH_FLAG_CANCEL`: the endpoint is closed by force.
const CANCEL: c_uint = 1;

unsafe extern "C" fn ep_flush<I: Interface>(
    ep: EpRef<'_, I>,
    flags: c_uint,
    completion: *mut RawCompletion,
) -> Status {
    let iface = ep.iface();
    guarded_status(iface.ucx, "ep_flush", || {
        // SAFETY: a completion that lives until it is finished, or null.
        let completion = unsafe { Completion::from_raw(completion) };
        if flags & CANCEL != 0 {
            iface.interface.cancel(&ep.endpoint);
        }
        let posted = iface.interface.flush(Some(&ep.endpoint), completion)?;
        Ok(status_of(iface, posted))
    })
}

unsafe extern "C" fn iface_flush<I: Interface>(
    iface: IfaceRef<'_, I>,
    _flags: c_uint,
    completion: *mut RawCompletion,
) -> Status {
    guarded_status(iface.ucx, "iface_flush", || {
        if !completion.is_null() {
            // As in every transport of UCX, an interface flush is polled.
            return Err(Status::UNSUPPORTED);
        }
        // SAFETY: a null completion is not waited for.
        let completion = unsafe { Completion::from_raw(completion) };
        let posted = iface.interface.flush(None, completion)?;
        Ok(status_of(iface, posted))
    })
}

unsafe extern "C" fn ep_fence<I: Interface>(ep: EpRef<'_, I>, _flags: c_uint) -> Status {
    let iface = ep.iface();
    guarded_status(iface.ucx, "ep_fence", || iface.interface.fence().map(|()| Status::OK))
}

unsafe extern "C" fn iface_fence<I: Interface>(iface: IfaceRef<'_, I>, _flags: c_uint) -> Status {
    guarded_status(iface.ucx, "iface_fence", || iface.interface.fence().map(|()| Status::OK))
}

unsafe extern "C" fn progress<I: Interface>(iface: IfaceRef<'_, I>) -> c_uint {
    guarded(iface.ucx, "progress", 0, || iface.interface.progress())
}
