use soft_rdma::abi::*;

use crate::harness::*;

fn value(buffer: &Buffer, at: usize) -> u64 {
    u64::from_ne_bytes(buffer.read()[at..at + 8].try_into().expect("eight bytes"))
}

/// A remote address that is a multiple of eight.
fn aligned(buffer: &Buffer) -> (u64, usize) {
    let addr = buffer.addr().next_multiple_of(8);
    (addr, (addr - buffer.addr()) as usize)
}

#[test]
fn adding_and_swapping_return_the_old_value() {
    let device = Device::open();
    let (a, _b) = device.pair();
    let (local, remote) = (device.buffer(8, |_| 0), device.buffer(24, |_| 0));
    let (addr, at) = aligned(&remote);
    let add = |by| {
        Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &[local.all()]).atomic(addr, remote.key(), by, 0)
    };
    for (by, old, new) in [(5, 0, 5), (u64::MAX, 5, 4)] {
        add(by).posted(&a);
        let wc = device.wait();
        assert_eq!((wc.status, wc.opcode, wc.byte_len), (IBV_WC_SUCCESS, IBV_WC_FETCH_ADD, 8));
        assert_eq!((value(&local, 0), value(&remote, at)), (old, new));
    }
    for (compare, swap, new) in [(3, 9, 4), (4, 9, 9)] {
        let work = Send::new(IBV_WR_ATOMIC_CMP_AND_SWP, 2, &[local.all()]);
        work.atomic(addr, remote.key(), compare, swap).posted(&a);
        let wc = device.wait();
        assert_eq!((wc.status, wc.opcode), (IBV_WC_SUCCESS, IBV_WC_COMP_SWAP));
        assert_eq!((value(&local, 0), value(&remote, at)), (4, new));
    }
}

#[test]
fn many_additions_from_two_connections_are_all_counted() {
    let device = Device::open();
    let (a, _b) = device.pair();
    let (c, _d) = device.pair();
    let (local, remote) = (device.buffer(8, |_| 0), device.buffer(24, |_| 0));
    let (addr, at) = aligned(&remote);
    for _ in 0..50 {
        for qp in [&a, &c] {
            let work = Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &[local.all()]);
            assert_eq!(work.atomic(addr, remote.key(), 3, 0).post(qp), 0);
        }
    }
    device.succeed(100);
    assert_eq!(value(&remote, at), 300);
}

#[test]
fn without_the_right_beyond_the_region_or_not_aligned_nothing_changes() {
    let readable = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    for (access, offset, status) in [
        (readable, 0, IBV_WC_REM_ACCESS_ERR),
        (ALL_ACCESS, 24, IBV_WC_REM_ACCESS_ERR),
        (ALL_ACCESS, 4, IBV_WC_REM_INV_REQ_ERR),
    ] {
        for opcode in [IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD] {
            let device = Device::open();
            let (a, b) = device.pair();
            let local = device.buffer(8, |_| 9);
            let remote = Buffer::new(device.pd, 24, access, |_| 0);
            let work = Send::new(opcode, 1, &[local.all()]);
            work.atomic(aligned(&remote).0 + offset, remote.key(), 0, 3).posted(&a);
            assert_eq!(device.wait().status, status);
            assert_eq!((remote.read(), local.read()), (vec![0; 24], vec![9; 8]));
            assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_ERR));
        }
    }
}

#[test]
fn a_queue_pair_that_may_have_none_outstanding_is_refused_at_home() {
    let device = Device::open();
    let (a, b) = (device.rc(), device.rc());
    a.connect(&b, |attr| attr.max_rd_atomic = 0);
    b.connect(&a, |_| ());
    let (local, remote) = (device.buffer(8, |_| 0), device.buffer(24, |_| 0));
    let work = Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &[local.all()]);
    work.atomic(aligned(&remote).0, remote.key(), 1, 0).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_LOC_QP_OP_ERR);
    assert_eq!(remote.read(), [0; 24]);
}
