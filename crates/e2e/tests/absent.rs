//! No driver library, or no device: UCX works as if we were not there, silently, and says why on
//! request, in one line.

use e2e::{Device, Finished, Listing, SoftNode, Ucx, Workbench};

/// The two ways of having no Gaudi. The first cannot be had where the loader finds a real driver
/// library by itself.
fn absences() -> Vec<(&'static str, Device)> {
    let no_device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "0"));
    let mut absences = vec![("no device", no_device)];
    if Device::driver_library(std::path::Path::new("/")).is_some() {
        println!("skipped: `no library`, because this machine has a driver library");
    } else {
        absences.push(("no library", Device::None));
    }
    absences
}

fn listing(device: &Device, level: Option<&str>, plugin: bool) -> Finished {
    let mut tool = Workbench::from_env().tool(Ucx::V1_22, "ucx_info").device(device).arg("-d");
    if plugin {
        tool = tool.plugin();
    }
    if let Some(level) = level {
        tool = tool.env("UCX_LOG_LEVEL", level);
    }
    tool.run().ok()
}

#[test]
fn without_gaudi_ucx_is_as_if_we_were_not_there() {
    let without = listing(&Device::None, None, false);
    for (what, device) in absences() {
        let with = listing(&device, None, true);
        // UCX logs to standard output: were anything printed, it would show in one of the two.
        assert_eq!(
            Listing::of(&with.stdout).steady(),
            Listing::of(&without.stdout).steady(),
            "{what}"
        );
        assert_eq!(with.stderr, "", "{what}");
    }
}

#[test]
fn reason_for_the_absence_is_one_line_at_info_level() {
    for (what, device) in absences() {
        let end = listing(&device, Some("info"), true);
        let text = format!("{}{}", end.stdout, end.stderr);
        let ours: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter(|line| line.to_lowercase().contains("gaudi"))
            .collect();
        assert_eq!(ours.len(), 1, "{what}: {ours:#?}");
        let expected = if what == "no library" { "libhl-thunk" } else { "device" };
        assert!(ours[0].contains("INFO") && ours[0].contains(expected), "{what}: {}", ours[0]);
    }
}

#[test]
fn gaudi_memory_without_gaudi_is_refused_by_ucx_in_words() {
    for (what, device) in absences() {
        let end = Workbench::from_env()
            .tool(Ucx::V1_22, "ucx_info")
            .plugin()
            .device(&device)
            .words("-u r -m 1m,gaudi")
            .run();
        assert!(!end.crashed(), "{what}: {}", end.report());
        assert!(!end.stdout.contains("allocated 1M"), "{what}: {}", end.report());
    }
}

#[test]
fn host_traffic_runs_without_gaudi() {
    for (what, device) in absences() {
        let pair = e2e::Perftest::new(&Workbench::from_env(), "tag_bw", 65536)
            .iterations(1000, 10)
            .plugin()
            .device(&device)
            .run()
            .unwrap_or_else(|error| panic!("{what}: {error:#}"));
        pair.figures().unwrap_or_else(|error| panic!("{what}: {error:#}"));
    }
}
