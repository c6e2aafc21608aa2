//! A guest in UCX's house: programs that do not care about Gaudi, and features under which a careless
//! transport is known to crash stock UCX, each as its regression test.

use e2e::{Device, Perftest, SoftNode, Ucx, Workbench};

#[track_caller]
fn works(test: Perftest) {
    let pair = test.run().unwrap_or_else(|error| panic!("{error:#}"));
    pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
}

fn tag(memory: &str, options: &str) -> Perftest {
    Perftest::new(&Workbench::from_env(), "tag_lat", 4096)
        .iterations(100, 10)
        .plugin()
        .both(|tool| tool.words(&format!("-m {memory}")).words(options))
}

/// A copy transport without an event fd leaves a lane empty that UCX then dereferences.
#[test]
fn wakeup_feature_with_gaudi_memory() {
    works(tag("gaudi", "-I").device(&Device::software()));
}

#[test]
fn wakeup_feature_with_host_memory_only() {
    works(tag("host", "-I").device(&Device::software()));
}

#[test]
fn sleeping_worker_with_gaudi_memory() {
    works(tag("gaudi", "-E sleep").device(&Device::software()));
}

#[test]
fn peer_error_mode_with_gaudi_memory() {
    works(tag("gaudi", "-e").device(&Device::software()));
}

#[test]
fn host_only_program_is_not_disturbed() {
    works(tag("host", "").device(&Device::software()));
}

/// The plugin loaded on one side only: transports are compared by name and must not be mistaken.
#[test]
fn peer_without_plugin_talks_to_peer_with_it() {
    let device = Device::software();
    for plugin_on_server in [true, false] {
        works(Perftest::new(&Workbench::from_env(), "tag_bw", 65536).iterations(100, 10).sides(
            |server| if plugin_on_server { server.plugin().device(&device) } else { server },
            |client| if plugin_on_server { client } else { client.plugin().device(&device) },
        ));
    }
}

/// One card and two processes that want one each: the second is refused in words.
#[test]
fn second_process_on_the_only_card_is_refused_in_words() {
    let device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "1"));
    let pair = tag("gaudi", "").device(&device).run().unwrap_or_else(|error| panic!("{error:#}"));
    assert!(!pair.crashed(), "{}\n{}", pair.client.report(), pair.server.report());
    assert!(pair.figures().is_err(), "two owners of one card\n{}", pair.client.report());
}

/// The same with host memory only: nobody needs the card, so nobody may miss it.
#[test]
fn busy_card_does_not_disturb_host_traffic() {
    let device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "1"));
    works(tag("host", "").device(&device));
}

#[test]
fn two_processes_started_alike_take_two_cards() {
    let device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2"));
    works(tag("gaudi", "").device(&device));
}

/// Loading and listing must not create anything on the machine: cards stay closed until used.
#[test]
fn listing_opens_no_card() {
    let device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "1"));
    let bench = Workbench::from_env();
    let held = bench
        .tool(Ucx::V1_22, "ucx_perftest")
        .plugin()
        .device(&device)
        .words("-l -f -t tag_lat -m gaudi -s 8 -n 1000000000 -w 1")
        .start();
    // While that process owns the only card, listing still shows it, and needs nothing of it.
    let listing = bench.tool(Ucx::V1_22, "ucx_info").plugin().device(&device).arg("-d").run().ok();
    assert!(listing.stdout.contains("Memory domain: gaudi_copy"), "{}", listing.report());
    drop(held);
}
