//! Who is to be told of something from a place where one must neither wait nor allocate.
//!
//! Whoever tells counts itself in at each place before it looks who is there; whoever leaves takes
//! itself off the list and then waits until nobody is counted in. The first never waits for anyone;
//! the second waits for what others do with it just now.

use core::ptr;

use super::sync::{AtomicPtr, AtomicUsize, Ordering, fence, yield_now};

/// A list of `N` places.
pub(super) struct Roster<T, const N: usize> {
    places: [Place<T>; N],
}

struct Place<T> {
    item: AtomicPtr<T>,
    tellers: AtomicUsize,
}

impl<T, const N: usize> Roster<T, N> {
    pub(super) fn new() -> Self {
        let place =
            |_| Place { item: AtomicPtr::new(ptr::null_mut()), tellers: AtomicUsize::new(0) };
        Self { places: core::array::from_fn(place) }
    }

    /// Puts `item` on the list; its place, unless all are taken.
    ///
    /// # Safety
    /// The item must stay where it is until [`Roster::leave`] has returned.
    pub(super) unsafe fn enter(&self, item: *const T) -> Option<usize> {
        let free = |place: &Place<T>| {
            let item = item.cast_mut();
            let null = ptr::null_mut();
            place.item.compare_exchange(null, item, Ordering::Release, Ordering::Relaxed).is_ok()
        };
        self.places.iter().position(free)
    }

    /// Takes the item at this place off the list. When this returns, nobody looks at it.
    pub(super) fn leave(&self, place: usize) {
        let place = &self.places[place];
        place.item.store(ptr::null_mut(), Ordering::Relaxed);
        // Whoever counts itself in after this sees that the place is empty.
        fence(Ordering::SeqCst);
        while place.tellers.load(Ordering::Acquire) != 0 {
            yield_now();
        }
    }

    /// Calls `tell` for everyone on the list.
    pub(super) fn each(&self, mut tell: impl FnMut(&T)) {
        for place in &self.places {
            if place.item.load(Ordering::Relaxed).is_null() {
                continue;
            }
            place.tellers.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let item = place.item.load(Ordering::Acquire);
            if !item.is_null() {
                // SAFETY: on the list, and whoever takes it off waits for us before it goes.
                tell(unsafe { &*item });
            }
            place.tellers.fetch_sub(1, Ordering::Release);
        }
    }

    /// In a forked child: those who were telling have not come along.
    pub(super) fn forget_tellers(&self) {
        for place in &self.places {
            place.tellers.store(0, Ordering::Relaxed);
        }
    }
}
