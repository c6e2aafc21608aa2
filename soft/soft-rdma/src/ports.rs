//! Counters of the node's ports: one set for each HCA, shared by all processes of the node and kept
//! when they end, as the counters in hardware are. Programs read them in sysfs (`sysfs`), while
//! others run.
//!
//! The counters are a file in the node's private folder, which every process maps. The file is never truncated, so no
//! access can fail.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::fabric::MAX_DEVICES;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident),* $(,)?) => {
        /// What one port did.
        #[repr(C, align(64))]
        #[derive(Default)]
        pub(crate) struct PortCounters {
            $($(#[doc = $doc])* pub(crate) $name: AtomicU64,)*
        }

        impl PortCounters {
            /// All zero.
            pub(crate) const fn new() -> Self {
                Self { $($name: AtomicU64::new(0)),* }
            }
        }

        /// Names, in the order in which the file has them.
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

counters! {
    /// Bytes sent, without headers.
    xmit_bytes,
    /// Messages sent.
    xmit_packets,
    /// Bytes received.
    rcv_bytes,
    /// Messages received.
    rcv_packets,
    /// Bytes of requests executed here that went from region to region in one copy.
    direct_bytes,
    /// Bytes of requests executed here that came or went in a stream.
    stream_bytes,
    /// Messages that were lost because the port was down.
    xmit_discards,
    /// Times the port went down.
    link_downed,
    /// 1 while it is down.
    down,
}

impl PortCounters {
    /// Takes the port down or up.
    pub(crate) fn set_down(&self, down: bool) {
        if self.down.swap(down.into(), Ordering::AcqRel) == 0 && down {
            self.link_downed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether nothing leaves or arrives.
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire) != 0
    }

    /// A message left.
    pub(crate) fn sent(&self, bytes: u64) {
        self.xmit_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.xmit_packets.fetch_add(1, Ordering::Relaxed);
    }

    /// A message arrived.
    pub(crate) fn received(&self, bytes: u64) {
        self.rcv_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.rcv_packets.fetch_add(1, Ordering::Relaxed);
    }
}

/// The counters of all ports of a node.
pub(crate) type Ports = [PortCounters; MAX_DEVICES as usize];

/// Where they are.
fn path(folder: &Path, node: u16) -> std::path::PathBuf {
    folder.join(format!("{node}.counters"))
}

/// Maps the counters of a node; made by its first process.
pub(crate) fn map(folder: &Path, node: u16) -> Result<&'static Ports, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::open(path(folder, node), flags, Mode::RUSR | Mode::WUSR)?;
    if rustix::fs::fstat(&file)?.st_size < size_of::<Ports>() as i64 {
        rustix::fs::ftruncate(&file, size_of::<Ports>() as u64)?;
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe {
        let length = size_of::<Ports>();
        rustix::mm::mmap(core::ptr::null_mut(), length, access, MapFlags::SHARED, file.as_fd(), 0)
    }?;
    // SAFETY: as long as the type, aligned to a page, never unmapped; atomics may have any value, and
    // others change them by atomic operations only.
    Ok(unsafe { &*base.cast::<Ports>() })
}

/// A counter of a port by its name, read from the file; zero where no process has used the node yet.
pub(crate) fn read(folder: &Path, node: u16, device: u8, name: &str) -> Option<u64> {
    let index = NAMES.iter().position(|known| *known == name)?;
    let at = usize::from(device) * size_of::<PortCounters>() + 8 * index;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let Ok(file) = rustix::fs::open(path(folder, node), flags, Mode::empty()) else {
        return Some(0);
    };
    let mut bytes = [0; 8];
    rustix::io::pread(file, &mut bytes, at as u64).ok()?;
    Some(u64::from_ne_bytes(bytes))
}
