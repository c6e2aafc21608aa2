//! One operation under way.
//!
//! No callbacks: a request is polled after progress. It keeps the worker and the memory it uses alive; one
//! that is dropped early leaks that memory instead of pulling it from under UCX.

use super::Result;
use super::endpoint::RemoteKey;
use super::memory::Span;
use super::worker::WorkerInner;
use crate::ucx::Status;
use crate::ucx::sys::{ERR_LAST, Plain, RequestParam, StatusPtr, TagRecvInfo, ucp};
use std::ffi::c_void;
use std::sync::Arc;
use std::{mem, ptr};

/// How the length of a finished request is asked for.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Plain,
    TagReceive,
    StreamReceive,
}

/// An operation that UCX may still be working on.
pub struct Request {
    worker: Arc<WorkerInner>,
    call: &'static str,
    kind: Kind,
    /// NULL once finished.
    raw: *mut c_void,
    outcome: Option<Result<usize>>,
    /// What UCX uses until the request is finished.
    keep: (Option<Span>, Option<RemoteKey>),
}

impl Request {
    /// Takes what an `nbx` function returned, and the length where it was over at once; an immediate error
    /// is an `Err` here.
    pub(super) fn started(
        worker: &Arc<WorkerInner>,
        call: &'static str,
        kind: Kind,
        (returned, length): (StatusPtr, usize),
        keep: (Option<Span>, Option<RemoteKey>),
    ) -> Result<Request> {
        if (i64::from(ERR_LAST.0)..0).contains(&(returned as i64)) {
            return Err(worker.ucx().error(call, Status(returned as i8)));
        }
        let outcome = returned.is_null().then_some(Ok(length));
        Ok(Request { worker: worker.clone(), call, kind, raw: returned, outcome, keep })
    }

    /// The function that started it.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Looks whether it has finished; does not make progress by itself. The length is that of tag and
    /// stream receives, else 0.
    pub fn poll(&mut self) -> Option<Result<usize>> {
        if self.outcome.is_none() {
            let (ucx, mut info) = (self.worker.ucx(), TagRecvInfo::zeroed());
            // SAFETY: `raw` is a live request of the kind its maker said.
            let status = unsafe {
                match self.kind {
                    Kind::Plain => (ucx.f.ucp_request_check_status)(self.raw),
                    Kind::TagReceive => (ucx.f.ucp_tag_recv_request_test)(self.raw, &mut info),
                    Kind::StreamReceive => {
                        (ucx.f.ucp_stream_recv_request_test)(self.raw, &mut info.length)
                    }
                }
            };
            if status == Status::INPROGRESS {
                return None;
            }
            self.release();
            self.outcome = Some(ucx.check(self.call, status).map(|()| info.length));
        }
        self.outcome.clone()
    }

    /// Asks UCX to give up on it; it still has to be polled until it ends.
    pub fn cancel(&mut self) {
        if !self.raw.is_null() && self.poll().is_none() {
            // SAFETY: a live request of this worker.
            unsafe { (self.worker.ucx().f.ucp_request_cancel)(self.worker.raw(), self.raw) }
        }
    }

    fn release(&mut self) {
        // SAFETY: a live request, given back once; UCX itself waits for completion if need be.
        unsafe { (self.worker.ucx().f.ucp_request_free)(self.raw) };
        self.raw = ptr::null_mut();
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.raw.is_null() && self.poll().is_none() {
            self.release();
            mem::forget(mem::take(&mut self.keep));
        }
    }
}

/// Parameters of an operation on `span`; the memory type is passed only if `hint` says so.
pub(super) fn parameters(span: Option<&Span>, flags: u32, hint: bool) -> RequestParam {
    let mut param = RequestParam { flags, ..RequestParam::zeroed() };
    if flags != 0 {
        param.op_attr_mask |= ucp::OP_FLAGS;
    }
    if let (Some(span), true) = (span, hint) {
        param.op_attr_mask |= ucp::OP_MEMORY_TYPE;
        param.memory_type = span.memory().raw();
    }
    param
}
