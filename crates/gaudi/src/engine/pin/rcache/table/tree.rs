//! Which range owns which page: a radix tree over the address, like a processor's page tables.
//!
//! A lookup is one load per level, whatever the number of ranges. A slot that lies within one range
//! points to it directly, at any level, so that large ranges need few slots. One thread at a time
//! changes the tree (under the table's lock), slot by slot: a reader finds the old owner of a page or
//! the new one. Nodes are neither moved nor freed while the tree lives, so readers need no protection
//! (epochs, reference counts), and a node of 4 KiB stays for every 2 MiB of addresses that ever had
//! several owners.
//!
//! A persistent map (`imbl`) behind an atomic pointer would not do: a reader inside `free` might drop
//! the last reference to an old version, and free memory there.

use core::marker::PhantomData;
use core::ops::Range;
use core::ptr;

use super::super::sync::{AtomicPtr, FANOUT_BITS, Ordering};

/// The size of a page, in bits of the address.
pub(super) const PAGE_BITS: u32 = 12;
/// Levels above the pages.
const LEVELS: u32 = 4;
/// Addresses with more bits than this are not in the tree.
pub(crate) const ADDRESS_BITS: u32 = PAGE_BITS + LEVELS * FANOUT_BITS;

const FANOUT: usize = 1 << FANOUT_BITS;
/// The bit that tells a pointer to an owner from one to a node; both are aligned to more than this.
const IS_OWNER: usize = 1;

struct Node {
    slots: [AtomicPtr<()>; FANOUT],
}

/// The owners of pages. They must outlive the tree: see [`Tree::assign`].
pub(super) struct Tree<E> {
    root: Box<Node>,
    owners: PhantomData<*const E>,
}

// SAFETY: nodes are shared through atomics only, and owners are handed out as shared references.
unsafe impl<E: Sync> Send for Tree<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Tree<E> {}

/// What a slot points to.
enum Child<'a, E> {
    Free,
    Owner(&'a E),
    Node(&'a Node),
}

impl<E> Tree<E> {
    pub(super) fn new() -> Self {
        const { assert!(align_of::<E>() > IS_OWNER, "the lowest bit of an address must be free") };
        Self { root: Box::new(Node::filled(ptr::null_mut())), owners: PhantomData }
    }

    /// The owner of the page of `addr`, which must have at most [`ADDRESS_BITS`].
    pub(super) fn find(&self, addr: u64) -> Option<&E> {
        let mut node = &*self.root;
        for level in (0..LEVELS).rev() {
            let slot = &node.slots[(addr >> bits(level)) as usize % FANOUT];
            match self.child(slot.load(Ordering::Acquire)) {
                Child::Free => return None,
                Child::Owner(owner) => return Some(owner),
                Child::Node(child) => node = child,
            }
        }
        None
    }

    /// Calls `found` with the owners of all pages of `range`, by address; repeatedly with one that has
    /// several slots.
    pub(super) fn for_each_in(&self, range: &Range<u64>, found: &mut impl FnMut(&E)) {
        if range.start < range.end {
            self.for_each_in_node(&self.root, LEVELS - 1, range, found);
        }
    }

    fn for_each_in_node(
        &self,
        node: &Node,
        level: u32,
        range: &Range<u64>,
        found: &mut impl FnMut(&E),
    ) {
        for (slot, part) in node.parts(level, range) {
            match self.child(slot.load(Ordering::Acquire)) {
                Child::Free => {}
                Child::Owner(owner) => found(owner),
                Child::Node(child) => self.for_each_in_node(child, level - 1, &part, found),
            }
        }
    }

    /// Makes `owner` the owner of those pages of `range` whose owner, or having none, `may` be
    /// replaced.
    ///
    /// # Safety
    /// `range` must be of whole pages, not empty, and within [`ADDRESS_BITS`]. `owner` must live as
    /// long as the tree. Nobody else may change the tree meanwhile.
    pub(super) unsafe fn assign(
        &self,
        range: &Range<u64>,
        owner: &E,
        may: impl Fn(Option<&E>) -> bool,
    ) {
        let word = ptr::from_ref(owner).cast_mut().cast::<()>().map_addr(|addr| addr | IS_OWNER);
        let new = |old: *mut ()| match self.child(old) {
            Child::Owner(other) if !may(Some(other)) => old,
            Child::Free if !may(None) => old,
            _ => word,
        };
        self.change(&self.root, LEVELS - 1, range, &new);
    }

    /// Leaves those pages of `range` without owner that `owner` has.
    ///
    /// # Safety
    /// As for [`Tree::assign`].
    pub(super) unsafe fn unassign(&self, range: &Range<u64>, owner: &E) {
        let word = ptr::from_ref(owner).addr() | IS_OWNER;
        let without = |old: *mut ()| if old.addr() == word { ptr::null_mut() } else { old };
        self.change(&self.root, LEVELS - 1, range, &without);
    }

    /// Stores in each slot that holds no node what `new` returns for its word.
    fn change(
        &self,
        node: &Node,
        level: u32,
        range: &Range<u64>,
        new: &impl Fn(*mut ()) -> *mut (),
    ) {
        for (slot, part) in node.parts(level, range) {
            let old = slot.load(Ordering::Acquire);
            if let Child::Node(child) = self.child(old) {
                self.change(child, level - 1, &part, new);
                continue;
            }
            let word = new(old);
            if word == old {
                continue;
            }
            // Release, both times: pairs with the loads of readers. Who finds the pointer finds the
            // node or the owner as it was made.
            if part.end - part.start == 1 << bits(level) {
                slot.store(word, Ordering::Release);
            } else {
                let child = Box::new(Node::filled(old));
                self.change(&child, level - 1, &part, new);
                slot.store(Box::into_raw(child).cast(), Ordering::Release);
            }
        }
    }

    fn child(&self, word: *mut ()) -> Child<'_, E> {
        if word.is_null() {
            Child::Free
        } else if word.addr() & IS_OWNER != 0 {
            // SAFETY: whoever called `assign` promised that it lives as long as the tree.
            Child::Owner(unsafe { &*word.map_addr(|addr| addr & !IS_OWNER).cast::<E>() })
        } else {
            // SAFETY: a node lives as long as the tree.
            Child::Node(unsafe { &*word.cast::<Node>() })
        }
    }

    /// Bytes of the nodes.
    pub(super) fn memory(&self) -> usize {
        self.root.count() * size_of::<Node>()
    }
}

/// The bits of the address below a slot of this level.
fn bits(level: u32) -> u32 {
    PAGE_BITS + level * FANOUT_BITS
}

impl Node {
    fn filled(word: *mut ()) -> Self {
        Self { slots: core::array::from_fn(|_| AtomicPtr::new(word)) }
    }

    /// The slots that `range` touches, and which part of it lies in each.
    fn parts(
        &self,
        level: u32,
        range: &Range<u64>,
    ) -> impl Iterator<Item = (&AtomicPtr<()>, Range<u64>)> {
        let (bits, range) = (bits(level), range.clone());
        (range.start >> bits..=(range.end - 1) >> bits).map(move |number| {
            let (start, end) = (number << bits, (number + 1) << bits);
            (&self.slots[number as usize % FANOUT], range.start.max(start)..range.end.min(end))
        })
    }

    fn children(&self) -> impl Iterator<Item = *mut Node> {
        let words = self.slots.iter().map(|slot| slot.load(Ordering::Acquire));
        words.filter(|word| !word.is_null() && word.addr() & IS_OWNER == 0).map(<*mut ()>::cast)
    }

    fn count(&self) -> usize {
        // SAFETY: a node lives as long as its parent, which is borrowed.
        1 + self.children().map(|child| unsafe { &*child }.count()).sum::<usize>()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in self.children() {
            // SAFETY: made from a box, reached from here alone, and nobody reads the tree any more.
            drop(unsafe { Box::from_raw(child) });
        }
    }
}
