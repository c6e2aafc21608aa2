use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::harness::*;

pub(crate) fn address(device: &Device, global: bool) -> *mut ibv_ah {
    let mut attr = ibv_ah_attr { dlid: device.lid(), port_num: 1, ..Default::default() };
    if global {
        attr.is_global = 1;
        attr.grh.hop_limit = 9;
        let gid = (&raw mut attr.grh.dgid).cast();
        // SAFETY: the context is open.
        assert_eq!(unsafe { ibv_query_gid(device.context, 1, 0, gid) }, 0);
    }
    // SAFETY: the domain is live.
    let ah = unsafe { ibv_create_ah(device.pd, &raw mut attr) };
    assert!(!ah.is_null());
    ah
}

pub(crate) fn datagram(ah: *mut ibv_ah, to: &Qp, qkey: u32, sges: &[ibv_sge]) -> Send {
    let mut send = Send::new(IBV_WR_SEND, 1, sges);
    send.wr.wr.ud = ud_wr { ah, remote_qpn: to.number(), remote_qkey: qkey };
    send
}

pub(crate) fn pair(device: &Device) -> (Qp, Qp) {
    let (a, b) = (device.qp_with(IBV_QPT_UD, |_| ()), device.qp_with(IBV_QPT_UD, |_| ()));
    a.open_datagrams(7);
    b.open_datagrams(7);
    (a, b)
}

#[test]
fn a_datagram_arrives_behind_forty_bytes() {
    let device = Device::open();
    let (a, b) = pair(&device);
    for (length, global) in [(0, false), (100, true), (4096, false)] {
        let ah = address(&device, global);
        let from = device.buffer(length, |at| at as u8);
        let to = device.buffer(length + 40, |_| 0xee);
        assert_eq!(b.receive(2, &[to.all()]), 0);
        datagram(ah, &b, 7, &[from.all()]).flags(0).posted(&a);
        let wc = device.wait();
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (2, IBV_WC_SUCCESS, IBV_WC_RECV));
        assert_eq!((wc.byte_len as usize, wc.src_qp, wc.slid), (length + 40, a.number(), a.lid));
        assert_eq!(wc.wc_flags, if global { IBV_WC_GRH } else { 0 });
        let got = to.read();
        assert_eq!(got[40..], from.read());
        to.assert_guards();
        if global {
            // IPv6-like: version 6, length, next header, hop limit, source and destination.
            assert_eq!((got[0] >> 4, got[4..8].to_vec()), (6, vec![0, 100, 0x1b, 9]));
            assert_eq!(got[8..24], got[24..40]);
            let (mut wc, mut header) = (wc, [0; 40]);
            header.copy_from_slice(&got[..40]);
            // SAFETY: structures of ours.
            let back = unsafe { ibv_create_ah_from_wc(device.pd, &raw mut wc, &raw mut header, 1) };
            assert!(!back.is_null());
            let answer = device.buffer(40, |_| 0);
            assert_eq!(a.receive(3, &[answer.all()]), 0);
            datagram(back, &a, 7, &[]).flags(0).posted(&b);
            assert_eq!(device.wait().wr_id, 3);
            // SAFETY: the handle is live.
            assert_eq!(unsafe { ibv_destroy_ah(back) }, 0);
        }
        // SAFETY: the handle is live.
        assert_eq!(unsafe { ibv_destroy_ah(ah) }, 0);
    }
}

#[test]
fn datagrams_that_nobody_takes_are_lost_without_an_error() {
    let device = Device::open();
    let ((a, b), (c, _)) = (pair(&device), pair(&device));
    let ah = address(&device, false);
    let to = device.buffer(100, |_| 0);
    // Between two processes datagrams arrive in order: when one to `c` is there, the lost one was handled.
    let assert_lost = |lost: Send| {
        lost.posted(&a);
        let sent = device.wait();
        assert_eq!((sent.opcode, sent.status), (IBV_WC_SEND, IBV_WC_SUCCESS));
        assert_eq!(c.receive(5, &[to.all()]), 0);
        datagram(ah, &c, 7, &[]).flags(0).posted(&a);
        assert_eq!(device.wait().wr_id, 5);
    };
    // No buffer; a wrong key; no such queue pair.
    assert_lost(datagram(ah, &b, 7, &[]));
    assert_eq!(b.receive(2, &[to.all()]), 0);
    assert_lost(datagram(ah, &b, 8, &[]));
    let mut lost = datagram(ah, &b, 7, &[]);
    lost.wr.wr.ud = ud_wr { ah, remote_qpn: 0xff_fff0, remote_qkey: 7 };
    assert_lost(lost);
    // The buffer is still there.
    datagram(ah, &b, 7, &[]).flags(0).posted(&a);
    assert_eq!(device.wait().wr_id, 2);
}

#[test]
fn a_datagram_longer_than_the_mtu_is_an_error() {
    let device = Device::open();
    let (a, b) = pair(&device);
    let ah = address(&device, false);
    let from = device.buffer(4097, |_| 0);
    datagram(ah, &b, 7, &[from.all()]).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_LOC_LEN_ERR);
    assert_eq!(Send::new(IBV_WR_RDMA_WRITE, 1, &[]).post(&a), libc::EINVAL);
}

#[test]
fn a_datagram_in_error_stops_sending_until_the_program_resumes() {
    let device = Device::open();
    let (a, b) = pair(&device);
    let ah = address(&device, false);
    let to = device.buffer(100, |_| 0);
    datagram(ah, &b, 7, &[ibv_sge { length: 8, ..Default::default() }]).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_LOC_PROT_ERR);
    assert_eq!(a.state(), IBV_QPS_SQE);
    datagram(ah, &b, 7, &[]).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_WR_FLUSH_ERR);
    // It still receives.
    assert_eq!(a.receive(2, &[to.all()]), 0);
    datagram(ah, &a, 7, &[]).flags(0).posted(&b);
    assert_eq!((device.wait().wr_id, a.state()), (2, IBV_QPS_SQE));
    assert_eq!(
        a.modify(&ibv_qp_attr { qp_state: IBV_QPS_RTS, ..Default::default() }, IBV_QP_STATE),
        0
    );
    assert_eq!(b.receive(3, &[to.all()]), 0);
    datagram(ah, &b, 7, &[]).flags(0).posted(&a);
    let wc = device.wait();
    assert_eq!((wc.wr_id, wc.status), (3, IBV_WC_SUCCESS));
}
