//! A pool of HBM: first fit, as SCAL's allocator does. Pure bookkeeping.

use core::ffi::CStr;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Alignment of buffers.
pub(crate) const ALIGNMENT: u64 = 128;

/// Numbers for handles, never reused; far from anything that can be dereferenced.
pub(crate) fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x5ca1_0010);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// One pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) handle: usize,
    pub(crate) name: &'static CStr,
    pub(crate) index: u32,
    /// First address that it hands out.
    pub(crate) base: u64,
    /// Start of the driver's mapping in which it lies, and the driver's handle of that.
    pub(crate) mapping: u64,
    pub(crate) allocation: u64,
    pub(crate) total: u64,
    /// Start and length of each buffer, in order.
    taken: BTreeMap<u64, u64>,
    buffers: BTreeMap<usize, u64>,
}

impl Pool {
    pub(crate) fn new(name: &'static CStr, index: u32, base: u64, total: u64) -> Self {
        Self {
            handle: new_handle(),
            name,
            index,
            base,
            mapping: base,
            allocation: 0,
            total,
            taken: BTreeMap::new(),
            buffers: BTreeMap::new(),
        }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.total - self.taken.values().sum::<u64>()
    }

    pub(crate) fn allocate(&mut self, size: u64, alignment: u64) -> Option<usize> {
        let size = size.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let end = self.base + self.total;
        let mut at = self.base.checked_next_multiple_of(alignment)?;
        for (&start, &len) in &self.taken {
            if at.checked_add(size)? <= start {
                break;
            }
            at = at.max((start + len).checked_next_multiple_of(alignment)?);
        }
        if at.checked_add(size)? > end {
            return None;
        }
        self.taken.insert(at, size);
        let handle = new_handle();
        self.buffers.insert(handle, at);
        Some(handle)
    }

    pub(crate) fn has(&self, buffer: usize) -> bool {
        self.buffers.contains_key(&buffer)
    }

    /// Of a buffer it has.
    pub(crate) fn address(&self, buffer: usize) -> u64 {
        self.buffers.get(&buffer).copied().unwrap_or(0)
    }

    pub(crate) fn free(&mut self, buffer: usize) {
        if let Some(at) = self.buffers.remove(&buffer) {
            self.taken.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gap_that_fits_is_taken_and_a_full_pool_refuses() {
        let mut pool = Pool::new(c"test", 0, 0x1000, 1024);
        let [a, b, c] = [100, 300, 128].map(|size| pool.allocate(size, ALIGNMENT).unwrap());
        assert_eq!([a, b, c].map(|buffer| pool.address(buffer)), [0x1000, 0x1080, 0x1200]);
        assert_eq!(pool.free_bytes(), 1024 - 128 - 384 - 128);
        pool.free(b);
        let small = pool.allocate(1, ALIGNMENT).unwrap();
        assert_eq!(pool.address(small), 0x1080);
        assert_eq!(pool.allocate(512, ALIGNMENT), None);
        assert!(pool.allocate(384, ALIGNMENT).is_some());
        assert_eq!(pool.allocate(u64::MAX, ALIGNMENT), None);
    }
}
