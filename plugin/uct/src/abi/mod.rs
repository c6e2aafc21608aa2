//! UCX's internal plugin ABI as plain C types: Linux, LP64, UCX 1.22 and 1.23.
//!
//! UCX ships no header for this interface, so every layout here was taken from the debug
//! information of the stock binaries; sizes and offsets are asserted where each type is defined.
//! Tables that a plugin *fills* only ever grew at their tail between 1.22 and 1.23: they are
//! declared here at (or above) their largest size with every slot populated, so that one table
//! serves all of them. What a running libuct really calls is checked by a probe before
//! anything is registered.

mod component;
mod config;
mod iface;
mod md;
mod scalar;

pub use component::*;
pub use config::*;
pub use iface::*;
pub use md::*;
pub use scalar::*;

/// C structures with their size and the offset of each field, checked by the compiler.
macro_rules! layout {
    ($($(#[$about:meta])* pub struct $name:ident: $size:tt {
        $($(#[$field_about:meta])* $offset:literal $field:ident: $type:ty,)*
    })*) => {
        $(
            $(#[$about])*
            #[repr(C)]
            #[allow(missing_docs)]
            pub struct $name { $($(#[$field_about])* pub $field: $type),* }
            const _: () = assert!(core::mem::size_of::<$name>() == $size);
            $(const _: () = assert!(core::mem::offset_of!($name, $field) == $offset);)*
        )*
    };
}
pub(crate) use layout;
