//! UCX's internal plugin ABI as plain C types: Linux, LP64, UCX 1.21 to 1.23.
//!
//! UCX ships no header for this interface, so every layout here was taken from the debug
//! information of the stock binaries; sizes and offsets are asserted where each type is defined.
//! Structures and tables only ever grew at their tail, with one exception ([`Variant`]). Tables that a
//! plugin *fills* are declared at (or above) their largest size with every slot populated, so that one
//! table serves all versions. Structures that UCX fills or passes in are declared as short as in the
//! oldest version, or have a field mask. Before anything is registered, a probe checks which slots the
//! running libuct really calls.

mod component;
mod config;
mod iface;
mod md;
mod scalar;
mod variant;

pub use component::*;
pub use config::*;
pub use iface::*;
pub use md::*;
pub use scalar::*;
pub use variant::Variant;

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
