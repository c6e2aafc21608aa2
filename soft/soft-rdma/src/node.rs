//! What the processes of a node share: a folder, and a slot for each process.
//!
//! A slot is a number that a process holds by a lock on a file; it is part of its queue pair numbers and names its
//! socket. The kernel releases the lock when the process ends, in whatever way.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::config::Config;
use crate::fabric::MAX_SLOT;
use crate::link::descriptor::Descriptor;

/// This process's place in its node.
#[derive(Debug)]
pub(crate) struct Node {
    folder: PathBuf,
    pub(crate) slot: u16,
    _lock: Descriptor,
}

/// Random bytes of the kernel.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => panic!("no random bytes: {error}"),
        }
    }
    bytes
}

/// Makes the folder if needed; it must be ours alone.
fn open_folder(folder: &Path) -> Result<(), Errno> {
    match rustix::fs::mkdir(folder, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    let stat = rustix::fs::lstat(folder)?;
    let ours = stat.st_uid == rustix::process::geteuid().as_raw();
    let is_folder =
        rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory;
    if !ours || !is_folder || stat.st_mode & 0o077 != 0 {
        eprintln!("soft-rdma: {} must be a folder of this user with mode 0700", folder.display());
        return Err(Errno::ACCESS);
    }
    Ok(())
}

impl Node {
    /// Joins the node: claims a slot. `open` opens what belongs to the slot; if
    /// its address is in use (`EADDRINUSE`) the next slot is taken.
    pub(crate) fn join<T>(
        config: &Config,
        open: impl Fn(&Self) -> Result<T, Errno>,
    ) -> Result<(Self, T), Errno> {
        open_folder(&config.folder)?;
        // Start at a random slot, so that numbers of processes that ended are not reused at once.
        let first = u16::from_le_bytes(random()) % MAX_SLOT;
        for slot in (0..MAX_SLOT).map(|step| (first + step) % MAX_SLOT + 1) {
            let path = config.folder.join(format!("{}-{slot}.lock", config.node));
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
            match rustix::fs::flock(fd.as_fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    let node = Self { folder: config.folder.clone(), slot, _lock: fd.into() };
                    match open(&node) {
                        Err(Errno::ADDRINUSE) => {}
                        result => return result.map(|opened| (node, opened)),
                    }
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        eprintln!("soft-rdma: all {MAX_SLOT} slots of {} are taken", config.folder.display());
        Err(Errno::BUSY)
    }

    /// The socket of a process of a node.
    pub(crate) fn socket_path(&self, node: u16, slot: u16) -> PathBuf {
        self.folder.join(format!("{node}-{slot}.sock"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_others_may_have_prepared_is_refused() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let base = std::env::temp_dir().join(format!("soft-rdma-prepared-{}", std::process::id()));
        std::fs::create_dir(&base).unwrap();
        let [good, open, link, foreign] =
            ["good", "open", "link", "foreign"].map(|name| base.join(name));
        assert_eq!(open_folder(&good), Ok(()));
        for (folder, mode) in [(&open, 0o777), (&foreign, 0o700)] {
            std::fs::create_dir(folder).unwrap();
            std::fs::set_permissions(folder, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        symlink(&good, &link).unwrap();
        let found = [&open, &link].map(|folder| open_folder(folder));
        let of_another = chown(&foreign, Some(1), None).map(|()| open_folder(&foreign));
        std::fs::remove_dir_all(&base).unwrap();
        assert_eq!(found, [Err(Errno::ACCESS); 2]);
        match of_another {
            Ok(found) => assert_eq!(found, Err(Errno::ACCESS)),
            Err(_) => println!("skipped: a folder of another user, which only root can make"),
        }
    }

    #[test]
    fn a_slot_whose_address_is_taken_is_given_back_for_the_next() {
        let folder = format!("/tmp/soft-rdma-node-{}", std::process::id());
        let variable = |name: &str| (name == "SOFT_RDMA_DIR").then(|| folder.clone());
        let config = Config::parse(variable);
        let tried = std::cell::RefCell::new(Vec::new());
        let open = |node: &Node| {
            tried.borrow_mut().push(node.slot);
            if tried.borrow().len() == 1 { Err(Errno::ADDRINUSE) } else { Ok(()) }
        };
        let joined = Node::join(&config, open).map(|(node, ())| node.slot);
        let refused = Node::join(&config, |_| Err::<(), _>(Errno::MFILE)).map(|_| ());
        let lock = config.folder.join(format!("1-{}.lock", tried.borrow()[0]));
        let lock = rustix::fs::open(lock, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let free = rustix::fs::flock(lock.unwrap(), FlockOperation::NonBlockingLockExclusive);
        let _ = std::fs::remove_dir_all(folder);
        assert_eq!(joined, Ok(tried.borrow()[1]));
        assert_ne!(tried.borrow()[0], tried.borrow()[1]);
        assert_eq!((refused, free), (Err(Errno::MFILE), Ok(())));
    }
}
