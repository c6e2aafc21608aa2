//! The waiting and running work of an initiator: jobs, their parts, and the chunks of the ring that parts share. No socket
//! here; [`transfer`](super::transfer) asks the owner.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use smallvec::SmallVec;

use super::super::key::Token;
use super::ring::Ring;
use super::transfer::{RELAYING, RelayPiece};
use super::wire::{Access, MAX_PIECES, MAX_REQUESTS};
use crate::submit::host_copy::HostPtr;
use crate::{
    Device, DeviceAddr, Error, ErrorKind, Segment, Side, SubmitError, Transfer, USER_SPACE_END,
};

/// The ring is allocated in units of this.
const UNIT: usize = 64 << 10;
/// Bytes of the first ring, and of the one that replaces it when many bytes wait.
pub(super) const SMALL_RING: usize = 8 * UNIT;
pub(super) const LARGE_RING: usize = 128 * UNIT;
/// Most bytes of a chunk: many chunks have to be in flight to hide the latencies of two cards.
const MAX_CHUNK: usize = 512 << 10;
/// The pieces of a chunk start at multiples of this.
const ALIGN: usize = 64;
/// A piece, or what is left of one, that belongs to no chunk yet.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) job: u64,
    pub(super) access: Access,
    pub(super) token: Token,
    pub(super) remote: u64,
    pub(super) local: Local,
    pub(super) len: usize,
    /// It failed before, perhaps because of other parts of its chunk: tried once more, in a chunk of its own.
    pub(super) alone: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Local {
    Host(HostPtr),
    Card(DeviceAddr, Arc<Device>),
}

impl Local {
    /// The CPU copies host memory: an address that cannot be host memory, such as device memory that was freed, is refused.
    pub(super) fn new(piece: &RelayPiece) -> Result<Local, Error> {
        let invalid = |addr: u64| {
            let detail = format!("{} bytes at {addr:#x} are not memory of this process", piece.len);
            let remedy = "this may be device memory that was freed";
            Error::new(ErrorKind::InvalidParams, RELAYING, detail, remedy)
        };
        match (piece.local.outdated(), &piece.device) {
            (Side::Device(addr), Some(device)) => Ok(Local::Card(addr, Arc::clone(device))),
            (Side::Host(ptr), _) => {
                let end = (ptr as u64).saturating_add(piece.len as u64);
                if end > USER_SPACE_END {
                    Err(invalid(ptr as u64))
                } else {
                    Ok(Local::Host(HostPtr(ptr)))
                }
            }
            (Side::Device(addr), None) => Err(invalid(addr.0)),
            (Side::Found(_), _) => Err(invalid(0)), // never what `outdated` returns
        }
    }

    fn add(&self, bytes: usize) -> Local {
        match self {
            Local::Host(ptr) => Local::Host(ptr.add(bytes)),
            Local::Card(addr, device) => {
                Local::Card(DeviceAddr(addr.0 + bytes as u64), Arc::clone(device))
            }
        }
    }
}

/// Parts that share a range of the ring and a request.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Units of the ring, as a bitmap.
    pub(super) units: u128,
    pub(super) access: Access,
    /// Each with its offset in the ring.
    pub(super) parts: SmallVec<[(Part, u32); 1]>,
    pub(super) stage: Stage,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Copies between the ring and memory of this process. `None`: the card was too busy so far.
    Local(Option<Box<Transfer>>),
    /// Waits for the owner's answer.
    Remote,
}

#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) left: usize,
    pub(super) failure: Option<Error>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) ring: Option<Arc<Ring>>,
    /// A larger ring that was sent to the owner. No copy is requested before its answer.
    pub(super) new_ring: Option<Arc<Ring>>,
    /// Units of the ring that are in use.
    pub(super) used: u128,
    pub(super) waiting: VecDeque<Part>,
    pub(super) waiting_bytes: usize,
    /// At the number of the request minus one.
    pub(super) chunks: [Option<Chunk>; MAX_REQUESTS],
    pub(super) jobs: HashMap<u64, Job>,
    pub(super) last: u64,
    /// Messages that the socket did not accept yet.
    pub(super) outbox: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    pub(super) closed: Option<Error>,
    /// Whether to try a larger ring. `false` after making or sending one failed, or the owner could not take it.
    pub(super) may_grow: bool,
}

/// Starts copies between the ring and memory of this process. Host memory is copied at once; `None`: no card is needed.
///
/// # Safety
/// The memory must be valid for the access until the transfer has ended.
pub(super) unsafe fn start_local<'a>(
    access: Access,
    parts: impl Iterator<Item = &'a (Part, u32)>,
    ring: &Arc<Ring>,
) -> Result<Option<Transfer>, SubmitError> {
    let mut segments: SmallVec<[Segment; 1]> = SmallVec::new();
    let mut card = None;
    let mut by_cpu: SmallVec<[(HostPtr, *mut u8, usize); 1]> = SmallVec::new();
    for (part, at) in parts {
        let Some(here) = ring.at(*at, part.len as u32) else { continue };
        match &part.local {
            Local::Host(ptr) => by_cpu.push((*ptr, here, part.len)),
            Local::Card(addr, device) => {
                let (ring_side, card_side) = (Side::Host(here), Side::Device(*addr));
                let (dst, src) = match access {
                    Access::Write => (ring_side, card_side),
                    Access::Read => (card_side, ring_side),
                };
                let host_region = Some(Arc::clone(ring.region()));
                segments.push(Segment { dst, src, len: part.len, host_region });
                card.get_or_insert(device);
            }
        }
    }
    // The card first: it may be too busy, and then all of this is tried again later.
    // SAFETY: the caller's promise; the ring is kept by the state.
    let transfer = card.map(|card| unsafe { card.copy(&segments) }).transpose()?;
    for (memory, here, len) in by_cpu {
        // SAFETY: the caller's promise; a range of the ring that this chunk has.
        unsafe {
            match access {
                Access::Write => memory.0.copy_to_nonoverlapping(here, len),
                Access::Read => here.copy_to_nonoverlapping(memory.0, len),
            }
        }
    }
    Ok(transfer)
}

impl State {
    pub(super) fn new(ring: Option<Arc<Ring>>) -> Self {
        Self {
            ring,
            new_ring: None,
            used: 0,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            chunks: [const { None }; MAX_REQUESTS],
            jobs: HashMap::new(),
            last: 0,
            outbox: VecDeque::new(),
            closed: None,
            may_grow: true,
        }
    }

    pub(super) fn wants_large_ring(&self) -> bool {
        self.may_grow && self.waiting_bytes > SMALL_RING / 2
    }

    /// Makes the next chunk of waiting parts, with a range of the ring; returns its number, or `None` if there is no space.
    pub(super) fn next_chunk(&mut self, ring_len: usize) -> Option<usize> {
        // The small ring is drained first, so that the larger one can replace it.
        if ring_len < LARGE_RING && self.wants_large_ring() {
            return None;
        }
        let number = self.chunks.iter().position(Option::is_none)?;
        let first = self.waiting.front()?;
        let access = first.access;
        // Cut large pieces and join small ones, so that the waiting bytes make about eight chunks: both sides are busy soon,
        // and few requests are needed.
        let most = if first.len > UNIT {
            (first.len / 8).next_multiple_of(UNIT).clamp(UNIT, MAX_CHUNK)
        } else {
            let eighth = (self.waiting_bytes / 8).next_multiple_of(UNIT);
            eighth.clamp(2 * UNIT, MAX_CHUNK.min(ring_len / 4))
        };
        let most_pieces = (self.waiting.len() / 8).clamp(8, MAX_PIECES);
        let mut parts: SmallVec<[(Part, u32); 1]> = SmallVec::new();
        let mut at = 0;
        for part in self.waiting.iter().take(most_pieces) {
            let fits = part.len <= most - at && part.access == access && !part.alone;
            if !parts.is_empty() && !fits {
                break;
            }
            let len = part.len.min(most);
            parts.push((Part { len, ..part.clone() }, at as u32));
            at = (at + len).next_multiple_of(ALIGN).min(most);
            if len < part.len || part.alone {
                break;
            }
        }
        let end = parts.last().map_or(0, |(part, at)| *at as usize + part.len);
        let units = self.take_units(end.div_ceil(UNIT), ring_len / UNIT)?;
        let start = units.trailing_zeros() as usize * UNIT;
        for (part, at) in &mut parts {
            *at += start as u32;
            self.waiting_bytes -= part.len;
            match self.waiting.front_mut() {
                Some(front) if front.len > part.len => {
                    front.remote += part.len as u64;
                    front.local = front.local.add(part.len);
                    front.len -= part.len;
                }
                _ => drop(self.waiting.pop_front()),
            }
        }
        self.chunks[number] = Some(Chunk { units, access, parts, stage: Stage::Local(None) });
        Some(number)
    }

    /// Allocates consecutive units of the ring.
    fn take_units(&mut self, count: usize, of: usize) -> Option<u128> {
        let run = u128::MAX >> (128 - count.clamp(1, 128));
        let units = (0..=of.checked_sub(count)?).map(|at| run << at);
        let units = units.into_iter().find(|units| self.used & units == 0)?;
        self.used |= units;
        Some(units)
    }

    /// A chunk has ended.
    pub(super) fn end_chunk(&mut self, number: usize, result: Result<(), Error>) {
        let Some(chunk) = self.chunks[number].take() else { return };
        self.used &= !chunk.units;
        for (part, _) in chunk.parts {
            if let Some(job) = self.jobs.get_mut(&part.job) {
                job.left -= part.len;
                if let Err(error) = &result {
                    job.failure.get_or_insert_with(|| error.clone());
                }
            }
        }
        if result.is_err() {
            self.forget_failed();
        }
    }

    /// The copy of a chunk has failed. Its parts are tried once more, each by itself, so that a bad part does not fail the
    /// others. Not if all of them were alone or are on a lost card, or if the connection has ended: then they fail.
    pub(super) fn fail_chunk(&mut self, number: usize, error: Error) {
        let is_over = |(part, _): &(Part, u32)| {
            part.alone || matches!(&part.local, Local::Card(_, device) if device.is_surely_lost())
        };
        let chunk = self.chunks[number].as_ref();
        match chunk.is_some_and(|chunk| chunk.parts.iter().all(is_over)) || self.closed.is_some() {
            true => self.end_chunk(number, Err(error)),
            false => self.split_chunk(number),
        }
    }

    /// Puts the parts of a chunk back at the front of the queue, each for a chunk of its own.
    pub(super) fn split_chunk(&mut self, number: usize) {
        let Some(chunk) = self.chunks[number].take() else { return };
        self.used &= !chunk.units;
        for (part, _) in chunk.parts.into_iter().rev() {
            self.waiting_bytes += part.len;
            self.waiting.push_front(Part { alone: true, ..part });
        }
        self.forget_failed();
    }

    /// Removes the parts of failed and dropped jobs from a chunk. A put must not request them: the ring may not have been
    /// filled for them, and the owner would write old bytes to its memory.
    pub(super) fn keep_live(&mut self, number: usize) {
        let Self { chunks, jobs, .. } = self;
        let Some(chunk) = &mut chunks[number] else { return };
        chunk.parts.retain(|(part, _)| match jobs.get_mut(&part.job) {
            Some(job) if job.failure.is_none() => true,
            Some(job) => {
                job.left -= part.len;
                false
            }
            None => false,
        });
    }

    /// Removes waiting parts of jobs that have failed or were dropped.
    pub(super) fn forget_failed(&mut self) {
        let Self { waiting, jobs, waiting_bytes, .. } = self;
        waiting.retain(|part| {
            let stays = jobs.get(&part.job).is_some_and(|job| job.failure.is_none());
            if !stays {
                *waiting_bytes -= part.len;
                if let Some(job) = jobs.get_mut(&part.job) {
                    job.left -= part.len;
                }
            }
            stays
        });
    }

    /// The connection has ended: unfinished jobs fail. Copies that a card has started run to their end.
    pub(super) fn close(&mut self, error: Error) {
        for job in self.jobs.values_mut().filter(|job| job.left > 0) {
            job.failure.get_or_insert_with(|| error.clone());
        }
        self.outbox.clear();
        self.new_ring = None;
        self.forget_failed();
        for number in 0..MAX_REQUESTS {
            let is_over = |chunk: &Chunk| !matches!(chunk.stage, Stage::Local(Some(_)));
            if self.chunks[number].as_ref().is_some_and(is_over) {
                self.end_chunk(number, Err(error.clone()));
            }
        }
        // Count again: a thread may have panicked after it took a chunk out and before it counted its parts. Their jobs
        // must not wait for ever.
        for (number, job) in &mut self.jobs {
            let parts = self.chunks.iter().flatten().flat_map(|chunk| &chunk.parts);
            let parts = parts.map(|(part, _)| part).filter(|part| part.job == *number);
            job.left = parts.map(|part| part.len).sum();
        }
        self.closed = Some(error);
    }
}
