use soft_rdma::abi::*;

use crate::harness::*;

#[test]
fn messages_of_all_lengths_arrive_byte_for_byte() {
    let device = Device::open();
    let (a, b) = device.pair();
    for length in [0, 1, 7, 64, 1023, 1024, 1025, 4096, 65_537, (1 << 20) + 13] {
        let from = device.buffer(length, |at| (at * 7 + length) as u8);
        let to = device.buffer(length + 5, |_| 0);
        assert_eq!(b.receive(2, &[to.all()]), 0);
        Send::new(IBV_WR_SEND, 1, &[from.all()]).posted(&a);
        let (first, second) = (device.wait(), device.wait());
        let (sent, received) =
            if first.opcode == IBV_WC_SEND { (first, second) } else { (second, first) };
        assert_eq!((sent.wr_id, sent.status, sent.qp_num), (1, IBV_WC_SUCCESS, a.number()));
        assert_eq!(
            (received.wr_id, received.status, received.opcode),
            (2, IBV_WC_SUCCESS, IBV_WC_RECV)
        );
        assert_eq!((received.byte_len as usize, received.qp_num), (length, b.number()));
        assert_eq!((received.src_qp, received.slid, received.wc_flags), (a.number(), a.lid, 0));
        assert_eq!(to.read()[..length], from.read());
        assert_eq!(to.read()[length..], [0; 5]);
        to.assert_guards();
    }
}

#[test]
fn immediate_data_comes_with_the_completion() {
    let device = Device::open();
    let (a, b) = device.pair();
    let to = device.buffer(8, |_| 0);
    assert_eq!(b.receive(2, &[to.all()]), 0);
    Send::new(IBV_WR_SEND_WITH_IMM, 1, &[]).imm(0xdead_beef).flags(0).posted(&a);
    let received = device.wait();
    assert_eq!(
        (received.wc_flags, received.imm_data, received.byte_len),
        (IBV_WC_WITH_IMM, 0xdead_beef, 0)
    );
    device.assert_quiet();
}

#[test]
fn inline_data_may_change_as_soon_as_it_is_posted() {
    let device = Device::open();
    let (a, b) = device.pair();
    let to = device.buffer(64, |_| 0);
    let mut data = [1u8; 64];
    // No key: inline data need not be registered.
    let sge = ibv_sge { addr: data.as_mut_ptr() as u64, length: 64, lkey: 0 };
    Send::new(IBV_WR_SEND, 1, &[sge]).flags(IBV_SEND_INLINE).posted(&a);
    data.fill(2);
    // The receiver was not ready; the data that was posted arrives all the same.
    std::hint::black_box(&data);
    assert_eq!(b.receive(2, &[to.all()]), 0);
    assert_eq!(device.wait().opcode, IBV_WC_RECV);
    assert_eq!(to.read(), [1; 64]);
    let sge = ibv_sge { length: 65, ..sge };
    let refused = Send::new(IBV_WR_SEND, 1, &[sge]).flags(IBV_SEND_INLINE).post(&a);
    assert_eq!(refused, libc::EINVAL);
}

#[test]
fn scatter_gather_lists_are_filled_in_order() {
    let device = Device::open();
    let (a, b) = device.pair();
    let from = device.buffer(3000, |at| at as u8);
    let to = device.buffer(3000, |_| 0);
    let lists = [[from.sge(0, 1000), from.sge(1500, 0), from.sge(2000, 777)]];
    assert_eq!(b.receive(2, &[to.sge(0, 10), to.sge(100, 1), to.sge(200, 2800)]), 0);
    Send::new(IBV_WR_SEND, 1, &lists[0]).flags(0).posted(&a);
    let received = device.wait();
    assert_eq!((received.status, received.byte_len), (IBV_WC_SUCCESS, 1777));
    let source = from.read();
    let expected: Vec<u8> = source[..1000].iter().chain(&source[2000..2777]).copied().collect();
    let got = to.read();
    let seen: Vec<u8> =
        got[..10].iter().chain(&got[100..101]).chain(&got[200..1966]).copied().collect();
    assert_eq!(seen, expected);
    assert!(got[10..100].iter().chain(&got[101..200]).chain(&got[1966..]).all(|byte| *byte == 0));
}

#[test]
fn many_messages_arrive_in_order_and_unsignalled_ones_complete_silently() {
    let device = Device::open();
    let (a, b) = device.pair();
    let from = device.buffer(256, |at| at as u8);
    let to = device.buffer(256, |_| 0);
    for round in 0..4u64 {
        for index in 0..32 {
            assert_eq!(b.receive(round * 100 + index, &[to.sge(index as usize, 1)]), 0);
        }
        for index in 0..32usize {
            let flags = if index == 31 { IBV_SEND_SIGNALED } else { 0 };
            Send::new(IBV_WR_SEND, 9, &[from.sge(index, 1)]).flags(flags).posted(&a);
        }
        let mut received = Vec::new();
        let mut sent = 0;
        while received.len() < 32 || sent < 1 {
            let wc = device.wait();
            assert_eq!(wc.status, IBV_WC_SUCCESS);
            if wc.opcode == IBV_WC_RECV { received.push(wc.wr_id) } else { sent += 1 }
        }
        assert!(received.into_iter().eq((0..32).map(|index| round * 100 + index)));
        assert_eq!(to.read()[..32], from.read()[..32]);
    }
    device.assert_quiet();
}

#[test]
fn a_message_waits_for_a_receive_buffer() {
    let device = Device::open();
    let (a, b) = device.pair();
    let from = device.buffer(5000, |at| at as u8);
    let to = device.buffer(5000, |_| 0);
    for id in 0..3 {
        Send::new(IBV_WR_SEND, id, &[from.all()]).posted(&a);
    }
    device.assert_quiet();
    for id in 10..13 {
        assert_eq!(b.receive(id, &[to.all()]), 0);
    }
    let mut ids: Vec<u64> = (0..6)
        .map(|_| device.wait())
        .inspect(|wc| assert_eq!(wc.status, 0))
        .map(|wc| wc.wr_id)
        .collect();
    ids.sort_unstable();
    assert_eq!(ids, [0, 1, 2, 10, 11, 12]);
    assert_eq!(to.read(), from.read());
}
