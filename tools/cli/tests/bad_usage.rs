//! What a tired user does to the tool: Ctrl-C, a full disk, files in the way, a UCX that is missing. `ucp-check` is
//! a script here; with stock UCX it is tested in e2e.

mod tool;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tool::{Installed, Ran, keys};

/// Puts a script in the place of `ucp-check`.
fn with_checker(script: &str) -> Installed {
    let tool = Installed::new();
    let program = tool.prefix().join("bin/ucp-check");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("a script");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("a program");
    tool
}

/// An empty folder below the prefix.
fn folder(tool: &Installed, name: &str) -> PathBuf {
    let folder = tool.prefix().join(name);
    std::fs::create_dir(&folder).expect("a folder");
    folder
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Ctrl-C as `kill` sends it: to the tool alone.
fn interrupt(child: &Child) {
    kill_process(Pid::from_child(child), Signal::INT).expect("it runs");
}

/// Waits for a child that hands over its output.
fn end(child: Child) -> Ran {
    Ran::of(&child.wait_with_output().expect("it ends"))
}

#[test]
fn ctrl_c_in_a_bench_leaves_no_process_no_folder_and_the_earlier_results() {
    for command in ["bench --soft=1 --save", "explain tag host gaudi 8 --soft=1 --ucx"] {
        // Two processes that would stay for long, and what stands for a pipe to wait on.
        let tool = with_checker("sleep 1000 & echo $$ $! > \"$PIDS\"; wait");
        let (temporary, pids) = (folder(&tool, "tmp"), tool.prefix().join("pids"));
        let results = tool.prefix().join("results");
        std::fs::write(&results, "earlier").expect("a file");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pids, 0o600.into()).expect("a pipe");
        let mut started = tool.command(command);
        started.arg(&results).env("TMPDIR", &temporary).env("PIDS", &pids);
        let child = started.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("runs");
        // Readable when the script is there.
        let pids = std::fs::read_to_string(&pids).expect("its processes");
        interrupt(&child);
        end(child).fails(130, &["ended by Ctrl-C"]);
        for pid in pids.split_whitespace() {
            let number = pid.parse().ok().and_then(Pid::from_raw).expect("a process id");
            assert!(test_kill_process(number).is_err(), "{command}: {pid} is there, or a zombie");
        }
        assert_eq!(names(&temporary), [""; 0], "{command}");
        assert_eq!(std::fs::read_to_string(&results).expect("a file"), "earlier", "{command}");
    }
}

#[test]
fn ctrl_c_in_check_card_keeps_what_was_found_and_recorded() {
    let tool = Installed::new();
    let place = folder(&tool, "files");
    let mut started = tool.command("check-card --soft=1 --thorough --trace");
    started.arg(place.join("trace")).arg("--save").arg(place.join("report"));
    let mut child = started.stdout(Stdio::piped()).spawn().expect("runs");
    let mut lines = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.starts_with('✓') {
        line.clear();
        assert_ne!(lines.read_line(&mut line).expect("a line"), 0, "a finding");
    }
    interrupt(&child);
    std::io::copy(&mut lines, &mut std::io::sink()).expect("the rest");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    let mut files = names(&place);
    files.sort();
    assert_eq!(files, ["report", "trace"]);
    let report = std::fs::read_to_string(place.join("report")).expect("a report");
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["summary"]["bad"], 0, "{report:#}");
    let last = report["checks"].as_array().and_then(|checks| checks.last()).expect("checks");
    assert_eq!(last["verdict"], "skipped", "{report:#}");
}

#[test]
fn check_card_that_cannot_write_one_file_leaves_the_other_alone() {
    let tool = Installed::new();
    let earlier = tool.prefix().join("earlier");
    for (good, bad) in [("--trace", "--save"), ("--save", "--trace")] {
        std::fs::write(&earlier, "earlier").expect("a file");
        let mut command = tool.command("check-card --soft=1");
        command.arg(good).arg(&earlier).args([bad, "/no/such/folder/file"]);
        let ran = Ran::of(&command.output().expect("runs"));
        ran.fails(3, &["cannot write /no/such/folder/file", "remedy: there is no such folder"]);
        assert_eq!(std::fs::read_to_string(&earlier).expect("a file"), "earlier", "{good}");
    }
}

#[test]
fn check_card_replaces_a_recording_by_one_of_one_run() {
    let tool = Installed::new();
    let trace = tool.prefix().join("trace");
    for _ in 0..2 {
        let ran = tool.run(&format!("check-card --soft=1 --card 5 --trace {}", trace.display()));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let text = std::fs::read_to_string(&trace).expect("a recording");
        assert_eq!(text.matches("{\"trace\":").count(), 1, "{text}");
    }
}

#[test]
fn output_to_a_full_disk_is_an_error_and_no_panic() {
    let tool = Installed::new();
    for words in
        ["info --soft=1", "topo --soft=1 --json", "doctor --soft=1 --no-card", "completions fish"]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
        let ran = Ran::of(&tool.command(words).stdout(full).output().expect("runs"));
        ran.fails(3, &["cannot write to standard output: No space left", "remedy: free space"]);
        assert!(!ran.err.contains("panicked"), "{ran:?}");
    }
    let full = "cannot write /dev/full: No space left on device";
    for words in ["check-card --soft=1 --card 5 --save", "doctor --soft=1 --no-card --bundle"] {
        // What was found is on standard output all the same.
        let ran = tool.run(&format!("{words} /dev/full --json"));
        ran.fails(3, &[full, "remedy: free space"]);
        assert!(ran.json()["checks"].is_array(), "{ran:?}");
    }
    let ran = tool.run("check-card --soft=1 --card 5 --trace /dev/full");
    assert!(ran.err.contains("cannot write /dev/full: No space left"), "{ran:?}");
}

/// A checker that measures between host memories, and has no card otherwise.
fn without_cards(says: &str) -> Installed {
    let tool = with_checker(&format!(
        "case \"$*\" in *host:host*) while [ \"$1\" != --json ]; do shift; done; \
         cp \"${{0%/*}}/rows\" \"$2\";; *) echo '{says}'; exit 1;; esac"
    ));
    let row = r#"[{"op":"tag","src":"host","dst":"host","size":8,"ucx":"1.22.0","latency_us":1.0,"gbps":1.0,"verified":true}]"#;
    std::fs::write(tool.prefix().join("bin/rows"), row).expect("a file");
    tool
}

#[test]
fn bench_keeps_the_results_of_before_a_failure() {
    let tool =
        without_cards("[1.0] [vm:1:0] domain.rs:1 ucx-gaudi ERROR no card [DEVICE_BUSY]: taken");
    let csv = tool.prefix().join("csv");
    let ran = tool.run(&format!("bench --soft=1 --ops tag --sizes 8 --csv {}", csv.display()));
    ran.fails(3, &["results until then", "tag host:gaudi did not run: no card", "two free cards"]);
    assert!(ran.out.contains("tag  host:host"), "{ran:?}");
    assert!(std::fs::read_to_string(&csv).expect("results").contains("tag,host"));
}

#[test]
fn bench_and_explain_without_a_card_say_why_and_what_to_do() {
    let tool = without_cards("FAIL  process 1: cannot allocate 8 bytes of Gaudi memory");
    for words in ["bench --ops tag --sizes 8", "explain tag host gaudi 8"] {
        let mut command = tool.command(&format!("{words} --json"));
        command.env("HL_THUNK_LIBRARY", "/no/such/library.so");
        let ran = Ran::of(&command.output().expect("runs"));
        ran.fails(3, &["tag host:gaudi did not run: ", "/no/such/library.so", "HL_THUNK_LIBRARY"]);
        let report = ran.json();
        assert_eq!(keys(&report["error"]), ["exit", "remedy", "what"], "{report:#}");
        let cells = report["cells"].as_array().map(Vec::len);
        assert_eq!(cells, words.starts_with("bench").then_some(1), "what was measured before");
    }
}

#[test]
fn bench_and_explain_without_a_ucx_say_where_they_looked() {
    let tool =
        with_checker("echo 'FAIL  process 0: cannot load UCX from x; process 1: same'; exit 1");
    let empty = folder(&tool, "empty");
    for words in ["bench --soft=1 --ucx", "explain tag host gaudi 8 --soft=1 --ucx"] {
        let ran = tool.run(&format!("{words} {}", empty.display()));
        ran.fails(3, &[&format!("there is no UCX in {}", empty.display()), "--ucx"]);
        assert!(!ran.err.contains("process 1"), "{ran:?}");
    }
}

#[test]
fn temporary_folder_that_is_missing_is_named() {
    let tool = with_checker("exit 0");
    let mut command = tool.command("bench --soft=1");
    command.env("TMPDIR", "/no/such/folder");
    Ran::of(&command.output().expect("runs")).fails(3, &["/no/such/folder", "remedy: set TMPDIR"]);
}
