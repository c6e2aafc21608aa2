//! The engine: Gaudi devices, their memory, detection, copies and exports. It knows nothing of UCX.
//!
//! Start at [`runtime()`]: it loads nothing and opens nothing until asked. [`Runtime::discover`]
//! lists the cards through their control nodes, [`Runtime::open`] takes one for this process,
//! [`Device::alloc`] and [`Device::copy`] use it, [`Runtime::locate`] says whether an address is
//! Gaudi memory.
//!
//! ```no_run
//! use gaudi::{DeviceChoice, Side, runtime};
//!
//! let device = runtime().open(&DeviceChoice::Any)?;
//! let there = device.alloc(5, 1)?;
//! let mut here = *b"hello";
//! // SAFETY: `here` lives across both calls, and nobody else has it.
//! unsafe {
//!     device.copy_blocking(Side::Device(there.addr()), Side::Host(here.as_mut_ptr()), 5)?;
//!     device.copy_blocking(Side::Host(here.as_mut_ptr()), Side::Device(there.addr()), 5)?;
//! }
//! # Ok::<(), gaudi::Error>(())
//! ```
//!
//! An [`Allocation`], an [`Import`], a [`Share`](share::Share), an [`Opened`](share::Opened), a [`Transfer`] and a [`RegisterBlock`]
//! keep their device open; a [`HostRegion`] and a [`Location`] do not. When the last of them is dropped,
//! the card is closed, and another process can open it.
//!
//! The engine belongs to the process: a forked child is refused its parent's cards (`process`).

mod backend;
mod card;
mod choice;
mod copy;
mod costs;
mod device;
mod discovery;
mod environment;
mod error;
mod guest;
mod import;
mod owners;

mod kept;
mod lent;
mod mapping_table;
mod marks;
mod memory;
mod opening;
mod options;
mod pairing;
mod pin;
mod process;
mod registers;
mod remedy;
mod runtime;
pub mod scale_out;
mod selection;
pub mod share;
pub mod stats;
mod submit;
mod sysfs;
pub mod topology;
mod window;

pub use card::{BusId, DeviceId, DeviceInfo, PortMasks};
pub use choice::DeviceChoice;
pub use copy::{Segment, Side, SubmitError, Transfer, USER_SPACE_END};
pub use costs::{CardKind, Costs, Pinning};
pub use device::{Allocation, Device};
pub use error::{Error, ErrorKind, OPEN_REFUSED};
pub use guest::Releasing;
pub use hl_thunk::{DeviceAddr, Direction, ExportCall, Generation, PAGE_SIZE, trace};
pub use import::{Import, ImportedRegion};
pub use kept::KeptOpen;
pub use lent::Unmapping;
pub use mapping_table::{MappedCard, MappingTable};
pub use memory::{Location, MemoryInfo};
pub use options::{Conflict, FlushPeerWrites, OptionName, Options, RegistrationCache};
pub use owners::{Owners, OwningProcess};
pub use pin::{HostRegion, rcache};
pub use process::Notifier;
pub use registers::RegisterBlock;
pub use remedy::Remedy;
pub use runtime::{Runtime, runtime};
pub use scale_out::ScaleOut;
pub use sysfs::Sysfs;
pub use window::{ForeignMemory, Window, WindowEvent};

/// What may be used from any thread, checked when compiling.
const _: () = {
    const fn from_any_thread<T: Send + Sync>() {}
    from_any_thread::<Runtime>();
    from_any_thread::<Device>();
    from_any_thread::<Allocation>();
    from_any_thread::<Notifier>();
    from_any_thread::<HostRegion>();
    from_any_thread::<ImportedRegion>();
    from_any_thread::<share::Opened>();
    from_any_thread::<share::Share>();
    from_any_thread::<RegisterBlock>();
    from_any_thread::<Transfer>();
    from_any_thread::<Error>();
};
