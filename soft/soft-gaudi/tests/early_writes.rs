//! Early write response (`SOFT_GAUDI_EARLY_WRITES=yes`): when the engines of a card see what other devices wrote.

mod driver;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

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
    put(fd, va, &[0; LEN]);
    (fd, va, export_fd(fd, va, 8192, 0))
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
    let (fd, va, dmabuf) = exporter(fresh_index());
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    write(&exported, 100, &[7; 300]);
    write(&exported, 4000, &[8; 500]);
    assert_eq!(get(fd, va, LEN), [0; LEN]);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    let mut expected = [0; LEN];
    expected[100..400].fill(7);
    expected[4000..4500].fill(8);
    assert_eq!(get(fd, va, LEN), expected);
    // What the engine writes later stays.
    put(fd, va, &[9; LEN]);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    assert_eq!(get(fd, va, LEN), [9; LEN]);
}

#[test]
fn a_read_of_another_device_pushes_the_writes_before_it() {
    early_machine();
    let _exclusive = exclusive();
    let (fd, va, dmabuf) = exporter(fresh_index());
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    write(&exported, 0, &[7; LEN]);
    exported.before_read();
    assert_eq!(get(fd, va, LEN), [7; LEN]);
}

#[test]
fn a_card_keeps_back_a_limited_number_of_writes() {
    early_machine();
    let _exclusive = exclusive();
    let (fd, va, dmabuf) = exporter(fresh_index());
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    for at in 0..4097 {
        write(&exported, at, &[7]);
    }
    let seen = get(fd, va, LEN);
    assert_eq!((&seen[..4096], &seen[4096..]), (&[7; 4096][..], &[0; LEN - 4096][..]));
}

#[test]
fn writes_of_a_card_that_imported_the_memory_are_early_too_and_its_reads_are_right() {
    early_machine();
    let _exclusive = exclusive();
    let (owner, va, dmabuf) = exporter(fresh_index());
    let other = open(fresh_index());
    let mut args = sys::MemArgs {
        fd_or_device_va: dmabuf.as_raw_fd() as u64,
        length: 8192,
        op: sys::MEM_OP_REG_DMABUF_FD,
        ..Default::default()
    };
    assert_eq!(ioctl(other, sys::IOCTL_MEMORY, (&raw mut args).cast()), 0);
    let imported = args.fd_or_device_va;
    put(other, imported, &[5; LEN]);
    assert_eq!(get(owner, va, LEN), [0; LEN], "not flushed");
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(other), 0);
    assert_eq!(get(owner, va, LEN), [0; LEN], "of another card");
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(owner), 0);
    assert_eq!(get(owner, va, LEN), [5; LEN]);
    put(other, imported, &[6; LEN]);
    assert_eq!(get(other, imported, LEN), [6; LEN]);
}

#[test]
fn a_card_that_is_opened_again_has_nothing_on_its_way() {
    early_machine();
    let _exclusive = exclusive();
    let index = fresh_index();
    let (fd, _, dmabuf) = exporter(index);
    let exported = Exported::from_fd(dmabuf.as_fd()).unwrap();
    write(&exported, 0, &[7; LEN]);
    drop((exported, dmabuf));
    assert_eq!(hlthunk_close(fd), 0);
    let fd = open(index);
    let (_, va) = alloc(fd, 1);
    put(fd, va, &[0; LEN]);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    assert_eq!(get(fd, va, LEN), [0; LEN]);
}
