//! One operation in flight.
//!
//! It uses no callbacks: the caller polls a request after progress. It keeps the worker and the memory it uses alive;
//! one that is dropped early leaks that memory, so that UCX never accesses freed memory.

use super::Result;
use super::endpoint::RemoteKey;
use super::memory::Span;
use super::worker::WorkerInner;
use crate::ucx::Status;
use crate::ucx::sys::{ERR_LAST, Functions, Plain, RequestParam, StatusPtr, TagRecvInfo, ucp};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::{mem, ptr};

/// How to query the length of a finished request.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Plain,
    TagReceive,
    StreamReceive,
}

/// What an operation of UCX uses besides its endpoint or worker.
#[derive(Default)]
pub(super) struct Uses<'a> {
    pub(super) span: Option<&'a Span>,
    pub(super) key: Option<&'a RemoteKey>,
    pub(super) flags: u32,
}

/// An operation that UCX may still be working on.
pub struct Request {
    worker: Arc<WorkerInner>,
    call: &'static str,
    kind: Kind,
    /// NULL when it has finished.
    raw: *mut c_void,
    outcome: Option<Result<usize>>,
    /// What UCX uses until the request is finished.
    keep: (Option<Span>, Option<RemoteKey>),
}

impl Request {
    /// Runs one `nbx` function; an immediate error is returned as `Err`. It is sound because the worker is on a thread
    /// that may use it, the parameters are complete, the request keeps span and key alive until UCX is done, and UCX
    /// writes the length before the call returns or never.
    pub(super) fn start(
        worker: &Arc<WorkerInner>,
        call: &'static str,
        kind: Kind,
        uses: &Uses<'_>,
        run: impl FnOnce(&Functions, *const RequestParam, &mut usize) -> StatusPtr,
    ) -> Result<Request> {
        worker.raw(); // is this thread allowed?
        let mut info = TagRecvInfo::zeroed();
        let mut param = RequestParam { flags: uses.flags, ..RequestParam::zeroed() };
        if uses.flags != 0 {
            param.op_attr_mask |= ucp::OP_FLAGS;
        }
        if kind == Kind::TagReceive {
            param.op_attr_mask |= ucp::OP_RECV_INFO;
            param.recv_info = (&raw mut info).cast();
        }
        if let (Some(span), true) = (uses.span, worker.options.hint) {
            param.op_attr_mask |= ucp::OP_MEMORY_TYPE;
            param.memory_type = span.memory().raw();
        }
        let mut length = 0;
        let raw = run(&worker.ucx().f, &param, &mut length);
        if (i64::from(ERR_LAST.0)..0).contains(&(raw as i64)) {
            return Err(worker.ucx().error(call, Status(raw as i8)));
        }
        let outcome = raw.is_null().then_some(Ok(length.max(info.length)));
        let keep = (uses.span.cloned(), uses.key.cloned());
        Ok(Request { worker: worker.clone(), call, kind, raw, outcome, keep })
    }

    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Checks whether it has finished; does not make progress. Returns the length of tag and stream receives, otherwise
    /// 0.
    pub fn poll(&mut self) -> Option<Result<usize>> {
        if self.outcome.is_none() {
            let (f, mut info) = (&self.worker.ucx().f, TagRecvInfo::zeroed());
            // SAFETY: `raw` is a live request of the kind that was given when it was made.
            let status = unsafe {
                match self.kind {
                    Kind::Plain => (f.ucp_request_check_status)(self.raw),
                    Kind::TagReceive => (f.ucp_tag_recv_request_test)(self.raw, &mut info),
                    Kind::StreamReceive => {
                        (f.ucp_stream_recv_request_test)(self.raw, &mut info.length)
                    }
                }
            };
            if status == Status::INPROGRESS {
                return None;
            }
            self.release();
            self.outcome = Some(self.worker.ucx().check(self.call, status).map(|()| info.length));
        }
        self.outcome.clone()
    }

    /// Asks UCX to cancel it; it must still be polled until it ends.
    pub fn cancel(&mut self) {
        if !self.raw.is_null() && self.poll().is_none() {
            // SAFETY: a live request of this worker.
            unsafe { (self.worker.ucx().f.ucp_request_cancel)(self.worker.raw(), self.raw) }
        }
    }

    fn release(&mut self) {
        // SAFETY: a live request, released once; UCX itself waits for its completion if necessary.
        unsafe { (self.worker.ucx().f.ucp_request_free)(self.raw) };
        self.raw = ptr::null_mut();
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.poll().is_none() {
            self.release();
            self.worker.has_left_request.store(true, Ordering::Relaxed);
            mem::forget(mem::take(&mut self.keep));
        }
    }
}
