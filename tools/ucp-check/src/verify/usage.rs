//! What the kernel says of this process: descriptors, mappings, resident memory.

use anyhow::Result;
pub(super) use procfs::process::MMPermissions;
use procfs::process::{MemoryMaps, Process};

#[derive(Debug)]
pub(super) struct Usage {
    pub(super) descriptors: usize,
    pub(super) mappings: usize,
    /// Bytes.
    pub(super) resident: u64,
}

impl Usage {
    pub(super) fn now() -> Result<Usage> {
        let resident = Process::myself()?.statm()?.resident * procfs::page_size();
        Ok(Usage { descriptors: descriptors()?, mappings: mappings()?.len(), resident })
    }
}

/// Open descriptors; those by which they are counted are among them, each time alike.
pub(super) fn descriptors() -> Result<usize> {
    Ok(Process::myself()?.fd_count()?)
}

pub(super) fn mappings() -> Result<MemoryMaps> {
    Ok(Process::myself()?.maps()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_and_a_mapping_show() {
        let before = Usage::now().unwrap();
        let file = std::fs::File::open("/proc/self/maps").unwrap();
        assert_eq!(descriptors().unwrap(), before.descriptors + 1);
        drop(file);
        let here = std::ptr::from_ref(&before).addr() as u64;
        assert!(mappings().unwrap().iter().any(|m| m.address.0 <= here && here < m.address.1));
        assert!(before.resident > 0 && before.mappings > 0);
    }
}
