//! What the kernel says of this process: descriptors, mappings, resident memory.

use anyhow::{Context, Result};
use std::fs;

/// What a process uses.
#[derive(Debug)]
pub(super) struct Usage {
    pub(super) descriptors: usize,
    pub(super) mappings: usize,
    /// Bytes.
    pub(super) resident: u64,
}

impl Usage {
    pub(super) fn now() -> Result<Usage> {
        let text = fs::read_to_string("/proc/self/statm").context("/proc/self/statm")?;
        let pages: u64 = text.split(' ').nth(1).and_then(|n| n.parse().ok()).context("statm")?;
        let page = rustix::param::page_size() as u64;
        let (descriptors, mappings) = (descriptors()?, mappings()?.len());
        Ok(Usage { descriptors, mappings, resident: pages * page })
    }
}

/// Open descriptors.
pub(super) fn descriptors() -> Result<usize> {
    // The folder itself is open while it is read, each time alike.
    Ok(fs::read_dir("/proc/self/fd").context("/proc/self/fd")?.count())
}

/// A mapping of this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Whether any access is allowed.
    pub(super) accessible: bool,
    pub(super) line: String,
}

/// All mappings.
pub(super) fn mappings() -> Result<Vec<Mapping>> {
    let text = fs::read_to_string("/proc/self/maps").context("/proc/self/maps")?;
    text.lines().map(|line| parse(line).with_context(|| line.to_owned())).collect()
}

fn parse(line: &str) -> Option<Mapping> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let accessible = !rest.starts_with("---");
    Some(Mapping { start: number(start)?, end: number(end)?, accessible, line: line.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_read_with_their_protection() {
        let found = parse("7f0000001000-7f0000003000 ---p 00000000 00:00 0 ").unwrap();
        assert_eq!((found.start, found.end), (0x7f00_0000_1000, 0x7f00_0000_3000));
        assert!(!found.accessible);
        let line = "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]";
        assert!(parse(line).unwrap().accessible);
        assert_eq!(parse("nonsense"), None);
    }

    #[test]
    fn a_descriptor_and_a_mapping_show() {
        let before = Usage::now().unwrap();
        let file = fs::File::open("/proc/self/maps").unwrap();
        assert_eq!(descriptors().unwrap(), before.descriptors + 1);
        drop(file);
        let here = std::ptr::from_ref(&before).addr() as u64;
        assert!(mappings().unwrap().iter().any(|m| m.start <= here && here < m.end));
        assert!(before.resident > 0 && before.mappings > 0);
    }
}
