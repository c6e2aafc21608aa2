//! Stock UCX on the software HCA: NIXL's UCX, its own InfiniBand module, verified bytes.
//!
//! Needs what `cargo xtask setup` and `cargo xtask build` lay out below `target`; skipped with a
//! reason where that is missing.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A node of its own, removed at the end.
struct Node(PathBuf);

impl Node {
    fn new(name: &str) -> Self {
        let folder = PathBuf::from(format!("/tmp/soft-rdma-ucx-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        Self(folder)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(self.0.with_extension("stats"));
    }
}

fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below target")
}

/// What is missing to run UCX, if something is.
fn missing() -> Option<PathBuf> {
    let needed = [
        "dist/lib/ucx-gaudi/soft/rdma/libibverbs.so.1",
        "dist/lib/ucx-gaudi/soft/gaudi/libhl-thunk.so",
        "dist/lib/ucx-gaudi/plugins/libuct_gaudi.so",
        "dist/bin/ucp-check",
        "stock/nixl/nixl_cu12.libs/ucx/libuct_ib.so.0.0.0",
    ];
    needed.map(|below| target().join(below)).into_iter().find(|path| !path.exists())
}

/// Runs `ucp-check pair` and returns the sums of the counters of its processes.
fn pair(name: &str, arguments: &[&str]) -> Option<impl Fn(&str) -> u64> {
    if let Some(path) = missing() {
        eprintln!(
            "skipped: {} is not there (cargo xtask setup, cargo xtask build)",
            path.display()
        );
        return None;
    }
    let node = Node::new(name);
    let stats = node.0.with_extension("stats");
    let _ = std::fs::remove_file(&stats);
    let dist = target().join("dist");
    let soft = dist.join("lib/ucx-gaudi/soft");
    let stock = target().join("stock/nixl");
    // NIXL's UCX would load the machine's libefa, where there is one, and crash at exit.
    let layout = e2e::Layout::new(target());
    layout.hide_rdma_libraries().expect("the folder is made");
    let libraries = [layout.no_rdma(), stock.join("nixl_cu12.libs"), soft.join("gaudi")];
    let output = Command::new(dist.join("bin/ucp-check"))
        .args(["pair", "--plain", "--ucx"])
        .arg(&stock)
        .args(arguments)
        .env("LD_PRELOAD", soft.join("rdma/libibverbs.so.1"))
        .env("LD_LIBRARY_PATH", std::env::join_paths(libraries).expect("no colons"))
        .env("UCX_PLUGIN_PATH", dist.join("lib/ucx-gaudi/plugins"))
        .env("SOFT_GAUDI_NODE", format!("rdma-{}-{name}", std::process::id()))
        .env("SOFT_RDMA_DIR", &node.0)
        .env("SOFT_RDMA_STATS", &stats)
        .output()
        .expect("ucp-check runs");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
    let counters = std::fs::read_to_string(&stats).expect("counters were written");
    Some(move |name: &str| {
        let key = format!("\"{name}\":");
        let values = counters.lines().filter_map(|line| line.split_once(&key)).map(|(_, rest)| {
            let end = rest.find([',', '}']).expect("JSON");
            rest[..end].parse::<u64>().expect("a number")
        });
        values.sum()
    })
}

const SIZES: &str = "0,1,16,113,5001,64K+1,1M+7";

#[test]
fn host_memory_over_rc_arrives_in_one_copy() {
    let arguments =
        ["--mem", "host:host", "--sizes", SIZES, "--env", "UCX_TLS=rc_verbs,ud_verbs:aux"];
    let Some(counter) = pair("rc", &arguments) else { return };
    assert!(counter("direct_copies") > 0);
    assert!(counter("direct_bytes") > 10 * counter("stream_bytes"));
    assert_eq!(counter("access_errors"), 0);
}

#[test]
fn host_memory_over_ud_arrives() {
    let arguments = ["--mem", "host:host", "--sizes", SIZES, "--env", "UCX_TLS=ud_verbs"];
    let Some(counter) = pair("ud", &arguments) else { return };
    assert!(counter("datagrams") > 0);
    assert_eq!(counter("requests"), 0);
}

#[test]
fn gaudi_memory_is_registered_by_dmabuf_and_arrives_in_one_copy() {
    let arguments = [
        "--ops=put,get,tag",
        "--mem=gaudi:gaudi,host:gaudi,gaudi:host",
        "--sizes",
        SIZES,
        "--env=UCX_TLS=rc_verbs,ud_verbs:aux,gaudi_cpy",
    ];
    let Some(counter) = pair("gaudi", &arguments) else { return };
    assert!(counter("dmabuf_regions") > 0);
    assert!(counter("direct_bytes") > 1 << 20);
    assert_eq!(counter("access_errors"), 0);
}

#[test]
fn two_hosts_exchange_host_and_gaudi_memory_over_tcp() {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let nodes = format!("--env=SOFT_RDMA_NODES=1=127.{a}.{b}.{c}:24000,2=127.{a}.{b}.{c}:26000");
    let arguments = [
        "--ops=put,get,tag",
        "--sizes",
        SIZES,
        "--env=UCX_TLS=rc_verbs,ud_verbs:aux,gaudi_cpy",
        "--env=1:SOFT_RDMA_NODE=2",
        &nodes,
    ];
    let Some(counter) = pair("tcp", &arguments) else { return };
    assert!(counter("dmabuf_regions") > 0);
    assert!(counter("stream_bytes") > 1 << 20);
}
