//! The functions of `libscal.so` that Synapse uses.

use core::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

pub(crate) type Handle = *mut c_void;

macro_rules! scal {
    ($(fn $name:ident($($type:ty),*) $(-> $out:ty)?;)*) => {
        /// See the module.
        #[derive(Debug)]
        pub(crate) struct Scal {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) $(-> $out)?,)*
        }

        impl Scal {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are the signatures that scal.h gives these functions.
                Ok(Self { $($name: *unsafe { library.get(stringify!($name)) }?,)* })
            }
        }
    };
}

scal! {
    fn scal_init(c_int, *const c_char, *mut Handle, *mut c_void) -> c_int;
    fn scal_destroy(Handle);
    fn scal_get_pool_handle_by_name(Handle, *const c_char, *mut Handle) -> c_int;
    fn scal_pool_get_info(Handle, *mut PoolInfo) -> c_int;
    fn scal_allocate_buffer(Handle, u64, *mut Handle) -> c_int;
    fn scal_free_buffer(Handle) -> c_int;
    fn scal_buffer_get_info(Handle, *mut BufferInfo) -> c_int;
}

/// `scal_memory_pool_info`, as words: 3 is the first address, 6 the size, 7 what is free.
pub(crate) type PoolInfo = [u64; 8];
/// `scal_buffer_info_t`, as words: 3 is the address.
pub(crate) type BufferInfo = [u64; 4];

impl Scal {
    /// The library, loaded by its name, as the real one is a dependency of the real Synapse.
    pub(crate) fn get() -> Option<&'static Self> {
        static SCAL: OnceLock<Option<Scal>> = OnceLock::new();
        SCAL.get_or_init(|| {
            // SAFETY: runs the initialisers of the library beside this one.
            let library = unsafe { Library::open(Some("libscal.so"), RTLD_NOW | RTLD_GLOBAL) };
            let library = library.map(core::mem::ManuallyDrop::new);
            match library.and_then(|library| Self::find(&library)) {
                Ok(scal) => Some(scal),
                Err(error) => {
                    eprintln!("soft-synapse: needs libscal.so: {error}");
                    None
                }
            }
        })
        .as_ref()
    }
}
