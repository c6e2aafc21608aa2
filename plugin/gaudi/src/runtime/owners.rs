//! Which processes have a card open, so that "device busy" can name them.
//!
//! Called when an open has failed, and by tools. The answer is a best effort: descriptors of other users' processes
//! cannot be seen, and a process may end during the search. The search opens nothing but a control node, and follows
//! a link only if its name fits, so that a dead network mount somewhere in the system cannot hang us.

use std::fmt;
use std::fs::Metadata;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hl_thunk::{ControlDevice, Library};

/// Most descriptors looked at in one search.
const MAX_LOOKS: usize = 100_000;
/// Most owners named.
const MAX_NAMED: usize = 4;

/// A process that has a card's compute node open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwningProcess {
    /// Its process id.
    pub pid: u32,
    /// The name it gave itself, fit for one line of text.
    pub command: String,
}

/// The result of a search for one card's owners.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owners {
    /// The processes that have its compute node open.
    pub found: Vec<OwningProcess>,
    /// Whether some processes could not be searched.
    pub incomplete: bool,
}

impl fmt::Display for Owners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.found.is_empty() {
            return f.write_str(if self.incomplete {
                "its owner is not among the processes this user may look into"
            } else {
                "no process here has it open: a dma-buf of it may still be in use, or its owner \
                 is in another container"
            });
        }
        f.write_str("it is held by ")?;
        for (at, OwningProcess { pid, command }) in self.found.iter().take(MAX_NAMED).enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            if *pid == std::process::id() {
                write!(f, "{comma}this process (pid {pid}), through another library")?;
            } else {
                write!(f, "{comma}{command} (pid {pid})")?;
            }
        }
        match self.found.len().saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl Owners {
    /// This process alone.
    #[cfg(test)]
    pub(crate) fn ourselves() -> Self {
        let owner = OwningProcess { pid: std::process::id(), command: String::from("test") };
        Owners { found: vec![owner], incomplete: false }
    }

    /// Whether this process is among them.
    pub(crate) fn is_this_process(&self) -> bool {
        self.found.iter().any(|owner| owner.pid == std::process::id())
    }
}

/// A descriptor of this process for the compute node of this card.
pub(crate) fn own_descriptor(library: &Arc<Library>, node: u32) -> Option<RawFd> {
    let wanted = wanted(library, node)?;
    let descriptors = std::fs::read_dir("/proc/self/fd").ok()?;
    descriptors.flatten().find_map(|descriptor| {
        let link = descriptor.path();
        let named = std::fs::read_link(&link).ok()?.file_name() == Some(&wanted.name);
        let is_it = named && FileIdentity::of(&std::fs::metadata(&link).ok()?) == wanted.identity;
        if is_it { descriptor.file_name().to_str()?.parse().ok() } else { None }
    })
}

fn wanted(library: &Arc<Library>, node: u32) -> Option<SearchedNode> {
    let control = ControlDevice::open(library, node).ok()?;
    let link = format!("/proc/self/fd/{}", control.as_fd().as_raw_fd());
    SearchedNode::at(&compute_node(&std::fs::read_link(link).ok()?)?)
}

/// Which processes have the compute nodes of these cards open, by their node numbers.
pub(crate) fn of_cards(library: &Arc<Library>, nodes: &[u32]) -> Vec<Owners> {
    let wanted: Vec<Option<SearchedNode>> =
        nodes.iter().map(|&node| wanted(library, node)).collect();
    search(Path::new("/proc"), &wanted)
}

/// The compute node that belongs to a control node: the driver has had two naming schemes.
fn compute_node(control: &Path) -> Option<PathBuf> {
    let name = control.file_name()?.to_str()?;
    let (kind, number) = name.split_once("_controlD")?;
    Some(control.with_file_name(format!("{kind}{number}")))
}

/// A node that is searched for.
#[derive(Debug)]
struct SearchedNode {
    name: std::ffi::OsString,
    identity: FileIdentity,
}

/// The same file under any path: a device by its number, another file by its inode.
#[derive(Debug, PartialEq, Eq)]
enum FileIdentity {
    Device(u64),
    File(u64, u64),
}

impl FileIdentity {
    fn of(meta: &Metadata) -> Self {
        if meta.file_type().is_char_device() {
            FileIdentity::Device(meta.rdev())
        } else {
            FileIdentity::File(meta.dev(), meta.ino())
        }
    }
}

impl SearchedNode {
    fn at(path: &Path) -> Option<Self> {
        let identity = FileIdentity::of(&std::fs::metadata(path).ok()?);
        Some(Self { name: path.file_name()?.to_owned(), identity })
    }
}

/// Searches the processes under `proc`, once for all nodes.
fn search(proc: &Path, wanted: &[Option<SearchedNode>]) -> Vec<Owners> {
    let mut answers = vec![Owners::default(); wanted.len()];
    let mut looks = 0;
    let mut incomplete = false;
    let processes = std::fs::read_dir(proc).into_iter().flatten().flatten();
    for process in processes {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fd")) else {
            incomplete = true;
            continue;
        };
        let mut counted = vec![false; wanted.len()];
        for descriptor in descriptors.flatten().take(MAX_LOOKS - looks) {
            looks += 1;
            let link = descriptor.path();
            let Ok(target) = std::fs::read_link(&link) else { continue };
            for ((wanted, answer), counted) in wanted.iter().zip(&mut answers).zip(&mut counted) {
                let is_it = |wanted: &SearchedNode| {
                    target.file_name() == Some(&wanted.name)
                        && std::fs::metadata(&link)
                            .is_ok_and(|meta| FileIdentity::of(&meta) == wanted.identity)
                };
                if !*counted && wanted.as_ref().is_some_and(is_it) {
                    *counted = true;
                    answer.found.push(OwningProcess { pid, command: command(&process.path()) });
                }
            }
        }
        if looks == MAX_LOOKS {
            incomplete = true;
            break;
        }
    }
    for (answer, wanted) in answers.iter_mut().zip(wanted) {
        answer.incomplete = incomplete || wanted.is_none();
    }
    answers
}

/// The name a process gave itself, made fit for one line of text.
fn command(process: &Path) -> String {
    let name = std::fs::read(process.join("comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&name);
    match name.trim() {
        "" => String::from("a process"),
        name => name.escape_debug().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_nodes_are_beside_their_control_nodes() {
        let node = |path: &str| compute_node(Path::new(path));
        assert_eq!(node("/dev/accel/accel_controlD11"), Some("/dev/accel/accel11".into()));
        assert_eq!(node("/dev/hl_controlD3"), Some("/dev/hl3".into()));
        assert_eq!(node("/dev/null"), None);
        assert_eq!(node("/"), None);
    }

    #[test]
    fn an_owner_is_found_by_the_file_and_not_by_its_name() {
        let folder = std::env::temp_dir().join(format!("gaudi-owners-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("other")).unwrap();
        let paths =
            [folder.join("accel0"), folder.join("accel1"), folder.join("other").join("accel1")];
        for path in &paths {
            std::fs::write(path, "").unwrap();
        }
        let open = [std::fs::File::open(&paths[0]), std::fs::File::open(&paths[2])];
        let wanted: Vec<_> = paths[..2].iter().map(|path| SearchedNode::at(path)).collect();
        let owners = search(Path::new("/proc"), &wanted);
        let mine =
            |owners: &Owners| owners.found.iter().any(|owner| owner.pid == std::process::id());
        assert!(mine(&owners[0]), "{owners:?}");
        assert!(!mine(&owners[1]), "the same name in another folder: {owners:?}");
        assert!(owners[0].to_string().contains("this process"), "{}", owners[0]);
        drop(open);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_device_is_the_same_under_any_path() {
        let (null, zero) = (Path::new("/dev/null"), Path::new("/dev/zero"));
        let identity = |path: &Path| FileIdentity::of(&std::fs::metadata(path).unwrap());
        let open = std::fs::File::open(null).unwrap();
        let link = format!("/proc/self/fd/{}", open.as_raw_fd());
        assert!(matches!(identity(null), FileIdentity::Device(_)));
        assert_eq!(identity(null), identity(Path::new(&link)));
        assert_ne!(identity(null), identity(zero));
    }

    #[test]
    fn what_is_known_is_said() {
        let owner = |pid| OwningProcess { pid, command: String::from("python3") };
        let owners = |count, incomplete| {
            Owners { found: (0..count).map(|at| owner(4_200_000 + at)).collect(), incomplete }
                .to_string()
        };
        assert_eq!(owners(1, true), "it is held by python3 (pid 4200000)");
        assert!(owners(6, false).ends_with("python3 (pid 4200003) and 2 more"));
        assert!(owners(0, true).contains("may look into"));
        assert!(owners(0, false).contains("dma-buf"));
    }

    #[test]
    fn a_system_without_proc_is_no_reason_to_fail() {
        let nothing = search(Path::new("/nonexistent"), &[None]);
        assert_eq!(nothing, [Owners { found: Vec::new(), incomplete: true }]);
    }
}
