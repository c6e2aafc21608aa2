//! A list of objects that can be iterated where one must neither wait nor allocate.
//!
//! A reader increments the count of a slot before it loads the slot's pointer. Whoever removes an
//! object clears the pointer and then waits until the count is zero. So readers never wait, and
//! removal waits only for readers that use the object right now.

use core::ptr;

use super::sync::{AtomicPtr, AtomicUsize, Ordering, fence, yield_now};

/// At most `N` objects.
pub(super) struct Roster<T, const N: usize> {
    slots: [RosterSlot<T>; N],
}

struct RosterSlot<T> {
    item: AtomicPtr<T>,
    readers: AtomicUsize,
}

impl<T, const N: usize> Roster<T, N> {
    pub(super) fn new() -> Self {
        let slot =
            |_| RosterSlot { item: AtomicPtr::new(ptr::null_mut()), readers: AtomicUsize::new(0) };
        Self { slots: core::array::from_fn(slot) }
    }

    /// Adds `item`; the number of its slot, or `None` if all are taken.
    ///
    /// # Safety
    /// The item must stay where it is until [`Roster::remove`] has returned.
    pub(super) unsafe fn insert(&self, item: *const T) -> Option<usize> {
        let free = |slot: &RosterSlot<T>| {
            let item = item.cast_mut();
            let null = ptr::null_mut();
            slot.item.compare_exchange(null, item, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        self.slots.iter().position(free)
    }

    /// Removes the item of this slot. When this returns, nobody uses it.
    pub(super) fn remove(&self, slot: usize) {
        let slot = &self.slots[slot];
        slot.item.store(ptr::null_mut(), Ordering::Relaxed);
        // Pairs with the fence in `for_each`. Of the two threads, one stores the pointer and loads
        // the count, the other increments the count and loads the pointer: with both fences at least
        // one sees the other's write. Without them both could miss it, and the reader would use an
        // item that is gone.
        fence(Ordering::SeqCst);
        // Acquire: pairs with the decrement in `for_each`; what the reader did comes before this.
        while slot.readers.load(Ordering::Acquire) != 0 {
            yield_now();
        }
    }

    /// Calls `visit` for each item.
    pub(super) fn for_each(&self, mut visit: impl FnMut(&T)) {
        for slot in &self.slots {
            if slot.item.load(Ordering::Relaxed).is_null() {
                continue;
            }
            slot.readers.fetch_add(1, Ordering::Relaxed);
            // Pairs with the fence in `remove`.
            fence(Ordering::SeqCst);
            // Acquire: pairs with the exchange in `insert`; the item is seen as it was made.
            let item = slot.item.load(Ordering::Acquire);
            if !item.is_null() {
                // SAFETY: it was not removed yet, and `remove` waits for the count to be zero.
                visit(unsafe { &*item });
            }
            slot.readers.fetch_sub(1, Ordering::Release);
        }
    }

    /// In a forked child: the threads that were reading do not exist here.
    pub(super) fn reset_readers(&self) {
        for slot in &self.slots {
            slot.readers.store(0, Ordering::Relaxed);
        }
    }
}
