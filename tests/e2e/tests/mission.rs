//! What the mission names, typed as it is written there: variables, the mapping table, commands. Other files test each
//! of them in depth; here it is only seen to be accepted, and to have its effect. The names of § 1.1 are in listing.rs,
//! the choice of a card (§ 1.8) is in config.rs.

mod memory;

use std::process::Command;

use e2e::{Device, Listing, Ucx, Workbench, stock};
use gaudi::ErrorKind;
use memory::Machine;
use stats_reader as stats;

/// § 1.7. UCX wants a transport that reaches a peer beside an accelerator's, whichever that is.
#[test]
fn section_1_transports_and_devices() {
    let run = |variable: &str, value: &str| {
        let words = "-l -f -v -m gaudi -t tag_lat -s 8 -n 10 -w 1";
        stock("ucx_perftest", &Device::cards(1), words).env(variable, value).run()
    };
    for (variable, value) in [
        ("UCX_TLS", "gaudi,self"),
        ("UCX_TLS", "gaudi,sm"),
        ("UCX_TLS", "gaudi_cpy,self"),
        ("UCX_TLS", "^gaudi"),
        ("UCX_ACC_DEVICES", "gaudi_copy"),
        ("UCX_NET_DEVICES", "lo"),
    ] {
        run(variable, value).ok();
    }
    run("UCX_TLS", "^gaudi,gaudi_cpy").refused();
    run("UCX_ACC_DEVICES", "cuda0").refused();
    for alone in ["gaudi", "cuda"] {
        let end = run("UCX_TLS", alone).refused();
        let words = format!("no usable transports/devices (asked {alone} on");
        assert!(end.says(&["ERROR", &words]), "{}", end.report());
    }
}

/// Where memory lies with these variables.
#[track_caller]
fn card(variables: &[(&str, &str)]) -> String {
    let end = Machine::eight_cards().check(Ucx::V1_22, "where").envs(variables).run().ok();
    let line = end.stdout.lines().find_map(|line| line.strip_prefix("memory lies on card "));
    line.unwrap_or_else(|| panic!("{}", end.report())).to_owned()
}

/// § 5
const TABLE: &str = r#"[{"index":0,"module_id":2,"bus_id":"0000:33:00.0"},{"index":1,"module_id":0,"bus_id":"0000:4d:00.0"},{"index":2,"module_id":1,"bus_id":"0000:4e:00.0"},{"index":3,"module_id":3,"bus_id":"0000:34:00.0"}]"#;

/// § 5
#[test]
fn section_5_mapping_table() {
    for (choice, bus_id) in [
        ("0", "0000:33:00.0"),
        ("1", "0000:4d:00.0"),
        ("2", "0000:4e:00.0"),
        ("3", "0000:34:00.0"),
        ("module:2", "0000:33:00.0"),
    ] {
        let variables = [("GAUDI_MAPPING_TABLE", TABLE), ("UCX_GAUDI_COPY_DEVICE", choice)];
        assert_eq!(card(&variables), bus_id, "{choice}");
    }
    // Under the tool's `--soft`, which needs no more than what is written.
    let tool = Workbench::from_env().ucx_gaudi(Ucx::V1_22).words("info --soft");
    let end = tool.env("GAUDI_MAPPING_TABLE", TABLE).run().ok();
    let cards = end.stdout.matches("0000:").count();
    assert_eq!(cards, 4, "{}", end.report());
}

/// § 6
#[test]
fn section_6_errors() {
    let names = [
        "DEVICE_NOT_FOUND",
        "OUT_OF_MEMORY",
        "INVALID_PARAMS",
        "DEVICE_BUSY",
        "DMA_FAILED",
        "TIMEOUT",
        "PERMISSION_DENIED",
        "CHANNEL_FAILED",
    ];
    let codes: Vec<(&str, i32)> = names.into_iter().zip((1..).map(|code: i32| -code)).collect();
    let ours: Vec<(&str, i32)> =
        ErrorKind::ALL.iter().map(|kind| (kind.name(), kind.code())).collect();
    assert_eq!(ours, codes);
    for (choice, name) in [("module:9", "DEVICE_NOT_FOUND"), ("first", "INVALID_PARAMS")] {
        let check = Machine::one_card().check(Ucx::V1_22, "where");
        let end = check.env("UCX_GAUDI_COPY_DEVICE", choice).run().refused();
        assert!(end.says(&["WARN", choice, &format!("[{name}]")]), "{}", end.report());
    }
}

/// § 7: the variables with `yes`, `no` and `try`.
const TERNARY: [&str; 5] = [
    "DMABUF",
    "ENABLE_MAPPED_DMABUF",
    "ENABLE_RCACHE",
    "ENABLE_HW_BLOCK_ACCESS",
    "ENABLE_NIC_SCALE_OUT",
];

/// § 7: every value in both spellings. The card stays listed, and what shows of the value is right.
#[test]
fn section_7_configuration() {
    for spelling in ["UCX_GAUDI_COPY_", "UCT_GAUDI_COPY_"] {
        for (value, domain, log) in [
            (
                "yes",
                "dmabuf",
                ["exported at each allocation", "may be mapped", "=yes, but no active NIC"],
            ),
            (
                "try",
                "dmabuf",
                ["exported when a NIC", "may be mapped", "nearest NIC: no active one"],
            ),
            ("no", "cost: 7000 nsec", ["DMABUF=no", "nearest NIC: not looked for", "uses "]),
        ] {
            // A machine without NICs, whatever this one has.
            let mut variables = vec![("GAUDI_SYSFS_ROOT".to_owned(), "/nonexistent")];
            variables.extend(TERNARY.map(|name| (format!("{spelling}{name}"), value)));
            variables.push((format!("{spelling}REG_COST"), "7000ns"));
            variables.push((format!("{spelling}LOG_LEVEL"), "info"));
            let variables: Vec<(&str, &str)> =
                variables.iter().map(|(name, value)| (name.as_str(), *value)).collect();
            let machine = Machine::one_card();
            let end = stock("ucx_info", &machine.device, "-d").envs(&variables).run().ok();
            let listed = Listing::of(&end.stdout).domain("gaudi_copy");
            assert!(listed.contains("Device: gaudi_copy"), "{}", end.report());
            assert!(listed.contains(domain), "{domain}: {}", end.report());
            assert_eq!(listed.contains("dmabuf"), value != "no", "{}", end.report());
            let end = machine.check(Ucx::V1_22, "where").envs(&variables).run().ok();
            for shown in log {
                assert!(end.text().contains(shown), "{shown}: {}", end.report());
            }
            assert_eq!(end.says(&["may be mapped"]), value != "no", "{}", end.report());
            assert!(!end.says(&["is not understood"]), "{}", end.report());
        }
    }
}

/// § 7: the variables and their defaults, as `ucx_info -c` lists them.
#[test]
fn section_7_defaults() {
    let end = stock("ucx_info", &Device::cards(1), "-c").run().ok();
    for name in TERNARY {
        // UCX writes `no` as `n`.
        let default = if name == "ENABLE_HW_BLOCK_ACCESS" { "n" } else { "try" };
        let line = format!("UCX_GAUDI_COPY_{name}={default}");
        assert!(end.stdout.lines().any(|listed| listed == line), "{line}: {}", end.report());
    }
    for name in ["REG_COST", "LOG_LEVEL"] {
        assert!(end.stdout.contains(&format!("\nUCX_GAUDI_COPY_{name}=")), "{}", end.report());
    }
}

/// § 8
#[test]
fn section_8_counters() {
    let words = "-l -f -t tag_lat -m gaudi -s 65536 -n 1000000000 -w 1";
    let running = stock("ucx_perftest", &Device::cards(1), words).start();
    let job = running.id();
    let busy = |page: stats::Snapshot| page.get("submissions").is_some_and(|count| count > 0);
    assert!(running.wait_until(|_| stats::read(job).is_ok_and(busy)), "no page");
    let tool = Workbench::from_env().ucx_gaudi(Ucx::V1_22);
    let end = tool.words(&format!("stats {job} --json")).run().ok();
    for name in ["reg_cache_hits", "reg_cache_misses", "dmabuf_exports", "dma_errors"] {
        assert!(end.stdout.contains(&format!("\"{name}\":")), "{name}: {}", end.report());
    }
}

/// `ucx_perftest` with Gaudi memory in one process.
#[track_caller]
fn perftest(words: &str) {
    let words = format!("-l -f -v -m gaudi -n 10 -w 1 -s 8 -t {words}");
    stock("ucx_perftest", &Device::cards(1), &words).run().ok();
}

/// § 9. UCX's atomic tests are not among them: it lets the CPU add, on memory of every type (atomics.rs).
#[test]
fn section_9_ucp_tests() {
    let tag = ["tag_lat", "tag_bw", "tag_sync_lat", "tag_sync_bw"];
    let one_sided = ["ucp_put_lat", "ucp_put_bw", "ucp_get"];
    let others = ["stream_lat", "stream_bw", "ucp_am_lat", "ucp_am_bw"];
    tag.iter().chain(&one_sided).chain(&others).for_each(|test| perftest(test));
}

/// § 9. A transport of copies has neither active messages nor atomics.
#[test]
fn section_9_uct_tests() {
    for test in ["put_lat", "put_bw", "get", "get_bw"] {
        for layout in ["short", "zcopy"] {
            perftest(&format!("{test} -D {layout} -x gaudi_cpy -d gaudi_copy"));
        }
    }
}

/// § 10
#[test]
fn section_10_categories() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let listed = Command::new(cargo)
        .args(["xtask", "test", "--list"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .expect("cargo runs");
    let text = String::from_utf8_lossy(&listed.stdout);
    let mission = "gaudi dmabuf detection ucm ipc rcache errors config ib performance-smoke";
    for category in mission.split(' ') {
        let is_listed = text.lines().any(|line| line.split_whitespace().next() == Some(category));
        assert!(is_listed, "{category}: {text}{}", String::from_utf8_lossy(&listed.stderr));
    }
}
