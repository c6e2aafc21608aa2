//! The few functions of Open MPI that are needed, from the copy that loaded us.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW};

use crate::abi::{Object, OpModule, TYPES_5, TYPES_6};

/// `MPI_MAX_LIBRARY_VERSION_STRING`.
const MAX_VERSION: usize = 256;

/// Major number of this Open MPI, asked of itself.
pub(crate) fn major_version() -> Option<u32> {
    type Version = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
    let ask: Version = libmpi(c"PMPI_Get_library_version")?;
    let (mut text, mut len) = ([0 as c_char; MAX_VERSION + 1], 0);
    // SAFETY: has place for the longest version; may be called at any time.
    if unsafe { ask(text.as_mut_ptr(), &mut len) } != 0 {
        return None;
    }
    // SAFETY: it ends within the array, whose last element was not written.
    parse_major(&unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy())
}

/// Of "Open MPI v5.0.7, package: …".
fn parse_major(text: &str) -> Option<u32> {
    let version = text.strip_prefix("Open MPI v")?;
    version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// How many types its operations are defined for, by the size of their modules; none where that has another layout.
pub(crate) fn types() -> Option<usize> {
    static TYPES: OnceLock<Option<usize>> = OnceLock::new();
    *TYPES.get_or_init(|| {
        let class: *const Class = libmpi(c"ompi_op_base_module_t_class")?;
        // SAFETY: a class of this Open MPI; its size is there from the beginning.
        let size = unsafe { (*class).size };
        [TYPES_5, TYPES_6].into_iter().find(|types| module_size(*types) == size)
    })
}

/// Whether its objects have the members that ours have. Builds for debugging have more.
pub(crate) fn has_known_objects() -> bool {
    let stream = class(c"opal_accelerator_stream_t_class");
    // SAFETY: a class of this Open MPI; its size is there from the beginning.
    stream.is_some_and(|(class, _)| unsafe { (*class).size } == STREAM_SIZE)
}

/// Of `opal_accelerator_stream_t`: an object and a pointer.
const STREAM_SIZE: usize = size_of::<Object>() + size_of::<*const c_void>();

fn module_size(types: usize) -> usize {
    match types {
        TYPES_5 => size_of::<OpModule<TYPES_5>>(),
        _ => size_of::<OpModule<TYPES_6>>(),
    }
}

/// Bytes of a datatype's data.
pub(crate) fn type_size(datatype: *mut c_void) -> Option<usize> {
    type Size = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
    static SIZE: OnceLock<Option<Size>> = OnceLock::new();
    let ask = (*SIZE.get_or_init(|| libmpi(c"PMPI_Type_size")))?;
    let mut size = 0;
    // SAFETY: Open MPI's handles are pointers to its datatypes, and this is one that it has just handed us.
    (unsafe { ask(datatype, &mut size) } == 0).then_some(usize::try_from(size).ok()?)
}

/// Ends the job: what was asked for has no way to fail.
pub(crate) fn abort() -> ! {
    type Abort = unsafe extern "C" fn(*const c_void, c_int) -> c_int;
    let abort: Option<Abort> = libmpi(c"PMPI_Abort");
    // The variable that is MPI_COMM_WORLD may have been moved into the program by the loader.
    let communicator: Option<unsafe extern "C" fn(c_int) -> *const c_void> =
        libmpi(c"PMPI_Comm_f2c");
    if let (Some(abort), Some(communicator)) = (abort, communicator) {
        // SAFETY: number 0 is MPI_COMM_WORLD in Fortran.
        unsafe { abort(communicator(0), 1) };
    }
    std::process::abort()
}

/// Something that libmpi or what it is linked with exports, as a pointer or a function.
fn libmpi<T: Copy>(name: &CStr) -> Option<T> {
    symbol("libmpi.so", name)
}

/// A class of Open MPI's objects (`opal_class_t`), and what makes it ready.
pub(crate) fn class(name: &CStr) -> Option<(*mut Class, InitializeClass)> {
    Some((symbol("libopen-pal.so", name)?, symbol("libopen-pal.so", c"opal_class_initialize")?))
}

pub(crate) type InitializeClass = unsafe extern "C" fn(*mut Class);

/// `opal_class_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Class {
    name: *const c_char,
    parent: *mut Class,
    functions: [*const c_void; 2],
    initialized: c_int,
    depth: c_int,
    /// The parents' before the children's, then null.
    pub(crate) constructors: *const Option<unsafe extern "C" fn(*mut c_void)>,
    destructors: *const c_void,
    /// Bytes of an object.
    pub(crate) size: usize,
}

/// Looks a symbol up in the loaded library whose file name begins like this. Not in all there are: Python
/// programs load Open MPI without making its symbols known to others.
pub(crate) fn symbol<T: Copy>(file: &str, name: &CStr) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*const c_void>()) };
    let path = loaded(file)?;
    // SAFETY: it is loaded already.
    let library = unsafe {
        Library::open(Some(OsStr::from_bytes(path.to_bytes())), RTLD_NOW | libc::RTLD_NOLOAD)
    }
    .ok()?;
    // SAFETY: the caller knows what it is.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) }.ok().map(|symbol| *symbol);
    core::mem::forget(library); // Open MPI stays until the process ends, or until it unloads us as well.
    found
}

/// The path of a loaded library whose file name begins with this.
fn loaded(file: &str) -> Option<CString> {
    struct Search<'a>(&'a [u8], Option<CString>);

    unsafe extern "C" fn look(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: the library's description, and what `loaded` passed in.
        let (path, search) = unsafe { ((*info).dlpi_name, &mut *search.cast::<Search<'_>>()) };
        if path.is_null() {
            return 0;
        }
        // SAFETY: the name is a C string.
        let path = unsafe { CStr::from_ptr(path) };
        let name = path.to_bytes().rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        if name.starts_with(search.0) {
            search.1 = Some(path.to_owned());
        }
        c_int::from(search.1.is_some())
    }

    let mut search = Search(file.as_bytes(), None);
    // SAFETY: `look` gets the pointer to `search`, which lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_open_mpi_says() {
        for (text, major) in [
            ("Open MPI v5.0.7, package: Debian OpenMPI, ident: 5.0.7", Some(5)),
            ("Open MPI v6.0.0rc2, package: x", Some(6)),
            ("Open MPI v4.1.4", Some(4)),
            ("MPICH Version: 4.2", None),
            ("Open MPI vX", None),
            ("", None),
        ] {
            assert_eq!(parse_major(text), major, "{text}");
        }
    }

    #[test]
    fn symbols_are_found_in_the_library_that_is_named() {
        assert!(symbol::<*const c_void>("libc.so", c"malloc").is_some());
        assert!(symbol::<*const c_void>("libc.so", c"no such function").is_none());
        assert!(symbol::<*const c_void>("libmpi.so", c"MPI_Init").is_none());
    }
}
