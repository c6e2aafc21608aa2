//! Detects a second engine in the process.
//!
//! All files that UCX loads open the same engine. A process has two engines if it uses two
//! installations, for example one through UCX and another through `ucx_gaudi.h`. Neither knows the
//! other's memory.

use std::collections::BTreeMap;

use uct::{Ucx, log};

/// This library's name.
const NAME: &str = "libucx_gaudi.so";

/// Warns if more than one file of ours is mapped.
pub(crate) fn warn(ucx: &Ucx) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let files = files(&maps);
    if files.len() > 1 {
        let files: Vec<&str> = files.into_values().collect();
        log!(
            ucx,
            Warn,
            "ucx-gaudi is loaded {} times ({}), and these do not know each other's memory: use one \
             installation in a process",
            files.len(),
            files.join(", ")
        );
    }
}

/// Our files in the format of `/proc/self/maps`, by device and inode.
fn files(maps: &str) -> BTreeMap<(&str, &str), &str> {
    let ours = |line: &&str| line.rsplit('/').next() == Some(NAME);
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
    fn mappings_of_one_file_count_once_and_loaders_not_at_all() {
        let one = "7f00-7f01 r-xp 00000000 fe:00 11 /a b/libucx_gaudi.so\n\
                   7f01-7f02 rw-p 00001000 fe:00 11 /a b/libucx_gaudi.so\n\
                   7f03-7f04 rw-p 00001000 fe:00 12 /a b/plugins/libuct_gaudi.so.0\n";
        assert_eq!(files(one).into_values().collect::<Vec<_>>(), ["/a b/libucx_gaudi.so"]);
        let two = format!("{one}7f05-7f06 r-xp 0 fe:00 13 /c/libucx_gaudi.so\n");
        assert_eq!(files(&two).len(), 2);
        assert!(files("").is_empty());
    }
}
