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

/// What a run of `ucp-check` left behind.
struct Run {
    node: Node,
    counters: String,
}

impl Run {
    /// A counter, summed over the processes.
    fn counter(&self, name: &str) -> u64 {
        let key = format!("\"{name}\":");
        let lines = self.counters.lines().filter_map(|line| line.split_once(&key));
        let number = |rest: &str| rest[..rest.find([',', '}'])?].parse::<u64>().ok();
        lines.map(|(_, rest)| number(rest).expect("JSON")).sum()
    }

    /// A counter of a port, as programs read it.
    fn port(&self, device: u32, name: &str) -> u64 {
        let output = Command::new("cat")
            .arg(format!("/sys/class/infiniband/softrdma{device}/ports/1/{name}"))
            .env("LD_PRELOAD", target().join("dist/lib/ucx-gaudi/soft/rdma/libibverbs.so.1"))
            .env("SOFT_RDMA_DIR", &self.node.0)
            .env("SOFT_RDMA_DEVICES", "64")
            .output()
            .expect("cat runs");
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
    }
}

/// Runs `ucp-check pair`, without the machine's own RDMA libraries.
fn pair(name: &str, arguments: &[&str]) -> Option<Run> {
    let layout = e2e::Layout::new(target());
    layout.hide_rdma_libraries().expect("the folder is made");
    pair_with(name, Some(layout.no_rdma()), arguments)
}

/// Runs `ucp-check pair` with a folder in front of the machine's libraries.
fn pair_with(name: &str, front: Option<PathBuf>, arguments: &[&str]) -> Option<Run> {
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
    let libraries = front.into_iter().chain([stock.join("nixl_cu12.libs"), soft.join("gaudi")]);
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
        // An ordinary user's limit is too low for UCX's own buffers.
        .env("SOFT_RDMA_MEMLOCK", "off")
        .output()
        .expect("ucp-check runs");
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&text));
    let counters = std::fs::read_to_string(&stats).expect("counters were written");
    Some(Run { node, counters })
}

const SIZES: &str = "0,1,16,113,5001,64K+1,1M+7";

#[test]
fn host_memory_over_rc_arrives_in_one_copy() {
    let arguments =
        ["--mem", "host:host", "--sizes", SIZES, "--env", "UCX_TLS=rc_verbs,ud_verbs:aux"];
    let Some(run) = pair("rc", &arguments) else { return };
    assert!(run.counter("direct_copies") > 0);
    assert!(run.counter("direct_bytes") > 10 * run.counter("stream_bytes"));
    assert_eq!(run.counter("access_errors"), 0);
}

/// NIXL's UCX has a module for EFA, which loads where the machine has libefa and asks it about every device.
#[test]
fn the_libefa_of_the_machine_takes_the_hca_for_none_of_its_own() {
    // SAFETY: a library of rdma-core; its constructors do nothing but register a driver.
    if unsafe { libc::dlopen(c"libefa.so.1".as_ptr(), libc::RTLD_LAZY) }.is_null() {
        eprintln!("skipped: no libefa.so.1 (Debian: ibverbs-providers)");
        return;
    }
    let arguments =
        ["--mem", "host:host", "--sizes", "64K+1", "--env", "UCX_TLS=rc_verbs,ud_verbs:aux"];
    let Some(run) = pair_with("libefa", None, &arguments) else { return };
    assert!(run.counter("direct_copies") > 0);
}

#[test]
fn host_memory_over_ud_arrives() {
    let arguments = ["--mem", "host:host", "--sizes", SIZES, "--env", "UCX_TLS=ud_verbs"];
    let Some(run) = pair("ud", &arguments) else { return };
    assert!(run.counter("datagrams") > 0);
    assert_eq!(run.counter("requests"), 0);
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
    let Some(run) = pair("gaudi", &arguments) else { return };
    assert!(run.counter("dmabuf_regions") > 0);
    assert!(run.counter("direct_bytes") > 1 << 20);
    assert_eq!(run.counter("access_errors"), 0);
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
    let Some(run) = pair("tcp", &arguments) else { return };
    assert!(run.counter("dmabuf_regions") > 0);
    assert!(run.counter("stream_bytes") > 1 << 20);
}

#[test]
fn the_hca_near_the_card_carries_the_bytes() {
    // Card 0 is on NUMA node 0, card 4 on the other.
    for (places, near, far) in [("0,4", 0, 1), ("4,0", 1, 0)] {
        let places = format!("--env=SOFT_RDMA_PLACES={places}");
        let arguments = [
            "--ops=put,get",
            "--mem=gaudi:gaudi",
            "--sizes=1M+7",
            "--env=UCX_TLS=rc_verbs,ud_verbs:aux,gaudi_cpy",
            "--env=SOFT_RDMA_DEVICES=2",
            &places,
        ];
        let Some(run) = pair("near", &arguments) else { return };
        // Two puts and two gets, each in one copy; only the handshake goes elsewhere.
        let direct = |device| run.port(device, "hw_counters/direct_bytes");
        assert!(direct(near) >= 4 * ((1 << 20) + 7), "{places}: {}", direct(near));
        assert_eq!(direct(far), 0, "{places}");
        assert!(run.port(near, "counters/port_xmit_data") >= 1 << 20);
    }
}
