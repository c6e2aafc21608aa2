//! The machine: a folder that all processes of a user share, with a few files per card.
//!
//! | file | what it is |
//! |---|---|
//! | `accelN` | the compute node: its descriptor is what `hlthunk_open` returns; the lock on it is the ownership of the card, its content at the offsets of the handles are the command buffers |
//! | `accel_controlDN` | the control node |
//! | `hbmN` | the memory: SRAM, then DRAM, sparse |
//! | `stateN` | what the owner publishes for other processes, with magic and version ([`crate::state`]) |
//! | `kernel.log` | what the driver would have written to the kernel's log as an error, a line each |
//! | `faults` | rules of faults on demand ([`crate::faults`]) |
//! | `dmabuf/` | exported ranges ([`crate::dmabuf`]) |
//!
//! The folder is `soft-gaudi-<uid>/<node>/<generation>` in `/dev/shm`, or in the temporary folder
//! where that is missing.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{OnceLock, RwLock};

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::asic::Profile;
use crate::config::{self, Config};
use crate::faults::{self, Action};

/// Which of a card's two nodes a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// `accelN`.
    Compute,
    /// `accel_controlDN`.
    Control,
}

/// A descriptor recognised as a card's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) device: u32,
    pub(crate) role: Role,
    /// Whether this process, or the one it was forked from, opened the open file.
    pub(crate) opened_here: bool,
}

/// Hashes device and inode numbers. It is called often, and the kernel chooses the numbers: it is fast, not robust.
#[derive(Default)]
struct FileHasher(u64);

impl Hasher for FileHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The machine of this process.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) config: &'static Config,
    pub(crate) profile: &'static Profile,
    folder: PathBuf,
    known: RwLock<HashMap<(u64, u64), Identity, BuildHasherDefault<FileHasher>>>,
    /// A random number that marks the file position of descriptions that this process opened.
    mark: u64,
}

/// Bits of a position that hold the mark; the lowest bits hold the number of the card and the role.
const MARK_BITS: u64 = !0x3ff & (i64::MAX as u64) >> 1;

impl Identity {
    /// The position of a description of this node.
    fn position(self, mark: u64) -> u64 {
        mark | u64::from(self.device) << 1 | u64::from(self.role == Role::Control)
    }

    fn from_position(position: u64, mark: u64) -> Option<Self> {
        let role = if position & 1 == 0 { Role::Compute } else { Role::Control };
        let device = (position & !MARK_BITS) >> 1;
        (position & MARK_BITS == mark).then_some(Identity {
            device: u32::try_from(device).ok()?,
            role,
            opened_here: true,
        })
    }
}

/// A random number, so that no other file has it as its position by chance.
fn random_mark() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness there is no mark, and files are recognised by their inode.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes) & MARK_BITS,
        _ => 0,
    }
}

/// The machine, or `ENODEV` when the variables describe none.
pub(crate) fn node() -> Result<&'static Node, Errno> {
    static NODE: OnceLock<Option<Node>> = OnceLock::new();
    NODE.get_or_init(|| {
        let config = config::config()?;
        let profile = config.profile;
        let folder = base_folder()?.join(&config.node).join(config.generation.name());
        Some(Node { config, profile, folder, known: RwLock::default(), mark: random_mark() })
    })
    .as_ref()
    .ok_or(Errno::NODEV)
}

/// The user's folder in `/dev/shm` or the temporary folder, checked to be accessible to this user only.
fn base_folder() -> Option<PathBuf> {
    let mut reasons = String::new();
    for base in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
        let folder = config::user_folder(&base);
        match private_folder(&folder) {
            Ok(()) => {
                if !reasons.is_empty() {
                    eprintln!("soft-gaudi: the machine is in {}{reasons}", folder.display());
                }
                return Some(folder);
            }
            Err(reason) => reasons = format!("{reasons}; {}: {reason}", folder.display()),
        }
    }
    eprintln!("soft-gaudi: no folder for the machine's state{reasons}; no devices");
    None
}

fn private_folder(folder: &Path) -> Result<(), String> {
    match std::fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error.to_string());
        }
        _ => {}
    }
    let meta = std::fs::symlink_metadata(folder).map_err(|error| error.to_string())?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() {
        return Err("is not a folder of this user".to_owned());
    }
    match meta.mode() & 0o077 {
        0 => Ok(()),
        // Others may read it, but none could write to it: just restrict the mode.
        open if open & 0o022 == 0 => {
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))
                .map_err(|error| format!("cannot be closed to others: {error}"))
        }
        _ => Err(format!("others may write to it (mode {:o})", meta.mode() & 0o777)),
    }
}

impl Node {
    /// Opens one of a card's files, creating it (and the folder, if it was removed).
    fn open_file(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let open = || {
            rustix::fs::open(
                self.folder.join(name),
                flags | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW,
                Mode::RUSR | Mode::WUSR,
            )
        };
        match open() {
            Err(Errno::NOENT) => {
                self.make_folders()?;
                open()
            }
            other => other,
        }
    }

    fn make_folders(&self) -> Result<(), Errno> {
        let made =
            std::fs::DirBuilder::new().mode(0o700).recursive(true).create(self.dmabuf_folder());
        made.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    /// A fresh open file description of a card's node.
    pub(crate) fn open(&self, device: u32, role: Role) -> Result<OwnedFd, Errno> {
        if device >= self.config.devices {
            return Err(Errno::NOENT);
        }
        let fd = self.open_file(&file_name(device, role), OFlags::RDWR)?;
        let stat = rustix::fs::fstat(&fd)?;
        let identity = Identity { device, role, opened_here: false };
        let mut known = self.known.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        known.insert((stat.st_dev, stat.st_ino), identity);
        if self.mark != 0 {
            // If it fails, the node is recognised by its inode.
            let _ = rustix::fs::seek(&fd, SeekFrom::Start(identity.position(self.mark)));
        }
        Ok(fd)
    }

    /// The card's memory file.
    pub(crate) fn open_memory(&self, device: u32) -> Result<OwnedFd, Errno> {
        // A test that wrote fault rules made the machine's folder, but not the one for exports.
        self.make_folders()?;
        self.open_file(&format!("hbm{device}"), OFlags::RDWR)
    }

    /// Path of the card's memory file, for importers of a dma-buf.
    pub(crate) fn memory_path(&self, device: u32) -> PathBuf {
        self.folder.join(format!("hbm{device}"))
    }

    /// Where a file of the machine is.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Opens a file, or creates it so that no process sees it without its first content; `ENOMEM` if there is no space.
    pub(crate) fn open_or_create(
        &self,
        name: &str,
        content: impl FnOnce() -> Vec<u8>,
    ) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = || rustix::fs::open(self.path(name), flags, Mode::empty());
        match open() {
            Err(Errno::NOENT) => {}
            other => return other,
        }
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let unfinished = format!("{name}.new-{}-{count}", std::process::id());
        let file = self.open_file(&unfinished, OFlags::RDWR | OFlags::TRUNC)?;
        let bytes = content();
        let made = match rustix::io::pwrite(&file, &bytes, 0) {
            Ok(written) if written == bytes.len() => {
                // Unlike a rename, a link does not replace a file that another process has made meanwhile.
                match std::fs::hard_link(self.path(&unfinished), self.path(name)) {
                    Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                        Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
                    }
                    _ => Ok(()),
                }
            }
            Ok(_) => Err(Errno::NOSPC),
            Err(errno) => Err(errno),
        };
        let _ = std::fs::remove_file(self.path(&unfinished));
        made.map_err(|errno| self.out_of_space(errno))?;
        open()
    }

    /// The driver's `ENOMEM` if the file system is full.
    pub(crate) fn out_of_space(&self, errno: Errno) -> Errno {
        if !matches!(errno, Errno::NOSPC | Errno::DQUOT) {
            return errno;
        }
        self.advise_on_space();
        Errno::NOMEM
    }

    /// Whether the file system that holds the machine is full.
    pub(crate) fn is_full(&self) -> bool {
        rustix::fs::statvfs(&self.folder).is_ok_and(|space| space.f_bavail == 0)
    }

    /// Says what to do about a full file system, in one line per process.
    pub(crate) fn advise_on_space(&self) {
        static SAID: std::sync::Once = std::sync::Once::new();
        SAID.call_once(|| {
            let machines = self.folder.ancestors().nth(2).unwrap_or(&self.folder);
            eprintln!(
                "soft-gaudi: no space left in {} for the machine: remove the folders of machines that nobody uses \
                 from {}, or make the file system larger (mount -o remount,size=…)",
                self.folder.display(),
                machines.display()
            );
        });
    }

    /// Records a line that the kernel would log as an error, in `kernel.log` of the machine's folder.
    /// `errno` is 0 if the line is not about a refusal.
    pub(crate) fn log_kernel_error(&self, device: u32, what: &str, errno: i32) {
        const MOST: u64 = 1 << 20;
        let flags = OFlags::WRONLY | OFlags::APPEND;
        let Ok(file) = self.open_file("kernel.log", flags) else { return };
        if rustix::fs::fstat(&file).is_ok_and(|stat| (stat.st_size as u64) < MOST) {
            // Lost when there is no space, as the kernel's own are.
            let _ = rustix::io::write(&file, format!("accel{device} {what} {errno}\n").as_bytes());
        }
    }

    /// Says once that times are modelled.
    pub(crate) fn announce_model(&self) {
        static SAID: std::sync::Once = std::sync::Once::new();
        if let Some(model) = self.config.model {
            SAID.call_once(|| {
                let line = format!(
                    "soft-gaudi: times are modelled ({}, {} times slower): {} and {} MB/s to and from the card\n",
                    model.name, model.slow, model.to_device / model.slow, model.to_host / model.slow
                );
                // In one write: several processes may print it at once.
                let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
            });
        }
    }

    /// The fault on demand for this point, if a rule says so.
    pub(crate) fn fault(&self, point: &str) -> Option<Action> {
        if self.config.faults {
            faults::next_action(&self.folder.join("faults"), point)
        } else {
            None
        }
    }

    /// Where exported ranges live.
    pub(crate) fn dmabuf_folder(&self) -> PathBuf {
        self.folder.join("dmabuf")
    }

    /// Which card a descriptor belongs to: `EBADF` if it is none, `ENOTTY` if it is not ours.
    ///
    /// It looks at the open file, not at the number. So duplicates of a descriptor work, and a number that the program
    /// closed and reused is noticed. The file position is the cheapest thing to query: nodes are opened at a random
    /// one, and programs do not read, write or seek them.
    pub(crate) fn identify(&self, fd: BorrowedFd<'_>) -> Result<Identity, Errno> {
        if self.mark != 0
            && let Ok(position) = rustix::fs::tell(fd)
            && let Some(identity) = Identity::from_position(position, self.mark)
        {
            return Ok(identity);
        }
        let stat = rustix::fs::fstat(fd)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::NOTTY);
        }
        let key = (stat.st_dev, stat.st_ino);
        let known = self.known.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(identity) = known.get(&key) {
            return Ok(*identity);
        }
        drop(known);
        // Perhaps a descriptor that another process opened and passed on.
        for device in 0..self.config.devices {
            for role in [Role::Compute, Role::Control] {
                let path = self.folder.join(file_name(device, role));
                if let Ok(meta) = std::fs::symlink_metadata(path)
                    && (meta.dev(), meta.ino()) == key
                {
                    let identity = Identity { device, role, opened_here: false };
                    let mut known =
                        self.known.write().unwrap_or_else(|poisoned| poisoned.into_inner());
                    known.insert(key, identity);
                    return Ok(identity);
                }
            }
        }
        Err(Errno::NOTTY)
    }

    /// Whether any process owns the card.
    pub(crate) fn is_owned(&self, device: u32) -> Result<bool, Errno> {
        crate::ownership::is_locked(self.open(device, Role::Compute)?.as_fd())
    }
}

fn file_name(device: u32, role: Role) -> String {
    match role {
        Role::Compute => format!("accel{device}"),
        Role::Control => format!("accel_controlD{device}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_identifies_its_node_and_other_positions_do_not() {
        let mark = 0x1234_5678_9abc_d400 & MARK_BITS;
        for device in [0, 7, 255] {
            for role in [Role::Compute, Role::Control] {
                let identity = Identity { device, role, opened_here: true };
                let position = identity.position(mark);
                assert!(i64::try_from(position).is_ok());
                assert_eq!(Identity::from_position(position, mark), Some(identity));
                assert_eq!(Identity::from_position(position, mark ^ 0x400), None);
            }
        }
        for position in [0, 1, 4096, u64::MAX] {
            assert_eq!(Identity::from_position(position, mark), None);
        }
    }

    #[test]
    fn a_folder_that_others_may_read_is_closed_and_one_they_may_write_is_refused() {
        let folder = std::env::temp_dir().join(format!("soft-gaudi-mode-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let mode = |mode| {
            std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(mode)).unwrap();
            let result = private_folder(&folder);
            (result, std::fs::metadata(&folder).unwrap().mode() & 0o777)
        };
        assert_eq!(mode(0o755), (Ok(()), 0o700));
        assert_eq!(mode(0o777), (Err("others may write to it (mode 777)".to_owned()), 0o777));
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_link_and_a_folder_of_another_user_are_refused() {
        use std::os::unix::fs::{chown, symlink};
        let base = std::env::temp_dir().join(format!("soft-gaudi-owner-{}", std::process::id()));
        let [good, link, foreign] = ["good", "link", "foreign"].map(|name| base.join(name));
        for folder in [&base, &good, &foreign] {
            std::fs::DirBuilder::new().mode(0o700).create(folder).unwrap();
        }
        symlink(&good, &link).unwrap();
        let [of_good, of_link] = [&good, &link].map(|folder| private_folder(folder));
        let of_foreign = chown(&foreign, Some(1), None).map(|()| private_folder(&foreign));
        std::fs::remove_dir_all(&base).unwrap();
        let refused = Err("is not a folder of this user".to_owned());
        assert_eq!((of_good, of_link), (Ok(()), refused.clone()));
        match of_foreign {
            Ok(found) => assert_eq!(found, refused),
            Err(_) => println!("skipped: a folder of another user, which only root can make"),
        }
    }
}
