//! Two processes: the test starts its own program once more.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::net::SocketType;
use soft_rdma::abi::*;

use crate::harness::*;

const ROLE: &str = "SOFT_RDMA_TEST_PEER";

pub(crate) struct Peer {
    pub(crate) child: Child,
    stdin: ChildStdin,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Peer {
    /// Starts this program again on a node, to run one test as the other side.
    pub(crate) fn start(test: &str, node: u16) -> Self {
        setup();
        let program = std::env::current_exe().expect("our own program");
        let mut child = Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .env("SOFT_RDMA_NODE", node.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the peer starts");
        let stdin = child.stdin.take().expect("piped");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, stdin, lines }
    }

    pub(crate) fn send(&mut self, numbers: &[u64]) {
        let line: Vec<_> = numbers.iter().map(u64::to_string).collect();
        writeln!(self.stdin, "{}", line.join(" ")).expect("the peer reads");
    }

    pub(crate) fn receive(&mut self) -> Vec<u64> {
        // The test harness prints lines of its own.
        let mut lines = self.lines.by_ref().map(|line| line.expect("text"));
        let line = lines.find_map(|line| line.split_once("peer:").map(|(_, rest)| rest.to_owned()));
        numbers(&line.expect("the peer sends a line"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this process is the other side of a test.
pub(crate) fn is_peer() -> bool {
    std::env::var_os(ROLE).is_some()
}

fn numbers(line: &str) -> Vec<u64> {
    line.split_whitespace().map(|word| word.parse().expect("a number")).collect()
}

pub(crate) fn read_line() -> Vec<u64> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the test sends a line");
    numbers(&line)
}

/// The other side of the tests below: offers memory, receives one message, answers with it.
fn peer() {
    let device = Device::open();
    let qp = device.rc();
    let memory = device.buffer(1 << 20, |at| (at * 11) as u8);
    println!("peer:{} {} {} {}", qp.number(), device.lid(), memory.addr(), memory.key());
    let other = read_line();
    qp.connect_to(other[1] as u16, other[0] as u32, |_| ());
    let message = device.buffer(200_000, |_| 0);
    assert_eq!(qp.receive(1, &[message.all()]), 0);
    println!("peer:0");
    let received = device.wait();
    assert_eq!(received.status, IBV_WC_SUCCESS);
    Send::new(IBV_WR_SEND, 2, &[message.sge(0, received.byte_len as usize)]).posted(&qp);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    println!("peer:{}", memory.read().iter().map(|byte| u64::from(*byte)).sum::<u64>());
    read_line();
}

fn connect(test: &str, node: u16, device: &Device) -> (Peer, Qp, u64, u32) {
    let mut peer = Peer::start(test, node);
    let received = peer.receive();
    let qp = device.rc();
    qp.connect_to(received[1] as u16, received[0] as u32, |_| ());
    peer.send(&[u64::from(qp.number()), u64::from(device.lid())]);
    peer.receive();
    (peer, qp, received[2], received[3] as u32)
}

/// Reads, writes, a message and its answer with a process of a node.
pub(crate) fn exchange(test: &str, node: u16) {
    if is_peer() {
        return peer();
    }
    let device = Device::open();
    let (mut other, qp, addr, key) = connect(test, node, &device);
    let local = device.buffer(1 << 20, |_| 0);
    Send::new(IBV_WR_RDMA_READ, 1, &[local.all()]).remote(addr, key).posted(&qp);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    assert!(local.read().iter().enumerate().all(|(at, byte)| *byte == (at * 11) as u8));
    local.assert_guards();
    let ones = device.buffer(1 << 20, |_| 1);
    Send::new(IBV_WR_RDMA_WRITE, 2, &[ones.all()]).remote(addr, key).posted(&qp);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);

    let (message, answer) =
        (device.buffer(150_001, |at| (at * 3) as u8), device.buffer(150_001, |_| 0));
    assert_eq!(qp.receive(3, &[answer.all()]), 0);
    Send::new(IBV_WR_SEND, 4, &[message.all()]).posted(&qp);
    device.succeed(2);
    assert_eq!(answer.read(), message.read());
    // The peer found in its memory what was written there.
    assert_eq!(other.receive(), [1 << 20]);
    other.send(&[]);
}

/// The peer is killed between two reads.
pub(crate) fn lose(test: &str, node: u16) {
    if is_peer() {
        return peer();
    }
    let device = Device::open();
    let (mut other, qp, addr, key) = connect(test, node, &device);
    let local = device.buffer(64, |_| 0);
    let read = || Send::new(IBV_WR_RDMA_READ, 1, &[local.all()]).remote(addr, key);
    read().posted(&qp);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    other.child.kill().expect("it runs");
    other.child.wait().expect("it ends");
    assert_eq!(qp.receive(7, &[local.all()]), 0);
    read().posted(&qp);
    assert_eq!(device.wait().status, IBV_WC_RETRY_EXC_ERR);
    let flushed = device.wait();
    assert_eq!((flushed.wr_id, flushed.status), (7, IBV_WC_WR_FLUSH_ERR));
    assert_eq!(qp.state(), IBV_QPS_ERR);
}

#[test]
fn bytes_go_between_processes_in_both_directions() {
    exchange("processes::bytes_go_between_processes_in_both_directions", 1);
}

#[test]
fn bytes_go_between_hosts_in_both_directions() {
    exchange("processes::bytes_go_between_hosts_in_both_directions", 2);
}

#[test]
fn a_killed_process_ends_in_retry_exceeded() {
    lose("processes::a_killed_process_ends_in_retry_exceeded", 1);
}

#[test]
fn a_killed_process_of_another_host_ends_in_retry_exceeded() {
    lose("processes::a_killed_process_of_another_host_ends_in_retry_exceeded", 2);
}

#[test]
fn a_host_that_nobody_knows_ends_in_retry_exceeded() {
    let device = Device::open();
    let qp = device.rc();
    let lid = device.lid() + 5 * 64;
    qp.connect_to(lid, qp.number(), |_| ());
    Send::new(IBV_WR_SEND, 1, &[]).posted(&qp);
    assert_eq!(device.wait().status, IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn a_host_that_is_no_node_is_refused() {
    use std::io::Read;
    let device = Device::open();
    let nodes = std::env::var("SOFT_RDMA_NODES").expect("set");
    let mut own: SocketAddr = nodes.split(['=', ',']).nth(1).expect("ours").parse().expect("one");
    own.set_port(own.port() + (device.rc().number() >> 14) as u16);
    let greeting = |from: IpAddr| {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, SocketType::STREAM, None);
        let socket = socket.expect("a socket");
        rustix::net::bind(&socket, &SocketAddr::new(from, 0)).expect("a loopback address");
        rustix::net::connect(&socket, &own).expect("it listens");
        let (mut stream, mut answer) = (TcpStream::from(socket), [0; 8]);
        let hello = [&[16, 0, 4, 0, 0, 0, 0, 0][..], &[0; 16]].concat();
        let _ = stream.write_all(&hello);
        stream.read_exact(&mut answer).map(|()| answer).ok()
    };
    assert_eq!(greeting(own.ip()), Some([17, 0, 5, 0, 0, 0, 0, 0]));
    assert_eq!(greeting([127, 255, 255, 254].into()), None);
}
