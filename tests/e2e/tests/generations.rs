//! The same plugin on other generations of the card.

use e2e::{Device, Perftest, SoftNode, stock};

fn generation(name: &str) -> Device {
    Device::Software(SoftNode::unique().with("SOFT_GAUDI_GENERATION", name))
}

#[test]
fn gaudi1_copies() {
    for size in [8, 1 << 20] {
        Perftest::on(&generation("gaudi1"), "tag_bw", size).words("-m gaudi").works();
    }
}

/// The driver of that generation takes no copies from us: no copy transport, and the reason.
#[test]
fn gaudi3_has_no_copy_transport_and_says_why() {
    let device = generation("gaudi3");
    let info =
        |level| stock("ucx_info", &device, "-u rt -w").env("UCX_LOG_LEVEL", level).run().ok();
    let (quiet, loud) = (info("warn"), info("info"));
    assert!(!quiet.stdout.contains("gaudi_cpy/gaudi_copy"), "{}", quiet.report());
    let reason = loud.text().to_lowercase();
    let reason = reason.lines().any(|line| line.contains("info") && line.contains("gaudi3"));
    assert!(reason, "{}", loud.report());
}

/// A framework that has the card copies for it.
#[test]
fn gaudi3_has_ipc() {
    let listed = stock("ucx_info", &generation("gaudi3"), "-d").run().ok();
    assert!(listed.stdout.contains("Transport: gaudi_ipc"), "{}", listed.report());
}

#[test]
fn gaudi3_leaves_host_traffic_alone() {
    Perftest::on(&generation("gaudi3"), "tag_bw", 65536).works();
}

/// Without a copy transport stock `ucx_perftest` would try for ever: our allocator refuses first.
#[test]
fn gaudi3_perftest_is_refused_with_the_reason() {
    let words = "-l -t tag_lat -m gaudi -s 8 -n 10";
    let end = stock("ucx_perftest", &generation("gaudi3"), words).run().refused();
    assert!(end.stdout.contains("a Gaudi3 takes none"), "{}", end.report());
}
