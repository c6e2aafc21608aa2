//! Why the driver library finds no card although the kernel has one.
//!
//! Library and kernel driver come in pairs. From Linux 6.8 on, the driver accepts only the ioctls of DRM, which
//! `libhl-thunk` 1.10 does not use; newer libraries do not use the older ones. A library on the wrong kernel reports
//! no card, as if there were none.

use std::fs::OpenOptions;
use std::path::Path;

use crate::Sysfs;

/// The folder with the nodes of drivers since Linux 6.4; the sysfs classes of those drivers and of older ones.
const NODES: &str = "/dev/accel";
const CLASSES: [&str; 2] = ["accel", "habanalabs"];

/// Why no card is found, and what to do; `None` if the kernel has none either.
pub(crate) fn reason(library: &hl_thunk::Library) -> Option<(String, &'static str)> {
    let release = Sysfs::line(Path::new("/proc/sys/kernel/osrelease"));
    let release = release.as_deref().unwrap_or("of unknown release");
    let name = format!("{} {}", library.name(), library.version().unwrap_or("of unknown version"));
    explain(&Sysfs::default(), Path::new(NODES), release, &name)
}

fn explain(
    sysfs: &Sysfs,
    nodes: &Path,
    release: &str,
    library: &str,
) -> Option<(String, &'static str)> {
    let cards = CLASSES.iter().flat_map(|class| sysfs.class(class)).filter_map(|(name, at)| {
        let location = sysfs.location_of(&at)?;
        // Control nodes are in the class as well.
        (location.is_gaudi() && !name.contains("control")).then_some((name, location))
    });
    let tried = cards.map(|(name, location)| {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let control = format!("{stem}_controlD{}", &name[stem.len()..]);
        let node = match stem {
            "accel" => nodes.join(control),
            _ => nodes.with_file_name(control),
        };
        let opened = OpenOptions::new().read(true).write(true).open(&node);
        (name, location, node, opened.map_err(|error| error.raw_os_error()))
    });
    // A container may have the nodes of only some cards: the missing ones say nothing about those.
    let (name, location, node, opened) = tried.min_by_key(|(.., opened)| match opened {
        Ok(_) => 0,
        Err(Some(libc::ENOENT)) => 2,
        Err(_) => 1,
    })?;
    let bus_id = location.bus_id();
    let has = format!("the kernel (Linux {release}) has a Gaudi, {name} at {bus_id}");
    match opened {
        Err(Some(libc::EACCES)) => Some((
            format!("{has}, but this user may not open {}", node.display()),
            "join the group of the node, or change its mode",
        )),
        Err(Some(libc::ENOENT)) => Some((
            format!("{has}, but there is no {}", node.display()),
            "give the container the card's nodes under /dev/accel, or let udev make them",
        )),
        _ => Some((
            format!(
                "{has}, but the driver library {library} finds none: library and kernel driver come \
                 in pairs, and these two do not speak the same ioctls (from Linux 6.8 on those of DRM, \
                 which libhl-thunk 1.10 and older do not know)"
            ),
            "install the driver (habanalabs-dkms) and the library (habanalabs-thunk) of one release; for \
             Linux's own driver, set HL_THUNK_LIBRARY to lib/ucx-gaudi/kernel/libhl-thunk.so of ucx-gaudi",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    /// A machine whose kernel has a Gaudi at 0000:33:00.0, in this class under this name.
    fn machine(class: &str, name: &str) -> (PathBuf, Sysfs) {
        let root = std::env::temp_dir().join(format!("gaudi-pair-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        add_card(&root, class, name, "0000:33:00.0");
        std::fs::create_dir_all(root.join("dev/accel")).unwrap();
        let sysfs = Sysfs::at(root.join("sys"));
        (root, sysfs)
    }

    fn add_card(root: &Path, class: &str, name: &str, bus_id: &str) {
        let device = root.join("sys/devices/pci0000:30/0000:30:01.0").join(bus_id);
        std::fs::create_dir_all(device.join(class).join(name)).unwrap();
        std::fs::write(device.join("vendor"), "0x1da3\n").unwrap();
        let folder = root.join("sys/class").join(class);
        std::fs::create_dir_all(&folder).unwrap();
        symlink(device.join(class).join(name), folder.join(name)).unwrap();
    }

    fn why(root: &Path, sysfs: &Sysfs) -> String {
        let library = "libhl-thunk.so 1.10.0-8636f13";
        explain(sysfs, &root.join("dev/accel"), "6.12.0", library).expect("a reason").0
    }

    #[test]
    fn a_card_that_only_the_kernel_knows_is_a_pair_that_does_not_fit() {
        for (class, name, node) in [
            ("accel", "accel0", "dev/accel/accel_controlD0"),
            ("habanalabs", "hl3", "dev/hl_controlD3"),
        ] {
            let (root, sysfs) = machine(class, name);
            assert!(
                why(&root, &sysfs).contains(&format!("there is no {}", root.join(node).display()))
            );
            std::fs::write(root.join(node), "").unwrap();
            let text = why(&root, &sysfs);
            for part in
                [name, "0000:33:00.0", "Linux 6.12.0", "libhl-thunk.so 1.10.0-8636f13", "pairs"]
            {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
            let mode = std::fs::Permissions::from_mode(0o000);
            std::fs::set_permissions(root.join(node), mode).unwrap();
            if rustix::process::geteuid().is_root() {
                println!("skipped: root may open every node");
            } else {
                assert!(why(&root, &sysfs).contains("may not open"));
            }
            std::fs::remove_dir_all(&root).unwrap();
        }
    }

    #[test]
    fn a_card_whose_node_is_there_is_named_before_one_without() {
        let (root, sysfs) = machine("accel", "accel4");
        add_card(&root, "accel", "accel5", "0000:34:00.0");
        assert!(why(&root, &sysfs).contains("there is no"));
        std::fs::write(root.join("dev/accel/accel_controlD5"), "").unwrap();
        let text = why(&root, &sysfs);
        assert!(text.contains("accel5 at 0000:34:00.0") && text.contains("pairs"), "{text}");
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_machine_without_a_gaudi_has_no_pair_to_blame() {
        let nowhere = Sysfs::at("/nonexistent");
        assert_eq!(explain(&nowhere, Path::new("/nonexistent"), "6.12.0", ""), None);
        let (root, sysfs) = machine("accel", "accel9");
        let vendor = root.join("sys/devices/pci0000:30/0000:30:01.0/0000:33:00.0/vendor");
        std::fs::write(vendor, "0x8086\n").unwrap();
        assert_eq!(explain(&sysfs, &root.join("dev/accel"), "6.12.0", ""), None);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
