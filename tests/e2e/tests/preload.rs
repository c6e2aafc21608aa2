//! UCX 1.21, which UCXX asks for: it has no `UCX_PLUGIN_PATH`, and other operation tables. The plugin comes in by a
//! preloaded library. Bytes, sharing and staging on it are in `verify.rs`, `ipc.rs` and `staging.rs`; what is refused or replaced, in
//! `foreign.rs`.

mod memory;

use e2e::{Device, Finished, Listing, Perftest, Ucx, Workbench};
use memory::Machine;

fn tool(program: &str, words: &str) -> Finished {
    let tool = Workbench::from_env().tool(Ucx::V1_21, program).plugin();
    tool.device(&Device::software()).words(words).run().ok()
}

#[test]
fn every_component_is_listed_once() {
    let end = tool("ucx_info", "-d");
    for name in ["gaudi_copy", "gaudi_gdr", "gaudi_ipc"] {
        let listed = Listing::of(&end.stdout).count(&format!("Component: {name}"));
        assert_eq!(listed, 1, "{name}: {}", end.report());
    }
    assert!(!end.says(&["WARN"]), "{}", end.report());
}

/// `ucx-gaudi run` does not know which UCX a program has: it sets what all of them need, and no UCX warns of what is for others.
#[test]
fn run_gives_every_ucx_the_plugin_and_none_warns() {
    let bench = Workbench::from_env();
    for ucx in [Ucx::V1_21, Ucx::V1_22] {
        let info = ucx.bin_dir(bench.layout()).expect("programs").join("ucx_info");
        let run = bench.ucx_gaudi(ucx).device(&Device::software()).words("run -q --");
        let end = run.arg(info).words("-u rt -w -m 1m,gaudi").run().ok();
        assert!(end.stdout.contains("with gaudi_copy"), "{}", end.report());
        assert!(!end.says(&["WARN"]), "{}", end.report());
    }
}

/// libuct_ib has its own modules loaded, without which a real mlx5 is served by plain verbs.
#[test]
fn a_ucx_that_needs_no_preload_loads_the_modules_of_its_modules() {
    let bench = Workbench::from_env();
    let words = "loopback --plain --ops tag --mem host:host --sizes 8";
    let check = bench.client(Ucx::Nixl, &Device::software(), words);
    for preload in [None, Some(bench.layout().preload())] {
        let check = check.clone().env("UCX_MODULE_LOG_LEVEL", "warn");
        let end = check.env("LD_PRELOAD", preload.unwrap_or_default()).run().ok();
        assert!(end.says(&["loaded", "libuct_ib_mlx5."]), "{}", end.report());
    }
}

#[test]
fn perftest_moves_gaudi_memory() {
    for (test, memory) in
        [("tag_bw", "gaudi"), ("ucp_put_bw", "host,gaudi"), ("ucp_get", "gaudi,host")]
    {
        let test = Perftest::with(Ucx::V1_21, &Device::software(), test, 1 << 20);
        let (pair, _) = test.words(&format!("-m {memory}")).works();
        assert!(!pair.client.says(&["WARN"]), "{}", pair.client.report());
    }
    let words =
        "-l -f -m gaudi -x gaudi_cpy -d gaudi_copy -n 100 -w 10 -t put_bw -D zcopy -s 1048576";
    tool("ucx_perftest", words);
}

#[test]
fn memory_domains_do_what_they_do_on_later_versions() {
    for what in ["attributes", "alloc", "register", "keys", "detect", "model --seed 1", "dmabuf"] {
        Machine::eight_cards().check(Ucx::V1_21, what).run().ok();
    }
}
