//! The way of a miss: what a new range does to those that are there already.
//!
//! * A range that overlaps others is made together with them, as one: buffers that overlap then
//!   share it instead of driving each other out. Ranges that only touch, or share a page at their
//!   ends, stay apart. If the whole cannot be had (too large, or part of it not pinnable), the new
//!   range goes alone and the others leave.
//! * Where the bounds are reached, the least recently used leave: approximately, by a hand that goes
//!   round and passes over what was found since it last came by (the "clock" of operating systems).
//!   What a copy is using stays; if nothing else is left, the new range is not kept.

use core::ops::Range;

use super::super::sync::Ordering;
use super::entry::{Entry, LONGEST};
use super::{Found, Swept, Table, Writing, inner, pages};

/// How much the table may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) regions: usize,
    pub(crate) bytes: u64,
}

/// How a range came to be found.
pub(crate) enum Inserted<'a, P> {
    /// Another thread was faster.
    Hit(Found<'a, P>),
    /// It is new.
    Made(Found<'a, P>),
    /// The table has no room for it: nothing was made.
    NoRoom,
}

impl<P> Table<P> {
    /// What [`Table::find`] finds for `[addr, addr + len)`, after making it with `make` (a value, and
    /// the number to be found with it) if it is not there: for all pages of `whole`, which holds that
    /// range, and more if others overlap. Waits for other threads that do the same. `swept` gets what
    /// had to leave.
    pub(crate) fn insert<E>(
        &self,
        (addr, len): (u64, u64),
        whole: &Range<u64>,
        bounds: Bounds,
        swept: &mut Swept<P>,
        mut make: impl FnMut(&Range<u64>, &mut Writing<'_, P>, &mut Swept<P>) -> Result<(u64, P), E>,
    ) -> Result<Inserted<'_, P>, E> {
        let mut writing = self.lock();
        writing.sweep(swept);
        if let Some(found) = self.find(addr, len) {
            return Ok(Inserted::Hit(found));
        }
        let Some(own) = pages(whole) else { return Ok(Inserted::NoRoom) };
        let mut alone = false;
        loop {
            let (range, swallowed) = writing.join(&own, bounds, alone);
            if !writing.make_room(&range, &swallowed, bounds, swept) {
                return Ok(Inserted::NoRoom);
            }
            // Making room may have swept one of them away: memory goes at any moment.
            if !swallowed.iter().all(|entry| entry.is_valid()) {
                continue;
            }
            let Some(entry) = writing.claim(&range, &swallowed) else { continue };
            match make(&range, &mut writing, swept) {
                Ok((base, value)) => {
                    let visit = writing.fill(entry, base, value);
                    writing.settle();
                    writing.sweep(swept);
                    return Ok(Inserted::Made(Found { start: range.start, base, visit }));
                }
                Err(error) => {
                    writing.drop_entry(entry);
                    writing.settle();
                    writing.sweep(swept);
                    if swallowed.is_empty() {
                        return Err(error);
                    }
                    alone = true;
                }
            }
        }
    }
}

impl<'a, P> Writing<'a, P> {
    /// The range to be made for `own`, and the entries it takes in. Others in its way leave.
    fn join(&self, own: &Range<u64>, bounds: Bounds, alone: bool) -> (Range<u64>, Vec<&'a Entry>) {
        let joined = self.overlapping(&inner(own));
        let range = joined.iter().fold(own.clone(), |range, entry| {
            let other = entry.range();
            range.start.min(other.start)..range.end.max(other.end)
        });
        if !alone && range.end - range.start <= bounds.bytes.min(LONGEST) {
            return (range, joined);
        }
        for entry in joined {
            self.drop_entry(entry);
        }
        (own.clone(), Vec::new())
    }

    /// Makes others leave until `range` fits; whether it does.
    fn make_room(
        &mut self,
        range: &Range<u64>,
        swallowed: &[&Entry],
        bounds: Bounds,
        swept: &mut Swept<P>,
    ) -> bool {
        let length = |range: &Range<u64>| range.end - range.start;
        let freed: u64 = swallowed.iter().map(|entry| length(&entry.range())).sum();
        let fits = |(regions, bytes): (usize, u64)| {
            regions.saturating_sub(swallowed.len()) < bounds.regions
                && bytes.saturating_sub(freed) + length(range) <= bounds.bytes
        };
        self.sweep(swept);
        while !fits(self.size()) {
            let Some(victim) = self.least_used(swallowed) else { return false };
            self.drop_entry(victim);
            swept.evicted += 1;
            self.sweep(swept);
        }
        true
    }

    /// Makes up to `count` leave that nobody uses, and all that wait to leave; how many of the first.
    pub(crate) fn evict_idle(&mut self, count: usize, swept: &mut Swept<P>) -> usize {
        let mut evicted = 0;
        while evicted < count
            && let Some(victim) = self.least_used(&[])
        {
            self.drop_entry(victim);
            swept.evicted += 1;
            evicted += 1;
        }
        self.sweep(swept);
        evicted
    }

    /// Something that nobody uses, and that was not found for longest, about.
    fn least_used(&mut self, except: &[&Entry]) -> Option<&'a Entry> {
        let places = self.places();
        // Once round takes everyone's second chance away.
        for _ in 0..2 * places {
            let entry = self.entry(self.writer.hand as u32);
            self.writer.hand = (self.writer.hand + 1) % places;
            let candidate = entry.is_valid()
                && !except.iter().any(|other| core::ptr::eq(*other, entry))
                && !entry.take_used();
            if candidate && entry.is_idle() {
                return Some(entry);
            }
        }
        None
    }

    /// Makes everything leave, used or not. Whether all has, see [`Writing::sweep`].
    pub(crate) fn clear(&mut self, swept: &mut Swept<P>) -> bool {
        let table = self.table;
        table.invalidate(0, table.highest.load(Ordering::Relaxed));
        self.sweep(swept)
    }
}
