//! What one thread of the soak does: moves and checks a handful of messages at once, again and again.

use super::pool::{Kind, Pool, Taken};
use super::{Options, Totals};
use crate::client::Client;
use crate::matrix::{Case, Op, Pair};
use crate::message::Message;
use crate::ops::{Side, poll_all};
use crate::pattern::mix;
use crate::ucp::{Endpoint, Idle, RemoteKey, Worker, WorkerOptions};
use anyhow::{Context, Result};
use fastrand::Rng;

/// Messages in flight at once.
const AT_ONCE: usize = 4;
/// Rounds of progress after which an early message must have arrived.
const ARRIVAL: usize = 100;

fn pick<T: Copy>(random: &mut Rng, from: &[T]) -> T {
    from[random.usize(..from.len())]
}

/// A size up to `max`; each power of two is equally likely: small sizes exercise the protocols, large ones move the
/// bytes.
fn draw_size(random: &mut Rng, max: usize) -> usize {
    let size = match random.u32(..=usize::BITS - max.leading_zeros()) {
        0 => 0,
        power => random.usize(1 << (power - 1)..1 << power),
    };
    size.min(max)
}

/// A connection from a sender to a receiver, both ours.
struct Lane {
    name: &'static str,
    sender: Worker,
    /// From the sender to the receiver.
    there: Endpoint,
    receiver: Worker,
    /// From the receiver to the sender; the same endpoint if both are the same worker.
    back: Endpoint,
    two_ended: bool,
    ops: Vec<Op>,
}

/// Operations for a worker that only one thread uses. Receives that are too small are left to the shared worker, which
/// has no streams: a release build of stock UCX (1.22, 1.23) does not reset the status of a request that it reuses for
/// a stream receive, so that a request that was truncated before fails again.
fn own_ops() -> Vec<Op> {
    let every = Op::PLAIN.iter().flat_map(|op| op.variants());
    every.filter(|op| *op != Op::TagTruncated).collect()
}

/// Operations for a worker that several threads use: active messages and streams have no tag, so a thread could not
/// recognise its own.
fn shared_ops() -> Vec<Op> {
    [Op::Tag, Op::Put, Op::Get].into_iter().flat_map(Op::variants).collect()
}

impl Lane {
    /// The worker to itself.
    fn to_itself(client: &Client, shared: bool) -> Result<Lane> {
        let worker = client.worker();
        let there = Endpoint::to_itself(worker)?;
        let (name, ops) = if shared {
            ("shared worker to itself", shared_ops())
        } else {
            ("worker to itself", own_ops())
        };
        let (sender, receiver, back) = (worker.clone(), worker.clone(), there.clone());
        Ok(Lane { name, sender, there, receiver, back, two_ended: false, ops })
    }

    /// From one of the shared workers to the next one (itself, if there is only one).
    fn to_the_next(clients: &[Client], at: usize) -> Result<Lane> {
        let next = &clients[(at + 1) % clients.len()];
        let (sender, receiver) = (clients[at].worker().clone(), next.worker().clone());
        Lane::between(sender, receiver, "shared worker to the next", shared_ops())
    }

    /// To a second worker of this thread: the path between two processes, in one process.
    fn to_another(client: &Client) -> Result<Lane> {
        let sender = client.worker().clone();
        let receiver = Worker::new(sender.context(), WorkerOptions::default())?;
        Lane::between(sender, receiver, "worker to worker", own_ops())
    }

    fn between(sender: Worker, receiver: Worker, name: &'static str, ops: Vec<Op>) -> Result<Lane> {
        let connect = |from: &Worker, to: &Worker| -> Result<Endpoint> {
            // SAFETY: the address of a worker of the same UCX.
            Ok(unsafe { Endpoint::connect(from, &to.address()?, false) }?)
        };
        let (there, back) = (connect(&sender, &receiver)?, connect(&receiver, &sender)?);
        Ok(Lane { name, sender, there, receiver, back, two_ended: true, ops })
    }

    /// Progresses both ends until `done` says so.
    fn drive(&self, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
        let mut idle = Idle::default();
        while !done()? {
            self.receiver.progress();
            self.sender.wait(&mut idle, None)?;
        }
        Ok(())
    }

    fn close(self, client: &Client) -> Result<()> {
        client.step("ucp_ep_close");
        let mut closing = vec![self.there.close(false)?];
        if self.two_ended {
            closing.push(self.back.close(false)?);
        }
        closing
            .into_iter()
            .try_for_each(|mut request| self.drive(|| Ok(request.poll().transpose()?.is_some())))
    }
}

/// One message: source, destination, and the expected content.
struct Moving {
    message: Message,
    source: Taken,
    destination: Taken,
    /// For put and get. It must be dropped before its buffer, so `check` drops it by hand: it is the last field.
    key: Option<(RemoteKey, usize)>,
}

/// One thread's state.
pub(super) struct Soaker<'a> {
    options: &'a Options,
    totals: &'a Totals,
    client: &'a Client,
    random: Rng,
    pool: Pool<'a>,
    lanes: Vec<Lane>,
    next: u64,
}

impl<'a> Soaker<'a> {
    /// `thread` is unique; `shared`: other threads also use the clients' workers.
    pub(super) fn new(
        options: &'a Options,
        totals: &'a Totals,
        clients: &'a [Client],
        thread: u8,
        shared: bool,
    ) -> Result<Soaker<'a>> {
        let client = &clients[0];
        let mut lanes: Vec<Lane> =
            clients.iter().map(|client| Lane::to_itself(client, shared)).collect::<Result<_>>()?;
        if !shared {
            lanes.push(Lane::to_another(client)?);
        } else if clients.len() > 1 {
            for at in 0..clients.len() {
                lanes.push(Lane::to_the_next(clients, at)?);
            }
        }
        Ok(Soaker {
            options,
            totals,
            client,
            random: Rng::with_seed(mix(options.seed ^ mix(thread.into()))),
            pool: Pool::new(client, totals, options.max)?,
            lanes,
            next: u64::from(thread) << 40,
        })
    }

    /// Runs until the time is over, or too many messages were wrong.
    pub(super) fn run(mut self) -> Result<()> {
        while !self.totals.over() {
            self.batch()?;
        }
        let Soaker { pool, lanes, client, .. } = self;
        drop(pool);
        lanes.into_iter().try_for_each(|lane| lane.close(client))
    }

    fn batch(&mut self) -> Result<()> {
        let lane = self.random.usize(..self.lanes.len());
        let mut messages: Vec<Moving> = Vec::new();
        for _ in 0..=self.random.usize(..AT_ONCE) {
            let op = pick(&mut self.random, &self.lanes[lane].ops);
            // Streams and active messages have no tag, so only one may be in flight.
            let tagless = matches!(op.group(), Op::Stream | Op::Am);
            if !tagless || messages.iter().all(|m| m.message.case.op.group() != op.group()) {
                messages.push(self.prepare(lane, op)?);
            }
        }
        let cases: Vec<String> = messages.iter().map(|m| m.message.case.to_string()).collect();
        let what = format!("{}: {}", self.lanes[lane].name, cases.join(", "));
        self.client.step(&what);
        self.transfer(lane, &messages).with_context(|| what)?;
        messages.into_iter().try_for_each(|message| self.check(lane, message))
    }

    fn prepare(&mut self, lane: usize, op: Op) -> Result<Moving> {
        let random = &mut self.random;
        let size = draw_size(random, self.options.max).max(usize::from(op == Op::TagTruncated));
        let keyed = [Kind::Registered, Kind::Gaudi];
        let from = pick(random, if op == Op::Get { &keyed } else { &Kind::ALL });
        let to = pick(random, if op == Op::Put { &keyed } else { &Kind::ALL });
        let source = self.pool.take(random, from, size)?;
        let destination = self.pool.take(random, to, size)?;
        let pair = Pair { src: from.memory(), dst: to.memory() };
        let mut case = Case { id: self.next, op, pair, size, from: 0 };
        if !case.runs_on(self.client.ucx().version()) {
            case.op = Op::AmRndv;
        }
        self.next += 1;
        let layouts = [source.layout, destination.layout];
        let message = Message::placed(case, self.options.seed, 0, layouts);
        message.fill_source(self.client, &source.buffer)?;
        message.poison_destination(self.client, &destination.buffer)?;
        let lane = &self.lanes[lane];
        let remote = match op {
            Op::Put => Some((&lane.there, &destination)),
            Op::Get => Some((&lane.back, &source)),
            _ => None,
        };
        let key = remote.map(|(endpoint, taken)| -> Result<_> {
            // SAFETY: our own memory, packed now; the message keeps buffer and key together.
            Ok((unsafe { endpoint.unpack(&taken.buffer.pack()?) }?, taken.layout.before))
        });
        Ok(Moving { message, source, destination, key: key.transpose()? })
    }

    fn transfer(&self, lane: usize, messages: &[Moving]) -> Result<()> {
        let lane = &self.lanes[lane];
        let mut activities = Vec::new();
        let mut start = |moving: &Moving, send: bool| -> Result<()> {
            let (worker, endpoint, taken) = if send {
                (&lane.sender, &lane.there, &moving.source)
            } else {
                (&lane.receiver, &lane.back, &moving.destination)
            };
            let remote = moving.key.as_ref().map(|(key, offset)| (key, *offset));
            let (case, seed) = (moving.message.case, self.options.seed);
            let side = Side { case, seed, worker, endpoint, remote, whole: false };
            let body = taken.buffer.body(taken.layout);
            activities.push(if send { side.send(&body)? } else { side.receive(&body)? });
            Ok(())
        };
        let late = |moving: &&Moving| moving.message.case.op == Op::TagUnexpected;
        messages.iter().filter(|m| !late(m)).try_for_each(|m| start(m, false))?;
        messages.iter().try_for_each(|m| start(m, true))?;
        if messages.iter().any(|m| late(&m)) {
            for _ in 0..ARRIVAL {
                lane.sender.progress();
                lane.receiver.progress();
            }
        }
        messages.iter().filter(late).try_for_each(|m| start(m, false))?;
        lane.drive(|| poll_all(&mut activities))
    }

    fn check(&mut self, lane: usize, moving: Moving) -> Result<()> {
        let Moving { message, source, destination, key } = moving;
        drop(key);
        let (from, to) = (Some(&source.buffer), Some(&destination.buffer));
        let wrong = message.verify(self.client, from, to, self.options.sabotage)?;
        if wrong.is_empty() {
            self.totals.passed(&message.case);
        } else {
            let (lane, case) = (self.lanes[lane].name, message.case);
            self.totals.failed(&format!("{lane}: {case}: {}", wrong.join("; ")));
        }
        self.pool.put_back(&mut self.random, source)?;
        self.pool.put_back(&mut self.random, destination)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_reach_both_ends_and_every_power_between() {
        let mut random = Rng::with_seed(1);
        let sizes: Vec<usize> = (0..10_000).map(|_| draw_size(&mut random, 1000)).collect();
        assert!(sizes.iter().all(|&size| size <= 1000));
        assert!(sizes.contains(&0) && sizes.contains(&1000));
        for power in 0..10 {
            assert!(sizes.iter().any(|size| (1 << power..2 << power).contains(size)), "2^{power}");
        }
    }
}
