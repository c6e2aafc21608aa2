//! `doctor` on the software Gaudi: what it says of a good machine, and of each thing that is wrong. The
//! plugin is a stand-in here; with stock UCX it is tested in e2e.

mod tool;

use serde_json::Value;
use tool::{Installed, Ran, keys};

fn finding<'a>(report: &'a Value, check: &str) -> &'a Value {
    let checks = report["checks"].as_array().expect("a list");
    let found = checks.iter().find(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("no {check} in {report:#}"))
}

#[track_caller]
fn expect(report: &Value, check: &str, verdict: &str, found: &str, remedy: &str) {
    let finding = finding(report, check);
    assert_eq!(finding["verdict"], verdict, "{finding:#}");
    for (key, words) in [("found", found), ("remedy", remedy)] {
        assert!(finding[key].as_str().expect("text").contains(words), "{finding:#}");
    }
}

#[test]
fn a_software_card_is_found_and_copied_on() {
    let tool = Installed::new();
    let report = tool.run("doctor --soft=2 --json").json();
    assert_eq!(keys(&report), ["checks", "report", "summary", "version"]);
    for check in ["kernel", "library", "pair", "settings", "cards", "copy", "dma-buf", "import"] {
        expect(&report, check, "good", "", "");
        assert_eq!(keys(finding(&report, check)), ["check", "data", "found", "remedy", "verdict"]);
    }
    let ran = tool.run("doctor --soft=2");
    assert!(ran.out.contains("✓ copy") && ran.out.contains("every byte right"), "{ran:?}");
    let report = tool.run("doctor --soft=2 --no-card --json").json();
    expect(&report, "copy", "skipped", "--no-card", "");
}

#[test]
fn what_is_wrong_with_a_card_is_told_with_a_remedy() {
    let tool = Installed::new();
    let faults = [
        ("transfer flip:7", "copy", "bad", "1 of 1048576 bytes", "check-card"),
        ("transfer fail:EIO", "copy", "bad", "DMA_FAILED", "software Gaudi"),
        ("hlthunk_open fail:EBUSY times=0", "copy", "warning", "DEVICE_BUSY", "--card"),
        (
            "hlthunk_device_memory_alloc fail:ENOMEM times=0",
            "copy",
            "bad",
            "OUT_OF_MEMORY",
            "memory",
        ),
        (
            "hlthunk_device_mapped_memory_export_dmabuf_fd fail:EPERM times=0",
            "dma-buf",
            "warning",
            "permitted",
            "",
        ),
        (
            "hlthunk_get_hw_ip_info fail:EIO times=0",
            "cards",
            "bad",
            "hlthunk_get_hw_ip_info",
            "SOFT_GAUDI",
        ),
    ];
    for (rule, check, verdict, found, remedy) in faults {
        tool.order_faults(rule);
        let mut command = tool.command("doctor --soft=1 --json");
        command.env("SOFT_GAUDI_FAULTS", "yes");
        let ran = Ran::of(&command.output().expect("runs"));
        let report = ran.json();
        expect(&report, check, verdict, found, remedy);
    }
}

#[test]
fn a_card_of_an_unknown_kind_is_a_finding() {
    let tool = Installed::new();
    let with = |ids: &str| {
        let mut command = tool.command("doctor --soft=2 --no-card --json");
        Ran::of(&command.env("SOFT_GAUDI_PCI_ID", ids).output().expect("runs")).json()
    };
    expect(&with("0x1020,0x1070"), "unknown-card", "warning", "1da3:1070", "");
    expect(&with("0x1020,0x1070"), "unknown-card", "warning", "check-card --save", "");
    expect(&with("0x1070"), "cards", "bad", "1da3:1070", "check-card --save");
}

#[test]
fn a_card_that_is_reset_under_the_check_does_not_end_the_report() {
    let tool = Installed::new();
    tool.order_faults("submission hang");
    let mut command = tool.command("doctor --soft=1 --json");
    command.env("SOFT_GAUDI_FAULTS", "yes").env("SOFT_GAUDI_CS_TIMEOUT", "200");
    command.env("SOFT_GAUDI_RESET_KILL", "1");
    let report = Ran::of(&command.output().expect("runs")).json();
    expect(&report, "copy", "bad", "", "");
}

#[test]
fn wrong_variables_are_named() {
    let tool = Installed::new();
    let with = |name: &str, value: &str| {
        let mut command = tool.command("doctor --soft=2 --no-card --json");
        Ran::of(&command.env(name, value).output().expect("runs")).json()
    };
    expect(&with("UCX_TLS", "rc,sm"), "settings", "warning", "UCX_TLS", "gaudi_cpy");
    expect(
        &with("UCX_PLUGIN_PATH", "/no/such"),
        "settings",
        "warning",
        "no libuct_gaudi",
        "run -q",
    );
    let folder = tool.prefix().join("one-suffix");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("libuct_gaudi.so"), "").expect("a file");
    let folder = folder.to_str().expect("text");
    let words = "there is no libuct_gaudi.so.0, no libuct_gaudi.so.0.0.0";
    expect(&with("UCX_PLUGIN_PATH", folder), "settings", "warning", words, "run -q");
    expect(&with("GAUDI_MAPPING_TABLE", "{"), "cards", "bad", "GAUDI_MAPPING_TABLE", "");
    expect(
        &with("HABANA_VISIBLE_MODULES", "17"),
        "cards",
        "bad",
        "hides all 2 cards",
        "module ids",
    );
    let mut command = tool.command("doctor --json");
    command.env("HL_THUNK_LIBRARY", "/no/such.so");
    let report = Ran::of(&command.output().expect("runs")).json();
    expect(&report, "library", "bad", "/no/such.so", "--soft");
    expect(&report, "copy", "skipped", "no card", "");
}

#[test]
fn few_descriptors_are_noticed_and_do_not_end_it() {
    let tool = Installed::new();
    let mut shell = std::process::Command::new("sh");
    let program = tool.prefix().join("bin/ucx-gaudi");
    shell.args(["-c", "ulimit -n 12; exec \"$0\" doctor --soft=1 --json --no-card"]).arg(program);
    shell.env("SOFT_GAUDI_NODE", tool.node());
    let ran = Ran::of(&shell.output().expect("runs"));
    expect(&ran.json(), "limits", "warning", "12 descriptors", "ulimit -n 1024");
}

#[test]
fn a_bundle_names_neither_user_nor_host_nor_home() {
    let tool = Installed::new();
    let home = tool.prefix().join("home-of-someone");
    let file = home.join("bundle.json");
    std::fs::create_dir_all(&home).expect("a folder");
    let mut command = tool.command("doctor --soft=1 --no-card --bundle");
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    command.arg(&file).env("HOME", &home).env("USER", "someone").env("SUDO_USER", "another");
    command.env("UCX_NET_DEVICES", home.join("x"));
    command.env("UCX_TLS", format!("/x/{host}/someone/another/home/third"));
    let ran = Ran::of(&command.output().expect("runs"));
    assert!(ran.err.contains("look into it before you send it"), "{ran:?}");
    let text = std::fs::read_to_string(&file).expect("a bundle");
    let bundle: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(bundle["report"], "doctor");
    assert!(text.contains("/x/<host>/<user>/<user>/home/<user>"), "{text}");
    assert!(text.contains("<home>/x") && !text.contains("someone"), "{text}");
    let mut command = tool.command("doctor --soft=1 --no-card --bundle /no/such/folder/x");
    Ran::of(&command.output().expect("runs")).fails(3, &["/no/such/folder/x"]);
}

#[test]
fn a_file_that_is_no_ucx_is_told_by_its_path() {
    let tool = Installed::new();
    let folder = tool.prefix().join("ucx");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("libucp.so.0"), "no library").expect("a file");
    let mut command = tool.command("doctor --soft=1 --no-card --json --ucx");
    let report = Ran::of(&command.arg(&folder).output().expect("runs")).json();
    expect(&report, "ucx", "warning", "cannot be loaded", "LD_LIBRARY_PATH");
    tool.run("doctor --soft=1 --ucx /no/such").fails(2, &["/no/such: no such folder"]);
    tool.run("doctor --soft=1 --card x").fails(2, &["\"x\""]);
    std::fs::remove_dir_all(tool.prefix().join("lib/ucx-gaudi/plugins")).expect("removed");
    let report = tool.run("doctor --soft=1 --no-card --json").json();
    expect(&report, "plugin", "bad", "libuct_gaudi.so.0 is not there", "PREFIX");
}
