//! What the benches measure, measured briefly: that there are figures, not how good they are (a shared
//! machine's clock proves nothing in a test).

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
