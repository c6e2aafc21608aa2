//! The kernel's view of the machine, read from a folder that tests (and containers that have the
//! host's sysfs elsewhere) can replace.
//!
//! Nothing in it is taken on trust: a file that is empty or makes no sense is the same as one
//! that is missing. A strange sysfs only means that less is known.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::BusId;
use crate::topology::{PciLink, PciLocation};

/// Names another root than `/sys`.
const ROOT_VARIABLE: &str = "GAUDI_SYSFS_ROOT";
/// Attributes are one line.
const MAX_TEXT: u64 = 4096;
/// More devices of a class than any machine has.
const MAX_ENTRIES: usize = 4096;

/// A sysfs: the kernel's, or something that looks like it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    /// `GAUDI_SYSFS_ROOT` where it is set, else `/sys`.
    fn default() -> Self {
        let root = std::env::var_os(ROOT_VARIABLE).filter(|root| !root.is_empty());
        Self::at(root.unwrap_or_else(|| "/sys".into()))
    }
}

impl Sysfs {
    /// The one in this folder.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where a PCI device sits; `None` if it is not there.
    pub fn location(&self, bus_id: &BusId) -> Option<PciLocation> {
        self.location_of(&self.root.join("bus/pci/devices").join(bus_id.as_str()))
    }

    /// How a PCI device is connected; `None` where sysfs does not say.
    pub fn link(&self, bus_id: &BusId) -> Option<PciLink> {
        let folder = self.root.join("bus/pci/devices").join(bus_id.as_str());
        let attribute = |name: &str| Self::line(&folder.join(name));
        PciLink::from_words(&attribute("current_link_speed")?, &attribute("current_link_width")?)
    }

    /// A parameter of a kernel module; `None` if it does not exist or cannot be read.
    pub fn module_parameter(&self, module: &str, name: &str) -> Option<String> {
        Self::line(&self.root.join("module").join(module).join("parameters").join(name))
    }

    /// What the driver says of a card's state, such as "operational" or "in reset".
    pub(crate) fn card_status(&self, bus_id: &BusId) -> Option<String> {
        Self::line(&self.root.join("bus/pci/devices").join(bus_id.as_str()).join("status"))
    }

    /// Where the PCI device sits whose folder this folder (or link) is in.
    pub fn location_of(&self, folder: &Path) -> Option<PciLocation> {
        let folder = folder.canonicalize().ok()?;
        let mut location = PciLocation::from_path(&folder)?;
        // A port or a queue is a folder inside its device's folder, which has the attributes.
        let name = OsStr::new(location.bus_id());
        let device = folder.ancestors().find(|folder| folder.file_name() == Some(name))?;
        let hex = |text: String| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok();
        location.vendor = Self::line(&device.join("vendor")).and_then(hex);
        // -1: the firmware does not say.
        location.numa_node =
            Self::line(&device.join("numa_node")).and_then(|text| text.parse().ok());
        let list = |text: &String| {
            text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b',' | b'-'))
        };
        location.local_cpus = Self::line(&device.join("local_cpulist")).filter(list);
        Some(location)
    }

    /// The devices of a class (such as `net`), by name and folder, in natural order.
    pub fn class(&self, class: &str) -> Vec<(String, PathBuf)> {
        Self::entries(&self.root.join("class").join(class))
    }

    /// The entries of a folder, by name, in natural order.
    pub fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        let named = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            name.bytes().all(|byte| byte.is_ascii_graphic()).then(|| (name, entry.path()))
        };
        let mut found: Vec<_> = entries.take(MAX_ENTRIES).flatten().filter_map(named).collect();
        found.sort_by_cached_key(|(name, _)| counted(name));
        found
    }

    /// An attribute's text: one line without strange characters.
    pub fn line(file: &Path) -> Option<String> {
        let mut text = String::new();
        File::open(file).ok()?.take(MAX_TEXT).read_to_string(&mut text).ok()?;
        let text = text.trim();
        (!text.is_empty() && !text.contains(char::is_control)).then(|| text.to_owned())
    }
}

/// The key of natural order, where a number at the end counts as a number: `mlx5_10` after `mlx5_9`.
fn counted(name: &str) -> (String, Option<u64>, usize) {
    let stem = name.trim_end_matches(|byte: char| byte.is_ascii_digit());
    (stem.to_owned(), name[stem.len()..].parse().ok(), name.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_the_order_people_count_them() {
        let mut names = ["mlx5_10", "mlx5_9", "eth0", "mlx5_bond", "mlx5_09"];
        names.sort_by_key(|name| counted(name));
        assert_eq!(names, ["eth0", "mlx5_9", "mlx5_09", "mlx5_10", "mlx5_bond"]);
    }

    #[test]
    fn what_is_not_there_says_nothing() {
        let nowhere = Sysfs::at("/nonexistent");
        assert_eq!(nowhere.location(&"0000:33:00.0".parse().unwrap()), None);
        assert_eq!(nowhere.link(&"0000:33:00.0".parse().unwrap()), None);
        assert!(nowhere.class("net").is_empty());
        assert_eq!(Sysfs::line(Path::new("/dev/null")), None);
        assert_eq!(Sysfs::line(Path::new("/")), None, "a folder is no attribute");
    }
}
