use soft_rdma::abi::*;

use crate::harness::*;

#[test]
fn writes_and_reads_of_all_lengths_are_exact() {
    let device = Device::open();
    let (a, b) = device.pair();
    for length in [1, 7, 1024, 1025, 65_536, (2 << 20) + 1] {
        let local = device.buffer(length, |at| (at * 3 + 1) as u8);
        let remote = device.buffer(length + 20, |_| 0);
        let target = remote.addr() + 9;
        Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(target, remote.key()).posted(&a);
        let wc = device.wait();
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE));
        let got = remote.read();
        assert_eq!(got[9..9 + length], local.read());
        assert!(got[..9].iter().chain(&got[9 + length..]).all(|byte| *byte == 0));

        let back = device.buffer(length, |_| 0);
        Send::new(IBV_WR_RDMA_READ, 2, &[back.all()]).remote(target, remote.key()).posted(&a);
        let wc = device.wait();
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (2, IBV_WC_SUCCESS, IBV_WC_RDMA_READ));
        assert_eq!(wc.byte_len as usize, length);
        assert_eq!(back.read(), local.read());
        back.assert_guards();
        remote.assert_guards();
    }
    assert_eq!(b.state(), IBV_QPS_RTS);
}

#[test]
fn a_write_with_immediate_takes_a_receive_buffer_and_leaves_it_empty() {
    let device = Device::open();
    let (a, b) = device.pair();
    let local = device.buffer(3000, |at| at as u8);
    let (remote, unused) = (device.buffer(3000, |_| 0), device.buffer(10, |_| 7));
    assert_eq!(b.receive(5, &[unused.all()]), 0);
    let write = Send::new(IBV_WR_RDMA_WRITE_WITH_IMM, 1, &[local.all()]).imm(77).flags(0);
    write.remote(remote.addr(), remote.key()).posted(&a);
    let wc = device.wait();
    assert_eq!((wc.wr_id, wc.opcode, wc.imm_data), (5, IBV_WC_RECV_RDMA_WITH_IMM, 77));
    assert_eq!((wc.byte_len, wc.wc_flags), (3000, IBV_WC_WITH_IMM));
    assert_eq!(remote.read(), local.read());
    assert_eq!(unused.read(), [7; 10]);
}

#[test]
fn a_message_without_bytes_needs_no_key() {
    let device = Device::open();
    let (a, _b) = device.pair();
    for opcode in [IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
        Send::new(opcode, 1, &[]).remote(0, 0).posted(&a);
        assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    }
}

#[test]
fn more_reads_than_may_be_outstanding_are_all_done() {
    let device = Device::open();
    let (a, _b) = device.pair();
    let remote = device.buffer(64 * 100, |at| (at / 100) as u8);
    let local = device.buffer(64 * 100, |_| 0xff);
    for index in 0..64 {
        let read = Send::new(IBV_WR_RDMA_READ, index as u64, &[local.sge(index * 100, 100)]);
        read.remote(remote.addr() + index as u64 * 100, remote.key()).posted(&a);
    }
    for index in 0..64 {
        let wc = device.wait();
        assert_eq!((wc.wr_id, wc.status), (index, IBV_WC_SUCCESS));
    }
    assert_eq!(local.read(), remote.read());
}

#[test]
fn a_fenced_send_has_the_bytes_that_were_read_before_it() {
    let device = Device::open();
    let (a, b) = device.pair();
    let remote = device.buffer(100_000, |at| at as u8);
    let (local, to) = (device.buffer(100_000, |_| 0), device.buffer(100_000, |_| 0));
    assert_eq!(b.receive(3, &[to.all()]), 0);
    let read = Send::new(IBV_WR_RDMA_READ, 1, &[local.all()]).flags(0);
    read.remote(remote.addr(), remote.key()).posted(&a);
    Send::new(IBV_WR_SEND, 2, &[local.all()]).flags(IBV_SEND_FENCE).posted(&a);
    assert_eq!(device.wait().wr_id, 3);
    assert_eq!(to.read(), remote.read());
}

#[test]
fn a_full_send_queue_refuses_and_takes_more_later() {
    let device = Device::open();
    let (a, b) = device.pair();
    // No process receives: the queue fills up.
    for _ in 0..64 {
        Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    }
    assert_eq!(Send::new(IBV_WR_SEND, 1, &[]).post(&a), libc::ENOMEM);
    for _ in 0..64 {
        assert_eq!(b.receive(2, &[]), 0);
    }
    device.succeed(128);
    assert_eq!(b.receive(2, &[]), 0);
    Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    device.succeed(2);
}
