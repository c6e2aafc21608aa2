//! The sending side of a reliable connection: work requests in, completions out.
//!
//! Requests are sent in order, each with a sequence number, as many as the link takes. They stay in the queue until they are
//! acknowledged, in order. If a peer is not ready, we wait, then send the request that it refused and everything after it again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::events::lock;
use super::permit::{Access, Revoked};
use super::qp::QueuePair;
use super::transitions::Kind;
use super::{Hca, Link, Payload, copy, destination, memory};
use crate::abi::*;
use crate::fabric::{Owner, QpNumber};
use crate::wire::{
    Frame, MAX_MESSAGE, MAX_SEGMENTS, Opcode, Outcome, Reference, Request, Response,
};

/// Bytes of a work request: copied when it was posted, or still in registered memory.
pub(crate) enum Data {
    Inline(Vec<u8>),
    Gather(Vec<ibv_sge>),
}

impl Data {
    /// Bytes in all.
    pub(crate) fn length(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Gather(sges) => sges.iter().map(|sge| u64::from(sge.length)).sum(),
        }
    }
}

/// Where a datagram goes.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) address: ibv_ah_attr,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
}

/// A posted work request.
pub(crate) struct Work {
    pub(crate) wr_id: u64,
    pub(crate) opcode: Opcode,
    pub(crate) imm: Option<u32>,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
    pub(crate) data: Data,
    pub(crate) remote: (u64, u32),
    pub(crate) operands: (u64, u64),
    pub(crate) target: Option<Target>,
    /// When the modelled link has delivered it; set when its turn comes.
    pub(crate) arrival: Option<Instant>,
}

impl Work {
    /// Reads and atomics: they return data, and the number in flight is limited.
    fn returns_data(&self) -> bool {
        matches!(self.opcode, Opcode::Read | Opcode::CompareSwap | Opcode::FetchAdd)
    }

    fn wc_opcode(&self) -> i32 {
        match self.opcode {
            Opcode::Send => IBV_WC_SEND,
            Opcode::Write => IBV_WC_RDMA_WRITE,
            Opcode::Read => IBV_WC_RDMA_READ,
            Opcode::CompareSwap => IBV_WC_COMP_SWAP,
            Opcode::FetchAdd => IBV_WC_FETCH_ADD,
        }
    }

    /// The completion of this work.
    pub(super) fn completion(&self, status: i32) -> ibv_wc {
        let byte_len = self.data.length() as u32;
        ibv_wc {
            wr_id: self.wr_id,
            status,
            opcode: self.wc_opcode(),
            byte_len,
            ..Default::default()
        }
    }
}

/// Work that was posted and is not complete.
#[derive(Default)]
pub(crate) struct SendQueue {
    queue: VecDeque<Work>,
    /// How many at the front of the queue were sent.
    sent: usize,
    /// How many of those that were sent return data.
    reads: u32,
    /// Sequence number of the front.
    front_psn: u32,
    retries: u8,
    rnr_retries: u8,
    /// Nothing is sent before this time.
    paused: Option<Instant>,
    /// The timer for work on the modelled link.
    wake: Option<Instant>,
    link: Option<Arc<dyn Link>>,
}

impl SendQueue {
    /// The queue pair has reached RTS.
    pub(super) fn start(&mut self, attributes: &ibv_qp_attr) {
        self.front_psn = attributes.sq_psn & 0xff_ffff;
        (self.retries, self.rnr_retries) = (attributes.retry_cnt, attributes.rnr_retry);
    }

    /// Marks everything as not sent, so that it is sent again.
    fn go_back(&mut self) {
        (self.sent, self.reads) = (0, 0);
    }
}

/// Time that a receiver asks for by the code in an RNR NAK: table 45 of the specification.
pub(super) fn rnr_time(code: u8) -> Duration {
    const MICROS: [u32; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
        5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122_880, 163_840, 245_760,
        327_680, 491_520,
    ];
    Duration::from_micros(u64::from(MICROS[usize::from(code & 31)]))
}

impl QueuePair {
    /// Posts work requests. The error has the index of the request that was refused; those before it are posted.
    pub(crate) fn post_send(
        self: &Arc<Self>,
        hca: &Hca,
        works: Vec<Work>,
    ) -> Result<(), (usize, Errno)> {
        let mut send = lock(&self.send);
        let mut result = Ok(());
        for (index, work) in works.into_iter().enumerate() {
            if let Err(error) = self.check(&send, &work) {
                result = Err((index, error));
                break;
            }
            send.queue.push_back(work);
        }
        if matches!(self.state(), IBV_QPS_ERR | IBV_QPS_SQE) {
            self.flush_send(&mut send);
        } else {
            self.transmit(hca, &mut send);
        }
        result
    }

    fn check(&self, send: &SendQueue, work: &Work) -> Result<(), Errno> {
        let cap = &self.parts.cap;
        if !matches!(self.state(), IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR) {
            return Err(Errno::INVAL);
        }
        if send.queue.len() >= cap.max_send_wr as usize {
            return Err(Errno::NOMEM);
        }
        match &work.data {
            Data::Inline(bytes) if bytes.len() > cap.max_inline_data as usize => {
                return Err(Errno::INVAL);
            }
            Data::Gather(sges) if sges.len() > cap.max_send_sge as usize => {
                return Err(Errno::INVAL);
            }
            Data::Inline(_) if work.returns_data() => return Err(Errno::INVAL),
            _ => {}
        }
        let datagram = self.parts.kind == Kind::Ud;
        if datagram != work.target.is_some() || datagram && work.opcode != Opcode::Send {
            return Err(Errno::INVAL);
        }
        Ok(())
    }

    /// Sends what can be sent. Called whenever something changed that work may have waited for.
    pub(crate) fn transmit_again(self: &Arc<Self>, hca: &Hca) {
        let mut send = lock(&self.send);
        self.transmit(hca, &mut send);
    }

    pub(super) fn transmit(self: &Arc<Self>, hca: &Hca, send: &mut SendQueue) {
        if !self.sends() || send.sent >= send.queue.len() {
            return;
        }
        if self.parts.kind == Kind::Ud {
            while !self.is_delayed(hca, send) {
                let Some(work) = send.queue.pop_front() else { return };
                if !self.send_datagram(hca, work) {
                    return self.stop_sending(send);
                }
            }
            return;
        }
        if send.paused.is_some_and(|until| Instant::now() < until) {
            return;
        }
        send.paused = None;
        let attributes = self.attributes();
        if hca.is_down(self.parts.port) {
            // Requests in flight will be answered, if only with `Dropped`. Do not resend them before: a peer that has
            // executed one no longer expects it and would drop it each time.
            if send.sent > 0 {
                return;
            }
            self.parts.counters.xmit_discards.fetch_add(1, Ordering::Relaxed);
            return self.lost(hca, send, &attributes);
        }
        let link = match self.link(hca, send, &attributes) {
            Ok(link) => link,
            // This process or the peer is short of a resource; it may have it later.
            Err(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // No answer will come, so there must be a timeout after which to try again.
                let timeout = if attributes.timeout == 0 { 14 } else { attributes.timeout };
                return self.lost(hca, send, &ibv_qp_attr { timeout, ..attributes });
            }
            Err(_) => return self.fail_front(send, IBV_WC_RETRY_EXC_ERR),
        };
        if link.broken() {
            return self.fail_front(send, IBV_WC_RETRY_EXC_ERR);
        }
        let mut any = false;
        while send.sent < send.queue.len() && link.ready() && !self.is_delayed(hca, send) {
            let Some(work) = send.queue.get(send.sent) else { break };
            let limit = u32::from(attributes.max_rd_atomic);
            if work.fence && send.reads > 0
                || work.returns_data() && send.reads >= limit && limit > 0
            {
                break;
            }
            let psn = send.front_psn.wrapping_add(send.sent as u32) & 0xff_ffff;
            match self.request(hca, work, &attributes, &*link, psn) {
                Ok((request, payload)) => {
                    hca.stats.requests.fetch_add(1, Ordering::Relaxed);
                    send.reads += u32::from(work.returns_data());
                    send.sent += 1;
                    link.send(&Frame::Request(request), payload);
                    any = true;
                }
                // Completions are in order: earlier requests end first.
                Err(_) if send.sent > 0 => break,
                Err(status) => {
                    self.fail_front(send, status);
                    break;
                }
            }
        }
        if any {
            link.flush();
        }
    }

    /// Whether the next work is still on the modelled link; if so, sets a timer to try again.
    fn is_delayed(self: &Arc<Self>, hca: &Hca, send: &mut SendQueue) -> bool {
        let (Some(model), Some(work)) = (&hca.model, send.queue.get_mut(send.sent)) else {
            return false;
        };
        let now = Instant::now();
        let (device, length) = (self.parts.port.device, work.data.length());
        let arrival = *work.arrival.get_or_insert_with(|| model.arrival(device, length, now));
        if arrival <= now {
            return false;
        }
        if send.wake != Some(arrival)
            && let Some(fabric) = hca.fabric()
        {
            send.wake = Some(arrival);
            fabric.wake_at(arrival, self);
        }
        true
    }

    fn link(
        self: &Arc<Self>,
        hca: &Hca,
        send: &mut SendQueue,
        attributes: &ibv_qp_attr,
    ) -> Result<Arc<dyn Link>, Errno> {
        if let Some(link) = &send.link {
            return Ok(link.clone());
        }
        let node = destination(&attributes.ah_attr).ok_or(Errno::HOSTUNREACH)?.node;
        let number = QpNumber::from_raw(attributes.dest_qp_num).ok_or(Errno::HOSTUNREACH)?;
        let to = Owner { node, slot: number.slot() };
        let link = hca.fabric().ok_or(Errno::HOSTUNREACH)?.link(to)?;
        link.attach(self);
        send.link = Some(link.clone());
        Ok(link)
    }

    /// The request for a piece of work, or the status with which the work fails.
    fn request(
        &self,
        hca: &Hca,
        work: &Work,
        attributes: &ibv_qp_attr,
        link: &dyn Link,
        psn: u32,
    ) -> Result<(Request, Payload), i32> {
        let length = work.data.length();
        if length > u64::from(MAX_MESSAGE) {
            return Err(IBV_WC_LOC_LEN_ERR);
        }
        let atomic = matches!(work.opcode, Opcode::CompareSwap | Opcode::FetchAdd);
        if work.returns_data() && attributes.max_rd_atomic == 0 || atomic && length != 8 {
            return Err(IBV_WC_LOC_QP_OP_ERR);
        }
        let mut request = Request {
            dst_qpn: attributes.dest_qp_num,
            src_qpn: self.number.raw(),
            src_lid: self.parts.port.lid(),
            dst_lid: destination(&attributes.ah_attr).map_or(0, |port| port.lid()),
            psn,
            opcode: work.opcode,
            imm: work.imm,
            solicited: work.solicited,
            length: length as u32,
            remote: work.remote,
            operands: work.operands,
            by_reference: None,
        };
        let sges = match &work.data {
            Data::Inline(bytes) => return Ok((request, Payload::Bytes(bytes.clone()))),
            Data::Gather(sges) => sges,
        };
        let list = hca
            .regions
            .local(self.parts.domain, sges, work.returns_data())
            .ok_or(IBV_WC_LOC_PROT_ERR)?;
        if atomic {
            return Ok((request, Payload::Empty));
        }
        let access = Access { permit: self.permit(), list };
        let (segments, uses) = access.lock().map_err(|revoked| match revoked {
            Revoked::Work => IBV_WC_WR_FLUSH_ERR,
            Revoked::Region => IBV_WC_LOC_PROT_ERR,
        })?;
        if work.opcode == Opcode::Read {
            request.by_reference = link.can_pull().then(Reference::default);
            return Ok((request, Payload::Empty));
        }
        if length <= u64::from(hca.inline_limit) {
            let mut bytes = vec![0; length as usize];
            copy::gather(&segments, &mut bytes).map_err(|_| IBV_WC_LOC_PROT_ERR)?;
            return Ok((request, Payload::Bytes(bytes)));
        }
        if link.direct() && segments.len() <= MAX_SEGMENTS {
            request.by_reference = Some(access.reference(segments));
            return Ok((request, Payload::Empty));
        }
        drop(uses);
        Ok((request, Payload::Memory(access)))
    }

    /// Completes the work at the front with an error, and puts the queue pair into the error state.
    fn fail_front(&self, send: &mut SendQueue, status: i32) {
        self.fail(None);
        self.permit().revoke();
        if let Some(work) = send.queue.pop_front() {
            self.complete_send(work.completion(status));
        }
        self.flush_send(send);
        self.flush_receive();
    }

    /// Completes what is queued with a flush error, unless a reset is about to drop it.
    pub(super) fn flush_send(&self, send: &mut SendQueue) {
        match self.state() {
            // Revoke before the completions tell the program that it may reuse the memory.
            IBV_QPS_ERR => self.permit().revoke(),
            IBV_QPS_SQE => {}
            _ => return,
        }
        send.go_back();
        while let Some(work) = send.queue.pop_front() {
            self.complete_send(work.completion(IBV_WC_WR_FLUSH_ERR));
        }
    }

    /// The link to the peer is gone: its process ended, or the network failed.
    pub(crate) fn link_lost(&self) {
        let mut send = lock(&self.send);
        if self.sends() && !send.queue.is_empty() {
            self.fail_front(&mut send, IBV_WC_RETRY_EXC_ERR);
        }
    }

    /// Where to place the payload of a response. `None`: the response is not for the work at the front, or its length
    /// is wrong. `Some(Err)`: it is for that work, but the memory is no longer registered.
    pub(crate) fn returned(
        &self,
        hca: &Hca,
        response: &Response,
        length: u32,
    ) -> Option<Result<Access, Revoked>> {
        let send = lock(&self.send);
        let work = send.queue.front()?;
        let fits = send.sent > 0
            && send.front_psn == response.psn
            && work.opcode == Opcode::Read
            && work.data.length() == u64::from(length);
        let Data::Gather(sges) = &work.data else { return None };
        fits.then(|| {
            let list = hca.regions.local(self.parts.domain, sges, true).ok_or(Revoked::Region)?;
            Ok(Access { permit: self.permit(), list })
        })
    }

    /// Handles a response. `placed`: its payload, if it has one, could be placed.
    pub(crate) fn respond(self: &Arc<Self>, hca: &Hca, response: &Response, placed: bool) {
        let mut send = lock(&self.send);
        // Responses to what was sent before going back, or before a reset, are stale.
        if !self.sends() || send.sent == 0 || send.front_psn != response.psn {
            return;
        }
        let attributes = self.attributes();
        if response.src_qpn != attributes.dest_qp_num {
            return;
        }
        match response.outcome {
            Outcome::Ack(value) => {
                let placed = placed && self.return_value(hca, &send, value);
                if !placed {
                    return self.fail_front(&mut send, IBV_WC_LOC_PROT_ERR);
                }
                (send.retries, send.rnr_retries) = (attributes.retry_cnt, attributes.rnr_retry);
                if let Some(work) = send.queue.pop_front() {
                    send.front_psn = send.front_psn.wrapping_add(1) & 0xff_ffff;
                    send.sent -= 1;
                    send.reads -= u32::from(work.returns_data());
                    let (counters, bytes) = (self.parts.counters, work.data.length());
                    if work.opcode == Opcode::Read {
                        counters.received(bytes);
                    } else {
                        counters.sent(bytes);
                    }
                    if work.signaled || self.parts.signal_all {
                        self.complete_send(work.completion(IBV_WC_SUCCESS));
                    }
                }
                self.transmit(hca, &mut send);
            }
            Outcome::ReceiverNotReady(code) => {
                hca.stats.rnr_naks.fetch_add(1, Ordering::Relaxed);
                // 7 means forever.
                if attributes.rnr_retry < 7 {
                    if send.rnr_retries == 0 {
                        return self.fail_front(&mut send, IBV_WC_RNR_RETRY_EXC_ERR);
                    }
                    send.rnr_retries -= 1;
                }
                self.pause(hca, &mut send, Some(rnr_time(code)));
            }
            Outcome::Dropped => self.lost(hca, &mut send, &attributes),
            Outcome::InvalidRequest => self.fail_front(&mut send, IBV_WC_REM_INV_REQ_ERR),
            Outcome::AccessError => self.fail_front(&mut send, IBV_WC_REM_ACCESS_ERR),
            Outcome::OperationError => self.fail_front(&mut send, IBV_WC_REM_OP_ERR),
            Outcome::RequesterFault => self.fail_front(&mut send, IBV_WC_LOC_PROT_ERR),
        }
    }

    /// The request was not accepted: send it again after the timeout, as often as the program allows.
    fn lost(self: &Arc<Self>, hca: &Hca, send: &mut SendQueue, attributes: &ibv_qp_attr) {
        hca.stats.retries.fetch_add(1, Ordering::Relaxed);
        if send.retries == 0 {
            return self.fail_front(send, IBV_WC_RETRY_EXC_ERR);
        }
        send.retries -= 1;
        // A timeout of zero means forever.
        let nanos = 4096u64 << attributes.timeout.min(31);
        let time = (attributes.timeout > 0).then(|| Duration::from_nanos(nanos));
        self.pause(hca, send, time);
    }

    /// Writes the old value of an atomic to the program's memory; the data of a read is there already.
    fn return_value(&self, hca: &Hca, send: &SendQueue, value: u64) -> bool {
        let Some(work) = send.queue.front() else { return false };
        let Data::Gather(sges) = &work.data else { return true };
        if !work.returns_data() {
            return true;
        }
        let list = hca.regions.local(self.parts.domain, sges, true);
        let Some(list) = list else { return false };
        let access = Access { permit: self.permit(), list };
        let Ok((segments, _uses)) = access.lock() else { return false };
        let placed =
            work.opcode == Opcode::Read || copy::scatter(&value.to_ne_bytes(), &segments).is_ok();
        if placed {
            memory::written(&access.list);
        }
        placed
    }

    fn pause(self: &Arc<Self>, hca: &Hca, send: &mut SendQueue, time: Option<Duration>) {
        send.go_back();
        let now = Instant::now();
        // Without a time, never send again: far in the future, and no timer.
        send.paused = Some(now + time.unwrap_or(Duration::from_secs(1 << 30)));
        if let (Some(time), Some(fabric)) = (time, hca.fabric()) {
            fabric.wake_at(now + time, self);
        }
    }
}
