//! The sub-allocator: divides spans of device addresses into allocations. It never calls the driver.
//!
//! Best fit over free ranges indexed by address and by size, O(log n). Sizes are rounded up to 4 KiB,
//! the unit in which the driver exports memory, so that two allocations never share a unit. A span is
//! one allocation from the driver: free ranges are not joined across spans, because a dma-buf covers
//! one span.

use std::collections::{BTreeMap, BTreeSet};

/// Smallest unit of an allocation.
pub(crate) const GRANULE: u64 = crate::PAGE_SIZE;

/// How many free ranges of nearly the right size are tried for a large alignment. After that, a range is
/// taken that is large enough for this alignment wherever it starts.
const ALIGNMENT_TRIES: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// First address → length and bytes in use.
    spans: BTreeMap<u64, Span>,
    /// First address → length of each free range.
    free: BTreeMap<u64, u64>,
    /// The same ranges, ordered by length.
    by_len: BTreeSet<(u64, u64)>,
    /// First address → rounded length of each allocation.
    live: BTreeMap<u64, u64>,
    used: u64,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    len: u64,
    used: u64,
}

/// A span as the pool reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SpanInfo {
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl Pool {
    /// Adds a span to hand out from. It must not overlap another.
    pub(crate) fn add_span(&mut self, start: u64, len: u64) {
        debug_assert!(start.is_multiple_of(GRANULE) && len.is_multiple_of(GRANULE) && len > 0);
        self.spans.insert(start, Span { len, used: 0 });
        self.insert_free(start, len);
    }

    /// Removes an unused span; `false` (and nothing done) if it is in use or unknown.
    pub(crate) fn remove_span(&mut self, start: u64) -> bool {
        match self.spans.get(&start) {
            Some(span) if span.used == 0 => {
                self.remove_free(start, span.len);
                self.spans.remove(&start);
                true
            }
            _ => false,
        }
    }

    /// Bytes that must be free in one piece for `take(len, align)` to be sure to succeed.
    pub(crate) fn needed(len: u64, align: u64) -> Option<u64> {
        let rounded = len.checked_next_multiple_of(GRANULE)?;
        rounded.checked_add(align.max(GRANULE) - GRANULE)
    }

    /// Takes `len` bytes aligned to `align` (a power of two). Returns the address, or `None` if no free
    /// range fits.
    pub(crate) fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        debug_assert!(len > 0 && align.is_power_of_two());
        let align = align.max(GRANULE);
        let rounded = len.checked_next_multiple_of(GRANULE)?;
        let fits = |(free_len, start): (u64, u64)| {
            let addr = start.checked_next_multiple_of(align)?;
            (addr - start <= free_len - rounded).then_some((start, free_len, addr))
        };
        let close = self.by_len.range((rounded, 0)..).take(ALIGNMENT_TRIES).copied();
        let (start, free_len, addr) = close.filter_map(fits).next().or_else(|| {
            let certain = Self::needed(len, align)?;
            self.by_len.range((certain, 0)..).next().copied().and_then(fits)
        })?;
        self.remove_free(start, free_len);
        if addr > start {
            self.insert_free(start, addr - start);
        }
        let (end, free_end) = (addr + rounded, start + free_len);
        if free_end > end {
            self.insert_free(end, free_end - end);
        }
        self.live.insert(addr, rounded);
        self.used += rounded;
        self.span_mut(addr).used += rounded;
        Some(addr)
    }

    /// Frees an allocation. Returns its span if the whole span is unused now.
    ///
    /// # Panics
    /// If `addr` is not the start of a live allocation.
    pub(crate) fn give(&mut self, addr: u64) -> Option<SpanInfo> {
        let len = self.live.remove(&addr).expect("only live allocations are given back");
        self.used -= len;
        let (span_start, span) = {
            let (start, span) = self.span_of(addr).expect("an allocation lies in a span");
            (start, span)
        };
        self.span_mut(addr).used -= len;
        let (mut start, mut end) = (addr, addr + len);
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
            && before >= span_start
        {
            self.remove_free(before, before_len);
            start = before;
        }
        if let Some(&after_len) = self.free.get(&end)
            && end < span_start + span.len
        {
            self.remove_free(end, after_len);
            end += after_len;
        }
        self.insert_free(start, end - start);
        (span.used == len).then_some(SpanInfo { start: span_start, len: span.len })
    }

    /// The span that contains `addr`.
    pub(crate) fn span_at(&self, addr: u64) -> Option<SpanInfo> {
        self.span_of(addr).map(|(start, span)| SpanInfo { start, len: span.len })
    }

    /// Unused spans.
    pub(crate) fn empty_spans(&self) -> Vec<SpanInfo> {
        let empty = self.spans.iter().filter(|(_, span)| span.used == 0);
        empty.map(|(&start, span)| SpanInfo { start, len: span.len }).collect()
    }

    /// All spans, by address.
    pub(crate) fn spans(&self) -> impl Iterator<Item = SpanInfo> {
        self.spans.iter().map(|(&start, span)| SpanInfo { start, len: span.len })
    }

    /// Bytes in allocations, rounded to granules.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Number of allocations.
    pub(crate) fn allocations(&self) -> usize {
        self.live.len()
    }

    fn span_of(&self, addr: u64) -> Option<(u64, Span)> {
        let (&start, &span) = self.spans.range(..=addr).next_back()?;
        (addr - start < span.len).then_some((start, span))
    }

    fn span_mut(&mut self, addr: u64) -> &mut Span {
        self.spans.range_mut(..=addr).next_back().expect("an allocation lies in a span").1
    }

    fn insert_free(&mut self, start: u64, len: u64) {
        self.free.insert(start, len);
        self.by_len.insert((len, start));
    }

    fn remove_free(&mut self, start: u64, len: u64) {
        let was_there = self.free.remove(&start).is_some() && self.by_len.remove(&(len, start));
        debug_assert!(was_there, "free lists disagree");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPAN: u64 = 64 * GRANULE;

    #[derive(Clone, Debug)]
    enum Step {
        Take { len: u64, align_log2: u32 },
        Give(usize),
        AddSpan,
        RemoveSpan(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            5 => (1..40 * GRANULE, 0..18_u32)
                .prop_map(|(len, align_log2)| Step::Take { len, align_log2 }),
            4 => any::<usize>().prop_map(Step::Give),
            1 => Just(Step::AddSpan),
            1 => any::<usize>().prop_map(Step::RemoveSpan),
        ];
        prop::collection::vec(step, 1..200)
    }

    /// The model: the spans, and the live allocations with their lengths.
    #[derive(Default)]
    struct Model {
        spans: Vec<u64>,
        live: Vec<(u64, u64)>,
    }

    impl Model {
        fn is_free(&self, addr: u64, len: u64) -> bool {
            self.spans.iter().any(|&span| addr >= span && addr + len <= span + SPAN)
                && self
                    .live
                    .iter()
                    .all(|&(other, other_len)| addr + len <= other || other + other_len <= addr)
        }

        /// Whether any placement of the request exists.
        fn could_hold(&self, len: u64, align: u64) -> bool {
            self.spans.iter().any(|&span| {
                let mut addr = span.next_multiple_of(align);
                while addr + len <= span + SPAN {
                    if self.is_free(addr, len) {
                        return true;
                    }
                    addr += align;
                }
                false
            })
        }

        fn used_in(&self, span: u64) -> bool {
            self.live.iter().any(|&(addr, _)| addr >= span && addr < span + SPAN)
        }
    }

    proptest! {
        #[test]
        fn the_pool_agrees_with_a_model_over_any_sequence(steps in steps()) {
            let mut pool = Pool::default();
            let mut model = Model::default();
            let mut next_span = 0x1001_6000_0000_0000_u64;
            for step in steps {
                match step {
                    Step::AddSpan => {
                        // Adjacent on purpose: free ranges must not be joined across spans.
                        pool.add_span(next_span, SPAN);
                        model.spans.push(next_span);
                        next_span += SPAN;
                    }
                    Step::RemoveSpan(pick) if !model.spans.is_empty() => {
                        let at = pick % model.spans.len();
                        let span = model.spans[at];
                        prop_assert_eq!(pool.remove_span(span), !model.used_in(span));
                        if !model.used_in(span) {
                            model.spans.remove(at);
                        }
                    }
                    Step::Take { len, align_log2 } => {
                        let align = 1_u64 << align_log2;
                        let rounded = len.next_multiple_of(GRANULE);
                        match pool.take(len, align) {
                            Some(addr) => {
                                prop_assert_eq!(addr % align.max(GRANULE), 0);
                                prop_assert!(model.is_free(addr, rounded), "double tenancy");
                                model.live.push((addr, rounded));
                            }
                            None => {
                                // The search may give up on a large alignment, but never when a free
                                // range is large enough for any placement.
                                let needed = Pool::needed(len, align).unwrap();
                                prop_assert!(!model.could_hold(needed, GRANULE));
                                if align <= GRANULE {
                                    prop_assert!(!model.could_hold(rounded, GRANULE));
                                }
                            }
                        }
                    }
                    Step::Give(pick) if !model.live.is_empty() => {
                        let (addr, _) = model.live.swap_remove(pick % model.live.len());
                        let span = pool.span_at(addr).unwrap();
                        let emptied = pool.give(addr);
                        prop_assert_eq!(emptied.is_some(), !model.used_in(span.start));
                        if let Some(emptied) = emptied {
                            prop_assert_eq!(emptied, span);
                        }
                    }
                    Step::RemoveSpan(_) | Step::Give(_) => {}
                }
                prop_assert_eq!(pool.used(), model.live.iter().map(|live| live.1).sum::<u64>());
                prop_assert_eq!(pool.allocations(), model.live.len());
                let free: u64 = pool.free.values().sum();
                prop_assert_eq!(free + pool.used(), model.spans.len() as u64 * SPAN);
                prop_assert_eq!(pool.free.len(), pool.by_len.len());
            }
        }
    }

    #[test]
    fn a_length_that_overflows_is_refused() {
        let mut pool = Pool::default();
        pool.add_span(GRANULE, SPAN);
        assert_eq!(pool.take(u64::MAX, 1), None);
        assert_eq!(pool.take(1, 1 << 63), None);
    }

    #[test]
    fn best_fit_leaves_the_large_piece_whole() {
        let mut pool = Pool::default();
        pool.add_span(0x10000, SPAN);
        let small = pool.take(2 * GRANULE, 1).unwrap();
        let _wall = pool.take(GRANULE, 1).unwrap();
        pool.give(small);
        assert_eq!(pool.take(GRANULE, 1), Some(small), "the hole is used, not the rest");
    }
}
