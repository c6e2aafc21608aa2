//! Runs the cases of a plan: as one of two processes, as both sides at once, or as one of many processes, with a
//! session for each of the others.
//!
//! A case: fill the source, poison the destination, move the message, compare *both* whole allocations. The two
//! processes meet at barriers on the control channel between these steps. Wrong bytes are a verdict, and the run goes
//! on; a failing UCX call ends the run, because the sides are then out of step.

use crate::buffer::Buffer;
use crate::client::Client;
use crate::control::Control;
use crate::matrix::{Case, Op, Plan, Sabotage};
use crate::measure::median;
use crate::message::{Message, ONCE, TIMED};
use crate::ops::{Activity, Side};
use crate::pattern::Layout;
use crate::report::{Timing, Verdict};
use crate::ucp::{Endpoint, Memory, PackedRegion, Region, RemoteKey};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

/// Messages outstanding when bandwidth is measured; fewer for large ones.
const WINDOW: u32 = 8;
/// Tag of the one-byte reply that ends a timed message; no case uses it.
const REPLY: u64 = u64::MAX;

/// A connected client, ready to run cases.
pub struct Session<'a> {
    client: &'a Client,
    plan: &'a Plan,
    endpoint: Endpoint,
    /// `None`: we are both sides.
    peer: Option<(Control, u8)>,
    reply: Arc<Region>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
enum Role {
    Source,
    Destination,
}

/// The buffers for one message size, here and (as keys) on the other side.
pub(crate) struct Buffers {
    here: BTreeMap<(Role, Memory), Buffer>,
    there: BTreeMap<(Role, Memory), RemoteKey>,
}

impl Buffers {
    /// Makes UCX forget our memory.
    ///
    /// # Safety
    /// No pending operation of UCX may still access this memory.
    pub(crate) unsafe fn unmap(&self) {
        // SAFETY: the caller's promise.
        self.here.values().for_each(|buffer| unsafe { buffer.unmap() });
    }

    /// Drops the keys, and returns the memory: on both sides keys must be released before the memory they refer to.
    pub(crate) fn without_keys(self) -> impl Sized {
        self.here
    }
}

/// Memory for messages of one size: an allocation for each side of a message and each kind of memory, with
/// a part for every session that uses it.
pub(crate) struct Arena {
    size: usize,
    staging: Arc<Region>,
    regions: BTreeMap<(Role, Memory), Arc<Region>>,
}

impl Arena {
    /// Allocates for the sides that are ours according to `plays`. A process that may not have a card (`cards`) takes
    /// host memory where the plan says Gaudi memory.
    pub(crate) fn new(
        client: &Client,
        plan: &Plan,
        size: usize,
        parts: usize,
        plays: impl Fn(u8) -> bool,
        cards: bool,
    ) -> Result<Arena> {
        let length = Layout::allocation(size);
        let staging = client.region(Memory::Host, length)?;
        let ends =
            |pair: &crate::matrix::Pair| [(Role::Source, pair.src), (Role::Destination, pair.dst)];
        let needed: BTreeSet<(Role, Memory)> = (plan.pairs.iter().flat_map(ends))
            .filter(|(role, _)| !plan.one_way || plays(u8::from(*role != Role::Source)))
            .collect();
        let mut regions = BTreeMap::new();
        for (role, memory) in needed {
            client.step(format_args!("allocating {memory} memory for {size} bytes"));
            let from = if cards || memory != Memory::Gaudi { memory } else { Memory::Host };
            regions.insert((role, memory), client.region(from, parts * length)?);
        }
        Ok(Arena { size, staging, regions })
    }
}

/// One of several messages that are moved at once, with its session.
pub(crate) struct Part<'p, 's> {
    pub(crate) session: &'p mut Session<'s>,
    pub(crate) buffers: &'p Buffers,
    pub(crate) case: Case,
}

/// Moves the messages of several sessions at once and checks each; the other side of every session does the same.
/// Returns the verdicts in the order of the sessions.
///
/// Processes that have sessions with several others must list them in the same order (that of the pairs). Otherwise
/// they deadlock, each waiting for the next.
pub(crate) fn cases(client: &Client, parts: &mut [Part<'_, '_>]) -> Result<Vec<Verdict>> {
    let mut wrong = Vec::new();
    for Part { session, buffers, case } in parts.iter() {
        wrong.push(session.prepare(*case, buffers, ONCE)?);
    }
    transfer(client, parts)?;
    let verdict = |(Part { session, buffers, case }, mut wrong): (&Part<'_, '_>, Vec<String>)| {
        wrong.extend(session.compare(*case, buffers, ONCE)?);
        Ok(Verdict::new(case.id, &wrong, None))
    };
    parts.iter().zip(wrong).map(verdict).collect()
}

/// Moves the messages: starts each side when its case asks for it.
fn transfer(client: &Client, parts: &mut [Part<'_, '_>]) -> Result<()> {
    let meet = |parts: &mut [Part<'_, '_>], what: &str| {
        parts.iter_mut().try_for_each(|part| {
            part.session.meet(format_args!("{}, {what}", part.case), part.case.id)
        })
    };
    let mut activities = Vec::new();
    meet(parts, "prepared")?;
    for part in parts.iter() {
        activities.extend(part.session.start_in_turn(part.case, part.buffers, true)?);
    }
    meet(parts, "first side started")?;
    for part in parts.iter() {
        activities.extend(part.session.start_in_turn(part.case, part.buffers, false)?);
    }
    if let [first, ..] = parts {
        client.step(format_args!("{}: waiting for completion", first.case));
    }
    client.drive(&mut activities)?;
    meet(parts, "done here")
}

impl<'a> Session<'a> {
    /// Both sides in this process: the worker talks to itself.
    pub fn loopback(client: &'a Client, plan: &'a Plan) -> Result<Session<'a>> {
        Session::new(client, plan, &client.worker().address()?, None)
    }

    /// One side of a pair; the other side is at the end of the control channel.
    pub fn pair(
        client: &'a Client,
        plan: &'a Plan,
        rank: u8,
        mut control: Control,
    ) -> Result<Session<'a>> {
        client.step("exchanging worker addresses");
        let theirs = control.exchange(client.worker(), &client.worker().address()?)?;
        Session::new(client, plan, &theirs, Some((control, rank)))
    }

    fn new(
        client: &'a Client,
        plan: &'a Plan,
        address: &[u8],
        peer: Option<(Control, u8)>,
    ) -> Result<Session<'a>> {
        // SAFETY: the address of our own worker, or that of the other process, which runs the same UCX.
        let endpoint = unsafe { client.connect(address, plan.peer_errors) }?;
        Ok(Session { client, plan, endpoint, peer, reply: client.region(Memory::Host, 1)? })
    }

    pub fn version(&self) -> &str {
        self.client.ucx().version()
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Runs all cases; `verdict` is called with each.
    pub fn run(&mut self, mut verdict: impl FnMut(Case, Verdict) -> Result<()>) -> Result<()> {
        for (size, cases) in self.plan.groups() {
            let buffers = self.allocate(size)?;
            for case in cases {
                // In a loopback both directions are the same.
                let twice = self.peer.is_none() && case.from == 1;
                if twice || !case.runs_on(self.version()) {
                    continue;
                }
                let outcome = self.case(case, &buffers).with_context(|| format!("{case}"))?;
                verdict(case, outcome)?;
            }
            // Drop the keys on both sides first, then the memory they refer to.
            let memory = buffers.without_keys();
            self.meet("freeing buffers", u64::MAX - 1)?;
            drop(memory);
        }
        Ok(())
    }

    /// Runs all cases; the first wrong byte is an error, whose message begins with `when`.
    pub fn run_strictly(&mut self, when: &str) -> Result<()> {
        self.run(|case, verdict| match verdict.error {
            Some(error) => bail!("{when}{case}: {error}"),
            None => Ok(()),
        })
    }

    /// Switches to the cases of another plan; the other side does the same.
    pub(crate) fn follow(&mut self, plan: &'a Plan) {
        self.plan = plan;
    }

    /// Whether the flag is set on either side.
    pub(crate) fn either(&mut self, here: bool) -> Result<bool> {
        let Some((control, _)) = &mut self.peer else { return Ok(here) };
        Ok(control.exchange(self.client.worker(), &here)? || here)
    }

    /// Closes the endpoint with a flush; returns the control channel.
    pub fn close(mut self) -> Result<Option<Control>> {
        self.meet("closing", u64::MAX)?;
        self.client.step("ucp_ep_close");
        self.client.finish(self.endpoint.close(false)?)?;
        self.meet("closed", u64::MAX - 2)?;
        Ok(self.peer.map(|(control, _)| control))
    }

    /// Closes the endpoint after it has failed; returns the control channel.
    pub(crate) fn abandon(self) -> Result<Option<Control>> {
        // UCX closes by force only if it handles errors of peers.
        let by_force = self.plan.peer_errors;
        self.client.step("ucp_ep_close of what has failed");
        let closing = self.endpoint.close(by_force);
        let closed = closing.and_then(|closing| self.client.worker().finish(closing));
        // Without force, UCX flushes the endpoint, which reports the failure again, at once or later. UCX closes it all the same.
        if by_force {
            closed?;
        }
        Ok(self.peer.map(|(control, _)| control))
    }

    pub(crate) fn plays(&self, rank: u8) -> bool {
        self.peer.as_ref().is_none_or(|(_, mine)| *mine == rank)
    }

    pub(crate) fn meet(&mut self, what: impl Display, step: u64) -> Result<()> {
        if let Some((control, _)) = &mut self.peer {
            self.client.step(format_args!("{what}: waiting for the other process"));
            control.barrier(self.client.worker(), step)?;
        }
        Ok(())
    }

    /// Memory for messages of one size, here and on the other side.
    pub(crate) fn allocate(&mut self, size: usize) -> Result<Buffers> {
        let arena = Arena::new(self.client, self.plan, size, 1, |rank| self.plays(rank), true)?;
        self.part_of(&arena, 0)
    }

    /// A part of the memory that several sessions share; the other side does the same.
    pub(crate) fn part_of(&mut self, arena: &Arena, part: usize) -> Result<Buffers> {
        let length = Layout::allocation(arena.size);
        let cut = |(end, region): (&(Role, Memory), &Arc<Region>)| {
            let (region, at) = (region.clone(), part * length);
            Ok((*end, Buffer::part(self.client, region, at, length, &arena.staging)?))
        };
        let here: BTreeMap<_, _> = arena.regions.iter().map(cut).collect::<Result<_>>()?;
        let mut there = BTreeMap::new();
        if self.plan.ops.iter().any(|op| op.one_sided()) {
            let pack = |(end, buffer): (&(Role, Memory), &Buffer)| Ok((*end, buffer.pack()?));
            let mut packed: Vec<((Role, Memory), PackedRegion)> =
                here.iter().map(pack).collect::<Result<_>>()?;
            if let Some((control, _)) = &mut self.peer {
                self.client.step("exchanging remote keys");
                packed = control.exchange(self.client.worker(), &packed)?;
            }
            for (end, packed) in packed {
                // SAFETY: the other side keeps its buffers until both meet after the last case.
                there.insert(end, unsafe { self.endpoint.unpack(&packed) }?);
            }
        }
        Ok(Buffers { here, there })
    }

    /// Those buffers of a case that are ours.
    fn ours<'b>(&self, case: Case, buffers: &'b Buffers) -> [Option<&'b Buffer>; 2] {
        [
            self.plays(case.from).then(|| &buffers.here[&(Role::Source, case.pair.src)]),
            self.plays(case.to()).then(|| &buffers.here[&(Role::Destination, case.pair.dst)]),
        ]
    }

    pub(crate) fn case(&mut self, case: Case, buffers: &Buffers) -> Result<Verdict> {
        let mut wrong = self.prepare(case, buffers, ONCE)?;
        let client = self.client;
        transfer(client, &mut [Part { session: self, buffers, case }])?;
        wrong.extend(self.compare(case, buffers, ONCE)?);
        let mut timing = None;
        if self.plan.iters > Some(0) && Op::PLAIN.contains(&case.op) {
            self.prepare(case, buffers, TIMED)?;
            timing = self.measure(case, buffers)?;
            let after = self.compare(case, buffers, TIMED)?.into_iter();
            wrong.extend(after.map(|wrong| format!("after the timed messages: {wrong}")));
        }
        Ok(Verdict::new(case.id, &wrong, timing))
    }

    /// Writes our buffers of a case. Returns mistakes found so far: there are none, unless the plan asks for an early
    /// comparison.
    fn prepare(&self, case: Case, buffers: &Buffers, round: u64) -> Result<Vec<String>> {
        let message = Message::new(case, self.plan.seed, round);
        let [source, destination] = self.ours(case, buffers);
        source.map_or(Ok(()), |source| message.fill_source(self.client, source))?;
        destination.map_or(Ok(()), |it| message.poison_destination(self.client, it))?;
        if self.plan.sabotage == Some(Sabotage::Early) {
            return self.compare(case, buffers, round);
        }
        Ok(Vec::new())
    }

    fn compare(&self, case: Case, buffers: &Buffers, round: u64) -> Result<Vec<String>> {
        let [source, destination] = self.ours(case, buffers);
        let message = Message::new(case, self.plan.seed, round);
        message.verify(self.client, source, destination, self.plan.sabotage)
    }

    /// Starts our part of a case in one of two turns. The receiver's side comes in the `first` turn, except for an
    /// unexpected message.
    fn start_in_turn(
        &self,
        case: Case,
        buffers: &Buffers,
        first: bool,
    ) -> Result<Option<Box<dyn Activity>>> {
        let send = first == (case.op == Op::TagUnexpected);
        if !self.plays(if send { case.from } else { case.to() }) {
            return Ok(None);
        }
        if !send && !first {
            // In a single process, make progress until the message has arrived unexpected.
            (0..1000).for_each(|_| _ = self.client.worker().progress());
        }
        self.start(case, buffers, send, false).map(Some)
    }

    /// Starts the sender's or the receiver's side of a case. `whole`: as for timing.
    pub(crate) fn start(
        &self,
        case: Case,
        buffers: &Buffers,
        send: bool,
        whole: bool,
    ) -> Result<Box<dyn Activity>> {
        let round = if whole { TIMED } else { ONCE };
        let [from, to] = Message::layouts(case, self.plan.seed, round);
        let (source, destination) =
            ((Role::Source, case.pair.src), (Role::Destination, case.pair.dst));
        let (mine, layout, other, offset) = if send {
            (&buffers.here[&source], from, destination, to.before)
        } else {
            (&buffers.here[&destination], to, source, from.before)
        };
        let side = Side {
            case,
            seed: self.plan.seed,
            worker: self.client.worker(),
            endpoint: &self.endpoint,
            remote: buffers.there.get(&other).map(|key| (key, offset)),
            whole,
        };
        if !whole {
            self.client.step(format_args!("{case}: starting")); // not while the clock runs
        }
        let mut body = mine.body(layout);
        let active = send != (case.op == Op::Get);
        if self.plan.sabotage == Some(Sabotage::Length) && active && !body.is_empty() {
            body = body.part(0, body.len() - 1);
        }
        if send { side.send(&body) } else { side.receive(&body) }
    }

    /// Repeats the message, first one at a time, then several at once. Only the side that sees the completion returns a
    /// time.
    fn measure(&mut self, case: Case, buffers: &Buffers) -> Result<Option<Timing>> {
        let (sending, receiving) = (self.plays(case.from), self.plays(case.to()));
        let clock = if case.op == Op::Get { receiving } else { sending };
        let window = WINDOW.min(((64 << 20) / case.size.max(1)) as u32).max(2);
        let least = self.plan.least;
        let rounds: &[u32] = if least { &[1] } else { &[1, window] };
        let mut elapsed = Vec::new();
        for outstanding in rounds.iter().copied() {
            self.meet(format_args!("{case}, about to measure"), case.id)?;
            self.client.step(format_args!("{case}: measuring {outstanding} at a time"));
            let mut times = Vec::new();
            for _ in 0..self.plan.iters.unwrap_or(0) {
                let start = Instant::now();
                let mut activities = Vec::new();
                for _ in 0..outstanding {
                    for (ours, send) in [(receiving, false), (sending, true)] {
                        if ours {
                            activities.push(self.start(case, buffers, send, true)?);
                        }
                    }
                }
                self.client.drive(&mut activities)?;
                if !case.op.one_sided() && self.peer.is_some() {
                    self.acknowledge(receiving)?;
                }
                times.push(start.elapsed().as_secs_f64());
            }
            // Not the mean: a process that was descheduled for a while says nothing about UCX.
            let shortest = |times: Vec<f64>| times.into_iter().fold(f64::NAN, f64::min);
            elapsed.push(if least { shortest(times) } else { median(times) });
            self.meet(format_args!("{case}, measured"), case.id)?;
        }
        let last = rounds.len() - 1;
        let bytes = f64::from(rounds[last]) * case.size as f64;
        let timing = Timing { latency_us: elapsed[0] * 1e6, gbps: bytes / elapsed[last] / 1e9 };
        Ok(clock.then_some(timing))
    }

    /// Sends one byte from the receiver back to the sender.
    fn acknowledge(&self, receiving: bool) -> Result<()> {
        let byte = self.reply.whole();
        let request = if receiving {
            self.endpoint.tag_send(&byte, REPLY)?
        } else {
            self.client.worker().tag_receive(&byte, REPLY)?
        };
        self.client.finish(request)?;
        Ok(())
    }
}
