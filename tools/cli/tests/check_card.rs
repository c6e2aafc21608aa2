//! `check-card` on the software Gaudi: it passes on a good card, and each check is seen to fail.

mod tool;

use serde_json::Value;
use tool::{Installed, Ran, keys};

const CHECKS: [&str; 21] = [
    "library",
    "pair",
    "card",
    "machine",
    "hw-info",
    "open",
    "device-memory",
    "host-memory",
    "queues",
    "bulk-copies",
    "in-flight",
    "large-copies",
    "export",
    "import",
    "hca",
    "device-copies",
    "fill",
    "odd-copies",
    "odd-device-copies",
    "odd-fill",
    "after",
];

/// The report of a card that misbehaves as ordered.
fn with_faults(tool: &Installed, rules: &str, options: &str) -> Ran {
    tool.order_faults(rules);
    let mut command = tool.command(&format!("check-card --soft=1 --json {options}"));
    command.env("SOFT_GAUDI_FAULTS", "yes");
    Ran::of(&command.output().expect("runs"))
}

/// DMA packets that a good card executes before a check, and in it, by its report.
fn transfers(report: &Value, check: &str) -> (u64, u64) {
    let of = |check: &str| finding(report, check)["data"]["transfers"].as_u64();
    let earlier = CHECKS.iter().take_while(|earlier| **earlier != check);
    (earlier.filter_map(|earlier| of(earlier)).sum(), of(check).unwrap_or(0))
}

fn good_report(tool: &Installed) -> Value {
    tool.run("check-card --soft=1 --json").json()
}

fn finding<'a>(report: &'a Value, check: &str) -> &'a Value {
    let checks = report["checks"].as_array().expect("a list");
    checks.iter().find(|finding| finding["check"] == check).expect("such a check")
}

#[test]
fn a_card_of_an_unknown_kind_is_a_finding_with_all_it_says_of_itself() {
    let tool = Installed::new();
    let with = |ids: &str| {
        let mut command = tool.command("check-card --soft=2 --json");
        Ran::of(&command.env("SOFT_GAUDI_PCI_ID", ids).output().expect("runs")).json()
    };
    for (ids, verdict, opened) in
        [("0x1021:4,0x1070", "warning", "good"), ("0x1070", "bad", "skipped")]
    {
        let report = with(ids);
        let card = finding(&report, "card");
        assert_eq!(card["verdict"], verdict, "{card:#}");
        assert!(card["found"].as_str().expect("text").contains("0x1070"), "{card:#}");
        assert!(card["remedy"].as_str().expect("text").contains("--save"), "{card:#}");
        let unknown = &card["data"]["unknown"][0];
        assert_eq!(
            (&unknown["device_id"], &unknown["bytes_written"]),
            (&"0x1070".into(), &336.into())
        );
        assert_eq!(finding(&report, "open")["verdict"], opened);
        if opened == "good" {
            assert_eq!(finding(&report, "hw-info")["data"]["stepping"], "D");
        }
    }
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
fn a_report_from_elsewhere_is_shown_beside_the_software_card() {
    let tool = Installed::new();
    let file = tool.prefix().join("report.json");
    let mut report = good_report(&tool);
    let checks = report["checks"].as_array_mut().expect("a list");
    let memory = checks.iter_mut().find(|finding| finding["check"] == "device-memory");
    memory.expect("such a check")["data"]["page"] = 12345.into();
    std::fs::write(&file, report.to_string()).expect("written");
    let read = tool.run(&format!("check-card --read {} --json", file.display())).json();
    let memory = finding(&read, "device-memory");
    assert!(memory["differs"].to_string().contains("page: 12345; software card: "), "{read:#}");
    assert_eq!(finding(&read, "import")["differs"], serde_json::json!([]), "{read:#}");
    let shown = tool.run(&format!("check-card --read {}", file.display()));
    assert!(shown.out.contains("page: 12345") && shown.code == Some(0), "{shown:?}");
    std::fs::write(&file, "{}").expect("written");
    tool.run(&format!("check-card --read {}", file.display())).fails(3, &["--save"]);
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
    assert!(ran.out.starts_with("Opens and closes the card, 2 times."), "{}", ran.out);
}

/// Each rule, the check that must fail for it, and words of its finding.
#[test]
fn each_check_is_seen_to_fail() {
    let tool = Installed::new();
    let faults = [
        ("hlthunk_get_hw_ip_info fail:EIO after=1 times=0", "hw-info", "hlthunk_get_hw_ip_info"),
        ("hlthunk_open fail:EBUSY", "open", "hlthunk_open"),
        ("hlthunk_open fail:EBUSY after=1", "open", "round 1"),
        ("hlthunk_close fail:EIO after=3", "open", "closing failed"),
        ("hlthunk_device_memory_alloc fail:ENOMEM", "device-memory", "Cannot allocate memory"),
        ("hlthunk_device_memory_map fail:EINVAL", "device-memory", "hlthunk_device_memory_map"),
        ("hlthunk_device_memory_map fail:EINVAL after=1", "device-memory", "a second page"),
        ("hlthunk_host_memory_map fail:ENOMEM", "host-memory", "4 KiB"),
        ("hlthunk_command_submission fail:EIO", "queues", "queue 0"),
        ("hlthunk_wait_for_cs fail:EIO after=30", "queues", "queue 1"),
        ("transfer fail:EIO", "bulk-copies", "queue"),
        ("transfer flip:4095", "bulk-copies", "1 bytes wrong"),
        ("hlthunk_device_mapped_memory_export_dmabuf_fd fail:EPERM", "export", "export_dmabuf"),
        ("hlthunk_memory_unmap fail:EBUSY after=132", "export", "not EINVAL"),
        ("hlthunk_memory_unmap fail:EBUSY after=133", "export", "cannot be unmapped"),
        // Last: the card does not come back.
        ("ioctl remove", "import", "No such device"),
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
fn wrong_bytes_are_seen_in_each_kind_of_copy() {
    let tool = Installed::new();
    let good = good_report(&tool);
    // Behind the images that the first copy of the check needs. Odd copies begin with a batch of six, whose first is done last.
    for (check, images, offset, words) in [
        ("in-flight", 0, 0, "60 submissions in flight: 1 bytes wrong"),
        ("large-copies", 1, 0, "64 MiB in one packet: 1 bytes wrong"),
        ("device-copies", 2, 0, "copy within the card on queue"),
        ("fill", 1, 0, "fill with 0x00 on queue"),
        ("odd-copies", 6, 0, "copy down of 128 B on queue 0, offsets 0 → 0: byte 0 is"),
        ("odd-copies", 6, 4500, "guard byte 4373 behind it"),
        ("odd-device-copies", 7, 0, "copy within the card of"),
        ("odd-fill", 6, 0, "fill with 0x00 of"),
    ] {
        let after = transfers(&good, check).0 + images;
        let rule = format!("transfer flip:{offset} after={after}");
        let report = with_faults(&tool, &rule, "").json();
        let finding = finding(&report, check);
        assert_eq!(finding["verdict"], "bad", "{report:#}");
        assert!(finding["found"].as_str().expect("text").contains(words), "{finding:#}");
        if check.starts_with("odd") {
            let kind = &finding["data"]["wrong_kinds"][0];
            assert_eq!((&kind["wrong"], &kind["queue"]), (&1.into(), &0.into()), "{finding:#}");
            assert_eq!(kind["len_from_to"][0][0], 128, "{finding:#}");
        }
    }
    // The last copy of the check goes up.
    let (before, within) = transfers(&good, "odd-copies");
    let rule = format!("transfer flip:0 after={}", before + within - 1);
    let report = with_faults(&tool, &rule, "").json();
    let finding = finding(&report, "odd-copies");
    assert!(finding["found"].as_str().expect("text").contains("copy up of"), "{finding:#}");
}

#[test]
fn after_a_copy_that_does_not_end_the_later_checks_are_skipped() {
    let tool = Installed::new();
    let after = transfers(&good_report(&tool), "odd-copies").0 + 1;
    let ran = with_faults(&tool, &format!("transfer fail:EIO after={after}"), "");
    let report = ran.json();
    assert_eq!(ran.code, Some(1), "{report:#}");
    let odd = finding(&report, "odd-copies");
    assert_eq!(odd["verdict"], "bad", "{report:#}");
    let found = odd["found"].as_str().expect("text");
    assert!(found.contains("of 128 to 4096 B, addresses that are multiples of 128"), "{found}");
    let at = CHECKS.iter().position(|check| *check == "odd-copies").expect("a check");
    for check in CHECKS[at + 1..].iter().filter(|check| **check != "after") {
        let finding = finding(&report, check);
        assert_eq!(finding["verdict"], "skipped", "{finding:#}");
        assert_eq!(finding["found"], "not tried: odd-copies failed");
    }
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
}

#[test]
fn the_rule_of_a_card_for_lengths_or_addresses_can_be_read_from_the_report() {
    let tool = Installed::new();
    for (rule, addresses, lengths) in [("1,16", 8, 128), ("4,1", 128, 2)] {
        let mut command = tool.command("check-card --soft=1 --json");
        command.env("SOFT_GAUDI_DMA_ALIGNMENT", rule).env("SOFT_GAUDI_RESET_KILL", "no");
        let report = Ran::of(&command.output().expect("runs")).json();
        for check in ["bulk-copies", "export", "device-copies", "fill"] {
            assert_eq!(finding(&report, check)["verdict"], "good", "{rule}: {report:#}");
        }
        let failed = &finding(&report, "odd-copies")["data"]["failed"];
        assert_eq!(failed["what"], "copy down", "{rule}: {report:#}");
        assert_eq!(failed["addresses_multiple_of"], addresses, "{rule}: {failed:#}");
        assert_eq!(failed["lengths_multiple_of"], lengths, "{rule}: {failed:#}");
        let copies = failed["len_from_to"].as_array().expect("a list");
        let is_so = |copy: &Value| copy[0].as_u64().is_some_and(|len| len % lengths == 0);
        assert!(!copies.is_empty() && copies.iter().all(is_so), "{failed:#}");
    }
}

#[test]
fn a_submission_that_does_not_end_is_given_up_before_the_watchdog_resets_the_card() {
    let tool = Installed::new();
    let ran = with_faults(&tool, "submission hang", "");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let report = ran.json();
    let queues = finding(&report, "queues");
    assert_eq!(queues["verdict"], "bad", "{report:#}");
    assert_eq!(queues["found"], "queue 0: not done after 10 s", "{report:#}");
    assert_eq!(finding(&report, "bulk-copies")["found"], "not tried: queues failed");
}

#[test]
fn a_card_that_stays_in_reset_is_given_up() {
    let tool = Installed::new();
    let ran = with_faults(&tool, "hlthunk_open fail:EAGAIN times=0", "");
    let report = ran.json();
    let open = finding(&report, "open");
    assert_eq!((ran.code, &open["verdict"]), (Some(1), &"bad".into()), "{report:#}");
    let remedy = open["remedy"].as_str().expect("text");
    assert!(remedy.contains("in reset or being released"), "{open:#}");
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

/// The reports of `edma` and `edma-reopen` on a card whose EDMA engines fetch from host memory.
fn edma(tool: &Installed, rule: &str) -> [Value; 2] {
    tool.order_faults(rule);
    let mut command = tool.command("check-card --soft=1 --json --may-reset");
    command.env("SOFT_GAUDI_FAULTS", "yes").env("SOFT_GAUDI_LENIENT", "edma-fetch");
    let report = Ran::of(&command.output().expect("runs")).json();
    ["edma", "edma-reopen"].map(|check| {
        let checks = report["checks"].as_array().expect("a list");
        checks.iter().find(|finding| finding["check"] == check).cloned().unwrap_or_default()
    })
}

#[test]
fn edma_is_tried_only_when_a_reset_is_permitted() {
    let tool = Installed::new();
    let mut command = tool.command("check-card --soft=1 --json --may-reset");
    command.env("SOFT_GAUDI_CS_TIMEOUT", "500").env("SOFT_GAUDI_RESET_KILL", "no");
    let ran = Ran::of(&command.output().expect("runs"));
    let report = ran.json();
    // The driver does not reset the card for this submission (SKIP_RESET_ON_TIMEOUT).
    let found = finding(&report, "edma");
    assert_eq!(found["verdict"], "good", "{report:#}");
    assert_eq!(
        (&found["data"]["fetches_host"], &found["data"]["survived"]),
        (&false.into(), &true.into())
    );
    assert_eq!(finding(&report, "edma-reopen")["verdict"], "good", "{report:#}");
    let [found, reopened] = edma(&tool, "");
    assert_eq!(found["data"]["fetches_host"], true, "{found:#}");
    assert_eq!(reopened["verdict"], "good", "{reopened:#}");
}

#[test]
fn edma_claims_nothing_that_was_not_seen() {
    let tool = Installed::new();
    let [refused, reopened] = edma(&tool, "hlthunk_command_submission_timeout fail:EINVAL");
    assert_eq!(refused["verdict"], "warning", "{refused:#}");
    let data = serde_json::json!({"submitted": false, "fetches_host": null, "survived": null});
    assert_eq!(refused["data"], data);
    assert_eq!(reopened, Value::Null, "nothing happened to the card");

    let (before, within) = transfers(&good_report(&tool), "odd-fill");
    // Behind two images.
    let after = before + within + 2;
    let [wrong, reopened] = edma(&tool, &format!("transfer flip:77 after={after}"));
    assert_eq!(wrong["verdict"], "warning", "{wrong:#}");
    assert_eq!(wrong["data"]["fetches_host"], Value::Null, "{wrong:#}");
    assert_eq!(reopened["verdict"], "good", "{reopened:#}");

    let [lost, reopened] = edma(&tool, &format!("transfer fail:EIO after={after}"));
    assert_eq!(lost["verdict"], "bad", "{lost:#}");
    assert_eq!(lost["data"]["fetches_host"], Value::Null, "{lost:#}");
    assert_eq!(lost["data"]["survived"], false, "{lost:#}");
    assert_eq!(reopened["verdict"], "good", "{reopened:#}");

    let [found, reopened] = edma(&tool, "hlthunk_open fail:EPERM after=2");
    assert_eq!(found["data"]["fetches_host"], true, "{found:#}");
    assert_eq!(reopened["verdict"], "bad", "{reopened:#}");
}

#[test]
fn a_recording_has_the_calls_that_only_check_card_makes() {
    let tool = Installed::new();
    let file = tool.prefix().join("card.trace");
    let words = format!("check-card --soft=1 --json --may-reset --trace {}", file.display());
    let mut command = tool.command(&words);
    command.env("SOFT_GAUDI_LENIENT", "edma-fetch");
    let ran = Ran::of(&command.output().expect("runs"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let text = std::fs::read_to_string(file).expect("recorded");
    let calls: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let sparing: Vec<&Value> =
        calls.iter().filter(|call| call["call"] == "hlthunk_command_submission_timeout").collect();
    assert_eq!(sparing.len(), 1);
    let args = &sparing[0]["args"];
    // SKIP_RESET_ON_TIMEOUT.
    assert_eq!((&args["flags"], &args["chunks"][0]["queue"]), (&0x400.into(), &8.into()));
    let is_hw_info = |call: &Value| call["call"] == "hlthunk_get_hw_ip_info";
    // Twice into a canaried buffer, and once as the plugin asks.
    assert!(calls.windows(3).any(|calls| calls.iter().all(is_hw_info)));
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
        let checks: std::collections::BTreeSet<&str> = report["checks"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|finding| finding["check"].as_str().expect("a name"))
            .collect();
        assert_eq!(checks, CHECKS.into(), "{generation}");
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
    // All others, and what comes after a card.
    assert_eq!(report["summary"]["skipped"], CHECKS.len() - 2);
}
