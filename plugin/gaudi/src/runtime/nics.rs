//! The host's NICs (RDMA devices) near a card.

use std::path::Path;

use crate::topology::Distance;
use crate::{DeviceInfo, Sysfs};

/// Names of the NICs that can carry data and are nearest to a card.
pub(crate) fn nearest(sysfs: &Sysfs, card: &DeviceInfo) -> Vec<String> {
    let place = sysfs.location(&card.bus_id);
    let mut nics = Vec::new();
    for (name, folder) in sysfs.class("infiniband") {
        let location = sysfs.location_of(&folder.join("device"));
        // The cards' own ports serve no other card.
        let is_of_a_card = location
            .as_ref()
            .is_some_and(|place| place.is_gaudi() || place.bus_id() == card.bus_id.as_str());
        if is_of_a_card || !is_active(&folder) {
            continue;
        }
        let distance = match (&place, &location) {
            (Some(card), Some(nic)) => Distance::between(card, nic),
            _ => Distance::Unknown,
        };
        nics.push((distance, name));
    }
    let least = nics.iter().map(|(distance, _)| *distance).min();
    nics.retain(|(distance, _)| Some(*distance) == least);
    nics.into_iter().map(|(_, name)| name).collect()
}

/// Whether one of its ports is in state `4: ACTIVE`.
fn is_active(nic: &Path) -> bool {
    let state = |port: &Path| Sysfs::line(&port.join("state"));
    let ports = Sysfs::entries(&nic.join("ports"));
    ports.iter().any(|(_, port)| state(port).is_some_and(|state| state.starts_with("4:")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_nearest_active_nics_of_the_host_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let make = |path: &str, vendor: &str| {
            let device = root.join("devices/pci0000:30").join(path);
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("vendor"), vendor).unwrap();
            device
        };
        std::fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
        std::fs::create_dir_all(root.join("class/infiniband")).unwrap();
        let card = DeviceInfo { bus_id: "0000:33:00.0".parse().unwrap(), ..DeviceInfo::example(0) };
        let place = make("0000:30:01.0/0000:33:00.0", "0x1da3");
        assert_eq!(nearest(&Sysfs::at(root), &card), [""; 0]);
        symlink(&place, root.join("bus/pci/devices/0000:33:00.0")).unwrap();
        for (name, path, vendor, state) in [
            ("hbl_0", "0000:30:01.0/0000:33:00.0", "0x1da3", "4: ACTIVE"),
            ("mlx5_0", "0000:30:02.0/0000:35:00.0", "0x15b3", "4: ACTIVE"),
            ("mlx5_1", "0000:30:01.0/0000:34:00.0", "0x15b3", "1: DOWN"),
            ("mlx5_2", "0000:30:01.0/0000:36:00.0", "0x15b3", "4: ACTIVE"),
            ("mlx5_3", "0000:30:01.0/0000:37:00.0", "0x15b3", "4: ACTIVE"),
        ] {
            let nic = make(path, vendor).join("infiniband").join(name);
            std::fs::create_dir_all(nic.join("ports/1")).unwrap();
            std::fs::write(nic.join("ports/1/state"), state).unwrap();
            symlink("../..", nic.join("device")).unwrap();
            symlink(&nic, root.join("class/infiniband").join(name)).unwrap();
        }
        assert_eq!(nearest(&Sysfs::at(root), &card), ["mlx5_2", "mlx5_3"]);
    }
}
