//! `stats`, `top` and `exporter` on the counters of processes that use a software Gaudi: this one, or children.

mod tool;

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
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
    assert!(card["utilization_percent"].as_u64().is_some_and(|percent| percent <= 100), "{card}");
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

/// Names the bytes that a child copies.
const CHILD: &str = "UCX_GAUDI_TEST_CHILD_COPIES";
/// The card it uses: none that other tests use, because the exporter sees all processes.
const CARD: u32 = 23;

/// A process that has copied so many bytes, until its input ends.
fn child(tool: &Installed, bytes: usize) -> (Child, String) {
    let mut command = Command::new(std::env::current_exe().expect("a name"));
    command.args(["--exact", "exporter_keeps_what_ended_processes_counted", "--nocapture"]);
    command.envs(variables(tool)).env(CHILD, bytes.to_string()).env("SOFT_GAUDI_DEVICES", "24");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a child");
    let out = BufReader::new(child.stdout.as_mut().expect("a pipe"));
    let card = out.lines().find_map(|line| Some(line.ok()?.split_once("copied to ")?.1.to_owned()));
    (child, card.expect("the child copies"))
}

/// A process that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// Status line and headers, and the text.
fn get(address: &str, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(stream, "{request}\r\nHost: test\r\nConnection: close\r\n\r\n").expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.to_owned(), body.to_owned())
}

/// The sum of a metric.
fn sum(text: &str, name: &str, label: &str) -> f64 {
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
    lines
        .map(|line| line.rsplit_once(' ').expect("a value").1.parse::<f64>().expect("a number"))
        .sum()
}

#[test]
fn exporter_keeps_what_ended_processes_counted() {
    if let Some(bytes) = std::env::var_os(CHILD) {
        let device = runtime().open(&DeviceChoice::Index(CARD)).expect("a software card");
        copy_down(&device, bytes.to_str().expect("text").parse().expect("a number"));
        println!("copied to {}", device.info().bus_id);
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let tool = Installed::new();
    let (first, card) = child(&tool, 12_345);
    let mut exporter = tool.command("exporter --soft=24 --interval 0.1 --listen 127.0.0.1:0");
    let mut exporter = Ended(exporter.stderr(Stdio::piped()).spawn().expect("runs"));
    let mut line = String::new();
    let mut err = BufReader::new(exporter.0.stderr.take().expect("a pipe"));
    err.read_line(&mut line).expect("a line");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.unwrap_or_else(|| panic!("{line}")).to_owned();

    let open = "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0";
    let scrape = || get(&address, open).1;
    let label = format!("card=\"{card}\"");
    let counted = |text: &str| {
        let bytes = sum(text, "ucx_gaudi_copied_bytes_total", &label);
        (bytes, sum(text, "ucx_gaudi_processes", &label))
    };
    let (head, text) = get(&address, open);
    assert!(head.contains(" 200 ") && head.contains("openmetrics-text"), "{head}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert_eq!(counted(&text), (12_345.0, 1.0), "{text}");
    assert!(sum(&text, "ucx_gaudi_card_memory_used_bytes", &label) > 0.0, "{text}");
    let end = |mut child: Child| {
        drop(child.stdin.take());
        assert!(child.wait().expect("a child").success());
    };
    end(first);
    let text = scrape();
    assert_eq!(counted(&text), (12_345.0, 0.0), "{text}");
    let (second, _) = child(&tool, 1000);
    let text = scrape();
    assert_eq!(counted(&text), (13_345.0, 1.0), "{text}");

    let (head, text) = get(&address, "GET /metrics HTTP/1.1");
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    if let Ok(mut promtool) =
        Command::new("promtool").args(["check", "metrics"]).stdin(Stdio::piped()).spawn()
    {
        promtool.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("written");
        assert!(promtool.wait().expect("a child").success(), "{text}");
    }
    assert!(get(&address, "GET /other HTTP/1.1").0.contains(" 404 "));
    assert!(get(&address, "POST /metrics HTTP/1.1").0.contains(" 405 "));
    tool.run(&format!("exporter --listen {address}")).fails(3, &["in use", "--listen"]);
    tool.run("exporter --listen 9966").fails(2, &["invalid"]);
    let once = tool.run("exporter --once").out;
    assert_eq!(counted(&once), (1000.0, 1.0), "{once}");
    end(second);

    let pid = rustix::process::Pid::from_child(&exporter.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    assert!(exporter.0.wait().expect("a child").success());
}

#[test]
fn monitoring_examples_pass_promtool() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for words in [
        "check config examples/monitoring/prometheus.yml",
        "test rules tools/cli/tests/rules_test.yml",
    ] {
        let mut promtool = Command::new("promtool");
        let Ok(ran) = promtool.args(words.split(' ')).current_dir(&root).output() else {
            println!("skipped: promtool is not installed (Debian: package prometheus)");
            return;
        };
        assert!(ran.status.success(), "{words}: {ran:?}");
    }
}
