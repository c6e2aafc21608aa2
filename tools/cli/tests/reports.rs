//! Reports of other machines, read from files that someone else may have made; and what listens for others.

mod tool;

use tool::{Installed, Ran};

/// What sets the title of a terminal, with a bell; the one-character form of its start; right to left.
const EVIL: &str = r"\u001b]0;x\u0007\u009b\u202e";

fn write(tool: &Installed, name: &str, text: &str) -> String {
    let file = tool.prefix().join(name);
    std::fs::write(&file, text.replace('@', EVIL)).expect("a file");
    file.display().to_string()
}

#[test]
fn control_characters_of_a_report_are_shown_and_not_obeyed() {
    let tool = Installed::new();
    let explained = write(
        &tool,
        "explained",
        r#"{"report":"explain","size":8,"differences":[],"processes":[{"host":"h@","pid":1,"command":"c@","ucx":"u@",
        "libucp":"l@","plugin":"p","nixl":false,"settings":{"UCX_@":"v@"},"observed":{},"not_observed":"n@","predicted":
        [{"operation":"put","memories":"m@","peer":"other-node","who":"w@","protocol":"p@","transports":"t@"}],"advice":["a@"]}]}"#,
    );
    let other = write(
        &tool,
        "other",
        &std::fs::read_to_string(&explained).expect("a file").replace("\"UCX_", "\"UCX_Y"),
    );
    let checked = write(
        &tool,
        "checked",
        r#"{"report":"check-card","version":"v@","kernel":"k@","checks":[{"check":"c@","verdict":"bad","found":"f@",
        "remedy":"r@","data":{"d@":"e@"}}]}"#,
    );
    let cell = r#"{"op":"tag@","pair":"host@:host","size":8,"latency_us":1.0,"gbps":1.0,"rounds":[1.0],"verified":true}"#;
    let measured = write(
        &tool,
        "measured",
        &format!(
            r#"{{"version":"v@","ucx":"u@","software":true,"model":"m@","peer":"p@","rounds":1,"interrupted":false,
            "memcpy":{{}},"cells":[{cell},{cell}]}}"#
        ),
    );
    for words in [
        format!("explain --compare {explained} {other}"),
        format!("explain --compare {explained} {other} --json"),
        format!("check-card --read {checked}"),
        format!("check-card --read {checked} --json"),
        // The same cell twice, compared with itself: no file of ours has that.
        format!("bench compare {measured} {measured}"),
        format!("bench compare {measured} {measured} --json"),
    ] {
        let output = tool.command(&words).env("CLICOLOR_FORCE", "1").output().expect("runs");
        let ran = Ran::of(&output);
        assert!(matches!(ran.code, Some(0 | 1)), "{words}: {ran:?}");
        let text = format!("{}{}", ran.out, ran.err);
        assert!(text.contains("x"), "{words}: {ran:?}");
        for obeyed in ["\u{1b}]", "\u{7}", "\u{9b}", "\u{202e}"] {
            assert!(!text.contains(obeyed), "{words}: {obeyed:?} in {text:?}");
        }
    }
}

#[test]
fn endless_and_huge_reports_are_refused() {
    let tool = Installed::new();
    let [pipe, huge] = ["pipe", "huge"].map(|name| tool.prefix().join(name));
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, fifo, rustix::fs::Mode::RWXU, 0).expect("a pipe");
    // It has no blocks on the disk.
    std::fs::File::create(&huge).and_then(|file| file.set_len(1 << 40)).expect("a file");
    for (path, why) in [
        (pipe.to_str().expect("text"), "no regular file"),
        ("/dev/zero", "no regular file"),
        (huge.to_str().expect("text"), "1 TiB"),
    ] {
        tool.run(&format!("explain --compare {path} {path}")).fails(3, &[path, why]);
        tool.run(&format!("check-card --read {path}")).fails(3, &[path, why]);
        tool.run(&format!("bench compare {path} {path}")).fails(3, &[path, why]);
    }
}

#[test]
fn bench_serve_listens_nowhere_unless_it_is_told_where() {
    let tool = Installed::new();
    tool.run("bench serve").fails(2, &["HOST:PORT"]);
}
