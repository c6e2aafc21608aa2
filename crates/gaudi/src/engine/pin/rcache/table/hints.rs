//! A small cache in front of the tree: which range had a page when it was last looked up.
//!
//! The tree is exact but spread over memory: with many ranges each lookup waits for a line that is in
//! no near cache. Programs look up the same few pages of each buffer again and again. So the range
//! that the tree found for a page is stored here as well, in eight bytes.
//!
//! A hint may be stale or for another page with the same hash: the reader checks the range's own state
//! and goes through the tree if it does not match. So readers write hints without a lock, over others,
//! and nobody removes them: ranges live as long as the table.

use core::ptr;

use super::super::sync::{AtomicPtr, Ordering, WAYS};

/// A word holds the address of a range, and in these upper bits a part of the page's hash. Programs
/// have no addresses up there, unless they ask for them.
const TAG_SHIFT: u32 = 48;
const ADDRESS: usize = (1 << TAG_SHIFT) - 1;

/// A cache line; a page's hint is in any of its ways.
#[repr(align(64))]
struct Set<E>([AtomicPtr<E>; WAYS]);

/// Set-associative, indexed by the hash of the page.
pub(crate) struct Hints<E> {
    /// A power of two of them.
    sets: Box<[Set<E>]>,
}

impl<E> Hints<E> {
    /// With a capacity of about `hints`, at least one.
    pub(crate) fn new(hints: usize) -> Self {
        let sets = hints.div_ceil(WAYS).next_power_of_two();
        let empty = || Set(core::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())));
        Self { sets: (0..sets).map(|_| empty()).collect() }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.sets.len() * WAYS
    }

    /// Bytes it takes.
    pub(crate) fn memory(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.sets)
    }

    /// The set and the tag of a page.
    fn set_of(&self, page: u64) -> (&Set<E>, usize) {
        let hash = page.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // The upper bits of a product depend on all bits of the factor.
        let set = (hash >> 32) as usize & (self.sets.len() - 1);
        (&self.sets[set], (hash >> TAG_SHIFT) as usize)
    }

    /// The range that was stored for this page, or for another one with the same set and tag.
    pub(crate) fn get(&self, page: u64) -> Option<*const E> {
        let (set, tag) = self.set_of(page);
        // All ways are compared, without a branch: no processor can predict which one it is.
        let fits = |word: &AtomicPtr<E>| word.load(Ordering::Relaxed).addr() >> TAG_SHIFT == tag;
        let fitting = set.0.iter().rev().fold(0_u32, |all, word| all << 1 | u32::from(fits(word)));
        let way = fitting.trailing_zeros() as usize;
        // Acquire: pairs with the store in `insert`; the range is seen as it was made. If the word was
        // overwritten since the comparison, the new hint is checked by the caller like any other.
        let word = set.0.get(way)?.load(Ordering::Acquire).map_addr(|addr| addr & ADDRESS);
        (!word.is_null()).then_some(word.cast_const())
    }

    /// Stores that `range` has the page.
    pub(crate) fn insert(&self, page: u64, range: &E) {
        let range = ptr::from_ref(range).cast_mut();
        if range.addr() & !ADDRESS != 0 {
            return;
        }
        let (set, tag) = self.set_of(page);
        let free = |word: &AtomicPtr<E>| {
            let word = word.load(Ordering::Relaxed);
            word.is_null() || word.addr() >> TAG_SHIFT == tag
        };
        // Otherwise overwrites any: nobody knows which will be looked up next.
        let way = set.0.iter().position(free).unwrap_or(tag & (WAYS - 1));
        set.0[way].store(range.map_addr(|addr| addr | tag << TAG_SHIFT), Ordering::Release);
    }
}
