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
//! // SAFETY: `here` lives across both calls, and nothing else uses it.
//! unsafe {
//!     device.copy_blocking(Side::Device(there.addr()), Side::Host(here.as_mut_ptr()), 5)?;
//!     device.copy_blocking(Side::Host(here.as_mut_ptr()), Side::Device(there.addr()), 5)?;
//! }
//! # Ok::<(), gaudi::Error>(())
//! ```
//!
//! An [`Allocation`], an [`Import`], a [`Share`](share::Share), an [`Opened`](share::Opened), a [`Transfer`] and a
//! [`RegisterBlock`] keep their device open; a [`HostRegion`] and a [`Location`] do not. When the last of them is
//! dropped, the card is closed, and another process can open it.
//!
//! The engine belongs to the process: a forked child cannot use its parent's cards (`process`).

// The floors, from the bottom up: none uses one above it (`tests/floors.rs`).
mod base;

mod backend;

mod engine;

mod device;

pub mod share;

mod runtime;

pub use base::card::{BusId, DeviceId, DeviceInfo, PortMasks};
pub use base::choice::DeviceChoice;
pub use base::costs::{CardKind, Costs, Pinning};
pub use base::error::{Error, ErrorKind, OPEN_REFUSED};
pub use base::options::{Conflict, FlushPeerWrites, OptionName, Options, RegistrationCache};
pub use base::process::Notifier;
pub use base::remedy::Remedy;
pub use base::sysfs::Sysfs;
pub(crate) use base::{environment, error, options, probes, process};
pub use base::{stats, topology};
pub(crate) use device::copy;
pub use device::copy::{Place, Segment, Side, SubmitError, Transfer, USER_SPACE_END};
pub use device::import::{Import, ImportedRegion};
pub use device::registers::RegisterBlock;
pub use device::{Allocation, Device};
pub use engine::memory::{Location, MemoryInfo};
pub use engine::pin::{HostRegion, rcache};
pub use engine::window::{Window, WindowEvent};
pub(crate) use engine::{memory, pin, submit, window};
pub use hl_thunk::{DeviceAddr, Direction, ExportCall, Generation, PAGE_SIZE, trace};
pub use runtime::discovery::Note;
pub use runtime::framework_card::Releasing;
pub use runtime::keep_open::KeptOpen;
pub use runtime::lent_cards::Unmapping;
pub use runtime::mapping_table::{MappedCard, MappingTable};
pub use runtime::owners::{Owners, OwningProcess};
pub use runtime::{Runtime, runtime};

/// Types that any thread may use, checked when compiling.
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
