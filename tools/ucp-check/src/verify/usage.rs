//! What this process uses, according to the kernel: descriptors, threads, mappings, resident memory.

use anyhow::Result;
pub(super) use procfs::process::MMPermissions;
use procfs::process::{MemoryMaps, Process};
use serde::{Deserialize, Serialize};

#[derive(Debug)]
pub(crate) struct Usage {
    pub(super) descriptors: usize,
    pub(super) threads: usize,
    pub(super) mappings: usize,
    /// Bytes.
    pub(super) resident: u64,
    /// The part of it that is neither a file nor shared.
    pub(super) anonymous: u64,
}

impl Usage {
    pub(crate) fn now() -> Result<Usage> {
        let process = Process::myself()?;
        let resident = process.statm()?.resident * procfs::page_size();
        let threads = usize::try_from(process.stat()?.num_threads)?;
        let anonymous = process.status()?.rssanon.unwrap_or(0) * 1024;
        // It holds a descriptor open, which must not be counted.
        drop(process);
        let (descriptors, mappings) = (descriptors()?, mappings()?.len());
        Ok(Usage { descriptors, threads, mappings, resident, anonymous })
    }
}

/// What one process of many uses, in a line that other programs parse.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessUsage {
    pub rank: u8,
    /// Whether it has a card.
    pub card: bool,
    pub endpoints: usize,
    pub descriptors: usize,
    pub threads: usize,
    pub mappings: usize,
    /// Bytes.
    pub resident: u64,
}

impl ProcessUsage {
    /// The beginning of such a line; JSON follows.
    pub(crate) const PREFIX: &str = "usage: ";

    pub(crate) fn now(rank: u8, card: bool, endpoints: usize) -> Result<ProcessUsage> {
        let Usage { descriptors, threads, mappings, resident, .. } = Usage::now()?;
        Ok(ProcessUsage { rank, card, endpoints, descriptors, threads, mappings, resident })
    }

    pub(crate) fn line(&self) -> Result<String> {
        Ok(format!("{}{}", Self::PREFIX, serde_json::to_string(self)?))
    }

    /// All such lines of a text.
    pub fn of(text: &str) -> Vec<ProcessUsage> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(Self::PREFIX));
        lines.filter_map(|json| serde_json::from_str(json).ok()).collect()
    }
}

/// Open descriptors, including the one that counts them, which is the same each time.
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
    fn a_line_of_usage_is_found_again() {
        let usage = ProcessUsage::now(3, true, 7).unwrap();
        let text = format!("x\n{}\nusage: of another kind\n", usage.line().unwrap());
        assert_eq!(ProcessUsage::of(&text), [usage]);
    }

    #[test]
    fn a_descriptor_and_a_mapping_show() {
        let before = Usage::now().unwrap();
        let file = std::fs::File::open("/proc/self/maps").unwrap();
        assert_eq!(descriptors().unwrap(), before.descriptors + 1);
        drop(file);
        let here = std::ptr::from_ref(&before).addr() as u64;
        assert!(mappings().unwrap().iter().any(|m| m.address.0 <= here && here < m.address.1));
        assert!(0 < before.anonymous && before.anonymous < before.resident);
        assert!(before.mappings > 0 && before.threads > 0);
    }
}
