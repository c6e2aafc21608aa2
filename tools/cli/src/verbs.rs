//! As much of libibverbs as it takes to ask an HCA whether it registers a dma-buf. Bound at run time; no HCA is
//! needed to build.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

const LOCAL_REMOTE_READ_WRITE: c_int = 1 | 2 | 4;

type Pointer = *mut c_void;
type Open = unsafe extern "C" fn(Pointer) -> Pointer;
type Close = unsafe extern "C" fn(Pointer) -> c_int;
type RegisterDmaBuf = unsafe extern "C" fn(Pointer, u64, usize, u64, c_int, c_int) -> Pointer;

/// The loaded library. It may have started threads or handlers: never unloaded.
pub(crate) struct Verbs {
    library: ManuallyDrop<Library>,
}

/// What became of a registration.
pub(crate) struct Registration {
    pub(crate) hca: String,
    /// The errno, and the function that gave it.
    pub(crate) outcome: Result<(), (&'static str, i32)>,
}

impl Verbs {
    /// `None` if there is no libibverbs.
    pub(crate) fn load() -> Option<Self> {
        // SAFETY: runs the initialisers of the libibverbs that the user installed.
        let library = unsafe { Library::open(Some("libibverbs.so.1"), RTLD_NOW | RTLD_LOCAL) };
        library.ok().map(|library| Self { library: ManuallyDrop::new(library) })
    }

    /// Whether it has the call that registers dma-bufs (rdma-core 34).
    pub(crate) fn knows_dmabufs(&self) -> bool {
        // SAFETY: only looked for.
        unsafe { self.library.get::<*const ()>("ibv_reg_dmabuf_mr") }.is_ok()
    }

    /// # Safety
    /// `T` is the function's type.
    unsafe fn function<T: Copy>(&self, name: &'static str) -> Result<T, (&'static str, i32)> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.library.get::<T>(name) };
        found.map(|symbol| *symbol).map_err(|_| (name, libc::ENOSYS))
    }

    /// Registers the dma-buf with every HCA that is wanted, and undoes it.
    pub(crate) fn register_everywhere(
        &self,
        dmabuf: BorrowedFd<'_>,
        len: u64,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Vec<Registration> {
        type List = unsafe extern "C" fn(*mut c_int) -> *mut Pointer;
        type Name = unsafe extern "C" fn(Pointer) -> *const c_char;
        // SAFETY: the signatures in verbs.h.
        let functions = unsafe {
            (
                self.function::<List>("ibv_get_device_list"),
                self.function::<Name>("ibv_get_device_name"),
            )
        };
        let (Ok(list), Ok(name)) = functions else { return Vec::new() };
        let mut count = 0;
        // SAFETY: a place for the number.
        let devices = unsafe { list(&mut count) };
        if devices.is_null() {
            return Vec::new();
        }
        // The list is not given back: the process ends soon.
        let one = |at: usize| {
            // SAFETY: inside the list, which has as many entries as it said.
            let device = unsafe { *devices.add(at) };
            // SAFETY: a device of the list; the name is terminated and lives as long as it.
            let hca = unsafe { CStr::from_ptr(name(device)) }.to_string_lossy().into_owned();
            is_wanted(&hca)
                .then(|| Registration { outcome: self.register(device, dmabuf, len), hca })
        };
        (0..count.max(0) as usize).filter_map(one).collect()
    }

    fn register(
        &self,
        device: Pointer,
        dmabuf: BorrowedFd<'_>,
        len: u64,
    ) -> Result<(), (&'static str, i32)> {
        // SAFETY: the signatures in verbs.h.
        let (open, close, alloc, dealloc, dereg, register) = unsafe {
            (
                self.function::<Open>("ibv_open_device")?,
                self.function::<Close>("ibv_close_device")?,
                self.function::<Open>("ibv_alloc_pd")?,
                self.function::<Close>("ibv_dealloc_pd")?,
                self.function::<Close>("ibv_dereg_mr")?,
                self.function::<RegisterDmaBuf>("ibv_reg_dmabuf_mr")?,
            )
        };
        let made = |name, pointer: Pointer| {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            if pointer.is_null() { Err((name, errno)) } else { Ok(pointer) }
        };
        // SAFETY: a device of the list.
        let context = made("ibv_open_device", unsafe { open(device) })?;
        // SAFETY: an open device.
        let registered = made("ibv_alloc_pd", unsafe { alloc(context) }).and_then(|domain| {
            let fd = dmabuf.as_raw_fd();
            // SAFETY: a live domain and an open descriptor; the keys are not handed out.
            let region =
                unsafe { register(domain, 0, len as usize, 0, fd, LOCAL_REMOTE_READ_WRITE) };
            let region = made("ibv_reg_dmabuf_mr", region).map(|region| {
                // SAFETY: ours, and not used.
                unsafe { dereg(region) };
            });
            // SAFETY: ours, and empty again.
            unsafe { dealloc(domain) };
            region
        });
        // SAFETY: ours, and nothing is left in it.
        unsafe { close(context) };
        registered
    }
}
