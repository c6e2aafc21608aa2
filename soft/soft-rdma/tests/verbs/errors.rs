use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::harness::*;

/// A write or read that must fail with a status and leave the memory as it is.
#[test]
fn a_wrong_key_range_or_right_is_refused_and_ends_both_sides() {
    const READ: u32 = IBV_ACCESS_REMOTE_READ;
    // Rights of the region and of the queue pair, opcode, what is added to the address, what is changed in the key.
    for (access, qp_access, opcode, offset, key) in [
        (ALL_ACCESS, ALL_ACCESS, IBV_WR_RDMA_WRITE, 0, 1),
        (ALL_ACCESS, ALL_ACCESS, IBV_WR_RDMA_READ, 0, 0xff),
        (ALL_ACCESS, ALL_ACCESS, IBV_WR_RDMA_WRITE, 1, 0),
        (ALL_ACCESS, ALL_ACCESS, IBV_WR_RDMA_READ, -1, 0),
        (READ, ALL_ACCESS, IBV_WR_RDMA_WRITE, 0, 0),
        (IBV_ACCESS_LOCAL_WRITE, ALL_ACCESS, IBV_WR_RDMA_READ, 0, 0),
        (ALL_ACCESS, READ, IBV_WR_RDMA_WRITE, 0, 0),
        (ALL_ACCESS, IBV_ACCESS_REMOTE_WRITE, IBV_WR_RDMA_READ, 0, 0),
    ] {
        let device = Device::open();
        let (a, b) = (device.rc(), device.rc());
        a.connect(&b, |_| ());
        b.connect(&a, |attr| attr.qp_access_flags = qp_access);
        let remote = Buffer::new(device.pd, 4096, access, |_| 0);
        let local = device.buffer(4096, |_| 1);
        let addr = remote.addr().wrapping_add_signed(offset);
        Send::new(opcode, 1, &[local.all()]).remote(addr, remote.key() ^ key).posted(&a);
        Send::new(IBV_WR_SEND, 2, &[]).flags(0).posted(&a);
        let is_right = qp_access == ALL_ACCESS;
        let status = if is_right { IBV_WC_REM_ACCESS_ERR } else { IBV_WC_REM_INV_REQ_ERR };
        // What came after it is flushed, though it was not signalled.
        assert_eq!(device.ends(2), [(1, status), (2, IBV_WC_WR_FLUSH_ERR)]);
        assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_ERR));
        assert_eq!((remote.read(), local.read()), (vec![0; 4096], vec![1; 4096]));
    }
}

#[test]
fn a_region_of_another_domain_or_a_deregistered_one_is_refused() {
    let device = Device::open();
    // SAFETY: the context is open.
    let other = unsafe { ibv_alloc_pd(device.context) };
    for gone in [false, true] {
        let (a, _b) = device.pair();
        let remote = Buffer::new(if gone { device.pd } else { other }, 64, ALL_ACCESS, |_| 0);
        let local = device.buffer(64, |_| 1);
        let (addr, key) = (remote.addr(), remote.key());
        let kept = (!gone).then_some(remote);
        Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(addr, key).posted(&a);
        assert_eq!(device.wait().status, IBV_WC_REM_ACCESS_ERR);
        drop(kept);
    }
    // SAFETY: the domain is live and empty.
    assert_eq!(unsafe { ibv_dealloc_pd(other) }, 0);
}

#[test]
fn local_memory_without_a_valid_key_is_an_error_in_its_turn() {
    let device = Device::open();
    let (a, b) = device.pair();
    let from = device.buffer(64, |_| 1);
    assert_eq!(b.receive(5, &[]), 0);
    Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    let wrong = ibv_sge { lkey: from.key() ^ 1, ..from.all() };
    Send::new(IBV_WR_SEND, 2, &[wrong]).posted(&a);
    let statuses = device.ends(3);
    assert_eq!(statuses, [(1, IBV_WC_SUCCESS), (2, IBV_WC_LOC_PROT_ERR), (5, IBV_WC_SUCCESS)]);
}

#[test]
fn reading_into_memory_that_may_not_be_written_is_an_error() {
    let device = Device::open();
    let (a, _b) = device.pair();
    let remote = device.buffer(64, |_| 1);
    let local = Buffer::new(device.pd, 64, 0, |_| 0);
    Send::new(IBV_WR_RDMA_READ, 1, &[local.all()]).remote(remote.addr(), remote.key()).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_LOC_PROT_ERR);
    assert_eq!(local.read(), [0; 64]);
}

#[test]
fn a_receive_buffer_that_is_too_short_or_has_no_valid_key_ends_both_sides() {
    for (length, missing, key, ends) in [
        (100, 1, None, [(1, IBV_WC_REM_INV_REQ_ERR), (5, IBV_WC_LOC_LEN_ERR)]),
        (100_000, 1, None, [(1, IBV_WC_REM_INV_REQ_ERR), (5, IBV_WC_LOC_LEN_ERR)]),
        (64, 0, Some(1), [(1, IBV_WC_REM_OP_ERR), (5, IBV_WC_LOC_PROT_ERR)]),
    ] {
        let device = Device::open();
        let (a, b) = device.pair();
        let (from, to) = (device.buffer(length, |_| 1), device.buffer(length - missing, |_| 0));
        assert_eq!(b.receive(5, &[ibv_sge { lkey: key.unwrap_or(to.key()), ..to.all() }]), 0);
        Send::new(IBV_WR_SEND, 1, &[from.all()]).posted(&a);
        assert_eq!(device.ends(2), ends);
        to.assert_guards();
    }
}

#[test]
fn a_receiver_that_stays_unready_ends_in_rnr_retry_exceeded() {
    let device = Device::open();
    let (a, b) = (device.rc(), device.rc());
    a.connect(&b, |attr| attr.rnr_retry = 2);
    b.connect(&a, |_| ());
    Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_RNR_RETRY_EXC_ERR);
    assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_RTS));
}

#[test]
fn a_peer_that_is_not_ready_or_expects_another_ends_in_retry_exceeded() {
    let device = Device::open();
    for case in ["in RESET", "connected to another peer", "another sequence number"] {
        let (a, b, c) = (device.rc(), device.rc(), device.rc());
        let sq_psn = if case == "another sequence number" { 5 } else { 0xff_fffe };
        a.connect(&b, |attr| (attr.timeout, attr.retry_cnt, attr.sq_psn) = (1, 2, sq_psn));
        match case {
            "in RESET" => {}
            "connected to another peer" => b.connect(&c, |_| ()),
            _ => b.connect(&a, |_| ()),
        }
        Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
        assert_eq!(device.wait().status, IBV_WC_RETRY_EXC_ERR, "{case}");
    }
}

#[test]
fn a_peer_that_becomes_ready_in_time_is_reached() {
    let device = Device::open();
    let (a, b) = (device.rc(), device.rc());
    // 4 s for each of seven tries.
    a.connect(&b, |attr| (attr.timeout, attr.retry_cnt) = (20, 7));
    Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    b.connect(&a, |_| ());
    assert_eq!(b.receive(2, &[]), 0);
    device.succeed(2);
}

#[test]
fn the_error_state_flushes_both_queues_and_what_is_posted_later() {
    let device = Device::open();
    let (a, b) = device.pair();
    for id in 0..3 {
        assert_eq!(a.receive(id, &[]), 0);
        Send::new(IBV_WR_SEND, 10 + id, &[]).flags(0).posted(&a);
    }
    a.enter(IBV_QPS_ERR);
    assert_eq!(a.receive(3, &[]), 0);
    Send::new(IBV_WR_SEND, 13, &[]).posted(&a);
    let mut ids: Vec<_> = (0..8)
        .map(|_| device.wait())
        .inspect(|wc| assert_eq!((wc.status, wc.qp_num), (IBV_WC_WR_FLUSH_ERR, a.number())))
        .map(|wc| wc.wr_id)
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 2, 3, 10, 11, 12, 13]);
    assert_eq!(b.state(), IBV_QPS_RTS);
    a.enter(IBV_QPS_RESET);
    assert_eq!(a.receive(1, &[]), libc::EINVAL);
    assert_eq!(Send::new(IBV_WR_SEND, 1, &[]).post(&a), libc::EINVAL);
}

#[test]
fn completions_of_a_destroyed_queue_pair_are_gone() {
    let device = Device::open();
    let (a, b) = device.pair();
    assert_eq!(a.receive(1, &[]), 0);
    a.enter(IBV_QPS_ERR);
    a.destroy();
    device.assert_quiet();
    // Its peer notices when it sends.
    Send::new(IBV_WR_SEND, 1, &[]).posted(&b);
    assert_eq!(device.wait().status, IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn unsupported_work_and_queue_pairs_are_refused() {
    let device = Device::open();
    let (a, _b) = device.pair();
    assert_eq!(Send::new(8, 1, &[]).post(&a), libc::EOPNOTSUPP);
    let sges = [ibv_sge::default(); 5];
    assert_eq!(Send::new(IBV_WR_SEND, 1, &sges).post(&a), libc::EINVAL);
    let mut init: ibv_qp_init_attr = ibv_qp_init_attr {
        qp_context: core::ptr::null_mut(),
        send_cq: device.cq,
        recv_cq: device.cq,
        srq: core::ptr::null_mut(),
        cap: ibv_qp_cap::default(),
        qp_type: 3,
        sq_sig_all: 0,
    };
    // SAFETY: domain and queues are live.
    assert!(unsafe { ibv_create_qp(device.pd, &raw mut init) }.is_null());
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
}

#[test]
fn of_a_list_the_requests_before_the_refused_one_are_posted() {
    let device = Device::open();
    let (a, b) = device.pair();
    assert_eq!(b.receive(9, &[]), 0);
    let mut sges = [ibv_sge::default(); 5];
    let mut list = [1, 2, 3].map(|id| Send::new(IBV_WR_SEND, id, &[]).wr);
    // More elements than the queue pair was made for.
    (list[1].sg_list, list[1].num_sge) = (sges.as_mut_ptr(), 5);
    let next = [0, 1, 2].map(|at| &raw mut list[at]);
    // SAFETY: requests of the list above.
    unsafe { ((*next[0]).next, (*next[1]).next) = (next[1], next[2]) };
    let mut bad = core::ptr::null_mut();
    // SAFETY: what the header's inline function does; the list outlives the call.
    let refused =
        unsafe { (*(*a.qp).context).ops.post_send.expect("set")(a.qp, next[0], &raw mut bad) };
    assert_eq!((refused, bad), (libc::EINVAL, next[1]));
    let ids = device.ends(2);
    assert_eq!(ids, [(1, IBV_WC_SUCCESS), (9, IBV_WC_SUCCESS)]);
    device.assert_quiet();
}
