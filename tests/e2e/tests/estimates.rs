//! What UCX is told that copies cost: from the card's link, or as the user says; and what UCP makes
//! of it.

mod memory;

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;

use e2e::{Device, Listing, ProtocolLogs, Protocols, Ucx, client, stock};
use memory::Machine;
use tempfile::TempDir;

/// The estimates of every copy, by its name (`put_short host:gaudi`).
fn estimates(ucx: Ucx, variables: &[(&str, &str)]) -> BTreeMap<String, String> {
    let end = Machine::one_card().check(ucx, "transport").envs(variables).run().ok();
    let lines = end.stdout.lines().filter_map(|line| line.strip_prefix("gaudi_cpy "));
    let named = lines.filter_map(|line| line.split_once(" at "));
    named.map(|(name, cost)| (name.to_owned(), cost.to_owned())).collect()
}

#[test]
fn each_part_of_each_variable_changes_its_own_copies_and_no_others() {
    // In the order of their names.
    let copies = |get: &str, put: &str| {
        let row = |name, pair| format!("{name} {pair}");
        [row("get_short", get), row("get_zcopy", get), row("put_short", put), row("put_zcopy", put)]
    };
    let to_device = copies("gaudi:host", "host:gaudi");
    let from_device = copies("host:gaudi", "gaudi:host");
    let inside = copies("gaudi:gaudi", "gaudi:gaudi");
    for ucx in Ucx::ALL {
        let before = estimates(ucx, &[]);
        // The copies whose estimates differ.
        let changed = |variable, value| -> Vec<String> {
            let after = estimates(ucx, &[(variable, value)]);
            assert_eq!((before.len(), after.len()), (12, 12));
            let differ = before.iter().filter(|(name, cost)| after[*name] != **cost);
            differ.map(|(name, _)| name.clone()).collect()
        };
        let bandwidth = |value| changed("UCX_GAUDI_COPY_BW", value);
        assert_eq!(bandwidth("auto,h2d:5GBs"), to_device);
        assert_eq!(bandwidth("auto,d2h:5GBs"), from_device);
        assert_eq!(bandwidth("auto,d2d:5GBs"), inside);
        assert_eq!(bandwidth("5GBs").len(), 12);
        let latency = |value| changed("UCX_GAUDI_COPY_LATENCY", value);
        let names = |part: &str, changed: Vec<String>| {
            changed.len() == 6 && changed.iter().all(|name| name.contains(part))
        };
        assert!(names("_short", latency("short:9us,zcopy:2us")));
        assert!(names("_zcopy", latency("short:500ns,zcopy:9us")));
        assert_eq!(changed("UCX_GAUDI_COPY_OVERHEAD", "9us").len(), 12);
    }
}

#[test]
fn the_listing_shows_them() {
    let tool = stock("ucx_info", &Device::cards(1), "-d").envs(&[
        ("UCX_GAUDI_COPY_BW", "auto,d2h:5GBs"),
        ("UCX_GAUDI_COPY_LATENCY", "short:1us,zcopy:77us"),
        ("UCX_GAUDI_COPY_OVERHEAD", "88us"),
    ]);
    let listing = tool.run().ok().stdout;
    let domain = Listing::of(&listing).domain("gaudi_copy");
    for line in ["bandwidth: 5120.00/ppn", "latency: 77000 nsec", "overhead: 88000 nsec"] {
        assert!(domain.contains(line), "{line}: {domain}");
    }
}

/// A sysfs with the first card of the software Gaudi in it.
fn sysfs(attributes: &[(&str, &str)]) -> TempDir {
    let sysfs = tempfile::tempdir().unwrap();
    let (card, devices) = ("devices/pci0000:30/0000:33:00.0", "bus/pci/devices");
    let [card, devices] = [card, devices].map(|folder| sysfs.path().join(folder));
    std::fs::create_dir_all(&card).unwrap();
    std::fs::create_dir_all(&devices).unwrap();
    symlink(&card, devices.join("0000:33:00.0")).unwrap();
    for (attribute, text) in attributes {
        std::fs::write(card.join(attribute), format!("{text}\n")).unwrap();
    }
    sysfs
}

#[test]
fn the_link_of_the_card_is_what_its_copies_are_reckoned_with() {
    let gaudi = ("vendor", "0x1da3");
    let (slow, width) = (("current_link_speed", "8.0 GT/s PCIe"), ("current_link_width", "4"));
    let put = |attributes: &[(&str, &str)]| {
        let sysfs = sysfs(attributes);
        let root = sysfs.path().to_str().expect("a path that is text");
        let estimates = estimates(Ucx::V1_22, &[("GAUDI_SYSFS_ROOT", root)]);
        estimates["put_zcopy host:gaudi"].clone()
    };
    let usual = put(&[]);
    assert!(usual.starts_with("22.06 GB/s"), "Gaudi2's own, less packet headers: {usual}");
    let narrow = put(&[gaudi, slow, width]);
    assert!(narrow.starts_with("2.76 GB/s"), "{narrow}");
    // What sits at the software card's address in the real machine is not that card.
    let other = put(&[("vendor", "0x15b3"), slow, width]);
    assert_eq!(other, usual);
    let unknown = ("current_link_speed", "Unknown");
    assert_eq!(put(&[gaudi, unknown, width]), usual);
}

#[test]
fn copies_of_a_modelled_card_are_reckoned_with_as_those_of_silicon_of_its_speed() {
    let put = |model| {
        // A close would take seconds.
        let variables = [("SOFT_GAUDI_MODEL", model), ("SOFT_GAUDI_CLOSE_TIME", "0")];
        estimates(Ucx::V1_22, &variables)["put_zcopy host:gaudi"].clone()
    };
    assert_eq!(put("gaudi2"), "22.06 GB/s, overhead 2000 ns, latency 25000 ns");
    assert_eq!(put("gaudi2,slow=20"), "1.10 GB/s, overhead 2000 ns, latency 500000 ns");
}

/// The protocols between two processes that send each other Gaudi memory by staging it.
fn chosen(ucx: Ucx, variables: &[(&str, &str)]) -> Protocols {
    let device = Device::cards(2);
    let logs = ProtocolLogs::new().expect("a folder");
    let tool = client(ucx, &device, "pair --plain --ops tag --mem gaudi:gaudi --sizes 8,1M");
    logs.of(tool.envs(variables).env("UCX_TLS", "^gaudi_ipc")).run().ok();
    logs.read().expect("protocols")
}

const TAG: &str = "tagged message by ucp_tag_send* from gaudi";

#[test]
fn ucp_chooses_by_them() {
    for ucx in Ucx::ALL {
        let protocol = |variables: &[(&str, &str)], size| {
            let protocols = chosen(ucx, variables);
            let choice = protocols.choice("intra-node", TAG, size);
            choice.unwrap_or_else(|| panic!("{protocols:?}")).protocol.clone()
        };
        let small = protocol(&[], 8);
        assert_eq!(small, "eager copy-in copy-out", "UCX {}", ucx.name());
        // Waiting for copies is dear: better have them done in the background.
        let waiting = protocol(&[("UCX_GAUDI_COPY_LATENCY", "short:50us,zcopy:2us")], 8);
        assert!(waiting.starts_with("rendezvous gaudi_cpy"), "{waiting}");
        // Large messages are staged in pieces, each under way while the next is fetched.
        let large = protocol(&[], 1 << 20);
        assert!(large.starts_with("rendezvous pipeline gaudi_cpy"), "{large}");
    }
}
