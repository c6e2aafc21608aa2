//! One loaded copy of UCX: its functions, its log, its memory-type cache.
//!
//! Nothing of UCX is linked. A [`Ucx`] is made once per libucs in the process, after the
//! [layout probe](crate::probe) agreed, and lives for ever; every object this crate hands to UCX
//! carries a reference to the copy it belongs to.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt;
use std::ffi::CString;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::abi::{
    Class, MemDeregParams, MemRegParams, MemTypeEvent, MemoryInfo, MemoryType, RawComponent, RawMd,
    RawTl, Status, SysDevice, Variant,
};
use crate::component::name_array;
use crate::loaded::{self, FindError, Libraries};
use crate::probe;
use crate::ucm::DeviceRange;

/// Versions this crate was tested with, for messages.
pub const SUPPORTED: &str = "1.21 to 1.23";

/// Why a UCX copy is not usable.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The libraries could not be found.
    #[error(transparent)]
    Find(#[from] FindError),
    /// A function or table is missing: a UCX that is too old, or much newer.
    #[error("UCX {version} lacks {symbol}; this plugin supports UCX {SUPPORTED}")]
    Missing {
        /// Version found.
        version: String,
        /// First symbol that was not found.
        symbol: &'static str,
    },
    /// The probe found operation tables laid out differently.
    #[error(
        "UCX {version} has another plugin interface ({detail}); this plugin supports UCX {SUPPORTED}"
    )]
    Layout {
        /// Version found.
        version: String,
        /// The first difference.
        detail: String,
    },
}

macro_rules! symbols {
    ($($library:ident { $($name:ident: $type:ty,)* })*) => {
        /// Addresses of everything taken from UCX.
        #[allow(missing_docs)]
        pub(crate) struct Symbols { $($(pub(crate) $name: $type,)*)* }

        impl Symbols {
            fn find(libraries: &Libraries) -> Result<Symbols, &'static str> {
                Ok(Symbols { $($($name: {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(
                        concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("symbol names contain no NUL"),
                    };
                    let address = libraries.$library.symbol(NAME).ok_or(stringify!($name))?;
                    // SAFETY: the type is the one UCX declares for this name, a pointer in size.
                    unsafe { core::mem::transmute_copy::<*mut c_void, $type>(&address) }
                },)*)* })
            }
        }
    };
}

/// A function or table that we only put into tables for UCX, and never call.
pub(crate) type Opaque = *const c_void;

symbols! {
    ucs {
        ucs_global_opts: *mut c_int,
        ucs_memory_type_names: *const *const c_char,
        ucs_log_dispatch: unsafe extern "C" fn(
            *const c_char, u32, *const c_char, u32, *const c_void, *const c_char, ...),
        ucs_log_flush: unsafe extern "C" fn(),
        ucs_malloc: unsafe extern "C" fn(usize, *const c_char) -> *mut c_void,
        ucs_class_call_cleanup_chain: unsafe extern "C" fn(*mut Class, *mut c_void, c_int),
        ucs_memtype_cache_lookup:
            unsafe extern "C" fn(*const c_void, usize, *mut MemoryInfo) -> Status,
        ucs_memtype_cache_update:
            unsafe extern "C" fn(*const c_void, usize, MemoryType, SysDevice, u8),
        ucs_memtype_cache_remove: unsafe extern "C" fn(*const c_void, usize),
        ucm_event_enter: unsafe extern "C" fn(),
        ucm_event_leave: unsafe extern "C" fn(),
        ucm_event_dispatch: unsafe extern "C" fn(u32, *mut MemTypeEvent),
        ucs_topo_find_device_by_bdf_name:
            unsafe extern "C" fn(*const c_char, *mut SysDevice) -> Status,
        ucs_topo_sys_device_set_name:
            unsafe extern "C" fn(SysDevice, *const c_char, u32) -> Status,
        ucs_empty_function: Opaque,
        ucs_empty_function_return_busy: Opaque,
        ucs_empty_function_return_success: Opaque,
        ucs_empty_function_return_unsupported: Opaque,
        ucs_empty_function_return_ptr_unsupported: Opaque,
        ucs_config_sscanf_table: Opaque,
        ucs_config_clone_table: Opaque,
        ucs_config_release_table: Opaque,
        ucs_config_help_table: Opaque,
        ucs_config_doc_nop: Opaque,
        ucs_config_help_generic: Opaque,
        ucs_config_release_nop: Opaque,
        ucs_config_sscanf_string: Opaque,
        ucs_config_sprintf_string: Opaque,
        ucs_config_clone_string: Opaque,
        ucs_config_release_string: Opaque,
        ucs_config_sscanf_bool: Opaque,
        ucs_config_sprintf_bool: Opaque,
        ucs_config_sscanf_ternary: Opaque,
        ucs_config_sprintf_ternary_auto: Opaque,
        ucs_config_clone_int: Opaque,
        ucs_config_sscanf_uint: Opaque,
        ucs_config_sprintf_uint: Opaque,
        ucs_config_clone_uint: Opaque,
        ucs_config_sscanf_time: Opaque,
        ucs_config_sprintf_time: Opaque,
        ucs_config_sscanf_bw: Opaque,
        ucs_config_sprintf_bw: Opaque,
        ucs_config_clone_double: Opaque,
        ucs_config_sscanf_memunits: Opaque,
        ucs_config_sprintf_memunits: Opaque,
        ucs_config_clone_ulong: Opaque,
        ucs_config_sscanf_enum: Opaque,
        ucs_config_sprintf_enum: Opaque,
        ucs_config_help_enum: Opaque,
        ucs_config_sscanf_key_value: Opaque,
        ucs_config_sprintf_key_value: Opaque,
        ucs_config_clone_key_value: Opaque,
        ucs_config_release_key_value: Opaque,
        ucs_config_help_key_value: Opaque,
        ucs_config_doc_key_value: Opaque,
    }
    uct {
        uct_component_register: unsafe extern "C" fn(*mut RawComponent),
        uct_tl_register: unsafe extern "C" fn(*mut RawComponent, *mut RawTl),
        uct_query_components: unsafe extern "C" fn(*mut *mut *mut RawComponent, *mut u32) -> Status,
        uct_release_component_list: unsafe extern "C" fn(*mut *mut RawComponent),
        uct_md_mem_reg_v2: unsafe extern "C" fn(
            *mut RawMd, *mut c_void, usize, *const MemRegParams, *mut *mut c_void) -> Status,
        uct_md_mem_dereg_v2: unsafe extern "C" fn(*mut RawMd, *const MemDeregParams) -> Status,
        uct_md_config_table: Opaque,
        uct_iface_config_table: Opaque,
        uct_base_iface_t_class: *mut Class,
        uct_base_ep_t_class: *mut Class,
        uct_base_iface_t_init: unsafe extern "C" fn(
            *mut c_void, *mut Class, *mut c_int, *const c_void, *const c_void, *mut RawMd,
            *mut c_void, *const c_void, *const c_void, *mut c_void, *const c_char) -> Status,
        uct_base_ep_t_init:
            unsafe extern "C" fn(*mut c_void, *mut Class, *mut c_int, *mut c_void) -> Status,
        uct_md_base_md_query: unsafe extern "C" fn(*mut c_void),
        uct_base_iface_query: unsafe extern "C" fn(*mut c_void, *mut c_void),
        uct_base_iface_progress_enable: unsafe extern "C" fn(*mut c_void, u32),
        uct_base_iface_progress_disable: unsafe extern "C" fn(*mut c_void, u32),
        uct_base_iface_is_reachable: Opaque,
        uct_base_ep_is_connected: unsafe extern "C" fn(*mut c_void, *const c_void) -> c_int,
        uct_iface_handle_ep_err: unsafe extern "C" fn(*mut c_void, *mut c_void, Status) -> Status,
        uct_iface_scope_is_reachable: unsafe extern "C" fn(*mut c_void, *const c_void) -> c_int,
    }
}

macro_rules! levels {
    ($($level:ident = $number:literal $name:literal,)*) => {
        /// UCX's log levels.
        #[repr(u32)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[allow(missing_docs)]
        pub enum Level { $($level = $number),* }

        impl Level {
            /// All levels with the names UCX gives them, the quietest first.
            pub const ALL: &'static [(Level, &'static str)] = &[$((Level::$level, $name)),*];
        }
    };
}

levels! {
    Error = 1 "error",
    Warn = 2 "warn",
    Diag = 3 "diag",
    Info = 4 "info",
    Debug = 5 "debug",
    Trace = 6 "trace",
    TraceData = 8 "data",
}

impl Level {
    /// The level of UCX's number, rounded down to one of this crate's levels; numbers below error count
    /// as error.
    pub(crate) fn of_number(number: c_int) -> Level {
        let at_most = |(level, _): &&(Level, _)| *level as c_int <= number;
        Self::ALL.iter().rev().find(at_most).map_or(Level::Error, |(level, _)| *level)
    }
}

/// `ucs_log_component_config_t`: level, name and file filter of a part of the program.
#[repr(C)]
struct LogComponent {
    level: c_int,
    name: [c_char; 16],
    file_filter: *const c_char,
}

/// No level of our own: UCX's applies.
const AS_UCX: c_int = -1;

/// One loaded copy of UCX.
pub struct Ucx {
    libraries: Libraries,
    pub(crate) symbols: Symbols,
    version: String,
    variant: Variant,
    /// The tag of the plugin's lines in the log; UCX's own lines say "UCX".
    plugin: [c_char; 16],
    /// The plugin's own log level, or [`AS_UCX`].
    level: AtomicI32,
}

// SAFETY: the pointers inside are addresses of functions and tables of a pinned library; UCX's
// functions used here are thread-safe.
unsafe impl Send for Ucx {}
// SAFETY: as above.
unsafe impl Sync for Ucx {}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ucx").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Copies bound so far; what was registered with one stays for ever.
static COPIES: Mutex<Vec<&'static Ucx>> = Mutex::new(Vec::new());

impl Ucx {
    /// Binds the UCX copy that contains `caller`, a return address, for the plugin of this name. The
    /// flag says whether the copy is new: then register with it.
    ///
    /// # Errors
    /// A [`Refusal`] that says what is missing or different. A line about it has *not* been
    /// logged; see [`Ucx::report_refusal`].
    pub fn bind(caller: *const c_void, plugin: &str) -> Result<(&'static Ucx, bool), Refusal> {
        let libraries = loaded::find(caller)?;
        let mut copies = COPIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(known) =
            copies.iter().find(|copy| copy.libraries.ucs_base == libraries.ucs_base)
        {
            return Ok((known, false));
        }
        let version = version(&libraries);
        let symbols = match Symbols::find(&libraries) {
            Ok(symbols) => symbols,
            Err(symbol) => return Err(Refusal::Missing { version, symbol }),
        };
        let variant = match probe::check(&libraries.uct) {
            Ok(variant) => variant,
            Err(detail) => return Err(Refusal::Layout { version, detail }),
        };
        let ucx: &'static Ucx = Box::leak(Box::new(Ucx {
            libraries,
            symbols,
            version,
            variant,
            plugin: name_array(plugin),
            level: AtomicI32::new(AS_UCX),
        }));
        copies.push(ucx);
        Ok((ucx, true))
    }

    /// Removes a copy from the known ones, because nothing was registered with it.
    pub(crate) fn forget(ucx: &'static Ucx) {
        let mut copies = COPIES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        copies.retain(|copy| !core::ptr::eq(*copy, ucx));
    }

    /// Logs, through the UCX that called us, why it is not served.
    pub fn report_refusal(caller: *const c_void, plugin: &str, refusal: &Refusal) {
        let message = format!("{plugin}: not loaded: {refusal}");
        let dispatch = loaded::find(caller).ok().and_then(|libraries| {
            let opts = libraries.ucs.symbol(c"ucs_global_opts")?;
            let dispatch = libraries.ucs.symbol(c"ucs_log_dispatch")?;
            // SAFETY: ucs_log_dispatch has had this type since before UCX 1.13.
            Some((opts, unsafe {
                core::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(
                        *const c_char,
                        u32,
                        *const c_char,
                        u32,
                        *const c_void,
                        *const c_char,
                        ...
                    ),
                >(dispatch)
            }))
        });
        let text = c_string(&message);
        match dispatch {
            // SAFETY: all pointers are valid C strings or UCX's own options, as the call expects.
            Some((opts, dispatch)) => unsafe {
                dispatch(
                    c"plugin".as_ptr(),
                    0,
                    c"init".as_ptr(),
                    Level::Warn as u32,
                    opts,
                    c"%s".as_ptr(),
                    text.as_ptr(),
                );
            },
            None => eprintln!("{message}"),
        }
    }

    /// The version string of the loaded UCX, for messages only: several different snapshots call
    /// themselves "1.23.0".
    pub fn version(&self) -> &str {
        &self.version
    }

    /// How it differs from other versions.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Whether this UCX knows a memory type under this name.
    pub fn knows_memory_type(&self, memory_type: MemoryType, name: &CStr) -> bool {
        // The table has `UNKNOWN` (10) as its last entry in every supported version.
        assert!(memory_type.0 <= MemoryType::UNKNOWN.0);
        // SAFETY: the index is inside the table; entries are C strings or null.
        unsafe {
            let known = *self.symbols.ucs_memory_type_names.add(memory_type.0 as usize);
            !known.is_null() && CStr::from_ptr(known) == name
        }
    }

    /// Gives the plugin a log level of its own; `None` follows UCX's.
    pub fn set_log_level(&self, level: Option<Level>) {
        self.level.store(level.map_or(AS_UCX, |level| level as c_int), Ordering::Relaxed);
    }

    fn log_level(&self) -> c_int {
        match self.level.load(Ordering::Relaxed) {
            // SAFETY: UCX's options begin with its own log component, and that with the level, an
            // int that does not change while UCX is in use.
            AS_UCX => unsafe { self.symbols.ucs_global_opts.read_volatile() },
            own => own,
        }
    }

    /// Whether lines of this level are printed now.
    pub fn logs(&self, level: Level) -> bool {
        level as c_int <= self.log_level()
    }

    /// Writes a line to UCX's log. Use the [`log!`](crate::log) macro.
    pub fn log(&self, level: Level, file: &str, line: u32, message: fmt::Arguments<'_>) {
        if !self.logs(level) {
            return;
        }
        // SAFETY: as in `log_level`; the filter is a C string that UCX keeps, or null.
        let file_filter =
            unsafe { (*self.symbols.ucs_global_opts.cast::<LogComponent>()).file_filter };
        let component = LogComponent { level: self.log_level(), name: self.plugin, file_filter };
        let (file, text) = (c_string(file), c_string(&message.to_string()));
        // Release builds of UCX drop every line above level "debug", also from plugins. Whether the
        // line is wanted was checked above.
        let shown_as = level.min(Level::Debug);
        // SAFETY: C strings and a component that live through the call; "%s" takes one of them.
        unsafe {
            (self.symbols.ucs_log_dispatch)(
                file.as_ptr(),
                line,
                c"".as_ptr(),
                shown_as as u32,
                (&raw const component).cast(),
                c"%s".as_ptr(),
                text.as_ptr(),
            );
            // UCX logs to standard output. If that is no terminal, buffered lines are lost when the program aborts.
            if level <= Level::Warn {
                (self.symbols.ucs_log_flush)();
            }
        }
    }

    /// Inserts device memory into the memory-type cache.
    ///
    /// A miss in that cache means "host memory" to UCP, without asking any memory domain, so this
    /// must happen before UCP sees the first address of the range.
    pub fn memory_type_cache_insert(&self, range: &DeviceRange) {
        if !self.has_memory_type_cache() {
            return;
        }
        // SAFETY: the range is only recorded, never accessed. 1.21 has no flags, and ignores them.
        unsafe {
            (self.symbols.ucs_memtype_cache_update)(
                core::ptr::without_provenance(range.start as usize),
                range.len,
                range.memory_type,
                range.device,
                crate::abi::mem_flags(range.registrable),
            );
        }
    }

    /// Whether there is a memory-type cache. Creates it if it was not needed yet: an update alone would
    /// be lost. The user may have turned it off, and UCX 1.22 does not check for that on removal.
    fn has_memory_type_cache(&self) -> bool {
        let mut ignored = core::mem::MaybeUninit::<MemoryInfo>::uninit();
        let any_address = core::ptr::without_provenance(1);
        // SAFETY: a look-up takes any address and writes only `ignored`.
        let answer = unsafe {
            (self.symbols.ucs_memtype_cache_lookup)(any_address, 1, ignored.as_mut_ptr())
        };
        answer != Status::UNSUPPORTED
    }

    /// Takes a range out of the memory-type cache.
    pub fn memory_type_cache_remove(&self, range: &DeviceRange) {
        if !self.has_memory_type_cache() {
            return;
        }
        // SAFETY: the range is only looked up.
        unsafe {
            (self.symbols.ucs_memtype_cache_remove)(
                core::ptr::without_provenance(range.start as usize),
                range.len,
            );
        }
    }

    /// UCX's topology number for a PCI device, named `name` in `ucx_info -T`.
    pub fn sys_device(&self, bus_id: &str, name: &str) -> SysDevice {
        let mut device = SysDevice::UNKNOWN;
        let (bus_id, name) = (c_string(bus_id), c_string(name));
        // SAFETY: valid C strings; `device` is written on success.
        unsafe {
            let found =
                (self.symbols.ucs_topo_find_device_by_bdf_name)(bus_id.as_ptr(), &mut device);
            if found != Status::OK {
                return SysDevice::UNKNOWN;
            }
            (self.symbols.ucs_topo_sys_device_set_name)(device, name.as_ptr(), 10);
        }
        device
    }

    /// An optional function of this copy's libuct or libucs; what it returns is untyped.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        self.libraries.uct.symbol(name)
    }

    /// An array for UCX to free with `ucs_free`; null when empty. `None` when out of memory.
    pub(crate) fn array<T>(&self, items: Vec<T>) -> Option<(*mut T, u32)> {
        if items.is_empty() {
            return Some((core::ptr::null_mut(), 0));
        }
        // SAFETY: plain allocation; the name is a static C string.
        let memory = unsafe {
            (self.symbols.ucs_malloc)(items.len() * size_of::<T>(), c"uct resources".as_ptr())
        }
        .cast::<T>();
        if memory.is_null() {
            return None;
        }
        let count = items.len() as u32;
        for (index, item) in items.into_iter().enumerate() {
            // SAFETY: `memory` is large enough for `items.len()` elements, malloc-aligned.
            unsafe { memory.add(index).write(item) };
        }
        Some((memory, count))
    }
}

/// A C string of any text, cut at the first NUL, which UCX could not print.
pub(crate) fn c_string(text: &str) -> CString {
    let until = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..until]).unwrap_or_default()
}

fn version(libraries: &Libraries) -> String {
    type Get = unsafe extern "C" fn() -> *const c_char;
    let base = libraries.ucs_base as *mut c_void;
    loaded::belonging(base, "libucp")
        .and_then(|ucp| ucp.symbol(c"ucp_get_version_string"))
        .map_or_else(
            || String::from("of unknown version"),
            |get| {
                // SAFETY: a public function of UCX without arguments that returns a static string.
                unsafe {
                    let get = core::mem::transmute::<*mut c_void, Get>(get);
                    CStr::from_ptr(get()).to_string_lossy().into_owned()
                }
            },
        )
}

/// Logs a formatted line into the log of a UCX copy.
#[macro_export]
macro_rules! log {
    ($ucx:expr, $level:ident, $($format:tt)+) => {
        $ucx.log($crate::Level::$level, file!(), line!(), format_args!($($format)+))
    };
}
