//! The same plugin on other generations of the card.

use e2e::{Device, Perftest, SoftNode, Ucx, Workbench};

fn generation(name: &str) -> Device {
    Device::Software(SoftNode::unique().with("SOFT_GAUDI_GENERATION", name))
}

#[test]
fn gaudi1_copies() {
    for size in [8, 1 << 20] {
        let pair = Perftest::new(&Workbench::from_env(), "tag_bw", size)
            .iterations(100, 10)
            .plugin()
            .device(&generation("gaudi1"))
            .both(|tool| tool.words("-m gaudi"))
            .run()
            .unwrap_or_else(|error| panic!("{error:#}"));
        pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
    }
}

/// The driver of that generation takes no copies from us: no copy transport, and the reason.
#[test]
fn gaudi3_has_no_copy_transport_and_says_why() {
    let bench = Workbench::from_env();
    let device = generation("gaudi3");
    let info = |level: &str| {
        bench
            .tool(Ucx::V1_22, "ucx_info")
            .plugin()
            .device(&device)
            .env("UCX_LOG_LEVEL", level)
            .words("-u rt -w")
            .run()
            .ok()
    };
    assert!(!info("warn").stdout.contains("gaudi_cpy/gaudi_copy"), "{}", info("warn").report());
    let loud = info("info");
    let reason = loud.stdout.lines().chain(loud.stderr.lines()).any(|line| {
        let line = line.to_lowercase();
        line.contains("info") && line.contains("gaudi3")
    });
    assert!(reason, "{}", loud.report());
}

#[test]
fn gaudi3_leaves_host_traffic_alone() {
    let pair = Perftest::new(&Workbench::from_env(), "tag_bw", 65536)
        .iterations(100, 10)
        .plugin()
        .device(&generation("gaudi3"))
        .run()
        .unwrap_or_else(|error| panic!("{error:#}"));
    pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
}

/// Without a copy transport stock `ucx_perftest` would try for ever: our allocator refuses first.
#[test]
fn gaudi3_perftest_is_refused_with_the_reason() {
    let end = Workbench::from_env()
        .tool(Ucx::V1_22, "ucx_perftest")
        .plugin()
        .device(&generation("gaudi3"))
        .words("-l -t tag_lat -m gaudi -s 8 -n 10")
        .run();
    assert!(!end.success() && !end.crashed(), "{}", end.report());
    assert!(end.stdout.contains("a Gaudi3 takes none"), "{}", end.report());
}
