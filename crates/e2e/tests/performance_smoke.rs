//! What the benches measure, measured briefly: that there are figures, not how good they are (a shared
//! machine's clock proves nothing in a test).

use std::path::Path;
use std::process::Command;

use e2e::{Device, Perftest, Workbench};

#[track_caller]
fn measures(test: Perftest) {
    let pair = test.run().unwrap_or_else(|error| panic!("{error:#}"));
    let figures = pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
    // Not the bandwidth: of few small messages on a busy machine it is printed as 0.00.
    for figure in [figures.latency_us, figures.rate] {
        assert!(figure.is_finite() && figure > 0.0, "{figures:?}");
    }
}

#[test]
fn performance_smoke_of_host_latency_with_and_without_plugin() {
    let bench = Workbench::from_env();
    let device = Device::software();
    measures(Perftest::new(&bench, "tag_lat", 8).iterations(1000, 100));
    measures(Perftest::new(&bench, "tag_lat", 8).iterations(1000, 100).plugin().device(&device));
}

#[test]
fn performance_smoke_of_gaudi_bandwidth() {
    let bench = Workbench::from_env();
    let device = Device::software();
    for size in [4096, 65536, 4 << 20] {
        measures(
            Perftest::new(&bench, "tag_bw", size)
                .iterations(20, 2)
                .plugin()
                .device(&device)
                .both(|tool| tool.words("-m gaudi")),
        );
    }
}

/// `cargo xtask bench NAME --quick --json FILE`.
fn quick_bench(bench: &Workbench, name: &str, json: &Path) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // They describe this package; handed on, they make cargo rebuild crates that watch them.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_")) {
            command.env_remove(name);
        }
    }
    command.args(["xtask", "bench", name, "--quick", "--json"]).arg(json);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command.env("CARGO_TARGET_DIR", bench.layout().target());
    command
}

/// The whole bench, briefly: a figure for everything it promises, as JSON and as CSV.
#[test]
fn performance_smoke_of_the_copy_bench() {
    // Panics with the remedy if something is not built.
    let bench = Workbench::from_env();
    let file = |ending: &str| {
        std::env::temp_dir().join(format!("copy-bench-{}.{ending}", std::process::id()))
    };
    let (json, csv) = (file("json"), file("csv"));
    let output = quick_bench(&bench, "copy", &json).arg("--csv").arg(&csv).output();
    let output = output.expect("cargo runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let (results, table) = (std::fs::read_to_string(&json), std::fs::read_to_string(&csv));
    let _ = (std::fs::remove_file(&json), std::fs::remove_file(&csv));
    assert!(output.status.success(), "{said}");

    let results: serde_json::Value =
        serde_json::from_str(&results.expect("JSON was written")).expect("well formed");
    let results = results.as_array().expect("a list");
    for name in ["host to device, 64 KiB", "device to host, 1 MiB", "device to device, 64 MiB"] {
        let found = |row: &&serde_json::Value| {
            row["name"].as_str().is_some_and(|title| title.starts_with(name))
        };
        // With many outstanding, and alone.
        assert_eq!(results.iter().filter(found).count(), 2, "{name}\n{said}");
    }
    for row in results {
        let positive = |field: &str| row[field].as_f64().is_some_and(|value| value > 0.0);
        assert!(["value", "floor", "ratio"].into_iter().all(positive), "{row}");
    }
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("of memcpy") && shown.contains("put_short"), "{shown}");
    let table = table.expect("CSV was written");
    assert_eq!(table.lines().count(), 1 + results.len(), "{table}");
}

/// A figure and a protocol for every operation, pair of memories, size, UCX and variant.
#[test]
fn performance_smoke_of_the_cliffs_bench() {
    let bench = Workbench::from_env();
    let json = std::env::temp_dir().join(format!("cliffs-bench-{}.json", std::process::id()));
    let output = quick_bench(&bench, "cliffs", &json).output().expect("cargo runs");
    let results = std::fs::read_to_string(&json);
    let _ = std::fs::remove_file(&json);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let results: serde_json::Value =
        serde_json::from_str(&results.expect("JSON was written")).expect("well formed");
    let results = results.as_array().expect("a list");
    // And tag messages of the larger size with small fragments.
    assert_eq!(results.len(), 5 * 4 * 2 * 2 * 2 + 4 * 2, "{said}");
    for row in results {
        let positive = |field: &str| row[field].as_f64().is_some_and(|value| value > 0.0);
        assert!(["value", "floor", "ratio"].into_iter().all(positive), "{row}");
        let name = row["name"].as_str().expect("a name");
        assert!(!name.ends_with("not reported"), "no protocol: {name}");
    }
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("worst:") && shown.contains("software emulation"), "{shown}");
}

/// Put and get beside three floors, their latency, opens, the worst operation and the streams.
#[test]
fn performance_smoke_of_the_ipc_bench() {
    let bench = Workbench::from_env();
    let json = std::env::temp_dir().join(format!("ipc-bench-{}.json", std::process::id()));
    let output = quick_bench(&bench, "ipc", &json).output().expect("cargo runs");
    let results = std::fs::read_to_string(&json);
    let _ = std::fs::remove_file(&json);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let results: serde_json::Value =
        serde_json::from_str(&results.expect("JSON was written")).expect("well formed");
    let results = results.as_array().expect("a list");
    assert_eq!(results.len(), 2 * (3 + 1) + 4 + 1 + 3, "{said}");
    for row in results {
        let positive = |field: &str| row[field].as_f64().is_some_and(|value| value > 0.0);
        assert!(["value", "floor", "ratio"].into_iter().all(positive), "{row}");
    }
}
