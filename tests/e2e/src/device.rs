//! Which Gaudi a program finds: none, a software one of its own, or the machine's. The choice is made by the
//! loader path, as for any drop-in library; the plugin cannot see it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use soft_gaudi::testing::Machine;

use crate::Layout;

/// PCI vendor id of Habana Labs, as sysfs writes it.
const HABANA_VENDOR: &str = "0x1da3";

/// Folder where Habana's packages put the driver library.
const HABANA_LIB_DIR: &str = "/usr/lib/habanalabs";

/// A Gaudi, or its absence, as programs under test see it.
#[derive(Debug)]
pub enum Device {
    /// No driver library on the loader path.
    None,
    /// The software Gaudi: a whole machine in software.
    Software(SoftNode),
    /// The machine's own card and driver library.
    Hardware {
        /// Folders the loader needs to find the driver library; empty if it finds it by itself.
        lib_dirs: Vec<PathBuf>,
    },
}

/// A machine in software. Its unique name separates it from all others, and variables configure it. It is removed when
/// this value and every tool or process that was given it are gone.
#[derive(Debug)]
pub struct SoftNode {
    machine: Arc<Machine>,
    settings: Vec<(OsString, OsString)>,
}

impl SoftNode {
    /// A node no other test or run shares.
    pub fn unique() -> Self {
        Self { machine: Arc::new(Machine::temporary("e2e")), settings: Vec::new() }
    }

    /// A node that is as fast as possible and imports dma-bufs: more lenient than a card with an upstream driver.
    pub fn lenient() -> Self {
        Self::unique().with("SOFT_GAUDI_LENIENT", "import,ordered,unpinned")
    }

    /// Adds a setting of the software Gaudi, for example `SOFT_GAUDI_DEVICES`.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// The value of `SOFT_GAUDI_NODE`.
    pub fn name(&self) -> &str {
        self.machine.name()
    }

    /// Injects faults into the driver calls of the machine: rules as in `docs/software-gaudi.md`.
    ///
    /// # Panics
    /// When the rules cannot be written.
    #[must_use]
    #[track_caller]
    pub fn with_faults(self, rules: &str) -> Self {
        self.machine.set_faults(&self.generation(), rules);
        self.with("SOFT_GAUDI_FAULTS", "yes")
    }

    /// Replaces the rules, also while programs run.
    ///
    /// # Panics
    /// When they cannot be written.
    #[track_caller]
    pub fn set_faults(&self, rules: &str) {
        self.machine.set_faults(&self.generation(), rules);
    }

    /// The file of the rules. The software card removes a rule from it once the rule is used up.
    pub fn faults(&self) -> PathBuf {
        self.machine.faults_file(&self.generation())
    }

    /// The number of cards that were ever opened on this machine: each left a file with its memory.
    pub fn cards_opened(&self) -> usize {
        let folder = self.machine.folder(&self.generation());
        let entries = folder.read_dir().into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("hbm")).count()
    }

    /// Removes the machine with all its cards, even if processes still use them.
    pub fn remove(&self) {
        self.machine.remove();
    }

    fn generation(&self) -> String {
        let set = self.settings.iter().rfind(|(name, _)| name == "SOFT_GAUDI_GENERATION");
        set.map_or("gaudi2".into(), |(_, value)| value.to_string_lossy().into_owned())
    }
}

impl Device {
    /// A software Gaudi with default settings.
    pub fn software() -> Self {
        Self::Software(SoftNode::unique())
    }

    /// A software Gaudi with this many cards.
    pub fn cards(count: u32) -> Self {
        Self::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", &count.to_string()))
    }

    /// The same with a driver that imports dma-bufs.
    pub fn importing(count: u32) -> Self {
        Self::cards(count).lenient("import")
    }

    /// The same with a driver that does not import them, even if `--long` chose one that does.
    pub fn not_importing(count: u32) -> Self {
        Self::cards(count).lenient("")
    }

    /// The same, with these of a card's restrictions lifted.
    #[must_use]
    pub fn lenient(self, list: &str) -> Self {
        match self {
            Self::Software(node) => Self::Software(node.with("SOFT_GAUDI_LENIENT", list)),
            other => other,
        }
    }

    /// The machine's own card if it has one and its driver library, else a software one.
    pub fn hardware_or(software: SoftNode) -> Self {
        Self::hardware(Path::new("/")).unwrap_or(Self::Software(software))
    }

    /// The card of the machine whose file system is at `root`, if it has one and its driver library.
    pub fn hardware(root: &Path) -> Option<Self> {
        let lib_dirs = Self::driver_library(root)?;
        has_card(root).then_some(Self::Hardware { lib_dirs })
    }

    /// Where the machine at `root` keeps a driver library, as folders to add to the loader path (none
    /// if the loader looks there anyway); `None` if it has no such library.
    pub fn driver_library(root: &Path) -> Option<Vec<PathBuf>> {
        let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let mut candidates: Vec<PathBuf> = std::env::split_paths(&inherited).collect();
        candidates.push(PathBuf::from(HABANA_LIB_DIR));
        let holds_library = |dir: &Path| under(root, dir).join("libhl-thunk.so").exists();
        if let Some(dir) = candidates.into_iter().find(|dir| holds_library(dir)) {
            return Some(vec![dir]);
        }
        let system = ["/lib", "/usr/lib", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/local/lib"];
        system.iter().any(|dir| holds_library(Path::new(dir))).then(Vec::new)
    }

    /// Its name in output, which must make clear that the software Gaudi is not hardware.
    pub fn title(&self) -> &'static str {
        match self {
            Device::None => "no Gaudi",
            Device::Software(_) => "software Gaudi (no card involved)",
            Device::Hardware { .. } => "Gaudi hardware",
        }
    }

    /// The software machine, which must live as long as programs use it.
    pub(crate) fn machine(&self) -> Option<Arc<Machine>> {
        match self {
            Device::Software(node) => Some(node.machine.clone()),
            Device::None | Device::Hardware { .. } => None,
        }
    }

    /// Folders for the loader path, and variables.
    pub fn loader(&self, layout: &Layout) -> (Vec<PathBuf>, Vec<(OsString, OsString)>) {
        match self {
            Device::None => (Vec::new(), Vec::new()),
            Device::Hardware { lib_dirs } => (lib_dirs.clone(), Vec::new()),
            Device::Software(node) => {
                let mut envs = vec![("SOFT_GAUDI_NODE".into(), node.name().into())];
                envs.extend(node.settings.iter().cloned());
                (vec![layout.soft_gaudi()], envs)
            }
        }
    }
}

fn has_card(root: &Path) -> bool {
    // Old drivers have a class of their own; new ones share `accel` with other vendors.
    if under(root, Path::new("/dev/hl0")).exists() {
        return true;
    }
    let Ok(entries) = std::fs::read_dir(under(root, Path::new("/sys/class/accel"))) else {
        return false;
    };
    entries.flatten().any(|entry| {
        std::fs::read_to_string(entry.path().join("device/vendor"))
            .is_ok_and(|vendor| vendor.trim() == HABANA_VENDOR)
    })
}

fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose file system has these files.
    fn hardware(files: &[(&str, &str)]) -> Option<Device> {
        let root = tempfile::tempdir().expect("temporary folder");
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("has a parent")).expect("folders");
            std::fs::write(path, text).expect("file");
        }
        Device::hardware(root.path())
    }

    #[test]
    fn hardware_is_a_card_of_habanas_and_the_driver_library() {
        let card = ("sys/class/accel/accel0/device/vendor", "0x1da3\n");
        let other_card = ("sys/class/accel/accel0/device/vendor", "0x8086\n");
        let library = ("usr/lib/habanalabs/libhl-thunk.so", "");
        for files in [&[card][..], &[library], &[other_card, library]] {
            assert!(hardware(files).is_none(), "{files:?}");
        }
        let Some(Device::Hardware { lib_dirs }) = hardware(&[card, library]) else {
            panic!("no hardware");
        };
        assert_eq!(lib_dirs, [PathBuf::from(HABANA_LIB_DIR)]);
    }
}
