//! Copies on streams of our own: a stream per direction, and an event for each submission in flight.
//!
//! An event belongs to the slot of the submission's permit, which no other submission in flight has. It moves to
//! another slot only if its submission has ended and the framework has no more events. Only a submission that was
//! started gets a sequence number, so that refused ones leave no gaps.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hl_thunk::Direction;
use hl_thunk::packet::LinDma;
use smallvec::SmallVec;
use synapse::sys::DmaDir;
use synapse::{CallError, Copied, Event, Framework, Status, Stream};

use super::lock;
use super::presence::Presence;
use crate::backend::{SLOTS, Ticket};

/// A stream per direction.
pub(super) const LANES: usize = 3;

#[derive(Debug)]
pub(super) struct Streams {
    lanes: [Mutex<Option<Stream>>; LANES],
    /// By slot.
    events: Vec<Mutex<RecordedEvent>>,
    /// How many events there are.
    made: AtomicUsize,
    last: AtomicU64,
}

#[derive(Debug, Default)]
struct RecordedEvent {
    /// The submission that it was last recorded for.
    sequence: u64,
    event: Option<Event>,
}

impl Streams {
    pub(super) fn new() -> Self {
        Self {
            lanes: Default::default(),
            events: (0..SLOTS).map(|_| Mutex::default()).collect(),
            made: AtomicUsize::new(0),
            last: AtomicU64::new(0),
        }
    }

    /// Starts the moves.
    ///
    /// # Safety
    /// As for [`Backend::submit`](crate::backend::Backend::submit).
    pub(super) unsafe fn submit(
        &self,
        framework: &Arc<Framework>,
        presence: &Presence,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, CallError> {
        let lane = direction as usize;
        // Held until the event is recorded: the event must cover these copies, and numbers must grow within a lane.
        let mut stream = lock(&self.lanes[lane]);
        let stream = match &mut *stream {
            Some(stream) => stream,
            none => none.insert(Stream::new(framework)?),
        };
        let mut recorded = lock(&self.events[slot as usize]);
        let RecordedEvent { sequence, event } = &mut *recorded;
        let event = match event {
            Some(event) => event,
            none => none.insert(self.event(framework, presence)?),
        };
        // SAFETY: the caller's promise.
        let started = unsafe { start(presence, stream, direction, moves) };
        let started = started.and_then(|()| presence.check());
        if let Err(error) = started.and_then(|()| event.record(stream)) {
            // Some of it may run, but the caller assumes that nothing was started. A release waits by itself.
            let _ = presence.check().and_then(|()| stream.synchronize());
            return Err(error);
        }
        *sequence = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Ticket { sequence: *sequence, lane: lane as u32, slot })
    }

    /// Whether a submission has ended. After an error it has ended, too.
    pub(super) fn has_ended(&self, presence: &Presence, ticket: Ticket) -> Result<bool, CallError> {
        let recorded = lock(&self.events[ticket.slot as usize]);
        let ended = match &recorded.event {
            Some(event) if recorded.sequence == ticket.sequence => event.has_ended(),
            // Another submission has this slot or event by now, so the end of this one was seen.
            _ => Ok(true),
        };
        drop(recorded);
        // An invalid event handle: the card was released and acquired again, and the stream is not ours either.
        if ended.is_err_and(|error| error.status() != Some(Status::INVALID_EVENT_HANDLE))
            && presence.check().is_ok()
            && let Some(stream) = &*lock(&self.lanes[ticket.lane as usize])
        {
            // After an error the caller reuses the memory.
            let _ = stream.synchronize();
        }
        ended
    }

    /// An event for a submission: a new one, or, if the framework has none left, one of ours whose submission has
    /// ended. Waits until one has ended; fails if we have none.
    fn event(&self, framework: &Arc<Framework>, presence: &Presence) -> Result<Event, CallError> {
        loop {
            presence.check()?;
            let refused = match Event::new(framework) {
                Ok(event) => {
                    self.made.fetch_add(1, Ordering::Relaxed);
                    return Ok(event);
                }
                Err(error) => error,
            };
            if self.made.load(Ordering::Relaxed) == 0 {
                return Err(refused);
            }
            // A locked one is the caller's own, or another thread is submitting with it or polling it.
            for mut recorded in self.events.iter().filter_map(|recorded| recorded.try_lock().ok()) {
                if let Some(event) = &recorded.event
                    && event.has_ended()?
                    && let Some(event) = recorded.event.take()
                {
                    return Ok(event);
                }
            }
            std::thread::yield_now();
        }
    }

    /// Takes out all streams and events.
    pub(super) fn take(&self) -> (Vec<Stream>, Vec<Event>) {
        let streams = self.lanes.iter().filter_map(|stream| lock(stream).take());
        let events = self.events.iter().filter_map(|recorded| lock(recorded).event.take());
        (streams.collect(), events.collect())
    }
}

/// Hands the moves to the stream.
///
/// # Safety
/// As for [`Backend::submit`].
unsafe fn start(
    presence: &Presence,
    stream: &Stream,
    direction: Direction,
    moves: &[LinDma],
) -> Result<(), CallError> {
    let direction = match direction {
        Direction::HostToDevice => DmaDir::HostToDram,
        Direction::DeviceToHost => DmaDir::DramToHost,
        Direction::DeviceToDevice => DmaDir::DramToDram,
    };
    let mut copies = SmallVec::<[Copied; 4]>::new();
    for dma in moves {
        presence.check()?;
        match *dma {
            LinDma::Copy { src, dst, len } => {
                copies.push(Copied { src: src.0, dst: dst.0, len: len.into() });
            }
            // SAFETY: the caller's promise.
            LinDma::Fill { dst, len, byte } => unsafe { stream.fill(dst.0, byte, len as usize)? },
        }
    }
    presence.check()?;
    // SAFETY: the caller's promise.
    unsafe { stream.copy(&copies, direction) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hl_thunk::DeviceAddr;
    use std::sync::atomic::AtomicU32;
    use synapse::sys::{Functions, Handle};

    unsafe extern "C" fn create(handle: *mut Handle, _: u32, _: u32) -> u32 {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let new = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        // SAFETY: room for the handle.
        unsafe { *handle = std::ptr::without_provenance_mut(new) };
        0
    }

    unsafe extern "C" fn on_handle(_: Handle) -> u32 {
        0
    }

    unsafe extern "C" fn copy(_: Handle, _: u64, _: u64, _: u64, _: DmaDir) -> u32 {
        0
    }

    unsafe extern "C" fn record(_: Handle, _: Handle) -> u32 {
        0
    }

    fn functions() -> Functions {
        Functions {
            synStreamCreateGeneric: Some(create),
            synStreamDestroy: Some(on_handle),
            synStreamSynchronize: Some(on_handle),
            synEventCreate: Some(create),
            synEventDestroy: Some(on_handle),
            synEventRecord: Some(record),
            synMemCopyAsync: Some(copy),
            ..Functions::default()
        }
    }

    fn framework(functions: Functions) -> Arc<Framework> {
        // SAFETY: the functions that are set behave as the library's do.
        Arc::new(unsafe { Framework::with_functions(functions) })
    }

    fn submit(
        streams: &Streams,
        framework: &Arc<Framework>,
        presence: &Presence,
        slot: u32,
    ) -> Result<Ticket, CallError> {
        let moves = [LinDma::Copy { src: DeviceAddr(1), dst: DeviceAddr(2), len: 3 }];
        // SAFETY: nothing is copied.
        unsafe { streams.submit(framework, presence, Direction::HostToDevice, slot, &moves) }
    }

    #[test]
    fn a_release_in_the_middle_of_a_submission_stops_it_and_waits_for_nothing() {
        static PRESENCE: Presence = Presence::new();
        unsafe extern "C" fn copy(_: Handle, _: u64, _: u64, _: u64, _: DmaDir) -> u32 {
            PRESENCE.end();
            0
        }
        unsafe extern "C" fn never(_: Handle) -> u32 {
            panic!("the framework is called while it releases its card");
        }
        unsafe extern "C" fn never_recorded(_: Handle, _: Handle) -> u32 {
            panic!("the framework is called while it releases its card");
        }
        let framework = framework(Functions {
            synMemCopyAsync: Some(copy),
            synEventRecord: Some(never_recorded),
            synStreamSynchronize: Some(never),
            ..functions()
        });
        let streams = Streams::new();
        let _calling = PRESENCE.enter().unwrap();
        let error = submit(&streams, &framework, &PRESENCE, 0).unwrap_err();
        assert_eq!(error.status(), Some(Status::NO_DEVICE_FOUND));
    }

    #[test]
    fn a_submission_whose_event_cannot_be_asked_has_ended_before_that_is_reported() {
        static SYNCHRONIZED: AtomicU32 = AtomicU32::new(0);
        static ANSWER: AtomicU32 = AtomicU32::new(Status::FAIL.0);
        unsafe extern "C" fn query(_: Handle) -> u32 {
            ANSWER.load(Ordering::Relaxed)
        }
        unsafe extern "C" fn synchronize(_: Handle) -> u32 {
            SYNCHRONIZED.fetch_add(1, Ordering::Relaxed);
            0
        }
        let framework = framework(Functions {
            synEventQuery: Some(query),
            synStreamSynchronize: Some(synchronize),
            ..functions()
        });
        let (streams, presence) = (Streams::new(), Presence::new());
        let ticket = submit(&streams, &framework, &presence, 0).unwrap();
        assert!(streams.has_ended(&presence, ticket).is_err());
        assert_eq!(SYNCHRONIZED.load(Ordering::Relaxed), 1, "its memory may be used again");
        ANSWER.store(Status::INVALID_EVENT_HANDLE.0, Ordering::Relaxed);
        assert!(streams.has_ended(&presence, ticket).is_err());
        assert_eq!(SYNCHRONIZED.load(Ordering::Relaxed), 1, "the stream may be another's");
        ANSWER.store(Status::FAIL.0, Ordering::Relaxed);
        presence.end();
        assert!(streams.has_ended(&presence, ticket).is_err());
        assert_eq!(SYNCHRONIZED.load(Ordering::Relaxed), 1, "the card is gone");
    }

    #[test]
    fn without_a_free_event_a_submission_waits_for_one_of_ours() {
        static LEFT: AtomicU32 = AtomicU32::new(0);
        static ASKED: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn create_event(handle: *mut Handle, a: u32, b: u32) -> u32 {
            let take = |left: u32| left.checked_sub(1);
            match LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
                // SAFETY: as for this.
                Ok(_) => unsafe { create(handle, a, b) },
                Err(_) => Status::ALL_RESOURCES_TAKEN.0,
            }
        }
        /// The third query finds the event ended.
        unsafe extern "C" fn query(_: Handle) -> u32 {
            if ASKED.fetch_add(1, Ordering::Relaxed) < 2 { Status::BUSY.0 } else { 0 }
        }
        let framework = framework(Functions {
            synEventCreate: Some(create_event),
            synEventQuery: Some(query),
            ..functions()
        });
        let (streams, presence) = (Streams::new(), Presence::new());
        let submit = |slot| submit(&streams, &framework, &presence, slot);
        let error = submit(0).unwrap_err();
        assert_eq!(error.status(), Some(Status::ALL_RESOURCES_TAKEN), "nothing of ours runs");
        LEFT.store(1, Ordering::Relaxed);
        let first = submit(1).unwrap();
        let second = submit(2).unwrap();
        assert_eq!(ASKED.load(Ordering::Relaxed), 3, "it waited");
        assert!(streams.has_ended(&presence, first).unwrap(), "it has, or its event had not moved");
        assert_eq!((first.sequence, second.sequence), (1, 2));
    }

    #[test]
    fn a_copy_is_not_taken_for_ended_after_others_were_refused() {
        /// How many copies are refused from now on.
        static REFUSED: AtomicU32 = AtomicU32::new(0);
        /// The recordings of events, counted from 1, have ended up to this one.
        static ENDED: AtomicUsize = AtomicUsize::new(0);
        static RECORDINGS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
        unsafe extern "C" fn copy(_: Handle, _: u64, _: u64, _: u64, _: DmaDir) -> u32 {
            let refuse = |left: u32| left.checked_sub(1);
            match REFUSED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, refuse) {
                Ok(_) => Status::ALL_RESOURCES_TAKEN.0,
                Err(_) => 0,
            }
        }
        unsafe extern "C" fn record(event: Handle, _: Handle) -> u32 {
            lock(&RECORDINGS).push(event.addr());
            0
        }
        unsafe extern "C" fn query(event: Handle) -> u32 {
            let at = lock(&RECORDINGS).iter().rposition(|&recorded| recorded == event.addr());
            let ended = at.expect("it was recorded") < ENDED.load(Ordering::Relaxed);
            if ended { 0 } else { Status::BUSY.0 }
        }
        let framework = framework(Functions {
            synMemCopyAsync: Some(copy),
            synEventRecord: Some(record),
            synEventQuery: Some(query),
            ..functions()
        });
        let (streams, presence) = (Streams::new(), Presence::new());
        let submit = |slot| submit(&streams, &framework, &presence, slot);
        let oldest = submit(0).unwrap();
        REFUSED.store(5, Ordering::Relaxed);
        (0..5).for_each(|_| assert!(submit(1).is_err()));
        let others: Vec<Ticket> = (1..SLOTS).map(|slot| submit(slot).unwrap()).collect();
        assert!(!streams.has_ended(&presence, oldest).unwrap(), "it runs");
        let sequences = others.iter().map(|ticket| ticket.sequence);
        assert!(sequences.eq(2..=u64::from(SLOTS)), "refused ones leave no gaps");
        ENDED.store(1, Ordering::Relaxed);
        assert!(streams.has_ended(&presence, oldest).unwrap());
        let next = submit(oldest.slot).unwrap();
        assert!(streams.has_ended(&presence, oldest).unwrap(), "its slot has a later one");
        assert!(!streams.has_ended(&presence, next).unwrap());
    }
}
