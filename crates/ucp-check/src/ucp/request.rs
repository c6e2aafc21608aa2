//! One operation under way.
//!
//! No callbacks: a request is polled after progress. It keeps the worker and the memory it uses
//! alive; one that is dropped early leaks that memory instead of pulling it from under UCX.

use super::Result;
use super::endpoint::RemoteKey;
use super::memory::Span;
use super::sys::{self, ERR_LAST, INPROGRESS, OK, RawStatus, RequestParam, StatusPtr, TagRecvInfo};
use super::worker::WorkerInner;
use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::sync::Arc;

/// What a finished operation tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// Bytes received (0 for anything that is not a tag or stream receive).
    pub length: usize,
    /// Tag of the sender, for tag receives.
    pub tag: u64,
}

/// How the result of a finished request is asked for.
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
    outcome: Option<Result<Completion>>,
    /// What UCX uses until the request is finished.
    keep: (Option<Span>, Option<RemoteKey>),
}

impl Request {
    /// Takes what an `nbx` function returned; an immediate error is an `Err` here.
    pub(super) fn started(
        worker: &Arc<WorkerInner>,
        call: &'static str,
        kind: Kind,
        returned: StatusPtr,
        immediate: Completion,
        memory: Option<&Span>,
    ) -> Result<Request> {
        let mut request = Request {
            worker: worker.clone(),
            call,
            kind,
            raw: ptr::null_mut(),
            outcome: None,
            keep: (memory.cloned(), None),
        };
        if returned.is_null() {
            request.outcome = Some(Ok(immediate));
        } else if (returned as isize) < 0 && (returned as isize) >= ERR_LAST as isize {
            return Err(worker.ucx().error(call, returned as isize as RawStatus));
        } else {
            request.raw = returned;
        }
        Ok(request)
    }

    pub(super) fn keeping(mut self, key: &RemoteKey) -> Request {
        self.keep.1 = Some(key.clone());
        self
    }

    /// The function that started it.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Looks whether it has finished; does not make progress by itself.
    pub fn poll(&mut self) -> Option<Result<Completion>> {
        if self.outcome.is_none() {
            let ucx = self.worker.ucx();
            let mut done = Completion::default();
            let (mut info, mut length) = (TagRecvInfo::default(), 0);
            // SAFETY: `raw` is a live request of the kind its maker said.
            let status = unsafe {
                match self.kind {
                    Kind::Plain => (ucx.f.ucp_request_check_status)(self.raw),
                    Kind::TagReceive => (ucx.f.ucp_tag_recv_request_test)(self.raw, &mut info),
                    Kind::StreamReceive => {
                        (ucx.f.ucp_stream_recv_request_test)(self.raw, &mut length)
                    }
                }
            };
            match self.kind {
                _ if status == INPROGRESS => return None,
                Kind::TagReceive => {
                    done = Completion { length: info.length, tag: info.sender_tag };
                }
                Kind::StreamReceive => done.length = length,
                Kind::Plain => {}
            }
            self.release();
            self.outcome = Some(match status {
                OK => Ok(done),
                status => Err(ucx.error(self.call, status)),
            });
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
    let mut param = RequestParam {
        op_attr_mask: 0,
        flags,
        request: ptr::null_mut(),
        cb: ptr::null_mut(),
        datatype: 0,
        user_data: ptr::null_mut(),
        reply_buffer: ptr::null_mut(),
        memory_type: 0,
        recv_info: ptr::null_mut(),
        memh: ptr::null_mut(),
        remote_datatype: 0,
        remote: ptr::null(),
        remote_count: 0,
    };
    if flags != 0 {
        param.op_attr_mask |= sys::OP_ATTR_FIELD_FLAGS;
    }
    if let (Some(span), true) = (span, hint) {
        param.op_attr_mask |= sys::OP_ATTR_FIELD_MEMORY_TYPE;
        param.memory_type = span.memory().raw();
    }
    param
}
