//! Synapse and SCAL in software: a drop-in `libSynapse.so` and the `libscal.so` that it needs, on the software Gaudi.
//!
//! They have the part of the C interfaces that moves memory: devices, memory, host mappings, streams, events, copies;
//! no graphs. They behave as the real libraries are known to, including the surprising parts: one device per process,
//! device ids that are ignored, host mappings without reference counts, status codes. Calls that only a framework may
//! make are counted by the software Gaudi, and end the process if the plugin makes one: see
//! `docs/design/software-synapse.md`.
//!
//! `api` has the C functions; `process` is what a process has one of; `device` is the acquired card; `stream` runs
//! copies. `libscal` is the other library: the build script builds it of this crate with `--cfg libscal`, and Synapse
//! calls it (`scal`) as any program does.

/// Exports C functions; each is an expression of its result, a `c_int` where none is named.
macro_rules! c_functions {
    (@returns) => { core::ffi::c_int };
    (@returns $type:ty) => { $type };
    ($(
        $(#[doc = $doc:literal])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $out:ty)? = $body:expr;
    )*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        $(#[doc = $doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> c_functions!(@returns $($out)?) {
            $body
        }
    )*};
}

#[macro_use]
mod thunk;

#[cfg(any(libscal, test))]
mod libscal;
#[cfg(any(libscal, test))]
pub use libscal::*;

#[cfg(not(libscal))]
mod api;
#[cfg(not(libscal))]
mod device;
#[cfg(not(libscal))]
mod hostmap;
#[cfg(not(libscal))]
mod process;
#[cfg(not(libscal))]
mod scal;
#[cfg(not(libscal))]
mod status;
#[cfg(not(libscal))]
mod stream;
#[cfg(not(libscal))]
pub use api::*;

/// Where `libscal.so` was built.
#[cfg(not(libscal))]
pub const LIBSCAL: &str = concat!(env!("OUT_DIR"), "/libscal.so");
