//! Write a UCX transport plugin in safe Rust.
//!
//! UCX (1.22 and later; 1.21 with the help of a preloaded library) loads transports from shared libraries
//! that were not built with it, but has no public interface for them: a plugin speaks the internal one of
//! libuct. This crate knows that interface, so that a plugin does not have to:
//!
//! * [`Component`], [`MemoryDomain`] and [`Interface`] are traits to implement; [`Registration`]
//!   hands an implementation to UCX, and [`plugin!`] defines the library's entry point.
//! * Nothing of UCX is linked. The copy of UCX that loads the plugin is found at run time, also
//!   where names are mangled and several copies live in one process ([`Ucx`]).
//! * A UCX with another internal layout is refused before anything is registered, by probing the
//!   library rather than by its version string.
//! * No panic crosses into C.
//!
//! The crate knows nothing of any device. `examples/loopback.rs` is a complete transport.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("UCX's plugin interface is known for 64-bit Linux only");

pub mod abi;
mod completion;
mod component;
pub mod config;
mod iface;
mod loaded;
mod md;
mod md_hooks;
mod panic_guard;
mod plugin;
mod probe;
mod relocation;
mod ucm;
mod ucx;

pub use abi::{
    Bandwidth, DeviceType, LinearFunc, MemoryType, MemoryTypes, Operation, RmaLimits, Status,
    SysDevice,
};
pub use completion::{Completion, Posted};
pub use component::{Component, Registration};
pub use iface::{
    Buffer, Buffers, Device, Interface, InterfaceAttributes, KeyOf, Link, MdOf, MemoryOf,
    OpenRequest, Peer, Perf, PerfQuery, RmaOp,
};
pub use loaded::FindError;
pub use md::{
    AllocRequest, Allocated, DomainAttributes, MemoryAnswer, MemoryDomain, QueryFields, Region,
};
pub use md_hooks::{MdHooks, OpenDomain};
pub use plugin::enter;
pub use probe::probe_library;
#[doc(hidden)]
pub use relocation::RelocPatch;
pub use ucm::{DeviceRange, Unmapped};
pub use ucx::{Level, Refusal, SUPPORTED, Ucx};
