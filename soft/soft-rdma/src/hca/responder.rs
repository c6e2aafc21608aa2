//! The receiving side of a reliable connection: executes requests of the peer.
//!
//! [`begin`] checks a request and says where its data goes or comes from. The caller moves the bytes, then calls
//! [`Placement::finish`]. Nothing in a request is trusted: every address is looked up by its key, in the protection
//! domain of the queue pair.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::events::lock;
use super::memory::{self, RemoteAccess};
use super::permit::Access;
use super::qp::{QueuePair, ReceiveInProgress};
use super::receive::Buffer;
use super::transitions::Kind;
use super::{Hca, destination};
use crate::abi::*;
use crate::wire::{Opcode, Outcome, Request, Response};

/// What to do with a request.
pub(crate) enum Step {
    /// Nothing more, except to send this answer, if any.
    Done(Option<Response>),
    /// Put its data here, then finish.
    Place(Placement),
    /// Send data from here, then finish.
    Provide(Placement),
}

/// How moving the data of a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferOutcome {
    /// All of it, in one copy from region to region.
    Direct,
    /// All of it, in the stream.
    Streamed,
    /// Memory of this process is gone.
    LocalFault,
    /// The peer, or its memory, is gone.
    PeerFault,
}

/// A request that was accepted and whose data is on the way.
pub(crate) struct Placement {
    qp: Arc<QueuePair>,
    /// Memory of this process, as long as the request's length.
    pub(crate) access: Access,
    response: Response,
    /// Whether the peer reads.
    provides: bool,
}

impl Placement {
    /// The bytes were moved, or could not be.
    pub(crate) fn finish(self, moved: TransferOutcome) -> Response {
        let mut receive = lock(&self.qp.receive);
        // The queue pair was flushed or reset meanwhile, including the receive buffer.
        if self.access.permit.is_revoked() {
            return Response { outcome: Outcome::Dropped, ..self.response };
        }
        let current = receive.current.take_if(|current| current.psn == self.response.psn);
        match moved {
            TransferOutcome::Direct | TransferOutcome::Streamed => {
                let counters = self.qp.parts.counters;
                let bytes = self.access.length();
                if self.provides {
                    counters.sent(bytes)
                } else {
                    counters.received(bytes)
                }
                let direct = moved == TransferOutcome::Direct;
                let way = if direct { &counters.direct_bytes } else { &counters.stream_bytes };
                way.fetch_add(bytes, Ordering::Relaxed);
                memory::written(&self.access.list);
                if let Some(current) = current {
                    self.qp.complete_receive(current.wc, current.solicited);
                }
                self.response
            }
            // As if the message had not arrived: the buffer stays for the next one.
            TransferOutcome::PeerFault => {
                receive.expected = self.response.psn;
                if let Some(ReceiveInProgress { buffer, .. }) = current {
                    match &self.qp.parts.shared {
                        Some(shared) => shared.put_back(buffer),
                        None => receive.queue.put_back(buffer),
                    }
                }
                drop(receive);
                if self.qp.state() == IBV_QPS_ERR {
                    self.qp.flush_receive();
                }
                Response { outcome: Outcome::RequesterFault, ..self.response }
            }
            TransferOutcome::LocalFault => {
                if let Some(ReceiveInProgress { wc, .. }) = current {
                    let status = IBV_WC_LOC_PROT_ERR;
                    self.qp.complete_receive(ibv_wc { status, ..wc }, false);
                }
                self.qp.fail(Some(IBV_EVENT_QP_FATAL));
                drop(receive);
                self.qp.flush();
                Response { outcome: Outcome::OperationError, ..self.response }
            }
        }
    }
}

/// Takes the next receive buffer, shared or own.
fn take_buffer(qp: &QueuePair, receive: &mut super::qp::ReceiveSide) -> Option<Buffer> {
    match &qp.parts.shared {
        Some(shared) => shared.take(),
        None => receive.queue.take(),
    }
}

/// Checks a request and prepares its execution.
pub(crate) fn begin(hca: &Hca, request: &Request) -> Step {
    let answer = |outcome| Response {
        dst_qpn: request.src_qpn,
        src_qpn: request.dst_qpn,
        psn: request.psn,
        outcome,
    };
    let dropped = || {
        hca.stats.dropped.fetch_add(1, Ordering::Relaxed);
        Step::Done(Some(answer(Outcome::Dropped)))
    };
    let Some(qp) = hca.qp(request.dst_qpn).filter(|qp| qp.parts.kind == Kind::Rc) else {
        return dropped();
    };
    let mut receive = lock(&qp.receive);
    let attributes = qp.attributes();
    let from_peer = request.src_qpn == attributes.dest_qp_num
        && request.dst_lid == qp.parts.port.lid()
        && destination(&attributes.ah_attr).is_some_and(|port| port.lid() == request.src_lid);
    let ready = qp.receives() && !hca.is_down(qp.parts.port);
    if !ready || !from_peer {
        return dropped();
    }
    if request.psn != receive.expected || receive.current.is_some() {
        return if receive.refused { Step::Done(None) } else { dropped() };
    }

    let access = match request.opcode {
        Opcode::Send => None,
        Opcode::Write => Some(RemoteAccess::Write),
        Opcode::Read => Some(RemoteAccess::Read),
        Opcode::CompareSwap | Opcode::FetchAdd => Some(RemoteAccess::Atomic),
    };
    // Called with the receive lock held: a concurrent reset is either visible, or still has to take this lock.
    let refuse = |outcome, event| {
        qp.fail(Some(event));
        Step::Done(Some(answer(outcome)))
    };
    let mut targets = Vec::new();
    // A message without bytes touches no memory, so its address and key are not checked.
    if let Some(access) = access.filter(|_| request.length > 0) {
        let atomic = access == RemoteAccess::Atomic;
        let malformed = atomic && (!request.remote.0.is_multiple_of(8) || request.length != 8)
            || access != RemoteAccess::Write && attributes.max_dest_rd_atomic == 0;
        let allowed = attributes.qp_access_flags & access.flag() != 0;
        if malformed || !allowed {
            let step = refuse(Outcome::InvalidRequest, IBV_EVENT_QP_REQ_ERR);
            drop(receive);
            qp.flush();
            return step;
        }
        match hca.regions.remote(qp.parts.domain, request.remote, request.length, access) {
            Some(located) => targets.push(located),
            None => {
                hca.stats.access_errors.fetch_add(1, Ordering::Relaxed);
                let step = refuse(Outcome::AccessError, IBV_EVENT_QP_ACCESS_ERR);
                drop(receive);
                qp.flush();
                return step;
            }
        }
    }

    let needs_buffer = request.opcode == Opcode::Send || request.imm.is_some();
    let mut buffer = None;
    if needs_buffer {
        buffer = take_buffer(&qp, &mut receive);
        if buffer.is_none() {
            receive.refused = true;
            return Step::Done(Some(answer(Outcome::ReceiverNotReady(attributes.min_rnr_timer))));
        }
    }
    receive.refused = false;
    receive.expected = receive.expected.wrapping_add(1) & 0xff_ffff;
    if let Some(buffer) = buffer {
        let wc = ibv_wc {
            wr_id: buffer.wr_id,
            opcode: if request.opcode == Opcode::Send {
                IBV_WC_RECV
            } else {
                IBV_WC_RECV_RDMA_WITH_IMM
            },
            byte_len: request.length,
            imm_data: request.imm.unwrap_or(0),
            wc_flags: if request.imm.is_some() { IBV_WC_WITH_IMM } else { 0 },
            src_qp: request.src_qpn,
            slid: request.src_lid,
            sl: attributes.ah_attr.sl,
            ..Default::default()
        };
        if request.opcode == Opcode::Send {
            let domain = qp.parts.shared.as_ref().map_or(qp.parts.domain, |shared| shared.domain);
            let list = hca.regions.local(domain, &buffer.sges, true);
            let too_short = buffer.length() < u64::from(request.length);
            let (status, outcome) = match list {
                Some(_) if too_short => (IBV_WC_LOC_LEN_ERR, Outcome::InvalidRequest),
                Some(list) => {
                    targets = list;
                    memory::trim(&mut targets, u64::from(request.length));
                    (IBV_WC_SUCCESS, Outcome::Ack(0))
                }
                None => (IBV_WC_LOC_PROT_ERR, Outcome::OperationError),
            };
            if status != IBV_WC_SUCCESS {
                qp.complete_receive(ibv_wc { status, ..wc }, false);
                let step = refuse(outcome, IBV_EVENT_QP_FATAL);
                drop(receive);
                qp.flush();
                return step;
            }
        }
        let (psn, solicited) = (request.psn, request.solicited);
        receive.current = Some(ReceiveInProgress { psn, wc, solicited, buffer });
    }
    let target = Access { permit: qp.permit(), list: targets };
    drop(receive);

    if access == Some(RemoteAccess::Atomic) {
        let (operand, swap) = request.operands;
        let change = |old: u64| match request.opcode {
            Opcode::FetchAdd => old.wrapping_add(operand),
            _ if old == operand => swap,
            _ => old,
        };
        let old = hca.atomic(&target, change);
        return match old {
            Some(old) => {
                hca.stats.atomics.fetch_add(1, Ordering::Relaxed);
                Step::Done(Some(answer(Outcome::Ack(old))))
            }
            None => {
                let receive = lock(&qp.receive);
                if target.permit.is_revoked() {
                    return dropped();
                }
                let step = refuse(Outcome::OperationError, IBV_EVENT_QP_FATAL);
                drop(receive);
                qp.flush();
                step
            }
        };
    }
    let provides = request.opcode == Opcode::Read;
    let response = answer(Outcome::Ack(0));
    let placement = Placement { qp, access: target, response, provides };
    if provides { Step::Provide(placement) } else { Step::Place(placement) }
}
