//! UCP's public API, bound at run time, as owning types.
//!
//! [`Ucx`] (one loaded libucp) → [`Context`] → [`Worker`] → [`Endpoint`]; [`Region`] is memory mapped in a context, a
//! [`Span`] a part of it. An operation takes spans and returns a [`Request`] that keeps them alive, so UCX never
//! accesses freed memory, even if the caller forgets the request. Handles remember their thread: a worker that is not
//! in multi-thread mode panics when another thread than its creator uses it.

mod endpoint;
mod memory;
mod request;
mod worker;

pub use crate::ucx::{Error, Result, Status, Ucx};
pub use endpoint::{AmMode, Atomic, Endpoint, RemoteKey};
pub use memory::{Memory, PackedRegion, Region, Span};
pub use request::Request;
pub use worker::{AmMessage, Idle, Waiting, Worker, WorkerOptions};

use crate::ucx::call;
use crate::ucx::sys::{Params, Plain, Raw, ucp};
use std::ptr;
use std::sync::Arc;
use std::thread::{self, ThreadId};

/// The features that an application asks UCP for (`enum ucp_feature`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Features(u64);

impl Features {
    /// Tag matching only: what a minimal MPI asks for.
    pub const TAG: Features = Features(1 << 0);
    pub const RMA: Features = Features(1 << 1);
    /// Put, get, and atomic operations of both widths.
    pub const ATOMIC: Features = Features(Self::RMA.0 | 1 << 2 | 1 << 3);
    const WAKEUP: Features = Features(1 << 4);
    const STREAM: Features = Features(1 << 5);
    const AM: Features = Features(1 << 6);
    /// Tag, stream, active message and RMA.
    pub const ALL: Features = Features(Self::TAG.0 | Self::RMA.0 | Self::STREAM.0 | Self::AM.0);

    /// The same with `ucp_worker_get_efd` and `ucp_worker_arm` usable.
    pub const fn with_wakeup(self) -> Features {
        Features(self.0 | Self::WAKEUP.0)
    }
    pub fn wakeup(self) -> bool {
        self.has(Self::WAKEUP)
    }
    pub fn has(self, feature: Features) -> bool {
        self.0 & feature.0 == feature.0
    }
}

/// An opaque handle for one thread, or for all.
struct Handle {
    raw: Raw,
    owner: Option<ThreadId>,
}

// SAFETY: only `get` returns the handle, and it refuses other threads unless UCX locks.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn new(raw: Raw, multi: bool) -> Handle {
        Handle { raw, owner: (!multi).then(|| thread::current().id()) }
    }

    fn usable(&self) -> bool {
        self.owner.is_none_or(|owner| owner == thread::current().id())
    }

    fn get(&self) -> Raw {
        assert!(self.usable(), "a single-threaded handle of UCP was used from another thread");
        self.raw
    }
}

#[derive(Clone)]
pub struct Context(Arc<ContextInner>);

struct ContextInner {
    ucx: &'static Ucx,
    handle: Handle,
    features: Features,
}

impl Context {
    /// `ucp_init` with the environment's configuration. `multi` makes the context usable from several
    /// threads.
    pub fn new(ucx: &'static Ucx, features: Features, multi: bool) -> Result<Context> {
        let params = Params {
            field_mask: ucp::PARAM_FEATURES | ucp::PARAM_MT_WORKERS_SHARED,
            features: features.0,
            mt_workers_shared: multi.into(),
            ..Params::zeroed()
        };
        let ((major, minor), mut raw) = (ucp::API, ptr::null_mut());
        // SAFETY: complete for its mask; with a null configuration UCX reads the environment.
        unsafe { call!(ucx, ucp_init_version(major, minor, &params, ptr::null(), &mut raw)) }?;
        Ok(Context(Arc::new(ContextInner { ucx, handle: Handle::new(raw, multi), features })))
    }

    pub fn ucx(&self) -> &'static Ucx {
        self.0.ucx
    }
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        if self.handle.usable() {
            // SAFETY: workers and regions hold a reference to this context, so none is left.
            unsafe { (self.ucx.f.ucp_cleanup)(self.handle.raw) }
        }
    }
}
