//! `stats` and `top` on the counters of processes that use a software Gaudi: this one.

mod tool;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;

use gaudi::{Device, DeviceChoice, Side, runtime};
use tool::{Installed, keys};

/// What the engine is told to use the software card of this installation.
fn variables(tool: &Installed) -> [(&'static str, OsString); 3] {
    let library = tool.prefix().join("lib/ucx-gaudi/soft/gaudi/libhl-thunk.so");
    [
        ("HL_THUNK_LIBRARY", library.into()),
        ("SOFT_GAUDI_NODE", tool.node().into()),
        ("SOFT_GAUDI_HBM", "3g".into()),
    ]
}

/// Opens a card in this process. One test of this file may be in a process at a time: there is one engine.
fn use_a_card(tool: &Installed) -> Arc<Device> {
    for (name, value) in variables(tool) {
        // SAFETY: each test has a process of its own, and no other thread reads the environment now.
        unsafe { std::env::set_var(name, value) };
    }
    runtime().open(&DeviceChoice::Any).expect("a software card")
}

fn copy_down(device: &Arc<Device>, len: usize) {
    let there = device.alloc(len as u64, 1).expect("memory");
    let mut here = vec![7_u8; len];
    // SAFETY: the buffer lives across the call, and nothing else uses it.
    let copied = unsafe {
        device.copy_blocking(Side::Device(there.addr()), Side::Host(here.as_mut_ptr()), len)
    };
    copied.expect("copied");
}

#[test]
fn counters_of_a_running_process_are_shown_in_every_form() {
    let tool = Installed::new();
    let pid = std::process::id();
    tool.run(&format!("stats {pid}")).fails(3, &["has opened no Gaudi", "first use of a card"]);
    tool.run("stats 4194999").fails(3, &["does not exist", "without a number"]);
    tool.run("stats --count 3").fails(2, &["--watch"]);
    tool.run("stats --watch=soon").fails(2, &["0.05 to 86400"]);
    tool.run("stats --watch --all").fails(2, &["cannot be used with"]);

    let device = use_a_card(&tool);
    copy_down(&device, 12_345);
    let report = tool.run(&format!("stats {pid} --json")).json();
    let process = &report["processes"][0];
    assert_eq!(keys(process), ["cards", "command", "pid", "total", "user"]);
    assert_eq!((&process["pid"], &process["total"]["h2d_bytes"]), (&pid.into(), &12_345.into()));
    assert_eq!(process["cards"][0]["counters"]["opens"], 1);
    assert_eq!(keys(&process["cards"][0]), ["bus_id", "counters", "index"]);

    let shown = tool.run(&format!("stats {pid}"));
    assert!(shown.out.contains("h2d_bytes") && shown.out.contains("12345"), "{shown:?}");
    let all = tool.run("stats --json").json();
    let mut all = all["processes"].as_array().expect("a list").iter();
    assert!(all.any(|process| process["pid"] == pid), "found without its number");

    assert!(!shown.out.contains("dma_errors") && shown.out.contains("--all"), "{shown:?}");
    let all = tool.run(&format!("stats {pid} --all")).out;
    assert!(all.contains("dma_errors") && !all.contains("--all"), "{all}");

    let bus_id = device.info().bus_id.as_str();
    let top = tool.run("top -n 2 -d 0.1 --json --soft");
    let last = top.out.lines().last().expect("a line");
    let look: serde_json::Value = serde_json::from_str(last).expect("JSON");
    let find = |list: &str, key: &str, value: serde_json::Value| {
        let mut rows = look[list].as_array().expect("a list").iter();
        rows.find(|row| row[key] == value).cloned().unwrap_or_else(|| panic!("{list}: {look}"))
    };
    let row = find("processes", "pid", pid.into());
    assert_eq!(row["cards"], serde_json::json!([bus_id]), "{row}");
    for zero in ["dma_errors", "within_card_bytes_per_s", "between_cards_bytes_per_s"] {
        assert_eq!(row[zero].as_f64(), Some(0.0), "{zero}: {row}");
    }
    let card = find("cards", "bus_id", bus_id.into());
    assert!(card["memory_total_bytes"].as_u64() > card["memory_used_bytes"].as_u64(), "{card}");
    // Processes of other users on other software machines may have a card with the same bus id.
    let users = card["users"].as_array().expect("a list");
    assert!(users.contains(&row["user"]) && card["power_watts"].is_null(), "{card}");
    let list = tool.run("top --once -d 0.1").out;
    assert!(list.contains("to card") && list.contains(bus_id), "without the driver: {list}");
    view_in_a_terminal(&tool, bus_id);

    let watcher = tool.command(&format!("stats {pid} --watch=0.3 --count 3 --json"));
    let watching = { watcher }.stdout(Stdio::piped()).spawn().expect("runs");
    let mut watching = watching;
    while watching.try_wait().expect("a child").is_none() {
        copy_down(&device, 1000);
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let output = watching.wait_with_output().expect("ended");
    let text = String::from_utf8_lossy(&output.stdout);
    let looks: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(looks.len(), 3, "{text}");
    // A busy machine may leave a look without a change.
    let changes = looks.iter().filter_map(|look| look["changed"]["h2d_bytes"][1].as_i64());
    let sum: i64 = changes.sum();
    assert!(sum > 0 && sum % 1000 == 0, "{text}");
}

/// `top` shows the card and ends when told to.
fn view_in_a_terminal(tool: &Installed, bus_id: &str) {
    use rustix::{pty, termios};
    let ours = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY).expect("a terminal");
    pty::grantpt(&ours).and_then(|()| pty::unlockpt(&ours)).expect("unlocked");
    let size = termios::Winsize { ws_row: 40, ws_col: 140, ws_xpixel: 0, ws_ypixel: 0 };
    termios::tcsetwinsize(&ours, size).expect("a size");
    let name = pty::ptsname(&ours, Vec::new()).expect("a name").into_string().expect("text");
    let theirs = std::fs::File::options().read(true).write(true).open(name).expect("opens");
    let end = || Stdio::from(OwnedFd::from(theirs.try_clone().expect("a descriptor")));
    let mut command = tool.command("top -d 0.1 --soft");
    let mut top = command.stdin(end()).stdout(end()).stderr(end()).spawn().expect("runs");
    let mut ours = std::fs::File::from(ours);
    let mut screen = Vec::new();
    while !String::from_utf8_lossy(&screen).contains(bus_id) {
        let mut part = [0; 4096];
        let len = ours.read(&mut part).expect("it draws");
        screen.extend_from_slice(&part[..len]);
    }
    ours.write_all(b"q").expect("a key");
    // What it still draws must not block it.
    let reader = std::thread::spawn(move || std::io::copy(&mut ours, &mut std::io::sink()));
    assert!(top.wait().expect("a child").success());
    drop((theirs, command));
    // The terminal has gone.
    assert!(reader.join().expect("a thread").is_err());
}
