//! Running the cases of a plan, as one of two processes or as both sides at once.
//!
//! A case: fill the source, poison the destination, move the message, compare *both* allocations
//! whole. Between the steps the two processes meet at barriers on the control line. Wrong bytes are
//! a verdict and the run goes on; a failing UCX call ends it, because the sides are then out of step.

use crate::buffer::Buffer;
use crate::control::Control;
use crate::matrix::{Case, Op, Plan, Sabotage};
use crate::ops::{Activity, Side, truncated};
use crate::pattern::{Image, Layout};
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
            let Buffers { here, there } = buffers;
            drop(there);
            self.meet("freeing buffers", u64::MAX - 1)?;
            drop(here);
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

    fn meet(&mut self, what: impl std::fmt::Display, step: u64) -> Result<()> {
        if let Some((control, _)) = &mut self.peer {
            self.rig.step(format_args!("{what}: waiting for the other process"));
            control.barrier(self.rig.worker(), step)?;
        }
        Ok(())
    }

    pub(crate) fn allocate(&mut self, size: usize) -> Result<Buffers> {
        let staging = self.rig.region(Memory::Host, Layout::allocation(size))?;
        let places: BTreeSet<(Role, Memory)> = self
            .plan
            .pairs
            .iter()
            .flat_map(|pair| [(Role::Source, pair.src), (Role::Destination, pair.dst)])
            .filter(|(role, _)| !self.plan.one_way || self.plays(u8::from(*role != Role::Source)))
            .collect();
        let mut here = BTreeMap::new();
        for place in places {
            here.insert(place, Buffer::new(self.rig, place.1, size, &staging)?);
        }
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
        let seed = self.plan.seed;
        let layouts = self.layouts(case);
        let source = || &buffers.here[&(Role::Source, case.pair.src)];
        let destination = || &buffers.here[&(Role::Destination, case.pair.dst)];
        let sent = Image::message(
            layouts[0],
            case.key(seed, key::SRC_POISON),
            case.key(seed, key::MESSAGE),
        );
        let (sending, receiving) = (self.plays(case.from), self.plays(case.to()));
        if sending {
            source().fill(self.rig, &sent)?;
        }

        let mut errors = Vec::new();
        let mut timing = None;
        let timed = self.plan.iterations > 0 && Op::PLAIN.contains(&case.op);
        for (measure, poison) in [(false, key::DST_POISON), (true, key::DST_POISON_TIMED)] {
            if measure && !timed {
                continue;
            }
            let poison = case.key(seed, poison);
            if receiving {
                destination().fill(self.rig, &Image::poisoned(layouts[1], poison))?;
            }
            if measure {
                timing = self.measure(case, buffers)?;
            } else {
                self.transfer(case, buffers)?;
            }
            match self.plan.sabotage {
                Some(Sabotage::Message) if receiving && case.size > 0 => {
                    destination().damage(self.rig, layouts[1].before + case.size - 1)?;
                }
                Some(Sabotage::Guard) if receiving => {
                    destination().damage(self.rig, layouts[1].before + case.size)?;
                }
                Some(Sabotage::Source) if sending => source().damage(self.rig, 0)?,
                _ => {}
            }
            let received = if case.op == Op::TagTruncated {
                Image::truncated(layouts[1], poison, truncated(case.size))
            } else {
                Image::message(layouts[1], poison, case.key(seed, key::MESSAGE))
            };
            let mut check = |what, buffer: &Buffer, image: &Image| -> Result<()> {
                let after = if measure { " after the timed messages" } else { "" };
                if let Err(wrong) = buffer.verify(self.rig, image)? {
                    errors.push(format!("{what}{after}: {wrong}"));
                }
                Ok(())
            };
            if receiving {
                check("destination", destination(), &received)?;
            }
            if sending {
                check("source (must not change)", source(), &sent)?;
            }
        }
        let error = if errors.is_empty() { None } else { Some(errors.join("; ")) };
        Ok(Verdict { case: case.id, error, timing })
    }

    /// Where the message is in the source and in the destination: both sides know both.
    fn layouts(&self, case: Case) -> [Layout; 2] {
        [key::SRC_LAYOUT, key::DST_LAYOUT]
            .map(|what| Layout::new(case.size, case.key(self.plan.seed, what)))
    }

    /// Both sides of one message, each started when the case wants it to be.
    fn transfer(&mut self, case: Case, buffers: &Buffers) -> Result<()> {
        let (sending, receiving) = (self.plays(case.from), self.plays(case.to()));
        let unexpected = case.op == Op::TagUnexpected;
        let mut activities = Vec::new();
        self.meet(format_args!("{case}, prepared"), case.id)?;
        if receiving && !unexpected {
            activities.push(self.start(case, buffers, false, false)?);
        }
        if sending && unexpected {
            activities.push(self.start(case, buffers, true, false)?);
        }
        self.meet(format_args!("{case}, first side started"), case.id)?;
        if receiving && unexpected {
            // Alone in the process, the message must have arrived before it is asked for.
            for _ in 0..1000 {
                self.rig.worker().progress();
            }
            activities.push(self.start(case, buffers, false, false)?);
        }
        if sending && !unexpected {
            activities.push(self.start(case, buffers, true, false)?);
        }
        self.rig.step(format_args!("{case}: waiting for completion"));
        self.rig.drive(&mut activities)?;
        self.meet(format_args!("{case}, done here"), case.id)
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
            (&buffers.here[&(Role::Source, case.pair.src)], layouts[0], place, layouts[1])
        } else {
            let place = (Role::Source, case.pair.src);
            (&buffers.here[&(Role::Destination, case.pair.dst)], layouts[1], place, layouts[0])
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
