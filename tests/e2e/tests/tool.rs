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
    let old = bench.layout().old_ucx();
    let folders = Ucx::V1_22.lib_dirs(bench.layout()).into_iter().chain([old]);
    let folders = folders.filter(|folder| folder.is_dir());
    let folders: Vec<String> =
        folders.map(|folder| format!("--ucx {}", folder.display())).collect();
    // The others as packages of Python: NIXL's, and what UCXX brings.
    let packages = [Ucx::V1_21, Ucx::Nixl].map(|ucx| ucx.root(bench.layout()));
    let packages = std::env::join_paths(packages).expect("plain paths");
    let doctor = bench.ucx_gaudi(Ucx::V1_22).device(&device).env("PYTHONPATH", packages);
    let finished = doctor.words(&format!("doctor --json {}", folders.join(" "))).run().ok();
    let report = json(&finished);
    let of = |version: &str| {
        let checks = report["checks"].as_array().expect("a list").iter();
        let ucx = checks.filter(|finding| finding["check"] == "ucx");
        let found = ucx.clone().find(|finding| {
            finding["data"]["version"].as_str().is_some_and(|text| text.starts_with(version))
        });
        found.unwrap_or_else(|| panic!("no UCX {version}\n{}", finished.report()))
    };
    for (version, verbs, suffix, way, words) in [
        ("1.21", false, ".so.0", "preload", "by LD_PRELOAD"),
        ("1.22", false, ".so.0", "plugin-path", "by UCX_PLUGIN_PATH"),
        ("1.23", true, ".so.0.0.0", "plugin-path", " inside NIXL at "),
    ] {
        let finding = of(version);
        assert_eq!(finding["verdict"], "good", "{finding:#}");
        assert_eq!(finding["data"]["verbs"], verbs, "{finding:#}");
        assert_eq!(finding["data"]["suffix"], suffix, "{finding:#}");
        assert_eq!(finding["data"]["way"], way, "{finding:#}");
        assert!(finding["found"].as_str().expect("text").contains(words), "{finding:#}");
    }
    if bench.layout().old_ucx().is_dir() {
        let old = of("1.20");
        assert_eq!((&old["verdict"], &old["data"]["way"]), (&"warning".into(), &"refused".into()));
        assert!(old["remedy"].as_str().expect("text").contains("1.21"), "{old:#}");
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
    let listed = tool.words("run --soft=2,import --tuned --").arg(info).arg("-d").run().ok();
    assert!(listed.stdout.contains("Component: gaudi_copy"), "{}", listed.report());
    assert!(listed.stderr.contains("UCX_SYSV_SEG_SIZE=32832"), "{}", listed.report());
    assert!(listed.stderr.contains("SOFT_GAUDI_LENIENT=import"), "{}", listed.report());
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
    let timeline = json(&tool(Ucx::V1_22, &device, &format!("trace export {one}")).ok());
    let events = timeline["traceEvents"].as_array().expect("events");
    let copies = |way: &dyn Fn(&str) -> bool| {
        events.iter().filter(|event| event["args"]["way"].as_str().is_some_and(way)).count()
    };
    let recorded = std::fs::read_to_string(&one).expect("the recording");
    assert_eq!(copies(&|_| true), recorded.matches("hlthunk_command_submission\"").count());
    assert!(copies(&|way| way == "host to card") >= 22, "{timeline:#}");
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn check_card_moves_bytes_by_a_software_hca() {
    let bench = Workbench::from_env();
    let node = SoftNode::unique();
    let rdma = bench.layout().soft_gaudi().with_file_name("rdma");
    let folder = bench.layout().scratch().with_file_name(format!("rdma-{}", std::process::id()));
    let run = |devices: &str, dmabuf: &str| {
        let tool = bench.ucx_gaudi(Ucx::V1_22).env("LD_LIBRARY_PATH", &rdma);
        let tool = tool.env("SOFT_RDMA_DEVICES", devices).env("SOFT_RDMA_DIR", &folder);
        let tool = tool.env("SOFT_RDMA_DMABUF", dmabuf);
        let tool = tool.env("SOFT_GAUDI_NODE", node.name());
        let report = json(&tool.words("check-card --soft=1 --json").run());
        let checks = report["checks"].as_array().expect("a list").clone();
        checks.into_iter().find(|finding| finding["check"] == "hca").expect("a check")
    };
    let finding = run("2", "on");
    assert_eq!(finding["verdict"], "good", "{finding:#}");
    assert!(finding["found"].as_str().expect("text").contains("softrdma1"), "{finding:#}");
    assert!(finding["data"]["registered"].as_u64() >= Some(768 << 20), "a page: {finding:#}");
    assert_eq!(run("0", "on")["verdict"], "skipped");
    // It registers and completes, and what arrives is something else.
    let garbage = run("1", "garbage");
    assert_eq!(garbage["verdict"], "bad", "{garbage:#}");
    let found = garbage["found"].as_str().expect("text");
    assert!(found.contains("wrong, as the card reads them"), "{garbage:#}");
    let refused = run("1", "refused");
    assert_eq!(refused["verdict"], "warning", "{refused:#}");
    assert!(refused["remedy"].as_str().expect("text").contains("PCI switch"), "{refused:#}");
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn explain_tells_the_protocol_in_words() {
    let bench = Workbench::from_env();
    let explain = |words: &str, device: &Device| tool(Ucx::V1_22, device, words);
    let device = Device::Software(SoftNode::lenient());
    let told = json(&explain("explain tag gaudi gaudi 4M --json", &device).ok());
    assert_eq!(told["size"], 4 << 20);
    let steps = told["steps"].as_array().expect("a list");
    assert_eq!((steps.len(), &steps[0]["who"]), (2, &"sender".into()), "{told:#}");
    assert!(steps[1]["transports"].as_str().expect("text").contains("gaudi_ipc"), "{told:#}");
    let strict = || SoftNode::unique().with("SOFT_GAUDI_LENIENT", "");
    let put = "explain put gaudi gaudi 1M --json";
    let told = json(&explain(put, &Device::Software(strict())).ok());
    assert!(told.to_string().contains("through shared host memory"), "a relay: {told:#}");
    // Without gaudi_ipc put is emulated, unless it is told to be pipelined.
    let emulated = Device::Software(strict().with("UCX_TLS", "^gaudi_ipc"));
    let told = json(&explain(put, &emulated).ok());
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

fn two_cards() -> Device {
    Device::Software(SoftNode::lenient().with("SOFT_GAUDI_DEVICES", "2"))
}

#[test]
fn bench_measures_with_verified_bytes_and_its_files_compare() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (saved, csv) = (path("a.json"), path("a.csv"));
    let words = format!(
        "bench --ops tag --mem gaudi:gaudi --sizes 8,64K -n 2 --iterations 3 --save {saved} --csv {csv}"
    );
    let finished = tool(Ucx::V1_22, &two_cards(), &words).ok();
    let rows = finished.stdout.lines().filter(|line| line.ends_with("verified")).count();
    assert_eq!(rows, 4, "host:host is the floor, of each size: {}", finished.report());
    let read = |file: &str| std::fs::read_to_string(file).expect("written");
    let mut results: serde_json::Value = serde_json::from_str(&read(&saved)).expect("JSON");
    assert_eq!(results["cells"].as_array().map(Vec::len), Some(4), "{results:#}");
    assert_eq!(results["cells"][0]["rounds"].as_array().map(Vec::len), Some(2), "{results:#}");
    assert_eq!(read(&csv).lines().count(), 5);
    let compare = |other: &str| {
        tool(Ucx::V1_22, &two_cards(), &format!("bench compare --json {saved} {other}"))
    };
    let same = json(&compare(&saved).ok());
    let card = "software Gaudi, no card involved";
    assert_eq!((&same["worse"], &same["cards"]), (&0.into(), &serde_json::json!([card, card])));
    // Slower than any round, and one of the cells is gone.
    let slower = path("b.json");
    let cells = results["cells"].as_array_mut().expect("a list");
    cells.truncate(3);
    for cell in cells {
        for (key, factor) in [("gbps", 1e-3), ("latency_us", 1e3)] {
            cell[key] = serde_json::json!(cell[key].as_f64().expect("a number") * factor);
        }
    }
    std::fs::write(&slower, results.to_string()).expect("written");
    let end = compare(&slower);
    assert_eq!(end.status.and_then(|status| status.code()), Some(1), "{}", end.report());
    assert_eq!(json(&end)["worse"], 3, "{}", end.report());
    let end = compare(&csv);
    assert_eq!(end.status.and_then(|status| status.code()), Some(3), "{}", end.report());
}

#[test]
fn bench_names_the_model_of_a_card_whose_times_are_modelled() {
    let node = SoftNode::unique().with("SOFT_GAUDI_CLOSE_TIME", "10");
    let device = Device::Software(node.with("SOFT_GAUDI_MODEL", "gaudi2,slow=3"));
    let words = "bench --ops tag --mem host:gaudi --sizes 8 -n 1 --iterations 1";
    let end = tool(Ucx::V1_22, &device, words).ok();
    let label = "software Gaudi with modelled times (gaudi2,slow=3), no card involved";
    assert!(end.stdout.contains(label), "{}", end.report());
    let results = json(&tool(Ucx::V1_22, &device, &format!("{words} --json")).ok());
    assert_eq!((&results["software"], &results["model"]), (&true.into(), &"gaudi2,slow=3".into()));
}

#[test]
fn bench_ends_at_ctrl_c_with_the_results_until_then() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = folder.path().join("a.json");
    let device = two_cards();
    let words = "bench --ops tag --mem host:gaudi --sizes 8 -n 100 --iterations 2 --json --save";
    let bench =
        Workbench::from_env().ucx_gaudi(Ucx::V1_22).device(&device).words(words).arg(&saved);
    let running = bench.start();
    // Children come and go with each step; the second shows that one step was done.
    let seen = std::sync::Mutex::new(std::collections::BTreeSet::new());
    let several = running.wait_until(|children| {
        let mut seen = seen.lock().expect("no panic");
        seen.extend(children.iter().copied());
        seen.len() > 12
    });
    assert!(several, "it measures");
    // SAFETY: sends a signal to our own child.
    unsafe { libc::kill(i32::try_from(running.id()).expect("an id"), libc::SIGINT) };
    let end = running.finish(std::time::Duration::from_secs(30));
    assert_eq!(end.status.and_then(|status| status.code()), Some(130), "{}", end.report());
    let results = json(&end);
    assert_eq!(results["interrupted"], true, "{}", end.report());
    assert!(results["cells"].as_array().is_some_and(|cells| !cells.is_empty()), "{}", end.report());
    let kept: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(saved).expect("saved")).expect("JSON");
    assert_eq!(kept, results);
}

#[test]
fn bench_without_a_card_says_what_is_missing() {
    let end =
        tool(Ucx::V1_22, &Device::cards(0), "bench --ops tag --mem host:gaudi --sizes 8 -n 1");
    assert_eq!(end.status.and_then(|status| status.code()), Some(3), "{}", end.report());
    assert!(end.stderr.contains("tag host:gaudi did not run"), "{}", end.report());
    assert!(end.stderr.contains("the driver reports no card"), "{}", end.report());
}

/// As on a machine with a distribution's Open MPI, whose UCX comes first.
#[test]
fn bench_passes_over_a_ucx_that_is_too_old() {
    let bench = Workbench::from_env();
    let (old, good) = (bench.layout().old_ucx(), Ucx::V1_22.root(bench.layout()));
    if !old.is_dir() {
        println!("skipped: no UCX 1.20 here");
        return;
    }
    let words = "bench --ops tag --mem host:host --sizes 8 -n 1 --iterations 1";
    let tool = bench.ucx_gaudi(Ucx::V1_22).device(&two_cards()).words(words);
    let end = tool.env("LD_LIBRARY_PATH", old).env("PYTHONPATH", good).run().ok();
    assert!(end.says(&["UCX 1.20", "too old: taking UCX 1.22.0"]), "{}", end.report());
}

#[test]
fn run_puts_the_software_hca_under_a_program() {
    let bench = Workbench::from_env();
    let folder = Ucx::Nixl.lib_dirs(bench.layout()).remove(0);
    let check = bench.layout().bin().join("ucp-check");
    let words = format!(
        "run --soft=2 --soft-rdma=2 -- {} pair --plain --ops put --mem gaudi:gaudi --sizes 64K --ucx {}",
        check.display(),
        folder.display()
    );
    let rdma = tempfile::tempdir().expect("a folder");
    let run = bench.ucx_gaudi(Ucx::Nixl).device(&two_cards()).words(&words);
    let run = run
        .env("UCX_TLS", "rc_verbs,ud_verbs:aux,gaudi_cpy")
        .env("SOFT_RDMA_DIR", rdma.path().join("n"));
    let end = run.run().ok();
    assert!(end.stderr.contains("SOFT_RDMA_DEVICES=2"), "{}", end.report());
    assert!(end.stdout.contains("2 passed, 0 failed"), "{}", end.report());
}

/// Who holds a card is told here, and not to whom the report is sent.
#[test]
fn a_saved_report_of_check_card_names_no_process() {
    let folder = tempfile::tempdir().expect("a folder");
    let saved = folder.path().join("report.json");
    let device = Device::cards(1);
    let holder = e2e::client(Ucx::V1_22, &device, "memory hold").start();
    let Device::Software(node) = &device else { unreachable!("made above") };
    assert!(holder.wait_until(|_| node.cards_opened() == 1), "the card was not taken");
    let end = tool(Ucx::V1_22, &device, &format!("check-card --save {}", saved.display()));
    assert_eq!(end.status.and_then(|status| status.code()), Some(1), "{}", end.report());
    let pid = format!("ucp-check (pid {})", holder.id());
    assert!(end.stdout.contains(&pid), "{}", end.report());
    let saved = std::fs::read_to_string(saved).expect("saved");
    assert!(!saved.contains("ucp-check") && saved.contains("<process> (pid"), "{saved}");
}

/// Two hosts, as far as the tool is concerned: it knows the other one by an address only.
#[test]
fn bench_measures_to_another_host() {
    let (bench, device) = (Workbench::from_env(), Device::cards(2));
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr());
    let address = free.expect("a free port").to_string();
    let words = |peer: &str| {
        format!(
            "bench --peer {peer} --ops tag,get --mem gaudi:gaudi --sizes 8,64K -n 1 --iterations 2 --json"
        )
    };
    let alone = tool(Ucx::V1_22, &device, &words(&address)).refused();
    assert!(alone.says(&["cannot connect to", &address]), "{}", alone.report());
    let serve =
        bench.ucx_gaudi(Ucx::V1_22).device(&device).words(&format!("bench serve {address}"));
    let serve = serve.start();
    // The first peer sends no plan: the next one is served all the same.
    assert!(serve.wait_until(|_| std::net::TcpStream::connect(&address).is_ok()));
    let report = json(&tool(Ucx::V1_22, &device, &words(&address)).ok());
    let cells = report["cells"].as_array().expect("a list");
    assert_eq!((cells.len(), &report["peer"]), (8, &address.clone().into()), "{report:#}");
    for cell in cells {
        let measured = cell["gbps"].as_f64().is_some_and(|gbps| gbps > 0.0);
        assert!(cell["verified"] == true && measured && cell["latency_us"].is_f64(), "{cell:#}");
    }
    serve.signal(rustix::process::Signal::INT);
    let end = serve.finish(std::time::Duration::from_secs(20));
    assert_eq!(end.status.and_then(|status| status.code()), Some(130), "{}", end.report());
    assert!(end.says(&["no plan came"]) && end.says(&[": done"]), "{}", end.report());
}
