//! `check-card` on the software Gaudi: it passes on a good card, and each check is seen to fail.

mod tool;

use serde_json::Value;
use tool::{Installed, Ran, keys};

const CHECKS: [&str; 15] = [
    "library",
    "pair",
    "card",
    "hw-info",
    "open",
    "device-memory",
    "host-memory",
    "queues",
    "bulk-copies",
    "odd-copies",
    "device-copies",
    "fill",
    "export",
    "import",
    "hca",
];

/// The report of a card that misbehaves as ordered.
fn with_faults(tool: &Installed, rules: &str, options: &str) -> Ran {
    tool.order_faults(rules);
    let mut command = tool.command(&format!("check-card --soft=1 --json {options}"));
    command.env("SOFT_GAUDI_FAULTS", "yes");
    Ran::of(&command.output().expect("runs"))
}

fn finding<'a>(report: &'a Value, check: &str) -> &'a Value {
    let checks = report["checks"].as_array().expect("a list");
    checks.iter().find(|finding| finding["check"] == check).expect("such a check")
}

#[test]
fn a_good_card_passes_all_checks() {
    let tool = Installed::new();
    let file = tool.prefix().join("report.json");
    let ran = tool.run(&format!("check-card --soft=2 --json --save {}", file.display()));
    let report = ran.json();
    assert_eq!(ran.code, Some(0), "{report:#}");
    let expected =
        ["checks", "kernel", "may_reset", "report", "seconds", "summary", "thorough", "version"];
    assert_eq!(keys(&report), expected);
    let names: Vec<&str> = report["checks"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|finding| finding["check"].as_str().expect("a name"))
        .collect();
    assert_eq!(names, CHECKS);
    for finding in report["checks"].as_array().expect("a list") {
        assert_eq!(keys(finding), ["check", "data", "found", "remedy", "verdict"]);
        let skipped = if finding["check"] == "hca" { "skipped" } else { "good" };
        let verdict = finding["verdict"].as_str().expect("text");
        assert!(["good", skipped].contains(&verdict), "{finding:#}");
    }
    let saved = std::fs::read_to_string(file).expect("saved");
    assert_eq!(serde_json::from_str::<Value>(&saved).expect("JSON"), report);
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert!(!saved.contains(&format!("\"{machine}\"")), "nothing private in a report to send");
}

#[test]
fn people_get_marks_and_a_summary() {
    let tool = Installed::new();
    let ran = tool.run("check-card --soft=1");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // Whether there is an HCA to try depends on the machine.
    let good = ran.out.lines().filter(|line| line.starts_with('✓')).count();
    assert!(good + 1 >= CHECKS.len(), "{}", ran.out);
    assert!(ran.out.contains(" 0 wrong, "), "{}", ran.out);
    assert!(ran.out.contains("--may-reset"), "{}", ran.out);
}

/// Each rule, the check that must fail for it, and words of its finding.
#[test]
fn each_check_is_seen_to_fail() {
    let tool = Installed::new();
    let faults = [
        ("hlthunk_get_hw_ip_info fail:EIO after=1 times=0", "hw-info", "hlthunk_get_hw_ip_info"),
        ("hlthunk_open fail:EBUSY", "open", "hlthunk_open"),
        ("hlthunk_open fail:EBUSY after=2", "open", "round 2"),
        ("hlthunk_close fail:EIO after=3", "open", "closing failed"),
        ("hlthunk_device_memory_alloc fail:ENOMEM", "device-memory", "Cannot allocate memory"),
        ("hlthunk_device_memory_map fail:EINVAL", "device-memory", "hlthunk_device_memory_map"),
        ("hlthunk_host_memory_map fail:ENOMEM", "host-memory", "4 KiB"),
        ("hlthunk_command_submission fail:EIO", "queues", "queue 0"),
        ("hlthunk_wait_for_cs fail:EIO after=30", "queues", "queue 1"),
        ("transfer fail:EIO", "bulk-copies", "queue"),
        ("transfer flip:4095", "bulk-copies", "1 bytes wrong"),
        ("transfer flip:0 after=17", "odd-copies", "copy down of 1 B, offsets 1 → 0: byte 0 is"),
        ("transfer flip:4500 after=17", "odd-copies", "guard byte 4500 behind it"),
        ("transfer flip:0 after=850", "odd-copies", "copy up of"),
        ("hlthunk_device_mapped_memory_export_dmabuf_fd fail:EPERM", "export", "export_dmabuf"),
        ("hlthunk_memory_unmap fail:EBUSY after=13", "export", "not EINVAL"),
        ("hlthunk_memory_unmap fail:EBUSY after=14", "export", "cannot be unmapped"),
    ];
    for (rule, check, words) in faults {
        let ran = with_faults(&tool, rule, "");
        let report = ran.json();
        let finding = finding(&report, check);
        let found = finding["found"].as_str().expect("text");
        assert!(found.contains(words), "{rule}: {report:#}");
        assert_ne!(finding["verdict"], "good", "{rule}: {report:#}");
        assert_ne!(finding["remedy"], "", "{rule}");
        let bad = report["summary"]["bad"].as_u64().expect("a number");
        assert_eq!(ran.code, Some(i32::from(bad > 0)), "{rule}");
    }
}

#[test]
fn wrong_bytes_within_the_card_and_in_fills_are_seen() {
    let tool = Installed::new();
    // The transfers before them are counted by what a good card needs.
    let count = |check: &str| {
        let at = CHECKS.iter().position(|name| *name == check).expect("a check");
        let ran = with_faults(&tool, "transfer slow:0 times=100000", "");
        let report = ran.json();
        let left = std::fs::read_to_string(tool.machine().join("faults")).expect("rules");
        let left: u64 =
            left.rsplit('=').next().expect("a number").trim().parse().expect("a number");
        let later = report["checks"].as_array().expect("a list")[at..].iter();
        let copies = |finding: &Value| {
            let data = &finding["data"];
            let cases = data["copies"].as_u64().or(data["fills"].as_u64()).unwrap_or(0);
            // Each batch of 256 also puts images there and fetches one.
            let images = if finding["check"] == "fill" { 2 } else { 3 };
            cases + cases.div_ceil(256) * images
        };
        100_000 - left - later.map(copies).sum::<u64>()
    };
    for (check, words) in [("device-copies", "copy within the card"), ("fill", "fill with 0x00")] {
        // Past the images of the first batch.
        let after = count(check) + 3;
        let report = with_faults(&tool, &format!("transfer flip:0 after={after}"), "").json();
        let finding = finding(&report, check);
        assert_eq!(finding["verdict"], "bad", "{report:#}");
        assert!(finding["found"].as_str().expect("text").contains(words), "{finding:#}");
    }
}

#[test]
fn after_a_copy_that_does_not_end_the_later_checks_are_skipped() {
    let tool = Installed::new();
    let ran = with_faults(&tool, "transfer fail:EIO after=17", "");
    let report = ran.json();
    assert_eq!(ran.code, Some(1), "{report:#}");
    assert_eq!(finding(&report, "odd-copies")["verdict"], "bad", "{report:#}");
    let at = CHECKS.iter().position(|check| *check == "odd-copies").expect("a check");
    for check in &CHECKS[at + 1..] {
        let finding = finding(&report, check);
        assert_eq!(finding["verdict"], "skipped", "{finding:#}");
        assert_eq!(finding["found"], "not tried: odd-copies failed");
    }
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
}

#[test]
fn a_card_that_hangs_and_kills_its_users_still_gets_a_report() {
    let tool = Installed::new();
    tool.order_faults("submission hang");
    let mut command = tool.command("check-card --soft=1 --json");
    command.env("SOFT_GAUDI_FAULTS", "yes").env("SOFT_GAUDI_CS_TIMEOUT", "300");
    command.env("SOFT_GAUDI_RESET_KILL", "1");
    let ran = Ran::of(&command.output().expect("runs"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let report = ran.json();
    let last = finding(&report, "queues");
    assert_eq!(last["verdict"], "bad", "{report:#}");
}

#[test]
fn edma_is_tried_only_when_a_reset_is_permitted() {
    let tool = Installed::new();
    let mut command = tool.command("check-card --soft=1 --json --may-reset");
    command.env("SOFT_GAUDI_CS_TIMEOUT", "500").env("SOFT_GAUDI_RESET_KILL", "no");
    let ran = Ran::of(&command.output().expect("runs"));
    let report = ran.json();
    // The driver does not reset the card for this submission (SKIP_RESET_ON_TIMEOUT).
    let edma = finding(&report, "edma");
    assert_eq!(edma["verdict"], "good", "{report:#}");
    assert_eq!(
        (&edma["data"]["fetches_host"], &edma["data"]["survived"]),
        (&false.into(), &true.into())
    );
    let mut command = tool.command("check-card --soft=1 --json --may-reset");
    command.env("SOFT_GAUDI_KIND", "edma-fetch");
    let report = Ran::of(&command.output().expect("runs")).json();
    assert_eq!(finding(&report, "edma")["data"]["fetches_host"], true, "{report:#}");
}

#[test]
fn other_generations_are_checked_as_far_as_they_go() {
    let tool = Installed::new();
    for (generation, queues) in [("gaudi1", "good"), ("gaudi3", "skipped")] {
        let mut command = tool.command("check-card --soft=1 --json");
        command.env("SOFT_GAUDI_GENERATION", generation).env_remove("SOFT_GAUDI_HBM");
        let ran = Ran::of(&command.output().expect("runs"));
        let report = ran.json();
        assert_eq!(ran.code, Some(0), "{generation}: {report:#}");
        assert_eq!(finding(&report, "queues")["verdict"], queues, "{generation}: {report:#}");
    }
}

#[test]
fn what_cannot_be_checked_is_told_at_once() {
    let tool = Installed::new();
    tool.run("check-card --soft=1 --save /no/such/folder/report").fails(3, &["/no/such/folder"]);
    tool.run("check-card --soft=1 --card second").fails(2, &["\"second\"", "module:2"]);
    let ran = tool.run("check-card --soft=1 --card 5 --json");
    assert_eq!(ran.code, Some(1));
    let report = ran.json();
    assert_eq!(finding(&report, "card")["verdict"], "bad");
    assert_eq!(finding(&report, "fill")["verdict"], "skipped");
    let mut command = tool.command("check-card --json");
    command.env("HL_THUNK_LIBRARY", "/no/such.so");
    let report = Ran::of(&command.output().expect("runs")).json();
    assert_eq!(finding(&report, "library")["verdict"], "bad", "{report:#}");
    assert_eq!(report["summary"]["skipped"], CHECKS.len() - 1);
}
