//! A UCP context: `ucp_init` with a set of features, `ucp_cleanup` when the last user is gone.

use super::sys::{self, Params, Raw};
use super::{Result, Ucx};
use std::ptr;
use std::sync::Arc;
use std::thread::{self, ThreadId};

/// What an application asks of UCP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Features(u64);

impl Features {
    /// Tag, stream, active message and RMA.
    pub const ALL: Features =
        Features(sys::FEATURE_TAG | sys::FEATURE_STREAM | sys::FEATURE_AM | sys::FEATURE_RMA);
    /// Tag matching only: what a minimal MPI asks for.
    pub const TAG: Features = Features(sys::FEATURE_TAG);
    /// Put and get only.
    pub const RMA: Features = Features(sys::FEATURE_RMA);

    /// Put, get, and atomic operations of both widths.
    pub const ATOMIC: Features =
        Features(sys::FEATURE_RMA | sys::FEATURE_AMO32 | sys::FEATURE_AMO64);

    /// The same with `ucp_worker_get_efd` and `ucp_worker_arm` usable.
    pub const fn with_wakeup(self) -> Features {
        Features(self.0 | sys::FEATURE_WAKEUP)
    }
    /// Whether workers can sleep.
    pub fn wakeup(self) -> bool {
        self.0 & sys::FEATURE_WAKEUP != 0
    }
    pub(super) fn active_messages(self) -> bool {
        self.0 & sys::FEATURE_AM != 0
    }
    /// Whether put and get may be used.
    pub fn rma(self) -> bool {
        self.0 & sys::FEATURE_RMA != 0
    }
}

/// A context; clones are handles to the same one.
#[derive(Clone)]
pub struct Context(pub(super) Arc<ContextInner>);

pub(super) struct ContextInner {
    pub(super) ucx: &'static Ucx,
    raw: Raw,
    pub(super) features: Features,
    pub(super) threads: Threads,
}

/// Who may call into UCX with a handle.
#[derive(Clone, Copy)]
pub(super) enum Threads {
    Only(ThreadId),
    Any,
}

impl Threads {
    pub(super) fn new(multi: bool) -> Threads {
        if multi { Threads::Any } else { Threads::Only(thread::current().id()) }
    }
    pub(super) fn allowed(self) -> bool {
        match self {
            Threads::Only(id) => id == thread::current().id(),
            Threads::Any => true,
        }
    }
    fn enforce(self) {
        assert!(self.allowed(), "a single-threaded UCP handle was used from another thread");
    }
}

// SAFETY: the handle is only handed out by `raw`, which admits other threads only when UCX was told
// to lock (mt_workers_shared).
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl Context {
    /// `ucp_init` with the environment's configuration. `multi` makes the context usable from
    /// several threads.
    pub fn new(ucx: &'static Ucx, features: Features, multi: bool) -> Result<Context> {
        let params = Params {
            field_mask: Params::FEATURES | Params::MT_WORKERS_SHARED,
            features: features.0,
            request_size: 0,
            request_init: ptr::null_mut(),
            request_cleanup: ptr::null_mut(),
            tag_sender_mask: 0,
            mt_workers_shared: multi.into(),
            estimated_num_eps: 0,
            estimated_num_ppn: 0,
            name: ptr::null(),
            node_local_id: 0,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: `params` is complete for its mask; a NULL config means "read the environment".
        let status = unsafe {
            (ucx.f.ucp_init_version)(sys::API_MAJOR, sys::API_MINOR, &params, ptr::null(), &mut raw)
        };
        ucx.check("ucp_init", status)?;
        Ok(Context(Arc::new(ContextInner { ucx, raw, features, threads: Threads::new(multi) })))
    }

    /// The library behind it.
    pub fn ucx(&self) -> &'static Ucx {
        self.0.ucx
    }

    /// What it was created with.
    pub fn features(&self) -> Features {
        self.0.features
    }
}

impl ContextInner {
    pub(super) fn raw(&self) -> Raw {
        self.threads.enforce();
        self.raw
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if self.threads.allowed() {
            // SAFETY: workers and regions hold a reference to this context, so none is left.
            unsafe { (self.ucx.f.ucp_cleanup)(self.raw) }
        }
    }
}
