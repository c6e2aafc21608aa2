//! The tool `ucx-gaudi` as it is installed, with stock UCX.

use e2e::{Device, Finished, SoftNode, Ucx, Workbench};

/// The tool with these words, on a software machine of its own.
fn tool(ucx: Ucx, device: &Device, words: &str) -> Finished {
    Workbench::from_env().ucx_gaudi(ucx).device(device).words(words).run()
}

fn json(finished: &Finished) -> serde_json::Value {
    let read = serde_json::from_str(&finished.stdout);
    read.unwrap_or_else(|error| panic!("{error}\n{}", finished.report()))
}

#[test]
fn doctor_finds_each_ucx_and_whether_it_loads_the_plugin() {
    let bench = Workbench::from_env();
    let device = Device::software();
    let folders: Vec<String> = [Ucx::V1_22, Ucx::Nixl]
        .iter()
        .flat_map(|ucx| ucx.lib_dirs(bench.layout()))
        .chain([bench.layout().old_ucx()])
        .filter(|folder| folder.is_dir())
        .map(|folder| format!("--ucx {}", folder.display()))
        .collect();
    let words = format!("doctor --json {}", folders.join(" "));
    let finished = tool(Ucx::V1_22, &device, &words).ok();
    let report = json(&finished);
    let of = |version: &str| {
        let checks = report["checks"].as_array().expect("a list").iter();
        let ucx = checks.filter(|finding| finding["check"] == "ucx");
        let found = ucx.clone().find(|finding| {
            finding["data"]["version"].as_str().is_some_and(|text| text.starts_with(version))
        });
        found.unwrap_or_else(|| panic!("no UCX {version}\n{}", finished.report()))
    };
    for (version, verbs, suffix) in [("1.22", false, ".so.0"), ("1.23", true, ".so.0.0.0")] {
        let finding = of(version);
        assert_eq!(finding["verdict"], "good", "{finding:#}");
        assert_eq!(finding["data"]["verbs"], verbs, "{finding:#}");
        assert_eq!(finding["data"]["suffix"], suffix, "{finding:#}");
    }
    if bench.layout().old_ucx().is_dir() {
        let old = of("1.20");
        assert_eq!(old["verdict"], "warning", "{old:#}");
        assert!(old["remedy"].as_str().expect("text").contains("1.22"), "{old:#}");
    } else {
        println!("skipped: no UCX 1.20 here");
    }
}

#[test]
fn doctor_says_that_the_plugin_offers_no_gaudi_without_a_card() {
    let bench = Workbench::from_env();
    let device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "0"));
    let folder = Ucx::V1_22.lib_dirs(bench.layout()).remove(0);
    let finished = tool(Ucx::V1_22, &device, &format!("doctor --json --ucx {}", folder.display()));
    assert_eq!(finished.status.and_then(|status| status.code()), Some(1), "{}", finished.report());
    let report = json(&finished);
    let checks = report["checks"].as_array().expect("a list");
    let ucx = checks.iter().find(|finding| finding["check"] == "ucx").expect("a UCX");
    assert!(ucx["found"].as_str().expect("text").contains("no Gaudi"), "{ucx:#}");
}

#[test]
fn run_makes_stock_ucx_info_list_software_gaudis() {
    let bench = Workbench::from_env();
    let info = Ucx::V1_22.bin_dir(bench.layout()).expect("programs").join("ucx_info");
    let node = SoftNode::unique();
    // No device on the loader path: that is what the tool sets.
    let tool = bench.ucx_gaudi(Ucx::V1_22).env("SOFT_GAUDI_NODE", node.name());
    let listed = tool.words("run --soft=2 --tuned --").arg(info).arg("-d").run().ok();
    assert!(listed.stdout.contains("Component: gaudi_copy"), "{}", listed.report());
    assert!(listed.stderr.contains("UCX_RMA_PPLN_ENABLE=y"), "{}", listed.report());
    let kind = format!("SOFT_GAUDI_KIND={}", e2e::KIND);
    assert!(listed.stderr.contains(&kind), "as `cargo xtask env` sets it: {}", listed.report());
}

#[test]
fn recordings_of_two_equal_runs_of_perftest_are_the_same() {
    let bench = Workbench::from_env();
    let folder = bench.layout().scratch().with_file_name(format!("tool-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let record = |name: &str, size: &str| {
        let device = Device::software();
        let file = folder.join(name);
        let tool = bench.tool(Ucx::V1_22, "ucx_perftest").plugin().device(&device);
        tool.words("-l -x gaudi_cpy -d gaudi_copy -t put_bw -m host,gaudi -n 20 -w 2 -s")
            .arg(size)
            .env("UCX_GAUDI_TRACE", &file)
            .run()
            .ok();
        file.display().to_string()
    };
    let (one, same, other) = (record("a", "65536"), record("b", "65536"), record("c", "131072"));
    let device = Device::software();
    let diff = tool(Ucx::V1_22, &device, &format!("trace diff {one} {same}")).ok();
    assert!(diff.stdout.contains("calls are the same"), "{}", diff.report());
    let diff = tool(Ucx::V1_22, &device, &format!("trace diff {one} {other}"));
    assert_eq!(diff.status.and_then(|status| status.code()), Some(1), "{}", diff.report());
    assert!(diff.stdout.contains("packets"), "{}", diff.report());
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn check_card_registers_memory_with_a_software_hca() {
    let bench = Workbench::from_env();
    let node = SoftNode::unique();
    let rdma = bench.layout().soft_gaudi().with_file_name("rdma");
    let folder = bench.layout().scratch().with_file_name(format!("rdma-{}", std::process::id()));
    let run = |devices: &str, dmabuf: &str| {
        let tool = bench.ucx_gaudi(Ucx::V1_22).env("LD_LIBRARY_PATH", &rdma);
        let tool = tool.env("SOFT_RDMA_DEVICES", devices).env("SOFT_RDMA_DIR", &folder);
        let tool = tool.env("SOFT_RDMA_DMABUF", dmabuf);
        let tool = tool.env("SOFT_GAUDI_NODE", node.name());
        let report = json(&tool.words("check-card --soft=1 --json").run().ok());
        let checks = report["checks"].as_array().expect("a list").clone();
        checks.into_iter().find(|finding| finding["check"] == "hca").expect("a check")
    };
    let finding = run("2", "on");
    assert_eq!(finding["verdict"], "good", "{finding:#}");
    assert!(finding["found"].as_str().expect("text").contains("softrdma1"), "{finding:#}");
    assert_eq!(run("0", "on")["verdict"], "skipped");
    let refused = run("1", "refused");
    assert_eq!(refused["verdict"], "warning", "{refused:#}");
    assert!(refused["remedy"].as_str().expect("text").contains("PCI switch"), "{refused:#}");
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn explain_tells_the_protocol_in_words() {
    let bench = Workbench::from_env();
    let explain = |words: &str, device: &Device| tool(Ucx::V1_22, device, words);
    let device = Device::Software(SoftNode::kind());
    let told = json(&explain("explain tag gaudi gaudi 4M --json", &device).ok());
    assert_eq!(told["size"], 4 << 20);
    let steps = told["steps"].as_array().expect("a list");
    assert_eq!((steps.len(), &steps[0]["who"]), (2, &"sender".into()), "{told:#}");
    assert!(steps[1]["transports"].as_str().expect("text").contains("gaudi_ipc"), "{told:#}");
    // Without import put is emulated, unless it is told to be pipelined.
    let staged = Device::Software(SoftNode::unique());
    let told = json(&explain("explain put gaudi gaudi 1M --json", &staged).ok());
    let advice = told["advice"].to_string();
    assert!(advice.contains("--tuned") && advice.contains("gaudi_ipc"), "{told:#}");
    let old = format!("explain put host gaudi 8 --ucx {}", bench.layout().old_ucx().display());
    let refused = explain(&old, &device);
    assert_eq!(refused.status.and_then(|status| status.code()), Some(3), "{}", refused.report());
    assert!(refused.stderr.contains("remedy:"), "{}", refused.report());
}

#[test]
fn installation_that_was_moved_still_works() {
    let bench = Workbench::from_env();
    let prefix = std::env::temp_dir().join(format!("e2e-moved-{}", std::process::id()));
    let mut copy = std::process::Command::new("cp");
    let copied = copy.arg("-a").arg(bench.layout().dist()).arg(&prefix);
    assert!(copied.status().expect("cp").success());
    let node = SoftNode::unique();
    let output = std::process::Command::new(prefix.join("bin/ucx-gaudi"))
        .args(["check-card", "--soft=1"])
        .env("SOFT_GAUDI_NODE", node.name())
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .expect("runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains(&*prefix.to_string_lossy()), "its own library: {text}");
    assert!(prefix.join("share/man/man1/ucx-gaudi-check-card.1").exists());
    let _ = std::fs::remove_dir_all(prefix);
}
