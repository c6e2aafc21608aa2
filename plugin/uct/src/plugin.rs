//! The entry point of a plugin: `ucs_module_global_init`.

use core::ffi::c_void;

use crate::abi::Status;
use crate::panic_guard::guarded_status;
use crate::ucx::Ucx;

/// What [`plugin!`](crate::plugin) calls when UCX loads the library.
///
/// `register` runs once per copy of UCX in the process; later calls for the same copy (one
/// library may serve several of UCX's module frameworks) run `again`.
#[doc(hidden)]
pub fn enter(
    caller: *const c_void,
    name: &str,
    register: fn(&'static Ucx) -> Result<(), Status>,
    again: fn(&'static Ucx) -> Result<(), Status>,
) -> Status {
    match Ucx::bind(caller, name) {
        Ok((ucx, is_new)) => guarded_status(ucx, "plugin initialisation", || {
            if is_new {
                register(ucx).inspect_err(|_| Ucx::forget(ucx))?;
            }
            again(ucx).map(|()| Status::OK)
        }),
        Err(refusal) => {
            Ucx::report_refusal(caller, name, &refusal);
            Status::UNSUPPORTED
        }
    }
}

/// Defines the entry point of a plugin library.
///
/// `register` is called once for each copy of UCX that loads the plugin; `each_load`, if given,
/// after it and whenever the same copy loads the library again under another name.
#[macro_export]
macro_rules! plugin {
    ($name:literal, $register:path) => {
        $crate::plugin!($name, $register, |_| Ok(()));
    };
    ($name:literal, $register:path, $each_load:expr) => {
        /// Called by libucs after it loaded this library. The return address on the stack is what
        /// tells which copy of UCX that was, hence the naked function.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn ucs_module_global_init() -> $crate::Status {
            #[cfg(target_arch = "x86_64")]
            ::core::arch::naked_asm!("mov rdi, [rsp]", "jmp {entry}", entry = sym __uct_plugin_entry);
            #[cfg(target_arch = "aarch64")]
            ::core::arch::naked_asm!("mov x0, x30", "b {entry}", entry = sym __uct_plugin_entry);
        }

        /// The same for a loader that acts for a libucs: `caller` is any address in that libucs.
        #[unsafe(no_mangle)]
        pub extern "C" fn __uct_plugin_entry(caller: *const ::core::ffi::c_void) -> $crate::Status {
            let entered = ::std::panic::catch_unwind(|| {
                $crate::enter(caller, $name, $register, $each_load)
            });
            entered.unwrap_or($crate::Status::IO_ERROR)
        }
    };
}
