//! Every byte, on both stock UCXes, with one and the same plugin binary: our verifying client between
//! two processes, tag, stream, active message, put and get, host and Gaudi memory on either side.

use std::time::Duration;

use e2e::{Device, Finished, Row, Ucx, Workbench};

fn ucp_check(ucx: Ucx, arguments: &str) -> Finished {
    let bench = Workbench::from_env();
    bench
        .ucp_check(ucx)
        .plugin()
        .device(&Device::software())
        .words(arguments)
        .arg("--ucx")
        .arg(ucx.root(bench.layout()))
        .limit(Duration::from_secs(300))
        .run()
}

/// Runs the pair and holds it to having run each operation on each memory pair.
fn verify(ucx: Ucx, version: &str) {
    let file = std::env::temp_dir().join(format!("e2e-{}-{}.json", std::process::id(), ucx.name()));
    let end = ucp_check(ucx, &format!("pair --json {}", file.display()));
    let rows = Row::read(&file);
    let _ = std::fs::remove_file(&file);
    let end = end.ok();
    let rows = rows.unwrap_or_else(|error| panic!("{error:#}\n{}", end.report()));
    for op in ["tag", "stream", "am", "put", "get"] {
        for src in ["host", "gaudi"] {
            for dst in ["host", "gaudi"] {
                let of_this: Vec<&Row> = rows
                    .iter()
                    .filter(|row| row.op == op && row.src == src && row.dst == dst)
                    .collect();
                assert!(of_this.len() > 4, "{op} {src} → {dst} was run {} times", of_this.len());
                let wrong = of_this.iter().find(|row| !row.verified);
                assert!(wrong.is_none(), "{wrong:?}");
            }
        }
    }
    assert!(rows.iter().all(|row| row.ucx.starts_with(version)), "another UCX ran: {:?}", rows[0]);
}

#[test]
fn pair_on_stock_1_22() {
    verify(Ucx::V1_22, "1.22.");
}

#[test]
fn pair_on_the_ucx_inside_nixl() {
    verify(Ucx::Nixl, "1.23.");
}
