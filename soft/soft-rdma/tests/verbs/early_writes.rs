//! A card with early write response: a completion says that the bytes have left the HCA, not that the card's
//! engines see them.

use std::os::fd::{AsFd, AsRawFd};

use soft_gaudi::dmabuf::Exported;
use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::datagrams;
use crate::gaudi::Card;
use crate::harness::*;

const LENGTH: usize = 3000;

#[test]
fn what_an_hca_writes_is_visible_to_the_card_after_a_flush() {
    let name = "early_writes::what_an_hca_writes_is_visible_to_the_card_after_a_flush";
    // Once with messages in the stream, once from region to region.
    let early = ("SOFT_GAUDI_EARLY_WRITES", "yes");
    if ["0", "65536"].iter().all(|inline| rerun(name, &[early, ("SOFT_RDMA_INLINE", inline)])) {
        return;
    }
    let device = Device::open();
    let (a, b) = device.pair();
    let (card, iova) = (Card::open(0), 0x1001_0018_0000_0000);
    let dmabuf = card.export(8192);
    // SAFETY: the domain is live.
    let mr = unsafe {
        ibv_reg_dmabuf_mr(device.pd, 0, 8192, iova, dmabuf.as_raw_fd(), ALL_ACCESS as i32)
    };
    assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
    // SAFETY: the region is live.
    let key = unsafe { (*mr).rkey };
    let exported = Exported::from_fd(dmabuf.as_fd()).expect("mapped");
    // What the card's engines see.
    let seen = || {
        let mut bytes = vec![0; LENGTH];
        // SAFETY: as many are exported; not written to meanwhile.
        unsafe { bytes.as_mut_ptr().copy_from(exported.ranges()[0].ptr, LENGTH) };
        bytes
    };
    let there = |from: usize, length: usize| ibv_sge {
        addr: iova + from as u64,
        length: length as u32,
        lkey: key,
    };
    let all = there(0, LENGTH);
    let back = device.buffer(LENGTH, |_| 0);
    let datagrams = datagrams::pair(&device);
    let mut before = vec![0; LENGTH];
    for (number, way) in ["write", "send", "read", "datagram", "atomic"].into_iter().enumerate() {
        let source = device.buffer(LENGTH, |at| (at * 3 + number + 1) as u8);
        let mut expected = source.read();
        match way {
            "write" => {
                Send::new(IBV_WR_RDMA_WRITE, 1, &[source.all()]).remote(iova, key).posted(&a)
            }
            "send" => {
                assert_eq!(b.receive(2, &[all]), 0);
                Send::new(IBV_WR_SEND, 1, &[source.all()]).flags(0).posted(&a);
            }
            "read" => {
                let read = Send::new(IBV_WR_RDMA_READ, 1, &[all]);
                read.remote(source.addr(), source.key()).posted(&a);
            }
            "datagram" => {
                assert_eq!(datagrams.1.receive(2, &[all]), 0);
                let ah = datagrams::address(&device, false);
                let sge = source.sge(0, LENGTH - 40);
                let send = datagrams::datagram(ah, &datagrams.1, 7, &[sge]);
                send.flags(0).posted(&datagrams.0);
                expected = [&[0; 40][..], &expected[..LENGTH - 40]].concat();
            }
            _ => {
                let add = Send::new(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, &[there(16, 8)]);
                add.atomic(source.addr(), source.key(), 1, 0).posted(&a);
                let old = std::mem::replace(&mut expected, before.clone());
                expected[16..24].copy_from_slice(&old[..8]);
            }
        }
        assert_eq!(device.wait().status, IBV_WC_SUCCESS, "{way}");
        assert_eq!(seen(), before, "{way}: not flushed");
        card.flush();
        assert_eq!(seen(), expected, "{way}: flushed");
        before = expected;
    }
    // A read by the HCA itself comes after its writes, and pushes them.
    let source = device.buffer(LENGTH, |_| 0x77);
    let works = [
        Send::new(IBV_WR_RDMA_WRITE, 1, &[source.all()]).remote(iova, key),
        Send::new(IBV_WR_RDMA_READ, 1, &[back.all()]).remote(iova, key),
    ];
    for work in works {
        work.posted(&a);
        assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    }
    assert_eq!(back.read(), source.read());
    assert_eq!(seen(), source.read());
}
