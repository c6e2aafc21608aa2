//! Posting and polling: the functions that the header's inline functions call through the context.

use core::ffi::c_int;

use rustix::io::Errno;

use super::{AddressHandle, Cq, NONE, Qp, Srq, caught, context_of, devices, from_c, set_errno};
use crate::abi::*;
use crate::hca::copy;
use crate::hca::receive::Buffer;
use crate::hca::requester::{Data, Target, Work};
use crate::hca::{MAX_INLINE_DATA, MAX_SGE};
use crate::wire::{Opcode, Segment};

/// The table for a new context.
pub(super) fn operations() -> ibv_context_ops {
    ibv_context_ops {
        _compat_query_device: Some(devices::ibv_query_device),
        _compat_query_port: NONE,
        _compat_pd_mr: [NONE; 5],
        alloc_mw: Some(super::unsupported::alloc_mw),
        bind_mw: Some(super::unsupported::bind_mw),
        dealloc_mw: Some(super::unsupported::dealloc_mw),
        _compat_create_cq: NONE,
        poll_cq: Some(poll_cq),
        req_notify_cq: Some(req_notify_cq),
        _compat_cq_srq: [NONE; 7],
        post_srq_recv: Some(post_srq_recv),
        _compat_qp: [NONE; 4],
        post_send: Some(post_send),
        post_recv: Some(post_recv),
        _compat_rest: [NONE; 5],
    }
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, count: c_int, wc: *mut ibv_wc) -> c_int {
    let polled = caught(|| {
        // SAFETY: the caller's promise.
        let ours: &Cq = unsafe { from_c(cq) }?;
        // SAFETY: a live queue's context is open.
        let open = unsafe { context_of(ours.c.context) }?;
        let most = usize::try_from(count).unwrap_or(0);
        let mut at = wc;
        let mut take = |completion: ibv_wc| {
            // SAFETY: the program has room for `count` of them.
            unsafe {
                at.write(completion);
                at = at.add(1);
            }
        };
        let polled = ours.queue.poll(most, &mut take).map_err(|()| Errno::IO)?;
        if polled > 0 || most == 0 {
            return Ok(polled);
        }
        // Nothing completed: do the work for which the engine's thread would otherwise have to be woken.
        open.process.engine.progress();
        ours.queue.poll(most, &mut take).map_err(|()| Errno::IO)
    });
    match polled {
        Ok(polled) => polled as c_int,
        Err(error) => {
            set_errno(error);
            -1
        }
    }
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    super::status(|| {
        // SAFETY: the caller's promise.
        let ours: &Cq = unsafe { from_c(cq) }?;
        // SAFETY: a live queue's context is open.
        let open = unsafe { context_of(ours.c.context) }?;
        ours.queue.arm(solicited_only != 0);
        open.process.engine.take_over();
        Ok(())
    })
}

unsafe fn elements(list: *const ibv_sge, count: c_int) -> Result<Vec<ibv_sge>, Errno> {
    let count = usize::try_from(count)
        .ok()
        .filter(|count| *count <= MAX_SGE as usize)
        .ok_or(Errno::INVAL)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    if list.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the program's list has that many elements.
    Ok(unsafe { core::slice::from_raw_parts(list, count) }.to_vec())
}

unsafe fn buffers(
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(Buffer) -> Result<(), Errno>,
) -> c_int {
    while !wr.is_null() {
        let posted = caught(|| {
            // SAFETY: the program's list of work requests, until a NULL.
            let request = unsafe { wr.read() };
            // SAFETY: its own list of elements.
            let sges = unsafe { elements(request.sg_list, request.num_sge) }?;
            post(Buffer { wr_id: request.wr_id, sges })?;
            Ok(request.next)
        });
        match posted {
            Ok(next) => wr = next,
            Err(error) => {
                if !bad.is_null() {
                    // SAFETY: the program's variable.
                    unsafe { bad.write(wr) };
                }
                set_errno(error);
                return error.raw_os_error();
            }
        }
    }
    0
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = |buffer| {
        // SAFETY: the caller's promise; a live queue pair's context is open.
        let ours: &Qp = unsafe { from_c(qp) }?;
        // SAFETY: as above.
        unsafe { context_of(ours.c.context) }?;
        ours.qp.post_receive(buffer)
    };
    // SAFETY: the caller's promise.
    unsafe { buffers(wr, bad, post) }
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = |buffer| {
        // SAFETY: the caller's promise; a live queue's context is open.
        let ours: &Srq = unsafe { from_c(srq) }?;
        // SAFETY: as above.
        unsafe { context_of(ours.c.context) }?;
        ours.queue.post(buffer)
    };
    // SAFETY: the caller's promise.
    unsafe { buffers(wr, bad, post) }
}

/// Reads one work request of the program.
unsafe fn work(request: &ibv_send_wr, datagram: bool) -> Result<Work, Errno> {
    let (opcode, imm) = match request.opcode {
        IBV_WR_SEND => (Opcode::Send, None),
        IBV_WR_SEND_WITH_IMM => (Opcode::Send, Some(request.imm_data)),
        IBV_WR_RDMA_WRITE => (Opcode::Write, None),
        IBV_WR_RDMA_WRITE_WITH_IMM => (Opcode::Write, Some(request.imm_data)),
        IBV_WR_RDMA_READ => (Opcode::Read, None),
        IBV_WR_ATOMIC_CMP_AND_SWP => (Opcode::CompareSwap, None),
        IBV_WR_ATOMIC_FETCH_AND_ADD => (Opcode::FetchAdd, None),
        _ => return Err(Errno::OPNOTSUPP),
    };
    // SAFETY: the program's own list.
    let sges = unsafe { elements(request.sg_list, request.num_sge) }?;
    let (mut remote, mut operands, mut target) = ((0, 0), (0, 0), None);
    match opcode {
        Opcode::Write | Opcode::Read => {
            // SAFETY: the member that goes with this opcode.
            let rdma = unsafe { request.wr.rdma };
            remote = (rdma.remote_addr, rdma.rkey);
        }
        Opcode::CompareSwap | Opcode::FetchAdd => {
            // SAFETY: the member that goes with this opcode.
            let atomic = unsafe { request.wr.atomic };
            remote = (atomic.remote_addr, atomic.rkey);
            operands = (atomic.compare_add, atomic.swap);
        }
        Opcode::Send if datagram => {
            // SAFETY: the member that goes with this type of queue pair.
            let ud = unsafe { request.wr.ud };
            // SAFETY: an address handle of the program, live until the work is complete.
            let handle: &AddressHandle = unsafe { from_c(ud.ah) }?;
            target =
                Some(Target { address: handle.attr, qpn: ud.remote_qpn, qkey: ud.remote_qkey });
        }
        Opcode::Send => {}
    }
    let flags = request.send_flags;
    let data = if flags & IBV_SEND_INLINE != 0 { inline(&sges)? } else { Data::Gather(sges) };
    Ok(Work {
        wr_id: request.wr_id,
        opcode,
        imm,
        signaled: flags & IBV_SEND_SIGNALED != 0,
        solicited: flags & IBV_SEND_SOLICITED != 0,
        fence: flags & IBV_SEND_FENCE != 0,
        data,
        remote,
        operands,
        target,
        arrival: None,
    })
}

/// Copies inline data now: the program may change it as soon as the call returns.
fn inline(sges: &[ibv_sge]) -> Result<Data, Errno> {
    let list: Vec<_> = sges
        .iter()
        .filter(|sge| sge.length > 0)
        .map(|sge| Segment { addr: sge.addr, len: u64::from(sge.length) })
        .collect();
    let length: u64 = list.iter().map(|segment| segment.len).sum();
    if length > u64::from(MAX_INLINE_DATA) {
        return Err(Errno::INVAL);
    }
    let mut bytes = vec![0; length as usize];
    copy::gather(&list, &mut bytes)?;
    Ok(Data::Inline(bytes))
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let mut refused = first;
    let posted = caught(|| {
        // SAFETY: the caller's promise.
        let ours: &Qp = unsafe { from_c(qp) }?;
        // SAFETY: a live queue pair's context is open.
        let open = unsafe { context_of(ours.c.context) }?;
        let datagram = ours.c.qp_type == IBV_QPT_UD;
        let (mut works, mut pointers) = (Vec::new(), Vec::new());
        let mut failed = Ok(());
        let mut wr = first;
        while !wr.is_null() {
            // SAFETY: the program's list of work requests, until a NULL.
            let request = unsafe { wr.read() };
            // SAFETY: what it points to is the program's.
            match unsafe { work(&request, datagram) } {
                Ok(work) => works.push(work),
                Err(error) => {
                    refused = wr;
                    failed = Err(error);
                    break;
                }
            }
            pointers.push(wr);
            wr = request.next;
        }
        if let Err((index, error)) = ours.qp.post_send(&open.process.hca, works) {
            refused = pointers[index];
            return Err(error);
        }
        failed
    });
    match posted {
        Ok(()) => 0,
        Err(error) => {
            if !bad.is_null() {
                // SAFETY: the program's variable.
                unsafe { bad.write(refused) };
            }
            set_errno(error);
            error.raw_os_error()
        }
    }
}
