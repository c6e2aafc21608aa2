//! The framework, played by the software Synapse in this very process: loaded by path, as a program does that knows
//! nothing of the engine.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::transmute;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::machine;

/// libSynapse, loaded.
pub(crate) struct Framework {
    handle: *mut c_void,
    // A process has one.
    _turn: MutexGuard<'static, ()>,
}

/// The folder with the libraries under the names that programs look for.
fn folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("guest-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let synapse = machine::library().with_file_name("libsoft_synapse.so");
    for (file, name) in [(synapse, "libSynapse.so"), (soft_synapse::LIBSCAL.into(), "libscal.so")] {
        assert!(file.exists(), "{} is missing: build with cargo", file.display());
        let _ = std::fs::remove_file(folder.join(name));
        std::os::unix::fs::symlink(&file, folder.join(name)).unwrap();
    }
    folder
}

fn load(path: &std::path::Path) -> *mut c_void {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: runs the initialisers of the software libraries.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "{path:?} does not load");
    handle
}

impl Framework {
    /// Loads it, and nothing more.
    pub(crate) fn load(generation: &str) -> Framework {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        machine::set_up(generation);
        // SAFETY: nothing reads the environment at the same time: tests take turns.
        unsafe { std::env::set_var("SOFT_GAUDI_FORBIDDEN", "count") };
        load(&machine::library());
        let folder = folder();
        load(&folder.join("libscal.so"));
        let handle = load(&folder.join("libSynapse.so"));
        std::fs::remove_dir_all(folder).unwrap();
        Framework { handle, _turn: turn }
    }

    /// Loads it and acquires the card with this module id.
    pub(crate) fn with_card(generation: &str, module: u32) -> Framework {
        let framework = Framework::load(generation);
        framework.acquire(module);
        framework
    }

    /// A function of libSynapse. `F` must be its type in synapse_api.h.
    fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: the handle is live.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!found.is_null(), "no {name:?}");
        assert_eq!(size_of::<F>(), size_of_val(&found));
        // SAFETY: callers name the function's type.
        unsafe { std::mem::transmute_copy(&found) }
    }

    pub(crate) fn acquire(&self, module: u32) {
        let initialize: extern "C" fn() -> c_int = self.function(c"synInitialize");
        let acquire: extern "C" fn(&mut u32, u32) -> c_int =
            self.function(c"synDeviceAcquireByModuleId");
        assert_eq!(initialize(), 0);
        let mut device = u32::MAX;
        assert_eq!(acquire(&mut device, module), 0);
    }

    /// The answer of `synDeviceRelease`.
    pub(crate) fn release(&self) -> c_int {
        let release: extern "C" fn(u32) -> c_int = self.function(c"synDeviceRelease");
        release(0)
    }

    pub(crate) fn malloc(&self, len: u64) -> u64 {
        self.try_malloc(len).expect("the pool has it")
    }

    pub(crate) fn try_malloc(&self, len: u64) -> Result<u64, c_int> {
        let malloc: extern "C" fn(u32, u64, u64, u32, &mut u64) -> c_int =
            self.function(c"synDeviceMalloc");
        let mut addr = 0;
        match malloc(0, len, 0, 0, &mut addr) {
            0 => Ok(addr),
            status => Err(status),
        }
    }

    pub(crate) fn free(&self, addr: u64) {
        let free: extern "C" fn(u32, u64, u32) -> c_int = self.function(c"synDeviceFree");
        assert_eq!(free(0, addr, 0), 0);
    }

    /// Free and total bytes of the pool.
    pub(crate) fn memory(&self) -> (u64, u64) {
        let info: extern "C" fn(u32, &mut u64, &mut u64) -> c_int =
            self.function(c"synDeviceGetMemoryInfo");
        let (mut free, mut total) = (0, 0);
        assert_eq!(info(0, &mut free, &mut total), 0);
        (free, total)
    }

    pub(crate) fn host_map(&self, memory: &[u8]) -> c_int {
        let map: extern "C" fn(u32, u64, *const u8) -> c_int = self.function(c"synHostMap");
        map(0, memory.len() as u64, memory.as_ptr())
    }

    /// The framework's own copy of mapped host memory to the card, waited for.
    pub(crate) fn copy_in(&self, memory: &[u8], to: u64) -> c_int {
        let create: extern "C" fn(&mut *mut c_void, u32, u32) -> c_int =
            self.function(c"synStreamCreateGeneric");
        let copy: extern "C" fn(*mut c_void, *const u8, u64, u64, c_int) -> c_int =
            self.function(c"synMemCopyAsync");
        let on_stream = |name| self.function::<extern "C" fn(*mut c_void) -> c_int>(name);
        let mut stream = std::ptr::null_mut();
        assert_eq!(create(&mut stream, 0, 0), 0);
        let status = copy(stream, memory.as_ptr(), memory.len() as u64, to, 0);
        assert_eq!(on_stream(c"synStreamSynchronize")(stream), 0);
        assert_eq!(on_stream(c"synStreamDestroy")(stream), 0);
        status
    }

    /// How often a function was called that only a framework may call; of `None`, how much was done that breaks a card.
    pub(crate) fn calls(name: Option<&CStr>) -> u64 {
        // SAFETY: the software Gaudi is loaded, and this is its function.
        unsafe {
            let path = CString::new(machine::library().to_str().unwrap()).unwrap();
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
            let calls = libc::dlsym(library, c"soft_gaudi_calls".as_ptr());
            assert!(!calls.is_null());
            transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> u64>(calls)(
                name.map_or(std::ptr::null(), CStr::as_ptr),
            )
        }
    }
}
