//! The engine: Gaudi devices, their memory, detection, copies and exports. It knows nothing of UCX.
//!
//! Start at [`runtime()`]: it loads nothing and opens nothing until asked. [`Runtime::discover`]
//! lists the cards through their control nodes, [`Runtime::open`] takes one for this process,
//! [`Device::alloc`] and [`Device::copy`] use it, [`Runtime::locate`] says whether an address is
//! Gaudi memory.

mod backend;
mod choice;
mod copy;
mod device;
mod discovery;
mod error;
mod host;
mod import;
mod memory;
mod runtime;
mod slots;
mod window;

pub use choice::{BusId, DeviceChoice};
pub use copy::{Segment, Side, SubmitError, Transfer};
pub use device::{Device, DeviceId, MemoryInfo};
pub use discovery::DeviceInfo;
pub use error::{Error, ErrorKind};
pub use hl_thunk::{DeviceAddr, Direction, Generation};
pub use host::HostRegion;
pub use import::Import;
pub use memory::{Allocation, Location};
pub use runtime::{Runtime, runtime};
pub use window::{Window, WindowEvent};
