//! What a kernel or an HCA refuses to register, and what happens to memory that goes away.

use std::os::fd::{AsRawFd, OwnedFd};

use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::gaudi::Card;
use crate::harness::*;

fn memfd(length: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("dmabuf", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&fd, length).expect("it has a size");
    fd
}

/// Registers a dma-buf, or says why not.
fn register(device: &Device, fd: &OwnedFd, length: usize) -> Result<*mut ibv_mr, i32> {
    // SAFETY: the domain is live.
    let mr =
        unsafe { ibv_reg_dmabuf_mr(device.pd, 0, length, 0, fd.as_raw_fd(), ALL_ACCESS as i32) };
    if mr.is_null() { Err(last_error()) } else { Ok(mr) }
}

/// A card and some of its memory, registered, with its key.
fn card_memory(device: &Device) -> (Card, *mut ibv_mr, u32) {
    let card = Card::open(0);
    let mr = register(device, &card.export(1 << 20), 1 << 20).expect("registered");
    // SAFETY: the region is live.
    let key = unsafe { (*mr).rkey };
    (card, mr, key)
}

/// Registers memory of this process.
fn pin(device: &Device, memory: &mut [u8]) -> Result<*mut ibv_mr, i32> {
    // SAFETY: the domain is live, the memory is ours.
    let mr = unsafe { ibv_reg_mr(device.pd, memory.as_mut_ptr().cast(), memory.len(), 1) };
    if mr.is_null() { Err(last_error()) } else { Ok(mr) }
}

fn deregister(mr: *mut ibv_mr) {
    // SAFETY: the region is live.
    assert_eq!(unsafe { ibv_dereg_mr(mr) }, 0);
}

#[test]
fn memory_above_the_lock_limit_is_refused_until_some_is_given_back() {
    let test = "refusals::memory_above_the_lock_limit_is_refused_until_some_is_given_back";
    if rerun(test, &[("SOFT_RDMA_MEMLOCK", "1048576")]) {
        return;
    }
    let device = Device::open();
    let mut memory = vec![0; 600 << 10];
    let mr = pin(&device, &mut memory).expect("below the limit");
    assert_eq!(pin(&device, &mut memory), Err(libc::ENOMEM), "every registration counts");
    let small = pin(&device, &mut memory[..4096]).expect("below the limit");
    // Memory of a device is not locked.
    let fd = memfd(4 << 20);
    deregister(register(&device, &fd, 4 << 20).expect("a dma-buf has no limit"));
    deregister(mr);
    deregister(pin(&device, &mut memory).expect("given back"));
    deregister(small);
}

#[test]
fn an_unprivileged_process_has_the_limit_of_the_kernel() {
    let test = "refusals::an_unprivileged_process_has_the_limit_of_the_kernel";
    if rerun(test, &[("SOFT_RDMA_MEMLOCK", "kernel")]) {
        return;
    }
    use rustix::process::{Resource, Rlimit};
    let device = Device::open();
    let limit = Rlimit { current: Some(64 << 10), ..rustix::process::getrlimit(Resource::Memlock) };
    rustix::process::setrlimit(Resource::Memlock, limit).expect("a lower limit is allowed");
    let mut sets = rustix::thread::capabilities(None).expect("our own");
    sets.effective.remove(rustix::thread::CapabilitySet::IPC_LOCK);
    rustix::thread::set_capabilities(None, sets).expect("dropping is allowed");
    let mut memory = vec![0; 128 << 10];
    assert_eq!(pin(&device, &mut memory), Err(libc::ENOMEM));
    deregister(pin(&device, &mut memory[..32 << 10]).expect("below the limit"));
}

#[test]
fn an_hca_without_dmabufs_says_so_to_every_request() {
    let test = "refusals::an_hca_without_dmabufs_says_so_to_every_request";
    if rerun(test, &[("SOFT_RDMA_DMABUF", "off")]) {
        return;
    }
    let device = Device::open();
    assert_eq!(register(&device, &memfd(8192), 4096), Err(libc::EOPNOTSUPP));
    // What UCX asks to find out.
    // SAFETY: the domain is live.
    assert!(unsafe { ibv_reg_dmabuf_mr(device.pd, 0, 4096, 0, -1, 1) }.is_null());
    assert_eq!(last_error(), libc::EOPNOTSUPP);
}

#[test]
fn a_card_that_cannot_be_reached_by_peer_to_peer_is_refused() {
    let test = "refusals::a_card_that_cannot_be_reached_by_peer_to_peer_is_refused";
    if rerun(test, &[("SOFT_RDMA_DMABUF", "bridge"), ("SOFT_RDMA_PLACES", "4")]) {
        return;
    }
    let device = Device::open();
    let (near, far) = (Card::open(5), Card::open(0));
    let [near, far] = [near.export(1 << 20), far.export(1 << 20)];
    assert_eq!(register(&device, &far, 1 << 20), Err(libc::EPERM));
    deregister(register(&device, &near, 1 << 20).expect("below one host bridge"));
    assert_eq!(register(&device, &near, (1 << 20) + 1), Err(libc::EINVAL));
}

/// A write that the peer must refuse with a status, and what is left of the connection.
#[track_caller]
fn assert_write_fails(device: &Device, key: u32, status: i32) {
    let (a, b) = device.pair();
    let local = device.buffer(100_000, |_| 1);
    Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(0, key).posted(&a);
    assert_eq!(device.wait().status, status);
    assert_eq!((a.state(), b.state()), (IBV_QPS_ERR, IBV_QPS_ERR));
    // As a source it is no better.
    let (a, _b) = device.pair();
    let target = device.buffer(100_000, |_| 2);
    let sge = ibv_sge { addr: 0, length: 100_000, lkey: key };
    let write = Send::new(IBV_WR_RDMA_WRITE, 2, &[sge]).remote(target.addr(), target.key());
    write.posted(&a);
    assert_eq!(device.wait().status, IBV_WC_LOC_PROT_ERR);
}

#[test]
fn a_dmabuf_that_became_shorter_gives_errors_and_no_signal() {
    let device = Device::open();
    let fd = memfd(1 << 20);
    let mr = register(&device, &fd, 1 << 20).expect("registered");
    rustix::fs::ftruncate(&fd, 0).expect("a memfd without seals");
    // SAFETY: the region is live.
    assert_write_fails(&device, unsafe { (*mr).rkey }, IBV_WC_REM_OP_ERR);
    deregister(mr);
}

#[test]
fn memory_of_a_card_that_was_reset_is_not_reached_any_more() {
    let test = "refusals::memory_of_a_card_that_was_reset_is_not_reached_any_more";
    if rerun(test, &[]) {
        return;
    }
    let device = Device::open();
    let (card, mr, key) = card_memory(&device);
    let (a, _b) = device.pair();
    let local = device.buffer(100_000, |_| 1);
    Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(0, key).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    card.reset();
    // The HCA asks every 100 us.
    std::thread::sleep(std::time::Duration::from_millis(1));
    assert_write_fails(&device, key, IBV_WC_REM_ACCESS_ERR);
    deregister(mr);
}

/// As the driver has it: a dma-buf keeps the memory, and the card busy.
#[test]
fn memory_of_a_card_that_was_closed_is_reached_and_the_card_busy_until_it_is_deregistered() {
    let test = "refusals::memory_of_a_card_that_was_closed_is_reached_and_the_card_busy_until_it_is_deregistered";
    if rerun(test, &[]) {
        return;
    }
    let device = Device::open();
    let (card, mr, key) = card_memory(&device);
    card.close();
    let (a, _b) = device.pair();
    let (local, back) = (device.buffer(100_000, |at| at as u8), device.buffer(100_000, |_| 0));
    for (opcode, buffer) in [(IBV_WR_RDMA_WRITE, &local), (IBV_WR_RDMA_READ, &back)] {
        Send::new(opcode, 1, &[buffer.all()]).remote(0, key).posted(&a);
        assert_eq!(device.wait().status, IBV_WC_SUCCESS);
    }
    assert_eq!(back.read(), local.read());
    assert_eq!(Card::try_open(0).err(), Some(-libc::EBUSY));
    deregister(mr);
    Card::open(0).close();
}

#[test]
fn without_descriptors_nothing_is_made_and_what_is_there_works_on() {
    let test = "refusals::without_descriptors_nothing_is_made_and_what_is_there_works_on";
    if rerun(test, &[]) {
        return;
    }
    let device = Device::open();
    let (a, b) = device.pair();
    let (from, to) = (device.buffer(5000, |at| at as u8), device.buffer(5000, |_| 0));
    assert_eq!(b.receive(1, &[to.all()]), 0);
    Send::new(IBV_WR_SEND, 2, &[from.all()]).posted(&a);
    device.succeed(2);
    let card = Card::open(0).export(1 << 20);
    let mut taken: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    // SAFETY: the context is open.
    assert!(unsafe { ibv_create_comp_channel(device.context) }.is_null());
    assert_eq!(last_error(), libc::EMFILE);
    assert_eq!(register(&device, &card, 4096), Err(libc::EMFILE));
    assert_eq!(b.receive(3, &[to.all()]), 0);
    Send::new(IBV_WR_SEND, 4, &[from.all()]).posted(&a);
    device.succeed(2);
    // Importing the memory takes several: too few of them is the same error.
    let mut made = Err(libc::EMFILE);
    while made == Err(libc::EMFILE) && taken.pop().is_some() {
        made = register(&device, &card, 4096);
    }
    deregister(made.expect("descriptors are there again"));
}
