//! A UCP worker: progress, sleeping until an event, tag receives, active messages.

use super::memory::Span;
use super::request::{Kind, Request, Uses};
use super::{Context, Features, Handle, Result, Ucx};
use crate::ucx::sys::{AmHandlerParam, AmRecvParam, Plain, Raw, WorkerParams, ucp};
use crate::ucx::{Status, call};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::os::fd::{BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The only active message id that this client uses.
pub(super) const AM_ID: u32 = 7;

#[derive(Clone, Copy, Default, Debug)]
pub struct WorkerOptions {
    /// UCS_THREAD_MODE_MULTI: any thread may use it. The context must also be multi-threaded.
    pub multi: bool,
    /// Tell UCX the memory type of every buffer instead of letting it find out.
    pub hint: bool,
}

#[derive(Clone)]
pub struct Worker(pub(super) Arc<WorkerInner>);

pub(super) struct WorkerInner {
    context: Context,
    handle: Handle,
    pub(super) options: WorkerOptions,
    event_fd: Option<RawFd>,
    waiting: Mutex<Waiting>,
    /// Boxed, because UCX has its address.
    inbox: Box<Inbox>,
    /// Where error handlers of endpoints store their status; UCX has the addresses.
    pub(super) failures: Mutex<Vec<Arc<AtomicI8>>>,
    /// A request was abandoned before it had ended.
    pub(super) has_left_request: AtomicBool,
}

/// Counts of what waiting took: sleeps, arm calls that returned "busy", progress calls.
#[derive(Clone, Copy, Default)]
pub struct Waiting {
    pub slept: u64,
    pub busy: u64,
    pub progressed: u64,
}

/// For how many rounds a waiting loop has found nothing to do.
#[derive(Default, Debug)]
pub struct Idle(u32);

/// Idle rounds before the thread yields. Spinning gives low latency, but two processes on one core would then wait for
/// each other's time slices.
const SPINS: u32 = 200;

impl Worker {
    /// `ucp_worker_create`, plus the active message handler and the event descriptor if the context has those features.
    pub fn new(context: &Context, options: WorkerOptions) -> Result<Worker> {
        let ucx = context.ucx();
        let thread_mode = if options.multi { ucp::THREAD_MODE_MULTI } else { 0 };
        let field_mask = ucp::WORKER_THREAD_MODE;
        let params = WorkerParams { field_mask, thread_mode, ..WorkerParams::zeroed() };
        let mut raw = ptr::null_mut();
        // SAFETY: a live context and parameters complete for their mask.
        unsafe { call!(ucx, ucp_worker_create(context.0.handle.get(), &params, &mut raw)) }?;
        let mut inner = WorkerInner {
            context: context.clone(),
            handle: Handle::new(raw, options.multi),
            options,
            event_fd: None,
            waiting: Mutex::default(),
            inbox: Box::default(),
            failures: Mutex::default(),
            has_left_request: AtomicBool::new(false),
        };
        if context.0.features.has(Features::AM) {
            let params = AmHandlerParam {
                field_mask: ucp::AM_HANDLER_ALL,
                id: AM_ID,
                flags: ucp::AM_WHOLE_AND_PERSISTENT,
                cb: Some(arrived),
                arg: (&raw const *inner.inbox).cast_mut().cast(),
            };
            // SAFETY: the inbox lives in a box until after the worker is destroyed.
            unsafe { call!(ucx, ucp_worker_set_am_recv_handler(raw, &params)) }?;
        }
        if context.0.features.wakeup() {
            let mut fd = -1;
            // SAFETY: a live worker with the wakeup feature.
            unsafe { call!(ucx, ucp_worker_get_efd(raw, &mut fd)) }?;
            inner.event_fd = Some(fd);
        }
        Ok(Worker(Arc::new(inner)))
    }

    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Lets UCX work; `true` if anything happened.
    pub fn progress(&self) -> bool {
        // SAFETY: a live worker, on a thread that may use it.
        unsafe { (self.0.ucx().f.ucp_worker_progress)(self.0.raw()) > 0 }
    }

    /// One round of a waiting loop; the caller checks its condition before each call. A round makes progress, or rests
    /// if the last progress found nothing. With the wakeup feature, resting means sleeping until the worker's event
    /// descriptor or `also` becomes readable, *without* a time limit, so that a lost event shows as a hang.
    ///
    /// After progress without a result, this returns so that the caller checks again before the sleep: stock UCX
    /// completes some requests (a flush on `cma`) in a progress call that reports nothing done, and sends no event for
    /// them.
    pub fn wait(&self, idle: &mut Idle, also: Option<BorrowedFd<'_>>) -> Result<()> {
        match self.0.event_fd {
            None => {
                idle.0 = if self.progress() { 0 } else { idle.0 + 1 };
                if idle.0 > SPINS {
                    std::thread::yield_now();
                }
                Ok(())
            }
            Some(_) if idle.0 == 0 => {
                self.0.count(|waiting| waiting.progressed += 1);
                idle.0 = u32::from(!self.progress());
                Ok(())
            }
            Some(event_fd) => {
                *idle = Idle::default();
                self.sleep(event_fd, also)
            }
        }
    }

    /// Waits until `ready` returns a value, polling it between rounds.
    pub fn wait_for<T>(&self, mut ready: impl FnMut() -> Option<T>) -> Result<T> {
        let mut idle = Idle::default();
        loop {
            if let Some(found) = ready() {
                return Ok(found);
            }
            self.wait(&mut idle, None)?;
        }
    }

    /// Waits for one operation of this worker.
    pub fn finish(&self, mut request: Request) -> Result<usize> {
        self.wait_for(|| request.poll())?
    }

    fn sleep(&self, event_fd: RawFd, also: Option<BorrowedFd<'_>>) -> Result<()> {
        let ucx = self.0.ucx();
        // SAFETY: a live worker with the wakeup feature.
        match unsafe { (ucx.f.ucp_worker_arm)(self.0.raw()) } {
            Status::BUSY => {
                self.0.count(|waiting| waiting.busy += 1);
                return Ok(());
            }
            status => ucx.check("ucp_worker_arm", status)?,
        }
        // SAFETY: UCX keeps the descriptor open as long as the worker lives.
        let event_fd = unsafe { BorrowedFd::borrow_raw(event_fd) };
        let fds = [Some(event_fd), also].into_iter().flatten();
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        self.0.count(|waiting| waiting.slept += 1);
        // A signal ends the sleep early; the caller's loop checks again.
        let _ = rustix::event::poll(&mut fds, None);
        Ok(())
    }

    /// The counts of [`Worker::wait`], for workers that sleep.
    pub fn waiting(&self) -> Waiting {
        *self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address by which others (or we ourselves) connect to this worker.
    pub fn address(&self) -> Result<Vec<u8>> {
        let ucx = self.0.ucx();
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: a live worker; what UCX returned is copied, then released once.
        unsafe {
            call!(ucx, ucp_worker_get_address(self.0.raw(), &mut address, &mut length))?;
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), length).to_vec();
            (ucx.f.ucp_worker_release_address)(self.0.raw(), address);
            Ok(bytes)
        }
    }

    /// Receives one message with exactly this tag.
    pub fn tag_receive(&self, into: &Span, tag: u64) -> Result<Request> {
        let uses = Uses { span: Some(into), ..Uses::default() };
        Request::start(&self.0, "ucp_tag_recv_nbx", Kind::TagReceive, &uses, |f, param, _| {
            let (worker, buffer, all) = (self.0.raw(), into.pointer(), u64::MAX);
            // SAFETY: see `Request::start`.
            unsafe { (f.ucp_tag_recv_nbx)(worker, buffer, into.len(), tag, all, param) }
        })
    }

    /// The oldest active message that has arrived and was not taken yet.
    pub fn take_message(&self) -> Option<AmMessage> {
        let arrived = self.0.inbox.lock().pop_front()?;
        Some(AmMessage { worker: self.0.clone(), arrived })
    }
}

impl WorkerInner {
    pub(super) fn raw(&self) -> Raw {
        self.handle.get()
    }

    pub(super) fn ucx(&self) -> &'static Ucx {
        self.context.ucx()
    }

    fn count(&self, count: impl FnOnce(&mut Waiting)) {
        count(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for WorkerInner {
    fn drop(&mut self) {
        if !self.handle.usable() {
            return; // leaked rather than touched from a foreign thread
        }
        if self.has_left_request.load(Ordering::Relaxed) {
            // When UCX 1.23 destroys the worker, it describes such a request by the configuration of an endpoint that may be gone
            // (SIGSEGV in `ucp_proto_config_info_str`). So leak the worker. UCX's threads still use it, so leak its context, too.
            std::mem::forget(self.context.clone());
            return;
        }
        for message in self.inbox.lock().drain(..) {
            message.release(self.ucx(), self.raw());
        }
        // SAFETY: endpoints, keys and requests hold a reference, so none is in use any more. UCX destroys the endpoints
        // that it still has.
        unsafe { (self.ucx().f.ucp_worker_destroy)(self.raw()) }
    }
}

/// Active messages that arrived, in order.
#[derive(Default)]
struct Inbox(Mutex<VecDeque<Arrived>>);

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Arrived>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Arrived {
    header: Vec<u8>,
    length: usize,
    rendezvous: bool,
    /// UCX's descriptor; NULL once consumed, or when there is no data.
    descriptor: *mut c_void,
}

// SAFETY: the descriptor is an opaque handle, used only with the worker, which checks the thread.
unsafe impl Send for Arrived {}

impl Arrived {
    fn release(&self, ucx: &Ucx, worker: Raw) {
        if !self.descriptor.is_null() {
            // SAFETY: we kept the descriptor by returning INPROGRESS, and release it once.
            unsafe { (ucx.f.ucp_am_data_release)(worker, self.descriptor) }
        }
    }
}

/// UCX calls this from progress. It only records the message, which is received later.
unsafe extern "C" fn arrived(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmRecvParam,
) -> Status {
    let note = || {
        // SAFETY: `arg` is the inbox given at registration; `param` is valid during the call.
        let (inbox, attributes) = unsafe { (&*arg.cast::<Inbox>(), (*param).recv_attr) };
        let header = match header_length {
            0 => Vec::new(),
            // SAFETY: UCX lends us the header for the duration of the call.
            _ => unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_length) }.to_vec(),
        };
        let rendezvous = attributes & ucp::AM_RECV_RNDV != 0;
        let ours = rendezvous || attributes & ucp::AM_RECV_DATA != 0;
        let descriptor = if ours { data } else { ptr::null_mut() };
        inbox.lock().push_back(Arrived { header, length, rendezvous, descriptor });
        if ours { Status::INPROGRESS } else { Status::OK }
    };
    // The message counts as dropped if recording it panics: no panic may unwind into UCX.
    catch_unwind(AssertUnwindSafe(note)).unwrap_or(Status::OK)
}

/// An active message whose data waits in UCX (eager) or at the sender (rendezvous).
pub struct AmMessage {
    worker: Arc<WorkerInner>,
    arrived: Arrived,
}

impl AmMessage {
    pub fn header(&self) -> &[u8] {
        &self.arrived.header
    }

    pub fn length(&self) -> usize {
        self.arrived.length
    }

    /// Whether the data still has to be fetched from the sender.
    pub fn is_rendezvous(&self) -> bool {
        self.arrived.rendezvous
    }

    /// Receives the data into `into`. `None`: the message is empty.
    pub fn receive(mut self, into: &Span) -> Result<Option<Request>> {
        let data = std::mem::replace(&mut self.arrived.descriptor, ptr::null_mut());
        if data.is_null() {
            return Ok(None);
        }
        let (worker, uses) = (&self.worker, Uses { span: Some(into), ..Uses::default() });
        let call = "ucp_am_recv_data_nbx";
        Request::start(worker, call, Kind::Plain, &uses, |f, param, _| {
            let receive = f.ucp_am_recv_data_nbx;
            // SAFETY: see `Request::start`; UCX takes over the descriptor.
            unsafe { receive(worker.raw(), data, into.pointer(), into.len(), param) }
        })
        .map(Some)
    }
}

impl Drop for AmMessage {
    fn drop(&mut self) {
        self.arrived.release(self.worker.ucx(), self.worker.raw());
    }
}
