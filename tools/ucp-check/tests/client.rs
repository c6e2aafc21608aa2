//! The client's own promises, kept on a stock UCX with host memory: it finds damage, it does not
//! hang, it leaves no process behind.
//!
//! `cargo xtask setup` brings the stock UCX; without it these tests say so and do nothing.

use e2e::{Layout, Ucx};
use rustix::process::{Pid, Signal, kill_process};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Small messages in host memory.
const SMALL: &str = "--mem host:host --sizes 1,4097";

fn stock() -> Option<PathBuf> {
    let root = Ucx::V1_22.root(&Layout::from_env());
    if root.exists() {
        return Some(root);
    }
    eprintln!("skipped: no stock UCX in {} (cargo xtask setup brings it)", root.display());
    None
}

fn client(ucx: &PathBuf, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ucp-check"));
    command.arg("--ucx").arg(ucx).args(words.split_whitespace());
    command.env_remove("UCX_PLUGIN_PATH").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat()
}

/// A run of thousands of short steps, so that nothing but our interference makes one of them long.
fn long_run(ucx: &PathBuf, words: &str) -> Child {
    let sizes: Vec<String> = (0..4000).map(|n| (16 * n + 1).to_string()).collect();
    let words =
        format!("pair --mem host:host --ops tag --plain {words} --sizes {}", sizes.join(","));
    client(ucx, &words).spawn().expect("the client starts")
}

/// The two processes of a pair, once both are programs of their own: who stops one between fork and exec
/// stops the parent as well, which waits for the exec.
fn children(parent: &Child) -> [Pid; 2] {
    let started = |pid: &Pid| {
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero()));
        line.is_ok_and(|line| line.split(|byte| *byte == 0).any(|word| word == b"side"))
    };
    let path = format!("/proc/{0}/task/{0}/children", parent.id());
    let deadline = Instant::now() + Duration::from_secs(30);
    while Instant::now() < deadline {
        let list = std::fs::read_to_string(&path).unwrap_or_default();
        let pids: Vec<Pid> =
            list.split_whitespace().flat_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect();
        if let [one, other] = pids[..]
            && pids.iter().all(started)
        {
            return [one, other];
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the two processes did not start");
}

/// Gone, or dead and waiting to be buried.
fn dead(pid: Pid) -> bool {
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    std::fs::read_to_string(stat).map_or(true, |stat| stat.contains(") Z "))
}

#[test]
fn undamaged_messages_pass() {
    let Some(ucx) = stock() else { return };
    for command in ["pair", "loopback", "host-only", "wakeup", "pair --wakeup", "threads"] {
        let output = client(&ucx, &format!("{command} {SMALL}")).output().expect("runs");
        assert!(output.status.success(), "{command}: {}", text(&output));
        assert!(text(&output).contains(" passed, 0 failed"), "{command}: {}", text(&output));
    }
}

/// Runs the client, which has to fail; what it printed.
fn fails(ucx: &PathBuf, words: &str) -> String {
    let output = client(ucx, words).output().expect("runs");
    let text = text(&output);
    assert!(!output.status.success(), "{words}: {text}");
    text
}

/// One changed byte of the message, of a guard, of the source, and a destination that is compared before the
/// message was sent. Only a receive that has to be truncated says nothing of the bytes it did receive.
#[test]
fn damage_is_found_in_every_case() {
    let Some(ucx) = stock() else { return };
    for (what, words, counts) in [
        ("message", "message wrong", "0 passed, 40 failed"),
        ("guard", "guard behind the message violated", "0 passed, 40 failed"),
        ("source", "source (must not change)", "0 passed, 40 failed"),
        ("early", "message wrong", "4 passed, 36 failed"),
    ] {
        let text = fails(&ucx, &format!("pair {SMALL} --iters 1 --sabotage {what}"));
        assert!(text.contains(&format!("\n{counts}")) && text.contains(words), "{what}: {text}");
    }
}

/// A byte less than announced: reported by the length, by the missing byte, or as a hang.
#[test]
fn a_message_that_is_a_byte_short_is_found() {
    let Some(ucx) = stock() else { return };
    for (op, words) in [
        ("tag", "ucp_tag_recv_nbx reports 4096 bytes instead of 4097"),
        ("tag-many", "ucp_tag_recv_nbx reports"),
        ("am", "active message of 4096 bytes instead of 4097"),
        ("put", "message wrong: first at offset 4096"),
        ("get", "message wrong: first at offset 4096"),
        ("stream", "hung"),
    ] {
        let words_of_run =
            "pair --mem host:host --sizes 4097 --plain --timeout 3 --sabotage length";
        let text = fails(&ucx, &format!("{words_of_run} --ops {op}"));
        assert!(text.contains(words) && text.contains("0 passed"), "{op}: {text}");
    }
}

/// Of three processes each two, in both directions.
#[test]
fn a_mesh_moves_messages_between_every_two_and_finds_damage() {
    let Some(ucx) = stock() else { return };
    let words = format!("mesh --processes 3 --plain --ops tag,stream,put,get {SMALL}");
    let output = client(&ucx, &words).output().expect("runs");
    assert!(text(&output).contains("\n48 passed, 0 failed"), "{}", text(&output));
    let text = fails(&ucx, &format!("{words} --sabotage guard"));
    assert!(text.contains("\n0 passed, 48 failed"), "{text}");
    for who in ["0 is process 0 and 1 process 1", "0 is process 0 and 1 process 2"] {
        assert!(text.contains(who), "{text}");
    }
}

#[test]
fn memory_that_cannot_be_had_is_an_error_with_a_remedy() {
    let Some(ucx) = stock() else { return };
    let text = fails(&ucx, "pair --mem host:gaudi --sizes 8");
    assert!(text.contains("cannot allocate") && text.contains("UCX_PLUGIN_PATH"), "{text}");
}

#[test]
fn missing_ucx_is_an_error_in_words() {
    let text = fails(&"/nonexistent/ucx".into(), "loopback");
    assert!(text.contains("/nonexistent/ucx"), "{text}");
}

#[test]
fn stopped_peer_is_reported_with_the_step_that_waits() {
    let Some(ucx) = stock() else { return };
    let run = long_run(&ucx, "--timeout 3");
    let [_, other] = children(&run);
    kill_process(other, Signal::STOP).expect("it is ours");
    let output = run.wait_with_output().expect("ends");
    let text = text(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("HUNG  process 0: ") && text.contains("hung"), "{text}");
    assert!(dead(other));
}

#[test]
fn killed_parent_takes_both_processes_along() {
    let Some(ucx) = stock() else { return };
    let mut run = long_run(&ucx, "");
    let pids = children(&run);
    run.kill().expect("it is ours");
    run.wait().expect("ends");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !pids.into_iter().all(dead) {
        assert!(Instant::now() < deadline, "{pids:?} outlived their parent");
        std::thread::sleep(Duration::from_millis(10));
    }
}
