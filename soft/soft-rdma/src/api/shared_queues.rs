//! Shared receive queues.

use core::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::{
    Domain, NO_COND, NO_MUTEX, Srq, Users, context_of, from_c, object, read, status, write,
};
use crate::abi::*;
use crate::hca::receive::SharedQueue;
use crate::hca::{MAX_SGE, MAX_WR};

/// Creates a shared receive queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    object(|| {
        // SAFETY: the caller's promise.
        let (domain, init): (&Domain, _) =
            unsafe { (from_c(pd)?, init.as_mut().ok_or(Errno::INVAL)?) };
        let attr = init.attr;
        if attr.max_wr == 0 || attr.max_wr > MAX_WR || attr.max_sge > MAX_SGE {
            return Err(Errno::INVAL);
        }
        // SAFETY: a live domain's context is open.
        let open = unsafe { context_of(domain.c.context) }?;
        init.attr.max_sge = attr.max_sge.max(1);
        let queue = SharedQueue::new(
            domain.id,
            attr.max_wr,
            attr.max_sge.max(1),
            open.asynchronous.clone(),
        );
        domain.users.add();
        let c = ibv_srq {
            context: domain.c.context,
            srq_context: init.srq_context,
            pd,
            handle: 0,
            mutex: NO_MUTEX,
            cond: NO_COND,
            events_completed: 0,
        };
        let made = Box::new(Srq { c, queue: Arc::new(queue), users: Users::default() });
        made.queue.object.store(&raw const *made as usize, Ordering::Relaxed);
        Ok(made)
    })
}

/// Sets the limit of a shared receive queue. Its size cannot be changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let (ours, attr): (&Srq, _) = unsafe { (from_c(srq)?, read(attr)?) };
        // SAFETY: a live queue's context is open.
        unsafe { context_of(ours.c.context) }?;
        if mask & IBV_SRQ_MAX_WR != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if mask & IBV_SRQ_LIMIT != 0 { ours.queue.set_limit(attr.srq_limit) } else { Ok(()) }
    })
}

/// Attributes of a shared receive queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &Srq = unsafe { from_c(srq) }?;
        // SAFETY: a live queue's context is open.
        unsafe { context_of(ours.c.context) }?;
        let (max_wr, max_sge, srq_limit) = ours.queue.attributes();
        // SAFETY: the caller's promise.
        unsafe { write(attr, ibv_srq_attr { max_wr, max_sge, srq_limit }) }
    })
}

/// Destroys a shared receive queue; refused while queue pairs use it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &Srq = unsafe { from_c(srq) }?;
        // SAFETY: a live queue's context is open.
        unsafe { context_of(ours.c.context) }?;
        ours.users.check_none()?;
        // SAFETY: the domain outlives its queues.
        let domain: &Domain = unsafe { from_c(ours.c.pd) }?;
        ours.queue.retire();
        // SAFETY: it came from `ibv_create_srq` and nothing uses it.
        drop(unsafe { Box::from_raw(srq.cast::<Srq>()) });
        domain.users.remove();
        Ok(())
    })
}
