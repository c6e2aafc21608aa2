//! Things that a process has one of, and what happens to them in a forked child.
//!
//! The engine belongs to the process that started it. A forked child has a copy of its memory and of every
//! descriptor, but none of its threads, and the driver cannot tell the two apart. This module has what the rest of
//! the engine needs to cope with that, and a few things that every part would otherwise make by hand.
//!
//! * `fork`: handlers that run inside `fork`, and the rules for them.
//! * [`Instance`]: a number that no two processes share, by which a child knows that it is one.
//! * `bound`: values that belong to one process ([`PerProcess`], [`ProcessBound`]).
//! * `close_on_fork`: descriptors that children do not keep.
//! * `thread`: threads that take none of the program's signals.
//! * `memory_file`: sealed shared memory.
//! * `notifier`: an eventfd.

mod bound;
mod close_on_fork;
mod fork;
mod memory_file;
mod notifier;
pub(crate) mod thread;

pub(crate) use bound::{PerProcess, ProcessBound};
pub(crate) use close_on_fork::{CloseOnFork, ClosedInChildren};
pub(crate) use fork::ForkHandlers;
#[cfg(test)]
pub(crate) use fork::tests::holds_in_child;
pub(crate) use hl_thunk::ProcessInstance as Instance;
pub(crate) use memory_file::MemoryFile;
pub use notifier::Notifier;
