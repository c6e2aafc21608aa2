//! A UCP worker: progress, sleeping until something happens, tag receives, active messages.

use super::context::{Context, Threads};
use super::memory::Span;
use super::request::{Completion, Kind, Request, parameters};
use super::sys::{self, AmHandlerParam, AmRecvParam, Raw, RawStatus, TagRecvInfo, WorkerParams};
use super::{Result, Ucx};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The one active message id this client uses.
pub(super) const AM_ID: u32 = 7;

/// How a worker is made.
#[derive(Clone, Copy, Default, Debug)]
pub struct WorkerOptions {
    /// UCS_THREAD_MODE_MULTI: any thread may use it. The context must be made for it, too.
    pub multi: bool,
    /// Tell UCX the memory type of every buffer instead of letting it find out.
    pub hint: bool,
}

/// A worker; clones are handles to the same one.
#[derive(Clone)]
pub struct Worker(pub(super) Arc<WorkerInner>);

pub(super) struct WorkerInner {
    pub(super) context: Context,
    raw: Raw,
    threads: Threads,
    pub(super) hint: bool,
    event_fd: Option<RawFd>,
    sleeps: AtomicU64,
    busy: AtomicU64,
    progressed: AtomicU64,
    /// Boxed: its address is known to UCX.
    inbox: Box<Inbox>,
    /// Where error handlers of endpoints leave their status; UCX knows the addresses.
    pub(super) failures: Mutex<Vec<Arc<AtomicI32>>>,
}

// SAFETY: the handle is only handed out by `raw`, which admits other threads only if the worker is
// in multi-thread mode.
unsafe impl Send for WorkerInner {}
// SAFETY: as above.
unsafe impl Sync for WorkerInner {}

/// What waiting took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// Sleeps.
    pub slept: u64,
    /// Times that UCX said not to sleep.
    pub busy: u64,
    /// Calls of progress.
    pub progressed: u64,
}

impl std::ops::Sub for Waiting {
    type Output = Waiting;

    fn sub(self, before: Waiting) -> Waiting {
        Waiting {
            slept: self.slept - before.slept,
            busy: self.busy - before.busy,
            progressed: self.progressed - before.progressed,
        }
    }
}

/// How long a waiting loop has found nothing to do.
#[derive(Default, Debug)]
pub struct Idle(u32);

/// Empty rounds before the processor is offered to others: spinning is for latency, and two
/// processes on one core would otherwise wait for each other's time slice.
const SPINS: u32 = 200;

impl Worker {
    /// `ucp_worker_create`, plus the active message handler and event descriptor where the
    /// context's features have them.
    pub fn new(context: &Context, options: WorkerOptions) -> Result<Worker> {
        let ucx = context.ucx();
        let params = WorkerParams {
            field_mask: WorkerParams::THREAD_MODE,
            thread_mode: if options.multi {
                sys::THREAD_MODE_MULTI
            } else {
                sys::THREAD_MODE_SINGLE
            },
            cpu_mask: [0; 16],
            events: 0,
            user_data: ptr::null_mut(),
            event_fd: -1,
            flags: 0,
            name: ptr::null(),
            am_alignment: 0,
            client_id: 0,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: a live context and parameters complete for their mask.
        let status = unsafe { (ucx.f.ucp_worker_create)(context.0.raw(), &params, &mut raw) };
        ucx.check("ucp_worker_create", status)?;
        let mut inner = WorkerInner {
            context: context.clone(),
            raw,
            threads: Threads::new(options.multi),
            hint: options.hint,
            event_fd: None,
            sleeps: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            progressed: AtomicU64::new(0),
            inbox: Box::default(),
            failures: Mutex::default(),
        };
        if context.features().active_messages() {
            inner.accept_active_messages()?;
        }
        if context.features().wakeup() {
            let mut fd: c_int = -1;
            // SAFETY: a live worker with the wakeup feature.
            let status = unsafe { (ucx.f.ucp_worker_get_efd)(inner.raw, &mut fd) };
            ucx.check("ucp_worker_get_efd", status)?;
            inner.event_fd = Some(fd);
        }
        Ok(Worker(Arc::new(inner)))
    }

    /// The context it belongs to.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Lets UCX work; `true` if anything happened.
    pub fn progress(&self) -> bool {
        // SAFETY: a live worker, on a thread that may use it.
        unsafe { (self.0.ucx().f.ucp_worker_progress)(self.0.raw()) > 0 }
    }

    /// One round of a waiting loop, to be called after the awaited condition was found false:
    /// progress, and if there was none in the last round, rest. With the wakeup feature resting
    /// means sleeping until the worker's event descriptor or `also` becomes readable, *without* a
    /// time limit, so a lost event shows as a hang.
    ///
    /// Between a progress without result and the sleep the caller looks again: stock UCX completes
    /// some requests (a flush on `cma`) in a progress call that reports nothing done, and sends no
    /// event for them.
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
                self.0.progressed.fetch_add(1, Ordering::Relaxed);
                idle.0 = u32::from(!self.progress());
                Ok(())
            }
            Some(event_fd) => {
                *idle = Idle::default();
                self.sleep(event_fd, also)
            }
        }
    }

    fn sleep(&self, event_fd: RawFd, also: Option<BorrowedFd<'_>>) -> Result<()> {
        let ucx = self.0.ucx();
        // SAFETY: a live worker with the wakeup feature.
        match unsafe { (ucx.f.ucp_worker_arm)(self.0.raw()) } {
            sys::ERR_BUSY => {
                self.0.busy.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            status => ucx.check("ucp_worker_arm", status)?,
        }
        // SAFETY: UCX keeps the descriptor open as long as the worker lives.
        let event_fd = unsafe { BorrowedFd::borrow_raw(event_fd) };
        let mut fds: Vec<_> = [Some(event_fd), also]
            .into_iter()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        self.0.sleeps.fetch_add(1, Ordering::Relaxed);
        // A signal ends the sleep early; the loop around us looks again.
        let _ = rustix::event::poll(&mut fds, None);
        Ok(())
    }

    /// How often [`Worker::wait`] really slept.
    pub fn sleeps(&self) -> u64 {
        self.0.sleeps.load(Ordering::Relaxed)
    }

    /// What [`Worker::wait`] did so far, in workers that sleep.
    pub fn waiting(&self) -> Waiting {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Waiting {
            slept: count(&self.0.sleeps),
            busy: count(&self.0.busy),
            progressed: count(&self.0.progressed),
        }
    }

    /// The address by which others (or we ourselves) connect to it.
    pub fn address(&self) -> Result<Vec<u8>> {
        let ucx = self.0.ucx();
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: a live worker.
        let status =
            unsafe { (ucx.f.ucp_worker_get_address)(self.0.raw(), &mut address, &mut length) };
        ucx.check("ucp_worker_get_address", status)?;
        // SAFETY: UCX returned `length` readable bytes, ours until released.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: released once, no reference left.
        unsafe { (ucx.f.ucp_worker_release_address)(self.0.raw(), address) };
        Ok(bytes)
    }

    /// Receives one message with exactly this tag.
    pub fn tag_receive(&self, into: &Span, tag: u64) -> Result<Request> {
        let mut info = TagRecvInfo::default();
        let mut param = parameters(Some(into), 0, self.0.hint);
        param.op_attr_mask |= sys::OP_ATTR_FIELD_RECV_INFO;
        param.recv_info = (&raw mut info).cast();
        // SAFETY: the request keeps `into` alive; `info` is written before the call returns or never.
        let returned = unsafe {
            (self.0.ucx().f.ucp_tag_recv_nbx)(
                self.0.raw(),
                into.pointer(),
                into.len(),
                tag,
                u64::MAX,
                &param,
            )
        };
        let done = Completion { length: info.length, tag: info.sender_tag };
        Request::started(&self.0, "ucp_tag_recv_nbx", Kind::TagReceive, returned, done, Some(into))
    }

    /// The oldest active message that arrived and was not taken yet.
    pub fn take_message(&self) -> Option<AmMessage> {
        let arrived = self.0.inbox.lock().pop_front()?;
        Some(AmMessage { worker: self.0.clone(), arrived })
    }
}

impl WorkerInner {
    pub(super) fn raw(&self) -> Raw {
        assert!(
            self.threads.allowed(),
            "a single-threaded UCP worker was used from another thread"
        );
        self.raw
    }

    pub(super) fn ucx(&self) -> &'static Ucx {
        self.context.ucx()
    }

    fn accept_active_messages(&self) -> Result<()> {
        let params = AmHandlerParam {
            field_mask: AmHandlerParam::ALL,
            id: AM_ID,
            flags: sys::AM_FLAG_WHOLE_MSG | sys::AM_FLAG_PERSISTENT_DATA,
            cb: Some(arrived),
            arg: (&raw const *self.inbox).cast_mut().cast(),
        };
        // SAFETY: the inbox lives in a box until after the worker is destroyed.
        let status = unsafe { (self.ucx().f.ucp_worker_set_am_recv_handler)(self.raw, &params) };
        self.ucx().check("ucp_worker_set_am_recv_handler", status)
    }
}

impl Drop for WorkerInner {
    fn drop(&mut self) {
        if !self.threads.allowed() {
            return; // leaked rather than touched from a foreign thread
        }
        for message in self.inbox.lock().drain(..) {
            message.release(self.ucx(), self.raw);
        }
        // SAFETY: endpoints, keys and requests hold a reference, so none is left in use. UCX
        // destroys what endpoints it still has.
        unsafe { (self.ucx().f.ucp_worker_destroy)(self.raw) }
    }
}

/// Active messages that arrived, in order.
#[derive(Default)]
struct Inbox(Mutex<VecDeque<Arrived>>);

impl Inbox {
    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Arrived>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

struct Arrived {
    header: Vec<u8>,
    length: usize,
    rendezvous: bool,
    /// UCX's descriptor; NULL once consumed, or when there is no data.
    descriptor: *mut c_void,
}

// SAFETY: the descriptor is an opaque handle, used only with the worker that checks the thread.
unsafe impl Send for Arrived {}

impl Arrived {
    fn release(&self, ucx: &Ucx, worker: Raw) {
        if !self.descriptor.is_null() {
            // SAFETY: we kept the descriptor by returning INPROGRESS, and give it back once.
            unsafe { (ucx.f.ucp_am_data_release)(worker, self.descriptor) }
        }
    }
}

/// Called by UCX from progress. Only notes the message: receiving it happens outside.
unsafe extern "C" fn arrived(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmRecvParam,
) -> RawStatus {
    let note = || {
        // SAFETY: `arg` is the inbox given at registration; `param` is valid during the call.
        let (inbox, attributes) = unsafe { (&*arg.cast::<Inbox>(), (*param).recv_attr) };
        let header = if header_length == 0 {
            Vec::new()
        } else {
            // SAFETY: UCX lends us the header for the duration of the call.
            unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_length) }.to_vec()
        };
        let rendezvous = attributes & sys::AM_RECV_ATTR_FLAG_RNDV != 0;
        let ours = rendezvous || attributes & sys::AM_RECV_ATTR_FLAG_DATA != 0;
        let descriptor = if ours { data } else { ptr::null_mut() };
        inbox.lock().push_back(Arrived { header, length, rendezvous, descriptor });
        if ours { sys::INPROGRESS } else { sys::OK }
    };
    // The message counts as dropped if noting it panics: no panic may enter UCX.
    catch_unwind(AssertUnwindSafe(note)).unwrap_or(sys::OK)
}

/// An active message whose data waits in UCX (eager) or at the sender (rendezvous).
pub struct AmMessage {
    worker: Arc<WorkerInner>,
    arrived: Arrived,
}

impl AmMessage {
    /// The header the sender gave.
    pub fn header(&self) -> &[u8] {
        &self.arrived.header
    }

    /// Length of the data.
    pub fn length(&self) -> usize {
        self.arrived.length
    }

    /// Whether the data still has to be fetched from the sender.
    pub fn is_rendezvous(&self) -> bool {
        self.arrived.rendezvous
    }

    /// Delivers the data into `into`. `None`: there is none to deliver (an empty message).
    pub fn receive(mut self, into: &Span) -> Result<Option<Request>> {
        let descriptor = std::mem::replace(&mut self.arrived.descriptor, ptr::null_mut());
        if descriptor.is_null() {
            return Ok(None);
        }
        let param = parameters(Some(into), 0, self.worker.hint);
        // SAFETY: UCX takes the descriptor over; the request keeps `into` alive.
        let returned = unsafe {
            (self.worker.ucx().f.ucp_am_recv_data_nbx)(
                self.worker.raw(),
                descriptor,
                into.pointer(),
                into.len(),
                &param,
            )
        };
        let done = Completion::default();
        let call = "ucp_am_recv_data_nbx";
        Request::started(&self.worker, call, Kind::Plain, returned, done, Some(into)).map(Some)
    }
}

impl Drop for AmMessage {
    fn drop(&mut self) {
        self.arrived.release(self.worker.ucx(), self.worker.raw());
    }
}
