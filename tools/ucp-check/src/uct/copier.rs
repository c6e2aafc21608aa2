//! Moves bytes through a copy transport: a worker, an interface, and an endpoint to itself.

use super::memory::ACCESS_ALL;
use super::{Domain, Key, Registration};
use crate::ucx::sys::{
    AllocatedMemory, Growing, IfaceAttr, IfaceOps, IfaceParams, Iov, IsConnectedParams, MemoryType,
    Operation, PerfAttr, Plain, Raw, RawCompletion, UctEpParams,
};
use crate::ucx::{Result, Status, Ucx, call};
use ::uct::abi::{
    EP_PARAM_DEV_ADDR, EP_PARAM_IFACE_ADDR, IFACE_PARAM_DEVICE, INVALID_RKEY, iface_op,
    is_connected_field, perf_field,
};
use std::cell::Cell;
use std::ffi::{CString, c_uint, c_void};
use std::mem::transmute;
use std::ptr;
use std::time::{Duration, Instant};

type PutShort = unsafe extern "C" fn(Raw, *const c_void, c_uint, u64, usize) -> Status;
type GetShort = unsafe extern "C" fn(Raw, *mut c_void, c_uint, u64, usize) -> Status;
type Zcopy = unsafe extern "C" fn(Raw, *const Iov, usize, u64, usize, *mut RawCompletion) -> Status;
type Flush = unsafe extern "C" fn(Raw, c_uint, *mut RawCompletion) -> Status;
type Fence = unsafe extern "C" fn(Raw, c_uint) -> Status;
type Progress = unsafe extern "C" fn(Raw) -> c_uint;

/// An operation from the table at the beginning of an open interface. For use in an `unsafe` block of the caller, which
/// must make sure that the function has this type.
macro_rules! operation {
    ($copier:expr, $slot:expr, $type:ty) => {
        transmute::<*const c_void, $type>((*$copier.iface.cast::<IfaceOps>()).0[$slot])
    };
}

const ASYNC_MODE_THREAD: u32 = 1;
const THREAD_MODE_SINGLE: u32 = 0;
const OPEN_MODE_DEVICE: u64 = 1;
const IFACE_PARAM_OPEN_MODE: u64 = 1 << 1;
const EP_PARAM_IFACE: u64 = 1;
const ALLOC_METHODS: [&str; 5] = ["thp", "md", "heap", "mmap", "huge"];
/// How long a copy may take before it counts as hung.
const LIMIT: Duration = Duration::from_secs(60);

/// More bytes than any address of a copy transport has.
const ADDRESS_LEN: usize = 256;

/// The addresses of an interface.
pub struct Addresses {
    pub device: [u8; ADDRESS_LEN],
    pub interface: [u8; ADDRESS_LEN],
}

/// A copy transport connected to itself, for use by one thread.
pub struct Copier<'d> {
    domain: &'d Domain,
    background: Raw,
    worker: Raw,
    iface: Raw,
    ep: Raw,
}

/// Which way the bytes go, seen from the local buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rma {
    /// From the local buffer.
    Put,
    /// To the local buffer.
    Get,
}

/// A part of a local buffer: `count` times `length` bytes, `stride` apart.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Piece {
    pub address: u64,
    pub length: usize,
    pub stride: usize,
    pub count: u32,
}

impl Piece {
    pub fn plain(address: u64, length: usize) -> Piece {
        Piece { address, length, stride: 0, count: 1 }
    }
}

/// A transport's estimate of what a copy costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    pub bandwidth: f64,
    /// Seconds of the caller's time.
    pub overhead: f64,
    /// Further seconds until it has ended.
    pub latency: f64,
}

/// Where UCX reports the end of one operation at a time; reusable.
pub struct Completion {
    raw: *mut RawCompletion,
    call: Cell<&'static str>,
}

unsafe extern "C" fn completed(_: *mut RawCompletion) {}

impl Default for Completion {
    fn default() -> Self {
        // On the heap, because UCX keeps the address while an operation is in flight, and this value may move.
        let raw = RawCompletion { func: Some(completed), count: 0, status: Status::OK };
        Completion { raw: Box::into_raw(Box::new(raw)), call: Cell::new("") }
    }
}

impl Completion {
    pub fn several(count: usize) -> Vec<Completion> {
        (0..count).map(|_| Completion::default()).collect()
    }

    /// Whether its last operation has ended, or there was none.
    pub fn is_free(&self) -> bool {
        // SAFETY: ours; UCX writes it only in progress, on this thread.
        unsafe { ptr::read_volatile(&raw const (*self.raw).count) == 0 }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if self.is_free() {
            // SAFETY: made in `default`, and UCX is done with it. A busy one is leaked, as UCX may still write it.
            drop(unsafe { Box::from_raw(self.raw) });
        }
    }
}

impl<'d> Copier<'d> {
    /// Opens the transport `tl` on the device of the domain's name.
    pub fn open(domain: &'d Domain, tl: &str) -> anyhow::Result<Copier<'d>> {
        let (ucx, null) = (domain.ucx, ptr::null_mut());
        // `drop` closes whatever was opened, also when a later step fails.
        let mut it = Copier { domain, background: null, worker: null, iface: null, ep: null };
        let (tl, device) = (CString::new(tl)?, CString::new(domain.name.as_str())?);
        let params = IfaceParams {
            field_mask: IFACE_PARAM_OPEN_MODE | IFACE_PARAM_DEVICE,
            open_mode: OPEN_MODE_DEVICE,
            tl_name: tl.as_ptr(),
            dev_name: device.as_ptr(),
            ..IfaceParams::zeroed()
        };
        let mut config = null;
        // SAFETY: out-parameters; each step uses the result of the one before; the configuration belongs to a transport
        // of this domain and is released once.
        unsafe {
            call!(ucx, ucs_async_context_create(ASYNC_MODE_THREAD, &mut it.background))?;
            call!(ucx, uct_worker_create(it.background, THREAD_MODE_SINGLE, &mut it.worker))?;
            let (name, none) = (tl.as_ptr(), ptr::null());
            call!(ucx, uct_md_iface_config_read(domain.md, name, none, none, &mut config))?;
            let opened =
                call!(ucx, uct_iface_open(domain.md, it.worker, &params, config, &mut it.iface));
            (ucx.f.uct_config_release)(config);
            opened?;
        }
        let Addresses { device, interface } = it.addresses()?;
        let params = UctEpParams {
            field_mask: EP_PARAM_IFACE | EP_PARAM_DEV_ADDR | EP_PARAM_IFACE_ADDR,
            iface: it.iface,
            dev_addr: device.as_ptr().cast(),
            iface_addr: interface.as_ptr().cast(),
            ..UctEpParams::zeroed()
        };
        // SAFETY: the addresses are the interface's own.
        unsafe { call!(ucx, uct_ep_create(&params, &mut it.ep)) }?;
        Ok(it)
    }

    /// The addresses that a peer of the interface would get.
    pub fn addresses(&self) -> Result<Addresses> {
        let (mut device, mut interface) = ([0; ADDRESS_LEN], [0; ADDRESS_LEN]);
        let (to_device, to_interface) = (device.as_mut_ptr().cast(), interface.as_mut_ptr().cast());
        // SAFETY: an open interface; addresses of copy transports are a few bytes long.
        unsafe {
            call!(self.ucx(), uct_iface_get_device_address(self.iface, to_device))?;
            call!(self.ucx(), uct_iface_get_address(self.iface, to_interface))?;
        }
        Ok(Addresses { device, interface })
    }

    /// Whether the endpoint leads to the interface with these addresses.
    pub fn leads_to(&self, addresses: &Addresses) -> bool {
        let params = IsConnectedParams {
            field_mask: is_connected_field::DEVICE_ADDR | is_connected_field::IFACE_ADDR,
            device_addr: addresses.device.as_ptr().cast(),
            iface_addr: addresses.interface.as_ptr().cast(),
            ep_addr: ptr::null(),
        };
        // SAFETY: an open endpoint, and addresses that are longer than those of the transport.
        unsafe { (self.ucx().f.uct_ep_is_connected)(self.ep, &params) != 0 }
    }

    /// Makes the transport check whether the peer is still there, as UCX's keep-alive does.
    pub fn check_peer(&self) -> Result<()> {
        // SAFETY: an open endpoint; no completion is wanted.
        unsafe { call!(self.ucx(), uct_ep_check(self.ep, 0, ptr::null_mut())) }
    }

    fn ucx(&self) -> &'static Ucx {
        self.domain.ucx
    }

    /// Most endpoints the interface says it can have.
    pub fn max_endpoints(&self) -> Result<usize> {
        let mut attr = Growing::<IfaceAttr>::zeroed();
        // SAFETY: an open interface, and space for its attributes.
        unsafe { call!(self.ucx(), uct_iface_query(self.iface, &mut attr.known)) }?;
        Ok(attr.known.max_num_eps)
    }

    /// The method by which the interface allocates host memory for its own buffers.
    pub fn allocation_method(&self) -> Result<&'static str> {
        let mut memory = AllocatedMemory::zeroed();
        let (flags, name) = (ACCESS_ALL as u32, c"ucp-check".as_ptr());
        // SAFETY: an open interface, and an out-parameter; what was allocated is freed once.
        unsafe {
            call!(self.ucx(), uct_iface_mem_alloc(self.iface, 65_536, flags, name, &mut memory))?;
            (self.ucx().f.uct_iface_mem_free)(&memory);
        }
        Ok(ALLOC_METHODS.get(memory.method as usize).copied().unwrap_or("another"))
    }

    /// The transport's estimate for an operation between two kinds of memory.
    pub fn estimate(
        &self,
        operation: Operation,
        local: MemoryType,
        remote: MemoryType,
    ) -> Result<Estimate> {
        let mut attr = Growing::<PerfAttr>::zeroed();
        let asked = perf_field::OPERATION
            | perf_field::LOCAL_MEMORY_TYPE
            | perf_field::REMOTE_MEMORY_TYPE
            | perf_field::SEND_PRE_OVERHEAD
            | perf_field::SEND_POST_OVERHEAD
            | perf_field::BANDWIDTH
            | perf_field::LATENCY;
        attr.known.field_mask = asked;
        attr.known.operation = operation;
        attr.known.local_memory_type = local;
        attr.known.remote_memory_type = remote;
        // SAFETY: an open interface, and space for the answer.
        unsafe { call!(self.ucx(), uct_iface_estimate_perf(self.iface, &mut attr.known)) }?;
        let PerfAttr { bandwidth, send_pre_overhead, send_post_overhead, latency, .. } = attr.known;
        Ok(Estimate {
            bandwidth: bandwidth.dedicated + bandwidth.shared,
            overhead: send_pre_overhead + send_post_overhead,
            latency: latency.constant,
        })
    }

    pub fn put(&self, from: &[u8], to: u64) -> Result<()> {
        let (buffer, length) = (from.as_ptr().cast(), from.len() as u32);
        // SAFETY: the slot holds a function of this type; the device checks the destination.
        let status = unsafe {
            let put = operation!(self, iface_op::EP_PUT_SHORT, PutShort);
            put(self.ep, buffer, length, to, INVALID_RKEY)
        };
        self.ucx().check("uct_ep_put_short", status)
    }

    pub fn get(&self, from: u64, to: &mut [u8]) -> Result<()> {
        let (buffer, length) = (to.as_mut_ptr().cast(), to.len() as u32);
        // SAFETY: the slot holds a function of this type; the device checks the source.
        let status = unsafe {
            let get = operation!(self, iface_op::EP_GET_SHORT, GetShort);
            get(self.ep, buffer, length, from, INVALID_RKEY)
        };
        self.ucx().check("uct_ep_get_short", status)
    }

    pub fn read(&self, from: u64, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.get(from, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies host to device by zero copy and waits; directly from registered memory if it can be pinned.
    pub fn put_zcopy(&self, from: &[u8], by: Option<&Registration<'_>>, to: u64) -> Result<()> {
        let local = Piece::plain(from.as_ptr().expose_provenance() as u64, from.len());
        // SAFETY: the buffer lives until the copy has ended, as we wait for it.
        unsafe { self.zcopy(Rma::Put, local, by, (to, INVALID_RKEY)) }
    }

    pub fn get_zcopy(&self, from: u64, to: &mut [u8], by: Option<&Registration<'_>>) -> Result<()> {
        let local = Piece::plain(to.as_mut_ptr().expose_provenance() as u64, to.len());
        // SAFETY: the buffer lives until the copy has ended, as we wait for it.
        unsafe { self.zcopy(Rma::Get, local, by, (from, INVALID_RKEY)) }
    }

    /// Copies from a peer's memory, attached as `by`, to the memory of `key`. Both addresses are the peer's.
    pub fn put_attached(
        &self,
        from: u64,
        length: usize,
        by: &Registration<'_>,
        to: u64,
        key: &Key<'_>,
    ) -> Result<()> {
        // SAFETY: no memory of this process takes part; handle and key are live.
        unsafe { self.zcopy(Rma::Put, Piece::plain(from, length), Some(by), (to, key.raw())) }
    }

    /// # Safety
    /// As for [`Copier::start`].
    unsafe fn zcopy(
        &self,
        way: Rma,
        local: Piece,
        by: Option<&Registration<'_>>,
        remote: (u64, usize),
    ) -> Result<()> {
        let memh = by.map_or(ptr::null_mut(), Registration::handle);
        let completion = Completion::default();
        // SAFETY: as the caller promises.
        unsafe { self.post(way, &[local], memh, remote, &completion)? };
        self.wait(&completion)
    }

    /// Starts a copy between local pieces, which share one handle, and a remote address. `completion` must be free, and
    /// is busy until the copy has ended.
    ///
    /// # Safety
    /// Both sides must be valid, and used by nothing else, until the end; `memh` is null or a live handle for the local
    /// buffer.
    pub(crate) unsafe fn start(
        &self,
        way: Rma,
        local: &[Piece],
        memh: Raw,
        remote: u64,
        completion: &Completion,
    ) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.post(way, local, memh, (remote, INVALID_RKEY), completion) }
    }

    /// # Safety
    /// As for [`Copier::start`].
    unsafe fn post(
        &self,
        way: Rma,
        local: &[Piece],
        memh: Raw,
        (remote, key): (u64, usize),
        completion: &Completion,
    ) -> Result<()> {
        let (slot, name) = match way {
            Rma::Put => (iface_op::EP_PUT_ZCOPY, "uct_ep_put_zcopy"),
            Rma::Get => (iface_op::EP_GET_ZCOPY, "uct_ep_get_zcopy"),
        };
        let iov = |&Piece { address, length, stride, count }: &Piece| {
            let buffer = ptr::with_exposed_provenance_mut(address as usize);
            Iov { buffer, length, memh, stride, count }
        };
        let iov: Vec<Iov> = local.iter().map(iov).collect();
        self.track(name, completion, |raw| {
            // SAFETY: the slot holds a function of this type; the rest as the caller promises; the
            // completion lives until its count is zero.
            unsafe {
                let copy = operation!(self, slot, Zcopy);
                copy(self.ep, iov.as_ptr(), iov.len(), remote, key, raw)
            }
        })
    }

    /// Completes when everything posted before has ended.
    pub(crate) fn flush(&self, completion: &Completion) -> Result<()> {
        self.track("uct_ep_flush", completion, |raw| {
            // SAFETY: the slot holds a function of this type; the completion lives until its count is zero.
            unsafe { operation!(self, iface_op::EP_FLUSH, Flush)(self.ep, 0, raw) }
        })
    }

    /// Orders later operations after those posted before.
    pub(crate) fn fence(&self) -> Result<()> {
        // SAFETY: the slot holds a function of this type; a live endpoint.
        let status = unsafe { operation!(self, iface_op::EP_FENCE, Fence)(self.ep, 0) };
        self.ucx().check("uct_ep_fence", status)
    }

    /// Posts an operation; its completion is busy until it has ended.
    fn track(
        &self,
        name: &'static str,
        completion: &Completion,
        operation: impl FnOnce(*mut RawCompletion) -> Status,
    ) -> Result<()> {
        assert!(completion.is_free(), "a completion serves one operation at a time");
        completion.call.set(name);
        // SAFETY: ours, and free.
        unsafe {
            (*completion.raw).status = Status::OK;
            (*completion.raw).count = 1;
        }
        let status = operation(completion.raw);
        if status != Status::INPROGRESS {
            // SAFETY: UCX does not use it: the operation ended at once.
            unsafe { (*completion.raw).count = 0 };
            self.ucx().check(name, status)?;
        }
        Ok(())
    }

    /// Waits for an operation; returns how it ended.
    pub fn wait(&self, completion: &Completion) -> Result<()> {
        let call = completion.call.get();
        let mut since = None;
        for round in 1u32.. {
            if completion.is_free() {
                break;
            }
            self.progress();
            // Rarely: the benches time this loop, too.
            if round.is_multiple_of(1 << 16) {
                let since: &Instant = since.get_or_insert_with(Instant::now);
                assert!(since.elapsed() < LIMIT, "{call} hangs");
            }
        }
        // SAFETY: ours, and free.
        self.ucx().check(call, unsafe { (*completion.raw).status })
    }

    /// Progresses the interface; returns how many operations ended.
    pub fn progress(&self) -> u32 {
        // SAFETY: the slot holds a function of this type; an open interface, on its only thread.
        unsafe { operation!(self, iface_op::IFACE_PROGRESS, Progress)(self.iface) }
    }
}

impl Drop for Copier<'_> {
    fn drop(&mut self) {
        let f = &self.ucx().f;
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
