//! A queue pair: what both sides of it share, its state changes, its destruction.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::Hca;
use super::completion::CompletionQueue;
use super::events::{AsyncEvent, EventQueue, Unacknowledged, lock};
use super::permit::Permit;
use super::receive::{Buffer, ReceiveQueue, SharedQueue};
use super::requester::SendQueue;
use super::transitions::{self, Kind};
use crate::abi::*;
use crate::fabric::{Port, QpNumber};
use crate::ports::PortCounters;

/// What a queue pair is made of.
pub(crate) struct Parts {
    pub(crate) kind: Kind,
    pub(crate) domain: u32,
    pub(crate) port: Port,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    pub(crate) shared: Option<Arc<SharedQueue>>,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) signal_all: bool,
    pub(crate) asynchronous: Arc<EventQueue<AsyncEvent>>,
    /// Counters of the port.
    pub(crate) counters: &'static PortCounters,
}

/// The receiving side.
pub(super) struct ReceiveSide {
    pub(super) queue: ReceiveQueue,
    /// Sequence number of the next request.
    pub(super) expected: u32,
    /// A request was refused (receiver not ready); later ones are ignored until it is sent again.
    pub(super) refused: bool,
    /// The buffer that is being filled.
    pub(super) current: Option<ReceiveInProgress>,
}

/// A receive buffer that is being filled.
pub(super) struct ReceiveInProgress {
    /// Sequence number of the request.
    pub(super) psn: u32,
    /// The completion that it will get.
    pub(super) wc: ibv_wc,
    pub(super) solicited: bool,
    pub(super) buffer: Buffer,
}

/// A queue pair.
pub(crate) struct QueuePair {
    pub(crate) number: QpNumber,
    pub(crate) parts: Parts,
    attributes: Mutex<ibv_qp_attr>,
    /// The state in `attributes`, readable without its lock.
    state: AtomicI32,
    /// Set when the program destroys it: nothing completes after that.
    gone: AtomicBool,
    /// Whether the event that no shared buffer is used any more was raised.
    last_wqe: AtomicBool,
    pub(super) send: Mutex<SendQueue>,
    pub(super) receive: Mutex<ReceiveSide>,
    /// For the memory of all its work: revoked before work is flushed, replaced in RESET.
    permit: Mutex<Arc<Permit>>,
    /// The C object, for events.
    pub(crate) object: AtomicUsize,
    pub(crate) unacknowledged: Unacknowledged,
}

impl QueuePair {
    /// A queue pair in state RESET.
    pub(crate) fn new(number: QpNumber, parts: Parts) -> Self {
        let cap = parts.cap;
        Self {
            number,
            attributes: Mutex::new(ibv_qp_attr { cap, ..Default::default() }),
            state: AtomicI32::new(IBV_QPS_RESET),
            gone: AtomicBool::new(false),
            last_wqe: AtomicBool::new(false),
            send: Mutex::default(),
            receive: Mutex::new(ReceiveSide {
                queue: ReceiveQueue::new(cap.max_recv_wr, cap.max_recv_sge),
                expected: 0,
                refused: false,
                current: None,
            }),
            permit: Mutex::default(),
            object: AtomicUsize::new(0),
            unacknowledged: Unacknowledged::default(),
            parts,
        }
    }

    /// Its state.
    pub(crate) fn state(&self) -> i32 {
        self.state.load(Ordering::Acquire)
    }

    /// Whether it receives messages; true also if only sending has stopped.
    pub(super) fn receives(&self) -> bool {
        matches!(self.state(), IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQE)
    }

    /// Whether it sends, and handles acknowledgements.
    pub(super) fn sends(&self) -> bool {
        self.state() == IBV_QPS_RTS
    }

    /// Permits the use of the memory of its work. A thread that takes up work checks the state and gets this while it
    /// holds the lock of that side (send or receive).
    pub(super) fn permit(&self) -> Arc<Permit> {
        lock(&self.permit).clone()
    }

    /// A copy of its attributes.
    pub(crate) fn attributes(&self) -> ibv_qp_attr {
        *lock(&self.attributes)
    }

    /// An error in the send queue of a datagram queue pair stops sending; receiving goes on.
    pub(super) fn stop_sending(&self, send: &mut SendQueue) {
        let mut attributes = lock(&self.attributes);
        if attributes.qp_state == IBV_QPS_RTS {
            (attributes.qp_state, attributes.cur_qp_state) = (IBV_QPS_SQE, IBV_QPS_SQE);
            self.state.store(IBV_QPS_SQE, Ordering::Release);
        }
        drop(attributes);
        self.flush_send(send);
    }

    /// Changes attributes and state.
    pub(crate) fn modify(
        self: &Arc<Self>,
        hca: &Hca,
        new: &ibv_qp_attr,
        mask: i32,
    ) -> Result<(), Errno> {
        let (from, attributes) = {
            let mut attributes = lock(&self.attributes);
            let from = attributes.qp_state;
            transitions::modify(self.parts.kind, &mut attributes, new, mask)?;
            self.state.store(attributes.qp_state, Ordering::Release);
            (from, *attributes)
        };
        match attributes.qp_state {
            IBV_QPS_RESET => self.empty(),
            IBV_QPS_ERR => self.flush(),
            IBV_QPS_RTR if from != IBV_QPS_RTR => {
                let mut receive = lock(&self.receive);
                (receive.expected, receive.refused) = (attributes.rq_psn & 0xff_ffff, false);
            }
            IBV_QPS_RTS if from != IBV_QPS_RTS => {
                let mut send = lock(&self.send);
                if from == IBV_QPS_RTR {
                    send.start(&attributes);
                }
                self.transmit(hca, &mut send);
            }
            _ => {}
        }
        Ok(())
    }

    /// Moves to the error state without a request of the program, and raises `event`, if any.
    pub(super) fn fail(&self, event: Option<i32>) {
        {
            let mut attributes = lock(&self.attributes);
            if matches!(attributes.qp_state, IBV_QPS_ERR | IBV_QPS_RESET) {
                return;
            }
            attributes.qp_state = IBV_QPS_ERR;
            attributes.cur_qp_state = IBV_QPS_ERR;
            self.state.store(IBV_QPS_ERR, Ordering::Release);
        }
        if let Some(kind) = event {
            self.notify(kind);
        }
    }

    fn notify(&self, kind: i32) {
        let element = self.object.load(Ordering::Relaxed);
        let exists = || element != 0 && !self.gone.load(Ordering::Acquire);
        self.parts.asynchronous.push_if(AsyncEvent { kind, element }, exists);
    }

    /// Completes all that is queued with a flush error. The state was ERR when the caller decided this. If it no longer
    /// is, the queue pair was reset meanwhile, and there is nothing to flush.
    pub(crate) fn flush(&self) {
        let mut send = lock(&self.send);
        self.flush_send(&mut send);
        drop(send);
        self.flush_receive();
    }

    pub(super) fn flush_receive(&self) {
        let mut receive = lock(&self.receive);
        // Checked under the lock, which a reset takes before it replaces the permit.
        if self.state() != IBV_QPS_ERR {
            return;
        }
        self.permit().revoke();
        // The buffer that is being filled was posted first.
        let mut current = receive.current.take().map(|filling| filling.buffer);
        while let Some(buffer) = current.take().or_else(|| receive.queue.take()) {
            let wc = ibv_wc {
                wr_id: buffer.wr_id,
                status: IBV_WC_WR_FLUSH_ERR,
                opcode: IBV_WC_RECV,
                ..Default::default()
            };
            self.complete_receive(wc, false);
        }
        // Only once each time the error state is reached.
        if self.parts.shared.is_some() && !self.last_wqe.swap(true, Ordering::AcqRel) {
            self.notify(IBV_EVENT_QP_LAST_WQE_REACHED);
        }
    }

    /// Adds a completion of the receive side; its lock is held.
    pub(super) fn complete_receive(&self, wc: ibv_wc, solicited: bool) {
        if !self.gone.load(Ordering::Acquire) {
            self.parts.recv_cq.push(ibv_wc { qp_num: self.number.raw(), ..wc }, solicited);
        }
    }

    /// Adds a completion of the send side; its lock is held.
    pub(super) fn complete_send(&self, wc: ibv_wc) {
        if !self.gone.load(Ordering::Acquire) {
            self.parts.send_cq.push(ibv_wc { qp_num: self.number.raw(), ..wc }, false);
        }
    }

    /// Drops all that is queued, without completions.
    fn empty(&self) {
        let mut send = lock(&self.send);
        let mut receive = lock(&self.receive);
        self.last_wqe.store(false, Ordering::Release);
        let permit = core::mem::take(&mut *lock(&self.permit));
        permit.revoke();
        *send = SendQueue::default();
        receive.current = None;
        while receive.queue.take().is_some() {}
        drop((send, receive));
        self.parts.send_cq.forget(self.number.raw());
        self.parts.recv_cq.forget(self.number.raw());
    }

    /// Posts a receive buffer.
    pub(crate) fn post_receive(&self, buffer: Buffer) -> Result<(), Errno> {
        if self.parts.shared.is_some() || self.state() == IBV_QPS_RESET {
            return Err(Errno::INVAL);
        }
        let mut receive = lock(&self.receive);
        receive.queue.post(buffer)?;
        // Checked under the lock: whoever flushes has set the state before the flush takes the lock.
        let flush = self.state() == IBV_QPS_ERR;
        drop(receive);
        if flush {
            self.flush_receive();
        }
        Ok(())
    }

    /// Destroys it: no completion or event comes after this returns.
    pub(crate) fn destroy(&self, hca: &Hca) {
        hca.remove_qp(self.number.raw());
        {
            let _send = lock(&self.send);
            let _receive = lock(&self.receive);
            self.gone.store(true, Ordering::Release);
            self.state.store(IBV_QPS_RESET, Ordering::Release);
        }
        self.empty();
        let element = self.object.load(Ordering::Relaxed);
        let about_us = |event: &AsyncEvent| {
            event.element == element
                && !matches!(event.kind, IBV_EVENT_CQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED)
        };
        self.parts.asynchronous.withdraw(about_us);
        self.unacknowledged.wait();
    }
}
