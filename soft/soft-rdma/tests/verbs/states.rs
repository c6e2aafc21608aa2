//! States in which the send queue rests: drained on request, or stopped by an error.

use std::time::{Duration, Instant};

use soft_rdma::abi::*;

use crate::datagrams::{address, datagram, pair as datagram_pair};
use crate::harness::*;

/// Attributes with a state.
fn state(qp_state: i32) -> ibv_qp_attr {
    ibv_qp_attr { qp_state, ..Default::default() }
}

/// The event that a send queue is drained, if it is there.
fn drained(device: &Device, qp: &Qp) -> bool {
    next_event(device).is_some_and(|mut event| {
        assert_eq!((event.event_type, event.element), (IBV_EVENT_SQ_DRAINED, qp.qp as usize));
        // SAFETY: the event just read.
        unsafe { soft_rdma::api::ibv_ack_async_event(&raw mut event) };
        true
    })
}

#[test]
fn a_queue_that_is_drained_finishes_what_it_sent_and_keeps_the_rest() {
    let device = Device::open();
    let (a, b) = device.pair();
    // Connected: from here on a request is on its way when it has been posted.
    assert_eq!(b.receive(10, &[]), 0);
    assert_eq!(Send::new(IBV_WR_SEND, 0, &[]).post(&a), 0);
    assert!((0..2).all(|_| device.wait().status == IBV_WC_SUCCESS));
    // Refused for want of a buffer.
    assert_eq!(Send::new(IBV_WR_SEND, 1, &[]).post(&a), 0);
    let drain = ibv_qp_attr { en_sqd_async_notify: 1, ..state(IBV_QPS_SQD) };
    assert_eq!(a.modify(&drain, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
    assert_eq!(Send::new(IBV_WR_SEND, 2, &[]).post(&a), 0);
    assert_eq!((a.state(), drained(&device, &a)), (IBV_QPS_SQD, false));
    assert_eq!(b.receive(11, &[]), 0);
    assert_eq!(b.receive(12, &[]), 0);
    let end = Instant::now() + Duration::from_secs(60);
    while !drained(&device, &a) {
        assert!(Instant::now() < end, "no event within a minute");
    }
    // The event follows the completions of the queue.
    let mut ids: Vec<_> =
        core::iter::from_fn(|| poll_once(device.cq)).map(|done| done.wr_id).collect();
    assert!(ids.contains(&1), "{ids:?}");
    ids.extend((ids.len()..2).map(|_| device.wait().wr_id));
    ids.sort_unstable();
    assert_eq!(ids, [1, 11]);
    device.assert_quiet();
    // It receives as before.
    assert_eq!(a.receive(13, &[]), 0);
    assert_eq!(Send::new(IBV_WR_SEND, 3, &[]).post(&b), 0);
    assert!((0..2).all(|_| device.wait().status == IBV_WC_SUCCESS));

    let slower = ibv_qp_attr { timeout: 9, ..state(IBV_QPS_SQD) };
    assert_eq!(a.modify(&slower, IBV_QP_TIMEOUT), 0);
    assert_eq!(a.modify(&state(IBV_QPS_RTR), IBV_QP_STATE), libc::EINVAL);
    assert_eq!(a.modify(&state(IBV_QPS_RTS), IBV_QP_STATE), 0);
    let mut ids: Vec<_> = (0..2).map(|_| device.wait().wr_id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [2, 12]);
    // Nothing on its way: drained at once; without the question there is no event.
    assert_eq!(a.modify(&drain, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0);
    assert!(drained(&device, &a));
    assert_eq!(a.modify(&state(IBV_QPS_RTS), IBV_QP_STATE), 0);
    a.enter(IBV_QPS_SQD);
    assert!(!drained(&device, &a));
    a.enter(IBV_QPS_ERR);
    a.destroy();
}

#[test]
fn a_datagram_in_error_stops_sending_until_the_program_resumes() {
    let device = Device::open();
    let (a, b) = datagram_pair(&device);
    let ah = address(&device, false);
    let to = device.buffer(100, |_| 0);
    assert_eq!(datagram(ah, &b, 7, &[ibv_sge { length: 8, ..Default::default() }]).post(&a), 0);
    assert_eq!(device.wait().status, IBV_WC_LOC_PROT_ERR);
    assert_eq!(a.state(), IBV_QPS_SQE);
    assert_eq!(datagram(ah, &b, 7, &[]).post(&a), 0);
    assert_eq!(device.wait().status, IBV_WC_WR_FLUSH_ERR);
    // It still receives.
    assert_eq!(a.receive(2, &[to.all()]), 0);
    assert_eq!(datagram(ah, &a, 7, &[]).flags(0).post(&b), 0);
    assert_eq!((device.wait().wr_id, a.state()), (2, IBV_QPS_SQE));
    assert_eq!(a.modify(&state(IBV_QPS_RTS), IBV_QP_STATE), 0);
    assert_eq!(b.receive(3, &[to.all()]), 0);
    assert_eq!(datagram(ah, &b, 7, &[]).flags(0).post(&a), 0);
    let wc = device.wait();
    assert_eq!((wc.wr_id, wc.status), (3, IBV_WC_SUCCESS));
}
