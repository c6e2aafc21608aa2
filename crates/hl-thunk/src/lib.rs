//! The Gaudi driver library `libhl-thunk.so`, bound at run time.
//!
//! Three layers, each usable alone:
//! * [`sys`]: the C structures and constants;
//! * `Library`: the symbols, found with the dynamic loader when asked for and not before;
//! * owning types over them, and the packets of each generation.

pub mod sys;

mod addr;
mod generation;

pub use addr::DeviceAddr;
pub use generation::{Direction, Generation};
