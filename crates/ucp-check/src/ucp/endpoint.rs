//! A connection to a worker (a peer's or our own) and everything that is sent through it.

use super::memory::{PackedRegion, Span};
use super::request::{Completion, Kind, Request, parameters};
use super::sys::{self, EpParams, ErrHandler, Raw, RawStatus};
use super::worker::{AM_ID, Worker, WorkerInner};
use super::{Error, Result};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// How an endpoint is made.
#[derive(Clone, Copy, Default, Debug)]
pub struct EndpointOptions {
    /// UCP_ERR_HANDLING_MODE_PEER: the death of the peer is reported, see [`Endpoint::failure`].
    pub peer_errors: bool,
}

/// How an active message travels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AmMode {
    /// UCX decides.
    Auto,
    /// Data goes with the message.
    Eager,
    /// The receiver fetches the data.
    Rendezvous,
}

/// An atomic operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Atomic {
    Add = 0,
    Swap = 1,
    CompareSwap = 2,
    And = 3,
    Or = 4,
    Xor = 5,
}

/// An endpoint; clones are handles to the same one.
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

struct Inner {
    worker: Arc<WorkerInner>,
    raw: Raw,
    closed: AtomicBool,
    failure: Arc<AtomicI32>,
}

// SAFETY: the handle is used only together with its worker, which checks the thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

unsafe extern "C" fn note_failure(arg: *mut c_void, _ep: Raw, status: RawStatus) {
    // SAFETY: `arg` is an atomic that the worker keeps alive.
    unsafe { &*arg.cast::<AtomicI32>() }.store(status.into(), Ordering::Release);
}

impl Endpoint {
    /// Connects to the worker with this address.
    ///
    /// # Safety
    /// `address` must be what [`Worker::address`] of a compatible UCX returned: UCX trusts it.
    pub unsafe fn connect(
        worker: &Worker,
        address: &[u8],
        options: EndpointOptions,
    ) -> Result<Endpoint> {
        let worker = worker.0.clone();
        let failure = Arc::new(AtomicI32::new(0));
        let mut params = EpParams {
            field_mask: EpParams::REMOTE_ADDRESS | EpParams::ERR_HANDLING_MODE,
            address: address.as_ptr().cast(),
            err_mode: sys::ERR_MODE_NONE,
            err_handler: ErrHandler { cb: None, arg: ptr::null_mut() },
            user_data: ptr::null_mut(),
            flags: 0,
            sockaddr: [0; 2],
            conn_request: ptr::null_mut(),
            name: ptr::null(),
            local_sockaddr: [0; 2],
        };
        if options.peer_errors {
            params.field_mask |= EpParams::ERR_HANDLER;
            params.err_mode = sys::ERR_MODE_PEER;
            params.err_handler.cb = Some(note_failure);
            params.err_handler.arg = Arc::as_ptr(&failure).cast_mut().cast();
            worker.failures.lock().unwrap_or_else(|e| e.into_inner()).push(failure.clone());
        }
        let mut raw = ptr::null_mut();
        // SAFETY: parameters are complete for their mask; the caller vouches for the address.
        let status = unsafe { (worker.ucx().f.ucp_ep_create)(worker.raw(), &params, &mut raw) };
        worker.ucx().check("ucp_ep_create", status)?;
        Ok(Endpoint(Arc::new(Inner { worker, raw, closed: AtomicBool::new(false), failure })))
    }

    /// What the error handler was told, if it was called.
    pub fn failure(&self) -> Option<Error> {
        match self.0.failure.load(Ordering::Acquire) {
            0 => None,
            status => Some(self.0.worker.ucx().error("the peer", status as RawStatus)),
        }
    }

    /// Sends a tagged message.
    pub fn tag_send(&self, from: &Span, tag: u64) -> Result<Request> {
        self.start("ucp_tag_send_nbx", Some(from), 0, |f, ep, param| {
            // SAFETY: see `start`.
            unsafe { (f.ucp_tag_send_nbx)(ep, from.pointer(), from.len(), tag, param) }
        })
    }

    /// Appends to the byte stream.
    pub fn stream_send(&self, from: &Span) -> Result<Request> {
        self.start("ucp_stream_send_nbx", Some(from), 0, |f, ep, param| {
            // SAFETY: see `start`.
            unsafe { (f.ucp_stream_send_nbx)(ep, from.pointer(), from.len(), param) }
        })
    }

    /// Takes bytes from the stream: as many as there are, or (`all`) exactly the span's length.
    pub fn stream_receive(&self, into: &Span, all: bool) -> Result<Request> {
        let worker = &self.0.worker;
        let flags = if all { sys::STREAM_RECV_FLAG_WAITALL } else { 0 };
        let param = parameters(Some(into), flags, worker.hint);
        let mut length = 0;
        // SAFETY: the request keeps `into` alive; `length` is written before the call returns or
        // never.
        let returned = unsafe {
            (worker.ucx().f.ucp_stream_recv_nbx)(
                self.raw(),
                into.pointer(),
                into.len(),
                &mut length,
                &param,
            )
        };
        let done = Completion { length, tag: 0 };
        let call = "ucp_stream_recv_nbx";
        Request::started(worker, call, Kind::StreamReceive, returned, done, Some(into))
    }

    /// Sends an active message.
    pub fn am_send(&self, header: &[u8], from: &Span, mode: AmMode) -> Result<Request> {
        let flags = sys::AM_SEND_FLAG_COPY_HEADER
            | match mode {
                AmMode::Auto => 0,
                AmMode::Eager => sys::AM_SEND_FLAG_EAGER,
                AmMode::Rendezvous => sys::AM_SEND_FLAG_RNDV,
            };
        self.start("ucp_am_send_nbx", Some(from), flags, |f, ep, param| {
            let (head, head_length) = (header.as_ptr().cast(), header.len());
            // SAFETY: see `start`; the header is copied before the call returns.
            unsafe {
                (f.ucp_am_send_nbx)(ep, AM_ID, head, head_length, from.pointer(), from.len(), param)
            }
        })
    }

    /// Writes `from` into the peer's memory. Visible there after a [`Endpoint::flush`].
    pub fn put(&self, from: &Span, to: &RemoteKey, offset: usize) -> Result<Request> {
        let (address, key) = (to.at(offset, from.len()), self.checked(to));
        let request = self.start("ucp_put_nbx", Some(from), 0, |f, ep, param| {
            // SAFETY: see `start`; the request keeps the key alive, too.
            unsafe { (f.ucp_put_nbx)(ep, from.pointer(), from.len(), address, key, param) }
        })?;
        Ok(request.keeping(to))
    }

    /// Reads the peer's memory into `into`.
    pub fn get(&self, into: &Span, from: &RemoteKey, offset: usize) -> Result<Request> {
        let (address, key) = (from.at(offset, into.len()), self.checked(from));
        let request = self.start("ucp_get_nbx", Some(into), 0, |f, ep, param| {
            // SAFETY: see `start`; the request keeps the key alive, too.
            unsafe { (f.ucp_get_nbx)(ep, into.pointer(), into.len(), address, key, param) }
        })?;
        Ok(request.keeping(from))
    }

    /// An atomic operation on the peer's memory, as wide as the operand. With `reply` the old value
    /// comes back into it, which lies in the operand's region; for [`Atomic::CompareSwap`] it has the
    /// new value before.
    pub fn atomic(
        &self,
        operation: Atomic,
        operand: &Span,
        to: &RemoteKey,
        offset: usize,
        reply: Option<&Span>,
    ) -> Result<Request> {
        let (address, key) = (to.at(offset, operand.len()), self.checked(to));
        let worker = &self.0.worker;
        let mut param = parameters(Some(operand), 0, worker.hint);
        param.op_attr_mask |= sys::OP_ATTR_FIELD_DATATYPE | sys::OP_ATTR_FLAG_NO_IMM_CMPL;
        param.datatype = sys::contiguous(operand.len());
        if let Some(reply) = reply {
            assert_eq!(reply.len(), operand.len(), "the reply is as wide as the operand");
            assert!(reply.shares_region(operand), "the reply lies beside the operand");
            param.op_attr_mask |= sys::OP_ATTR_FIELD_REPLY_BUFFER;
            param.reply_buffer = reply.pointer();
        }
        let (op, value) = (operation as u32, operand.pointer());
        // SAFETY: a live endpoint and complete parameters; the request keeps the key alive, and the
        // region of the operand and the reply.
        let returned = unsafe {
            let f = &worker.ucx().f;
            (f.ucp_atomic_op_nbx)(self.raw(), op, value, 1, address, key, &param)
        };
        let done = Completion::default();
        let call = "ucp_atomic_op_nbx";
        let request = Request::started(worker, call, Kind::Plain, returned, done, Some(operand))?;
        Ok(request.keeping(to))
    }

    /// Finished when everything sent before is complete at the peer.
    pub fn flush(&self) -> Result<Request> {
        self.start("ucp_ep_flush_nbx", None, 0, |f, ep, param| {
            // SAFETY: see `start`.
            unsafe { (f.ucp_ep_flush_nbx)(ep, param) }
        })
    }

    /// Closes it, after flushing or (`force`, only with peer errors) at once. No further use.
    pub fn close(&self, force: bool) -> Result<Request> {
        let flags = if force { sys::EP_CLOSE_FLAG_FORCE } else { 0 };
        let raw = self.raw();
        self.0.closed.store(true, Ordering::Relaxed);
        self.start_on(raw, "ucp_ep_close_nbx", None, flags, |f, ep, param| {
            // SAFETY: see `start`; `closed` keeps everybody away from the handle from now on.
            unsafe { (f.ucp_ep_close_nbx)(ep, param) }
        })
    }

    /// Unpacks a key for memory of the peer.
    ///
    /// # Safety
    /// `packed` must come from the peer of this endpoint, which must keep the region mapped for as
    /// long as the key is used.
    pub unsafe fn unpack(&self, packed: &PackedRegion) -> Result<RemoteKey> {
        let ucx = self.0.worker.ucx();
        let mut raw = ptr::null_mut();
        // SAFETY: a live endpoint; the caller vouches for the key.
        let status = unsafe {
            (ucx.f.ucp_ep_rkey_unpack)(self.raw(), packed.rkey.as_ptr().cast(), &mut raw)
        };
        ucx.check("ucp_ep_rkey_unpack", status)?;
        let (address, length) = (packed.address, packed.length);
        Ok(RemoteKey(Arc::new(Key { endpoint: self.clone(), raw, address, length })))
    }

    /// The handle of a key, which must have been unpacked on this very endpoint.
    fn checked(&self, key: &RemoteKey) -> Raw {
        assert!(Arc::ptr_eq(&key.0.endpoint.0, &self.0), "a remote key of another endpoint");
        key.0.raw
    }

    fn raw(&self) -> Raw {
        assert!(!self.0.closed.load(Ordering::Relaxed), "a closed endpoint was used");
        self.0.raw
    }

    /// Runs one `nbx` function. What makes that sound: the endpoint is live and on a thread that
    /// may use it, `param` is complete, and the request keeps `span` alive until UCX is done.
    fn start(
        &self,
        call: &'static str,
        span: Option<&Span>,
        flags: u32,
        run: impl FnOnce(&sys::Functions, Raw, *const sys::RequestParam) -> sys::StatusPtr,
    ) -> Result<Request> {
        self.start_on(self.raw(), call, span, flags, run)
    }

    fn start_on(
        &self,
        ep: Raw,
        call: &'static str,
        span: Option<&Span>,
        flags: u32,
        run: impl FnOnce(&sys::Functions, Raw, *const sys::RequestParam) -> sys::StatusPtr,
    ) -> Result<Request> {
        let worker = &self.0.worker;
        worker.raw(); // is this thread allowed?
        let param = parameters(span, flags, worker.hint);
        let returned = run(&worker.ucx().f, ep, &param);
        Request::started(worker, call, Kind::Plain, returned, Completion::default(), span)
    }
}

/// The right to access a region of the peer; clones are handles to the same key.
#[derive(Clone)]
pub struct RemoteKey(Arc<Key>);

struct Key {
    endpoint: Endpoint,
    raw: Raw,
    address: u64,
    length: usize,
}

// SAFETY: the handle is used only through its endpoint, whose worker checks the thread.
unsafe impl Send for Key {}
// SAFETY: as above.
unsafe impl Sync for Key {}

impl RemoteKey {
    fn at(&self, offset: usize, length: usize) -> u64 {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.0.length));
        self.0.address + offset as u64
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the endpoint handle keeps the worker alive.
        unsafe { (self.endpoint.0.worker.ucx().f.ucp_rkey_destroy)(self.raw) }
    }
}
