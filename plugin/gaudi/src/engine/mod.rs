//! What an open card is made of: its addresses and memory, what is pinned for it, and submissions to it. All of it works
//! on a [`Backend`](crate::backend::Backend) and on what it is given; nothing here knows which other cards there are.

pub(crate) mod memory;
pub(crate) mod pin;
pub(crate) mod submit;
pub(crate) mod window;

/// What a thread has done since it last asked, for the test that keeps the ways of copies short.
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

    /// How many locks it took, and how often it searched a table of addresses.
    pub(crate) fn take() -> (u32, u32) {
        SPENT.take()
    }
}
