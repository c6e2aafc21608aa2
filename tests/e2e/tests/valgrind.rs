//! Stock UCX with the plugin under valgrind's memcheck: no invalid access, no use of undefined memory, no leak of ours.
//!
//! The software card sees host addresses when a copy runs (`unpinned`): memcheck does not know what io_uring reads and
//! writes. Its memory is small, because memcheck searches all that is mapped for pointers, and has room for 128 GiB.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use e2e::{Device, Layout, SoftNode, Tool, Ucx, Workbench};

/// What is not ours, each with its reason.
const SUPPRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/valgrind/suppressions");

/// Whether valgrind is there and runs a program: on some distributions it needs the symbols of libc (`libc6-dbg`).
fn usable() -> Result<(), String> {
    let output = Command::new("valgrind").args(["-q", "true"]).output();
    let output = output.map_err(|error| format!("cannot run valgrind: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let reason = said.lines().find(|line| line.contains(": ")).unwrap_or_default();
    Err(format!("`valgrind -q true` fails here ({}): {reason}", output.status))
}

/// A program under memcheck: exit status 99 if it found anything.
fn memcheck(leaks: &str, device: &Device, program: &Path, words: &str) -> Option<Tool> {
    if let Err(why) = usable() {
        println!("skipped: {why}");
        return None;
    }
    let tool = Workbench::from_env().program(Ucx::V1_22, "valgrind").plugin().device(device);
    let tool = tool.words("--error-exitcode=99 --trace-children=yes --num-callers=30 -q");
    // Blocks that only pointers into their middle lead to (an `Arc` has no others) count as "possibly lost".
    let tool = tool.words("--show-leak-kinds=definite --errors-for-leak-kinds=definite");
    let tool = tool.arg(format!("--suppressions={SUPPRESSIONS}")).arg(leaks).arg(program);
    Some(tool.words(words).limit(Duration::from_secs(300)))
}

/// Cards of a generation with so much memory.
fn cards(generation: &str, memory: &str) -> Device {
    let node = SoftNode::unique().with("SOFT_GAUDI_GENERATION", generation);
    let node = node.with("SOFT_GAUDI_HBM", memory).with("SOFT_GAUDI_DEVICES", "2");
    Device::Software(node.with("SOFT_GAUDI_LENIENT", "unpinned"))
}

fn ucp_check() -> std::path::PathBuf {
    Layout::from_env().bin().join("ucp-check")
}

#[test]
fn listing_everything_leaks_nothing() {
    let ucx_info =
        Ucx::V1_22.bin_dir(&Layout::from_env()).expect("it has programs").join("ucx_info");
    let Some(tool) = memcheck("--leak-check=full", &cards("gaudi2", "768m"), &ucx_info, "-d")
    else {
        return;
    };
    let end = tool.run().ok();
    assert!(end.says(&["Transport: gaudi_cpy"]), "{}", end.report());
}

#[test]
fn copies_of_one_process_leak_nothing() {
    let device = cards("gaudi1", "32m");
    let words = "loopback --plain --ops tag,get --sizes 1,256K+3 --timeout 250";
    let Some(tool) = memcheck("--leak-check=full", &device, &ucp_check(), words) else { return };
    let end = tool.run().ok();
    assert!(end.says(&["16 passed, 0 failed"]), "{}", end.report());
}

#[test]
fn two_processes_access_nothing_that_is_not_theirs() {
    let device = cards("gaudi2", "768m");
    let words = "pair --plain --ops tag,get --mem gaudi:gaudi --sizes 1,64K+3 --timeout 250";
    let Some(tool) = memcheck("--leak-check=no", &device, &ucp_check(), words) else { return };
    let end = tool.run().ok();
    assert!(end.says(&[" passed, 0 failed"]), "{}", end.report());
}
