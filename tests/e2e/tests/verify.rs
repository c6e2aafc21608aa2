//! Every byte, on both stock UCXes, with one and the same plugin binary: our verifying client in one
//! process, two processes, several threads and two copies of UCX at once.

use e2e::{Device, Row, Ucx, Workbench, client};

/// Runs the whole matrix, the largest size without variants, and holds it to having run each operation on
/// each memory pair.
#[track_caller]
fn whole_matrix(ucx: Ucx, version: &str) {
    let rows = |words| {
        let rows = client(ucx, &Device::software(), words).rows();
        rows.unwrap_or_else(|error| panic!("{error:#}"))
    };
    let rows =
        [rows("pair --iters 0 --max 17M"), rows("pair --iters 0 --plain --sizes 64M")].concat();
    for op in ["tag", "tag-unexpected", "stream", "am", "am-eager", "am-rndv", "put", "get"] {
        for (src, dst) in
            [("host", "host"), ("host", "gaudi"), ("gaudi", "host"), ("gaudi", "gaudi")]
        {
            let of_this =
                rows.iter().filter(|row| row.op == op && row.src == src && row.dst == dst);
            let of_this: Vec<&Row> = of_this.collect();
            let largest = of_this.iter().map(|row| row.size).max();
            assert!(of_this.len() >= 20, "{op} {src} → {dst} was run {} times", of_this.len());
            let wanted = if op.contains('-') { (16 << 20) + 1 } else { 64 << 20 };
            assert_eq!(largest, Some(wanted), "{op} {src} → {dst}");
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

macro_rules! passes {
    ($($(#[$doc:meta])* $name:ident: $ucx:expr, $words:literal;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            for ucx in $ucx {
                client(ucx, &Device::software(), $words).run().ok();
            }
        }
    )*};
}

passes! {
    /// Nothing tells UCX what the buffers are: wrong detection would crash or move wrong bytes.
    detection_of_memory_types_without_hints_in_loopback: Ucx::WITH_1_21, "loopback --max 1M";
    hints_of_memory_types_change_nothing: Ucx::WITH_1_21, "pair --hint --plain --sizes 0,1,4K,1M+3";
    memtype_cache_switched_off_changes_nothing:
        [Ucx::V1_21, Ucx::V1_22], "pair --plain --sizes 1,4K,1M+3 --env UCX_MEMTYPE_CACHE=n";
    every_operation_over_tcp:
        Ucx::WITH_1_21, "pair --plain --sizes 0,1,4K,1M+3 --env UCX_TLS=tcp,gaudi_cpy";
    every_operation_on_gaudi_gdr_alone:
        [Ucx::V1_22], "pair --plain --sizes 0,1,4K,1M+3 --env UCX_TLS=sm,gaudi";
    peer_error_mode: Ucx::WITH_1_21, "pair --peer-errors --plain --sizes 0,1,4K,1M+3";
    /// TAG and WAKEUP only: the context that crashes stock UCX when a copy transport has no event fd.
    sleeping_workers: Ucx::WITH_1_21, "wakeup --max 1M";
    multi_threaded_worker: Ucx::WITH_1_21, "threads --plain --max 1M";
    host_only_program_with_the_plugin_loaded: Ucx::WITH_1_21, "host-only --max 1M";
    /// The whole matrix in short; `--long` and releases run it with all sizes.
    every_operation_and_pair_on_1_21: [Ucx::V1_21], "pair --iters 0 --sizes 1,4097,64K,2M+13";
}

/// Every operation; a process dies for each, so each UCX has one size and memories of its own.
#[test]
fn killed_peer_shows_as_an_error() {
    for (ucx, memories, size) in
        [(Ucx::V1_22, "gaudi:gaudi,gaudi:host", "16M"), (Ucx::Nixl, "host:gaudi", "4096")]
    {
        let words = format!("peer-errors --mem {memories} --sizes {size}");
        client(ucx, &Device::software(), &words).run().ok();
    }
}

#[test]
fn two_copies_of_ucx_in_one_process() {
    let bench = Workbench::from_env();
    let other = Ucx::Nixl.root(bench.layout());
    for ucx in [Ucx::V1_22, Ucx::V1_21] {
        let tool = client(ucx, &Device::software(), "two-ucx --max 1M").arg("--ucx").arg(&other);
        // For the second copy, where the first has the preloaded library.
        tool.env("UCX_PLUGIN_PATH", bench.layout().plugins()).run().ok();
    }
}
