//! The parts of an open card: its addresses and memory, host memory pinned for it, and submissions to it. They use a
//! [`Backend`](crate::backend::Backend) and what the caller passes in; nothing here knows which other cards there are.

pub(crate) mod memory;
pub(crate) mod pin;
pub(crate) mod submit;
pub(crate) mod window;

/// Counts a thread's locks and lookups, for the test that limits how many a copy needs.
#[cfg(test)]
pub(crate) mod effort {
    use std::cell::Cell;

    thread_local! {
        static SPENT: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    }

    pub(crate) fn lock() {
        SPENT.set((SPENT.get().0 + 1, SPENT.get().1));
    }

    pub(crate) fn look_up() {
        SPENT.set((SPENT.get().0, SPENT.get().1 + 1));
    }

    /// How many locks the thread took since the last call, and how often it searched a table of addresses.
    pub(crate) fn take() -> (u32, u32) {
        SPENT.take()
    }
}
