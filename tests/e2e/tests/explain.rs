//! `ucx-gaudi explain --pid`: what a running process moved, and what its UCX would choose with its settings.

use std::os::unix::process::CommandExt;

use e2e::nixl::kv_cache;
use e2e::{Device, Finished, Running, Ucx, Workbench};

fn explain(words: &str) -> Finished {
    Workbench::from_env().ucx_gaudi(Ucx::V1_22).words(&format!("explain {words}")).run()
}

fn json(finished: &Finished) -> serde_json::Value {
    let read = serde_json::from_str(&finished.stdout);
    read.unwrap_or_else(|error| panic!("{error}\n{}", finished.report()))
}

/// The processes of a job that have moved bytes of a card, when there are so many. They are stopped then: they poll, and would
/// take the processors from what is tested.
fn movers(job: &Running, count: usize) -> Vec<u32> {
    let found = std::sync::Mutex::new(Vec::new());
    let moving = |pid: &u32| {
        stats_reader::read(*pid).is_ok_and(|counters| counters.get("h2d_bytes") > Some(1 << 20))
    };
    let all = job.wait_until(|pids| {
        let now: Vec<u32> = pids.iter().copied().filter(moving).collect();
        let enough = now.len() >= count;
        *found.lock().expect("no panic") = now;
        enough
    });
    assert!(all, "the job ended");
    let found = found.into_inner().expect("no panic");
    for pid in &found {
        // SAFETY: sends a signal to our own child.
        unsafe { libc::kill(i32::try_from(*pid).expect("an id"), libc::SIGSTOP) };
    }
    found
}

fn advice(report: &serde_json::Value) -> String {
    report["processes"][0]["advice"].to_string()
}

#[test]
fn counted_bytes_and_choices_of_a_running_client_are_told() {
    let bench = Workbench::from_env();
    let words = "pair --plain --ops put --mem gaudi:gaudi --sizes 1M --iters 10000000";
    for (device, tls, found) in [
        (Device::not_importing(2), "all", "gaudi_ipc relays"),
        (Device::importing(2), "^gaudi_ipc", "UCX_TLS=^gaudi_ipc leaves gaudi_ipc out"),
    ] {
        let job = bench.client(Ucx::V1_22, &device, words).env("UCX_TLS", tls).start();
        let pid = movers(&job, 2)[0];
        let told = json(&explain(&format!("--pid {pid} --json")).ok());
        let process = &told["processes"][0];
        assert_eq!((&process["pid"], &process["nixl"]), (&pid.into(), &false.into()), "{told:#}");
        assert!(process["ucx"].as_str().is_some_and(|ucx| ucx.starts_with("1.22")), "{told:#}");
        assert!(process["observed"]["h2d_bytes"].as_u64() > Some(1 << 20), "{told:#}");
        // Put, get, tag and am, three pairs of memories, on this node and another.
        let choices = process["predicted"].as_array().expect("a list");
        assert_eq!(choices.len(), 4 * 3 * 2, "{told:#}");
        let over_ipc = |choice: &&serde_json::Value| choice["transports"] == "gaudi_ipc/gaudi_ipc";
        let ipc = choices.iter().filter(over_ipc).count();
        assert_eq!(ipc, if tls == "all" { 6 } else { 0 }, "put and get: {told:#}");
        assert!(advice(&told).contains(found), "{told:#}");
        assert!(advice(&told).contains("no module for InfiniBand"), "{told:#}");
        // The job has its cards to itself.
        assert!(!job.has_ended());
    }
}

#[test]
fn agents_of_nixl_are_explained_and_two_nodes_compared() {
    let device = Device::importing(2);
    let Some(tool) = kv_cache(&device, "--layers 1 --blocks 64 --rounds 1000000") else { return };
    let job = tool.start();
    let pids = movers(&job, 2);
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (here, there) = (file("here.json"), file("there.json"));
    let words = format!("--pid {} --pid {} --size 64K --save {here}", pids[0], pids[1]);
    let told = explain(&words).ok();
    assert!(told.stdout.contains("endpoints as NIXL makes them"), "{}", told.report());
    assert!(told.stdout.contains("UCX 1.23"), "{}", told.report());
    assert!(!told.stdout.contains('≠'), "both have the same settings: {}", told.report());
    drop(job);
    let saved = std::fs::read_to_string(&here).expect("saved");
    let mut report: serde_json::Value = serde_json::from_str(&saved).expect("JSON");
    assert_eq!(report["processes"].as_array().map(Vec::len), Some(2), "{report:#}");
    explain(&format!("--compare {here} {here}")).ok();
    report["processes"][0]["host"] = "second".into();
    report["processes"][0]["settings"]["UCX_TLS"] = "tcp,gaudi_cpy".into();
    std::fs::write(&there, report.to_string()).expect("written");
    let end = explain(&format!("--compare {here} {there}"));
    assert_eq!(end.status.and_then(|status| status.code()), Some(1), "{}", end.report());
    assert!(end.says(&["≠ UCX_TLS", "on second", "tcp,gaudi_cpy"]), "{}", end.report());
    std::fs::write(&there, "{}").expect("written");
    let end = explain(&format!("--compare {here} {there}"));
    assert!(end.refused().stderr.contains("no report of"));
}

#[test]
fn processes_that_cannot_be_explained_are_named_with_the_reason() {
    let bench = Workbench::from_env();
    let folder = tempfile::tempdir().expect("a folder");
    let linked = folder.path().join("linked");
    std::fs::copy("/bin/sleep", &linked).expect("copied");
    let mut program = std::fs::File::options().append(true).open(&linked).expect("opened");
    std::io::Write::write_all(&mut program, b"ucp_worker_create").expect("written");
    drop(program);
    let sleep = |program: &std::path::Path| bench.program(Ucx::V1_22, program).arg("100").start();
    let server = bench.tool(Ucx::V1_22, "ucx_perftest").words("-p 0").start();
    let ended = {
        let mut child = std::process::Command::new("true").spawn().expect("runs");
        child.wait().expect("ended");
        child.id()
    };
    let (plain, linked) = (sleep("/bin/sleep".as_ref()), sleep(&linked));
    assert!(server.wait_until(|pids| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", pids[0]));
        maps.is_ok_and(|maps| maps.contains("libucp"))
    }));
    for (pid, reason) in [
        (ended, "does not exist"),
        (plain.id(), "has no UCX loaded"),
        (linked.id(), "linked into the program"),
        (server.id(), "but not the plugin"),
    ] {
        let end = explain(&format!("--pid {pid}")).refused();
        assert!(end.stderr.contains(reason), "{}", end.report());
    }
    let tool = bench.layout().bin().join("ucx-gaudi");
    let mut other = std::process::Command::new("setpriv");
    other.args(["--reuid", "65534", "--clear-groups", "--"]).arg(&tool).arg("explain");
    match other.args(["--pid", &server.id().to_string()]).output() {
        Ok(end) if !end.stderr.starts_with(b"setpriv:") => {
            let said = String::from_utf8_lossy(&end.stderr);
            assert!(said.contains("another user"), "{said}");
        }
        _ => {
            println!("skipped: only root can become another user, who must be able to run the tool")
        }
    }
    for words in ["--pid 1 put gaudi gaudi 8", "--save x put gaudi gaudi 8", "--compare x", ""] {
        let wrong = explain(words).refused();
        assert_eq!(wrong.status.and_then(|status| status.code()), Some(2), "{}", wrong.report());
        assert!(wrong.stderr.contains("explain --pid PID"), "{}", wrong.report());
    }
}

/// Its UCX would be loaded, with its environment: another user's code, run by root.
#[test]
fn a_process_of_another_user_is_refused_to_root() {
    // SAFETY: no arguments, no effects.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: only root can start a process of another user");
        return;
    }
    let mut other = std::process::Command::new("/bin/sleep");
    let mut other = other.arg("100").uid(65534).spawn().expect("root may start it");
    let end = explain(&format!("--pid {}", other.id()));
    other.kill().expect("our own child");
    other.wait().expect("ended");
    let end = end.refused();
    assert!(end.stderr.contains("belongs to another user"), "{}", end.report());
}
