//! The few functions of Open MPI that are needed, from the copy that loaded us.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::AtomicI32;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_NOW};

use crate::abi::{COLL_TABLE, COMMUNICATORS, CollTable, Object, OpModule, TYPES_5, TYPES_6};

/// `MPI_MAX_LIBRARY_VERSION_STRING`.
const MAX_VERSION: usize = 256;

/// Major number of this Open MPI, asked of itself.
pub(crate) fn major_version() -> Option<u32> {
    static MAJOR: OnceLock<Option<u32>> = OnceLock::new();
    *MAJOR.get_or_init(ask_major_version)
}

fn ask_major_version() -> Option<u32> {
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

/// How many types its operations are defined for, by the size of their modules; `None` for an unknown layout.
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
    class("libopen-pal.so", c"opal_accelerator_stream_t_class")
        .is_some_and(|class| class.size() == STREAM_SIZE)
}

/// Whether communicators, and modules of collectives, have the layout that is known.
pub(crate) fn has_known_communicators() -> bool {
    let size = |name| class("libmpi.so", name).map_or(0, |class| class.size());
    let sizes = (size(c"ompi_communicator_t_class"), size(c"mca_coll_base_module_t_class"));
    match major_version() {
        Some(5) => sizes == COMMUNICATORS[0],
        Some(6) => sizes == COMMUNICATORS[1],
        _ => false,
    }
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

/// Aborts the job: the operation that failed cannot return an error.
pub(crate) fn abort() -> ! {
    type Abort = unsafe extern "C" fn(*const c_void, c_int) -> c_int;
    let abort: Option<Abort> = libmpi(c"PMPI_Abort");
    // `MPI_COMM_WORLD` is a variable, which a copy relocation may have moved into the program.
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

/// A class of Open MPI's objects.
pub(crate) fn class(library: &str, name: &CStr) -> Option<ReadyClass> {
    let initialize: unsafe extern "C" fn(*mut Class) =
        symbol("libopen-pal.so", c"opal_class_initialize")?;
    let class = symbol(library, name)?;
    // SAFETY: a class of this Open MPI.
    unsafe { initialize(class) };
    Some(ReadyClass(class))
}

/// One that has been initialized.
pub(crate) struct ReadyClass(*mut Class);

impl ReadyClass {
    /// Bytes of an object.
    pub(crate) fn size(&self) -> usize {
        // SAFETY: a class of this Open MPI; its size is there from the beginning.
        unsafe { (*self.0).size }
    }

    /// An object, as `OBJ_NEW` makes it, with at least `bytes` bytes; null when out of memory. Whoever
    /// releases the last reference frees it with `free`.
    pub(crate) fn create(&self, bytes: usize) -> *mut Object {
        // SAFETY: once a class is initialized it has constructors and its size.
        unsafe {
            let made = libc::calloc(1, self.size().max(bytes)).cast::<Object>();
            if made.is_null() {
                return made;
            }
            made.write(Object { class: self.0.cast_const().cast(), references: AtomicI32::new(1) });
            let mut constructor = (*self.0).constructors;
            while let Some(construct) = *constructor {
                construct(made.cast());
                constructor = constructor.add(1);
            }
            made
        }
    }
}

/// `opal_class_t`.
#[repr(C)]
#[derive(Debug)]
struct Class {
    name: *const c_char,
    parent: *mut Class,
    functions: [*const c_void; 2],
    initialized: c_int,
    depth: c_int,
    /// The parents' before the children's, then null.
    constructors: *const Option<unsafe extern "C" fn(*mut c_void)>,
    destructors: *const c_void,
    /// Bytes of an object.
    size: usize,
}

/// The collectives of a communicator.
///
/// # Safety
/// `communicator` is a communicator, and [`has_known_communicators`] returned `true`.
pub(crate) unsafe fn functions(communicator: *mut c_void) -> *mut CollTable {
    // SAFETY: the caller's promise.
    unsafe { *communicator.byte_add(COLL_TABLE).cast::<*mut CollTable>() }
}

/// A number that Open MPI returns for one of its handles; 0 if the call fails.
macro_rules! ask {
    ($name:literal, $of:expr) => {{
        type Ask = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;
        static ASK: OnceLock<Option<Ask>> = OnceLock::new();
        let mut answer = 0;
        match ASK.get_or_init(|| libmpi($name)) {
            // SAFETY: handles are pointers, and this is one that Open MPI has just handed us.
            Some(ask) if unsafe { ask($of, &mut answer) } == 0 => answer,
            _ => 0,
        }
    }};
}

/// This process's rank.
pub(crate) fn rank(communicator: *mut c_void) -> c_int {
    ask!(c"PMPI_Comm_rank", communicator)
}

/// How many ranks there are.
pub(crate) fn size(communicator: *mut c_void) -> usize {
    ask!(c"PMPI_Comm_size", communicator).max(1) as usize
}

/// One of an array of counts, as collectives get it.
///
/// # Safety
/// The array has an element for `rank`.
pub(crate) unsafe fn count_of(counts: usize, rank: usize) -> usize {
    // In 6.0 the lowest bit says that they are of type int.
    let array = core::ptr::with_exposed_provenance::<c_int>(counts & !1);
    // SAFETY: the caller's promise.
    unsafe {
        match major_version() == Some(6) && counts & 1 == 0 {
            true => *array.cast::<usize>().add(rank),
            false => *array.add(rank) as usize,
        }
    }
}

/// A handle that Open MPI has for a number of Fortran.
macro_rules! handle {
    ($name:literal, $number:literal) => {{
        type Find = unsafe extern "C" fn(c_int) -> *mut c_void;
        static FIND: OnceLock<Option<Find>> = OnceLock::new();
        let find = FIND.get_or_init(|| libmpi($name));
        // SAFETY: looks the number up.
        find.map_or(core::ptr::null_mut(), |find| unsafe { find($number) })
    }};
}

/// `MPI_BYTE`. Its variable may have been moved into the program by a copy relocation.
pub(crate) fn byte() -> *mut c_void {
    handle!(c"PMPI_Type_f2c", 1)
}

/// `MPI_BOR`.
pub(crate) fn bitwise_or() -> *mut c_void {
    handle!(c"PMPI_Op_f2c", 8)
}

/// How elements of a datatype lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datatype {
    /// Bytes of data.
    pub(crate) size: usize,
    /// Bytes from one element to the next; "negative" where they go backwards.
    pub(crate) extent: usize,
    /// Where the first byte of data is.
    pub(crate) begin: usize,
    /// Bytes from there to the last of the element.
    len: usize,
    /// Whether no element lies in front of its address or reaches into the next.
    pub(crate) is_apart: bool,
}

impl Datatype {
    /// Asks Open MPI.
    pub(crate) fn of(datatype: *mut c_void) -> Option<Self> {
        type Ask = unsafe extern "C" fn(*mut c_void, *mut isize, *mut isize) -> c_int;
        static ASK: OnceLock<Option<[Ask; 2]>> = OnceLock::new();
        let find =
            || Some([libmpi(c"PMPI_Type_get_extent")?, libmpi(c"PMPI_Type_get_true_extent")?]);
        let [extent, true_extent] = (*ASK.get_or_init(find))?;
        let (mut low, mut all, mut begin, mut len) = (0, 0, 0, 0);
        // SAFETY: handles are pointers, and this is one that Open MPI has just handed us.
        let told = unsafe {
            extent(datatype, &mut low, &mut all) == 0
                && true_extent(datatype, &mut begin, &mut len) == 0
        };
        let size = type_size(datatype).filter(|_| told)?;
        let is_apart = begin >= 0 && len >= 0 && begin + len <= all;
        Some(Self {
            size,
            extent: all as usize,
            begin: begin as usize,
            len: len as usize,
            is_apart,
        })
    }

    /// Whether there are bytes between the data.
    pub(crate) fn has_gaps(&self) -> bool {
        self.size != self.extent || !self.is_apart
    }

    /// Bytes from the first of data to the last, if elements are apart; else nothing of meaning.
    pub(crate) fn span(&self, count: usize) -> usize {
        let others = |others: usize| others.wrapping_mul(self.extent).wrapping_add(self.len);
        count.checked_sub(1).map_or(0, others)
    }
}

/// Looks a symbol up in the loaded library whose file name begins with `file`. Not in the global scope:
/// Python programs load Open MPI without putting its symbols there.
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
