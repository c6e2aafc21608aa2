//! Where devices sit in the machine, and how far they are from each other: pure functions over what
//! [`Sysfs`](crate::Sysfs) read.

use std::fmt;
use std::path::Path;

/// PCI vendor id of Habana Labs.
const HABANA: u32 = 0x1da3;

/// A PCI device's location in the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciLocation {
    /// From the host bridge (`pci0000:30`) over every bridge down to the device itself.
    path: Vec<String>,
    /// Who made it (PCI vendor id).
    pub vendor: Option<u32>,
    /// The memory near it; `None` where the firmware does not say.
    pub numa_node: Option<u32>,
    /// The processors near it, as the kernel lists them (`0-31,64-95`).
    pub local_cpus: Option<String>,
}

impl PciLocation {
    /// From the device's folder in sysfs, links resolved; `None` if that is no PCI device.
    pub(crate) fn from_path(folder: &Path) -> Option<Self> {
        let names = folder.components().filter_map(|part| part.as_os_str().to_str());
        let path: Vec<String> = names
            .skip_while(|name| !is_host_bridge(name))
            .take_while(|name| is_host_bridge(name) || is_bus_id(name))
            .map(str::to_owned)
            .collect();
        let ends_in_a_device = path.last().is_some_and(|last| is_bus_id(last));
        ends_in_a_device.then_some(Self { path, vendor: None, numa_node: None, local_cpus: None })
    }

    /// The device's own PCI address.
    pub fn bus_id(&self) -> &str {
        self.path.last().expect("never empty")
    }

    /// Whether the device is one of Habana Labs'.
    pub fn is_gaudi(&self) -> bool {
        self.vendor == Some(HABANA)
    }

    /// From the host bridge over every bridge down to the device itself.
    pub fn path(&self) -> &[String] {
        &self.path
    }
}

impl fmt::Display for PciLocation {
    /// What it is near to; the address is added where the device is named.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.numa_node {
            Some(node) => write!(f, "NUMA node {node}")?,
            None => f.write_str("NUMA node unknown")?,
        }
        match &self.local_cpus {
            Some(cpus) => write!(f, ", CPUs {cpus}"),
            None => Ok(()),
        }
    }
}

/// `pci0000:30`.
fn is_host_bridge(name: &str) -> bool {
    name.strip_prefix("pci").and_then(|rest| rest.split_once(':')).is_some_and(|(domain, bus)| {
        is_hex(domain) && domain.len() >= 4 && is_hex(bus) && bus.len() == 2
    })
}

/// `0000:33:00.0`; some domains have more than four digits.
fn is_bus_id(name: &str) -> bool {
    let parts: Vec<&str> = name.split([':', '.']).collect();
    let [domain, bus, device, function] = parts[..] else { return false };
    parts.iter().all(|part| is_hex(part))
        && (domain.len() >= 4 && bus.len() == 2 && device.len() == 2 && function.len() == 1)
        && name.len() == domain.len() + 8
        && name.as_bytes()[name.len() - 2] == b'.'
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A PCI Express link as it was negotiated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PciLink {
    /// Transfers a second on one lane, in billions: 8 for PCIe 3.0, 16 for 4.0, 32 for 5.0.
    pub gigatransfers: f64,
    /// Lanes.
    pub width: u32,
}

impl PciLink {
    /// From the kernel's words for speed (`16.0 GT/s PCIe`) and width (`16`).
    pub(crate) fn from_words(speed: &str, width: &str) -> Option<Self> {
        let (gigatransfers, unit) = speed.split_once(' ')?;
        let gigatransfers: f64 = gigatransfers.parse().ok()?;
        let width = width.parse().ok().filter(|width| (1..=64).contains(width))?;
        let sensible = unit.starts_with("GT/s") && (1.0..=1000.0).contains(&gigatransfers);
        sensible.then_some(Self { gigatransfers, width })
    }

    /// Bytes a second in one direction, before packet headers.
    pub fn bandwidth(self) -> f64 {
        // Up to PCIe 2.0, 8 bits are encoded as 10; later, 128 as 130.
        let coding = if self.gigatransfers < 8.0 { 8.0 / 10.0 } else { 128.0 / 130.0 };
        self.gigatransfers * 1e9 / 8.0 * coding * f64::from(self.width)
    }
}

impl fmt::Display for PciLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GT/s x{}", self.gigatransfers, self.width)
    }
}

/// How far two devices are from each other, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// One device: a card and its own port.
    SameDevice,
    /// Below one port of the host bridge: traffic stays inside PCI switches.
    SameSwitch {
        /// Links on the way; two for neighbours.
        links: u32,
    },
    /// Below one host bridge.
    SameRootComplex,
    /// Near the same memory.
    SameNumaNode,
    /// Across the links between processors.
    OtherNumaNode,
    /// The machine does not say.
    Unknown,
}

impl Distance {
    /// From one device to another.
    pub fn between(one: &PciLocation, other: &PciLocation) -> Self {
        let common = one.path.iter().zip(&other.path).take_while(|(a, b)| a == b).count();
        if one.bus_id() == other.bus_id() {
            return Distance::SameDevice;
        }
        match (common, one.numa_node, other.numa_node) {
            (2.., _, _) => {
                let links = one.path.len() + other.path.len() - 2 * common;
                Distance::SameSwitch { links: links as u32 }
            }
            (1, _, _) => Distance::SameRootComplex,
            (_, Some(node), Some(other)) if node == other => Distance::SameNumaNode,
            (_, Some(_), Some(_)) => Distance::OtherNumaNode,
            _ => Distance::Unknown,
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Distance::SameDevice => "same device",
            Distance::SameSwitch { .. } => "same PCI switch",
            Distance::SameRootComplex => "same root complex",
            Distance::SameNumaNode => "same NUMA node",
            Distance::OtherNumaNode => "other NUMA node",
            Distance::Unknown => "distance unknown",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn location(path: &str, numa_node: Option<u32>) -> PciLocation {
        let location = PciLocation::from_path(Path::new(path)).expect("a PCI device");
        PciLocation { numa_node, ..location }
    }

    const SWITCH: &str = "/sys/devices/pci0000:30/0000:30:01.0/0000:31:00.0";

    #[test]
    fn a_place_is_the_way_from_the_host_bridge_to_the_device() {
        let card = location(&format!("{SWITCH}/0000:32:00.0/0000:33:00.0"), None);
        assert_eq!(card.bus_id(), "0000:33:00.0");
        assert_eq!(card.path()[..2], ["pci0000:30", "0000:30:01.0"]);
        let port = location(&format!("{SWITCH}/0000:32:00.0/0000:33:00.0/hbl.en.0/net/eth3"), None);
        assert_eq!(port, card, "what is inside a device is where the device is");
        let arm = location("/sys/devices/platform/40000000.pcie/pci0000:00/0000:00:01.0", None);
        assert_eq!(arm.path(), ["pci0000:00", "0000:00:01.0"]);
        let vmd = location("/s/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0", None);
        assert_eq!(vmd.bus_id(), "10000:e0:06.0");
        for none in ["/", "/sys/devices/virtual/net/lo", "/sys/devices/pci0000:30", "/pci:/x"] {
            assert_eq!(PciLocation::from_path(Path::new(none)), None, "{none}");
        }
    }

    #[test]
    fn nearer_is_less() {
        let card = location(&format!("{SWITCH}/0000:32:00.0/0000:33:00.0"), Some(0));
        let near = |links| Distance::SameSwitch { links };
        let switch = SWITCH.strip_prefix("/sys/devices/").unwrap();
        let distances = [
            (format!("{switch}/0000:32:00.0/0000:33:00.0"), Some(0), Distance::SameDevice),
            (format!("{switch}/0000:32:00.0/0000:33:00.1"), Some(0), near(2)),
            (format!("{switch}/0000:32:02.0/0000:35:00.0"), Some(0), near(4)),
            ("pci0000:30/0000:30:02.0/0000:37:00.0".into(), Some(0), Distance::SameRootComplex),
            ("pci0000:4a/0000:4a:01.0/0000:4b:00.0".into(), Some(0), Distance::SameNumaNode),
            ("pci0000:97/0000:97:01.0/0000:98:00.0".into(), Some(1), Distance::OtherNumaNode),
            ("pci0000:97/0000:97:01.0/0000:98:00.0".into(), None, Distance::Unknown),
        ];
        for (path, node, distance) in &distances {
            let nic = location(&format!("/sys/devices/{path}"), *node);
            assert_eq!(Distance::between(&card, &nic), *distance, "{path}");
            assert_eq!(Distance::between(&nic, &card), *distance, "{path}");
        }
        assert!(distances.is_sorted_by_key(|(_, _, distance)| distance));
    }

    #[test]
    fn a_link_is_read_from_the_kernels_words() {
        let link = |speed, width| PciLink::from_words(speed, width);
        let bandwidth = |speed, width| link(speed, width).expect("a link").bandwidth() / 1e9;
        assert!((bandwidth("16.0 GT/s PCIe", "16") - 31.5).abs() < 0.1);
        assert!((bandwidth("8.0 GT/s PCIe", "8") - 7.88).abs() < 0.1);
        assert!((bandwidth("2.5 GT/s", "16") - 4.0).abs() < 0.1, "as older kernels write it");
        for (speed, width) in [
            ("Unknown", "16"),
            ("16.0 GT/s PCIe", "0"),
            ("16.0 GT/s PCIe", "255"),
            ("inf GT/s PCIe", "16"),
            ("-2.5 GT/s", "16"),
            ("16.0 furlongs", "16"),
        ] {
            assert_eq!(link(speed, width), None, "{speed} x{width}");
        }
    }

    proptest! {
        #[test]
        fn any_name_is_an_address_or_not_without_a_panic(name in "[0-9a-f:.pci ä]{0,16}") {
            let fits = name.parse::<crate::BusId>().is_ok() && name.len() == 12;
            prop_assert!(!fits || is_bus_id(&name), "what we accept elsewhere is an address here");
            let _ = (is_host_bridge(&name), PciLocation::from_path(Path::new(&name)));
        }
    }
}
