//! `trace` on recordings of `check-card`.

mod tool;

use tool::{Installed, Ran, keys};

/// Records a run of check-card under this name.
fn record(tool: &Installed, name: &str, faults: &str) -> String {
    tool.order_faults(faults);
    let file = tool.prefix().join(name).display().to_string();
    let mut command = tool.command(&format!("check-card --soft=2 --json --trace {file}"));
    let ran = Ran::of(&command.env("SOFT_GAUDI_FAULTS", "yes").output().expect("runs"));
    assert!(matches!(ran.code, Some(0 | 1)), "{ran:?}");
    file
}

#[test]
fn two_runs_on_the_same_card_are_the_same() {
    let tool = Installed::new();
    let (a, b) = (record(&tool, "a", ""), record(&tool, "b", ""));
    let ran = tool.run(&format!("trace diff {a} {b}"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("calls are the same") && ran.out.contains("A / B"), "{ran:?}");
    let report = tool.run(&format!("trace diff {a} {b} --json")).json();
    let expected = ["a", "b", "compared", "differences", "more", "same", "times"];
    assert_eq!(keys(&report), expected);
    assert_eq!(report["same"], true);
    let compared = report["compared"].as_u64().expect("a number");
    assert!(compared > 100, "{report}");
    // What the title counts is compared, or said to be left out.
    let waits = ran.out.split_once("timed out (").and_then(|(_, rest)| rest.split_once(" in A"));
    let waits: u64 = waits.map_or(0, |(number, _)| number.parse().expect("a number"));
    assert_eq!(report["a"]["calls"], compared + waits, "{ran:?}");
}

#[test]
fn a_run_with_a_fault_differs_where_the_fault_was() {
    let tool = Installed::new();
    let a = record(&tool, "a", "");
    let b = record(&tool, "b", "hlthunk_device_mapped_memory_export_dmabuf_fd fail:EPERM");
    let ran = tool.run(&format!("trace diff {a} {b}"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let words = "export_dmabuf_fd: succeeds in A, fails with EPERM in B";
    assert!(ran.out.contains(words), "{ran:?}");
    let report = tool.run(&format!("trace diff {a} {b} --json")).json();
    assert_eq!(
        keys(&report["differences"][0]),
        ["call", "line_a", "line_b", "thread", "what"],
        "{report}"
    );
    let shown = tool.run(&format!("trace show {b} --failed"));
    assert!(shown.out.contains("EPERM"), "{shown:?}");
    assert!(!tool.run(&format!("trace show {a} --failed")).out.contains("EPERM"));
}

#[test]
fn calls_and_their_times_are_shown() {
    let tool = Installed::new();
    let file = record(&tool, "a", "");
    let report = tool.run(&format!("trace show {file} --json")).json();
    assert_eq!(keys(&report), ["calls", "recording"]);
    let call = &report["calls"].as_array().expect("a list")[1];
    assert_eq!(keys(call), ["args", "call", "errno", "line", "ret", "t", "thread", "us"]);
    let summary = tool.run(&format!("trace show {file} --summary --json")).json();
    let function = &summary["functions"][0];
    assert_eq!(keys(function), ["call", "count", "failed", "median_us", "total_us"]);
    let opens = tool.run(&format!("trace show {file} --call hlthunk_open"));
    assert_eq!(opens.out.lines().count(), 3, "a title and two opens: {opens:?}");
}

#[test]
fn what_is_no_recording_is_refused_with_a_remedy() {
    let tool = Installed::new();
    let file = tool.prefix().join("file");
    std::fs::write(&file, [0xff, 0xfe, b'\n', 0]).expect("a file");
    let shown = file.display();
    tool.run(&format!("trace show {shown}")).fails(3, &["no recording", "UCX_GAUDI_TRACE"]);
    tool.run(&format!("trace diff {shown} /no/such")).fails(3, &["no recording"]);
    tool.run("trace show /no/such").fails(3, &["/no/such", "UCX_GAUDI_TRACE"]);
    tool.run("trace diff one").fails(2, &["<B>"]);
    let recording = record(&tool, "a", "");
    let wrong = tool.run(&format!("trace show {recording} --call hlthunk_opne"));
    wrong.fails(2, &["no call of hlthunk_opne", "hlthunk_open,"]);
    let damaged = std::fs::read(&recording).expect("a file");
    std::fs::write(&file, &damaged[..damaged.len() - 30]).expect("a file");
    let half = tool.run(&format!("trace show {shown} --summary"));
    assert_eq!(half.code, Some(0), "{half:?}");
    assert!(half.err.contains("1 lines are unreadable"), "{half:?}");
}

/// A recording may come from another user, and a terminal obeys control characters.
#[test]
fn control_characters_of_a_recording_are_shown_and_not_obeyed() {
    let tool = Installed::new();
    // A sequence that sets the title, with a bell; the one-character form of its start; right to left.
    let evil = r"\u001b]0;x\u0007\u009b\u202e";
    let recording = |ret: &str| {
        format!(
            r#"{{"trace":1,"pid":7,"unix":1.5,"program":"p{evil}","kernel":"k{evil}"}}
{{"t":0.1,"tid":7,"call":"load","args":{{"library":"l{evil}","version":"v{evil}"}},"ret":0,"us":1}}
{{"t":0.1,"tid":7,"call":"c{evil}","args":{{"a{evil}":"b{evil}","list":[{{"x{evil}":"{evil}"}}]}},"ret":"{ret}{evil}","us":1}}
"#
        )
    };
    let files = ["a", "b"].map(|name| {
        let file = tool.prefix().join(name);
        std::fs::write(&file, recording(name)).expect("a file");
        file.display().to_string()
    });
    let [a, b] = files;
    for words in [
        format!("trace show {a}"),
        format!("trace show {a} --json"),
        format!("trace show {a} --summary"),
        format!("trace show {a} --call nothing"),
        format!("trace diff {a} {b}"),
        format!("trace diff {a} {b} --json"),
    ] {
        // Otherwise the tool's own colours are taken out, and escape sequences of others with them.
        let output = tool.command(&words).env("CLICOLOR_FORCE", "1").output().expect("runs");
        let ran = Ran::of(&output);
        assert!(!ran.out.is_empty() || !ran.err.is_empty(), "{words}");
        for obeyed in ["\u{1b}]", "\u{7}", "\u{9b}", "\u{202e}"] {
            let text = format!("{}{}", ran.out, ran.err);
            assert!(!text.contains(obeyed), "{words}: {obeyed:?} in {text:?}");
        }
    }
    let shown = tool.run(&format!("trace show {a}"));
    assert!(shown.out.contains(r"p\u{1b}]0;x\u{7}\u{9b}\u{202e} (pid 7)"), "{shown:?}");
}

#[test]
fn endless_and_huge_files_are_refused() {
    let tool = Installed::new();
    let [pipe, huge] = ["pipe", "huge"].map(|name| tool.prefix().join(name));
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, rustix::fs::Mode::RWXU, 0).expect("a pipe");
    // It has no blocks on the disk.
    std::fs::File::create(&huge).and_then(|file| file.set_len(1 << 40)).expect("a file");
    for (path, why) in [
        (pipe.to_str().expect("text"), "no regular file"),
        ("/dev/zero", "no regular file"),
        (tool.prefix().to_str().expect("text"), "no regular file"),
        (huge.to_str().expect("text"), "1 TiB"),
    ] {
        tool.run(&format!("trace show {path}")).fails(3, &[path, why]);
        tool.run(&format!("trace diff {path} {path}")).fails(3, &[path, why]);
    }
}
