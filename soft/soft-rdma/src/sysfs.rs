//! What sysfs would say about the HCAs, and about the cards of the software Gaudi.
//!
//! | file | below the folder of the PCI device |
//! |---|---|
//! | `vendor`, `device`, `class`, `numa_node`, `current_link_speed`, `current_link_width` | |
//! | `state`, `counters/*`, `hw_counters/*` | `infiniband/softrdmaN/ports/1/` |
//!
//! Paths below `/sys/devices` are the real names; `/sys/bus/pci/devices` and `/sys/class/infiniband`
//! have links to them, as the kernel's. `api::files` gives these answers to the program.

use crate::config::Config;
use crate::placement::{self, Place};
use crate::{config, ports};

/// Something in sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Folder,
    File(String),
}

enum Device {
    Hca(u8),
    Card,
}

/// The name of an HCA, or of a port of a card.
pub(crate) fn device_name(config: &Config, index: u8) -> String {
    match config.places.get(usize::from(index)).and_then(|place| place.own_port) {
        Some(card) => format!("hbl_{card}"),
        None => format!("softrdma{index}"),
    }
}

/// Devices and their places.
fn devices(config: &Config) -> impl Iterator<Item = (Device, Place)> {
    let hcas = config.places.iter().enumerate();
    hcas.map(|(index, place)| (Device::Hca(index as u8), *place))
        .chain(placement::cards().map(|place| (Device::Card, place)))
}

/// The device that a path is about, and what comes behind its folder.
fn split(config: &Config, path: &str) -> Option<(Device, Place, String)> {
    let tail = |path: &str, prefix: &str| {
        let rest = path.strip_prefix(prefix)?;
        (rest.is_empty() || rest.starts_with('/')).then(|| rest.trim_matches('/').to_owned())
    };
    devices(config).find_map(|(device, place)| {
        let class = match device {
            Device::Card => None,
            Device::Hca(index) => {
                let name = device_name(config, index);
                tail(path, &format!("/sys/class/infiniband/{name}"))
                    .map(|rest| format!("infiniband/{name}/{rest}"))
            }
        };
        let rest = class
            .or_else(|| tail(path, &format!("/sys/bus/pci/devices/{}", place.bus_id)))
            .or_else(|| tail(path, &place.folder()))?;
        // A link back from the HCA to its PCI device.
        let rest = match (&device, rest.trim_end_matches('/')) {
            (Device::Hca(index), rest) => {
                tail(rest, &format!("infiniband/{}/device", device_name(config, *index)))
                    .unwrap_or_else(|| rest.to_owned())
            }
            (Device::Card, rest) => rest.to_owned(),
        };
        Some((device, place, rest))
    })
}

fn entry(config: &Config, device: &Device, place: &Place, rest: &str) -> Option<Entry> {
    let file = |text: &str| Some(Entry::File(format!("{text}\n")));
    let hca = match device {
        Device::Hca(index) => Some(*index),
        Device::Card => None,
    };
    match (rest, hca) {
        ("", _) => Some(Entry::Folder),
        ("numa_node", _) => {
            file(&place.numa_node.map_or_else(|| "-1".to_owned(), |node| node.to_string()))
        }
        ("vendor", _) if hca.is_none() || place.own_port.is_some() => file("0x1da3"),
        ("class", _) if hca.is_none() || place.own_port.is_some() => file("0x120000"),
        ("vendor" | "device", Some(_)) => file("0x5352"),
        ("class", Some(_)) => file("0x020700"),
        ("current_link_speed", Some(_)) => file("32.0 GT/s PCIe"),
        ("current_link_width", Some(_)) => file("16"),
        (rest, Some(index)) => {
            let rest = rest.strip_prefix("infiniband")?;
            let Some(rest) = rest.strip_prefix('/') else {
                return rest.is_empty().then_some(Entry::Folder);
            };
            let rest = rest.strip_prefix(&device_name(config, index))?;
            let read = |name: &str| ports::read(&config.folder, config.node, index, name);
            let number = |value: u64| Some(Entry::File(format!("{value}\n")));
            match rest {
                "" | "/ports" | "/ports/1" | "/ports/1/counters" | "/ports/1/hw_counters" => {
                    Some(Entry::Folder)
                }
                "/ports/1/state" => file(if read("down")? == 0 { "4: ACTIVE" } else { "1: DOWN" }),
                // The specification counts words of four bytes.
                "/ports/1/counters/port_xmit_data" => number(read("xmit_bytes")? / 4),
                "/ports/1/counters/port_rcv_data" => number(read("rcv_bytes")? / 4),
                "/ports/1/counters/port_xmit_packets" => number(read("xmit_packets")?),
                "/ports/1/counters/port_rcv_packets" => number(read("rcv_packets")?),
                "/ports/1/counters/port_xmit_discards" => number(read("xmit_discards")?),
                "/ports/1/counters/link_downed" => number(read("link_downed")?),
                _ => number(read(rest.strip_prefix("/ports/1/hw_counters/")?)?),
            }
        }
        (_, None) => None,
    }
}

/// What is at a path, if it is about one of the software devices.
pub(crate) fn look_up(path: &str) -> Option<Entry> {
    look_up_in(config::get(), path)
}

fn look_up_in(config: &Config, path: &str) -> Option<Entry> {
    let (device, place, rest) = split(config, path)?;
    entry(config, &device, &place, &rest)
}

/// A path without links, if there is something at it.
pub(crate) fn resolve(path: &str) -> Option<String> {
    resolve_in(config::get(), path)
}

fn resolve_in(config: &Config, path: &str) -> Option<String> {
    let (device, place, rest) = split(config, path)?;
    entry(config, &device, &place, &rest)?;
    Some(format!("{}/{rest}", place.folder()).trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        let variables = [
            ("SOFT_RDMA_DEVICES", "3"),
            ("SOFT_RDMA_PLACES", "4,0000:81:00.0,own:1"),
            // A node that no process has used: its counters are zero.
            ("SOFT_RDMA_DIR", "/nonexistent"),
        ];
        Config::parse(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const SWITCH: &str = "/sys/devices/pci0000:97/0000:97:01.0/0000:98:00.0";

    #[test]
    fn links_lead_to_the_place_of_the_device() {
        let hca = format!("{SWITCH}/0000:99:02.0/0000:9c:00.0");
        for (path, resolved) in [
            ("/sys/class/infiniband/softrdma0", format!("{hca}/infiniband/softrdma0")),
            ("/sys/bus/pci/devices/0000:9c:00.0", hca.clone()),
            ("/sys/class/infiniband/softrdma0/device/", hca.clone()),
            (&hca, hca.clone()),
            ("/sys/bus/pci/devices/0000:9a:00.0", format!("{SWITCH}/0000:99:00.0/0000:9a:00.0")),
            ("/sys/bus/pci/devices/0000:81:00.0", "/sys/devices/pci0000:81/0000:81:00.0".into()),
        ] {
            assert_eq!(resolve_in(&config(), path), Some(resolved), "{path}");
        }
        let port = resolve_in(&config(), "/sys/class/infiniband/hbl_1").expect("a port of a card");
        assert!(port.ends_with("/0000:4d:00.0/infiniband/hbl_1"), "{port}");
        for path in
            ["/sys", "/sys/class/infiniband/softrdma2", "/sys/bus/pci/devices/0000:9c:00.01"]
        {
            assert_eq!(resolve_in(&config(), path), None, "{path}");
        }
    }

    #[test]
    fn files_have_numbers_and_nodes() {
        let file = |path: &str| look_up_in(&config(), path);
        let text = |text: &str| Some(Entry::File(format!("{text}\n")));
        assert_eq!(file("/sys/class/infiniband/softrdma0/device/numa_node"), text("1"));
        assert_eq!(file("/sys/class/infiniband/softrdma1/device/numa_node"), text("-1"));
        assert_eq!(file("/sys/bus/pci/devices/0000:33:00.0/vendor"), text("0x1da3"));
        assert_eq!(file("/sys/class/infiniband/hbl_1/device/vendor"), text("0x1da3"));
        assert_eq!(file("/sys/class/infiniband/softrdma0/device/vendor"), text("0x5352"));
        assert_eq!(file("/sys/class/infiniband/softrdma0/ports/1"), Some(Entry::Folder));
        assert_eq!(file("/sys/class/infiniband/softrdma0/ports/2"), None);
        assert_eq!(
            file("/sys/class/infiniband/softrdma0/ports/1/counters/port_xmit_data"),
            text("0")
        );
        assert_eq!(
            file("/sys/class/infiniband/softrdma0/ports/1/hw_counters/direct_bytes"),
            text("0")
        );
        assert_eq!(file("/sys/class/infiniband/softrdma0/ports/1/hw_counters/nonsense"), None);
    }
}
