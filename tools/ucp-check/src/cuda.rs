//! CUDA memory through the driver's own API (libcuda.so.1), bound at run time: allocated, filled and read back without
//! UCX, so that a mistake of UCX cannot hide in the check.
//!
//! Everything is in the primary context of the first GPU, which the CUDA runtime and frameworks use. A CUDA context is
//! current per thread: each call here makes it current in the calling thread, and UCX finds it there.

use anyhow::{Context as _, Result, bail};
use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::OnceLock;

/// `CUresult`: 0 is success.
type Code = c_int;
/// `CUdeviceptr`.
type DevicePtr = u64;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const DMA_BUF_FD: c_int = 1;

/// The driver's functions in use, under the names that its library exports.
macro_rules! functions {
    ($($name:ident: $kind:ty,)*) => {
        #[allow(non_snake_case, reason = "the driver's names")]
        struct Functions { $($name: $kind,)* }

        impl Functions {
            /// # Safety
            /// `library` is a CUDA driver library.
            unsafe fn load(library: &Library) -> Result<Functions> {
                Ok(Functions { $($name: {
                    // SAFETY: the type is that of cuda.h.
                    let symbol: Symbol<$kind> = unsafe { library.get(stringify!($name).as_bytes()) }?;
                    *symbol
                },)* })
            }
        }
    };
}

functions! {
    cuInit: unsafe extern "C" fn(c_uint) -> Code,
    cuDeviceGet: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Code,
    cuCtxSetCurrent: unsafe extern "C" fn(*mut c_void) -> Code,
    cuCtxSynchronize: unsafe extern "C" fn() -> Code,
    cuMemAlloc_v2: unsafe extern "C" fn(*mut DevicePtr, usize) -> Code,
    cuMemFree_v2: unsafe extern "C" fn(DevicePtr) -> Code,
    cuMemcpyHtoD_v2: unsafe extern "C" fn(DevicePtr, *const c_void, usize) -> Code,
    cuMemcpyDtoH_v2: unsafe extern "C" fn(*mut c_void, DevicePtr, usize) -> Code,
    cuMemGetHandleForAddressRange:
        unsafe extern "C" fn(*mut c_void, DevicePtr, usize, c_int, u64) -> Code,
    cuGetErrorName: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
}

/// The driver, with the primary context of the first GPU. Lives as long as the process.
pub struct Cuda {
    f: Functions,
    context: *mut c_void,
}

// SAFETY: function pointers, and a context that any thread may make current.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The driver and its first GPU; its context is current in this thread from now on.
    pub fn get() -> Result<&'static Cuda> {
        static CUDA: OnceLock<Result<Cuda, String>> = OnceLock::new();
        let cuda = CUDA.get_or_init(|| Cuda::open().map_err(|error| format!("{error:#}")));
        let cuda = cuda.as_ref().map_err(|error| anyhow::anyhow!("no CUDA: {error}"))?;
        // SAFETY: the context was retained and is never released.
        cuda.check("cuCtxSetCurrent", unsafe { (cuda.f.cuCtxSetCurrent)(cuda.context) })?;
        Ok(cuda)
    }

    fn open() -> Result<Cuda> {
        // SAFETY: loading the driver library runs its constructors, which is what every CUDA program does.
        let library = unsafe { Library::open(Some("libcuda.so.1"), libc::RTLD_NOW) };
        let library = library.context("the driver library cannot be loaded")?;
        // SAFETY: it is the CUDA driver library by its name.
        let f = unsafe { Functions::load(&library) }?;
        std::mem::forget(library); // the driver is never unloaded: it has threads
        let mut cuda = Cuda { f, context: std::ptr::null_mut() };
        let mut device = 0;
        // SAFETY: results go to variables of the right types.
        unsafe {
            cuda.check("cuInit", (cuda.f.cuInit)(0))?;
            cuda.check("cuDeviceGet", (cuda.f.cuDeviceGet)(&mut device, 0))?;
            let retain = (cuda.f.cuDevicePrimaryCtxRetain)(&mut cuda.context, device);
            cuda.check("cuDevicePrimaryCtxRetain", retain)?;
        }
        Ok(cuda)
    }

    /// Device memory; `length` is not 0.
    pub fn allocate(&'static self, length: usize) -> Result<Allocation> {
        let mut address = 0;
        // SAFETY: the result goes to a variable of the right type.
        self.check("cuMemAlloc", unsafe { (self.f.cuMemAlloc_v2)(&mut address, length) })?;
        Ok(Allocation { cuda: self, address, length })
    }

    fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: a static string, or null.
        let name = unsafe {
            let known = (self.f.cuGetErrorName)(code, &mut name) == 0 && !name.is_null();
            if known { CStr::from_ptr(name).to_string_lossy() } else { "unknown error".into() }
        };
        bail!("{call}: {name} ({code})")
    }
}

/// Memory of the GPU, freed when it is dropped.
pub struct Allocation {
    cuda: &'static Cuda,
    address: DevicePtr,
    length: usize,
}

impl Allocation {
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Writes `from` at `offset`. The bytes have arrived when this returns.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<()> {
        let cuda = self.entered(offset, from.len())?;
        let to = self.address + offset as u64;
        // SAFETY: `from` is as long, and the range was checked to lie inside this allocation.
        let copy = unsafe { (cuda.f.cuMemcpyHtoD_v2)(to, from.as_ptr().cast(), from.len()) };
        cuda.check("cuMemcpyHtoD", copy)?;
        // That call may return once the bytes are in the driver's staging buffer, so wait for the device.
        // SAFETY: the context is current.
        cuda.check("cuCtxSynchronize", unsafe { (cuda.f.cuCtxSynchronize)() })
    }

    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let cuda = self.entered(offset, to.len())?;
        let from = self.address + offset as u64;
        // SAFETY: as in `write`.
        let copy = unsafe { (cuda.f.cuMemcpyDtoH_v2)(to.as_mut_ptr().cast(), from, to.len()) };
        cuda.check("cuMemcpyDtoH", copy)
    }

    /// A dma-buf of its first `length` bytes, which must be whole pages of the system's size.
    pub fn dma_buf(&self, length: usize) -> Result<OwnedFd> {
        let cuda = self.entered(0, length)?;
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the driver writes a descriptor.
        let export = unsafe {
            let to = (&raw mut fd).cast();
            (cuda.f.cuMemGetHandleForAddressRange)(to, self.address, length, DMA_BUF_FD, 0)
        };
        cuda.check("cuMemGetHandleForAddressRange", export)?;
        // SAFETY: a new descriptor, which is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Checks that a range lies inside; returns the driver, its context current in this thread.
    fn entered(&self, offset: usize, length: usize) -> Result<&'static Cuda> {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        Cuda::get()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated by this driver, freed once.
        let free =
            || self.cuda.check("cuMemFree", unsafe { (self.cuda.f.cuMemFree_v2)(self.address) });
        if let Err(error) = Cuda::get().and_then(|_| free()) {
            eprintln!("ucp-check: CUDA memory at {:#x}: {error:#}", self.address);
        }
    }
}
