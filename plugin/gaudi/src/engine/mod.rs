//! What an open card is made of: its addresses and memory, what is pinned for it, and submissions to it. All of it works
//! on a [`Backend`](crate::backend::Backend) and on what it is given; nothing here knows which other cards there are.

pub(crate) mod memory;
pub(crate) mod pin;
pub(crate) mod submit;
pub(crate) mod window;
