//! Queue pairs: made, changed, asked about, destroyed.

use core::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::{
    Cq, Domain, NO_COND, NO_MUTEX, Qp, Srq, context_of, from_c, object, read, status, write,
};
use crate::abi::*;
use crate::hca::qp::{Parts, QueuePair};
use crate::hca::transitions::Kind;
use crate::hca::{MAX_INLINE_DATA, MAX_SGE, MAX_WR};

/// Creates a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    object(|| {
        // SAFETY: the caller's promise.
        let (domain, init): (&Domain, _) =
            unsafe { (from_c(pd)?, init.as_mut().ok_or(Errno::INVAL)?) };
        let kind = match init.qp_type {
            IBV_QPT_RC => Kind::Rc,
            IBV_QPT_UD => Kind::Ud,
            _ => return Err(Errno::OPNOTSUPP),
        };
        // SAFETY: the caller's promise.
        let (send_cq, recv_cq, srq): (&Cq, &Cq, _) = unsafe {
            (from_c(init.send_cq)?, from_c(init.recv_cq)?, init.srq.cast::<Srq>().as_ref())
        };
        let cap = capacities(&init.cap, srq.is_some())?;
        // SAFETY: a live domain's context is open.
        let open = unsafe { context_of(domain.c.context) }?;
        let parts = Parts {
            kind,
            domain: domain.id,
            port: open.device.port,
            send_cq: send_cq.queue.clone(),
            recv_cq: recv_cq.queue.clone(),
            shared: srq.map(|srq| srq.queue.clone()),
            cap,
            signal_all: init.sq_sig_all != 0,
            asynchronous: open.asynchronous.clone(),
            counters: open.process.hca.counters(open.device.port),
        };
        let qp = open.process.hca.add_qp(|number| Arc::new(QueuePair::new(number, parts)))?;
        domain.users.add();
        send_cq.users.add();
        recv_cq.users.add();
        if let Some(srq) = srq {
            srq.users.add();
        }
        init.cap = cap;
        let c = ibv_qp {
            context: domain.c.context,
            qp_context: init.qp_context,
            pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            handle: qp.number.raw(),
            qp_num: qp.number.raw(),
            state: IBV_QPS_RESET,
            qp_type: init.qp_type,
            mutex: NO_MUTEX,
            cond: NO_COND,
            events_completed: 0,
        };
        let made = Box::new(Qp { c, qp });
        made.qp.object.store(&raw const *made as usize, Ordering::Relaxed);
        Ok(made)
    })
}

/// What a queue pair gets: at least what was asked for.
fn capacities(asked: &ibv_qp_cap, shared: bool) -> Result<ibv_qp_cap, Errno> {
    let too_much = asked.max_send_wr > MAX_WR
        || asked.max_recv_wr > MAX_WR
        || asked.max_send_sge > MAX_SGE
        || asked.max_recv_sge > MAX_SGE
        || asked.max_inline_data > MAX_INLINE_DATA;
    if too_much {
        return Err(Errno::INVAL);
    }
    Ok(ibv_qp_cap {
        max_send_sge: asked.max_send_sge.max(1),
        max_recv_wr: if shared { 0 } else { asked.max_recv_wr },
        max_recv_sge: if shared { 0 } else { asked.max_recv_sge.max(1) },
        ..*asked
    })
}

/// Changes state and attributes of a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let (ours, attr): (&Qp, _) = unsafe { (from_c(qp)?, read(attr)?) };
        // SAFETY: a live queue pair's context is open.
        let open = unsafe { context_of(ours.c.context) }?;
        ours.qp.modify(&open.process.hca, &attr, mask)?;
        let state = ours.qp.state();
        // SAFETY: programs read this field only between calls.
        unsafe { (&raw mut (*qp).state).write(state) };
        Ok(())
    })
}

/// Attributes of a queue pair.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &Qp = unsafe { from_c(qp) }?;
        // SAFETY: a live queue pair's context is open.
        unsafe { context_of(ours.c.context) }?;
        let found = ours.qp.attributes();
        // SAFETY: the caller's promise.
        unsafe {
            write(attr, found)?;
            write(
                init,
                ibv_qp_init_attr {
                    qp_context: ours.c.qp_context,
                    send_cq: ours.c.send_cq,
                    recv_cq: ours.c.recv_cq,
                    srq: ours.c.srq,
                    cap: found.cap,
                    qp_type: ours.c.qp_type,
                    sq_sig_all: c_int::from(ours.qp.parts.signal_all),
                },
            )?;
            (&raw mut (*qp).state).write(found.qp_state);
        }
        Ok(())
    })
}

/// Destroys a queue pair; waits until its events are acknowledged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &Qp = unsafe { from_c(qp) }?;
        // SAFETY: what a queue pair uses outlives it.
        let (open, domain, send_cq, recv_cq, srq): (_, &Domain, &Cq, &Cq, _) = unsafe {
            (
                context_of(ours.c.context)?,
                from_c(ours.c.pd)?,
                from_c(ours.c.send_cq)?,
                from_c(ours.c.recv_cq)?,
                ours.c.srq.cast::<Srq>().as_ref(),
            )
        };
        ours.qp.destroy(&open.process.hca);
        // SAFETY: it came from `ibv_create_qp`, and the HCA does not know it any more.
        drop(unsafe { Box::from_raw(qp.cast::<Qp>()) });
        domain.users.remove();
        send_cq.users.remove();
        recv_cq.users.remove();
        if let Some(srq) = srq {
            srq.users.remove();
        }
        Ok(())
    })
}
