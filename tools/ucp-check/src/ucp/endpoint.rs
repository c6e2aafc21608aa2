//! A connection to a worker (a peer's or our own), and the operations on it.

use super::memory::{PackedRegion, Span};
use super::request::{Kind, Request, Uses};
use super::worker::{AM_ID, Worker, WorkerInner};
use super::{Error, Handle, Result};
use crate::ucx::sys::{EpParams, Functions, Plain, Raw, RequestParam, StatusPtr, ucp};
use crate::ucx::{Status, call};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI8, Ordering};

/// How an active message travels: UCX chooses, the data goes along with it, or the receiver fetches the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum AmMode {
    Auto = 0,
    Eager = ucp::AM_SEND_EAGER,
    Rendezvous = ucp::AM_SEND_RNDV,
}

/// An atomic operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Atomic {
    Add = 0,
    Swap = 1,
    CompareSwap = 2,
    And = 3,
    Or = 4,
    Xor = 5,
}

#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

struct Inner {
    worker: Arc<WorkerInner>,
    handle: Handle,
    closed: AtomicBool,
    failure: Arc<AtomicI8>,
}

unsafe extern "C" fn note_failure(arg: *mut c_void, _ep: Raw, status: Status) {
    // SAFETY: `arg` is an atomic that the worker keeps alive.
    unsafe { &*arg.cast::<AtomicI8>() }.store(status.0, Ordering::Release);
}

impl Endpoint {
    /// Connects to the worker with this address. With `peer_errors` (UCP_ERR_HANDLING_MODE_PEER) the death
    /// of the peer is reported, see [`Endpoint::failure`].
    ///
    /// # Safety
    /// `address` must be what [`Worker::address`] of a compatible UCX returned: UCX trusts it.
    pub unsafe fn connect(worker: &Worker, address: &[u8], peer_errors: bool) -> Result<Endpoint> {
        let worker = worker.0.clone();
        let failure = Arc::new(AtomicI8::new(0));
        let mut params = EpParams {
            field_mask: ucp::EP_ADDRESS_AND_ERR_MODE,
            address: address.as_ptr().cast(),
            ..EpParams::zeroed()
        };
        if peer_errors {
            params.field_mask |= ucp::EP_ERR_HANDLER;
            params.err_mode = ucp::ERR_MODE_PEER;
            params.err_cb = Some(note_failure);
            params.err_arg = Arc::as_ptr(&failure).cast_mut().cast();
            worker.failures.lock().unwrap_or_else(|e| e.into_inner()).push(failure.clone());
        }
        let mut raw = ptr::null_mut();
        // SAFETY: parameters are complete for their mask; the caller vouches for the address.
        unsafe { call!(worker.ucx(), ucp_ep_create(worker.raw(), &params, &mut raw)) }?;
        // The worker checks that this thread may use it.
        let (handle, closed) = (Handle::new(raw, true), AtomicBool::new(false));
        Ok(Endpoint(Arc::new(Inner { worker, handle, closed, failure })))
    }

    pub fn to_itself(worker: &Worker) -> Result<Endpoint> {
        // SAFETY: the address of the very worker.
        unsafe { Endpoint::connect(worker, &worker.address()?, false) }
    }

    /// The status that the error handler got, if UCX called it.
    pub fn failure(&self) -> Option<Error> {
        let status = Status(self.0.failure.load(Ordering::Acquire));
        self.0.worker.ucx().check("the peer", status).err()
    }

    /// Runs one `nbx` function of this endpoint; `Request::start` says why that is sound.
    fn start(
        &self,
        call: &'static str,
        kind: Kind,
        uses: Uses<'_>,
        run: impl FnOnce(&Functions, Raw, *const RequestParam, &mut usize) -> StatusPtr,
    ) -> Result<Request> {
        Request::start(&self.0.worker, call, kind, &uses, |f, param, length| {
            run(f, self.raw(), param, length)
        })
    }

    pub fn tag_send(&self, from: &Span, tag: u64) -> Result<Request> {
        let uses = Uses { span: Some(from), ..Uses::default() };
        self.start("ucp_tag_send_nbx", Kind::Plain, uses, |f, ep, param, _| {
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_tag_send_nbx)(ep, from.pointer(), from.len(), tag, param) }
        })
    }

    pub fn stream_send(&self, from: &Span) -> Result<Request> {
        let uses = Uses { span: Some(from), ..Uses::default() };
        self.start("ucp_stream_send_nbx", Kind::Plain, uses, |f, ep, param, _| {
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_stream_send_nbx)(ep, from.pointer(), from.len(), param) }
        })
    }

    /// Receives bytes from the stream: as many as have arrived, or (`all`) exactly the span's length.
    pub fn stream_receive(&self, into: &Span, all: bool) -> Result<Request> {
        let flags = if all { ucp::STREAM_WAITALL } else { 0 };
        let uses = Uses { span: Some(into), flags, ..Uses::default() };
        self.start("ucp_stream_recv_nbx", Kind::StreamReceive, uses, |f, ep, param, length| {
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_stream_recv_nbx)(ep, into.pointer(), into.len(), length, param) }
        })
    }

    pub fn am_send(&self, header: &[u8], from: &Span, mode: AmMode) -> Result<Request> {
        let flags = ucp::AM_SEND_COPY_HEADER | mode as u32;
        let uses = Uses { span: Some(from), flags, ..Uses::default() };
        self.start("ucp_am_send_nbx", Kind::Plain, uses, |f, ep, param, _| {
            let (head, size) = (header.as_ptr().cast(), header.len());
            // SAFETY: see `Request::start`; the header is copied before the call returns.
            unsafe { (f.ucp_am_send_nbx)(ep, AM_ID, head, size, from.pointer(), from.len(), param) }
        })
    }

    /// Writes `from` into the peer's memory. Visible there after a [`Endpoint::flush`].
    pub fn put(&self, from: &Span, to: &RemoteKey, offset: usize) -> Result<Request> {
        let (address, key) = self.remote(to, offset, from.len());
        let uses = Uses { span: Some(from), key: Some(to), flags: 0 };
        self.start("ucp_put_nbx", Kind::Plain, uses, |f, ep, param, _| {
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_put_nbx)(ep, from.pointer(), from.len(), address, key, param) }
        })
    }

    /// Reads the peer's memory into `into`.
    pub fn get(&self, into: &Span, from: &RemoteKey, offset: usize) -> Result<Request> {
        let (address, key) = self.remote(from, offset, into.len());
        let uses = Uses { span: Some(into), key: Some(from), flags: 0 };
        self.start("ucp_get_nbx", Kind::Plain, uses, |f, ep, param, _| {
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_get_nbx)(ep, into.pointer(), into.len(), address, key, param) }
        })
    }

    /// An atomic operation on the peer's memory, as wide as the operand. With `reply`, UCX writes the old value there;
    /// it must lie in the operand's region. For [`Atomic::CompareSwap`] it holds the new value beforehand.
    pub fn atomic(
        &self,
        operation: Atomic,
        operand: &Span,
        to: &RemoteKey,
        offset: usize,
        reply: Option<&Span>,
    ) -> Result<Request> {
        let (address, key) = self.remote(to, offset, operand.len());
        let uses = Uses { span: Some(operand), key: Some(to), flags: 0 };
        self.start("ucp_atomic_op_nbx", Kind::Plain, uses, |f, ep, param, _| {
            // SAFETY: `start` passes its own, complete parameters.
            let mut param = unsafe { *param };
            param.op_attr_mask |= ucp::OP_DATATYPE | ucp::OP_NO_IMMEDIATE;
            param.datatype = (operand.len() as u64) << 3; // ucp_dt_make_contig
            if let Some(reply) = reply {
                assert_eq!(reply.len(), operand.len(), "the reply is as wide as the operand");
                assert!(reply.shares_region(operand), "the reply lies next to the operand");
                param.op_attr_mask |= ucp::OP_REPLY_BUFFER;
                param.reply_buffer = reply.pointer();
            }
            let (op, value) = (operation as u32, operand.pointer());
            // SAFETY: see `Request::start`; the operand's region is the reply's as well.
            unsafe { (f.ucp_atomic_op_nbx)(ep, op, value, 1, address, key, &param) }
        })
    }

    /// Completes when everything sent before has arrived at the peer.
    pub fn flush(&self) -> Result<Request> {
        self.start("ucp_ep_flush_nbx", Kind::Plain, Uses::default(), |f, ep, param, _| {
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_ep_flush_nbx)(ep, param) }
        })
    }

    /// Closes it, either after a flush or at once (`force`, only with peer errors). It must not be used afterwards.
    pub fn close(&self, force: bool) -> Result<Request> {
        let flags = if force { ucp::CLOSE_FORCE } else { 0 };
        let uses = Uses { flags, ..Uses::default() };
        self.start("ucp_ep_close_nbx", Kind::Plain, uses, |f, ep, param, _| {
            self.0.closed.store(true, Ordering::Relaxed);
            // SAFETY: see `Request::start`; `closed` prevents further use of the handle.
            unsafe { (f.ucp_ep_close_nbx)(ep, param) }
        })
    }

    /// Unpacks a key for memory of the peer.
    ///
    /// # Safety
    /// `packed` must come from the peer of this endpoint, which must keep the region mapped for as long as
    /// the key is used.
    pub unsafe fn unpack(&self, packed: &PackedRegion) -> Result<RemoteKey> {
        let (rkey, mut raw) = (packed.rkey.as_ptr().cast(), ptr::null_mut());
        // SAFETY: a live endpoint; the caller vouches for the key.
        unsafe { call!(self.0.worker.ucx(), ucp_ep_rkey_unpack(self.raw(), rkey, &mut raw)) }?;
        let (address, length) = (packed.address, packed.length);
        let handle = Handle::new(raw, true); // used with this endpoint only
        Ok(RemoteKey(Arc::new(Key { endpoint: self.clone(), handle, address, length })))
    }

    /// Address and handle of the peer's memory. The key must have been unpacked on this endpoint.
    fn remote(&self, key: &RemoteKey, offset: usize, length: usize) -> (u64, Raw) {
        assert!(Arc::ptr_eq(&key.0.endpoint.0, &self.0), "a remote key of another endpoint");
        assert!(offset.checked_add(length).is_some_and(|end| end <= key.0.length));
        (key.0.address + offset as u64, key.0.handle.get())
    }

    fn raw(&self) -> Raw {
        assert!(!self.0.closed.load(Ordering::Relaxed), "a closed endpoint was used");
        self.0.handle.get()
    }
}

/// The right to access a region of the peer. Clones share one key.
#[derive(Clone)]
pub struct RemoteKey(Arc<Key>);

struct Key {
    endpoint: Endpoint,
    handle: Handle,
    address: u64,
    length: usize,
}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the endpoint keeps the worker alive.
        unsafe { (self.endpoint.0.worker.ucx().f.ucp_rkey_destroy)(self.handle.raw) }
    }
}
