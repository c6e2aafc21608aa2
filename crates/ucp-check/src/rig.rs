//! One process's UCP set-up: the worker under test, and the ferry that fills and reads device memory.
//!
//! The ferry is `ucp_put`/`ucp_get` on an endpoint to ourselves. It uses the worker under test if
//! that has RMA; otherwise (a TAG-only context) a context of its own, so that what is tested is
//! exactly what the application would ask for.

use crate::ops::Activity;
use crate::ucp::{
    Completion, Context, Endpoint, EndpointOptions, Features, Idle, Memory, PackedRegion, Region,
    RemoteKey, Request, Span, Ucx, Worker, WorkerOptions,
};
use crate::watchdog::Watchdog;
use anyhow::{Context as _, Result};
use std::sync::Arc;

/// How a rig is made.
#[derive(Clone, Copy, Debug)]
pub struct RigOptions {
    /// Features of the context under test.
    pub features: Features,
    /// Pass the memory type with every operation.
    pub hint: bool,
    /// Several threads use the worker.
    pub multi: bool,
}

/// A worker under test and its ferry.
#[derive(Clone)]
pub struct Rig {
    worker: Worker,
    ferry: Worker,
    to_myself: Endpoint,
    dog: Watchdog,
}

impl Rig {
    /// Initialises UCP.
    pub fn new(ucx: &'static Ucx, options: RigOptions, dog: &Watchdog) -> Result<Rig> {
        let RigOptions { features, hint, multi } = options;
        let make = |features| -> Result<Worker> {
            dog.step("ucp_init");
            let context = Context::new(ucx, features, multi)
                .with_context(|| format!("{ucx:?} does not start"))?;
            dog.step("ucp_worker_create");
            Ok(Worker::new(&context, WorkerOptions { multi, hint })?)
        };
        let worker = make(features)?;
        let ferry = if features.rma() { worker.clone() } else { make(Features::RMA)? };
        Rig::with(worker, ferry, dog)
    }

    /// One more worker in a context that several threads share; it must have RMA.
    pub fn in_context(context: &Context, multi: bool, dog: &Watchdog) -> Result<Rig> {
        dog.step("ucp_worker_create");
        let worker = Worker::new(context, WorkerOptions { multi, hint: false })?;
        Rig::with(worker.clone(), worker, dog)
    }

    fn with(worker: Worker, ferry: Worker, dog: &Watchdog) -> Result<Rig> {
        let address = ferry.address()?;
        // SAFETY: the address of a worker of this very UCX.
        let to_myself = unsafe { Endpoint::connect(&ferry, &address, EndpointOptions::default()) }?;
        Ok(Rig { worker, ferry, to_myself, dog: dog.clone() })
    }

    /// The same worker, watched by another watchdog: for the other threads that use it.
    pub fn watched_by(&self, dog: &Watchdog) -> Rig {
        Rig { dog: dog.clone(), ..self.clone() }
    }

    /// The worker under test.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Says what is being done, for the watchdog.
    pub fn step(&self, what: impl std::fmt::Display) {
        self.dog.step(what);
    }

    /// An endpoint from the worker under test to the worker with this address.
    ///
    /// # Safety
    /// As [`Endpoint::connect`].
    pub unsafe fn connect(&self, address: &[u8], peer_errors: bool) -> Result<Endpoint> {
        self.step("ucp_ep_create");
        // SAFETY: passed on.
        Ok(unsafe { Endpoint::connect(&self.worker, address, EndpointOptions { peer_errors }) }?)
    }

    /// Memory in the context that the ferry reaches: the one under test if it has RMA.
    pub fn region(&self, memory: Memory, length: usize) -> Result<Arc<Region>> {
        let region = Region::new(self.ferry.context(), memory, length);
        region.with_context(|| match memory {
            Memory::Host => format!("no {length} bytes of host memory"),
            Memory::Gaudi => format!(
                "{:?} cannot allocate {length} bytes of Gaudi memory. Is UCX_PLUGIN_PATH the folder \
                 with libuct_gaudi, is libhl-thunk.so (the driver's or the software one) on \
                 LD_LIBRARY_PATH, and is a device free? `eval \"$(cargo xtask env --soft)\"` sets \
                 all this up for a software Gaudi; UCX_LOG_LEVEL=info shows the plugin's reason",
                self.ferry.context().ucx()
            ),
        })
    }

    /// A key for (a part of) our own region, for the ferry.
    pub fn own_key(&self, packed: &PackedRegion) -> Result<RemoteKey> {
        // SAFETY: our own region, packed now; buffers keep region and key together.
        Ok(unsafe { self.to_myself.unpack(packed) }?)
    }

    /// Copies `staging` (host) over the start of the region behind `key`.
    pub fn ferry_in(&self, staging: &Span, key: &RemoteKey) -> Result<()> {
        let put = self.to_myself.put(staging, key, 0)?;
        let flush = self.to_myself.flush()?;
        self.finish_on(&self.ferry, put)?;
        self.finish_on(&self.ferry, flush)?;
        Ok(())
    }

    /// Copies the start of the region behind `key` into `staging` (host).
    pub fn ferry_out(&self, staging: &Span, key: &RemoteKey) -> Result<()> {
        let get = self.to_myself.get(staging, key, 0)?;
        self.finish_on(&self.ferry, get)?;
        Ok(())
    }

    /// Waits for one operation of the worker under test.
    pub fn finish(&self, request: Request) -> Result<Completion> {
        self.finish_on(&self.worker, request)
    }

    fn finish_on(&self, worker: &Worker, mut request: Request) -> Result<Completion> {
        let mut idle = Idle::default();
        loop {
            if let Some(done) = request.poll() {
                return Ok(done?);
            }
            worker.wait(&mut idle, None)?;
        }
    }

    /// Waits until all activities of the worker under test are done, or one of them failed.
    pub fn drive(&self, activities: &mut Vec<Box<dyn Activity>>) -> Result<()> {
        let mut idle = Idle::default();
        loop {
            let mut failed = None;
            activities.retain_mut(|activity| match activity.poll() {
                Ok(done) => !done,
                Err(error) => {
                    failed.get_or_insert(error);
                    false
                }
            });
            if let Some(error) = failed {
                return Err(error);
            }
            if activities.is_empty() {
                return Ok(());
            }
            self.worker.wait(&mut idle, None)?;
        }
    }
}
