//! The back end for the card of a framework (Synapse) in this process: memory from its pool, copies on streams of our
//! own next to its streams. `runtime/framework_card.rs` decides when the card is found and left.
//!
//! The card is the framework's. Nothing here opens, closes, acquires or releases it, and work reaches its queues only
//! through the framework. Host memory of the application is never mapped: the framework does not count references to
//! a mapping, so that releasing ours could remove the application's. Every copy goes through bounce buffers.
//!
//! The framework may release the card at any time. At that moment none of our threads may be in one of its calls, and
//! we may hold no dma-buf. If the release is announced, [`Guest::end`] makes all later calls fail, waits for the
//! calls under way, and releases the dma-buf, streams, events and host mappings. If it is not announced, `end` waits
//! for nothing ([`presence`]), and releases only the dma-buf. Device memory that is still allocated goes with the
//! card. Handles that are left are forgotten, because their numbers may be in use again.

mod presence;
mod streams;

use std::collections::HashMap;
use std::ffi::c_int;
use std::mem::forget;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hl_thunk::packet::{DmaRule, LinDma};
use hl_thunk::{DeviceAddr, Direction, DmaBuf, ExportCall, PAGE_SIZE};
use synapse::{Acquired, CallError, DeviceBlock, Framework, HostMapping, Status};

use self::presence::{CallGuard, Presence};
use self::streams::{LANES, Streams};
use super::driver::{Shared, alone, export_failed, flush, shared};
use super::{
    Backend, CopyLimits, FLUSHING, Geometry, HostPin, IMPORTING, MapOutcome, Page, Placement,
    Registers, SLOTS, Ticket,
};
use crate::error::ErrorKind;
use crate::stats::Counts;
use crate::{Error, Remedy};

/// The unit in which memory is taken from the framework's pool.
const PAGE: u64 = 2 << 20;
/// Most copies of one submission.
const MOVES: usize = 64;
/// All large copies are bounced: slots are long, so that the framework is called rarely.
const BOUNCE: (u32, usize) = (16, 1 << 20);
/// A wait polls this often in a spin loop, then yields between polls up to this count, then sleeps between polls.
/// Each wait starts from 0 and may last up to a millisecond: most of that must be sleep.
const SPINS: u32 = 64;
const YIELDS: u32 = 128;
const SLEEP: Duration = Duration::from_micros(50);

const ALLOCATING: &str = "allocating device memory";
const EXPORTING: &str = "exporting a dma-buf";
const SUBMITTING: &str = "submitting a copy";
const WAITING: &str = "waiting for a copy";

/// How the framework releases its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseKind {
    /// It is about to be released: streams, events and host mappings are given back.
    Announced,
    /// It was released, or is being: the framework must not be called.
    Unannounced,
}

/// A card through libSynapse.
#[derive(Debug)]
pub(crate) struct Guest {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    framework: Arc<Framework>,
    /// The framework's descriptor, for exports.
    device: hl_thunk::Device,
    card: Acquired,
    pool: synapse::Pool,
    presence: Presence,
    streams: Streams,
    /// Our own host memory that is mapped, by its address.
    mappings: Mutex<HashMap<usize, HostMapping>>,
    /// The export of the whole pool.
    whole: Shared,
}

impl Guest {
    /// `device` uses the descriptor of `card`.
    pub(crate) fn new(
        framework: Arc<Framework>,
        card: Acquired,
        pool: synapse::Pool,
        device: hl_thunk::Device,
    ) -> Self {
        let inner = Inner {
            framework,
            device,
            card,
            pool,
            presence: Presence::new(),
            streams: Streams::new(),
            mappings: Mutex::default(),
            whole: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Whether an unmap by the framework through this descriptor hits the pool. Without `start` it unmaps everything.
    pub(crate) fn is_mapped(&self, fd: c_int, start: Option<DeviceAddr>) -> bool {
        let pool = &self.inner.pool;
        // The driver's mapping may begin before the pool; other pools have mappings of their own.
        let is_pool = |start: DeviceAddr| start.0 == pool.mapping || pool.range.contains(&start.0);
        self.inner.card.fd == fd && start.is_none_or(is_pool)
    }

    /// Whether we still use the card: [`Guest::end`] was not called.
    pub(crate) fn is_present(&self) -> bool {
        self.inner.presence.is_in_use()
    }

    /// Makes all later calls fail, and gives up what is ours on the card: an announced release gives back the dma-buf,
    /// streams, events and host mappings, an unannounced one only the dma-buf. Allocations that still exist are freed by
    /// the framework with the card.
    pub(crate) fn end(&self, how: ReleaseKind) {
        let inner = &*self.inner;
        inner.presence.end();
        if how == ReleaseKind::Announced {
            inner.presence.wait();
        }
        // The framework is never called with this lock held.
        drop(lock(&inner.whole).take());
        if how == ReleaseKind::Announced {
            // Destroying a stream waits for its work.
            drop(inner.streams.take());
            drop(std::mem::take(&mut *lock(&inner.mappings)));
        }
    }

    pub(crate) fn card(&self) -> Acquired {
        self.inner.card
    }

    /// Asks the framework whether it still has the card.
    pub(crate) fn is_acquired(&self) -> bool {
        matches!(self.inner.framework.has(&self.inner.card), Ok(true))
    }

    /// The framework refused an announced release: memory that is freed from now on is given back to it.
    pub(crate) fn stays(&self) {
        self.inner.presence.stays();
    }

    /// Makes all later calls fail. Does not wait: the framework is in the middle of releasing the card.
    pub(crate) fn refuse(&self) {
        self.inner.presence.end();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.presence.is_in_use() {
            forget((self.streams.take(), std::mem::take(&mut *lock(&self.mappings))));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn enter(&self, operation: &'static str) -> Result<CallGuard<'_>, Error> {
        if !self.device.is_ours() {
            return Err(Error::forked(operation));
        }
        self.presence.enter().ok_or_else(|| released(operation))
    }

    /// Translates an error of the framework, which may mean that the card is not the same any more.
    fn failed(&self, operation: &'static str, error: CallError) -> Error {
        let suspicious = matches!(
            error.status(),
            Some(Status::FAIL | Status::INVALID_ARGUMENT | Status::INVALID_EVENT_HANDLE)
        );
        if !suspicious {
            return translate(operation, error);
        }
        if !self.presence.is_in_use() {
            return released(operation);
        }
        match self.framework.has(&self.card) {
            Ok(true) if error.status() == Some(Status::INVALID_EVENT_HANDLE) => {
                // The card was released and acquired again: the next poll attaches to it.
                self.presence.end();
                released(operation)
            }
            Ok(true) => translate(operation, error),
            Ok(false) => released(operation),
            // The real reason, such as a reset.
            Err(reason) => translate(operation, reason),
        }
    }

    /// A dma-buf of part of the pool, in whole 4 KiB.
    fn export(&self, offset: u64, len: u64) -> Result<DmaBuf, hl_thunk::Error> {
        let call = ExportCall::best(self.device.library());
        let mapping = DeviceAddr(self.pool.mapping);
        let offset = self.pool.range.start - self.pool.mapping + offset;
        DmaBuf::export_foreign(&self.device, mapping, offset, len, call)
    }

    /// Enters for a driver call on the framework's descriptor, whose number may belong to another file by now.
    fn enter_for_driver(&self, operation: &'static str) -> Result<CallGuard<'_>, Error> {
        let present = self.enter(operation)?;
        match self.framework.has(&self.card) {
            Ok(true) => Ok(present),
            Ok(false) => Err(released(operation)),
            Err(reason) => Err(translate(operation, reason)),
        }
    }

    fn len(&self) -> u64 {
        self.pool.range.end - self.pool.range.start
    }
}

/// The framework has released the card.
fn released(operation: &'static str) -> Error {
    let detail = "Synapse has released the card";
    let remedy = "have the framework release it after the last use of its memory";
    Error::new(ErrorKind::DeviceNotFound, operation, detail, remedy).device_is_lost()
}

/// What a status of libSynapse means. Some are surprising: "Fail" also stands for no device and for no memory.
fn translate(operation: &'static str, error: CallError) -> Error {
    let CallError::Refused { status, .. } = error else {
        return Error::unsupported(operation, error.to_string(), Remedy::None);
    };
    let (kind, lost) = match status {
        Status::UNINITIALIZED | Status::NO_DEVICE_FOUND => return released(operation),
        Status::UNSUPPORTED => {
            return Error::unsupported(operation, error.to_string(), Remedy::None);
        }
        Status::OUT_OF_HOST_MEMORY
        | Status::OUT_OF_DEVICE_MEMORY
        | Status::ALL_RESOURCES_TAKEN
        | Status::OUT_OF_RESOURCES => (ErrorKind::OutOfMemory, false),
        Status::DEVICE_RESET | Status::SYNAPSE_TERMINATED | Status::ASSERT_ASYNC => {
            (ErrorKind::DmaFailed, true)
        }
        Status::TIMEOUT => (ErrorKind::Timeout, true),
        // Our handles are not valid: the card was released and acquired again.
        Status::INVALID_EVENT_HANDLE => (ErrorKind::DmaFailed, true),
        Status::INVALID_ARGUMENT | Status::MAPPING_NOT_FOUND => (ErrorKind::InvalidParams, false),
        Status::BUSY => (ErrorKind::DeviceBusy, false),
        _ => (ErrorKind::DmaFailed, false),
    };
    let remedy = if lost {
        "the framework's card has failed: look at the kernel log and at Synapse's logs (HABANA_LOGS), \
         then restart"
    } else {
        "look at Synapse's logs (HABANA_LOGS)"
    };
    let error = Error::new(kind, operation, error.to_string(), remedy);
    if lost { error.device_is_lost() } else { error }
}

fn not_ours(operation: &'static str, detail: &'static str, remedy: &'static str) -> Error {
    Error::new(ErrorKind::PermissionDenied, operation, detail, remedy)
}

impl Backend for Guest {
    fn geometry(&self) -> Geometry {
        let (start, len) = (self.inner.pool.range.start, self.inner.len());
        Geometry { total: len, page: PAGE, placement: Placement::Pool { start, len } }
    }

    fn check_present(&self, operation: &'static str) -> Result<(), Error> {
        self.inner.enter(operation).map(drop)
    }

    fn take_page(&self, _at: DeviceAddr, _len: u64) -> Result<MapOutcome, Error> {
        let detail = "a framework's card has memory where the framework has it";
        Err(Error::unsupported(ALLOCATING, detail, "report this"))
    }

    fn take_from_pool(&self, len: u64) -> Result<(DeviceAddr, Box<dyn Page>), Error> {
        let _present = self.inner.enter(ALLOCATING)?;
        let framework = &self.inner.framework;
        // The framework aligns to 128 bytes.
        let block = DeviceBlock::new(framework, len + PAGE_SIZE).map_err(|error| {
            // What the library returns if the pool is empty, and the status that is documented for that.
            let exhausted = [Status::FAIL, Status::OUT_OF_DEVICE_MEMORY];
            match self.inner.failed(ALLOCATING, error) {
                other if other.is_device_lost() => other,
                _ if error.status().is_some_and(|status| exhausted.contains(&status)) => {
                    exhausted_pool(len, framework.memory().ok())
                }
                other => other,
            }
        })?;
        let addr = DeviceAddr(block.addr().next_multiple_of(PAGE_SIZE));
        let page = PoolPage { inner: Arc::clone(&self.inner), block: Some(block) };
        Ok((addr, Box::new(page)))
    }

    fn pool(&self) -> Option<Box<dyn Page>> {
        Some(Box::new(PoolPage { inner: Arc::clone(&self.inner), block: None }))
    }

    fn pins_callers_memory(&self) -> bool {
        false
    }

    fn bounce_slots(&self) -> (u32, usize) {
        BOUNCE
    }

    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<HostPin, Error> {
        let operation = "mapping bounce buffers";
        let _present = self.inner.enter(operation)?;
        // SAFETY: the caller keeps the memory. It is the engine's own: `pins_callers_memory` says so.
        let mapping = unsafe { HostMapping::new(&self.inner.framework, ptr, len) };
        let mapping = mapping.map_err(|error| self.inner.failed(operation, error))?;
        lock(&self.inner.mappings).insert(ptr as usize, mapping);
        let mapped = Mapped { inner: Arc::clone(&self.inner), start: ptr as usize };
        // The framework translates host addresses itself.
        Ok(HostPin::new(DeviceAddr(ptr as u64), mapped))
    }

    fn can_import(&self) -> Result<(), Error> {
        Err(not_ours(
            IMPORTING,
            "the card is the framework's, and whether its streams copy imported memory is not proven",
            "peers may import this process's memory; else transfers go through a network device or host memory",
        ))
    }

    fn import(&self, _dmabuf: BorrowedFd<'_>, _len: u64) -> Result<HostPin, Error> {
        Err(self.can_import().expect_err("never possible"))
    }

    fn map_block(&self, _address: DeviceAddr) -> Result<Box<dyn Registers>, Error> {
        let detail = "the card is the framework's, and its registers are SCAL's";
        Err(not_ours("mapping a register block", detail, "use a card that no framework has"))
    }

    fn copy_limits(&self) -> Result<CopyLimits, Error> {
        limits(&self.inner.framework)
    }

    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error> {
        let inner = &*self.inner;
        let _present = inner.enter(SUBMITTING)?;
        // SAFETY: the caller's promise.
        let submitted = unsafe {
            inner.streams.submit(&inner.framework, &inner.presence, direction, slot, moves)
        };
        submitted.map_err(|error| inner.failed(SUBMITTING, error))
    }

    /// The driver does this by itself, without a queue.
    fn flush_peer_writes(&self) -> Result<(), Error> {
        let _present = self.inner.enter_for_driver(FLUSHING)?;
        flush(&self.inner.device)
    }

    fn is_operational(&self) -> bool {
        self.inner.enter_for_driver("looking at the card").is_ok()
    }

    fn wait(&self, ticket: Ticket, timeout_us: u32) -> Result<bool, Error> {
        let inner = &*self.inner;
        let mut end = None;
        let mut asked = 0_u32;
        loop {
            {
                let _present = inner.enter(WAITING)?;
                let ended = inner.streams.has_ended(&inner.presence, ticket);
                if ended.map_err(|error| inner.failed(WAITING, error))? {
                    return Ok(true);
                }
            }
            if timeout_us == 0 {
                return Ok(false);
            }
            asked += 1;
            if asked < SPINS {
                std::hint::spin_loop();
            } else if asked < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(SLEEP);
            }
            let timeout = Duration::from_micros(timeout_us.into());
            if Instant::now() >= *end.get_or_insert_with(|| Instant::now() + timeout) {
                return Ok(false);
            }
        }
    }
}

/// The limits of a submission with this library.
fn limits(framework: &Framework) -> Result<CopyLimits, Error> {
    if let Some(missing) = framework.missing_for_copies() {
        let detail = format!("{} has no {missing}, which copies need", framework.path());
        let remedy = "memory can be detected and exported; use Synapse 1.16 or later for copies";
        return Err(Error::unsupported("copying", detail, remedy));
    }
    Ok(CopyLimits {
        moves: MOVES,
        in_flight: u64::from(SLOTS),
        lanes: LANES,
        // The runtime takes any length and address.
        rule: DmaRule { len: 1, addr: 1 },
    })
}

/// The framework has no memory for us. `memory`: free and total bytes of its pool.
fn exhausted_pool(len: u64, memory: Option<(u64, u64)>) -> Error {
    let left = match memory {
        Some((free, total)) => format!("{free} of {total} bytes of its pool are free"),
        None => String::from("it does not say how much is left"),
    };
    let detail = format!("Synapse has no device memory for {len} bytes: {left}");
    let remedy = "PyTorch takes all of it at its start: leave some with PT_HPU_POOL_MEM_ACQUIRE_PERC below \
                  100, or use memory of the framework's tensors";
    let mut error = Error::new(ErrorKind::OutOfMemory, ALLOCATING, detail, remedy);
    error.set_errno(libc::ENOMEM);
    error
}

/// Keeps our own host memory mapped.
#[derive(Debug)]
struct Mapped {
    inner: Arc<Inner>,
    start: usize,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Without the card the framework must not be called, and the mapping no longer exists.
        let present = self.inner.enter("unmapping bounce buffers");
        let mapping = lock(&self.inner.mappings).remove(&self.start);
        if present.is_err() {
            forget(mapping);
        }
    }
}

/// Memory of the pool: a block that was taken from it, or all of it.
#[derive(Debug)]
struct PoolPage {
    inner: Arc<Inner>,
    block: Option<DeviceBlock>,
}

impl PoolPage {
    fn free(self) {
        let PoolPage { inner, block } = self;
        // A forked child gives nothing back.
        match inner.presence.enter_to_free().filter(|_| inner.device.is_ours()) {
            Some(_calling) => drop(block),
            None => forget(block),
        }
    }
}

impl Page for PoolPage {
    /// The pool as a whole, once for the process; only one driver call can export it.
    fn export_whole(&self, _call: Option<ExportCall>, counts: Counts) -> Result<OwnedFd, Error> {
        let _present = self.inner.enter_for_driver(EXPORTING)?;
        let len = self.inner.len() / PAGE_SIZE * PAGE_SIZE;
        shared(&self.inner.whole, counts, || {
            // Checked under the lock that `Guest::end` takes after changing the state: `end` drops what is kept.
            if !self.inner.presence.is_in_use() {
                return Err(released(EXPORTING));
            }
            self.inner.export(0, len).map_err(export_failed)
        })
    }

    fn export_part(&self, offset: u64, len: u64, counts: Counts) -> Result<OwnedFd, Error> {
        let _present = self.inner.enter_for_driver(EXPORTING)?;
        alone(self.inner.export(offset, len), counts)
    }

    fn give_back(self: Box<Self>, _needed: bool) -> Result<(), Box<dyn Page>> {
        self.free();
        Ok(())
    }

    fn leave(self: Box<Self>) {
        self.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use synapse::sys::Functions;

    #[test]
    fn every_surprising_status_has_its_kind() {
        use ErrorKind::{
            DeviceBusy, DeviceNotFound, DmaFailed, InvalidParams, OutOfMemory, Timeout,
        };
        let rows = [
            (Status::UNINITIALIZED, DeviceNotFound, true),
            (Status::NO_DEVICE_FOUND, DeviceNotFound, true),
            (Status::BUSY, DeviceBusy, false),
            (Status::OUT_OF_HOST_MEMORY, OutOfMemory, false),
            (Status::OUT_OF_DEVICE_MEMORY, OutOfMemory, false),
            (Status::ALL_RESOURCES_TAKEN, OutOfMemory, false),
            (Status::OUT_OF_RESOURCES, OutOfMemory, false),
            (Status::DEVICE_RESET, DmaFailed, true),
            (Status::SYNAPSE_TERMINATED, DmaFailed, true),
            (Status::ASSERT_ASYNC, DmaFailed, true),
            (Status::INVALID_EVENT_HANDLE, DmaFailed, true),
            (Status::TIMEOUT, Timeout, true),
            (Status::INVALID_ARGUMENT, InvalidParams, false),
            (Status::MAPPING_NOT_FOUND, InvalidParams, false),
            (Status::FAIL, DmaFailed, false),
            (Status::COMMAND_SUBMISSION_FAILURE, DmaFailed, false),
            (Status(99), DmaFailed, false),
        ];
        for (status, kind, lost) in rows {
            let error = translate("testing", CallError::Refused { call: "syn", status });
            assert_eq!((error.kind(), error.is_device_lost()), (kind, lost), "{status}");
        }
        let error = translate("testing", CallError::Refused { call: "syn", status: Status(99) });
        assert!(error.to_string().contains("unknown status 99"), "{error}");
        let missing = translate("filling", CallError::Missing("synMemsetD8Async"));
        assert!(missing.is_unsupported() && missing.to_string().contains("synMemsetD8Async"));
    }

    #[test]
    fn a_library_without_a_function_that_copies_need_says_which() {
        // SAFETY: no function at all.
        let framework = unsafe { Framework::with_functions(Functions::default()) };
        let error = limits(&framework).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        assert!(error.to_string().contains("synStreamCreateGeneric"), "{error}");
        assert!(framework.acquired().is_err() && framework.memory().is_err());
    }
}
