//! Which pages of a card's DRAM are allocated. Pure bookkeeping.

/// A run of bytes in DRAM, counted from its first usable byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it starts.
    pub offset: u64,
    /// How long it is.
    pub len: u64,
}

/// The pages of one card.
#[derive(Debug)]
pub(crate) struct Pages {
    page: u64,
    taken: Vec<bool>,
    free: u64,
}

impl Pages {
    pub(crate) fn new(page: u64, size: u64) -> Self {
        let count = size / page;
        Self { page, taken: vec![false; count as usize], free: count }
    }

    /// Bytes not allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free * self.page
    }

    /// Allocates enough pages for `size` bytes, in one run if `contiguous`; adjacent pages are merged.
    pub(crate) fn allocate(&mut self, size: u64, contiguous: bool) -> Option<Vec<Segment>> {
        let count = size.div_ceil(self.page);
        if count == 0 || count > self.free {
            return None;
        }
        let count = count as usize;
        let pages: Vec<usize> = match self.run(count) {
            Some(first) => (first..first + count).collect(),
            None if contiguous => return None,
            None => (0..self.taken.len()).filter(|p| !self.taken[*p]).take(count).collect(),
        };
        self.free -= count as u64;
        let mut segments: Vec<Segment> = Vec::new();
        for page in pages {
            self.taken[page] = true;
            let offset = page as u64 * self.page;
            match segments.last_mut() {
                Some(last) if last.offset + last.len == offset => last.len += self.page,
                _ => segments.push(Segment { offset, len: self.page }),
            }
        }
        Some(segments)
    }

    /// Frees pages.
    pub(crate) fn free_segments(&mut self, segments: &[Segment]) {
        for segment in segments {
            let first = (segment.offset / self.page) as usize;
            let count = (segment.len / self.page) as usize;
            self.taken[first..first + count].fill(false);
            self.free += count as u64;
        }
    }

    fn run(&self, count: usize) -> Option<usize> {
        let mut length = 0;
        for (page, taken) in self.taken.iter().enumerate() {
            length = if *taken { 0 } else { length + 1 };
            if length == count {
                return Some(page + 1 - count);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fragmented_memory_serves_scattered_but_not_contiguous_requests() {
        let mut pages = Pages::new(10, 50);
        let all: Vec<_> = (0..5).map(|_| pages.allocate(1, true).unwrap()).collect();
        assert_eq!(pages.allocate(1, false), None);
        pages.free_segments(&all[1]);
        pages.free_segments(&all[3]);
        assert_eq!(pages.allocate(20, true), None);
        let two = [Segment { offset: 10, len: 10 }, Segment { offset: 30, len: 10 }];
        assert_eq!(pages.allocate(11, false).as_deref(), Some(&two[..]));
        assert_eq!(pages.free_bytes(), 0);
    }

    proptest! {
        #[test]
        fn pages_belong_to_one_owner(steps in prop::collection::vec((1u64..40, any::<bool>()), 1..50)) {
            let mut pages = Pages::new(4, 64);
            let mut held: Vec<Vec<Segment>> = Vec::new();
            for (size, give) in steps {
                if give && !held.is_empty() {
                    let segments = held.swap_remove(size as usize % held.len());
                    pages.free_segments(&segments);
                } else if let Some(segments) = pages.allocate(size, size % 2 == 0) {
                    let total: u64 = segments.iter().map(|s| s.len).sum();
                    prop_assert_eq!(total, size.div_ceil(4) * 4);
                    held.push(segments);
                }
                let mut bytes: Vec<u64> =
                    held.iter().flatten().flat_map(|s| s.offset..s.offset + s.len).collect();
                let all = bytes.len();
                bytes.sort_unstable();
                bytes.dedup();
                prop_assert_eq!(bytes.len(), all);
                prop_assert_eq!(pages.free_bytes(), 64 - all as u64);
            }
        }
    }
}
