//! Running the cases of a plan, as one of two processes or as both sides at once; or as one of many, with
//! a session for each of the others.
//!
//! A case: fill the source, poison the destination, move the message, compare *both* allocations
//! whole. Between the steps the two processes meet at barriers on the control line. Wrong bytes are
//! a verdict and the run goes on; a failing UCX call ends it, because the sides are then out of step.

use crate::buffer::Buffer;
use crate::control::Control;
use crate::matrix::{Case, Op, Plan, Sabotage};
use crate::ops::{Activity, Side, truncated};
use crate::pattern::{Image, Layout, Mismatch};
use crate::report::{Timing, Verdict};
use crate::rig::Rig;
use crate::ucp::{Endpoint, Memory, PackedRegion, Region, RemoteKey};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

/// What the patterns and layouts of a case are made from.
mod key {
    pub(super) const MESSAGE: u64 = 0;
    pub(super) const SRC_LAYOUT: u64 = 1;
    pub(super) const DST_LAYOUT: u64 = 2;
    pub(super) const SRC_POISON: u64 = 3;
    pub(super) const DST_POISON: u64 = 4;
    pub(super) const DST_POISON_TIMED: u64 = 5;
}

/// Messages outstanding when bandwidth is measured; fewer for large ones.
const WINDOW: u32 = 8;
/// Tag of the one-byte reply that ends a timed message; no case uses it.
const REPLY: u64 = u64::MAX;

/// A connected rig, ready to run cases.
pub struct Session<'a> {
    rig: &'a Rig,
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
    fn source(&self, case: Case) -> &Buffer {
        &self.here[&(Role::Source, case.pair.src)]
    }

    fn destination(&self, case: Case) -> &Buffer {
        &self.here[&(Role::Destination, case.pair.dst)]
    }

    /// Has UCX forget our memory.
    ///
    /// # Safety
    /// No operation that UCX still holds moves bytes of it any more.
    pub(crate) unsafe fn unmap(&self) {
        // SAFETY: passed on.
        self.here.values().for_each(|buffer| unsafe { buffer.unmap() });
    }

    /// Drops the keys, which go first on both sides, and leaves what they are for.
    pub(crate) fn without_keys(self) -> impl Sized {
        self.here
    }
}

/// Memory for messages of one size: an allocation for each side of a message and each kind of memory,
/// with a part for every session that uses it.
pub(crate) struct Arena {
    size: usize,
    staging: Arc<Region>,
    regions: BTreeMap<(Role, Memory), Arc<Region>>,
}

impl Arena {
    /// For the roles that `plays` says are ours, where they are not both.
    pub(crate) fn new(
        rig: &Rig,
        plan: &Plan,
        size: usize,
        parts: usize,
        plays: impl Fn(u8) -> bool,
    ) -> Result<Arena> {
        let staging = rig.region(Memory::Host, Layout::allocation(size))?;
        let places: BTreeSet<(Role, Memory)> = plan
            .pairs
            .iter()
            .flat_map(|pair| [(Role::Source, pair.src), (Role::Destination, pair.dst)])
            .filter(|(role, _)| !plan.one_way || plays(u8::from(*role != Role::Source)))
            .collect();
        let mut regions = BTreeMap::new();
        for place in places {
            rig.step(format_args!("allocating {} memory for {size} bytes", place.1));
            regions.insert(place, rig.region(place.1, parts * Layout::allocation(size))?);
        }
        Ok(Arena { size, staging, regions })
    }

    fn part(&self, rig: &Rig, part: usize) -> Result<BTreeMap<(Role, Memory), Buffer>> {
        let length = Layout::allocation(self.size);
        let cut = |(place, region): (&(Role, Memory), &Arc<Region>)| {
            let region = region.clone();
            Ok((*place, Buffer::part(rig, region, part * length, length, &self.staging)?))
        };
        self.regions.iter().map(cut).collect()
    }
}

/// A session's message among several that are moved at once.
pub(crate) struct Part<'p, 's> {
    pub(crate) session: &'p mut Session<'s>,
    pub(crate) buffers: &'p Buffers,
    pub(crate) case: Case,
}

/// Moves the messages of several sessions at once and checks each; the other side of every session does
/// the same. Verdicts in the order of the sessions.
///
/// Processes that have sessions with several others must list them in one and the same order (of the
/// pairs), or they wait for each other in a circle.
pub(crate) fn cases(rig: &Rig, parts: &mut [Part<'_, '_>]) -> Result<Vec<Verdict>> {
    for Part { session, buffers, case } in parts.iter() {
        session.fill(*case, buffers)?;
        session.poison(*case, buffers, key::DST_POISON)?;
    }
    transfer(rig, parts)?;
    let verdict = |Part { session, buffers, case }: &Part<'_, '_>| {
        let wrong = session.compare(*case, buffers, key::DST_POISON)?;
        let wrong: Vec<String> =
            wrong.into_iter().map(|(what, wrong)| format!("{what}: {wrong}")).collect();
        let error = if wrong.is_empty() { None } else { Some(wrong.join("; ")) };
        Ok(Verdict { case: case.id, error, timing: None })
    };
    parts.iter().map(verdict).collect()
}

/// Both sides of the messages, each started when its case wants it to be.
fn transfer(rig: &Rig, parts: &mut [Part<'_, '_>]) -> Result<()> {
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
        rig.step(format_args!("{}: waiting for completion", first.case));
    }
    rig.drive(&mut activities)?;
    meet(parts, "done here")
}

impl<'a> Session<'a> {
    /// Both sides in this process: the worker talks to itself.
    pub fn loopback(rig: &'a Rig, plan: &'a Plan) -> Result<Session<'a>> {
        let address = rig.worker().address()?;
        // SAFETY: the address of our own worker.
        let endpoint = unsafe { rig.connect(&address, plan.peer_errors) }?;
        Session::new(rig, plan, endpoint, None)
    }

    /// One side; the other is at the end of the control line.
    pub fn pair(
        rig: &'a Rig,
        plan: &'a Plan,
        rank: u8,
        mut control: Control,
    ) -> Result<Session<'a>> {
        rig.step("exchanging worker addresses");
        let theirs: Vec<u8> = control.exchange(rig.worker(), &rig.worker().address()?)?;
        // SAFETY: the address of the worker of our twin, which runs the same UCX.
        let endpoint = unsafe { rig.connect(&theirs, plan.peer_errors) }?;
        Session::new(rig, plan, endpoint, Some((control, rank)))
    }

    fn new(
        rig: &'a Rig,
        plan: &'a Plan,
        endpoint: Endpoint,
        peer: Option<(Control, u8)>,
    ) -> Result<Session<'a>> {
        let reply = rig.region(Memory::Host, 1)?;
        Ok(Session { rig, plan, endpoint, peer, reply })
    }

    /// To the other side.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Runs all cases; `verdict` hears about each.
    pub fn run(&mut self, mut verdict: impl FnMut(Case, Verdict) -> Result<()>) -> Result<()> {
        for (size, cases) in self.plan.groups() {
            let buffers = self.allocate(size)?;
            for case in cases {
                if self.peer.is_none() && case.from == 1 {
                    continue; // alone, both directions are the same
                }
                let outcome = self.case(case, &buffers).with_context(|| format!("{case}"))?;
                verdict(case, outcome)?;
            }
            // Keys go first, on both sides, then the memory they are for.
            let memory = buffers.without_keys();
            self.meet("freeing buffers", u64::MAX - 1)?;
            drop(memory);
        }
        Ok(())
    }

    /// Closes the endpoint in good order, and gives the control line back.
    pub fn close(mut self) -> Result<Option<Control>> {
        self.meet("closing", u64::MAX)?;
        self.rig.step("ucp_ep_close");
        let closing = self.endpoint.close(false)?;
        self.rig.finish(closing)?;
        self.meet("closed", u64::MAX - 2)?;
        Ok(self.peer.map(|(control, _)| control))
    }

    pub(crate) fn plays(&self, rank: u8) -> bool {
        self.peer.as_ref().is_none_or(|(_, mine)| *mine == rank)
    }

    pub(crate) fn meet(&mut self, what: impl std::fmt::Display, step: u64) -> Result<()> {
        if let Some((control, _)) = &mut self.peer {
            self.rig.step(format_args!("{what}: waiting for the other process"));
            control.barrier(self.rig.worker(), step)?;
        }
        Ok(())
    }

    /// Memory for messages of one size, here and on the other side.
    pub(crate) fn allocate(&mut self, size: usize) -> Result<Buffers> {
        let arena = Arena::new(self.rig, self.plan, size, 1, |rank| self.plays(rank))?;
        self.part_of(&arena, 0)
    }

    /// A part of the memory that several sessions share; the other side does the same.
    pub(crate) fn part_of(&mut self, arena: &Arena, part: usize) -> Result<Buffers> {
        let here = arena.part(self.rig, part)?;
        let mut there = BTreeMap::new();
        if self.plan.ops.iter().any(|op| op.one_sided()) {
            let mut packed: Vec<((Role, Memory), PackedRegion)> = Vec::new();
            for (place, buffer) in &here {
                packed.push((*place, buffer.pack()?));
            }
            if let Some((control, _)) = &mut self.peer {
                self.rig.step("exchanging remote keys");
                packed = control.exchange(self.rig.worker(), &packed)?;
            }
            for (place, packed) in packed {
                // SAFETY: the other side keeps its buffers until we meet after the last case.
                there.insert(place, unsafe { self.endpoint.unpack(&packed) }?);
            }
        }
        Ok(Buffers { here, there })
    }

    pub(crate) fn case(&mut self, case: Case, buffers: &Buffers) -> Result<Verdict> {
        let mut errors = Vec::new();
        let mut timing = None;
        let timed = self.plan.iterations > 0 && Op::PLAIN.contains(&case.op);
        self.fill(case, buffers)?;
        for (measure, poison) in [(false, key::DST_POISON), (true, key::DST_POISON_TIMED)] {
            if measure && !timed {
                continue;
            }
            self.poison(case, buffers, poison)?;
            if measure {
                timing = self.measure(case, buffers)?;
            } else {
                let rig = self.rig;
                transfer(rig, &mut [Part { session: self, buffers, case }])?;
            }
            let after = if measure { " after the timed messages" } else { "" };
            let wrong = self.compare(case, buffers, poison)?;
            errors.extend(wrong.into_iter().map(|(what, wrong)| format!("{what}{after}: {wrong}")));
        }
        let error = if errors.is_empty() { None } else { Some(errors.join("; ")) };
        Ok(Verdict { case: case.id, error, timing })
    }

    /// The sender's buffer becomes what it must be until the end.
    fn fill(&self, case: Case, buffers: &Buffers) -> Result<()> {
        if self.plays(case.from) {
            buffers.source(case).fill(self.rig, &self.sent(case))?;
        }
        Ok(())
    }

    /// The receiver's buffer becomes something that no message is.
    fn poison(&self, case: Case, buffers: &Buffers, poison: u64) -> Result<()> {
        if self.plays(case.to()) {
            let image = Image::poisoned(self.layouts(case)[1], case.key(self.plan.seed, poison));
            buffers.destination(case).fill(self.rig, &image)?;
        }
        Ok(())
    }

    fn sent(&self, case: Case) -> Image {
        let key = |what| case.key(self.plan.seed, what);
        Image::message(self.layouts(case)[0], key(key::SRC_POISON), key(key::MESSAGE))
    }

    fn received(&self, case: Case, poison: u64) -> Image {
        let (layout, key) = (self.layouts(case)[1], |what| case.key(self.plan.seed, what));
        if case.op == Op::TagTruncated {
            Image::truncated(layout, key(poison), truncated(case.size))
        } else {
            Image::message(layout, key(poison), key(key::MESSAGE))
        }
    }

    /// Compares what is there with what must be there; what is wrong, and with which buffer. Does the
    /// damage first that the plan may ask for.
    fn compare(
        &self,
        case: Case,
        buffers: &Buffers,
        poison: u64,
    ) -> Result<Vec<(&'static str, Mismatch)>> {
        let (sending, receiving) = (self.plays(case.from), self.plays(case.to()));
        let before = self.layouts(case)[1].before;
        match self.plan.sabotage {
            Some(Sabotage::Message) if receiving && case.size > 0 => {
                buffers.destination(case).damage(self.rig, before + case.size - 1)?;
            }
            Some(Sabotage::Guard) if receiving => {
                buffers.destination(case).damage(self.rig, before + case.size)?;
            }
            Some(Sabotage::Source) if sending => buffers.source(case).damage(self.rig, 0)?,
            _ => {}
        }
        let mut wrong = Vec::new();
        if receiving {
            let image = self.received(case, poison);
            let found = buffers.destination(case).verify(self.rig, &image)?;
            wrong.extend(found.err().map(|wrong| ("destination", wrong)));
        }
        if sending {
            let found = buffers.source(case).verify(self.rig, &self.sent(case))?;
            wrong.extend(found.err().map(|wrong| ("source (must not change)", wrong)));
        }
        Ok(wrong)
    }

    /// Where the message is in the source and in the destination: both sides know both.
    fn layouts(&self, case: Case) -> [Layout; 2] {
        [key::SRC_LAYOUT, key::DST_LAYOUT]
            .map(|what| Layout::new(case.size, case.key(self.plan.seed, what)))
    }

    /// Starts what we have to do of a case that is to be started `first`: the receiver's side, unless the
    /// message shall come unexpected.
    fn start_in_turn(
        &self,
        case: Case,
        buffers: &Buffers,
        first: bool,
    ) -> Result<Vec<Box<dyn Activity>>> {
        let send = first == (case.op == Op::TagUnexpected);
        if !self.plays(if send { case.from } else { case.to() }) {
            return Ok(Vec::new());
        }
        if !send && !first {
            // Alone in the process, the message must have arrived before it is asked for.
            for _ in 0..1000 {
                self.rig.worker().progress();
            }
        }
        Ok(vec![self.start(case, buffers, send, false)?])
    }

    /// Starts the sender's or the receiver's side of a case. `whole`: as when measuring.
    pub(crate) fn start(
        &self,
        case: Case,
        buffers: &Buffers,
        send: bool,
        whole: bool,
    ) -> Result<Box<dyn Activity>> {
        let layouts = self.layouts(case);
        let (mine, layout, their_place, their_layout) = if send {
            let place = (Role::Destination, case.pair.dst);
            (buffers.source(case), layouts[0], place, layouts[1])
        } else {
            let place = (Role::Source, case.pair.src);
            (buffers.destination(case), layouts[1], place, layouts[0])
        };
        let remote = buffers.there.get(&their_place).map(|key| (key, their_layout.before));
        let side = Side {
            case,
            seed: self.plan.seed,
            worker: self.rig.worker(),
            endpoint: &self.endpoint,
            remote,
            whole,
        };
        if !whole {
            self.rig.step(format_args!("{case}: starting")); // not while the clock runs
        }
        let body = mine.body(layout);
        if send { side.send(&body) } else { side.receive(&body) }
    }

    /// Repeats the message, first one at a time, then several at once. Only the side that knows
    /// when a message is complete returns a time.
    fn measure(&mut self, case: Case, buffers: &Buffers) -> Result<Option<Timing>> {
        let (sending, receiving) = (self.plays(case.from), self.plays(case.to()));
        let clock = if case.op == Op::Get { receiving } else { sending };
        let window = WINDOW.min(((64 << 20) / case.size.max(1)) as u32).max(2);
        let mut elapsed = [0.0; 2];
        for (outstanding, elapsed) in [1, window].into_iter().zip(&mut elapsed) {
            self.meet(format_args!("{case}, about to measure"), case.id)?;
            self.rig.step(format_args!("{case}: measuring {outstanding} at a time"));
            let mut times = Vec::new();
            for _ in 0..self.plan.iterations {
                let start = Instant::now();
                let mut activities = Vec::new();
                for _ in 0..outstanding {
                    if receiving {
                        activities.push(self.start(case, buffers, false, true)?);
                    }
                    if sending {
                        activities.push(self.start(case, buffers, true, true)?);
                    }
                }
                self.rig.drive(&mut activities)?;
                if !case.op.one_sided() && self.peer.is_some() {
                    self.acknowledge(receiving)?;
                }
                times.push(start.elapsed().as_secs_f64());
            }
            // The median: a process that lost its processor for a while says nothing about UCX.
            times.sort_by(f64::total_cmp);
            *elapsed = times[times.len() / 2];
            self.meet(format_args!("{case}, measured"), case.id)?;
        }
        let bytes = f64::from(window) * case.size as f64;
        let timing = Timing { latency_us: elapsed[0] * 1e6, gbps: bytes / elapsed[1] / 1e9 };
        Ok(clock.then_some(timing))
    }

    /// One byte back from the receiver.
    fn acknowledge(&self, receiving: bool) -> Result<()> {
        let byte = self.reply.whole();
        let request = if receiving {
            self.endpoint.tag_send(&byte, REPLY)?
        } else {
            self.rig.worker().tag_receive(&byte, REPLY)?
        };
        self.rig.finish(request)?;
        Ok(())
    }
}
