//! Who has which page: a tree over the address, made like the page tables of a processor.
//!
//! A reader takes one load a level, whatever the number of entries. A slot that belongs to one entry
//! entirely says so at its level, so that large ranges need few slots. Only one thread at a time
//! changes the tree (the table's lock sees to that), slot by slot: a reader finds the old owner of a
//! page or the new one. Nodes are neither moved nor freed while the tree lives; so readers need no
//! protection, and a node of 4 KiB stays for every 2 MiB of addresses that ever had several owners.

use core::marker::PhantomData;
use core::ops::Range;
use core::ptr;

use super::super::sync::{AtomicPtr, FANOUT_BITS, Ordering};

/// The tree tells pages of this size apart.
pub(super) const PAGE_BITS: u32 = 12;
/// Levels above the pages.
const LEVELS: u32 = 4;
/// Addresses beyond this many bits have no place in the tree.
pub(crate) const ADDRESS_BITS: u32 = PAGE_BITS + LEVELS * FANOUT_BITS;

const FANOUT: usize = 1 << FANOUT_BITS;
/// Marks a slot that holds an entry; nodes and entries are aligned to more than this.
const ENTRY: usize = 1;

struct Node {
    slots: [AtomicPtr<()>; FANOUT],
}

/// The owners of pages. Entries are borrowed for as long as the tree lives; see [`Tree::give`].
pub(super) struct Tree<E> {
    root: Box<Node>,
    entries: PhantomData<*const E>,
}

// SAFETY: nodes are shared through atomics only, and entries are handed out as shared references.
unsafe impl<E: Sync> Send for Tree<E> {}
// SAFETY: as above.
unsafe impl<E: Sync> Sync for Tree<E> {}

/// What a slot says.
enum Place<'a, E> {
    Free,
    Entry(&'a E),
    Node(&'a Node),
}

impl<E> Tree<E> {
    pub(super) fn new() -> Self {
        const { assert!(align_of::<E>() > ENTRY, "the lowest bit of an address must be free") };
        Self { root: Box::new(Node::filled(ptr::null_mut())), entries: PhantomData }
    }

    /// The entry that has the page of `addr`, which must have at most [`ADDRESS_BITS`].
    pub(super) fn find(&self, addr: u64) -> Option<&E> {
        let mut node = &*self.root;
        for level in (0..LEVELS).rev() {
            let slot = &node.slots[(addr >> bits(level)) as usize % FANOUT];
            match self.place(slot.load(Ordering::Acquire)) {
                Place::Free => return None,
                Place::Entry(entry) => return Some(entry),
                Place::Node(child) => node = child,
            }
        }
        None
    }

    /// Calls `found` with the owners of all pages of `range`, by address; several times with one
    /// that has several slots.
    pub(super) fn visit(&self, range: &Range<u64>, found: &mut impl FnMut(&E)) {
        if range.start < range.end {
            self.visit_node(&self.root, LEVELS - 1, range, found);
        }
    }

    fn visit_node(&self, node: &Node, level: u32, range: &Range<u64>, found: &mut impl FnMut(&E)) {
        for (slot, part) in node.parts(level, range) {
            match self.place(slot.load(Ordering::Acquire)) {
                Place::Free => {}
                Place::Entry(entry) => found(entry),
                Place::Node(child) => self.visit_node(child, level - 1, &part, found),
            }
        }
    }

    /// Gives the pages of `range` to `entry` whose owner, or having none, `may` be replaced.
    ///
    /// # Safety
    /// `range` must be of whole pages, not empty, and within [`ADDRESS_BITS`]. The entry must live
    /// as long as the tree. Nobody else changes the tree meanwhile.
    pub(super) unsafe fn give(
        &self,
        range: &Range<u64>,
        entry: &E,
        may: impl Fn(Option<&E>) -> bool,
    ) {
        let word = ptr::from_ref(entry).cast_mut().cast::<()>().map_addr(|addr| addr | ENTRY);
        let new = |old: *mut ()| match self.place(old) {
            Place::Entry(owner) if !may(Some(owner)) => old,
            Place::Free if !may(None) => old,
            _ => word,
        };
        self.change(&self.root, LEVELS - 1, range, &new);
    }

    /// Takes the pages of `range` that `entry` still has away from it.
    ///
    /// # Safety
    /// As for [`Tree::give`].
    pub(super) unsafe fn take(&self, range: &Range<u64>, entry: &E) {
        let word = ptr::from_ref(entry).addr() | ENTRY;
        let without = |old: *mut ()| if old.addr() == word { ptr::null_mut() } else { old };
        self.change(&self.root, LEVELS - 1, range, &without);
    }

    /// Replaces owners, which are slots without nodes: `new` says by whom.
    fn change(
        &self,
        node: &Node,
        level: u32,
        range: &Range<u64>,
        new: &impl Fn(*mut ()) -> *mut (),
    ) {
        for (slot, part) in node.parts(level, range) {
            let old = slot.load(Ordering::Acquire);
            if let Place::Node(child) = self.place(old) {
                self.change(child, level - 1, &part, new);
                continue;
            }
            let owner = new(old);
            if owner == old {
                continue;
            }
            let whole = part.end - part.start == 1 << bits(level);
            if whole {
                slot.store(owner, Ordering::Release);
            } else {
                // Made ready before anyone can see it.
                let child = Box::new(Node::filled(old));
                self.change(&child, level - 1, &part, new);
                slot.store(Box::into_raw(child).cast(), Ordering::Release);
            }
        }
    }

    fn place(&self, word: *mut ()) -> Place<'_, E> {
        if word.is_null() {
            Place::Free
        } else if word.addr() & ENTRY != 0 {
            // SAFETY: whoever gave this entry its pages promised that it lives as long as the tree.
            Place::Entry(unsafe { &*word.map_addr(|addr| addr & !ENTRY).cast::<E>() })
        } else {
            // SAFETY: a node stays until the tree goes.
            Place::Node(unsafe { &*word.cast::<Node>() })
        }
    }

    /// Bytes of the nodes.
    pub(super) fn memory(&self) -> usize {
        self.root.count() * size_of::<Node>()
    }
}

/// What a slot of this level stands for.
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
        words.filter(|word| !word.is_null() && word.addr() & ENTRY == 0).map(<*mut ()>::cast)
    }

    fn count(&self) -> usize {
        // SAFETY: a node stays until its parent goes, and that is borrowed.
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
