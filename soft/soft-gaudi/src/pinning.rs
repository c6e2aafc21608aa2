//! Host memory mapped for the card: pinned ([`crate::ring`]); if that is not possible or not wanted, made present and writable.
//!
//! Without pins, a copy uses the pages that are mapped when it runs. If the program has unmapped them, it gets a device
//! fault, where a real card would go on with the old pages.

use std::sync::OnceLock;

use rustix::io::Errno;

use crate::address_space::HOST_PAGE;
use crate::ring::{self, Pin};

/// Host memory of a mapping.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// It is made of huge pages.
    pub(crate) huge: bool,
    /// Its pages in this process, in pieces.
    pub(crate) pieces: Vec<(usize, u64)>,
    /// The pin of each piece; none if the pages are found when they are used.
    pub(crate) pins: Vec<Pin>,
}

/// Checks and pins `[ptr, ptr + size)`; if not `by_kernel`, the pages are only populated.
pub(crate) fn pin(ptr: u64, size: u64, by_kernel: bool) -> Result<HostMemory, Errno> {
    if size == 0 {
        return Err(Errno::INVAL);
    }
    let start = ptr - ptr % HOST_PAGE;
    let end = ptr.checked_add(size).and_then(|end| end.checked_next_multiple_of(HOST_PAGE));
    let len = end.ok_or(Errno::INVAL)? - start;
    let piece = |at: u64| (start + at, (len - at).min(ring::MAX_PIN));
    let mut pieces = Vec::new();
    let mut pins = Vec::new();
    if by_kernel {
        for (start, len) in (0..len).step_by(ring::MAX_PIN as usize).map(piece) {
            let Some(pin) = ring::pin(start, len)? else { break };
            pieces.push((start as usize, len));
            pins.push(pin);
        }
    }
    if pieces.iter().map(|(_, len)| len).sum::<u64>() < len {
        populate(start, len)?;
        pins.clear();
        pieces = vec![(start as usize, len)];
    }
    let huge = start.is_multiple_of(HUGE_PAGE) && len.is_multiple_of(HUGE_PAGE) && is_huge(start);
    Ok(HostMemory { huge, pieces, pins })
}

const HUGE_PAGE: u64 = 2 << 20;

/// Whether memory comes from the pool of huge pages, by the name the kernel gives its mapping.
///
/// Transparent huge pages count as ordinary ones: a process cannot see cheaply where it has them.
fn is_huge(start: u64) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return false };
    maps.lines().any(|line| {
        let Some((range, rest)) = line.split_once(' ') else { return false };
        let Some((first, end)) = range.split_once('-') else { return false };
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        (number(first)..number(end)).contains(&start)
            && (rest.contains("/anon_hugepage") || rest.contains("hugetlb"))
    })
}

/// Makes the pages present and private to this process where they are copy-on-write, as a pin for
/// writing does, without changing them.
fn populate(start: u64, len: u64) -> Result<(), Errno> {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    let advise = |start: u64, len: u64| {
        // SAFETY: populating changes no content, and fails on ranges that are not ours to write.
        unsafe { libc::madvise(start as *mut _, len as usize, libc::MADV_POPULATE_WRITE) == 0 }
    };
    let supported = SUPPORTED.get_or_init(|| {
        let probe = Box::new([0u8; 2 * HOST_PAGE as usize]);
        advise((probe.as_ptr() as u64).next_multiple_of(HOST_PAGE), HOST_PAGE)
    });
    // Before Linux 5.14 bad memory shows only when it is used, as a device fault.
    if !supported || advise(start, len) { Ok(()) } else { Err(Errno::FAULT) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags};

    fn anonymous(pages: usize, protection: ProtFlags) -> u64 {
        let len = pages * HOST_PAGE as usize;
        // SAFETY: a fresh mapping, leaked.
        let ptr = unsafe {
            rustix::mm::mmap_anonymous(core::ptr::null_mut(), len, protection, MapFlags::PRIVATE)
        };
        ptr.unwrap() as u64
    }

    #[test]
    fn populating_does_not_change_memory() {
        let ptr = anonymous(2, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: within the mapping just made.
        unsafe { (ptr as *mut u8).add(5000).write(77) };
        assert!(!pin(ptr + 123, 6000, false).unwrap().huge);
        // SAFETY: as above.
        assert_eq!(unsafe { (ptr as *const u8).add(5000).read() }, 77);
    }

    #[test]
    fn read_only_missing_and_overflowing_ranges_are_refused() {
        let ptr = anonymous(1, ProtFlags::READ);
        assert_eq!(pin(ptr, 10, false).map(drop), Err(Errno::FAULT));
        static CONSTANT: [u8; 64] = [7; 64];
        assert_eq!(pin(CONSTANT.as_ptr() as u64, 64, false).map(drop), Err(Errno::FAULT));
        assert_eq!(pin(0x10, 10, false).map(drop), Err(Errno::FAULT));
        assert_eq!(pin(ptr, 0, false).map(drop), Err(Errno::INVAL));
        assert_eq!(pin(u64::MAX - 5, 10, false).map(drop), Err(Errno::INVAL));
    }
}
