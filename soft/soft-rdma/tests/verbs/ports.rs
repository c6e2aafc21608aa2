//! Ports that go down, by hand or by themselves, and what they count.

use std::time::{Duration, Instant};

use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::harness::*;

/// Takes the port of the first HCA down or up.
fn set_port(state: &str) {
    let folder = std::env::var("SOFT_RDMA_DIR").expect("set");
    std::fs::write(format!("{folder}/ports-1/softrdma0"), state).expect("the control folder");
}

/// A file of the first HCA's port in sysfs; this program has the library's own `open` in it.
fn counter(name: &str) -> String {
    let path = format!("/sys/class/infiniband/softrdma0/ports/1/{name}");
    std::fs::read_to_string(&path).expect(&path).trim().to_owned()
}

/// Waits for an asynchronous event of the port.
fn assert_event(device: &Device, kind: i32) {
    let end = Instant::now() + Duration::from_secs(60);
    let event = loop {
        assert!(Instant::now() < end, "no event {kind} within a minute");
        match next_event(device) {
            Some(event) => break event,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    assert_eq!((event.event_type, event.element), (kind, 1));
}

fn port_state(device: &Device) -> i32 {
    // SAFETY: all zero is a value; the context is open.
    unsafe {
        let mut port: ibv_port_attr = core::mem::zeroed();
        assert_eq!(ibv_query_port(device.context, 1, &raw mut port), 0);
        port.state
    }
}

#[test]
fn a_port_that_goes_down_loses_what_is_sent_until_it_is_up_again() {
    if rerun("ports::a_port_that_goes_down_loses_what_is_sent_until_it_is_up_again", &[]) {
        return;
    }
    let device = Device::open();
    // One gives up at once, the other after some seconds.
    let [(a, b), (c, d)] = [(1, 2), (18, 7)].map(|(timeout, retries)| {
        let pair = (device.rc(), device.rc());
        pair.0.connect(&pair.1, |attr| (attr.timeout, attr.retry_cnt) = (timeout, retries));
        pair.1.connect(&pair.0, |_| ());
        pair
    });
    set_port("down\n");
    assert_event(&device, IBV_EVENT_PORT_ERR);
    assert_eq!((port_state(&device), counter("state")), (IBV_PORT_DOWN, "1: DOWN".into()));
    assert_eq!(counter("counters/link_downed"), "1");

    assert_eq!(a.receive(3, &[]), 0);
    Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    Send::new(IBV_WR_SEND, 2, &[]).posted(&a);
    let mut ends = (0..3).map(|_| device.wait()).map(|wc| (wc.wr_id, wc.status));
    assert_eq!(ends.next(), Some((1, IBV_WC_RETRY_EXC_ERR)));
    // The connection may have ended before the second was posted.
    let mut flushed: Vec<_> = ends.collect();
    flushed.sort_unstable();
    assert_eq!(flushed, [2, 3].map(|id| (id, IBV_WC_WR_FLUSH_ERR)));
    // As on hardware the other side is not told.
    assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_RTS));

    assert_eq!(d.receive(4, &[]), 0);
    Send::new(IBV_WR_SEND, 5, &[]).posted(&c);
    device.assert_quiet();
    set_port("up\n");
    assert_event(&device, IBV_EVENT_PORT_ACTIVE);
    assert_eq!((port_state(&device), counter("state")), (IBV_PORT_ACTIVE, "4: ACTIVE".into()));
    // It is sent again when its time is over; a new connection works at once.
    device.succeed(2);
    let (e, f) = device.pair();
    assert_eq!(f.receive(6, &[]), 0);
    Send::new(IBV_WR_SEND, 7, &[]).posted(&e);
    device.succeed(2);
}

#[test]
fn a_port_fails_after_a_number_of_bytes() {
    if rerun("ports::a_port_fails_after_a_number_of_bytes", &[("SOFT_RDMA_FAIL", "0@12000")]) {
        return;
    }
    let device = Device::open();
    let (a, b) = (device.rc(), device.rc());
    a.connect(&b, |attr| (attr.timeout, attr.retry_cnt, attr.max_rd_atomic) = (1, 2, 1));
    b.connect(&a, |_| ());
    let (local, remote) = (device.buffer(3000, |_| 1), device.buffer(3000, |_| 0));
    // Sender and receiver have the same port: each write counts twice. Reads go one by one.
    for id in 0..4 {
        let read = Send::new(IBV_WR_RDMA_READ, id, &[local.all()]);
        read.remote(remote.addr(), remote.key()).posted(&a);
    }
    let ends: Vec<_> = (0..4).map(|_| device.wait().status).collect();
    let success = IBV_WC_SUCCESS;
    assert_eq!(ends, [success, success, IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR]);
    assert_event(&device, IBV_EVENT_PORT_ERR);
    assert_eq!(counter("hw_counters/rcv_bytes"), "6000");
}

#[test]
fn counters_say_how_bytes_went_while_the_program_runs() {
    if rerun("ports::counters_say_how_bytes_went_while_the_program_runs", &[]) {
        return;
    }
    let device = Device::open();
    let (a, _b) = device.pair();
    let (local, remote) = (device.buffer(10_000, |_| 1), device.buffer(10_000, |_| 0));
    for (opcode, length) in
        [(IBV_WR_RDMA_WRITE, 10_000), (IBV_WR_RDMA_WRITE, 16), (IBV_WR_RDMA_READ, 5000)]
    {
        let work = Send::new(opcode, 1, &[local.sge(0, length)]);
        work.remote(remote.addr(), remote.key()).posted(&a);
        assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    }
    // Long ones are copied once; the short write travelled inside its request.
    assert_eq!(counter("hw_counters/direct_bytes"), "15000");
    assert_eq!(counter("hw_counters/stream_bytes"), "16");
    assert_eq!(counter("hw_counters/xmit_bytes"), "15016");
    assert_eq!(counter("counters/port_xmit_data"), (15016 / 4).to_string());
    assert_eq!(counter("counters/port_rcv_data"), (15016 / 4).to_string());
    assert_eq!(counter("counters/port_rcv_packets"), "3");
    assert_eq!(counter("counters/link_downed"), "0");
}
