//! The Gaudi driver library `libhl-thunk.so`, bound at run time.
//!
//! Three layers, each usable alone:
//! * [`sys`]: the C structures and constants;
//! * [`Library`]: the symbols, found with the dynamic loader when asked for and not before;
//! * owning types over them ([`Device`], [`DeviceMemory`], [`DeviceMapping`], [`HostMapping`],
//!   [`CommandBuffer`], [`DmaBuf`], [`HwBlock`]), and the [packets](packet) of each generation.
//!
//! Every child keeps its parent alive, which enforces the order that the driver demands (dma-buf,
//! mapping, allocation, device). A failure inside a `drop` is recorded with the library
//! ([`Library::take_drop_errors`]).
//!
//! A card belongs to the process that opened it. In a forked child, which has the same descriptors,
//! every call on it fails (`EBADF`), and drops have no effect: the driver would take them for the
//! parent's ([`Device::is_ours`]).

pub mod packet;
pub mod sys;
pub mod trace;

mod addr;
mod command;
mod device;
mod dmabuf;
mod error;
mod generation;
mod hw_block;
mod library;
mod memory;
mod pages;
mod process;
mod symbols;

pub use addr::DeviceAddr;
pub use command::{Chunk, CommandBuffer, WaitStatus};
pub use device::{ControlDevice, Device};
pub use dmabuf::{DmaBuf, ExportCall, ImportedMapping};
pub use error::{Error, LoadError};
pub use generation::{Direction, Generation};
pub use hw_block::HwBlock;
pub use library::Library;
pub use memory::{DeviceMapping, DeviceMemory, HostMapping};
pub use pages::{HostPages, PAGE_SIZE};
pub use process::ProcessInstance;
