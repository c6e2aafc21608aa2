//! libSynapse and libscal for a guest: a library that has found a framework's card in its process.
//!
//! Nothing is loaded, initialised, acquired, released or destroyed here, and no call for that is bound.
//! [`Framework::find`] finds out whether both libraries are in the process. A function that they lack is an error of
//! the call that needs it ([`CallError::Missing`]), not of the whole.
//!
//! * [`sys`]: the C types, and the functions as a table, which tests replace.
//! * [`loaded`](Loaded): which libraries the process has, without a file-system access.
//! * [`Framework`]: the card that the framework has acquired, and its pool of device memory.
//! * [`Stream`], [`Event`], [`HostMapping`], [`DeviceBlock`]: what a guest makes, each given back when dropped, or
//!   forgotten when the framework has released the card.

mod framework;
mod loaded;
mod owned;
mod status;
pub mod sys;

pub use framework::{Acquired, Framework, LargerStructure, Pool};
pub use loaded::Loaded;
pub use owned::{Copied, DeviceBlock, Event, HostMapping, Stream};
pub use status::{CallError, Status};
