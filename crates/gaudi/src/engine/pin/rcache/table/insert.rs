//! A miss: what inserting a range does to those that are there.
//!
//! * A range that overlaps others is made together with them, as one: buffers that overlap then
//!   share it instead of evicting each other. Ranges that only touch, or share a page at their ends,
//!   stay apart. If the union is too large or cannot be pinned, the new range goes in alone and the
//!   others are dropped.
//! * At the bounds, the least recently used are evicted, by the CLOCK algorithm. What a copy is using
//!   stays; if nothing else is left, the new range is not kept.

use core::ops::Range;

use super::super::sync::Ordering;
use super::range::{CachedRange, LONGEST};
use super::{Found, Swept, Table, TableGuard, inner, pages};

/// How much the table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) regions: usize,
    pub(crate) bytes: u64,
}

/// The outcome of [`Table::insert`].
pub(crate) enum Inserted<'a, P> {
    /// Another thread inserted it first.
    Hit(Found<'a, P>),
    /// It is new.
    New(Found<'a, P>),
    /// The table is full; `make` was not called.
    Full,
}

impl<P> Table<P> {
    /// What [`Table::find`] returns for `[addr, addr + len)`. If it is not there, inserts what `make`
    /// returns (a value, and the number to be found with it) for all pages of `whole`, which contains
    /// that range, and more if others overlap. Waits for other threads that do the same. `swept` gets
    /// the values that were removed.
    pub(crate) fn insert<E>(
        &self,
        (addr, len): (u64, u64),
        whole: &Range<u64>,
        bounds: Bounds,
        swept: &mut Swept<P>,
        mut make: impl FnMut(&Range<u64>, &mut TableGuard<'_, P>, &mut Swept<P>) -> Result<(u64, P), E>,
    ) -> Result<Inserted<'_, P>, E> {
        let mut table = self.lock();
        table.sweep(swept);
        if let Some(found) = self.find(addr, len) {
            return Ok(Inserted::Hit(found));
        }
        let Some(own) = pages(whole) else { return Ok(Inserted::Full) };
        let mut alone = false;
        loop {
            let (range, replaced) = table.join(&own, bounds, alone);
            if !table.evict_until_it_fits(&range, &replaced, bounds, swept) {
                return Ok(Inserted::Full);
            }
            // An unmap event may have marked one of them, and eviction swept it.
            if !replaced.iter().all(|old| old.is_valid()) {
                continue;
            }
            let Some(new) = table.begin_insert(&range, &replaced) else { continue };
            match make(&range, &mut table, swept) {
                Ok((base, value)) => {
                    let reference = table.finish_insert(new, base, value);
                    table.sweep(swept);
                    return Ok(Inserted::New(Found { start: range.start, base, range: reference }));
                }
                Err(error) => {
                    table.cancel_insert(new);
                    table.sweep(swept);
                    if replaced.is_empty() {
                        return Err(error);
                    }
                    alone = true;
                }
            }
        }
    }
}

impl<'a, P> TableGuard<'a, P> {
    /// The range to be made for `own`, and those that it replaces. Others in its way are dropped.
    fn join(
        &self,
        own: &Range<u64>,
        bounds: Bounds,
        alone: bool,
    ) -> (Range<u64>, Vec<&'a CachedRange>) {
        let joined = self.overlapping(&inner(own));
        let union = joined.iter().fold(own.clone(), |union, other| {
            let other = other.range();
            union.start.min(other.start)..union.end.max(other.end)
        });
        if !alone && union.end - union.start <= bounds.bytes.min(LONGEST) {
            return (union, joined);
        }
        for other in joined {
            self.drop_range(other);
        }
        (own.clone(), Vec::new())
    }

    /// Evicts others until `range` fits; whether it does.
    fn evict_until_it_fits(
        &mut self,
        range: &Range<u64>,
        replaced: &[&CachedRange],
        bounds: Bounds,
        swept: &mut Swept<P>,
    ) -> bool {
        let length = |range: &Range<u64>| range.end - range.start;
        let freed: u64 = replaced.iter().map(|old| length(&old.range())).sum();
        let fits = |(regions, bytes): (usize, u64)| {
            regions.saturating_sub(replaced.len()) < bounds.regions
                && bytes.saturating_sub(freed) + length(range) <= bounds.bytes
        };
        self.sweep(swept);
        while !fits(self.size()) {
            let Some(victim) = self.least_used(replaced) else { return false };
            self.drop_range(victim);
            swept.evicted += 1;
            self.sweep(swept);
        }
        true
    }

    /// Evicts up to `count` ranges that nobody uses, and sweeps what was marked; how many it evicted.
    pub(crate) fn evict_idle(&mut self, count: usize, swept: &mut Swept<P>) -> usize {
        let mut evicted = 0;
        while evicted < count
            && let Some(victim) = self.least_used(&[])
        {
            self.drop_range(victim);
            swept.evicted += 1;
            evicted += 1;
        }
        self.sweep(swept);
        evicted
    }

    /// A range that nobody uses, and that was not found for about the longest time.
    fn least_used(&mut self, except: &[&CachedRange]) -> Option<&'a CachedRange> {
        let capacity = self.capacity();
        // The first round takes away everyone's second chance.
        for _ in 0..2 * capacity {
            let candidate = self.range_at(self.state.clock_hand as u32);
            self.state.clock_hand = (self.state.clock_hand + 1) % capacity;
            let unused = candidate.is_valid()
                && !except.iter().any(|other| core::ptr::eq(*other, candidate))
                && !candidate.take_used();
            if unused && candidate.is_idle() {
                return Some(candidate);
            }
        }
        None
    }

    /// Drops everything, used or not. Whether all of it came out, see [`TableGuard::sweep`].
    pub(crate) fn clear(&mut self, swept: &mut Swept<P>) -> bool {
        let table = self.table;
        table.invalidate(0, table.highest.load(Ordering::Relaxed));
        self.sweep(swept)
    }
}
