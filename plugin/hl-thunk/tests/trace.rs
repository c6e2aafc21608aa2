//! The record of driver calls, in a program of its own: it is one per process.

mod machine;

use hl_thunk::packet::LinDma;
use hl_thunk::{Chunk, CommandBuffer, ControlDevice, Device, DeviceMemory, trace};

fn lines(path: &std::path::Path) -> Vec<String> {
    trace::flush();
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

/// The recording so far, as a process that is killed now leaves it.
fn written(path: &std::path::Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// A submission that hangs, and after it nothing but polls.
fn polls_alone_write_the_submission_that_they_wait_for(path: &std::path::Path) {
    let device = machine::open(machine::library("gaudi2"));
    let buffer = CommandBuffer::new(&device, 4096).unwrap();
    let before = written(path).lines().count();
    soft_gaudi::testing::Machine::of_this_process().set_faults("gaudi2", "submission hang");
    // SAFETY: the packet has no addresses.
    let sequence = unsafe {
        buffer.write(0, &hl_thunk::packet::NOP);
        device.submit(Chunk { buffer: &buffer, offset: 0, len: 8, queue: 4 }).unwrap()
    };
    let submitted = format!("\"sequence\":{sequence},");
    let is_written = || {
        let text = written(path);
        text.lines().skip(before).any(|line| line.contains(&submitted))
    };
    // The limit is for a failure only: the lines are due after a tenth of a second.
    let began = std::time::Instant::now();
    while !is_written() {
        assert_eq!(device.wait(sequence, 0).unwrap(), hl_thunk::WaitStatus::Busy);
        assert!(began.elapsed().as_secs() < 20, "polled in vain, and nothing was written");
    }
}

#[test]
fn every_call_is_recorded_with_its_arguments_result_errno_and_packets() {
    // SAFETY: this program has one test, and nothing reads the environment yet.
    unsafe { std::env::set_var("SOFT_GAUDI_FAULTS", "yes") };
    let folder = std::env::temp_dir().join(format!("hl-thunk-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let pattern = folder.join("%p.trace");
    let path = trace::start(pattern.to_str().unwrap()).unwrap();
    assert!(path.to_str().unwrap().contains(&std::process::id().to_string()), "{path:?}");
    let bus_id = machine::fresh(machine::library("gaudi2"));
    let device = Device::open(machine::library("gaudi2"), &bus_id).unwrap();
    let busy = Device::open(machine::library("gaudi2"), &bus_id).unwrap_err();
    assert_eq!(busy.errno, libc::EBUSY, "recording leaves errno alone");
    let recorded = lines(&path);
    assert!(recorded[0].starts_with("{\"trace\":1,\"pid\":"), "{}", recorded[0]);
    let opens: Vec<&String> =
        recorded.iter().filter(|line| line.contains("\"call\":\"hlthunk_open\"")).collect();
    assert_eq!(opens.len(), 2, "{recorded:#?}");
    assert!(opens[0].contains(&format!("\"bus_id\":\"{bus_id}\"")), "{}", opens[0]);
    assert!(!opens[0].contains("errno"), "{}", opens[0]);
    assert!(opens[1].contains("\"errno\":16"), "{}", opens[1]);

    let mapping = DeviceMemory::alloc(&device, 1).unwrap().map(None).unwrap();
    let buffer = CommandBuffer::new(&device, 4096).unwrap();
    let fill = LinDma::Fill { dst: mapping.addr(), len: 128, byte: 0x5a };
    let packet = fill.encode(device.generation(), &[]).unwrap();
    // SAFETY: the memory stays mapped until the wait below has returned.
    let sequence = unsafe {
        buffer.write(0, &packet);
        let chunk = Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue: 4 };
        device.submit(chunk).unwrap()
    };
    while device.wait(sequence, 1000).unwrap() == hl_thunk::WaitStatus::Busy {}
    let recorded = lines(&path);
    let of = |call: &str| {
        let name = format!("\"call\":\"{call}\"");
        let found = recorded.iter().rfind(|line| line.contains(&name));
        found.unwrap_or_else(|| panic!("no {call} in {recorded:#?}"))
    };
    let address = format!("\"ret\":\"{:#x}\"", mapping.addr().0);
    assert!(of("hlthunk_device_memory_map").contains(&address), "{recorded:#?}");
    let hex: String = packet.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(of("packets").contains(&format!("\"bytes\":\"{hex}\"")), "{}", of("packets"));
    let submission = of("hlthunk_command_submission");
    // The chunk that SCAL's submitQmanWkld submits: a buffer of the user's (1), by its address for the card.
    assert!(submission.contains("\"queue\":4,\"size\":24,\"flags\":1,\"cb\":\"0x"), "{submission}");
    assert!(submission.contains(&format!("\"sequence\":{sequence}")), "{submission}");
    assert!(submission.contains("\"flags\":0,\"out\""), "{submission}");
    assert!(of("hlthunk_wait_for_cs").contains("\"status\":0"), "{recorded:#?}");

    // SAFETY: as above.
    let sequence = unsafe {
        let chunk = Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue: 4 };
        device.submit_without_reset(chunk, 7).unwrap()
    };
    while device.wait(sequence, 1000).unwrap() == hl_thunk::WaitStatus::Busy {}
    let sparing = |line: &String| {
        line.contains("hlthunk_command_submission_timeout")
            && line.contains("\"flags\":1024")
            && line.contains("\"timeout\":7")
    };
    let recorded = lines(&path);
    assert!(recorded.iter().any(sparing), "{recorded:#?}");
    for line in &recorded {
        let parsed = serde_json::from_str::<serde_json::Value>(line);
        assert!(parsed.is_ok_and(|value| value.is_object()), "{line}");
    }

    // A poll that finds nothing is only counted.
    let before = recorded.len();
    assert!(device.wait(sequence + 1000, 0).is_err());
    assert_eq!(lines(&path).len(), before + 1);

    polls_alone_write_the_submission_that_they_wait_for(&path);

    // A forked child begins a record of its own, and leaves its parent's alone.
    let before = lines(&path).len();
    let (child, status) = in_child(|| {
        let opened = ControlDevice::open(machine::library("gaudi2"), 0).is_ok();
        trace::flush();
        if opened { 0 } else { 1 }
    });
    assert_eq!(status, 0);
    assert_eq!(lines(&path).len(), before);
    let of_child = folder.join(format!("{child}.trace"));
    let recorded = lines(&of_child);
    assert!(recorded[0].contains(&format!("\"pid\":{child},")), "{recorded:?}");
    assert!(recorded[1].contains("\"hlthunk_open_control\""), "{recorded:?}");
    assert!(recorded[1].contains(&format!("\"pid\":{child},\"tid\":{child},")), "{recorded:?}");

    // One that does not call the driver has no record.
    let (child, _) = in_child(|| {
        trace::flush();
        0
    });
    assert!(!folder.join(format!("{child}.trace")).exists());

    // One that cannot begin a record leaves errno alone. The device is its parent's.
    std::fs::remove_dir_all(&folder).unwrap();
    let (_, errno) = in_child(|| DeviceMemory::alloc(&device, 1).unwrap_err().errno);
    assert_eq!(errno, libc::EBADF);
}

/// Runs `work` in a forked child. Returns the child's process id and what `work` returned.
fn in_child(work: impl FnOnce() -> i32) -> (i32, i32) {
    // SAFETY: the child makes a few calls and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = work();
        // SAFETY: ends the process, whatever else is there.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert!(libc::WIFEXITED(status), "{status:#x}");
    (child, libc::WEXITSTATUS(status))
}
