//! What the driver would answer with a line in the kernel log is not asked, or not asked twice. The record
//! of driver calls shows it.

mod machine;

use std::os::fd::AsFd;
use std::sync::Arc;

use gaudi::{Device, DeviceChoice, ErrorKind, runtime, trace};
use machine::alone;
use serde_json::Value;

/// Large enough to be pinned.
const LEN: usize = 128 << 10;
/// More pieces than refusals are remembered.
const PIECES: usize = 300;
/// No upstream kernel imports.
const NO_IMPORT: (&str, &str) = ("SOFT_GAUDI_LENIENT", "");

/// The calls that failed since the record was begun.
fn failed(path: &std::path::Path) -> Vec<Value> {
    trace::flush();
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line.get("errno").is_some()).collect()
}

#[test]
fn nothing_is_asked_of_the_driver_that_it_refuses_but_one_import() {
    alone!(2, NO_IMPORT);
    let path = std::env::temp_dir().join(format!("gaudi-{}.trace", std::process::id()));
    trace::start(path.to_str().unwrap()).unwrap();
    let choice = DeviceChoice::Index(0);

    // Memory that is exported and freed, while the export is still open: in use, then on closing.
    for _ in 0..2 {
        let device = runtime().open(&choice).unwrap();
        let page = machine::driver_page();
        let kept = device.alloc(page, 1).unwrap();
        let exported = device.alloc(2 * page, 1).unwrap();
        let (open, _) = device.export(exported.addr(), 4096).unwrap();
        drop(exported);
        // Twice: the pages are used again.
        let again = device.alloc(2 * page, 1).unwrap();
        assert_eq!(device.memory().reserved, 3 * page);
        let (part, _) = device.export_alone(again.addr(), 4096).unwrap();
        drop((kept, again));
        assert!(device.can_import().is_err(), "import is off");
        drop((device, open, part));
    }

    // Memory that cannot be pinned, again and again and in pieces: the driver is asked once.
    let device = runtime().open(&choice).unwrap();
    let target = device.alloc(LEN as u64, 1).unwrap();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh, read-only mapping of zeros, never unmapped.
    let source: &[u8] = unsafe {
        let len = PIECES * LEN;
        let at = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        std::slice::from_raw_parts(at.cast(), len)
    };
    for round in 0..2 {
        source.chunks(LEN).for_each(|piece| machine::write(&device, target.addr(), piece));
        assert_eq!(machine::kernel_log(), ["opcode", "pin"], "round {round}");
    }
    drop((target, device));

    // More than there is.
    let device = runtime().open(&choice).unwrap();
    let most = device.memory().total;
    let error = device.alloc(most + 1, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    let all = device.alloc(most, 1).unwrap();
    assert_eq!(device.alloc(1, 1).unwrap_err().kind(), ErrorKind::OutOfMemory);
    drop((all, device));

    // A card that the application lends.
    let library = hl_thunk::Library::load().unwrap();
    let card = runtime().discover().unwrap()[1].bus_id.clone();
    let theirs = hl_thunk::Device::open(&library, card.as_str()).unwrap();
    runtime().lend(theirs.as_fd()).unwrap();
    let ours = runtime().open(&DeviceChoice::Bus(card)).unwrap();
    drop(ours.alloc(1, 1).unwrap());
    assert!(ours.can_import().is_err());
    drop(ours);
    runtime().take_back(theirs.as_fd()).unwrap();

    let failed = failed(&path);
    std::fs::remove_file(&path).unwrap();
    let calls: Vec<&Value> = failed.iter().map(|call| &call["call"]).collect();
    assert_eq!(calls, ["ioctl_memory", "hlthunk_host_memory_map"], "{failed:#?}");
    assert_eq!(machine::kernel_log(), ["opcode", "pin"]);
}

#[track_caller]
fn assert_exhausted(device: &Arc<Device>, len: u64) {
    let error = device.alloc(len, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
}

#[test]
fn memory_that_the_application_has_is_not_asked_for_on_the_card_it_lends() {
    alone!(1, NO_IMPORT);
    let page = machine::driver_page();
    let library = hl_thunk::Library::load().unwrap();
    let card = runtime().discover().unwrap()[0].bus_id.clone();
    let theirs = hl_thunk::Device::open(&library, card.as_str()).unwrap();
    runtime().lend(theirs.as_fd()).unwrap();
    let ours = runtime().open(&DeviceChoice::Bus(card)).unwrap();
    // A page that stays as a spare one.
    drop(ours.alloc(1, 1).unwrap());
    let free = theirs.free_memory().unwrap() / page * page;
    let rest = hl_thunk::DeviceMemory::alloc(&theirs, free).unwrap();
    (0..3).for_each(|_| assert_exhausted(&ours, 2 * page));
    assert_eq!(machine::kernel_log(), [""; 0]);
    drop(rest);
    drop(ours.alloc(2 * page, 1).unwrap());
    drop(ours);
    runtime().take_back(theirs.as_fd()).unwrap();
}

#[test]
fn an_exported_page_is_asked_back_only_if_enough_memory_would_be_free_then() {
    alone!(1, NO_IMPORT);
    let device = runtime().open(&DeviceChoice::Index(0)).unwrap();
    let page = machine::driver_page();
    let exported = device.alloc(page, 1).unwrap();
    let (open, _) = device.export(exported.addr(), 4096).unwrap();
    let _rest = device.alloc(device.memory().total - 2 * page, 1).unwrap();
    drop(exported);
    // One page is free. With the exported one it would be two.
    (0..3).for_each(|_| assert_exhausted(&device, 3 * page));
    assert_eq!(machine::kernel_log(), [""; 0]);
    assert_exhausted(&device, 2 * page);
    assert_eq!(machine::kernel_log(), ["unmap"]);
    drop(open);
    drop(device.alloc(2 * page, 1).unwrap());
    assert_eq!(machine::kernel_log(), ["unmap"]);
}
