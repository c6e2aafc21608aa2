//! The limit on locked memory. The kernel pins memory that is registered by address and counts its pages. An ordinary process may
//! pin `RLIMIT_MEMLOCK` bytes; a registration beyond that fails with `ENOMEM`. Memory registered by dma-buf is not counted.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::wire::Segment;

const PAGE: u64 = 4096;

/// Which limit applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The process's, unless it is privileged.
    Kernel,
    /// None.
    Off,
    /// So many bytes, for every process.
    Bytes(u64),
}

impl Limit {
    /// `kernel`, `off` or a number of bytes.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "kernel" => Some(Self::Kernel),
            "off" => Some(Self::Off),
            _ => text.parse().ok().map(Self::Bytes),
        }
    }

    fn pages(self) -> u64 {
        let bytes = match self {
            Self::Off => None,
            Self::Bytes(bytes) => Some(bytes),
            Self::Kernel if is_privileged() => None,
            Self::Kernel => rustix::process::getrlimit(rustix::process::Resource::Memlock).current,
        };
        bytes.map_or(u64::MAX, |bytes| bytes / PAGE)
    }
}

/// The kernel's `capable(CAP_IPC_LOCK)`: a capability of another user namespace does not count.
fn is_privileged() -> bool {
    let first_namespace = || {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        map.split_whitespace().eq(["0", "0", "4294967295"])
    };
    rustix::thread::capabilities(None)
        .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK))
        && first_namespace()
}

/// Pages that this process has pinned.
#[derive(Default)]
pub(crate) struct Account(AtomicU64);

/// Pages of one registration; subtracted when it is dropped.
pub(crate) struct Pages<'a> {
    account: &'a Account,
    count: u64,
}

impl Account {
    /// No pages.
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts the pages of a range.
    pub(crate) fn pin(&self, range: &Segment, limit: Limit) -> Result<Pages<'_>, Errno> {
        let count = (range.addr + range.len).div_ceil(PAGE) - range.addr / PAGE;
        let pages = Pages { account: self, count };
        let before = self.0.fetch_add(count, Ordering::AcqRel);
        // The drop subtracts refused pages, as the kernel does.
        if before.saturating_add(count) > limit.pages() { Err(Errno::NOMEM) } else { Ok(pages) }
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        self.account.0.fetch_sub(self.count, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_touched_counts_until_the_registration_ends() {
        let account = Account::new();
        let limit = Limit::parse("12288").unwrap();
        let pin = |addr, len| account.pin(&Segment { addr, len }, limit);
        let two = pin(4095, 2).unwrap();
        assert_eq!(pin(0, 4097).err(), Some(Errno::NOMEM));
        let one = pin(8192, 4096).unwrap();
        assert_eq!(pin(0, 1).err(), Some(Errno::NOMEM));
        drop(two);
        assert!(pin(0, 8192).is_ok());
        drop(one);
        assert!(account.pin(&Segment { addr: 0, len: 1 << 40 }, Limit::Off).is_ok());
        assert_eq!(account.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_limit_is_a_word_or_a_number() {
        assert_eq!(Limit::parse("kernel"), Some(Limit::Kernel));
        assert_eq!(Limit::parse("off"), Some(Limit::Off));
        assert_eq!(Limit::parse("65536"), Some(Limit::Bytes(65536)));
        assert_eq!(Limit::parse("lots"), None);
    }
}
