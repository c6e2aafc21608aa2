//! One process's UCP set-up: the worker under test, and an endpoint to ourselves, which fills and reads device memory
//! with `ucp_put` and `ucp_get`.
//!
//! That endpoint belongs to the worker under test if it has RMA, otherwise (a TAG-only context) to a separate context,
//! so that the context under test has exactly the features that the application asks for.

use crate::ops::{Activity, poll_all};
use crate::ucp::{
    Context, Endpoint, Features, Idle, Memory, PackedRegion, Region, RemoteKey, Request, Span, Ucx,
    Worker, WorkerOptions,
};
use crate::watchdog::Watchdog;
use anyhow::{Context as _, Result};
use std::sync::Arc;

/// A worker under test, and the access to device memory.
#[derive(Clone)]
pub struct Client {
    worker: Worker,
    staging: Worker,
    to_itself: Endpoint,
    watchdog: Watchdog,
}

impl Client {
    /// Initialises UCP for one thread, or for several.
    pub fn new(
        ucx: &'static Ucx,
        features: Features,
        options: WorkerOptions,
        watchdog: &Watchdog,
    ) -> Result<Client> {
        let make = |features| -> Result<Worker> {
            watchdog.step("ucp_init");
            let context = Context::new(ucx, features, options.multi)
                .with_context(|| format!("{ucx:?} does not start"))?;
            watchdog.step("ucp_worker_create");
            Ok(Worker::new(&context, options)?)
        };
        let worker = make(features)?;
        let staging =
            if features.has(Features::RMA) { worker.clone() } else { make(Features::RMA)? };
        Client::with(worker, staging, watchdog)
    }

    /// One more worker in a context that several threads share; it must have RMA.
    pub fn in_context(context: &Context, multi: bool, watchdog: &Watchdog) -> Result<Client> {
        watchdog.step("ucp_worker_create");
        let worker = Worker::new(context, WorkerOptions { multi, hint: false })?;
        Client::with(worker.clone(), worker, watchdog)
    }

    fn with(worker: Worker, staging: Worker, watchdog: &Watchdog) -> Result<Client> {
        let to_itself = Endpoint::to_itself(&staging)?;
        Ok(Client { worker, staging, to_itself, watchdog: watchdog.clone() })
    }

    /// The same worker under another watchdog, for the other threads that use it.
    pub fn watched_by(&self, watchdog: &Watchdog) -> Client {
        Client { watchdog: watchdog.clone(), ..self.clone() }
    }

    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    pub fn ucx(&self) -> &'static Ucx {
        self.worker.context().ucx()
    }

    pub fn step(&self, what: impl std::fmt::Display) {
        self.watchdog.step(what);
    }

    /// An endpoint from the worker under test to the worker with this address.
    ///
    /// # Safety
    /// As [`Endpoint::connect`].
    pub unsafe fn connect(&self, address: &[u8], peer_errors: bool) -> Result<Endpoint> {
        self.step("ucp_ep_create");
        // SAFETY: passed on.
        Ok(unsafe { Endpoint::connect(&self.worker, address, peer_errors) }?)
    }

    /// Memory in a context with RMA: the one under test, if it has RMA.
    pub fn region(&self, memory: Memory, length: usize) -> Result<Arc<Region>> {
        let region = Region::new(self.staging.context(), memory, length);
        region.with_context(|| match memory {
            Memory::Host => format!("no {length} bytes of host memory"),
            Memory::Cuda => format!(
                "{:?} cannot use {length} bytes of CUDA memory. Are libuct_cuda and libucm_cuda in its folder \
                 ucx, and libnvidia-ml.so.1 and libcudart.so.12 on the loader path?",
                self.ucx()
            ),
            Memory::Gaudi => format!(
                "{:?} cannot allocate {length} bytes of Gaudi memory: the plugin was not found (UCX_PLUGIN_PATH), or there is no \
                 free card. `ucx-gaudi doctor` says which; `ucx-gaudi run --soft -- ucp-check …` brings plugin and \
                 software cards; UCX_LOG_LEVEL=info shows the plugin's reason",
                self.ucx()
            ),
        })
    }

    /// A key for (a part of) our own region.
    pub fn own_key(&self, packed: &PackedRegion) -> Result<RemoteKey> {
        // SAFETY: our own region, packed now; buffers keep region and key together.
        Ok(unsafe { self.to_itself.unpack(packed) }?)
    }

    /// Copies `from` (host) over the start of our own region behind `key`.
    pub fn write_device(&self, from: &Span, key: &RemoteKey) -> Result<()> {
        let put = self.to_itself.put(from, key, 0)?;
        let flush = self.to_itself.flush()?;
        self.staging.finish(put)?;
        self.staging.finish(flush)?;
        Ok(())
    }

    /// Copies the start of our own region behind `key` into `to` (host).
    pub fn read_device(&self, to: &Span, key: &RemoteKey) -> Result<()> {
        self.staging.finish(self.to_itself.get(to, key, 0)?)?;
        Ok(())
    }

    pub fn finish(&self, request: Request) -> Result<usize> {
        Ok(self.worker.finish(request)?)
    }

    /// Waits until all activities of the worker under test are done, or one of them failed.
    pub fn drive(&self, activities: &mut Vec<Box<dyn Activity>>) -> Result<()> {
        let mut idle = Idle::default();
        while !poll_all(activities)? {
            self.worker.wait(&mut idle, None)?;
        }
        Ok(())
    }
}
