//! What one thread of the soak does: a handful of messages at once, all checked, and again.

use super::dice::Dice;
use super::plots::{Kind, Plots, Taken};
use super::{Options, Totals};
use crate::matrix::{Case, Op, Pair, Sabotage};
use crate::ops::{Activity, Side, truncated};
use crate::pattern::Image;
use crate::rig::Rig;
use crate::ucp::{Endpoint, Idle, RemoteKey, Worker, WorkerOptions};
use anyhow::{Context, Result};

/// Messages under way at once.
const AT_ONCE: usize = 4;
/// Rounds of progress after which an early message has arrived.
const ARRIVAL: usize = 100;

/// What patterns are made from.
mod key {
    pub(super) const MESSAGE: u64 = 0;
    pub(super) const SRC_POISON: u64 = 1;
    pub(super) const DST_POISON: u64 = 2;
}

/// A way from a sender to a receiver, both ours.
struct Lane {
    name: &'static str,
    sender: Worker,
    /// From the sender to the receiver.
    there: Endpoint,
    receiver: Worker,
    /// From the receiver to the sender.
    back: Endpoint,
    /// `back` is not the same endpoint as `there`.
    two_ended: bool,
    ops: Vec<Op>,
}

/// What a worker can do whose messages are one thread's. Too small receives are left to the shared
/// worker, which has no streams: a release build of stock UCX (1.22, 1.23) does not reset the status
/// of a request before it becomes a stream receive, so that one that was truncated in its last life
/// fails again.
fn own_ops() -> Vec<Op> {
    let every = Op::PLAIN.iter().flat_map(|op| op.variants()).copied();
    every.filter(|op| *op != Op::TagTruncated).collect()
}

/// What a worker can do that other threads use, too: whose active message or stream arrived, nobody
/// could tell.
fn shared_ops() -> Vec<Op> {
    [Op::Tag, Op::Put, Op::Get].iter().flat_map(|op| op.variants()).copied().collect()
}

impl Lane {
    /// The worker to itself.
    fn to_itself(rig: &Rig, shared: bool) -> Result<Lane> {
        let worker = rig.worker();
        // SAFETY: the address of our own worker.
        let there = unsafe { rig.connect(&worker.address()?, false) }?;
        let (name, ops) = if shared {
            ("shared worker to itself", shared_ops())
        } else {
            ("worker to itself", own_ops())
        };
        let (sender, receiver) = (worker.clone(), worker.clone());
        let back = there.clone();
        Ok(Lane { name, sender, there, receiver, back, two_ended: false, ops })
    }

    /// To a second worker of this thread: what lies between two processes, without the second one.
    fn to_another(rig: &Rig) -> Result<Lane> {
        let sender = rig.worker().clone();
        let receiver = Worker::new(sender.context(), WorkerOptions::default())?;
        let connect = |from: &Worker, to: &Worker| -> Result<Endpoint> {
            // SAFETY: the address of a worker of this very UCX.
            Ok(unsafe { Endpoint::connect(from, &to.address()?, Default::default()) }?)
        };
        let (there, back) = (connect(&sender, &receiver)?, connect(&receiver, &sender)?);
        let (name, ops) = ("worker to worker", own_ops());
        Ok(Lane { name, sender, there, receiver, back, two_ended: true, ops })
    }

    fn progress(&self, idle: &mut Idle) -> Result<()> {
        self.receiver.progress();
        Ok(self.sender.wait(idle, None)?)
    }

    /// Progresses both ends until everything is done, or something failed.
    fn drive(&self, activities: &mut Vec<Box<dyn Activity>>) -> Result<()> {
        let mut idle = Idle::default();
        loop {
            let mut failed = None;
            activities.retain_mut(|activity| match activity.poll() {
                Ok(done) => !done,
                Err(error) => {
                    failed.get_or_insert(error);
                    false
                }
            });
            match failed {
                Some(error) => return Err(error),
                None if activities.is_empty() => return Ok(()),
                None => self.progress(&mut idle)?,
            }
        }
    }

    fn close(self, rig: &Rig) -> Result<()> {
        rig.step("ucp_ep_close");
        let mut closing = vec![self.there.close(false)?];
        if self.two_ended {
            closing.push(self.back.close(false)?);
        }
        let mut idle = Idle::default();
        for mut request in closing {
            loop {
                if let Some(done) = request.poll() {
                    done?;
                    break;
                }
                self.progress(&mut idle)?;
            }
        }
        Ok(())
    }
}

/// One message: where from, where to, and how it must look.
struct Message {
    case: Case,
    source: Taken,
    destination: Taken,
    sent: Image,
    received: Image,
    /// For put and get. Goes before the buffer it is for.
    key: Option<(RemoteKey, usize)>,
}

/// One thread's world.
pub(super) struct Soaker<'a> {
    options: &'a Options<'a>,
    totals: &'a Totals,
    rig: &'a Rig,
    dice: Dice,
    plots: Plots<'a>,
    lanes: Vec<Lane>,
    next: u64,
}

impl<'a> Soaker<'a> {
    /// `thread` is unique; `shared`: other threads use the rig's worker, too.
    pub(super) fn new(
        options: &'a Options<'a>,
        totals: &'a Totals,
        rig: &'a Rig,
        thread: u8,
        shared: bool,
    ) -> Result<Soaker<'a>> {
        let mut lanes = vec![Lane::to_itself(rig, shared)?];
        if !shared {
            lanes.push(Lane::to_another(rig)?);
        }
        Ok(Soaker {
            options,
            totals,
            rig,
            dice: Dice::new(options.seed, thread.into()),
            plots: Plots::new(rig, totals, options.max)?,
            lanes,
            next: u64::from(thread) << 40,
        })
    }

    /// Until the time is over, or too much went wrong.
    pub(super) fn run(mut self) -> Result<()> {
        while !self.totals.over() {
            self.batch()?;
        }
        let Soaker { plots, lanes, rig, .. } = self;
        drop(plots);
        lanes.into_iter().try_for_each(|lane| lane.close(rig))
    }

    fn batch(&mut self) -> Result<()> {
        let lane = self.dice.below(self.lanes.len());
        let mut messages: Vec<Message> = Vec::new();
        for _ in 0..=self.dice.below(AT_ONCE) {
            let op = self.dice.pick(&self.lanes[lane].ops);
            // Streams and active messages have no tag: one at a time can be told apart.
            let alone = |group| messages.iter().all(|m| m.case.op.group() != group);
            if matches!(op.group(), Op::Stream | Op::Am) && !alone(op.group()) {
                continue;
            }
            let message = self.prepare(lane, op)?;
            messages.push(message);
        }
        let what: Vec<String> = messages.iter().map(|m| m.case.to_string()).collect();
        let lane_name = self.lanes[lane].name;
        self.rig.step(format_args!("{lane_name}: {}", what.join(", ")));
        self.transfer(lane, &messages)
            .with_context(|| format!("{lane_name}: {}", what.join(", ")))?;
        for message in messages {
            self.check(lane_name, message)?;
        }
        Ok(())
    }

    fn prepare(&mut self, lane: usize, op: Op) -> Result<Message> {
        let dice = &mut self.dice;
        let size = dice.size(self.options.max).max(usize::from(op == Op::TagTruncated));
        let keyed = [Kind::Registered, Kind::Gaudi];
        let from = if op == Op::Get { dice.pick(&keyed) } else { dice.pick(&Kind::ALL) };
        let to = if op == Op::Put { dice.pick(&keyed) } else { dice.pick(&Kind::ALL) };
        let source = self.plots.take(dice, from, size)?;
        let destination = self.plots.take(dice, to, size)?;
        let pair = Pair { src: from.memory(), dst: to.memory() };
        let case = Case { id: self.next, op, pair, size, from: 0 };
        self.next += 1;
        let keyed = |what| case.key(self.options.seed, what);
        let (message, poison) = (keyed(key::MESSAGE), keyed(key::DST_POISON));
        let sent = Image::message(source.layout, keyed(key::SRC_POISON), message);
        let received = if op == Op::TagTruncated {
            Image::truncated(destination.layout, poison, truncated(size))
        } else {
            Image::message(destination.layout, poison, message)
        };
        source.buffer.fill(self.rig, &sent)?;
        destination.buffer.fill(self.rig, &Image::poisoned(destination.layout, poison))?;
        let lane = &self.lanes[lane];
        let remote = match op {
            Op::Put => Some((&lane.there, &destination)),
            Op::Get => Some((&lane.back, &source)),
            _ => None,
        };
        let key = match remote {
            None => None,
            Some((endpoint, Taken { buffer, layout, .. })) => {
                // SAFETY: our own memory, packed now; the message keeps buffer and key together.
                Some((unsafe { endpoint.unpack(&buffer.pack()?) }?, layout.before))
            }
        };
        Ok(Message { case, source, destination, sent, received, key })
    }

    fn transfer(&self, lane: usize, messages: &[Message]) -> Result<()> {
        let lane = &self.lanes[lane];
        let mut activities = Vec::new();
        let mut start = |message: &Message, send: bool| -> Result<()> {
            let (worker, endpoint) =
                if send { (&lane.sender, &lane.there) } else { (&lane.receiver, &lane.back) };
            let remote = message.key.as_ref().map(|(key, offset)| (key, *offset));
            let (case, seed) = (message.case, self.options.seed);
            let side = Side { case, seed, worker, endpoint, remote, whole: false };
            let span = |taken: &Taken| taken.buffer.body(taken.layout);
            activities.push(if send {
                side.send(&span(&message.source))?
            } else {
                side.receive(&span(&message.destination))?
            });
            Ok(())
        };
        let late = |message: &&Message| message.case.op == Op::TagUnexpected;
        messages.iter().filter(|m| !late(m)).try_for_each(|m| start(m, false))?;
        messages.iter().try_for_each(|m| start(m, true))?;
        if messages.iter().any(|m| late(&m)) {
            for _ in 0..ARRIVAL {
                lane.sender.progress();
                lane.receiver.progress();
            }
        }
        messages.iter().filter(late).try_for_each(|m| start(m, false))?;
        lane.drive(&mut activities)
    }

    fn check(&mut self, lane: &str, message: Message) -> Result<()> {
        let Message { case, source, destination, sent, received, key } = message;
        drop(key);
        let layout = destination.layout;
        match self.options.sabotage {
            Some(Sabotage::Message) if case.size > 0 && case.op != Op::TagTruncated => {
                destination.buffer.damage(self.rig, layout.before + case.size - 1)?;
            }
            Some(Sabotage::Guard) => {
                destination.buffer.damage(self.rig, layout.before + case.size)?;
            }
            Some(Sabotage::Source) => source.buffer.damage(self.rig, 0)?,
            _ => {}
        }
        let mut wrong = Vec::new();
        for (what, taken, image) in
            [("destination", &destination, &received), ("source", &source, &sent)]
        {
            if let Err(mismatch) = taken.buffer.verify(self.rig, image)? {
                let at = taken.buffer.address();
                wrong.push(format!("{what}, {} at {at:#x}: {mismatch}", taken.kind.name()));
            }
        }
        if wrong.is_empty() {
            self.totals.passed(&case);
        } else {
            self.totals.failed(&format!("{lane}: {case}: {}", wrong.join("; ")));
        }
        self.plots.put_back(&mut self.dice, source)?;
        self.plots.put_back(&mut self.dice, destination)
    }
}
