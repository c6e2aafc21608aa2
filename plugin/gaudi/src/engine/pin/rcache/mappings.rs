//! Finds memory of this process that the driver is certain to refuse: mappings that are not writable, according to
//! `/proc/self/maps`. Reading that takes from microseconds to milliseconds, so it is done only after the driver
//! refused, and rarely then.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;

/// The first mapping that touches `range` and is not writable. `None` also if `/proc/self/maps` cannot be read.
pub(super) fn read_only(range: &Range<u64>) -> Option<Range<u64>> {
    find(BufReader::new(File::open("/proc/self/maps").ok()?), range)
}

fn find(maps: impl BufRead, range: &Range<u64>) -> Option<Range<u64>> {
    let mappings = maps.split(b'\n').map_while(Result::ok).map_while(|line| parse(&line));
    // The kernel lists them in the order of their addresses.
    let mut touching = mappings
        .take_while(|(mapping, _)| mapping.start < range.end)
        .filter(|(mapping, _)| range.start < mapping.end);
    touching.find(|(_, writable)| !writable).map(|(mapping, _)| mapping)
}

/// Parses the start of a line, `7f10000-7f20000 r--p …`: the mapping, and whether it is writable.
fn parse(line: &[u8]) -> Option<(Range<u64>, bool)> {
    // The rest of the line may contain a file name, in any encoding.
    let mut words = line.splitn(3, |byte| *byte == b' ');
    let (start, end) = std::str::from_utf8(words.next()?).ok()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let writable = *words.next()?.get(1)? == b'w';
    Some((number(start)?..number(end)?, writable))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"1000-3000 rw-p 00000000 00:00 0 [heap]\n\
        3000-4000 ---p 00000000 00:00 0 \n\
        4000-6000 r--s 00000000 fe:00 1312 /models/\xff \xfe\n\
        8000-9000 rw-s 00000000 00:01 2 /dev/shm/x\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";

    #[test]
    fn the_first_mapping_of_a_range_that_may_not_be_written_is_found() {
        let find = |range| find(MAPS, &range);
        assert_eq!(find(0x1000..0x3000), None);
        assert_eq!(find(0x2fff..0x3001), Some(0x3000..0x4000));
        assert_eq!(find(0x5000..0x9000), Some(0x4000..0x6000));
        assert_eq!(find(0x6000..0x9000), None, "a gap is no mapping");
        assert_eq!(find(0xffff_ffff_ff60_0000..u64::MAX).unwrap().start, 0xffff_ffff_ff60_0000);
        assert_eq!(find(0..0), None);
    }

    #[test]
    fn nonsense_ends_the_search() {
        let nonsense: [&[u8]; 9] = [
            b"",
            b"\n",
            b"-",
            b"1000",
            b"1000-2000",
            b"1000-2000 r",
            b"x-y r--p",
            b"1000-\xff r--p",
            b"1000-22222222222222222 r--p",
        ];
        for text in nonsense {
            assert_eq!(find(text, &(0..u64::MAX)), None, "{text:?}");
        }
    }

    #[test]
    fn this_program_s_constants_are_read_only_and_its_stack_is_not() {
        static CONSTANT: [u8; 16] = [7; 16];
        let local = [7_u8; 16];
        let page_of = |bytes: &[u8]| {
            let start = bytes.as_ptr() as u64 & !4095;
            start..start + 4096
        };
        let found = read_only(&page_of(&CONSTANT)).expect("constants cannot be written");
        assert!(found.contains(&(CONSTANT.as_ptr() as u64)));
        assert_eq!(read_only(&page_of(&local)), None);
    }
}
