//! Two HCAs connected by queues in memory: no sockets, no C. Random work must have the effect of the
//! same work done one after another on plain memory, however the link and the receiver delay it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::io::Errno;

use super::completion::CompletionQueue;
use super::copy::{self, Pulled};
use super::events::{EventQueue, lock};
use super::memory::Registration;
use super::permit::Access;
use super::qp::{Parts, QueuePair};
use super::receive::Buffer;
use super::requester::{Data, Work};
use super::responder::{self, Step, TransferOutcome};
use super::transitions::Kind;
use super::{Fabric, Hca, Link, Payload};
use crate::abi::*;
use crate::fabric::{Owner, Port};
use crate::stats::STATS;
use crate::wire::{Frame, Opcode, Outcome, Request, Response, Segment};

/// A link whose frames stay in a queue until the test delivers them.
#[derive(Default)]
struct QueueLink {
    frames: Mutex<VecDeque<(Frame, Vec<u8>)>>,
    direct: AtomicBool,
    /// Requests it takes before it is "full".
    capacity: AtomicUsize,
    broken: AtomicBool,
}

impl Link for QueueLink {
    fn ready(&self) -> bool {
        lock(&self.frames).len() < self.capacity.load(Ordering::Relaxed)
    }
    fn direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }
    fn can_pull(&self) -> bool {
        self.direct()
    }
    fn broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
    fn attach(&self, _qp: &Arc<QueuePair>) {}
    fn send(&self, frame: &Frame, payload: Payload) {
        let bytes = match payload {
            Payload::Empty => Vec::new(),
            Payload::Bytes(bytes) => bytes,
            Payload::Memory(access) => {
                let (segments, _uses) = access.lock().expect("registered");
                let mut bytes = vec![0; segments.iter().map(|s| s.len as usize).sum()];
                copy::gather(&segments, &mut bytes).expect("mapped");
                bytes
            }
        };
        lock(&self.frames).push_back((frame.clone(), bytes));
    }
    fn send_datagram(&self, _frame: &Frame, _payload: &[u8]) -> bool {
        false
    }
    fn flush(&self) {}
}

struct QueueFabric(Arc<QueueLink>, Arc<Mutex<Option<Errno>>>);

impl Fabric for QueueFabric {
    fn link(&self, _to: Owner) -> Result<Arc<dyn Link>, Errno> {
        lock(&self.1).map_or_else(|| Ok(self.0.clone() as Arc<dyn Link>), Err)
    }
    // The test transmits again by itself.
    fn wake_at(&self, _when: Instant, _qp: &Arc<QueuePair>) {}
    fn take_down(&self, _device: u8) {}
}

/// One side: an HCA with a queue pair, a completion queue and a registered buffer.
struct Side {
    hca: Hca,
    link: Arc<QueueLink>,
    /// Why there is no link.
    unreachable: Arc<Mutex<Option<Errno>>>,
    cq: Arc<CompletionQueue>,
    qp: Arc<QueuePair>,
    memory: Box<[u8]>,
    key: u32,
}

const MEMORY: usize = 4096;

impl Side {
    fn new(slot: u16) -> Self {
        Self::on(slot, 0)
    }

    /// With a port of this device, whose state all tests share.
    fn on(slot: u16, device: u8) -> Self {
        let port = Port { node: 1, device };
        let hca = Hca::new(slot, 0, 64, &STATS);
        let link = Arc::new(QueueLink::default());
        link.capacity.store(usize::MAX, Ordering::Relaxed);
        let unreachable = Arc::new(Mutex::default());
        hca.attach(Arc::new(QueueFabric(link.clone(), unreachable.clone())));
        let events = Arc::new(EventQueue::new().expect("an eventfd"));
        let cq = Arc::new(CompletionQueue::new(1000, None, events.clone()));
        let parts = Parts {
            kind: Kind::Rc,
            domain: 1,
            port,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            shared: None,
            cap: ibv_qp_cap {
                max_send_wr: 500,
                max_recv_wr: 500,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            signal_all: true,
            asynchronous: events,
            counters: hca.counters(port),
        };
        let qp = hca.add_qp(|number| Arc::new(QueuePair::new(number, parts))).expect("capacity");
        let mut memory: Box<[u8]> = (0..MEMORY).map(|at| (at * slot as usize) as u8).collect();
        let piece = Segment { addr: memory.as_mut_ptr() as u64, len: MEMORY as u64 };
        let access = IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_ATOMIC;
        let what = Registration { domain: 1, access, iova: 0, pieces: vec![piece], backing: None };
        let key =
            hca.regions.register(what, || 0x10_0000 + u32::from(slot)).expect("capacity").key();
        Self { hca, link, unreachable, cq, qp, memory, key }
    }

    fn connect(&self, to: &Side) {
        let mut attr = ibv_qp_attr {
            port_num: 1,
            qp_access_flags: 0xf,
            path_mtu: IBV_MTU_4096,
            dest_qp_num: to.qp.number.raw(),
            max_rd_atomic: 2,
            max_dest_rd_atomic: 2,
            min_rnr_timer: 1,
            timeout: 1,
            retry_cnt: 7,
            rnr_retry: 7,
            rq_psn: 0xff_fff0,
            sq_psn: 0xff_fff0,
            ah_attr: ibv_ah_attr {
                dlid: to.qp.parts.port.lid(),
                port_num: 1,
                ..Default::default()
            },
            ..Default::default()
        };
        for (state, mask) in
            [(IBV_QPS_INIT, 0x39), (IBV_QPS_RTR, 0x12_9181), (IBV_QPS_RTS, 0x1_2e01)]
        {
            attr.qp_state = state;
            self.qp.modify(&self.hca, &attr, mask).expect("a valid change");
        }
    }

    fn sge(&self, at: usize, length: usize) -> ibv_sge {
        ibv_sge { addr: at as u64, length: length as u32, lkey: self.key }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: inside the box; written by the kernel on behalf of the HCA.
        (0..MEMORY).map(|at| unsafe { self.memory.as_ptr().add(at).read_volatile() }).collect()
    }

    fn completions(&self) -> Vec<ibv_wc> {
        let mut list = Vec::new();
        self.cq.poll(1000, |wc| list.push(wc)).expect("no overrun");
        list
    }

    /// Executes the oldest request of the other side.
    fn serve(&self, other: &Side) -> bool {
        let Some((frame, bytes)) = lock(&other.link.frames).pop_front() else { return false };
        // Across the wire and back: what is sent must be what is understood.
        let mut wire = Vec::new();
        frame.encode(bytes.len() as u32, &mut wire);
        let decoded = Frame::decode(&wire).expect("well formed").expect("complete").0;
        assert_eq!(decoded, frame);
        let Frame::Request(request) = decoded else { panic!("only requests are sent") };
        if let Some((response, data)) = self.execute(&request, &bytes) {
            if !data.is_empty() {
                let place =
                    other.qp.returned(&other.hca, &response, data.len() as u32).expect("wanted");
                let place = place.expect("registered");
                let (segments, _uses) = place.lock().expect("not flushed");
                copy::scatter(&data, &segments).expect("mapped");
            }
            other.qp.respond(&other.hca, &response, true);
        }
        true
    }

    fn execute(&self, request: &Request, bytes: &[u8]) -> Option<(Response, Vec<u8>)> {
        let own = rustix::process::getpid();
        match responder::begin(&self.hca, request) {
            Step::Done(response) => response.map(|response| (response, Vec::new())),
            Step::Place(placement) => {
                let (ours, uses) = placement.access.lock().expect("registered");
                let copied = match &request.by_reference {
                    // SAFETY: memory of this test.
                    Some(theirs) => unsafe { copy::pull(own, &ours, theirs) },
                    None => copy::scatter(bytes, &ours).map(|()| Pulled::Valid),
                };
                assert_eq!(copied, Ok(Pulled::Valid));
                drop(uses);
                Some((placement.finish(TransferOutcome::Streamed), Vec::new()))
            }
            Step::Provide(placement) => {
                let (ours, uses) = placement.access.lock().expect("registered");
                let mut data = vec![0; request.length as usize];
                copy::gather(&ours, &mut data).expect("mapped");
                drop(uses);
                Some((placement.finish(TransferOutcome::Streamed), data))
            }
        }
    }
}

/// What one piece of work is made of: number of the opcode, local and remote place, length, whether inline and fenced,
/// operand; and how many requests the receiver serves after it is posted.
type Task = (u8, usize, usize, usize, (bool, bool), u64, usize);

fn any_step() -> impl Strategy<Value = Task> {
    (
        0u8..5,
        0usize..1500,
        0usize..1500,
        0usize..500,
        any::<(bool, bool)>(),
        any::<u64>(),
        0usize..4,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_work_has_the_effect_of_the_same_work_in_order(
        steps in prop::collection::vec(any_step(), 1..40), direct: bool, capacity in 1usize..6
    ) {
        let (a, b) = (Side::new(1), Side::new(2));
        a.connect(&b);
        b.connect(&a);
        a.link.direct.store(direct, Ordering::Relaxed);
        a.link.capacity.store(capacity, Ordering::Relaxed);
        let (mut ours, mut theirs) = (a.bytes(), b.bytes());
        let mut sends = 0;
        for (id, step) in steps.iter().enumerate() {
            let (opcode, local, there, length, (inline, fence), operand, served) = *step;
            // Memory of reads and atomics, and of what is sent, does not overlap: work without a
            // fence is not ordered with the reads before it.
            let read_at = 2048 + local;
            let (opcode, sge, remote) = match opcode {
                0 => (Opcode::Send, a.sge(local, length), 0),
                1 => (Opcode::Write, a.sge(local, length), there),
                2 => (Opcode::Read, a.sge(read_at, length), there),
                3 => (Opcode::CompareSwap, a.sge(read_at, 8), there & !7),
                _ => (Opcode::FetchAdd, a.sge(read_at, 8), there & !7),
            };
            let length = sge.length as usize;
            let at = sge.addr as usize;
            let old = u64::from_ne_bytes(theirs[remote..remote + 8].try_into().unwrap());
            match opcode {
                Opcode::Send => {
                    let target = 2048 + sends % 3 * 500;
                    theirs[target..target + length].copy_from_slice(&ours[at..at + length]);
                    let buffer = Buffer { wr_id: sends as u64, sges: vec![b.sge(target, 500)] };
                    sends += 1;
                    b.qp.post_receive(buffer).unwrap();
                }
                Opcode::Write => theirs[remote..remote + length].copy_from_slice(&ours[at..at + length]),
                Opcode::Read => ours[at..at + length].copy_from_slice(&theirs[remote..remote + length]),
                Opcode::CompareSwap | Opcode::FetchAdd => {
                    ours[at..at + 8].copy_from_slice(&old.to_ne_bytes());
                    let new = match opcode {
                        Opcode::FetchAdd => old.wrapping_add(operand),
                        _ if old == operand => 77,
                        _ => old,
                    };
                    theirs[remote..remote + 8].copy_from_slice(&new.to_ne_bytes());
                }
            }
            let inline = inline && length <= 64 && matches!(opcode, Opcode::Send | Opcode::Write);
            let data = if inline {
                Data::Inline(a.bytes()[at..at + length].to_vec())
            } else {
                Data::Gather(vec![sge])
            };
            let work = Work {
                opcode,
                fence,
                data,
                remote: (remote as u64, b.key),
                operands: (operand, 77),
                ..send(id as u64)
            };
            prop_assert!(a.qp.post_send(&a.hca, vec![work]).is_ok());
            for _ in 0..served {
                b.serve(&a);
            }
        }
        while b.serve(&a) {
            a.qp.transmit_again(&a.hca);
        }
        let done = a.completions();
        prop_assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..steps.len() as u64).collect::<Vec<_>>());
        prop_assert!(done.iter().all(|wc| wc.status == IBV_WC_SUCCESS));
        let received = b.completions();
        prop_assert_eq!(received.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..sends as u64).collect::<Vec<_>>());
        prop_assert_eq!(a.bytes(), ours);
        prop_assert_eq!(b.bytes(), theirs);
    }
}

fn send(id: u64) -> Work {
    Work {
        wr_id: id,
        opcode: Opcode::Send,
        imm: None,
        signaled: true,
        solicited: false,
        fence: false,
        data: Data::Gather(Vec::new()),
        remote: (0, 0),
        operands: (0, 0),
        target: None,
        arrival: None,
    }
}

#[test]
fn an_unready_receiver_gets_everything_again_in_order() {
    let (a, b) = (Side::new(1), Side::new(2));
    a.connect(&b);
    b.connect(&a);
    assert!(a.qp.post_send(&a.hca, (0..5).map(send).collect()).is_ok());
    for round in 0..5u64 {
        // One buffer: one message passes, the next is refused, the others are ignored.
        b.qp.post_receive(Buffer { wr_id: round, sges: Vec::new() }).unwrap();
        while b.serve(&a) {}
        assert_eq!(b.completions().iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [round]);
        assert_eq!(a.completions().iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [round]);
        std::thread::sleep(Duration::from_micros(200));
        a.qp.transmit_again(&a.hca);
    }
    assert!(!b.serve(&a), "nothing is left");
}

#[test]
fn a_message_whose_sender_is_gone_leaves_the_receive_buffer_posted() {
    let (a, b) = (Side::new(1), Side::new(2));
    a.connect(&b);
    b.connect(&a);
    b.qp.post_receive(Buffer { wr_id: 7, sges: vec![b.sge(0, 100)] }).unwrap();
    b.qp.post_receive(Buffer { wr_id: 8, sges: vec![b.sge(0, 100)] }).unwrap();
    assert!(a.qp.post_send(&a.hca, vec![send(1)]).is_ok());
    let frame = lock(&a.link.frames)[0].0.clone();
    let Frame::Request(request) = frame else { panic!("a request") };
    let Step::Place(placement) = responder::begin(&b.hca, &request) else { panic!("accepted") };
    let response = placement.finish(TransferOutcome::PeerFault);
    assert_eq!(response.outcome, Outcome::RequesterFault);
    assert!(b.completions().is_empty());
    assert_eq!(b.qp.state(), IBV_QPS_RTS);
    // The same request again finds everything as it was.
    assert!(b.serve(&a));
    assert_eq!(b.completions().iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [7]);
}

#[test]
fn a_stale_response_completes_nothing() {
    let (a, b) = (Side::new(1), Side::new(2));
    a.connect(&b);
    b.connect(&a);
    assert!(a.qp.post_send(&a.hca, vec![send(1)]).is_ok());
    let right = b.qp.number.raw();
    // Of another sequence number, or of another queue pair than the one it is connected to.
    for (psn, src_qpn) in [(0, right), (0xff_ffef, right), (0xff_fff1, right), (0xff_fff0, 9)] {
        let outcome = Outcome::Ack(0);
        let response = Response { dst_qpn: a.qp.number.raw(), src_qpn, psn, outcome };
        a.qp.respond(&a.hca, &response, true);
    }
    assert!(a.completions().is_empty());
}

#[test]
fn a_receive_that_is_being_filled_is_flushed_first_and_not_written_any_more() {
    for state in [IBV_QPS_ERR, IBV_QPS_RESET] {
        let (a, b) = (Side::new(1), Side::new(2));
        a.connect(&b);
        b.connect(&a);
        for wr_id in [7, 8] {
            b.qp.post_receive(Buffer { wr_id, sges: vec![b.sge(0, 100)] }).unwrap();
        }
        let work = Work { data: Data::Gather(vec![a.sge(0, 100)]), ..send(1) };
        assert!(a.qp.post_send(&a.hca, vec![work]).is_ok());
        let Frame::Request(request) = lock(&a.link.frames)[0].0.clone() else { panic!() };
        let Step::Place(placement) = responder::begin(&b.hca, &request) else { panic!() };
        drop(placement.access.lock().expect("it is being filled"));
        let attr = ibv_qp_attr { qp_state: state, ..Default::default() };
        b.qp.modify(&b.hca, &attr, IBV_QP_STATE).unwrap();
        assert!(placement.access.lock().is_err());
        assert_eq!(placement.finish(TransferOutcome::Streamed).outcome, Outcome::Dropped);
        let seen: Vec<_> = b.completions().iter().map(|wc| (wc.wr_id, wc.status)).collect();
        let flushed = [(7, IBV_WC_WR_FLUSH_ERR), (8, IBV_WC_WR_FLUSH_ERR)];
        assert_eq!(seen, if state == IBV_QPS_ERR { &flushed[..] } else { &[] });
    }
}

#[test]
fn a_flush_that_comes_after_a_reset_does_nothing() {
    let (a, b) = (Side::new(1), Side::new(2));
    a.connect(&b);
    b.connect(&a);
    b.qp.post_receive(Buffer { wr_id: 7, sges: vec![b.sge(0, 100)] }).unwrap();
    assert!(b.qp.post_send(&b.hca, vec![send(8)]).is_ok());
    // Of an error before the queue pair was reset.
    b.qp.flush();
    assert!(b.completions().is_empty());
    let work = Work { data: Data::Gather(vec![a.sge(0, 100)]), ..send(1) };
    assert!(a.qp.post_send(&a.hca, vec![work]).is_ok());
    assert!(b.serve(&a));
    let seen: Vec<_> = b.completions().iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(seen, [(7, IBV_WC_SUCCESS)]);
}

#[test]
fn a_region_is_deregistered_while_a_copy_uses_it_twice() {
    let side = Side::new(1);
    let sges = [side.sge(0, 8), side.sge(8, 8)];
    let list = side.hca.regions.local(1, &sges, true).expect("registered");
    let access = Access { permit: side.qp.permit(), list };
    let (regions, key) = (&side.hca.regions, side.key);
    let uses = access.lock();
    std::thread::scope(|scope| {
        let owner = scope.spawn(|| regions.deregister(key));
        // The owner waits for us; we must not wait for it.
        while access.lock().is_ok() {
            std::thread::yield_now();
        }
        assert!(!owner.is_finished());
        drop(uses);
        owner.join().unwrap();
    });
}

/// A request in flight when the port goes down may have been executed: its answer still counts.
#[test]
fn work_on_its_way_when_the_port_goes_down_ends_once() {
    let (a, b) = (Side::on(1, 5), Side::on(2, 6));
    a.connect(&b);
    b.connect(&a);
    for wr_id in [7, 8] {
        b.qp.post_receive(Buffer { wr_id, sges: Vec::new() }).unwrap();
    }
    assert!(a.qp.post_send(&a.hca, vec![send(1)]).is_ok());
    let Some((Frame::Request(request), bytes)) = lock(&a.link.frames).pop_front() else { panic!() };
    let (response, _) = b.execute(&request, &bytes).expect("an answer");
    let port = a.qp.parts.counters;
    port.set_down(true);
    assert!(a.qp.post_send(&a.hca, vec![send(2)]).is_ok());
    a.qp.respond(&a.hca, &response, true);
    assert_eq!(a.completions().iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1]);
    assert!(lock(&a.link.frames).is_empty(), "nothing leaves a port that is down");
    port.set_down(false);
    while lock(&a.link.frames).is_empty() {
        a.qp.transmit_again(&a.hca);
    }
    while b.serve(&a) {}
    let ended = |side: &Side| -> Vec<(u64, i32)> {
        side.completions().iter().map(|wc| (wc.wr_id, wc.status)).collect()
    };
    assert_eq!(ended(&a), [(2, IBV_WC_SUCCESS)]);
    assert_eq!(ended(&b), [(7, IBV_WC_SUCCESS), (8, IBV_WC_SUCCESS)]);
}

#[test]
fn a_peer_that_cannot_be_reached_for_now_is_tried_again() {
    for (error, again) in [(Errno::AGAIN, true), (Errno::MFILE, true), (Errno::NOENT, false)] {
        let (a, b) = (Side::new(1), Side::new(2));
        a.connect(&b);
        b.connect(&a);
        *lock(&a.unreachable) = Some(error);
        assert!(a.qp.post_send(&a.hca, vec![send(1)]).is_ok());
        *lock(&a.unreachable) = None;
        if again {
            assert!(a.completions().is_empty());
            while lock(&a.link.frames).is_empty() {
                a.qp.transmit_again(&a.hca);
            }
            assert_eq!(a.qp.state(), IBV_QPS_RTS);
        } else {
            assert_eq!(a.completions()[0].status, IBV_WC_RETRY_EXC_ERR);
        }
    }
}
