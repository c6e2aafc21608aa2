//! Cards and NICs in a sysfs that the test makes: a server with eight cards and eight HCAs, and what remains of the
//! result when parts of that sysfs are missing.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use gaudi::topology::Distance;
use gaudi::{DeviceInfo, Generation, PortMasks, Sysfs};
use proptest::prelude::*;

use super::{Hcas, Nic, PortState, ScaleOut};

/// A folder that is removed with this value.
struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Tree {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("gaudi-sysfs-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let tree = Self(std::env::temp_dir().join(name));
        for folder in ["bus/pci/devices", "class/infiniband", "class/net", "devices"] {
            fs::create_dir_all(tree.0.join(folder)).unwrap();
        }
        tree
    }

    fn sysfs(&self) -> Sysfs {
        Sysfs::at(&self.0)
    }

    /// A PCI device at this path below `devices`, as the kernel shows it.
    fn pci(&self, path: &str, vendor: &str, numa_node: &str) -> PathBuf {
        let folder = self.0.join("devices").join(path);
        fs::create_dir_all(&folder).unwrap();
        let bus_id = path.rsplit('/').next().unwrap();
        symlink(format!("../../../devices/{path}"), self.0.join("bus/pci/devices").join(bus_id))
            .unwrap();
        attribute(&folder, "vendor", vendor);
        attribute(&folder, "numa_node", numa_node);
        attribute(&folder, "local_cpulist", if numa_node == "0" { "0-31" } else { "32-63" });
        folder
    }

    /// A device of a class inside a device's folder, with its two links.
    fn member(&self, device: &Path, class: &str, name: &str) -> PathBuf {
        let folder = device.join(class).join(name);
        fs::create_dir_all(&folder).unwrap();
        symlink("../..", folder.join("device")).unwrap();
        symlink(&folder, self.0.join("class").join(class).join(name)).unwrap();
        folder
    }

    fn hca(&self, device: &Path, name: &str, state: &str) {
        let port = self.member(device, "infiniband", name).join("ports/1");
        fs::create_dir_all(&port).unwrap();
        attribute(&port, "state", state);
        attribute(&port, "link_layer", "InfiniBand");
        attribute(&port, "rate", "400 Gb/sec (4X NDR)");
    }

    fn netdev(&self, device: &Path, name: &str, port: &str, state: &str) {
        let folder = self.member(device, "net", name);
        attribute(&folder, "operstate", state);
        attribute(&folder, "dev_port", port);
    }
}

fn attribute(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), format!("{text}\n")).unwrap();
}

fn card(index: u32, module_id: u32, bus_id: &str) -> DeviceInfo {
    DeviceInfo {
        index,
        node: index,
        module_id,
        bus_id: bus_id.parse().unwrap(),
        generation: Generation::Gaudi2,
        ports: PortMasks { all: 0xff_ffff, external: 0x80_0101 },
        card_name: "HL225".into(),
        driver_version: "1.20.0".into(),
        is_software: false,
    }
}

/// Four PCI switches, two on each NUMA node, with two cards and two HCAs each.
fn server() -> (Tree, Vec<DeviceInfo>) {
    let tree = Tree::new();
    let switches = [
        ("30", "31", ["33", "34"]),
        ("4a", "4b", ["4d", "4e"]),
        ("97", "98", ["9a", "9b"]),
        ("b0", "b1", ["b3", "b4"]),
    ];
    let modules = [2, 3, 0, 1, 6, 7, 4, 5];
    let mut cards = Vec::new();
    for (at, (root, switch, buses)) in switches.into_iter().enumerate() {
        let node = (at / 2).to_string();
        let upper = format!("pci0000:{root}/0000:{root}:01.0/0000:{switch}:00.0");
        for (side, bus) in buses.into_iter().enumerate() {
            let number = at * 2 + side;
            let bus_id = format!("0000:{bus}:00.0");
            let path = format!("{upper}/0000:{switch}:0{}.0/{bus_id}", side + 1);
            let device = tree.pci(&path, "0x1da3", &node);
            if number == 0 {
                tree.netdev(&device, "ens0d0", "0", "up");
                tree.netdev(&device, "ens0d8", "8", "down");
                tree.hca(&device, "hbl_0", "4: ACTIVE");
            }
            cards.push(card(number as u32, modules[number], &bus_id));

            let path = format!("{upper}/0000:{switch}:0{}.0/0000:{bus}:10.0", side + 3);
            let device = tree.pci(&path, "0x15b3", &node);
            let state = if number == 3 { "1: DOWN" } else { "4: ACTIVE" };
            tree.hca(&device, &format!("mlx5_{number}"), state);
            tree.netdev(&device, &format!("ib{number}"), "0", "up");
        }
    }
    (tree, cards)
}

fn names(nics: &[&Nic]) -> Vec<String> {
    nics.iter().map(|nic| nic.name.clone()).collect()
}

#[test]
fn every_card_of_a_server_has_its_nics_in_order_of_distance() {
    let (tree, cards) = server();
    let view = ScaleOut::read(&tree.sysfs(), &cards);
    assert_eq!(view.cards().len(), 8);
    assert_eq!(view.nics().len(), 8, "a card's own RDMA device is no NIC of the host");
    for (at, seen) in view.cards().iter().enumerate() {
        let place = seen.location.as_ref().unwrap();
        assert_eq!(place.bus_id(), cards[at].bus_id.as_str());
        assert_eq!(place.numa_node, Some(at as u32 / 4));
        assert_eq!(place.local_cpus.as_deref(), Some(if at < 4 { "0-31" } else { "32-63" }));
        assert_eq!(place.path().len(), 5, "{place:?}");
        let distances: Vec<Distance> = seen.near.iter().map(|near| near.distance).collect();
        let count = |wanted| distances.iter().filter(|distance| **distance == wanted).count();
        assert_eq!(count(Distance::SameSwitch { links: 4 }), 2, "{distances:?}");
        assert_eq!(count(Distance::SameNumaNode), 2, "{distances:?}");
        assert_eq!(count(Distance::OtherNumaNode), 4, "{distances:?}");
        assert!(distances.is_sorted());
    }
    let nearest = |card: usize| names(&view.nearest(&cards[card].bus_id));
    assert_eq!(nearest(0), ["mlx5_0", "mlx5_1"]);
    assert_eq!(nearest(7), ["mlx5_6", "mlx5_7"]);
    assert_eq!(nearest(2), ["mlx5_2"], "mlx5_3 is as near, but down");

    let port = &view.nics()[3].ports[0];
    assert_eq!((port.number, port.state), (1, PortState::Down));
    assert_eq!(port.link_layer.as_deref(), Some("InfiniBand"));
    assert_eq!(port.netdevs, ["ib3"]);
    let own = &view.cards()[0];
    assert_eq!(own.own_nics[0].name, "hbl_0");
    let interfaces: Vec<String> = own.own_netdevs.iter().map(ToString::to_string).collect();
    assert_eq!(interfaces, ["ens0d0 up", "ens0d8 down"]);
    assert!(view.cards()[1].own_netdevs.is_empty());
}

#[test]
fn the_text_is_for_people() {
    let (tree, cards) = server();
    let text = ScaleOut::read(&tree.sysfs(), &cards[..1]).to_string();
    let expected = "\
Gaudi2 0 (0000:33:00.0), module 2, NUMA node 0, CPUs 0-31
    same PCI switch    mlx5_0, mlx5_1
    same NUMA node     mlx5_2, mlx5_3
    other NUMA node    mlx5_4, mlx5_5, mlx5_6, mlx5_7
    own ports          24, 3 of them external
    own RDMA device    hbl_0: port 1 active, InfiniBand, 400 Gb/sec (4X NDR), ens0d0
    own interfaces     ens0d0 up; ens0d8 down
mlx5_0     0000:33:10.0   NUMA node 0  port 1 active, InfiniBand, 400 Gb/sec (4X NDR), ib0
";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains("mlx5_3     0000:4e:10.0   NUMA node 0  port 1 down"), "{text}");
}

#[test]
fn ports_of_cards_this_process_may_not_use_are_nobodys_nic() {
    let (tree, cards) = server();
    let view = ScaleOut::read(&tree.sysfs(), &cards[4..]);
    assert!(view.nics().iter().all(|nic| nic.name != "hbl_0"));
    assert_eq!((view.cards().len(), view.nics().len()), (4, 8));
}

#[test]
fn a_nic_with_two_ports_has_each_interface_at_its_port() {
    let tree = Tree::new();
    let device = tree.pci("pci0000:00/0000:00:01.0/0000:01:00.0", "0x15b3", "-1");
    tree.hca(&device, "mlx4_0", "4: ACTIVE");
    let second = device.join("infiniband/mlx4_0/ports/2");
    fs::create_dir_all(&second).unwrap();
    tree.netdev(&device, "eth0", "0", "up");
    tree.netdev(&device, "eth1", "1", "down");
    let view = ScaleOut::read(&tree.sysfs(), &[]);
    let [first, second] = &view.nics()[0].ports[..] else { panic!("two ports: {view:?}") };
    assert_eq!(
        (&*first.netdevs, &*second.netdevs),
        (&["eth0".to_owned()][..], &["eth1".into()][..])
    );
    assert_eq!(second.state, PortState::Unknown);
    let place = view.nics()[0].location.as_ref().unwrap();
    assert_eq!(place.numa_node, None, "-1 is no node");

    // A NIC with one port, whose driver counts interfaces over the whole card.
    let device = tree.pci("pci0000:00/0000:00:01.0/0000:01:00.1", "0x15b3", "-1");
    tree.hca(&device, "mlx5_1", "4: ACTIVE");
    tree.netdev(&device, "eth2", "1", "up");
    let view = ScaleOut::read(&tree.sysfs(), &[]);
    assert_eq!(view.nics()[1].ports[0].netdevs, ["eth2"]);
}

#[test]
fn a_machine_that_says_nothing_gives_a_view_that_says_so() {
    let (tree, cards) = (Tree::new(), [card(0, 2, "0000:33:00.0")]);
    for sysfs in [tree.sysfs(), Sysfs::at("/nonexistent")] {
        let view = ScaleOut::read(&sysfs, &cards);
        assert_eq!(view.cards()[0].location, None);
        let text = view.to_string();
        assert!(text.contains("not in sysfs") && text.contains("no RDMA devices"), "{text}");
        assert!(view.nearest(&cards[0].bus_id).is_empty());
    }
    // A card without a location is not near any NIC.
    let (tree, _) = server();
    let view = ScaleOut::read(&tree.sysfs(), &[card(0, 0, "0000:77:00.0")]);
    assert!(view.cards()[0].near.iter().all(|near| near.distance == Distance::Unknown));
    assert!(view.to_string().contains("distance unknown"), "{view}");
}

#[test]
fn the_sysfs_of_this_machine_can_be_read() {
    let cards = [card(0, 0, "0000:00:01.0")];
    assert!(!ScaleOut::read(&Sysfs::at("/sys"), &cards).to_string().is_empty());
}

/// Every attribute and link of a tree, for the test to damage.
fn leaves(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            leaves(&entry.path(), found);
        } else {
            found.push(entry.path());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn no_damage_to_sysfs_is_worse_than_knowing_less(
        damage in prop::collection::vec(
            (any::<prop::sample::Index>(), 0..5_u8, prop::collection::vec(any::<u8>(), 0..20)),
            1..40
        )
    ) {
        let (tree, cards) = server();
        let mut all = Vec::new();
        leaves(&tree.0, &mut all);
        all.sort();
        for (which, how, bytes) in damage {
            let path = which.get(&all);
            let link = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink());
            let _ = fs::remove_file(path);
            match how {
                0 => {}
                1 => drop(fs::create_dir(path)),
                2 => drop(symlink(path.file_name().unwrap(), path)),
                3 => drop(symlink("/", path)),
                _ if link => drop(symlink("../nowhere", path)),
                _ => drop(fs::write(path, &bytes)),
            }
        }
        let view = ScaleOut::read(&tree.sysfs(), &cards);
        prop_assert_eq!(view.cards().len(), 8);
        let text = view.to_string();
        prop_assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{:?}", text);
        for seen in view.cards() {
            prop_assert_eq!(seen.near.len(), view.nics().len());
        }
    }
}

#[test]
fn mlx5_is_known_by_its_devices_and_everything_else_is_driven_by_verbs() {
    let tree = Tree::new();
    let found = || Hcas::read(&tree.sysfs());
    assert_eq!(found(), Hcas::default(), "no RDMA");
    let mlx5 = tree.pci("pci0000:40/0000:41:00.0", "0x15b3", "0");
    tree.member(&mlx5, "infiniband", "rocep65s0f0");
    assert_eq!(found(), Hcas { mlx5: true, ..Hcas::default() });
    let other = tree.pci("pci0000:50/0000:51:00.0", "0x14e4", "0");
    tree.member(&other, "infiniband", "bnxt_re0");
    assert_eq!(found(), Hcas { mlx5: true, others: true, efa: false });
}
