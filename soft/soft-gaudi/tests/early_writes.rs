//! Early write response (`SOFT_GAUDI_EARLY_WRITES=yes`): when the engines of a card see what other devices wrote.

mod driver;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;
use soft_gaudi::dmabuf::Exported;

const LEN: usize = 5000;

fn early_machine() {
    machine_with("gaudi2", &[("SOFT_GAUDI_EARLY_WRITES", "yes")]);
}

/// A card with memory full of zeros, and a dma-buf of it.
fn exporter(index: u32) -> (i32, u64, OwnedFd) {
    let fd = open(index);
    let (_, va) = alloc(fd, 1);
    put(fd, va, &mut [0; LEN]);
    let dmabuf = hlthunk_device_mapped_memory_export_dmabuf_fd(fd, va, 8192, 0, sys::DMABUF_FLAGS);
    assert!(dmabuf >= 0);
    // SAFETY: a fresh descriptor.
    (fd, va, unsafe { OwnedFd::from_raw_fd(dmabuf) })
}

fn put(fd: i32, to: u64, bytes: &mut [u8]) {
    let src = map_host(fd, bytes);
    assert_eq!(run(fd, 0, &gaudi2_copy(src, to, bytes.len() as u32)), (0, 0));
    hlthunk_memory_unmap(fd, src);
}

fn get(fd: i32, from: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; LEN];
    let dst = map_host(fd, &mut bytes);
    assert_eq!(run(fd, 4, &gaudi2_copy(from, dst, LEN as u32)), (0, 0));
    hlthunk_memory_unmap(fd, dst);
    bytes
}

/// As an HCA writes.
fn write(exported: &Exported, at: usize, bytes: &[u8]) {
    let to = exported.write_to(exported.ranges()[0].ptr.wrapping_add(at));
    // SAFETY: inside the exported range, which nobody else uses.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    exported.written(to, bytes.len() as u64);
}

#[test]
fn an_engine_sees_the_write_of_another_device_after_a_flush() {
    early_machine();
    let _exclusive = exclusive();
    let (fd, va, dmabuf) = exporter(0);
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    write(&exported, 100, &[7; 300]);
    write(&exported, 4000, &[8; 500]);
    assert_eq!(get(fd, va), [0; LEN]);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    let mut expected = [0; LEN];
    expected[100..400].fill(7);
    expected[4000..4500].fill(8);
    assert_eq!(get(fd, va), expected);
    // What the engine writes later stays.
    put(fd, va, &mut [9; LEN]);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    assert_eq!(get(fd, va), [9; LEN]);
}

#[test]
fn a_read_of_another_device_pushes_the_writes_before_it() {
    early_machine();
    let _exclusive = exclusive();
    let (fd, va, dmabuf) = exporter(0);
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    write(&exported, 0, &[7; LEN]);
    exported.before_read();
    assert_eq!(get(fd, va), [7; LEN]);
}

#[test]
fn a_card_keeps_back_a_limited_number_of_writes() {
    early_machine();
    let _exclusive = exclusive();
    let (fd, va, dmabuf) = exporter(0);
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    for at in 0..4097 {
        write(&exported, at, &[7]);
    }
    let seen = get(fd, va);
    assert_eq!((&seen[..4096], &seen[4096..]), (&[7; 4096][..], &[0; LEN - 4096][..]));
}

#[test]
fn writes_of_a_card_that_imported_the_memory_are_early_too_and_its_reads_are_right() {
    early_machine();
    let _exclusive = exclusive();
    let (owner, va, dmabuf) = exporter(0);
    let other = open(1);
    let mut args = sys::MemArgs {
        fd_or_device_va: dmabuf.as_raw_fd() as u64,
        length: 8192,
        op: sys::MEM_OP_REG_DMABUF_FD,
        ..Default::default()
    };
    assert_eq!(ioctl(other, sys::IOCTL_MEMORY, (&raw mut args).cast()), 0);
    let imported = args.fd_or_device_va;
    put(other, imported, &mut [5; LEN]);
    assert_eq!(get(owner, va), [0; LEN], "not flushed");
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(other), 0);
    assert_eq!(get(owner, va), [0; LEN], "of another card");
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(owner), 0);
    assert_eq!(get(owner, va), [5; LEN]);
    put(other, imported, &mut [6; LEN]);
    assert_eq!(get(other, imported), [6; LEN]);
}

#[test]
fn a_card_that_is_opened_again_has_nothing_on_its_way() {
    early_machine();
    let _exclusive = exclusive();
    let (fd, _, dmabuf) = exporter(0);
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    write(&exported, 0, &[7; LEN]);
    drop((exported, dmabuf));
    assert_eq!(hlthunk_close(fd), 0);
    let fd = open(0);
    let (_, va) = alloc(fd, 1);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    assert_eq!(get(fd, va), [0; LEN]);
}
