//! Whose pages were looked up lately: the short way to an entry, for tables with many.
//!
//! The tree is exact, but it is spread over memory: with many ranges every lookup waits for a line of
//! it that no cache near the processor has. Programs look for the same few pages of each buffer again
//! and again. So the owner of a page that was found in the tree is noted here too, eight bytes for
//! each, small enough to stay in a near cache.
//!
//! A note binds nobody. Whoever follows one asks the entry itself whether it is what was looked for,
//! and otherwise takes the way through the tree. So notes are written by readers, without a lock, over
//! others that are in the way, and never taken back: entries live as long as the table.

use core::ptr;

use super::super::sync::{AtomicPtr, Ordering, WAYS};

/// A word has the address of an entry, and in these upper bits a part of the page's hash. Programs
/// have no addresses up there, unless they ask for them.
const TAG_SHIFT: u32 = 48;
const ADDRESS: usize = (1 << TAG_SHIFT) - 1;

/// A cache line: a page's note is in any of its places.
#[repr(align(64))]
struct Set<E>([AtomicPtr<E>; WAYS]);

/// Notes of pages, a few for each set that the page's hash chooses.
pub(crate) struct Hints<E> {
    /// A power of two of them.
    sets: Box<[Set<E>]>,
}

impl<E> Hints<E> {
    /// Room for about as many notes, at least one.
    pub(crate) fn new(notes: usize) -> Self {
        let sets = notes.div_ceil(WAYS).next_power_of_two();
        let empty = || Set(core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())));
        Self { sets: (0..sets).map(|_| empty()).collect() }
    }

    /// How many notes there is room for.
    pub(crate) fn room(&self) -> usize {
        self.sets.len() * WAYS
    }

    /// Bytes it takes.
    pub(crate) fn memory(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.sets)
    }

    /// Where notes of a page are, and the tag they have.
    fn place(&self, page: u64) -> (&Set<E>, usize) {
        let hash = page.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The upper bits of a product depend on all of the factor's.
        let set = (hash >> 32) as usize & (self.sets.len() - 1);
        (&self.sets[set], (hash >> TAG_SHIFT) as usize)
    }

    /// The entry that was noted for this page, or for another one whose hash looks the same.
    pub(crate) fn get(&self, page: u64) -> Option<*const E> {
        let (set, tag) = self.place(page);
        // All are looked at, because no processor can guess which it is.
        let fits = |word: &AtomicPtr<E>| word.load(Ordering::Relaxed).addr() >> TAG_SHIFT == tag;
        let fitting = set.0.iter().rev().fold(0_u32, |all, word| all << 1 | u32::from(fits(word)));
        let way = fitting.trailing_zeros() as usize;
        // Acquire: sees the entry as it was made. If it was noted since, that one is as good.
        let word = set.0.get(way)?.load(Ordering::Acquire).map_addr(|addr| addr & ADDRESS);
        (!word.is_null()).then_some(word.cast_const())
    }

    /// Notes that this entry has the page.
    pub(crate) fn note(&self, page: u64, entry: &E) {
        let entry = ptr::from_ref(entry).cast_mut();
        if entry.addr() & !ADDRESS != 0 {
            return;
        }
        let (set, tag) = self.place(page);
        let free = |word: &AtomicPtr<E>| {
            let word = word.load(Ordering::Relaxed);
            word.is_null() || word.addr() >> TAG_SHIFT == tag
        };
        // Any other is as good as the rest: nobody knows which is looked for next.
        let way = set.0.iter().position(free).unwrap_or(tag & (WAYS - 1));
        set.0[way].store(entry.map_addr(|addr| addr | tag << TAG_SHIFT), Ordering::Release);
    }
}
