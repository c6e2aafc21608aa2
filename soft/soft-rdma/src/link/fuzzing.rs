//! A connection whose peer sends arbitrary bytes, for the crate `fuzz`. They are understood or the connection is given
//! up, and no memory changes but what is registered for the peer.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::io::Errno;

use super::connection::Connection;
use crate::abi::*;
use crate::fabric::{Owner, Port};
use crate::hca::completion::CompletionQueue;
use crate::hca::events::{EventQueue, lock};
use crate::hca::memory::Registration;
use crate::hca::qp::{Parts, QueuePair};
use crate::hca::receive::Buffer;
use crate::hca::requester::{Data, Work};
use crate::hca::transitions::Kind;
use crate::hca::{Fabric, Hca, Link};
use crate::stats::STATS;
use crate::wire::{Opcode, Segment};

const MARGIN: usize = 64;
const MEMORY: usize = 1024;
/// What the guard areas around the memory are filled with.
const POISON: u8 = 0x5c;
/// The first sequence number of either side.
const PSN: u32 = 7;

/// The one link there is, if any.
#[derive(Default)]
struct OneLink(Mutex<Option<Arc<Connection>>>);

impl Fabric for OneLink {
    fn link(&self, _to: Owner) -> Result<Arc<dyn Link>, Errno> {
        let link = lock(&self.0).clone();
        link.map(|link| link as Arc<dyn Link>).ok_or(Errno::HOSTUNREACH)
    }
    fn wake_at(&self, _when: Instant, _qp: &Arc<QueuePair>) {}
    fn take_down(&self, _device: u8) {}
}

/// A queue pair that is connected to the first queue pair of the process in slot 2.
fn queue_pair(
    hca: &Hca,
    cq: &Arc<CompletionQueue>,
    events: &Arc<EventQueue<crate::hca::events::AsyncEvent>>,
) -> Arc<QueuePair> {
    let port = Port { node: 1, device: 0 };
    let cap = ibv_qp_cap {
        max_send_wr: 16,
        max_recv_wr: 16,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline_data: 64,
    };
    let parts = Parts {
        kind: Kind::Rc,
        domain: 1,
        port,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        shared: None,
        cap,
        signal_all: true,
        asynchronous: events.clone(),
        counters: hca.counters(port),
    };
    let qp = hca.add_qp(|number| Arc::new(QueuePair::new(number, parts))).expect("capacity");
    let mut attr = ibv_qp_attr {
        port_num: 1,
        qp_access_flags: 0xf,
        path_mtu: IBV_MTU_4096,
        dest_qp_num: qp.number.raw(),
        max_rd_atomic: 2,
        max_dest_rd_atomic: 2,
        min_rnr_timer: 1,
        timeout: 1,
        retry_cnt: 1,
        rnr_retry: 1,
        rq_psn: PSN,
        sq_psn: PSN,
        ah_attr: ibv_ah_attr { dlid: port.lid(), port_num: 1, ..Default::default() },
        ..Default::default()
    };
    for (state, mask) in [(IBV_QPS_INIT, 0x39), (IBV_QPS_RTR, 0x12_9181), (IBV_QPS_RTS, 0x1_2e01)] {
        attr.qp_state = state;
        qp.modify(hca, &attr, mask).expect("a valid change");
    }
    qp
}

/// The first byte says which side the peer is: one that connected to us and sends requests, or one that we sent some of every
/// kind. The rest is what it sends.
pub fn stream(bytes: &[u8]) {
    let Some((side, bytes)) = bytes.split_first() else { return };
    let hca = Hca::new(1, 0, 64, &STATS);
    let fabric = Arc::new(OneLink::default());
    hca.attach(fabric.clone());
    let events = Arc::new(EventQueue::new().expect("an eventfd"));
    let cq = Arc::new(CompletionQueue::new(64, None, events.clone()));
    let mut memory = vec![POISON; MEMORY + 2 * MARGIN];
    memory[MARGIN..][..MEMORY].fill(0);
    let piece = Segment { addr: memory[MARGIN..].as_mut_ptr() as u64, len: MEMORY as u64 };
    let access = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_ATOMIC;
    let what = Registration { domain: 1, access, iova: 0, pieces: vec![piece], backing: None };
    let key = hca.regions.register(what, || 0x0101_0101).expect("capacity").key();
    let qp = queue_pair(&hca, &cq, &events);

    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)
        .expect("a descriptor");
    let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
    ours.set_nonblocking(true).expect("set");
    theirs.set_nonblocking(true).expect("set");
    let connecting = side & 1 == 1;
    let peer = (side & 2 == 2).then(rustix::process::getpid);
    let to = connecting.then_some(Owner { node: 1, slot: 2 });
    let ours = std::os::fd::OwnedFd::from(ours);
    let connection = Arc::new(Connection::new(1, ours.into(), Arc::new(epoll.into()), to, peer));
    connection.start().expect("watched");
    *lock(&fabric.0) = Some(connection.clone());

    let sge = |addr: u64, length: u32| ibv_sge { addr, length, lkey: key };
    for wr_id in 0..4 {
        qp.post_receive(Buffer { wr_id, sges: vec![sge(512, 100), sge(700, 28)] })
            .expect("capacity");
    }
    if connecting {
        let all =
            [Opcode::Read, Opcode::FetchAdd, Opcode::Write, Opcode::Send, Opcode::CompareSwap];
        let work = |(wr_id, opcode): (usize, Opcode)| Work {
            wr_id: wr_id as u64,
            opcode,
            imm: None,
            signaled: true,
            solicited: false,
            fence: false,
            data: Data::Gather(vec![sge(
                64 * wr_id as u64,
                if opcode == Opcode::Read { 40 } else { 8 },
            )]),
            remote: (0, key),
            operands: (1, 2),
            target: None,
            arrival: None,
        };
        let _ = qp.post_send(&hca, all.into_iter().enumerate().map(work).collect());
    }
    let mut answers = vec![0; 64 << 10];
    for part in bytes.chunks(4 << 10) {
        if theirs.write_all(part).is_err() || connection.readable(&hca).is_err() {
            break;
        }
        let _ = std::io::Read::read(&mut theirs, &mut answers);
    }
    connection.close();
    cq.poll(64, |wc| assert!(wc.wr_id < 5)).ok();
    *lock(&fabric.0) = None;
    let margins = memory[..MARGIN].iter().chain(&memory[MARGIN + MEMORY..]);
    assert!(
        margins.copied().all(|byte| byte == POISON),
        "memory was written that is not registered"
    );
}
