//! A peer that is stopped while it has requests: the program does not wait for it, and what the
//! program does with its memory after a flush is the program's business alone.

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use soft_rdma::abi::*;
use soft_rdma::api::{ibv_dereg_mr, ibv_reg_mr};

use crate::harness::*;
use crate::processes::*;

const LENGTH: usize = 200_001;

/// The other side: two queue pairs with memory, each with a receive buffer posted. Says on request
/// how many receives have completed.
fn peer() {
    let device = Device::open();
    let memory = device.buffer(LENGTH, |_| 0xbb);
    let messages = [device.buffer(32 << 20, |_| 0), device.buffer(64, |_| 0)];
    let qps = [device.rc(), device.rc()];
    let [first, second] = [qps[0].number(), qps[1].number()];
    println!("peer:{first} {second} {} {} {}", device.lid(), memory.addr(), memory.key());
    let other = read_line();
    for (index, qp) in qps.iter().enumerate() {
        qp.connect_to(other[2] as u16, other[index] as u32, |_| ());
        assert_eq!(qp.receive(index as u64, &[messages[index].all()]), 0);
    }
    println!("peer:0");
    while !read_line().is_empty() {
        println!("peer:{}", std::iter::from_fn(|| poll_once(device.cq)).count());
    }
}

/// Two queue pairs that are connected to those of a process on a node, both used once.
struct Pair {
    peer: Peer,
    device: Device,
    qps: [Qp; 2],
    /// Memory of the peer.
    remote: (u64, u32),
    small: Buffer,
}

impl Pair {
    fn connect(test: &str, node: u16) -> Self {
        let device = Device::open();
        let mut peer = Peer::start(test, node);
        let received = peer.receive();
        let qps = [device.rc(), device.rc()];
        for (qp, number) in qps.iter().zip(&received) {
            qp.connect_to(received[2] as u16, *number as u32, |_| ());
        }
        let numbers = qps.map(|qp| u64::from(qp.number()));
        peer.send(&[numbers[0], numbers[1], u64::from(device.lid())]);
        peer.receive();
        let small = device.buffer(64, |_| 0);
        let pair = Self { peer, device, qps, remote: (received[3], received[4] as u32), small };
        (0..2).for_each(|index| pair.assert_works(index));
        pair
    }

    /// A read completes; requests that were sent before it on this connection have been executed.
    #[track_caller]
    fn assert_works(&self, index: usize) {
        let read = Send::new(IBV_WR_RDMA_READ, 77, &[self.small.all()]);
        assert_eq!(read.remote(self.remote.0, self.remote.1).post(&self.qps[index]), 0);
        let read = self.device.wait();
        assert_eq!((read.wr_id, read.status), (77, IBV_WC_SUCCESS));
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.peer.child)
    }

    /// Stops the peer; it is stopped when this returns.
    fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("it runs");
        let stopped = waitpid(Some(self.pid()), WaitOptions::UNTRACED).expect("our child");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
    }

    fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).expect("it is stopped");
    }

    /// Posts work on the first queue pair while the peer is stopped, moves the queue pair to ERR,
    /// destroys it and deregisters the memory, which is then filled with 0x11. The peer goes on.
    fn abandon(&self, opcode: i32, length: usize) -> Box<[u8]> {
        self.stop();
        let mut memory = vec![0x22; length].into_boxed_slice();
        let access = ALL_ACCESS as i32;
        // SAFETY: the memory outlives its registration.
        let mr = unsafe { ibv_reg_mr(self.device.pd, memory.as_mut_ptr().cast(), length, access) };
        assert!(!mr.is_null());
        // SAFETY: it was just made.
        let lkey = unsafe { (*mr).lkey };
        let sge = ibv_sge { addr: memory.as_ptr() as u64, length: length as u32, lkey };
        let work = Send::new(opcode, 1, &[sge]);
        assert_eq!(work.remote(self.remote.0, self.remote.1).post(&self.qps[0]), 0);
        self.qps[0].enter(IBV_QPS_ERR);
        let flushed = self.device.wait();
        assert_eq!((flushed.wr_id, flushed.status), (1, IBV_WC_WR_FLUSH_ERR));
        self.qps[0].destroy();
        // SAFETY: it is registered.
        assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
        memory.fill(0x11);
        self.resume();
        memory
    }

    /// Receives that have completed at the peer.
    fn received(&mut self) -> u64 {
        self.peer.send(&[1]);
        self.peer.receive()[0]
    }
}

fn a_flushed_read_writes_nothing(test: &str, node: u16) {
    if is_peer() {
        return peer();
    }
    let pair = Pair::connect(test, node);
    let memory = pair.abandon(IBV_WR_RDMA_READ, LENGTH);
    pair.assert_works(1);
    // SAFETY: a live byte; others may have written it behind the compiler's back.
    let is_ours = |byte: &u8| unsafe { core::ptr::from_ref(byte).read_volatile() } == 0x11;
    assert!(memory.iter().all(is_ours), "the peer wrote into our memory");
}

fn a_read_into_deregistered_memory_fails(test: &str, node: u16) {
    if is_peer() {
        return peer();
    }
    let pair = Pair::connect(test, node);
    pair.stop();
    let memory = pair.device.buffer(LENGTH, |_| 0);
    let read = Send::new(IBV_WR_RDMA_READ, 1, &[memory.all()]);
    assert_eq!(read.remote(pair.remote.0, pair.remote.1).post(&pair.qps[0]), 0);
    drop(memory);
    pair.resume();
    let failed = pair.device.wait();
    assert_eq!((failed.wr_id, failed.status), (1, IBV_WC_LOC_PROT_ERR));
    pair.assert_works(1);
}

fn a_flushed_send_is_not_received(test: &str, node: u16) {
    if is_peer() {
        return peer();
    }
    let mut pair = Pair::connect(test, node);
    // Kept: the peer would find other bytes there.
    let _memory = pair.abandon(IBV_WR_SEND, LENGTH);
    pair.assert_works(1);
    assert_eq!(pair.received(), 0, "a message from memory that was used for something else");
}

#[test]
fn a_flushed_read_writes_nothing_when_the_peer_goes_on() {
    a_flushed_read_writes_nothing(
        "stopped::a_flushed_read_writes_nothing_when_the_peer_goes_on",
        1,
    );
}

#[test]
fn a_flushed_read_writes_nothing_when_a_peer_of_another_host_goes_on() {
    let test = "stopped::a_flushed_read_writes_nothing_when_a_peer_of_another_host_goes_on";
    a_flushed_read_writes_nothing(test, 2);
}

#[test]
fn a_read_into_memory_deregistered_before_the_answer_is_a_protection_error() {
    let test = "stopped::a_read_into_memory_deregistered_before_the_answer_is_a_protection_error";
    a_read_into_deregistered_memory_fails(test, 1);
}

#[test]
fn a_read_into_memory_deregistered_before_another_host_answers_is_a_protection_error() {
    let test = "stopped::a_read_into_memory_deregistered_before_another_host_answers_is_a_protection_error";
    a_read_into_deregistered_memory_fails(test, 2);
}

#[test]
fn a_flushed_send_is_not_received_when_the_peer_goes_on() {
    a_flushed_send_is_not_received(
        "stopped::a_flushed_send_is_not_received_when_the_peer_goes_on",
        1,
    );
}

#[test]
fn other_queue_pairs_work_on_after_one_is_flushed_in_the_middle_of_a_stream() {
    if is_peer() {
        return peer();
    }
    let test = "stopped::other_queue_pairs_work_on_after_one_is_flushed_in_the_middle_of_a_stream";
    let mut pair = Pair::connect(test, 2);
    // More than sockets take: the rest is in our memory when the peer is stopped.
    pair.abandon(IBV_WR_SEND, 32 << 20);
    pair.assert_works(1);
    assert_eq!(pair.received(), 0);
}
