//! Noticing a second copy of the plugin in the process.
//!
//! The plugin's several names are links to one file, and a file is mapped once. Copied without the
//! links they are several plugins with an engine each, none of which knows the others' memory.

use std::collections::BTreeMap;

use uct::{Ucx, log};

/// Names under which UCX loads us.
const NAMES: [&str; 3] = ["libuct_gaudi.", "libucx_perftest_gaudi.", "libucm_gaudi."];

/// Warns if more than one file of ours is mapped.
pub(crate) fn warn(ucx: &Ucx) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let files = files(&maps);
    if files.len() > 1 {
        let files: Vec<&str> = files.into_values().collect();
        log!(
            ucx,
            Warn,
            "the plugin is loaded {} times ({}), and these do not know each other's memory: its \
             names must be links to one file; copy them with `cp -a` or `cargo xtask install`",
            files.len(),
            files.join(", ")
        );
    }
}

/// Our files in the format of `/proc/self/maps`, by device and inode.
fn files(maps: &str) -> BTreeMap<(&str, &str), &str> {
    let ours = |line: &&str| {
        let name = line.rsplit('/').next().unwrap_or_default();
        NAMES.iter().any(|known| name.starts_with(known))
    };
    maps.lines()
        .filter(ours)
        .filter_map(|line| {
            let mut fields = line.split_whitespace().skip(3);
            let (device, inode) = (fields.next()?, fields.next()?);
            Some(((device, inode), &line[line.find('/')?..]))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_one_file_and_copies_are_two() {
        let one = "7f00-7f01 r-xp 00000000 fe:00 11 /a b/libuct_gaudi.so.0.0.0\n\
                   7f01-7f02 rw-p 00001000 fe:00 11 /a b/libuct_gaudi.so.0.0.0\n\
                   7f03-7f04 rw-p 00001000 fe:00 12 /usr/lib/libuct_cma.so.0\n";
        assert_eq!(files(one).into_values().collect::<Vec<_>>(), ["/a b/libuct_gaudi.so.0.0.0"]);
        let two = format!("{one}7f05-7f06 r-xp 0 fe:00 13 /c/libucx_perftest_gaudi.so.0\n");
        assert_eq!(files(&two).len(), 2);
        assert!(files("").is_empty());
    }
}
