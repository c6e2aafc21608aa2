//! The HCA itself, without C and without sockets: regions, queues and queue pairs of one process.
//!
//! `requester` sends work requests, `responder` executes those of peers, `datagram` does both for
//! UD. They reach the outside through [`Fabric`] and [`Link`], which the `link` module implements
//! and tests replace.
//!
//! Lock order: send queue, receive side, completion or shared queue. No lock is held while data of arbitrary length is
//! copied, except uses of the permits involved (see [`permit`]).

pub(crate) mod completion;
pub(crate) mod copy;
pub(crate) mod datagram;
pub(crate) mod events;
pub(crate) mod memory;
pub(crate) mod model;
pub(crate) mod permit;
pub(crate) mod pinned;
pub(crate) mod qp;
pub(crate) mod receive;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod transitions;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Instant;

use rustix::io::Errno;

use crate::abi::{IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, ibv_ah_attr};
use crate::fabric::{MAX_DEVICES, MAX_QPS, Owner, Port, QpNumber};
use crate::ports::{PortCounters, Ports};
use crate::stats::Stats;
use crate::wire::Frame;
use events::{AsyncEvent, EventQueue, lock};
use memory::Regions;
use permit::Access;
use qp::QueuePair;

/// Work requests of one queue.
pub(crate) const MAX_WR: u32 = 32768;
/// Scatter/gather elements of one work request.
pub(crate) const MAX_SGE: u32 = 30;
/// Longest inline data.
pub(crate) const MAX_INLINE_DATA: u32 = 1024;
/// Outstanding reads and atomics of one queue pair.
pub(crate) const MAX_RD_ATOMIC: u32 = 16;

/// Counters before a node is joined.
static UNSHARED: Ports = [const { PortCounters::new() }; MAX_DEVICES as usize];

/// Bytes that follow a frame.
pub(crate) enum Payload {
    /// None.
    Empty,
    /// A few, already copied.
    Bytes(Vec<u8>),
    /// Registered memory, written to the stream from where it is.
    Memory(Access),
}

/// The connection to the process that owns a peer's queue pairs.
pub(crate) trait Link: Send + Sync {
    /// Whether a request can be sent now. If not, the fabric transmits for the attached queue pairs later.
    fn ready(&self) -> bool;
    /// Whether the peer can read our memory.
    fn direct(&self) -> bool;
    /// Whether we can read the peer's.
    fn can_pull(&self) -> bool;
    /// Whether it is gone for good.
    fn broken(&self) -> bool;
    /// Attaches a queue pair, which is then told of changes.
    fn attach(&self, qp: &Arc<QueuePair>);
    /// Queues a request; `flush` follows.
    fn send(&self, frame: &Frame, payload: Payload);
    /// Queues a datagram. `false`: the queue is full or the link is broken, and the datagram is lost.
    fn send_datagram(&self, frame: &Frame, payload: &[u8]) -> bool;
    /// Hands what is queued to the kernel.
    fn flush(&self);
}

/// Makes links, and wakes queue pairs later.
pub(crate) trait Fabric: Send + Sync {
    /// The link to a process, made at first use.
    fn link(&self, to: Owner) -> Result<Arc<dyn Link>, Errno>;
    /// Transmits for a queue pair at the given time.
    fn wake_at(&self, when: Instant, qp: &Arc<QueuePair>);
    /// Takes a port of this node down.
    fn take_down(&self, device: u8);
}

/// The HCAs of this process (each object knows which device it belongs to).
pub(crate) struct Hca {
    /// Slot of this process in its node.
    pub(crate) slot: u16,
    pub(crate) regions: Regions,
    pub(crate) stats: &'static Stats,
    /// Counters of the node's ports, by device.
    pub(crate) ports: &'static Ports,
    /// Payloads up to this length travel inside requests.
    pub(crate) inline_limit: u32,
    /// The modelled speed of the links.
    pub(crate) model: Option<model::LinkModel>,
    /// A port that goes down by itself, and after how many bytes.
    pub(crate) failing: Option<(u8, u64)>,
    /// Event queues of open contexts, by device: they are told of changes of their port.
    listeners: Mutex<Vec<(u8, Weak<EventQueue<AsyncEvent>>)>>,
    fabric: RwLock<Option<Arc<dyn Fabric>>>,
    qps: RwLock<HashMap<u32, Arc<QueuePair>>>,
    next_qp: AtomicU32,
    /// Held during an atomic of a peer.
    atomics: Mutex<()>,
}

impl Hca {
    /// An empty HCA, without a fabric yet.
    pub(crate) fn new(slot: u16, first_qp: u32, inline_limit: u32, stats: &'static Stats) -> Self {
        Self {
            slot,
            regions: Regions::default(),
            stats,
            ports: &UNSHARED,
            inline_limit,
            model: None,
            failing: None,
            listeners: Mutex::default(),
            fabric: RwLock::default(),
            qps: RwLock::default(),
            next_qp: AtomicU32::new(first_qp),
            atomics: Mutex::default(),
        }
    }

    /// Connects it to the fabric.
    pub(crate) fn attach(&self, fabric: Arc<dyn Fabric>) {
        *self.fabric.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(fabric);
    }

    fn fabric(&self) -> Option<Arc<dyn Fabric>> {
        self.fabric.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// The counters of a port.
    pub(crate) fn counters(&self, port: Port) -> &'static PortCounters {
        &self.ports[usize::from(port.device % MAX_DEVICES)]
    }

    /// Whether a port is down. A port that is configured to fail is taken down here, once.
    fn is_down(&self, port: Port) -> bool {
        let counters = self.counters(port);
        if let Some((device, limit)) = self.failing
            && device == port.device
            && counters.link_downed.load(Ordering::Relaxed) == 0
        {
            let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let fails = load(&counters.xmit_bytes) + load(&counters.rcv_bytes) >= limit;
            if let Some(fabric) = self.fabric().filter(|_| fails) {
                fabric.take_down(device);
                counters.set_down(true);
            }
        }
        counters.is_down()
    }

    /// Registers a context for changes of its port.
    pub(crate) fn listen(&self, device: u8, events: &Arc<EventQueue<AsyncEvent>>) {
        let mut listeners = lock(&self.listeners);
        listeners.retain(|(_, events)| events.strong_count() > 0);
        listeners.push((device, Arc::downgrade(events)));
    }

    /// A port went down or up.
    pub(crate) fn port_changed(&self, device: u8, down: bool) {
        let kind = if down { IBV_EVENT_PORT_ERR } else { IBV_EVENT_PORT_ACTIVE };
        for (_, events) in lock(&self.listeners).iter().filter(|(of, _)| *of == device) {
            if let Some(events) = events.upgrade() {
                // The only port has number 1.
                events.push(AsyncEvent { kind, element: 1 });
            }
        }
    }

    /// Adds a queue pair under a number that was not used for a long time.
    pub(crate) fn add_qp(
        &self,
        make: impl FnOnce(QpNumber) -> Arc<QueuePair>,
    ) -> Result<Arc<QueuePair>, Errno> {
        let mut qps = self.qps.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        if qps.len() as u32 >= MAX_QPS {
            return Err(Errno::NOMEM);
        }
        let number = loop {
            let number = QpNumber::new(self.slot, self.next_qp.fetch_add(1, Ordering::Relaxed));
            if !qps.contains_key(&number.raw()) {
                break number;
            }
        };
        let qp = make(number);
        qps.insert(number.raw(), qp.clone());
        Ok(qp)
    }

    /// Removes a queue pair from the table.
    pub(crate) fn remove_qp(&self, number: u32) {
        self.qps.write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&number);
    }

    /// A queue pair by number.
    pub(crate) fn qp(&self, number: u32) -> Option<Arc<QueuePair>> {
        self.qps.read().unwrap_or_else(|poisoned| poisoned.into_inner()).get(&number).cloned()
    }

    /// Reads, changes and writes 8 bytes of a region; atomic among the operations of this HCA.
    fn atomic(&self, at: &Access, change: impl FnOnce(u64) -> u64) -> Option<u64> {
        let _one_at_a_time = lock(&self.atomics);
        let (segments, _uses) = at.lock().ok()?;
        let mut bytes = [0; 8];
        copy::gather(&segments, &mut bytes).ok()?;
        let old = u64::from_ne_bytes(bytes);
        copy::scatter(&change(old).to_ne_bytes(), &segments).ok()?;
        Some(old)
    }
}

/// The port an address handle leads to.
pub(crate) fn destination(attr: &ibv_ah_attr) -> Option<Port> {
    if attr.is_global != 0 { Port::from_gid(&attr.grh.dgid) } else { Port::from_lid(attr.dlid) }
}
