//! How a C API becomes Rust at run time: layouts asserted when compiling, functions looked up by name.
//!
//! Shared by the bindings of UCP (`ucp/sys.rs`) and of UCT (`uct/sys.rs`).

/// Asserts sizes of C structures and places of their fields.
macro_rules! layout {
    ($($t:ty: $size:literal { $($field:ident @ $at:literal),* $(,)? })*) => {
        $(const _: () = {
            assert!(std::mem::size_of::<$t>() == $size);
            $(assert!(std::mem::offset_of!($t, $field) == $at);)*
        };)*
    };
}
pub(crate) use layout;

/// Declares a table of C functions and how it is filled from a library.
macro_rules! functions {
    ($($name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// The functions we call, each found by name in one libucp or the libraries it needs.
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Functions {
            /// Looks every function up; the error names the first one that is missing.
            ///
            /// # Safety
            /// `library` must be a libucp whose functions have the signatures of the public
            /// header, and must never be unloaded while the table is in use.
            pub(super) unsafe fn load(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the caller vouches for the signatures.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)*
                    })
                }
            }
        }
    };
}
pub(crate) use functions;
