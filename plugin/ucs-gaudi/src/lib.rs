//! Gives UCX defaults that suit jobs with Gaudi memory, before it reads its configuration.
//!
//! UCX reads its variables before it loads the plugin proper (`uct-gaudi`), so the plugin cannot change them. Modules
//! of libucs are loaded earlier, from its constructor. This one lets libucs read `ucx-gaudi.conf`, a file in the same
//! folder in the format of `ucx.conf`, and after that the user's own files again, so that those win. Variables of the
//! environment win over any file.
//!
//! Only on a machine with Gaudis: elsewhere it refuses, and UCX unloads it. Jobs without Gaudis that have the
//! plugin's folder in their environment keep UCX's own defaults.
//!
//! A file, not the environment: UCX warns about variables there that no component reads, as happens without CUDA.
//!
//! It does nothing else, and has a library of its own: it is loaded in every process that loads libucs.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The file with the defaults.
const FILE: &CStr = c"ucx-gaudi.conf";

/// Exists where the kernel's driver is loaded.
const DRIVER: &str = "/sys/bus/pci/drivers/habanalabs";
/// Variables that begin like this belong to the software Gaudi.
const SOFTWARE: &[u8] = b"SOFT_GAUDI_";

const UCS_OK: c_int = 0;
const UCS_ERR_UNSUPPORTED: c_int = -22;

/// Of libucs: reads a file; a value of the file replaces an earlier one if the last argument is not 0.
type ParseFile = unsafe extern "C" fn(*const c_char, *const c_char, c_int);
/// Of libucs: reads all files that the user may have written.
type ParseFiles = unsafe extern "C" fn();

/// Called by libucs after it loaded this library. The return address identifies that copy of libucs.
///
/// # Safety
/// For libucs only, in its constructor.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucs_module_global_init() -> c_int {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!("mov rdi, [rsp]", "jmp {entry}", entry = sym entry);
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!("mov x0, x30", "b {entry}", entry = sym entry);
}

/// On an error UCX unloads us: the plugin itself takes our presence as a sign that the defaults are set.
extern "C" fn entry(caller: *const c_void) -> c_int {
    match std::panic::catch_unwind(|| give_defaults(caller)) {
        Ok(Some(())) => UCS_OK,
        Ok(None) | Err(_) => UCS_ERR_UNSUPPORTED,
    }
}

/// Whether this machine has Gaudis, as far as is known without the driver library.
fn has_gaudi() -> bool {
    Path::new(DRIVER).exists()
        || std::env::vars_os().any(|(name, _)| name.as_bytes().starts_with(SOFTWARE))
}

fn give_defaults(caller: *const c_void) -> Option<()> {
    if !has_gaudi() {
        return None;
    }
    let own = path_of((entry as extern "C" fn(*const c_void) -> c_int as *const ()).cast())?;
    let folder = Path::new(std::ffi::OsStr::from_bytes(own.to_bytes())).parent()?;
    let folder = CString::new(folder.as_os_str().as_bytes()).ok()?;
    let ucs = path_of(caller)?;
    // SAFETY: RTLD_NOLOAD finds what is mapped, and no constructor runs. The handle stays open: libucs loaded us.
    let ucs = unsafe { libc::dlopen(ucs.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if ucs.is_null() {
        return None;
    }
    let parse_file = symbol(ucs, c"ucs_config_parse_config_file")?;
    let parse_files = symbol(ucs, c"ucs_config_parse_config_files")?;
    // SAFETY: libucs declares the functions so (ucs/config/parser.h), since UCX 1.11.
    let (parse_file, parse_files) = unsafe {
        (
            core::mem::transmute::<*mut c_void, ParseFile>(parse_file),
            core::mem::transmute::<*mut c_void, ParseFiles>(parse_files),
        )
    };
    // SAFETY: C strings. libucs is in its constructor, so no other thread uses its table of values. A missing file
    // is no error.
    unsafe {
        parse_file(folder.as_ptr(), FILE.as_ptr(), 1);
        parse_files();
    }
    Some(())
}

/// The path of the library in which an address lies.
fn path_of(address: *const c_void) -> Option<CString> {
    let mut info = core::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr only looks the address up; `info` is written when it returns non-zero.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr succeeded, and the structure was zeroed before.
    let info = unsafe { info.assume_init() };
    // SAFETY: if it is not null, it is a NUL-terminated path owned by the loader.
    (!info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) }.to_owned())
}

/// The address of a function of an open library.
fn symbol(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the handle is open, and the name is a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}
