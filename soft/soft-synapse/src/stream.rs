//! Streams and events.
//!
//! A stream submits its copies to one of SCAL's queues, which keeps their order. A wait for an event that has not
//! happened puts the stream's later work into a backlog, which a thread then works off.

use core::ffi::c_int;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::device::Device;
use crate::status::Status;
use crate::thunk::{self, Transfer};

/// Queues that SCAL has for copies.
const QUEUES: usize = 8;
/// Events of a device.
const MAX_EVENTS: usize = 2048;
/// `EVENT_COLLECT_TIME`.
const COLLECT_TIME: u32 = 1;
/// `HL_WAIT_CS_STATUS_BUSY`.
const WAIT_BUSY: u32 = 1;
const FOR_EVER: u64 = i64::MAX as u64;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

/// A position in the work of a stream, marked by an event.
#[derive(Debug, Default)]
pub(crate) struct Mark {
    /// The last submission before it, 0 for none; known once the stream has reached this position.
    seq: OnceLock<u64>,
    reached: (Mutex<()>, Condvar),
    /// Realtime clock when the work before it had ended.
    ended_ns: OnceLock<u64>,
}

impl Mark {
    fn set(&self, seq: u64) {
        let _lock = locked(&self.reached.0);
        let _ = self.seq.set(seq);
        if seq == 0 {
            let _ = self.ended_ns.set(now_ns());
        }
        self.reached.1.notify_all();
    }

    /// The submission; waits until the stream has reached it.
    fn wait_until_reached(&self) -> u64 {
        let mut lock = locked(&self.reached.0);
        loop {
            if let Some(seq) = self.seq.get() {
                return *seq;
            }
            lock = self.reached.1.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the work before it has ended.
    pub(crate) fn has_ended(&self, device: &Device) -> Result<bool, Status> {
        match self.seq.get() {
            None => Ok(false),
            Some(seq) => self.ended(device, *seq, 0),
        }
    }

    /// Waits until the work before it has ended.
    pub(crate) fn wait(&self, device: &Device) -> Result<(), Status> {
        let seq = self.wait_until_reached();
        self.ended(device, seq, FOR_EVER).map(|_| ())
    }

    fn ended(&self, device: &Device, seq: u64, timeout: u64) -> Result<bool, Status> {
        match ended(device, seq, timeout)? {
            None => Ok(false),
            Some(at) => {
                let _ = self.ended_ns.set(at);
                Ok(true)
            }
        }
    }
}

/// When a submission ended; `None` if it has not.
fn ended(device: &Device, seq: u64, timeout: u64) -> Result<Option<u64>, Status> {
    if seq == 0 {
        return Ok(Some(0));
    }
    let (mut status, mut at) = (0, 0);
    // SAFETY: out pointers to our own.
    let result: c_int = unsafe {
        thunk::hlthunk_wait_for_cs_with_timestamp(
            device.fd,
            seq,
            timeout,
            &raw mut status,
            &raw mut at,
        )
    };
    match result {
        0 if status == WAIT_BUSY => Ok(None),
        0 => Ok(Some(at)),
        _ => Err(device.fail()),
    }
}

#[derive(Debug)]
enum Work {
    Transfers(Vec<Transfer>),
    Wait(Arc<Mark>),
    Reach(Arc<Mark>),
}

#[derive(Debug, Default)]
struct State {
    /// The last submission.
    last: u64,
    backlog: VecDeque<Work>,
    /// A thread works off the backlog; new work must be queued there.
    carried_on: bool,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    queue: u32,
    state: Mutex<State>,
    /// Notified when the thread has emptied the backlog.
    idle: Condvar,
    pub(crate) affinity: Mutex<u64>,
}

impl Stream {
    fn submit(
        &self,
        device: &Device,
        state: &mut State,
        transfers: &[Transfer],
    ) -> Result<(), Status> {
        let mut seq = 0;
        // SAFETY: so many transfers, and an out pointer to our own.
        let result = unsafe {
            thunk::soft_gaudi_scal_submit(
                device.fd,
                self.queue,
                transfers.as_ptr(),
                transfers.len(),
                &raw mut seq,
            )
        };
        if result != 0 {
            return Err(device.fail());
        }
        state.last = seq;
        Ok(())
    }

    /// Starts transfers, in order after all earlier work of the stream.
    pub(crate) fn transfer(&self, device: &Device, transfers: Vec<Transfer>) -> Result<(), Status> {
        let mut state = locked(&self.state);
        if state.carried_on {
            state.backlog.push_back(Work::Transfers(transfers));
            return Ok(());
        }
        self.submit(device, &mut state, &transfers)
    }

    /// Makes later work wait for an event.
    pub(crate) fn wait(
        self: &Arc<Self>,
        device: &Arc<Device>,
        mark: Arc<Mark>,
    ) -> Result<(), Status> {
        let mut state = locked(&self.state);
        if !state.carried_on && mark.has_ended(device)? {
            return Ok(());
        }
        if !state.carried_on {
            let (this, device) = (self.clone(), device.clone());
            let run = move || this.carry_on(&device);
            // The thread will find the work queued below: the state is locked until then.
            std::thread::Builder::new()
                .name("soft-synapse".to_owned())
                .spawn(run)
                .map_err(|_| Status::OUT_OF_HOST_MEMORY)?;
            state.carried_on = true;
        }
        state.backlog.push_back(Work::Wait(mark));
        Ok(())
    }

    /// Marks the position after all earlier work.
    fn mark(&self) -> Arc<Mark> {
        let mark = Arc::new(Mark::default());
        let mut state = locked(&self.state);
        if state.carried_on {
            state.backlog.push_back(Work::Reach(mark.clone()));
        } else {
            mark.set(state.last);
        }
        mark
    }

    fn carry_on(&self, device: &Device) {
        let mut state = locked(&self.state);
        while let Some(work) = state.backlog.pop_front() {
            // A failure marks the device as failed, and every later call reports it.
            match work {
                Work::Transfers(transfers) => drop(self.submit(device, &mut state, &transfers)),
                Work::Reach(mark) => mark.set(state.last),
                Work::Wait(mark) => {
                    drop(state);
                    let _ = mark.wait(device);
                    state = locked(&self.state);
                }
            }
        }
        state.carried_on = false;
        self.idle.notify_all();
    }

    /// Whether all work has ended.
    pub(crate) fn is_idle(&self, device: &Device) -> Result<bool, Status> {
        let state = locked(&self.state);
        Ok(!state.carried_on && ended(device, state.last, 0)?.is_some())
    }

    /// Waits until all work has ended.
    pub(crate) fn synchronize(&self, device: &Device) -> Result<(), Status> {
        let mut state = locked(&self.state);
        while state.carried_on {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let last = state.last;
        drop(state);
        ended(device, last, FOR_EVER).map(|_| ())
    }
}

/// An event: where it was recorded last.
#[derive(Debug)]
pub(crate) struct Event {
    collects_time: bool,
    mark: Mutex<Option<Arc<Mark>>>,
}

impl Event {
    pub(crate) fn record(&self, stream: &Stream) {
        *locked(&self.mark) = Some(stream.mark());
    }

    /// Where it was recorded. The real library follows a pointer here without a check.
    pub(crate) fn mark(&self) -> Option<Arc<Mark>> {
        let mark = locked(&self.mark).clone();
        if mark.is_none() {
            let what = c"an event was used before it was recorded";
            thunk::forbid(what);
        }
        mark
    }

    /// Realtime clock when its work had ended.
    pub(crate) fn time(&self, device: &Device) -> Result<u64, Status> {
        let mark = self.mark().ok_or(Status::FAILED_TO_COLLECT_TIME)?;
        if !mark.has_ended(device)? {
            return Err(Status::BUSY);
        }
        let time = mark.ended_ns.get().copied().filter(|time| *time != 0);
        time.filter(|_| self.collects_time).ok_or(Status::FAILED_TO_COLLECT_TIME)
    }
}

/// All streams and events of a device, by handle. Handles are numbers, and not used again.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: Mutex<HashMap<usize, Arc<Stream>>>,
    events: Mutex<HashMap<usize, Arc<Event>>>,
}

fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Streams {
    pub(crate) fn create(&self) -> usize {
        let handle = new_handle();
        let mut streams = locked(&self.streams);
        // The queue that the fewest streams use.
        let users = |queue: &usize| streams.values().filter(|s| s.queue as usize == *queue).count();
        let queue = (0..QUEUES).min_by_key(users).unwrap_or(0) as u32;
        let stream = Stream {
            queue,
            state: Mutex::default(),
            idle: Condvar::new(),
            affinity: Mutex::new(1 << (queue % 3)),
        };
        streams.insert(handle, Arc::new(stream));
        handle
    }

    pub(crate) fn find(&self, handle: usize) -> Result<Arc<Stream>, Status> {
        locked(&self.streams).get(&handle).cloned().ok_or(Status::INVALID_ARGUMENT)
    }

    /// Waits for its work, and removes it.
    pub(crate) fn destroy(&self, handle: usize, device: &Device) -> Result<(), Status> {
        let stream = self.find(handle)?;
        let ended = stream.synchronize(device);
        locked(&self.streams).remove(&handle);
        ended
    }

    pub(crate) fn create_event(&self, flags: u32) -> Result<usize, Status> {
        let mut events = locked(&self.events);
        if events.len() >= MAX_EVENTS {
            return Err(Status::ALL_RESOURCES_TAKEN);
        }
        let handle = new_handle();
        let event = Event { collects_time: flags & COLLECT_TIME != 0, mark: Mutex::default() };
        events.insert(handle, Arc::new(event));
        Ok(handle)
    }

    pub(crate) fn find_event(&self, handle: usize) -> Result<Arc<Event>, Status> {
        locked(&self.events).get(&handle).cloned().ok_or(Status::INVALID_EVENT_HANDLE)
    }

    pub(crate) fn destroy_event(&self, handle: usize) -> Result<(), Status> {
        locked(&self.events).remove(&handle).map(|_| ()).ok_or(Status::INVALID_EVENT_HANDLE)
    }

    /// Waits for the work of all streams.
    pub(crate) fn synchronize(&self, device: &Device) -> Result<(), Status> {
        let streams: Vec<_> = locked(&self.streams).values().cloned().collect();
        streams.iter().try_for_each(|stream| stream.synchronize(device))
    }

    /// The device is released: waits for all work, and forgets streams and events.
    pub(crate) fn end(&self, device: &Device) {
        let _ = self.synchronize(device);
        locked(&self.streams).clear();
        locked(&self.events).clear();
    }
}
