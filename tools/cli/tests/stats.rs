//! `stats` and `top` on the counters of this very process, which uses a software Gaudi.

mod tool;

use std::sync::Arc;

use gaudi::{Device, DeviceChoice, Side, runtime};
use tool::{Installed, keys};

/// Opens a card in this process. One test of this file may be in a process at a time: there is one engine.
fn use_a_card(tool: &Installed) -> Arc<Device> {
    let library = tool.prefix().join("lib/ucx-gaudi/soft/gaudi/libhl-thunk.so");
    for (name, value) in [
        ("HL_THUNK_LIBRARY", library.as_os_str()),
        ("SOFT_GAUDI_NODE", tool.node().as_ref()),
        ("SOFT_GAUDI_HBM", "3g".as_ref()),
    ] {
        // SAFETY: this program has one test, and no other thread reads the environment now.
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
    tool.run("stats --watch --prometheus").fails(2, &["cannot be used with"]);

    let device = use_a_card(&tool);
    copy_down(&device, 12_345);
    let report = tool.run(&format!("stats {pid} --json")).json();
    let process = &report["processes"][0];
    assert_eq!(keys(process), ["cards", "command", "pid", "total"]);
    assert_eq!((&process["pid"], &process["total"]["h2d_bytes"]), (&pid.into(), &12_345.into()));
    assert_eq!(process["cards"][0]["counters"]["opens"], 1);
    assert_eq!(keys(&process["cards"][0]), ["bus_id", "counters", "index"]);

    let shown = tool.run(&format!("stats {pid}"));
    assert!(shown.out.contains("h2d_bytes") && shown.out.contains("12345"), "{shown:?}");
    let all = tool.run("stats --json").json();
    let mut all = all["processes"].as_array().expect("a list").iter();
    assert!(all.any(|process| process["pid"] == pid), "found without its number");

    let text = tool.run(&format!("stats {pid} --prometheus")).out;
    let bus_id = device.info().bus_id.as_str();
    let line = text.lines().find(|line| {
        line.starts_with("ucx_gaudi_h2d_bytes_total{")
            && line.contains(&format!("card=\"{bus_id}\""))
    });
    assert!(line.is_some_and(|line| line.ends_with(" 12345")), "{text}");
    assert!(text.contains("# TYPE ucx_gaudi_h2d_bytes_total counter"), "{text}");
    assert!(text.contains("# TYPE ucx_gaudi_allocated_bytes gauge"), "{text}");

    let top = tool.run("top -n 2 -d 0.1 --json");
    let last = top.out.lines().last().expect("a line");
    let rows: serde_json::Value = serde_json::from_str(last).expect("JSON");
    let mut rows = rows.as_array().expect("a list").iter();
    let row = rows.find(|row| row["pid"] == pid).expect("this process");
    assert_eq!((&row["cards"], &row["dma_errors"]), (&1.into(), &0.into()), "{row}");
    assert!(tool.run("top -n 1 -d 0.1").out.contains("to card"));

    let watcher = tool.command(&format!("stats {pid} --watch=0.3 --count 3 --json"));
    let watching = { watcher }.stdout(std::process::Stdio::piped()).spawn().expect("runs");
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
