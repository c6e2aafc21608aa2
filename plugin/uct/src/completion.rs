//! Completions: how UCX is notified that an operation ended.

use crate::abi::{RawCompletion, Status};

/// The caller's completion of one operation.
///
/// An operation that returns [`Posted::Later`] must [`finish`](Completion::finish) it exactly
/// once; dropping it is right only when the operation failed or is [`Posted::Done`].
#[derive(Debug)]
#[must_use = "an operation in progress has to finish its completion"]
pub struct Completion(*mut RawCompletion);

// SAFETY: UCX lets the thread that progresses the worker complete operations, whichever it is.
unsafe impl Send for Completion {}

impl Completion {
    /// What UCX passed to an operation.
    ///
    /// # Safety
    /// Null, or the completion UCX passed to an operation that has not ended yet.
    pub unsafe fn from_raw(raw: *mut RawCompletion) -> Self {
        Completion(raw)
    }

    /// Whether the caller wants to be notified at all.
    pub fn is_wanted(&self) -> bool {
        !self.0.is_null()
    }

    /// Notifies UCX. Runs UCX's callback, which may start other operations: hold no lock or borrow.
    pub fn finish(self, result: Result<(), Status>) {
        let Completion(raw) = self;
        if raw.is_null() {
            return;
        }
        // SAFETY: UCX keeps the structure until its count reaches zero, and this type finishes
        // each of the operations counted there once.
        unsafe {
            if let Err(error) = result
                && (*raw).status == Status::OK
            {
                (*raw).status = error;
            }
            (*raw).count -= 1;
            if (*raw).count == 0
                && let Some(func) = (*raw).func
            {
                func(raw);
            }
        }
    }
}

/// How an operation that may take time was accepted.
#[derive(Debug)]
pub enum Posted {
    /// It is complete; the completion is returned unused.
    Done(Completion),
    /// It goes on; its completion was kept and will be finished.
    Later,
}
