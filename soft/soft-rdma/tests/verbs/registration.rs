use std::os::fd::AsRawFd;

use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::gaudi::Card;
use crate::harness::*;

#[test]
fn memory_that_is_not_there_or_wrong_rights_cannot_be_registered() {
    let device = Device::open();
    let mut page = [0u8; 64];
    let addr = page.as_mut_ptr().cast();
    // SAFETY: the domain is live; what cannot be registered is refused.
    unsafe {
        assert!(ibv_reg_mr(device.pd, 4096 as *mut _, 4096, 1).is_null());
        assert_eq!(last_error(), libc::EFAULT);
        assert!(ibv_reg_mr(device.pd, addr, 64, IBV_ACCESS_REMOTE_WRITE as i32).is_null());
        assert_eq!(last_error(), libc::EINVAL);
        assert!(ibv_reg_mr(device.pd, addr, 0, 1).is_null());
        assert_eq!(last_error(), libc::EINVAL);
        assert!(ibv_reg_mr(device.pd, addr, 64, IBV_ACCESS_ON_DEMAND as i32).is_null());
        assert_eq!(last_error(), libc::EOPNOTSUPP);
        // Relaxed ordering is optional: it is ignored.
        let mr = ibv_reg_mr_iova2(device.pd, addr, 64, addr as u64, 1 << 20 | 1);
        assert!(!mr.is_null());
        assert_eq!(ibv_dereg_mr(mr), 0);
    }
}

#[test]
fn objects_in_use_cannot_be_destroyed() {
    let device = Device::open();
    let buffer = device.buffer(8, |_| 0);
    let qp = device.rc();
    // SAFETY: live objects.
    unsafe {
        assert_eq!(ibv_dealloc_pd(device.pd), libc::EBUSY);
        assert_eq!(ibv_destroy_cq(device.cq), libc::EBUSY);
        qp.destroy();
        drop(buffer);
        assert_eq!(ibv_destroy_cq(device.cq), 0);
        assert_eq!(ibv_dealloc_pd(device.pd), 0);
        assert_eq!(ibv_close_device(device.context), 0);
    }
}

#[test]
fn a_region_with_its_own_addresses_is_reached_by_them() {
    let device = Device::open();
    let (a, _b) = device.pair();
    let mut memory = vec![0u8; 4096].into_boxed_slice();
    let local = device.buffer(4096, |at| at as u8);
    // SAFETY: the memory outlives the region.
    let mr = unsafe {
        ibv_reg_mr_iova2(device.pd, memory.as_mut_ptr().cast(), 4096, 0x10_0000, ALL_ACCESS)
    };
    assert!(!mr.is_null());
    // SAFETY: the region is live.
    let key = unsafe { (*mr).rkey };
    Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(0x10_0000, key).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    // SAFETY: the region is live.
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    assert_eq!(*memory, *local.read());
}

#[test]
fn a_dmabuf_is_registered_with_offset_and_address() {
    let device = Device::open();
    let (a, _b) = device.pair();
    let fd = rustix::fs::memfd_create("dmabuf", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&fd, 16384).expect("it has a size");
    let iova = 0x1001_6000_0000_0010;
    // SAFETY: the domain is live.
    let mr = unsafe {
        ibv_reg_dmabuf_mr(device.pd, 4096 + 0x10, 8000, iova, fd.as_raw_fd(), ALL_ACCESS as i32)
    };
    assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
    // SAFETY: the region is live.
    let key = unsafe { (*mr).rkey };
    let local = device.buffer(8000, |at| (at * 5) as u8);
    Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(iova, key).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    let mut file = vec![0; 16384];
    assert_eq!(rustix::io::pread(&fd, &mut file[..], 0), Ok(16384));
    assert_eq!(file[4112..12112], local.read());
    assert!(file[..4112].iter().chain(&file[12112..]).all(|byte| *byte == 0));

    // The memory of the dma-buf is a source as good as any.
    let back = device.buffer(8000, |_| 0);
    let sge = ibv_sge { addr: iova, length: 8000, lkey: key };
    Send::new(IBV_WR_RDMA_WRITE, 2, &[sge]).remote(back.addr(), back.key()).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    assert_eq!(back.read(), local.read());
    // Beyond its end there is nothing.
    Send::new(IBV_WR_RDMA_WRITE, 3, &[local.all()]).remote(iova + 1, key).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_REM_ACCESS_ERR);
    // SAFETY: the region is live.
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
}

#[test]
fn a_dmabuf_that_cannot_be_used_is_refused_with_the_reason() {
    let device = Device::open();
    let memfd =
        rustix::fs::memfd_create("dmabuf", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&memfd, 8192).expect("it has a size");
    let fd = memfd.as_raw_fd();
    let access = ALL_ACCESS as i32;
    // SAFETY: the domain is live.
    let refused = |offset, length, iova, fd, access| unsafe {
        assert!(ibv_reg_dmabuf_mr(device.pd, offset, length, iova, fd, access).is_null());
        last_error()
    };
    // What UCX asks to find out whether dma-bufs are supported at all.
    assert_eq!(refused(0, 4096, 0, -1, access), libc::EBADF);
    assert_eq!(refused(0, 4096, 0, 9999, access), libc::EBADF);
    assert_eq!(refused(16, 4096, 0, fd, access), libc::EINVAL);
    assert_eq!(refused(0, 0, 0, fd, access), libc::EINVAL);
    assert_eq!(refused(4096, 4097, 0, fd, access), libc::EINVAL);
    assert_eq!(refused(0, 4096, 0, fd, IBV_ACCESS_REMOTE_WRITE as i32), libc::EINVAL);
    let read_only = std::fs::File::open("/proc/self/exe").expect("our own program");
    assert_eq!(refused(0, 4096, 0, read_only.as_raw_fd(), access), libc::EACCES);
}

#[test]
fn keys_differ_and_cannot_be_guessed_from_each_other() {
    let device = Device::open();
    let buffers: Vec<_> = (0..100).map(|_| device.buffer(8, |_| 0)).collect();
    let mut keys: Vec<_> = buffers.iter().map(Buffer::key).collect();
    keys.sort_unstable();
    assert!(keys.windows(2).all(|pair| pair[0] != pair[1]));
    assert!(keys.windows(2).any(|pair| pair[1] - pair[0] > 1 << 16));
}

#[test]
fn bytes_go_from_card_to_card() {
    if rerun("registration::bytes_go_from_card_to_card", &[]) {
        return;
    }
    let device = Device::open();
    let (a, _b) = device.pair();
    const LENGTH: usize = (1 << 20) + 8191;
    // As UCX registers: the card's address is the region's, and pages at both ends are whole.
    let regions = [0, 1].map(|index| {
        let fd = Card::open(index).export((LENGTH as u64).next_multiple_of(4096));
        let iova = 0x1001_0018_0000_0000 + u64::from(index) * 0x1000_0000;
        // SAFETY: the domain is live.
        let mr = unsafe {
            ibv_reg_dmabuf_mr(device.pd, 0, LENGTH, iova, fd.as_raw_fd(), ALL_ACCESS as i32)
        };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        // The region keeps the memory exported.
        drop(fd);
        // SAFETY: the region is live.
        (mr, iova, unsafe { (*mr).rkey })
    });
    let [(_, from, from_key), (_, to, to_key)] = regions;
    let (source, target) =
        (device.buffer(LENGTH, |at| (at * 7) as u8), device.buffer(LENGTH, |_| 0));
    let on_card = ibv_sge { addr: from, length: LENGTH as u32, lkey: from_key };
    let works = [
        Send::new(IBV_WR_RDMA_WRITE, 1, &[source.all()]).remote(from, from_key),
        Send::new(IBV_WR_RDMA_WRITE, 2, &[on_card]).remote(to, to_key),
        Send::new(IBV_WR_RDMA_READ, 3, &[target.all()]).remote(to, to_key),
    ];
    for work in works {
        work.posted(&a);
        assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    }
    assert_eq!(target.read(), source.read());
    target.assert_guards();
    for (mr, ..) in regions {
        // SAFETY: the region is live.
        assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
    }
}
