//! What the benches measure, measured briefly: that there are figures, not how good they are (a shared
//! machine's clock proves nothing in a test).

use std::process::Command;

use e2e::{Device, Perftest, Workbench};

#[track_caller]
fn measures(test: &Perftest) {
    let (_, figures) = test.works();
    // Not the bandwidth: of few small messages on a busy machine it is printed as 0.00.
    for figure in [figures.latency_us, figures.rate] {
        assert!(figure.is_finite() && figure > 0.0, "{figures:?}");
    }
}

#[test]
fn performance_smoke_of_host_latency_with_and_without_plugin() {
    measures(&Perftest::new(&Workbench::from_env(), "tag_lat", 8).iterations(1000, 100));
    measures(&Perftest::on(&Device::software(), "tag_lat", 8));
}

#[test]
fn performance_smoke_of_gaudi_bandwidth() {
    for size in [4096, 65536, 4 << 20] {
        measures(&Perftest::on(&Device::software(), "tag_bw", size).words("-m gaudi"));
    }
}

/// What a bench left behind: its results, and what it printed.
struct Bench {
    results: Vec<serde_json::Value>,
    stdout: String,
    stderr: String,
}

/// `cargo xtask bench NAME --quick --json FILE`: it ends well, and every figure is a positive number.
fn quick_bench(name: &str) -> Bench {
    // Panics with the remedy if something is not built.
    let bench = Workbench::from_env();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let json = folder.path().join("json");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // They describe this package; handed on, they make cargo rebuild crates that watch them.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_")) {
            command.env_remove(name);
        }
    }
    command.args(["xtask", "bench", name, "--quick", "--json"]).arg(&json);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.env("CARGO_TARGET_DIR", bench.layout().target());
    let output = command.output().expect("cargo runs");
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{stderr}");
    let results: Vec<serde_json::Value> =
        serde_json::from_str(&std::fs::read_to_string(json).expect("JSON")).expect("a list");
    for row in &results {
        let positive = |field: &str| row[field].as_f64().is_some_and(|value| value > 0.0);
        assert!(["value", "floor", "ratio"].into_iter().all(positive), "{row}");
    }
    Bench { results, stdout, stderr }
}

/// The whole bench, briefly: a figure for everything it promises.
#[test]
fn performance_smoke_of_the_copy_bench() {
    let Bench { results, stdout, stderr } = quick_bench("copy");
    for name in ["host to device, 64 KiB", "device to host, 1 MiB", "device to device, 64 MiB"] {
        let found = |row: &&serde_json::Value| {
            row["name"].as_str().is_some_and(|title| title.starts_with(name))
        };
        // With many outstanding, and alone.
        assert_eq!(results.iter().filter(found).count(), 2, "{name}\n{stderr}");
    }
    assert!(stdout.contains("put_short"), "{stdout}");
}

/// A figure and a protocol for every operation, pair of memories, size, UCX and variant.
#[test]
fn performance_smoke_of_the_cliffs_bench() {
    let Bench { results, stderr, .. } = quick_bench("cliffs");
    // And tag messages of the larger size with small fragments.
    assert_eq!(results.len(), 5 * 4 * 2 * 2 * 2 + 4 * 2, "{stderr}");
    let names: Vec<&str> = results.iter().filter_map(|row| row["name"].as_str()).collect();
    let silent: Vec<&&str> = names.iter().filter(|name| name.ends_with("not reported")).collect();
    assert!(silent.is_empty(), "no protocol: {silent:?}");
    assert!(names.iter().any(|name| name.ends_with("zero-copy (gaudi_ipc)")), "{names:?}");
}

/// Put and get with three floors, their latency, opens, the worst operation and the streams.
#[test]
fn performance_smoke_of_the_ipc_bench() {
    let Bench { results, stderr, .. } = quick_bench("ipc");
    assert_eq!(results.len(), 2 * (3 + 1) + 3 + 1 + 3, "{stderr}");
}

/// Two operations, two ways for Gaudi memory over the HCA and two inside the node.
#[test]
fn performance_smoke_of_the_processor_time_bench() {
    let Bench { results, stderr, .. } = quick_bench("processor-time");
    assert_eq!(results.len(), 2 * (2 + 2), "{stderr}");
}
