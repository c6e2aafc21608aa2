//! Free device virtual addresses of one range, allocated as the driver does: the smallest free
//! block that fits, hints honoured where possible. Pure bookkeeping.

use std::collections::BTreeMap;

use crate::asic::Span;

/// How blocks must be aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Align {
    /// To a power of two.
    Power(u64),
    /// To a multiple of a page that is no power of two, counted in the low 48 bits.
    Pages(u64),
}

const LOW_48: u64 = 0xffff_ffff_ffff;

impl Align {
    fn aligned(self, addr: u64) -> bool {
        match self {
            Self::Power(align) => addr & (align - 1) == 0,
            Self::Pages(page) => (addr & LOW_48).is_multiple_of(page),
        }
    }

    fn up(self, addr: u64) -> Option<u64> {
        match self {
            Self::Power(align) => Some(addr.checked_add(align - 1)? & !(align - 1)),
            Self::Pages(page) => match (addr & LOW_48) % page {
                0 => Some(addr),
                rest => addr.checked_add(page - rest),
            },
        }
    }
}

/// What the caller would like.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hint {
    /// Wanted address; 0 for none.
    pub(crate) addr: u64,
    /// Fail rather than give another.
    pub(crate) force: bool,
}

/// The free part of one range of virtual addresses.
#[derive(Debug)]
pub(crate) struct FreeRange {
    /// First address → last address, both included; never adjacent.
    free: BTreeMap<u64, u64>,
    /// Allocated to hints only.
    reserved: Option<Span>,
}

impl FreeRange {
    pub(crate) fn new(span: Span, reserved: Option<Span>) -> Self {
        Self { free: BTreeMap::from([(span.first, span.last)]), reserved }
    }

    /// Allocates `size` bytes and returns their first address.
    pub(crate) fn allocate(&mut self, size: u64, align: Align, mut hint: Hint) -> Option<u64> {
        if size == 0 {
            return None;
        }
        if !align.aligned(hint.addr) {
            if hint.force {
                return None;
            }
            hint.addr = 0;
        }
        let mut best: Option<(u64, u64, u64)> = None;
        for (&first, &last) in &self.free {
            let Some(start) = align.up(first).filter(|start| *start <= last) else { continue };
            let available = (last - start).saturating_add(1);
            if available < size {
                continue;
            }
            if hint.addr == 0 && self.crosses_reserved(start, size) {
                continue;
            }
            // The driver compares with an inclusive end, so a hint never reaches the last byte.
            let fits = hint.addr.checked_add(size).is_some_and(|end| end <= last);
            if hint.addr != 0 && hint.addr >= start && fits {
                best = Some((first, hint.addr, 0));
                break;
            }
            if best.is_none_or(|(_, _, smallest)| available < smallest) {
                best = Some((first, start, available));
            }
        }
        let (block, start, _) = best?;
        if hint.force && start != hint.addr {
            return None;
        }
        let last = self.free.remove(&block)?;
        if block < start {
            self.free.insert(block, start - 1);
        }
        let end = start + (size - 1);
        if end < last {
            self.free.insert(end + 1, last);
        }
        Some(start)
    }

    /// Releases `[addr, addr + size)`, which must have been allocated.
    pub(crate) fn release(&mut self, addr: u64, size: u64) {
        let (mut first, mut last) = (addr, addr + (size - 1));
        if let Some((&before, &before_last)) = self.free.range(..addr).next_back()
            && before_last.checked_add(1) == Some(addr)
        {
            self.free.remove(&before);
            first = before;
        }
        if let Some(after) = last.checked_add(1)
            && let Some(after_last) = self.free.remove(&after)
        {
            last = after_last;
        }
        self.free.insert(first, last);
    }

    fn crosses_reserved(&self, start: u64, size: u64) -> bool {
        self.reserved.is_some_and(|r| start <= r.last && start + (size - 1) >= r.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: Align = Align::Power(0x1000);

    fn range() -> FreeRange {
        FreeRange::new(Span { first: 0x10000, last: 0xfffff }, None)
    }

    fn at(addr: u64, force: bool) -> Hint {
        Hint { addr, force }
    }

    #[test]
    fn without_hint_the_smallest_fitting_block_is_used() {
        let mut range = range();
        assert_eq!(range.allocate(0x1000, PAGE, Hint::default()), Some(0x10000));
        assert_eq!(range.allocate(0x1000, PAGE, at(0x14000, false)), Some(0x14000));
        assert_eq!(range.allocate(0x2000, PAGE, Hint::default()), Some(0x11000));
        assert_eq!(range.allocate(0x2000, PAGE, Hint::default()), Some(0x15000));
    }

    #[test]
    fn hints_are_honoured_exactly_ignored_or_refused() {
        let mut range = range();
        assert_eq!(range.allocate(0x1000, PAGE, at(0x20000, false)), Some(0x20000));
        assert_eq!(range.allocate(0x1000, PAGE, at(0x20000, true)), None);
        assert_eq!(range.allocate(0x1000, PAGE, at(0x20800, true)), None);
        assert_eq!(range.allocate(0x1000, PAGE, at(0, true)), None);
        assert_eq!(range.allocate(0x1000, PAGE, at(0x20800, false)), Some(0x10000));
        // The last page is out of reach for hints.
        assert_eq!(range.allocate(0x1000, PAGE, at(0xff000, true)), None);
    }

    #[test]
    fn reserved_addresses_go_to_hints_only() {
        let reserved = Some(Span { first: 0x10000, last: 0x1ffff });
        let mut range = FreeRange::new(Span { first: 0x10000, last: 0x3ffff }, reserved);
        assert_eq!(range.allocate(0x1000, PAGE, Hint::default()), None);
        assert_eq!(range.allocate(0x1000, PAGE, at(0x1f000, false)), Some(0x1f000));
        assert_eq!(range.allocate(0x1000, PAGE, Hint::default()), Some(0x20000));
    }

    #[test]
    fn dram_pages_align_in_the_low_48_bits() {
        let page = 768 << 20;
        let first = 0x1001_0018_0000_0000;
        let span = Span { first, last: first + 100 * page - 1 };
        let mut range = FreeRange::new(span, None);
        let align = Align::Pages(page);
        let hint = first + 7 * page;
        assert_eq!(range.allocate(page, align, at(hint, true)), Some(hint));
        assert_eq!(range.allocate(page, align, at(hint + 0x1000, true)), None);
        assert_eq!(range.allocate(2 * page, align, Hint::default()), Some(first));
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_are_released(
            steps in prop::collection::vec((1u64..20, any::<bool>(), 0u64..0x100), 1..60)
        ) {
            let mut range = range();
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (pages, give, hint) in steps {
                if give && !taken.is_empty() {
                    let (addr, size) = taken.swap_remove(hint as usize % taken.len());
                    range.release(addr, size);
                    continue;
                }
                let size = pages * 0x1000;
                if let Some(addr) = range.allocate(size, PAGE, at(hint * 0x1000, false)) {
                    prop_assert!(addr >= 0x10000 && addr + size - 1 <= 0xfffff);
                    for (other, len) in &taken {
                        prop_assert!(addr + size <= *other || other + len <= addr);
                    }
                    taken.push((addr, size));
                }
            }
            for (addr, size) in taken {
                range.release(addr, size);
            }
            prop_assert_eq!(range.free, BTreeMap::from([(0x10000, 0xfffff)]));
        }
    }
}
