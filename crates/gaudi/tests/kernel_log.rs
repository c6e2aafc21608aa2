//! What the driver would answer with a line in the kernel log is not asked, or not asked twice. The record
//! of driver calls shows it.

mod machine;

use std::os::fd::AsFd;

use gaudi::{DeviceChoice, ErrorKind, runtime, trace};
use machine::alone;
use serde_json::Value;

/// Large enough to be pinned.
const LEN: usize = 128 << 10;
/// More pieces than refusals are remembered.
const PIECES: usize = 300;
/// No upstream kernel imports.
const NO_IMPORT: (&str, &str) = ("SOFT_GAUDI_KIND", "");

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
    // SAFETY: a fresh mapping of zeros that nobody can change, never unmapped.
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
