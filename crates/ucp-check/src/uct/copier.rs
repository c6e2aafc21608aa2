//! Moving bytes through a copy transport: a worker, an interface and an endpoint to itself.

use super::sys::{
    self, AllocatedMemory, Completion, EpParams, Fence, Flush, GetShort, IfaceAttr, IfaceOps,
    IfaceParams, Iov, Progress, PutShort, Raw, RawStatus, Zcopy, slot,
};
use super::{Domain, Key, Registration, Result};
use std::ffi::{CString, c_void};
use std::mem::{transmute, zeroed};
use std::ptr;
use std::time::{Duration, Instant};

/// How long a copy may take before it counts as hung.
const LIMIT: Duration = Duration::from_secs(60);

/// A copy transport connected to itself; for one thread.
pub struct Copier<'d> {
    domain: &'d Domain,
    background: Raw,
    worker: Raw,
    iface: Raw,
    ep: Raw,
}

/// Which way the bytes go, seen from the local buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// From the local buffer.
    Put,
    /// To the local buffer.
    Get,
}

impl Way {
    fn slot(self) -> (usize, &'static str) {
        match self {
            Way::Put => (slot::PUT_ZCOPY, "uct_ep_put_zcopy"),
            Way::Get => (slot::GET_ZCOPY, "uct_ep_get_zcopy"),
        }
    }
}

unsafe extern "C" fn completed(_: *mut Completion) {}

/// A part of a local buffer: `count` times `length` bytes, `stride` apart.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// First byte.
    pub address: u64,
    /// Bytes of one.
    pub length: usize,
    /// From the start of one to the start of the next.
    pub stride: usize,
    /// How many.
    pub count: u32,
}

/// Where UCX tells of the end of one copy at a time; used again and again.
pub struct Ticket(*mut Completion);

impl Default for Ticket {
    fn default() -> Self {
        // Not inside a value that moves: UCX knows the address while a copy is under way.
        let completion = Completion { func: completed, count: 0, status: sys::OK };
        Ticket(Box::into_raw(Box::new(completion)))
    }
}

impl Ticket {
    /// Whether the copy it was last given to has ended, or there was none.
    pub fn is_free(&self) -> bool {
        // SAFETY: ours; UCX writes it on this thread, in progress.
        unsafe { ptr::read_volatile(&raw const (*self.0).count) == 0 }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_free() {
            // SAFETY: made in `default`; UCX is done with it. Else it is left to UCX.
            drop(unsafe { Box::from_raw(self.0) });
        }
    }
}

impl<'d> Copier<'d> {
    /// Opens the transport `tl` on the device of the domain's name.
    pub fn open(domain: &'d Domain, tl: &str) -> anyhow::Result<Copier<'d>> {
        let uct = domain.uct;
        let null = ptr::null_mut();
        // What is opened is closed by `drop`, also when a later step fails.
        let mut copier = Copier { domain, background: null, worker: null, iface: null, ep: null };
        let (c_tl, c_device) = (CString::new(tl)?, CString::new(domain.name())?);
        // SAFETY: out-parameters.
        let status = unsafe {
            (uct.f.ucs_async_context_create)(sys::ASYNC_MODE_THREAD, &mut copier.background)
        };
        uct.check("ucs_async_context_create", status)?;
        // SAFETY: the context was just made.
        let status = unsafe {
            let mode = sys::THREAD_MODE_SINGLE;
            (uct.f.uct_worker_create)(copier.background, mode, &mut copier.worker)
        };
        uct.check("uct_worker_create", status)?;
        let mut config = null;
        // SAFETY: the environment and the defaults, for a transport of this domain.
        let status = unsafe {
            let name = c_tl.as_ptr();
            let none = ptr::null();
            (uct.f.uct_md_iface_config_read)(domain.md, name, none, none, &mut config)
        };
        uct.check("uct_md_iface_config_read", status)?;
        // SAFETY: plain data.
        let mut params: IfaceParams = unsafe { zeroed() };
        params.field_mask = IfaceParams::OPEN_MODE | IfaceParams::DEVICE;
        params.open_mode = sys::OPEN_MODE_DEVICE;
        params.tl_name = c_tl.as_ptr();
        params.dev_name = c_device.as_ptr();
        // SAFETY: all parts belong together; the configuration is released once.
        let status = unsafe {
            let status = (uct.f.uct_iface_open)(
                domain.md,
                copier.worker,
                &params,
                config,
                &mut copier.iface,
            );
            (uct.f.uct_config_release)(config);
            status
        };
        uct.check("uct_iface_open", status)?;
        let (mut device, mut address) = ([0u64; 32], [0u64; 32]);
        // SAFETY: addresses of copy transports are a few bytes long.
        let (first, second) = unsafe {
            (
                (uct.f.uct_iface_get_device_address)(copier.iface, device.as_mut_ptr().cast()),
                (uct.f.uct_iface_get_address)(copier.iface, address.as_mut_ptr().cast()),
            )
        };
        uct.check("uct_iface_get_device_address", first)?;
        uct.check("uct_iface_get_address", second)?;
        // SAFETY: plain data.
        let mut params: EpParams = unsafe { zeroed() };
        params.field_mask = EpParams::IFACE | EpParams::DEV_ADDR | EpParams::IFACE_ADDR;
        params.iface = copier.iface;
        params.dev_addr = device.as_ptr().cast();
        params.iface_addr = address.as_ptr().cast();
        // SAFETY: the interface's own addresses.
        let status = unsafe { (uct.f.uct_ep_create)(&params, &mut copier.ep) };
        uct.check("uct_ep_create", status)?;
        Ok(copier)
    }

    pub(super) fn uct(&self) -> &'static super::Uct {
        self.domain.uct
    }

    pub(super) fn iface(&self) -> Raw {
        self.iface
    }

    /// Most endpoints the interface says it can have.
    pub fn max_endpoints(&self) -> Result<u64> {
        let mut attr: IfaceAttr = [0; 128];
        // SAFETY: an open interface, and room for its attributes.
        let status = unsafe { (self.domain.uct.f.uct_iface_query)(self.iface, &mut attr) };
        self.domain.uct.check("uct_iface_query", status)?;
        Ok(attr[sys::IFACE_ATTR_MAX_NUM_EPS])
    }

    /// By which method the interface gets host memory for its own buffers.
    pub fn allocation_method(&self) -> Result<&'static str> {
        let f = &self.domain.uct.f;
        // SAFETY: plain data.
        let mut memory: AllocatedMemory = unsafe { zeroed() };
        let (flags, name) = (sys::ACCESS_ALL as u32, c"ucp-check".as_ptr());
        // SAFETY: an open interface, and an out-parameter.
        let status =
            unsafe { (f.uct_iface_mem_alloc)(self.iface, 65_536, flags, name, &mut memory) };
        self.domain.uct.check("uct_iface_mem_alloc", status)?;
        // SAFETY: allocated just now, freed once.
        unsafe { (f.uct_iface_mem_free)(&memory) };
        Ok(sys::ALLOC_METHODS.get(memory.method as usize).copied().unwrap_or("another"))
    }

    fn operation(&self, slot: usize) -> *const c_void {
        // SAFETY: an open interface begins with its operations.
        unsafe { (*self.iface.cast::<IfaceOps>())[slot] }
    }

    /// Host to device, waited for.
    pub fn put(&self, from: &[u8], to: u64) -> Result<()> {
        // SAFETY: the slot holds a function of this type.
        let put: PutShort = unsafe { transmute(self.operation(slot::PUT_SHORT)) };
        // SAFETY: the source is a slice; the device checks the destination.
        let status =
            unsafe { put(self.ep, from.as_ptr().cast(), from.len() as u32, to, sys::INVALID_RKEY) };
        self.domain.uct.check("uct_ep_put_short", status)
    }

    /// Device to host, waited for.
    pub fn get(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the slot holds a function of this type.
        let get: GetShort = unsafe { transmute(self.operation(slot::GET_SHORT)) };
        // SAFETY: the destination is a slice; the device checks the source.
        let status = unsafe {
            get(self.ep, to.as_mut_ptr().cast(), to.len() as u32, from, sys::INVALID_RKEY)
        };
        self.domain.uct.check("uct_ep_get_short", status)
    }

    /// Host to device by the engine, from memory that is not registered.
    pub fn put_unregistered(&self, from: &[u8], to: u64) -> Result<()> {
        // SAFETY: the buffer lives until the copy is done, which is waited for.
        unsafe { self.zcopy(Way::Put, from.as_ptr().cast_mut(), from.len(), None, to) }
    }

    /// Device to host by the engine, to memory that is not registered.
    pub fn get_unregistered(&self, from: u64, to: &mut [u8]) -> Result<()> {
        // SAFETY: the buffer lives until the copy is done, which is waited for.
        unsafe { self.zcopy(Way::Get, to.as_mut_ptr(), to.len(), None, from) }
    }

    /// Host to device by the engine, straight from registered memory where it can be pinned.
    pub fn put_registered(&self, from: &[u8], by: &Registration<'_>, to: u64) -> Result<()> {
        // SAFETY: the buffer lives until the copy is done, which is waited for.
        unsafe { self.zcopy(Way::Put, from.as_ptr().cast_mut(), from.len(), Some(by), to) }
    }

    /// Device to host by the engine.
    pub fn get_registered(&self, from: u64, to: &mut [u8], by: &Registration<'_>) -> Result<()> {
        // SAFETY: the buffer lives until the copy is done, which is waited for.
        unsafe { self.zcopy(Way::Get, to.as_mut_ptr(), to.len(), Some(by), from) }
    }

    /// Starts a copy and waits for it.
    ///
    /// # Safety
    /// The local buffer must be valid, and writable for a get.
    unsafe fn zcopy(
        &self,
        way: Way,
        local: *mut u8,
        length: usize,
        by: Option<&Registration<'_>>,
        remote: u64,
    ) -> Result<()> {
        let name = way.slot().1;
        let memh = by.map_or(ptr::null_mut(), Registration::handle);
        let ticket = Ticket::default();
        // SAFETY: as the caller promises.
        unsafe { self.start(way, (local as u64, length), memh, remote, &ticket)? };
        let since = Instant::now();
        while !ticket.is_free() {
            self.progress();
            assert!(since.elapsed() < LIMIT, "{name} of {length} bytes hangs");
        }
        self.outcome(way, &ticket)
    }

    /// Starts a copy between a local buffer (address and length) and a remote address; `ticket`,
    /// which must be free, is busy until it has ended.
    ///
    /// # Safety
    /// Both sides must be valid until the end, and left alone; `memh` is null or a live handle for
    /// the local buffer.
    pub(crate) unsafe fn start(
        &self,
        way: Way,
        (local, length): (u64, usize),
        memh: Raw,
        remote: u64,
        ticket: &Ticket,
    ) -> Result<()> {
        let piece = Piece { address: local, length, stride: 0, count: 1 };
        // SAFETY: as the caller promises.
        unsafe { self.start_pieces(way, &[piece], memh, remote, ticket) }
    }

    /// The same with several local pieces, which all have the handle.
    ///
    /// # Safety
    /// As for [`Copier::start`].
    pub(crate) unsafe fn start_pieces(
        &self,
        way: Way,
        pieces: &[Piece],
        memh: Raw,
        remote: u64,
        ticket: &Ticket,
    ) -> Result<()> {
        let (slot, name) = way.slot();
        // SAFETY: the slot holds a function of this type.
        let copy: Zcopy = unsafe { transmute(self.operation(slot)) };
        let iov: Vec<Iov> = pieces
            .iter()
            .map(|&Piece { address, length, stride, count }| {
                let buffer = ptr::with_exposed_provenance_mut(address as usize);
                Iov { buffer, length, memh, stride, count }
            })
            .collect();
        self.post(name, ticket, |completion| {
            // SAFETY: as the caller promises; the completion lives until its count is zero.
            unsafe { copy(self.ep, iov.as_ptr(), iov.len(), remote, sys::INVALID_RKEY, completion) }
        })
    }

    /// Copies from a peer's memory, attached as `by`, to what `key` is for. Both are the peer's
    /// addresses.
    pub fn put_attached(
        &self,
        from: u64,
        length: usize,
        by: &Registration<'_>,
        to: u64,
        key: &Key<'_>,
    ) -> Result<()> {
        let (slot, name) = Way::Put.slot();
        // SAFETY: the slot holds a function of this type.
        let put: Zcopy = unsafe { transmute(self.operation(slot)) };
        let buffer = ptr::with_exposed_provenance_mut(from as usize);
        let iov = Iov { buffer, length, memh: by.handle(), stride: 0, count: 1 };
        let ticket = Ticket::default();
        self.post(name, &ticket, |completion| {
            // SAFETY: no memory of this process takes part; handle and key are live, and the
            // completion lives until its count is zero.
            unsafe { put(self.ep, &iov, 1, to, key.raw(), completion) }
        })?;
        let since = Instant::now();
        while !ticket.is_free() {
            self.progress();
            assert!(since.elapsed() < LIMIT, "{name} of {length} bytes hangs");
        }
        self.outcome(Way::Put, &ticket)
    }

    /// Ends when everything posted before has ended.
    pub(crate) fn flush(&self, ticket: &Ticket) -> Result<()> {
        // SAFETY: the slot holds a function of this type.
        let flush: Flush = unsafe { transmute(self.operation(slot::FLUSH)) };
        // SAFETY: a live endpoint; the completion lives until its count is zero.
        self.post("uct_ep_flush", ticket, |completion| unsafe { flush(self.ep, 0, completion) })
    }

    /// Orders what follows after what was posted before.
    pub(crate) fn fence(&self) -> Result<()> {
        // SAFETY: the slot holds a function of this type; a live endpoint.
        let status = unsafe {
            let fence: Fence = transmute(self.operation(slot::FENCE));
            fence(self.ep, 0)
        };
        self.domain.uct.check("uct_ep_fence", status)
    }

    /// Posts an operation whose ticket is busy until it has ended.
    fn post(
        &self,
        name: &'static str,
        ticket: &Ticket,
        operation: impl FnOnce(*mut Completion) -> RawStatus,
    ) -> Result<()> {
        assert!(ticket.is_free(), "a ticket serves one operation at a time");
        // SAFETY: ours, and free.
        unsafe {
            (*ticket.0).status = sys::OK;
            (*ticket.0).count = 1;
        }
        let status = operation(ticket.0);
        if status != sys::INPROGRESS {
            // SAFETY: UCX has not kept it.
            unsafe { (*ticket.0).count = 0 };
            self.domain.uct.check(name, status)?;
        }
        Ok(())
    }

    /// How the last copy of a free ticket ended.
    pub(crate) fn outcome(&self, way: Way, ticket: &Ticket) -> Result<()> {
        // SAFETY: ours, and free.
        self.domain.uct.check(way.slot().1, unsafe { (*ticket.0).status })
    }

    /// Lets the interface work; how many operations ended.
    pub fn progress(&self) -> u32 {
        // SAFETY: the slot holds a function of this type; an open interface, on its only thread.
        unsafe {
            let progress: Progress = transmute(self.operation(slot::PROGRESS));
            progress(self.iface)
        }
    }
}

impl Drop for Copier<'_> {
    fn drop(&mut self) {
        let f = &self.domain.uct.f;
        let close: [(Raw, unsafe extern "C" fn(Raw)); 4] = [
            (self.ep, f.uct_ep_destroy),
            (self.iface, f.uct_iface_close),
            (self.worker, f.uct_worker_destroy),
            (self.background, f.ucs_async_context_destroy),
        ];
        for (handle, close) in close.into_iter().filter(|(handle, _)| !handle.is_null()) {
            // SAFETY: opened in the opposite order, closed once.
            unsafe { close(handle) };
        }
    }
}
