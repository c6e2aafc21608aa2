//! No driver library, or no device: UCX works as if we were not there, silently, and says why on
//! request, in one line.

use e2e::{Device, Finished, Listing, Perftest, SoftNode, Ucx, Workbench, stock};

/// The two ways of having no Gaudi. The first cannot be had where the loader finds a real driver
/// library by itself.
fn absences() -> Vec<(&'static str, Device)> {
    let mut absences = vec![("no device", Device::cards(0))];
    if Device::driver_library(std::path::Path::new("/")).is_some() {
        println!("skipped: `no library`, because this machine has a driver library");
    } else {
        absences.push(("no library", Device::None));
    }
    absences
}

fn steady(end: &Finished) -> String {
    Listing::of(&end.stdout).steady()
}

#[test]
fn without_gaudi_ucx_is_as_if_we_were_not_there() {
    let without = Workbench::from_env().tool(Ucx::V1_22, "ucx_info").arg("-d").run().ok();
    for (what, device) in absences() {
        let with = stock("ucx_info", &device, "-d").run().ok();
        // UCX logs to standard output: were anything printed, it would show in one of the two.
        assert_eq!(steady(&with), steady(&without), "{what}");
        assert_eq!(with.stderr, "", "{what}");
    }
}

#[test]
fn reason_for_the_absence_is_one_line_at_info_level() {
    for (what, device) in absences() {
        let end = stock("ucx_info", &device, "-d").env("UCX_LOG_LEVEL", "info").run().ok();
        let text = end.text();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let ours: Vec<&str> = lines.filter(|line| line.to_lowercase().contains("gaudi")).collect();
        assert_eq!(ours.len(), 1, "{what}: {ours:#?}");
        let expected = if what == "no library" { "libhl-thunk" } else { "device" };
        assert!(ours[0].contains("INFO") && ours[0].contains(expected), "{what}: {}", ours[0]);
    }
}

#[test]
fn gaudi_memory_without_gaudi_is_refused_by_ucx_in_words() {
    for (what, device) in absences() {
        let end = stock("ucx_info", &device, "-u r -m 1m,gaudi").run();
        assert!(!end.crashed(), "{what}: {}", end.report());
        assert!(!end.stdout.contains("allocated 1M"), "{what}: {}", end.report());
    }
}

#[test]
fn host_traffic_runs_without_gaudi() {
    for (_, device) in absences() {
        Perftest::on(&device, "tag_bw", 65536).works();
    }
}

/// At the level that UCX logs at by itself: a card that is there and not used is nobody's wish.
#[test]
fn a_card_of_an_unknown_kind_is_a_warning_with_its_id_and_what_to_send() {
    for (ids, cards) in [("0x1020,0x1070", true), ("0x1070", false)] {
        let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
        let device = Device::Software(node.with("SOFT_GAUDI_PCI_ID", ids));
        let end = stock("ucx_info", &device, "-d").run().ok();
        let text = end.text();
        let warnings: Vec<&str> = text.lines().filter(|line| line.contains("1da3:1070")).collect();
        assert_eq!(warnings.len(), 1, "{}", end.report());
        for words in ["WARN", "0000:4d:00.0", "check-card --save"] {
            assert!(warnings[0].contains(words), "{words}: {}", warnings[0]);
        }
        assert_eq!(text.contains("# Memory domain: gaudi_copy"), cards, "{}", end.report());
    }
}
