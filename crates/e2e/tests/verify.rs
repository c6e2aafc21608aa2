//! Every byte, on both stock UCXes, with one and the same plugin binary: our verifying client in one
//! process, two processes, several threads and two copies of UCX at once.

use std::path::PathBuf;

use e2e::{Device, Finished, Row, Tool, Ucx, Workbench};

/// The client on the given UCX, with a software Gaudi.
fn client(ucx: Ucx, device: &Device, arguments: &str) -> Tool {
    Workbench::from_env().client(ucx, device, arguments)
}

#[track_caller]
fn passes(ucx: Ucx, arguments: &str) -> Finished {
    client(ucx, &Device::software(), arguments).run().ok()
}

/// A file for results, removed at the end.
struct Results(PathBuf);

impl Results {
    fn new(ucx: Ucx) -> Self {
        let name = format!("e2e-{}-{}.json", std::process::id(), ucx.name());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs the whole matrix and holds it to having run each operation on each memory pair.
#[track_caller]
fn whole_matrix(ucx: Ucx, version: &str) {
    let results = Results::new(ucx);
    let end =
        client(ucx, &Device::software(), "pair --iters 0").arg("--json").arg(&results.0).run().ok();
    let rows = Row::read(&results.0).unwrap_or_else(|error| panic!("{error:#}\n{}", end.report()));
    for op in ["tag", "tag-unexpected", "stream", "am", "am-eager", "am-rndv", "put", "get"] {
        for (src, dst) in
            [("host", "host"), ("host", "gaudi"), ("gaudi", "host"), ("gaudi", "gaudi")]
        {
            let of_this: Vec<&Row> = rows
                .iter()
                .filter(|row| row.op == op && row.src == src && row.dst == dst)
                .collect();
            let largest = of_this.iter().map(|row| row.size).max();
            assert!(of_this.len() >= 20, "{op} {src} → {dst} was run {} times", of_this.len());
            assert_eq!(largest, Some(64 << 20), "{op} {src} → {dst}");
            let wrong = of_this.iter().find(|row| !row.verified);
            assert!(wrong.is_none(), "{wrong:?}");
        }
    }
    // Were the wrong libucp found, the other test would have been run twice.
    assert!(rows.iter().all(|row| row.ucx.starts_with(version)), "another UCX ran: {:?}", rows[0]);
}

#[test]
fn every_operation_pair_and_size_on_stock_1_22() {
    whole_matrix(Ucx::V1_22, "1.22.");
}

#[test]
fn every_operation_pair_and_size_on_the_ucx_inside_nixl() {
    whole_matrix(Ucx::Nixl, "1.23.");
}

/// Nothing tells UCX what the buffers are: wrong detection would crash or move wrong bytes.
#[test]
fn detection_of_memory_types_without_hints_in_loopback() {
    for ucx in Ucx::ALL {
        passes(ucx, "loopback --max 1M");
    }
}

#[test]
fn hints_of_memory_types_change_nothing() {
    for ucx in Ucx::ALL {
        passes(ucx, "pair --hint --plain --sizes 0,1,4K,1M+3");
    }
}

#[test]
fn memtype_cache_switched_off_changes_nothing() {
    passes(Ucx::V1_22, "pair --plain --sizes 1,4K,1M+3 --env UCX_MEMTYPE_CACHE=n");
}

#[test]
fn every_operation_over_tcp() {
    for ucx in Ucx::ALL {
        passes(ucx, "pair --plain --sizes 0,1,4K,1M+3 --env UCX_TLS=tcp,gaudi_cpy");
    }
}

#[test]
fn every_operation_on_gaudi_gdr_alone() {
    passes(Ucx::V1_22, "pair --plain --sizes 0,1,4K,1M+3 --env UCX_TLS=sm,gaudi");
}

#[test]
fn peer_error_mode() {
    for ucx in Ucx::ALL {
        passes(ucx, "pair --peer-errors --plain --sizes 0,1,4K,1M+3");
    }
}

#[test]
fn killed_peer_shows_as_an_error() {
    for ucx in Ucx::ALL {
        passes(ucx, "peer-errors");
    }
}

/// TAG and WAKEUP only: the context that crashes stock UCX when a copy transport has no event fd.
#[test]
fn sleeping_workers() {
    for ucx in Ucx::ALL {
        passes(ucx, "wakeup --max 1M");
    }
}

#[test]
fn multi_threaded_worker() {
    for ucx in Ucx::ALL {
        passes(ucx, "threads --plain --max 1M");
    }
}

#[test]
fn host_only_program_with_the_plugin_loaded() {
    for ucx in Ucx::ALL {
        passes(ucx, "host-only --max 1M");
    }
}

#[test]
fn two_copies_of_ucx_in_one_process() {
    let other = Ucx::Nixl.root(Workbench::from_env().layout());
    client(Ucx::V1_22, &Device::software(), "two-ucx --max 1M").arg("--ucx").arg(other).run().ok();
}
