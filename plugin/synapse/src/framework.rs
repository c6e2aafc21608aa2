//! The framework in this process: whether it is there, and which card it has.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::Loaded;
use crate::loaded::Changes;
use crate::status::{CallError, Status};
use crate::sys::{DeviceInfoV2, Functions, Handle, PoolInfoV2};

/// The id that `synDeviceAcquire` returns, whatever the card; the functions ignore it.
pub(crate) const DEVICE: u32 = 0;
/// The pool that tensors come from.
const POOL: &std::ffi::CStr = c"global_hbm";

/// Calls a function of libSynapse.
macro_rules! call {
    ($framework:expr, $name:ident($($argument:expr),*)) => {
        match $framework.functions.$name {
            // SAFETY: argued where the macro is used.
            Some(call) => match Status(unsafe { call($($argument),*) }) {
                Status::SUCCESS => Ok(()),
                status => Err(CallError::Refused { call: stringify!($name), status }),
            },
            None => Err(CallError::Missing(stringify!($name))),
        }
    };
}
pub(crate) use call;

/// A structure that a library fills without knowing our size of it, with room behind it for a newer, larger one.
#[repr(C)]
struct WithRoom<T> {
    known: T,
    beyond: [u8; 1024],
}

/// Fills the room behind the structure that we know.
const CANARY: u8 = 0xc5;

/// libSynapse, and libscal if it is there.
#[derive(Debug)]
pub struct Framework {
    pub(crate) functions: Functions,
    larger: OnceLock<LargerStructure>,
    /// Keeps the libraries of the functions in the process.
    libraries: Vec<Loaded>,
}

/// A structure of which this crate knows only the first part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargerStructure {
    /// The function that filled it.
    pub call: &'static str,
    /// Bytes that it wrote.
    pub written: usize,
    /// Bytes that are known here.
    pub known: usize,
}

/// The card that the framework has acquired, as it describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// The compute node's descriptor. It is the framework's: never close it, never duplicate it for longer than a
    /// call.
    pub fd: c_int,
    /// Place of the card in the server.
    pub module_id: u32,
    /// N of `/dev/accel/accelN`, where the library says so.
    pub index: Option<u8>,
    /// `synDeviceType`.
    pub device_type: u32,
    /// The base of the pool, if libSynapse reports it; used if libscal does not.
    hbm_base: Option<u64>,
    /// Bytes that can be allocated.
    dram_size: u64,
    /// Identifies this opening of the card: libscal's key for it, 0 if that is not known.
    opening: usize,
}

/// The device memory that the framework allocates from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// The addresses that it hands out.
    pub range: Range<u64>,
    /// Start of the driver's mapping that contains it: what the driver exports.
    pub mapping: u64,
}

impl Framework {
    /// The framework, if libSynapse is in this process. Searches the loader's list only if it has changed.
    pub fn find() -> Option<Arc<Framework>> {
        // libscal may be loaded later than libSynapse.
        static WITHOUT_SCAL: OnceLock<Arc<Framework>> = OnceLock::new();
        static COMPLETE: OnceLock<Arc<Framework>> = OnceLock::new();
        static CHANGES: Changes = Changes::new();
        if let Some(known) = COMPLETE.get() {
            return Some(Arc::clone(known));
        }
        if let Some(Some(found)) = CHANGES.look_if_any(Framework::look) {
            let has_scal = found.functions.scal_pool_get_infoV2.is_some();
            let known = if has_scal { &COMPLETE } else { &WITHOUT_SCAL };
            known.get_or_init(|| Arc::new(found));
        }
        COMPLETE.get().or(WITHOUT_SCAL.get()).map(Arc::clone)
    }

    /// libscal alone, which a program may use without libSynapse.
    fn find_scal() -> Option<&'static Framework> {
        static KNOWN: OnceLock<Framework> = OnceLock::new();
        static CHANGES: Changes = Changes::new();
        if let Some(known) = KNOWN.get() {
            return Some(known);
        }
        let scal = CHANGES.look_if_any(|| Loaded::find("libscal"))??;
        // SAFETY: as in `look`.
        let functions =
            unsafe { Functions::find(|_| std::ptr::null_mut(), |name| scal.function(name)) };
        let known = || Framework { functions, larger: OnceLock::new(), libraries: vec![scal] };
        Some(KNOWN.get_or_init(known))
    }

    fn look() -> Option<Framework> {
        let synapse = Loaded::find("libSynapse")?;
        let scal = Loaded::find("libscal");
        let in_scal = |name: &std::ffi::CStr| match &scal {
            Some(scal) => scal.function(name),
            // It may be part of libSynapse.
            None => synapse.function(name),
        };
        // SAFETY: libraries of these names have the vendor's functions, and stay in the process.
        let functions = unsafe { Functions::find(|name| synapse.function(name), in_scal) };
        let libraries = [Some(synapse), scal].into_iter().flatten().collect();
        Some(Framework { functions, larger: OnceLock::new(), libraries })
    }

    /// A framework with these functions.
    ///
    /// # Safety
    /// The functions behave as the libraries' do.
    pub unsafe fn with_functions(functions: Functions) -> Framework {
        Framework { functions, larger: OnceLock::new(), libraries: Vec::new() }
    }

    /// Where libSynapse was loaded from.
    pub fn path(&self) -> &str {
        self.libraries.first().map_or("(a table of functions)", Loaded::path)
    }

    /// The card that the framework has, if it has acquired one. Changes nothing.
    pub fn acquired(&self) -> Result<Option<Acquired>, CallError> {
        let card = self.described()?;
        Ok(card.map(|card| {
            let opening = self.scal_of(card.fd).map_or(0, |scal| scal as usize);
            Acquired { opening, ..card }
        }))
    }

    /// Whether the framework has this card, as far as libSynapse knows: another opening of the card with the same
    /// descriptor looks the same. libscal is not asked, because a release holds its lock while it unmaps memory.
    pub fn has(&self, card: &Acquired) -> Result<bool, CallError> {
        Ok(self.described()? == Some(Acquired { opening: 0, ..*card }))
    }

    /// The first structure that was larger than known here, if any was: the libraries are newer than this crate.
    pub fn larger_structure(&self) -> Option<LargerStructure> {
        self.larger.get().copied()
    }

    /// Lets a function write its structure. Returns the function's result and the structure.
    fn filled<T, R>(
        &self,
        call: &'static str,
        structure: T,
        fill: impl FnOnce(*mut T) -> R,
    ) -> (R, T) {
        let mut place = WithRoom { known: structure, beyond: [CANARY; 1024] };
        let returned = fill((&raw mut place).cast());
        if let Some(last) = place.beyond.iter().rposition(|&byte| byte != CANARY) {
            let (known, written) = (size_of::<T>(), size_of::<T>() + last + 1);
            self.larger.get_or_init(|| LargerStructure { call, written, known });
        }
        (returned, place.known)
    }

    /// The card as libSynapse describes it.
    fn described(&self) -> Result<Option<Acquired>, CallError> {
        let (name, call) =
            match (self.functions.synDeviceGetInfoV2, self.functions.synDeviceGetInfo) {
                (Some(call), _) => ("synDeviceGetInfoV2", call),
                (None, Some(call)) => ("synDeviceGetInfo", call),
                (None, None) => return Err(CallError::Missing("synDeviceGetInfoV2")),
            };
        // SAFETY: the larger of the two structures, and room behind it.
        let ask = |info| Status(unsafe { call(DEVICE, info) });
        let (status, info) = self.filled(name, DeviceInfoV2::default(), ask);
        match status {
            Status::SUCCESS => {}
            Status::UNINITIALIZED | Status::FAIL | Status::NO_DEVICE_FOUND => return Ok(None),
            status => return Err(CallError::Refused { call: name, status }),
        }
        let has_v2 = self.functions.synDeviceGetInfoV2.is_some();
        Ok(Some(Acquired {
            fd: info.fd as c_int,
            module_id: info.device_id,
            index: has_v2.then_some(info.device_index),
            device_type: info.device_type,
            hbm_base: Some(info.hbm_base).filter(|&base| has_v2 && base != 0),
            dram_size: info.dram_size,
            opening: 0,
        }))
    }

    /// libscal's handle for a descriptor, if it drives that card.
    fn scal_of(&self, fd: c_int) -> Result<Handle, CallError> {
        let name = "scal_get_handle_from_fd";
        let call = self.functions.scal_get_handle_from_fd.ok_or(CallError::Missing(name))?;
        let mut scal = std::ptr::null_mut();
        // SAFETY: a number, and room for a pointer.
        let code = unsafe { call(fd, &raw mut scal) };
        if code == 0 && !scal.is_null() {
            Ok(scal)
        } else {
            Err(CallError::Scal { call: name, code })
        }
    }

    /// Whether Synapse or SCAL drives the card behind this descriptor, which must be the number that its owner uses:
    /// then its queues are SCAL's.
    pub fn drives(fd: c_int) -> bool {
        match Framework::find() {
            Some(framework) => {
                let has = |card: Option<Acquired>| card.is_some_and(|card| card.fd == fd);
                framework.scal_of(fd).is_ok() || framework.acquired().is_ok_and(has)
            }
            None => Framework::find_scal().is_some_and(|scal| scal.scal_of(fd).is_ok()),
        }
    }

    /// Where the card's pool is: as libscal reports it, else as libSynapse does.
    pub fn pool(&self, card: &Acquired) -> Result<Pool, CallError> {
        let pool = self.pool_of_scal(card.fd);
        match (pool, card.hbm_base) {
            (Ok(pool), _) => Ok(pool),
            (Err(_), Some(base)) => {
                Ok(Pool { range: base..base.saturating_add(card.dram_size), mapping: base })
            }
            (Err(error), None) => Err(error),
        }
    }

    fn pool_of_scal(&self, fd: c_int) -> Result<Pool, CallError> {
        let (find, ask) = ("scal_get_pool_handle_by_name", "scal_pool_get_infoV2");
        let by_name =
            self.functions.scal_get_pool_handle_by_name.ok_or(CallError::Missing(find))?;
        let get_info = self.functions.scal_pool_get_infoV2.ok_or(CallError::Missing(ask))?;
        let scal = self.scal_of(fd)?;
        let check =
            |call, code| if code == 0 { Ok(()) } else { Err(CallError::Scal { call, code }) };
        let mut pool = std::ptr::null_mut();
        // SAFETY: a handle that libscal just returned, and a terminated string.
        check(find, unsafe { by_name(scal, POOL.as_ptr(), &raw mut pool) })?;
        // SAFETY: plain data, for which zeroes are a value.
        let info: PoolInfoV2 = unsafe { std::mem::zeroed() };
        // SAFETY: as above, and room for the structure and more.
        let (code, info) = self.filled(ask, info, |info| unsafe { get_info(pool, info) });
        check(ask, code)?;
        let PoolInfoV2 { device_base, total, allocated_base, .. } = info;
        let end = device_base.checked_add(total).filter(|_| {
            device_base != 0 && total != 0 && allocated_base != 0 && allocated_base <= device_base
        });
        // Values that make no sense count as no answer.
        let end = end.ok_or(CallError::Scal { call: ask, code: 0 })?;
        Ok(Pool { range: device_base..end, mapping: allocated_base })
    }

    /// The card's PCI address, as the framework writes it.
    pub fn bus_id(&self) -> Result<String, CallError> {
        let mut text = [0_u8; 32];
        let len = text.len() as c_int - 1;
        // The buffer's length is passed with it, less the last byte, which stays zero.
        call!(self, synDeviceGetPCIBusId(text.as_mut_ptr().cast(), len, DEVICE))?;
        let text = std::ffi::CStr::from_bytes_until_nul(&text).unwrap_or_default();
        Ok(text.to_string_lossy().trim().to_owned())
    }

    /// Free and total bytes of the pool.
    pub fn memory(&self) -> Result<(u64, u64), CallError> {
        let (mut free, mut total) = (0, 0);
        // Room for two numbers.
        call!(self, synDeviceGetMemoryInfo(DEVICE, &raw mut free, &raw mut total))?;
        Ok((free, total))
    }

    /// The first function that copies need and the library does not have.
    pub fn missing_for_copies(&self) -> Option<&'static str> {
        macro_rules! missing {
            ($($name:ident)*) => {
                [$((stringify!($name), self.functions.$name.is_none())),*]
            };
        }
        let needed = missing!(synStreamCreateGeneric synStreamSynchronize synEventCreate synEventRecord
            synEventQuery synMemCopyAsync synHostMap synHostUnmap);
        needed.into_iter().find(|(_, missing)| *missing).map(|(name, _)| name)
    }

    /// The address of a function of libSynapse, to interpose on it.
    pub fn function(&self, name: &std::ffi::CStr) -> Option<*const c_void> {
        let found = self.libraries.first()?.function(name);
        (!found.is_null()).then_some(found.cast_const())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    static STATUS: AtomicU32 = AtomicU32::new(0);
    static ASKED_SCAL: AtomicU32 = AtomicU32::new(0);

    unsafe extern "C" fn get_info(_: u32, info: *mut DeviceInfoV2) -> u32 {
        // SAFETY: room for the structure.
        unsafe { (*info).fd = 5 };
        STATUS.load(Ordering::Relaxed)
    }

    unsafe extern "C" fn get_handle(_: c_int, scal: *mut Handle) -> c_int {
        ASKED_SCAL.fetch_add(1, Ordering::Relaxed);
        // SAFETY: room for a pointer.
        unsafe { *scal = std::ptr::without_provenance_mut(7) };
        0
    }

    /// Bytes of the structures of a release that is newer than this crate.
    const NEWER: usize = 200;

    unsafe extern "C" fn get_larger_info(_: u32, info: *mut DeviceInfoV2) -> u32 {
        // SAFETY: such a library trusts its caller to have its own structure.
        unsafe {
            info.cast::<u8>().write_bytes(1, NEWER);
            (*info).fd = 6;
        }
        0
    }

    unsafe extern "C" fn get_any_handle(_: c_int, scal: *mut Handle) -> c_int {
        // SAFETY: room for a pointer.
        unsafe { *scal = std::ptr::without_provenance_mut(7) };
        0
    }

    unsafe extern "C" fn get_larger_pool(_: Handle, info: *mut PoolInfoV2) -> c_int {
        // SAFETY: as above.
        unsafe {
            info.cast::<u8>().write_bytes(0, NEWER);
            (*info).device_base = 4096;
            (*info).allocated_base = 4096;
            (*info).total = 4096;
        }
        0
    }

    unsafe extern "C" fn get_pool(
        _: Handle,
        _: *const std::ffi::c_char,
        pool: *mut Handle,
    ) -> c_int {
        // SAFETY: room for a pointer.
        unsafe { *pool = std::ptr::without_provenance_mut(8) };
        0
    }

    #[test]
    fn libraries_with_larger_structures_overwrite_nothing_and_are_noticed() {
        let functions = Functions {
            synDeviceGetInfoV2: Some(get_larger_info),
            scal_get_handle_from_fd: Some(get_any_handle),
            scal_get_pool_handle_by_name: Some(get_pool),
            scal_pool_get_infoV2: Some(get_larger_pool),
            ..Functions::default()
        };
        // SAFETY: the functions that are set behave as the libraries' do.
        let framework = || unsafe { Framework::with_functions(functions) };
        let noticed = |call| Some(LargerStructure { call, written: NEWER, known: 72 });
        let one = framework();
        assert_eq!(one.larger_structure(), None);
        let card = one.acquired().unwrap().expect("a card");
        assert_eq!((card.fd, one.larger_structure()), (6, noticed("synDeviceGetInfoV2")));
        let other = framework();
        assert_eq!(other.pool(&card).unwrap().range, 4096..8192);
        assert_eq!(other.larger_structure(), noticed("scal_pool_get_infoV2"));
    }

    #[test]
    fn a_known_card_is_recognised_without_libscal_and_a_reset_is_not_a_release() {
        let functions = Functions {
            synDeviceGetInfoV2: Some(get_info),
            scal_get_handle_from_fd: Some(get_handle),
            ..Functions::default()
        };
        // SAFETY: the functions that are set behave as the libraries' do.
        let framework = unsafe { Framework::with_functions(functions) };
        let card = framework.acquired().unwrap().expect("a card");
        assert_eq!((card.fd, card.opening, ASKED_SCAL.load(Ordering::Relaxed)), (5, 7, 1));
        assert_eq!(framework.has(&card), Ok(true));
        assert_eq!(framework.has(&Acquired { fd: 6, ..card }), Ok(false));
        STATUS.store(Status::FAIL.0, Ordering::Relaxed);
        assert_eq!(framework.has(&card), Ok(false));
        STATUS.store(Status::DEVICE_RESET.0, Ordering::Relaxed);
        let reset = framework.has(&card).unwrap_err();
        assert_eq!(reset.status(), Some(Status::DEVICE_RESET));
        assert_eq!(ASKED_SCAL.load(Ordering::Relaxed), 1, "libscal has a lock of its own");
    }
}
