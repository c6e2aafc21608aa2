//! A card that takes long to close: it is waited for, and it is not closed between two uses.

mod machine;

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use gaudi::{DeviceChoice, Options, runtime, trace};
use machine::alone;

const CARD: DeviceChoice = DeviceChoice::Index(0);

/// How often this process opened or closed a card's compute node, by its record of driver calls.
struct Calls(std::path::PathBuf);

impl Calls {
    fn record() -> Calls {
        let path = std::env::temp_dir().join(format!("gaudi-{}.trace", std::process::id()));
        trace::start(path.to_str().unwrap()).unwrap();
        Calls(path)
    }

    fn opens(&self) -> usize {
        trace::flush();
        let text = std::fs::read_to_string(&self.0).unwrap();
        let opened = |line: &&str| line.contains("\"hlthunk_open\"") && !line.contains("errno");
        text.lines().filter(opened).count()
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn allocate_and_free() {
    let device = runtime().open(&CARD).unwrap();
    device.alloc(4096, 1).unwrap();
}

#[test]
fn a_card_stays_open_between_two_uses_while_somebody_keeps_cards() {
    alone!(1);
    let calls = Calls::record();
    allocate_and_free();
    allocate_and_free();
    assert_eq!(calls.opens(), 2, "it is not kept open");
    let (one, other) = (runtime().keep_open(), runtime().keep_open());
    allocate_and_free();
    drop(one);
    allocate_and_free();
    assert_eq!((calls.opens(), runtime().devices().len()), (3, 1));
    drop(other);
    assert_eq!(runtime().devices().len(), 0, "the last one to keep it is gone");
    allocate_and_free();
    assert_eq!(calls.opens(), 4);
}

#[test]
fn a_card_stays_open_for_the_time_that_is_set() {
    alone!(1);
    let calls = Calls::record();
    let keep = |time| runtime().configure(Options { keep_open: Some(time), ..Options::default() });
    keep(Duration::from_secs(3600));
    let holder = runtime().keep_open();
    allocate_and_free();
    drop(holder);
    allocate_and_free();
    allocate_and_free();
    assert_eq!((calls.opens(), runtime().devices().len()), (1, 1));
    keep(Duration::from_millis(1));
    while !runtime().devices().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    allocate_and_free();
    assert_eq!(calls.opens(), 2);
}

#[test]
fn a_card_that_was_reset_is_not_kept() {
    alone!(1, ("SOFT_GAUDI_FAULTS", "yes"));
    let _kept = runtime().keep_open();
    // A copy finds out, or an allocation.
    for fault in ["transfer fail:EIO", "hlthunk_device_memory_alloc reset"] {
        let device = runtime().open(&CARD).unwrap();
        let memory = device.alloc(4096, 1).unwrap();
        machine::faults(fault);
        let page = machine::driver_page();
        let error =
            device.fill(memory.addr(), 4096, 1).and_then(|()| device.alloc(page, 1).map(drop));
        let error = error.unwrap_err();
        assert!(error.is_device_lost() && device.is_lost(), "{error}");
        drop((memory, device));
        assert!(runtime().devices().is_empty(), "closed with the last memory");
        assert!(!runtime().open(&CARD).unwrap().is_lost());
    }
}

#[test]
fn a_card_that_failed_one_copy_and_works_is_opened_again() {
    alone!(1, ("SOFT_GAUDI_FAULTS", "yes"));
    let _kept = runtime().keep_open();
    let device = runtime().open(&CARD).unwrap();
    let memory = device.alloc(4096, 1).unwrap();
    machine::faults("hlthunk_wait_for_cs fail:EIO times=1");
    let failed = device.fill(memory.addr(), 4096, 1).unwrap_err();
    assert!(failed.is_device_lost(), "{failed}: what the driver says after a reset, too");
    device.fill(memory.addr(), 4096, 2).unwrap();
    let again = runtime().open(&CARD).expect("it was not reset");
    again.alloc(4096, 1).unwrap();
    drop((memory, device, again));
    assert_eq!(runtime().devices().len(), 1, "kept as any other");
}

/// The other process takes four seconds to close the card: longer than opens were once retried.
#[test]
fn a_card_that_another_process_is_closing_is_waited_for_and_that_is_said() {
    if std::env::var_os("GAUDI_TEST_CLOSER").is_some() {
        machine::set_up("gaudi2");
        let device = runtime().open(&CARD).unwrap();
        println!("\nopen");
        drop(device);
        return;
    }
    alone!(1);
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&lines);
    runtime().on_wait(move |line| log.lock().unwrap().push(line.to_owned()));
    let name = "a_card_that_another_process_is_closing_is_waited_for_and_that_is_said";
    let mut closer = machine::child(name);
    closer.env("GAUDI_TEST_CLOSER", "1").env("SOFT_GAUDI_CLOSE_TIME", "4000");
    closer.env("SOFT_GAUDI_NODE", std::env::var_os("SOFT_GAUDI_NODE").expect("set up above"));
    let mut closer = closer.stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(closer.stdout.take().expect("piped"));
    assert!(said.by_ref().lines().any(|line| line.unwrap() == "open"));
    // Open in the other process, and being closed: busy for a moment, then not yet.
    let device = loop {
        match runtime().open(&CARD) {
            Ok(device) => break device,
            Err(error) => assert_eq!(error.errno(), Some(libc::EBUSY), "{error}"),
        }
    };
    let lines = std::mem::take(&mut *lines.lock().unwrap());
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("waiting for up to 30 s"), "{lines:?}");
    drop(device);
    assert!(closer.wait().unwrap().success());
}
