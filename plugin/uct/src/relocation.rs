//! Redirects calls of a library's function, by libucm's relocation patches.
//!
//! libucm rewrites the relocation entries through which loaded objects call the function, also in
//! objects that are loaded later. Code is not changed, and callers that found the function with `dlsym`
//! still call the original. UCX does the same for memory functions (`UCX_MEM_MMAP_HOOK_MODE=reloc`).

use core::ffi::{CStr, c_char, c_void};

use crate::abi::Status;
use crate::ucx::Ucx;

/// `ucm_reloc_patch_t`.
#[doc(hidden)]
#[repr(C)]
pub struct RelocPatch {
    pub symbol: *const c_char,
    pub value: *const c_void,
    pub prev_value: *const c_void,
    pub list: [*mut c_void; 2],
    pub blacklist: *const *const c_char,
}

type Modify = unsafe extern "C" fn(*mut RelocPatch) -> Status;

impl Ucx {
    /// Makes every object of the process call `instead` where it calls `symbol`, for ever. Objects
    /// whose path contains `except` are left alone.
    ///
    /// # Safety
    /// `instead` must be a function of `symbol`'s type that does for its callers what `symbol` does,
    /// and must never be unloaded.
    ///
    /// # Errors
    /// UCX's reason; [`Status::UNSUPPORTED`] where libucm has no such function.
    pub unsafe fn redirect(
        &self,
        symbol: &'static CStr,
        instead: *const c_void,
        except: &'static CStr,
    ) -> Result<(), Status> {
        let modify = self.symbol(c"ucm_reloc_modify").ok_or(Status::UNSUPPORTED)?;
        // SAFETY: the function has had this type since UCX 1.3.
        let modify = unsafe { core::mem::transmute::<*mut c_void, Modify>(modify) };
        let blacklist = Box::leak(Box::new([except.as_ptr(), core::ptr::null()]));
        // libucm keeps it in a list.
        let patch = Box::leak(Box::new(RelocPatch {
            symbol: symbol.as_ptr(),
            value: instead,
            prev_value: core::ptr::null(),
            list: [core::ptr::null_mut(); 2],
            blacklist: blacklist.as_ptr(),
        }));
        // SAFETY: the patch lives for ever; the caller vouches for the function.
        let status = unsafe { modify(patch) };
        if status == Status::OK { Ok(()) } else { Err(status) }
    }
}
