//! Chunks over any sequence of jobs, answers and failures: every byte of a job travels once, in a range of the ring that
//! nothing else uses.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::key::Token;
use super::chunks::{Job, LARGE_RING, Local, Part, SMALL_RING, Stage, State};
use super::wire::{Access, MAX_PIECES};
use crate::submit::host_copy::HostPtr;
use crate::{Error, ErrorKind};

const UNIT: usize = 64 << 10;
const MAX_CHUNK: usize = 512 << 10;

#[derive(Clone, Debug)]
enum Step {
    /// A job: the bytes of each piece, and whether it is a put.
    Start(Vec<(usize, bool)>),
    /// Makes as many chunks of waiting parts as fit.
    Launch,
    /// One of the chunks was copied.
    Done(usize),
    /// One could not be copied.
    Fail(usize),
    /// A request named memory that is not shared.
    Split(usize),
    /// One of the jobs was dropped.
    Drop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![4 => 1..UNIT, 2 => UNIT..MAX_CHUNK, 1 => MAX_CHUNK..20 * MAX_CHUNK];
    let piece = (len, prop::bool::weighted(0.8));
    let pieces = prop_oneof![
        prop::collection::vec(piece.clone(), 1..4),
        prop::collection::vec(piece, 60..200),
    ];
    prop_oneof![
        2 => pieces.prop_map(Step::Start),
        3 => Just(Step::Launch),
        6 => any::<usize>().prop_map(Step::Done),
        1 => any::<usize>().prop_map(Step::Fail),
        1 => any::<usize>().prop_map(Step::Split),
        1 => any::<usize>().prop_map(Step::Drop),
    ]
}

/// A piece of a job; its remote address says which.
struct Piece {
    job: u64,
    access: Access,
    len: usize,
    /// What was copied: offsets and lengths.
    copied: Vec<(u64, usize)>,
}

/// Added to the remote address of a piece, this is its local address.
const HERE: u64 = 1 << 52;

fn remote(piece: usize) -> u64 {
    (piece as u64 + 1) << 32
}

struct Relay {
    state: State,
    ring_len: usize,
    pieces: Vec<Piece>,
}

fn failure() -> Error {
    Error::new(ErrorKind::ChannelFailed, "testing", "a chunk that fails", "")
}

impl Relay {
    fn step(&mut self, step: Step) {
        match step {
            Step::Start(pieces) => self.start(&pieces),
            Step::Launch => self.launch(),
            Step::Done(pick) => {
                if let Some(number) = self.pick(pick) {
                    self.done(number);
                }
            }
            Step::Fail(pick) => {
                if let Some(number) = self.pick(pick) {
                    self.fail(number);
                }
            }
            Step::Split(pick) => {
                if let Some(number) = self.pick(pick) {
                    let parts = self.parts(number);
                    self.state.split_chunk(number);
                    self.wait_again(&parts);
                }
            }
            Step::Drop(pick) => {
                let mut jobs: Vec<u64> = self.state.jobs.keys().copied().collect();
                jobs.sort_unstable();
                if !jobs.is_empty() {
                    self.state.jobs.remove(&jobs[pick % jobs.len()]);
                    self.state.forget_failed();
                }
            }
        }
        self.check();
    }

    fn start(&mut self, pieces: &[(usize, bool)]) {
        let state = &mut self.state;
        state.last += 1;
        let job = state.last;
        let left = pieces.iter().map(|(len, _)| len).sum();
        state.jobs.insert(job, Job { left, failure: None });
        state.waiting_bytes += left;
        for &(len, is_put) in pieces {
            let access = if is_put { Access::Write } else { Access::Read };
            let remote = remote(self.pieces.len());
            let here = std::ptr::without_provenance_mut((HERE + remote) as usize);
            let (token, local) = (Token([7; 8]), Local::Host(HostPtr(here)));
            state.waiting.push_back(Part { job, access, token, remote, local, len, alone: false });
            self.pieces.push(Piece { job, access, len, copied: Vec::new() });
        }
    }

    fn launch(&mut self) {
        loop {
            let wants_large = self.ring_len < LARGE_RING && self.state.wants_large_ring();
            assert_eq!(
                self.state.wants_large_ring(),
                self.state.may_grow && self.state.waiting_bytes > SMALL_RING / 2
            );
            if wants_large && self.state.used == 0 {
                self.ring_len = LARGE_RING;
                continue;
            }
            let first = self.state.waiting.front().cloned();
            let Some(number) = self.state.next_chunk(self.ring_len) else {
                let is_full = self.state.used != 0;
                assert!(first.is_none() || is_full, "nothing is in the way of the first part");
                return;
            };
            assert!(!wants_large, "the small ring is not drained");
            let (first, chunk) = (first.expect("a part waits"), self.chunk(number));
            assert_eq!(first.remote, chunk.parts[0].0.remote, "in order");
            assert!(matches!(chunk.stage, Stage::Local(None)));
            self.check();
        }
    }

    fn chunk(&self, number: usize) -> &super::chunks::Chunk {
        self.state.chunks[number].as_ref().expect("a chunk")
    }

    /// A chunk that is in flight.
    fn pick(&self, pick: usize) -> Option<usize> {
        let chunks = self.state.chunks.iter().enumerate();
        let numbers: Vec<usize> =
            chunks.filter_map(|(at, it)| it.is_some().then_some(at)).collect();
        (!numbers.is_empty()).then(|| numbers[pick % numbers.len()])
    }

    fn parts(&self, number: usize) -> Vec<Part> {
        self.chunk(number).parts.iter().map(|(part, _)| part.clone()).collect()
    }

    fn done(&mut self, number: usize) {
        let before = self.parts(number);
        self.state.keep_live(number);
        let parts = self.parts(number);
        let is_live = |part: &&Part| self.has_no_failure(part.job);
        assert_eq!(parts.len(), before.iter().filter(is_live).count(), "none of a job that failed");
        self.state.end_chunk(number, Ok(()));
        for part in parts {
            let piece = &mut self.pieces[(part.remote >> 32) as usize - 1];
            piece.copied.push((part.remote & 0xffff_ffff, part.len));
        }
    }

    fn fail(&mut self, number: usize) {
        let parts = self.parts(number);
        let is_over = parts.iter().all(|part| part.alone);
        self.state.fail_chunk(number, failure());
        if is_over {
            assert!(parts.iter().all(|part| !self.has_no_failure(part.job)), "failed for good");
        } else {
            self.wait_again(&parts);
        }
    }

    /// The live parts of a chunk are first in the queue again, each for a chunk of its own.
    fn wait_again(&self, parts: &[Part]) {
        let live = parts.iter().filter(|part| self.has_no_failure(part.job));
        for (part, waits) in live.zip(&self.state.waiting) {
            assert_eq!((part.remote, part.len, waits.alone), (waits.remote, waits.len, true));
        }
    }

    fn has_no_failure(&self, job: u64) -> bool {
        self.state.jobs.get(&job).is_some_and(|job| job.failure.is_none())
    }

    /// The invariants.
    fn check(&self) {
        let state = &self.state;
        let mut left = BTreeMap::new();
        for part in &state.waiting {
            assert!(self.has_no_failure(part.job), "waits for nobody");
            *left.entry(part.job).or_insert(0) += part.len;
        }
        assert_eq!(state.waiting_bytes, left.values().sum::<usize>());
        let mut used = 0;
        for chunk in state.chunks.iter().flatten() {
            assert_eq!(used & chunk.units, 0, "two chunks have the same range");
            used |= chunk.units;
            let start = chunk.units.trailing_zeros() as usize * UNIT;
            let end = start + chunk.units.count_ones() as usize * UNIT;
            assert_eq!(chunk.units >> (start / UNIT), u128::MAX >> (128 - (end - start) / UNIT));
            assert!(end <= self.ring_len && chunk.parts.len() <= MAX_PIECES);
            let (mut free, mut bytes) = (start, 0);
            for (part, at) in &chunk.parts {
                let at = *at as usize;
                assert!(part.len > 0 && at >= free && at.is_multiple_of(64), "parts overlap");
                assert_eq!(part.access, chunk.access);
                assert!(!part.alone || chunk.parts.len() == 1, "not alone");
                (free, bytes) = (at + part.len, bytes + part.len);
                *left.entry(part.job).or_insert(0) += part.len;
            }
            assert!(free <= end && end - free < UNIT, "more or less than it needs");
            assert!(bytes <= MAX_CHUNK);
        }
        assert_eq!(state.used, used);
        for (job, Job { left: counted, .. }) in &state.jobs {
            assert_eq!(*counted, left.get(job).copied().unwrap_or_default());
        }
        let in_chunks = state.chunks.iter().flatten().flat_map(|chunk| &chunk.parts);
        for part in state.waiting.iter().chain(in_chunks.map(|(part, _)| part)) {
            let piece = &self.pieces[(part.remote >> 32) as usize - 1];
            assert_eq!((part.job, part.access), (piece.job, piece.access));
            let Local::Host(HostPtr(here)) = part.local else { panic!("host memory") };
            assert_eq!(here.addr() as u64, HERE + part.remote);
        }
    }

    /// Carries on until nothing is left. Every byte of each job that did not fail must have been copied once.
    fn finish(mut self) {
        while !self.state.waiting.is_empty() || self.pick(0).is_some() {
            self.launch();
            while let Some(number) = self.pick(0) {
                self.done(number);
                self.check();
            }
        }
        let jobs = &self.state.jobs;
        let succeeded = |job: u64| jobs.get(&job).is_some_and(|job| job.failure.is_none());
        for piece in self.pieces.iter_mut().filter(|piece| succeeded(piece.job)) {
            piece.copied.sort_unstable();
            let end = piece
                .copied
                .iter()
                .try_fold(0, |end, &(offset, len)| (offset == end).then_some(end + len as u64));
            assert_eq!(end, Some(piece.len as u64), "once, and nothing is left out");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_byte_travels_once_in_a_range_of_its_own(
        steps in prop::collection::vec(step(), 1..40),
        may_grow in any::<bool>(),
    ) {
        let mut state = State::new(None);
        state.may_grow = may_grow;
        let mut relay = Relay { state, ring_len: SMALL_RING, pieces: Vec::new() };
        steps.into_iter().for_each(|step| relay.step(step));
        relay.finish();
    }
}

#[test]
fn a_relay_that_closes_fails_what_is_left_and_forgets_what_waits() {
    let mut relay = Relay { state: State::new(None), ring_len: SMALL_RING, pieces: Vec::new() };
    relay.start(&[(10, true)]);
    relay.launch();
    relay.done(0);
    relay.start(&[(MAX_CHUNK, true); 3]);
    relay.launch();
    relay.start(&[(10, false)]);
    relay.state.close(failure());
    assert!(relay.has_no_failure(1), "it had ended");
    for job in [2, 3] {
        let job = &relay.state.jobs[&job];
        assert_eq!((job.left, job.failure.is_some()), (0, true));
    }
    assert!(relay.state.waiting.is_empty() && relay.state.closed.is_some());
    assert!(relay.pick(0).is_none());
    relay.check();
}

/// About eight chunks of the waiting bytes: both sides are busy soon, with few requests.
#[test]
fn large_pieces_are_cut_and_small_ones_put_together() {
    const KIB: usize = 1 << 10;
    for (large_ring, pieces, expected) in [
        (true, vec![1 << 20], (1, 128 * KIB)),
        (true, vec![4 << 20], (1, 512 * KIB)),
        (true, vec![64 << 20], (1, 512 * KIB)),
        (true, vec![65 * KIB], (1, 64 * KIB)),
        (true, vec![64 * KIB], (1, 64 * KIB)),
        (true, vec![100; 3], (3, 300)),
        (true, vec![45 * KIB; 64], (8, 360 * KIB)),
        (true, vec![4 * KIB; 1000], (64, 256 * KIB)),
        (false, vec![45 * KIB; 64], (2, 90 * KIB)),
        (false, vec![64 << 20], (1, 512 * KIB)),
        (true, vec![100, 1 << 20], (1, 100)),
    ] {
        let ring_len = if large_ring { LARGE_RING } else { SMALL_RING };
        let mut relay = Relay { state: State::new(None), ring_len, pieces: Vec::new() };
        relay.state.may_grow = large_ring;
        relay.start(&pieces.iter().map(|len| (*len, true)).collect::<Vec<_>>());
        let number = relay.state.next_chunk(relay.ring_len).expect("the ring is free");
        let parts = relay.parts(number);
        let bytes: usize = parts.iter().map(|part| part.len).sum();
        assert_eq!((parts.len(), bytes), expected, "of {} pieces of {}", pieces.len(), pieces[0]);
    }
    // Reads and writes are not asked for in one request.
    let mut relay = Relay { state: State::new(None), ring_len: LARGE_RING, pieces: Vec::new() };
    relay.start(&[(100, true), (100, true), (100, false), (100, true)]);
    relay.launch();
    let parts: Vec<usize> = (0..3).map(|number| relay.parts(number).len()).collect();
    assert_eq!(parts, [2, 1, 1]);
}
