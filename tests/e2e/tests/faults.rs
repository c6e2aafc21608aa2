//! Copies that fail in the middle of a message. UCP does not look at the outcome of the copies its
//! protocols are made of, so it is up to us that wrong bytes never arrive.

use std::process::Command;

use e2e::{Device, Finished, SoftNode, Ucx, Workbench, client};

/// A 4 MiB message is staged in eight pieces on each side.
fn message_with(rules: &str, variables: &[(&str, &str)]) -> Finished {
    message_of("4M", rules, variables)
}

fn message_of(size: &str, rules: &str, variables: &[(&str, &str)]) -> Finished {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2").with_faults(rules);
    // Without import also in a long run that has it: the rules count the copies of staged messages.
    let node = node.with("SOFT_GAUDI_LENIENT", "");
    let words = format!("pair --ops tag --plain --mem gaudi:gaudi --sizes {size}");
    client(Ucx::V1_22, &Device::Software(node), &words).envs(variables).run()
}

/// UCX waits for the copies that pack and unpack a small message, and not for those of a large one.
#[test]
fn copy_that_fails_once_is_made_again() {
    let small = (0..6).map(|calls_before| ("1K", calls_before));
    for (size, calls_before) in small.chain([2, 5, 8].map(|calls_before| ("4M", calls_before))) {
        let rules = format!("hlthunk_command_submission fail:EIO after={calls_before} times=1");
        let end = message_of(size, &rules, &[]).ok();
        assert!(end.stdout.contains("2 passed, 0 failed"), "{}", end.report());
        assert!(end.text().contains("succeeded at the second try"), "{}", end.report());
    }
}

/// A second try would only give the kernel's log another line.
#[test]
fn copies_on_a_card_that_was_reset_are_not_made_again() {
    for size in ["1K", "4M"] {
        let trace = tempfile::NamedTempFile::new().expect("a file");
        let path = trace.path().to_str().expect("UTF-8");
        // Both processes have a card; the reset meets the fourth wait of whoever is first.
        let end =
            message_of(size, "hlthunk_wait_for_cs reset after=3", &[("UCX_GAUDI_TRACE", path)]);
        assert!(!end.success(), "{}", end.report());
        let trace = std::fs::read_to_string(path).expect("a trace");
        let submissions: Vec<&str> =
            trace.lines().filter(|line| line.contains("hlthunk_command_submission")).collect();
        assert!(!submissions.is_empty(), "{trace}\n{}", end.report());
        let refused = submissions.iter().filter(|line| line.contains("\"errno\":16"));
        assert_eq!(refused.count(), 0, "{trace}\n{}", end.report());
    }
}

/// UCP ends the process itself.
#[test]
fn short_copy_that_fails_for_good_is_logged_and_no_wrong_bytes_arrive() {
    let end = message_of("1K", "hlthunk_command_submission fail:EIO after=3 times=0", &[]);
    let text = format!("{}{}", end.stdout, end.stderr);
    assert!(!end.success(), "{}", end.report());
    assert!(text.contains("bytes failed: "), "{}", end.report());
    assert!(!text.contains("message wrong"), "wrong bytes arrived\n{}", end.report());
}

#[test]
fn copy_that_fails_for_good_ends_the_process_with_the_reason() {
    let end = message_with("hlthunk_command_submission fail:EIO after=4 times=0", &[]);
    let text = end.text();
    assert!(!end.success(), "{}", end.report());
    assert!(text.contains("fatal: copy failed") && text.contains("EIO") | text.contains("error 5"));
    assert!(!text.contains("message wrong"), "wrong bytes arrived\n{}", end.report());
}

/// The variable does what it says: UCX goes on, and only a check of every byte finds out.
#[test]
fn without_abort_on_error_ucx_goes_on_with_wrong_bytes() {
    let variables = [("UCX_GAUDI_COPY_ABORT_ON_ERROR", "n")];
    let end = message_with("hlthunk_command_submission fail:EIO after=4 times=0", &variables);
    let text = end.text();
    assert!(!end.success(), "{}", end.report());
    assert!(!text.contains("fatal: copy failed"), "{}", end.report());
    assert!(text.contains("copy failed"), "the reason is logged all the same\n{}", end.report());
}

#[test]
fn memory_that_runs_out_is_reported_and_nothing_else_suffers() {
    let end = message_with("hlthunk_device_memory_alloc fail:ENOMEM times=0", &[]).refused();
    let text = end.text();
    assert!(text.contains("OUT_OF_MEMORY"), "{}", end.report());
}

/// The memory of a software Gaudi lies in `/dev/shm`, whose space others use as well.
#[test]
fn a_full_dev_shm_is_named_as_the_reason_with_what_to_do() {
    const OWN_SPACE: &str = r#"mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@""#;
    let entering = |rights: &[&'static str]| {
        let words = ["--mount", "sh", "-c", OWN_SPACE, "sh"];
        [rights, &words].concat()
    };
    // Root needs no user namespace.
    let works = |rights: &&[&'static str]| {
        let tried = Command::new("unshare").args(entering(rights)).arg("true").output();
        tried.is_ok_and(|output| output.status.success())
    };
    let Some(rights) = [&[][..], &["--map-root-user"]].into_iter().find(works) else {
        return println!("skipped: a process may not mount a file system of its own here");
    };
    let bench = Workbench::from_env();
    let client = bench.layout().bin().join("ucp-check");
    // Pinned memory is copied in another way.
    for lenient in ["", "unpinned"] {
        let node = SoftNode::unique().with("SOFT_GAUDI_LENIENT", lenient);
        let tool = bench.program(Ucx::V1_22, "unshare").plugin().device(&Device::Software(node));
        let tool = entering(rights).iter().fold(tool, |tool, word| tool.arg(word)).arg(&client);
        let tool = tool.words("loopback --ops tag --plain --mem host:gaudi --sizes 16M --ucx");
        let tool = tool.arg(Ucx::V1_22.root(bench.layout())).env("UCX_TLS", "self,gaudi");
        let end = tool.run();
        let text = end.text();
        assert!(!end.success() && text.contains("fatal: copy failed"), "{}", end.report());
        for part in [
            "no space left in /dev/shm/soft-gaudi-",
            "remove the folders of machines that nobody uses",
            "look at its messages on stderr, the space in /dev/shm",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{}", end.report());
        }
    }
}
