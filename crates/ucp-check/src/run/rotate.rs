//! `rotate`: bandwidth of put and get between two processes, many outstanding, over a working set that
//! no cache holds; beside memcpy over a working set of the same size, in the same process and run.
//!
//! Process 0 transfers; process 1 only has the other end of the memory, and progresses.

use super::siblings::{Sibling, Siblings, describe};
use super::surroundings::Surroundings;
use crate::matrix::{Op, Pair, Plan};
use crate::rig::{Rig, RigOptions};
use crate::ucp::{Endpoint, Idle, Memory, PackedRegion, Region, RemoteKey, Request, Ucx};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Name of the hidden subcommand that runs one side.
pub const ROLE: &str = "rotate-side";

/// Passes over the working set; the median counts.
const PASSES: usize = 7;

/// What to measure.
#[derive(Clone, Serialize, Deserialize)]
pub struct Rotation {
    /// UCX, features and patience; operations (put, get), one pair, and sizes.
    pub plan: Plan,
    /// Operations under way at any time.
    pub outstanding: usize,
    /// Bytes of the working set, on each side.
    pub set: usize,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Figure { name: String, value: f64 },
    Error(String),
}

/// Runs both processes and prints each figure: a name, a tab, and GB/s or µs.
pub fn run(rotation: &Rotation, around: &Surroundings) -> Result<()> {
    let plan = &rotation.plan;
    ensure!(plan.ops.iter().all(|op| op.one_sided()), "only put and get can be measured so");
    ensure!(plan.pairs.len() == 1, "one pair of memories, please");
    let fits = |size: &usize| (1..=rotation.set).contains(size);
    ensure!(plan.sizes.iter().all(fits), "sizes from 1 to the working set's");
    let mut twins: Siblings<Message> = Siblings::twins(ROLE, rotation, around)?;
    let limit = Duration::from_secs_f64(plan.timeout_s * 4.0 + 60.0);
    let mut ended = 0;
    while ended < 2 {
        match twins.next(limit)? {
            (_, Some(Message::Figure { name, value })) => println!("{name}\t{value}"),
            (rank, Some(Message::Error(error))) => bail!("process {rank}: {error}"),
            (rank, None) => {
                let status = twins.ended(rank)?;
                ensure!(status.success(), "{}", describe(rank, status));
                ended += 1;
            }
        }
    }
    Ok(())
}

/// One of the two processes; `Ok(false)`: it failed and told the parent.
pub fn side(rank: u8, parent: u32, rotation: &Rotation) -> Result<bool> {
    let limit = Duration::from_secs_f64(rotation.plan.timeout_s);
    let twin = Sibling::begin(rank, parent, limit)?;
    twin.run(Message::Error, |twin| run_side(rank, twin, rotation))
}

fn run_side(rank: u8, mut twin: Sibling, rotation: &Rotation) -> Result<()> {
    let Rotation { plan, set, .. } = rotation;
    let mut parent = twin.reporter()?;
    let mut tell = |name: String, value| parent.tell(&Message::Figure { name, value });
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let options = RigOptions { features: plan.features, hint: false, multi: false };
    let rig = Rig::new(ucx, options, &twin.dog)?;
    let control = &mut twin.only_line()?;
    for &op in &plan.ops {
        let Pair { src, dst } = plan.pairs[0];
        let local_is_source = op == Op::Put;
        let memory = if local_is_source == (rank == 0) { src } else { dst };
        let region = rig.region(memory, *set)?;
        twin.dog.step("writing the working set");
        fill(&rig, &region)?;
        let address: Vec<u8> = control.exchange(rig.worker(), &rig.worker().address()?)?;
        // SAFETY: the address of the worker of our twin, which runs the same UCX.
        let endpoint = unsafe { rig.connect(&address, false) }?;
        let packed: PackedRegion = control.exchange(rig.worker(), &region.pack()?)?;
        if rank == 0 {
            let start = Instant::now();
            // SAFETY: our twin keeps its region until we meet below.
            let key = unsafe { endpoint.unpack(&packed) }?;
            tell(format!("{op} first unpack"), start.elapsed().as_secs_f64() * 1e6)?;
            let end = Ends { rig: &rig, endpoint: &endpoint, region: &region, key: &key, op };
            for &size in &plan.sizes {
                twin.dog.step(format_args!("{op} {size}"));
                let (memcpy, moved) = end.bandwidth(rotation, size)?;
                tell(format!("{op} memcpy {size}"), memcpy)?;
                tell(format!("{op} {size}"), moved)?;
            }
            twin.dog.step(format_args!("{op}, one at a time"));
            tell(format!("{op} latency"), end.latency()?)?;
        }
        control.barrier(rig.worker(), u64::from(op == Op::Put))?;
        let closing = endpoint.close(false)?;
        rig.finish(closing)?;
        control.barrier(rig.worker(), 2)?;
    }
    twin.dog.step("leaving");
    Ok(())
}

/// Writes all of it: memory that nobody has written yet is read faster than memory.
fn fill(rig: &Rig, region: &Arc<Region>) -> Result<()> {
    let piece = rig.region(Memory::Host, region.length().min(16 << 20))?;
    piece.write(0, &vec![0x5a; piece.length()]);
    let address = rig.worker().address()?;
    // SAFETY: the address of our own worker.
    let to_myself = unsafe { rig.connect(&address, false) }?;
    // SAFETY: our own region, which outlives the key.
    let key = unsafe { to_myself.unpack(&region.pack()?) }?;
    for at in (0..region.length()).step_by(piece.length()) {
        let length = piece.length().min(region.length() - at);
        let put = to_myself.put(&piece.span(0, length), &key, at)?;
        rig.finish(put)?;
    }
    let flush = to_myself.flush()?;
    rig.finish(flush)?;
    let closing = to_myself.close(false)?;
    rig.finish(closing)?;
    Ok(())
}

/// Both ends of the memory, from where the transfers are started.
struct Ends<'a> {
    rig: &'a Rig,
    endpoint: &'a Endpoint,
    region: &'a Arc<Region>,
    key: &'a RemoteKey,
    op: Op,
}

impl Ends<'_> {
    fn post(&self, at: usize, size: usize) -> Result<Request> {
        let here = self.region.span(at, size);
        Ok(match self.op {
            Op::Put => self.endpoint.put(&here, self.key, at)?,
            _ => self.endpoint.get(&here, self.key, at)?,
        })
    }

    /// GB/s of memcpy and of the transfers, the medians of passes that take turns: what else the machine
    /// does meets both alike.
    fn bandwidth(&self, rotation: &Rotation, size: usize) -> Result<(f64, f64)> {
        let pieces = rotation.set / size;
        let gbps = |start: Instant| (pieces * size) as f64 / start.elapsed().as_secs_f64() / 1e9;
        let (from, mut to) = (vec![1u8; rotation.set], vec![0u8; rotation.set]);
        let (mut copied, mut moved) = (Vec::new(), Vec::new());
        for pass in 0..=PASSES {
            let start = Instant::now();
            for (to, from) in to.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
                black_box(to).copy_from_slice(black_box(from));
            }
            let memcpy = gbps(start);
            let start = Instant::now();
            self.pass(pieces, size, rotation.outstanding)?;
            // After the first, pages and caches are as they stay.
            if pass > 0 {
                copied.push(memcpy);
                moved.push(gbps(start));
            }
        }
        Ok((median(&mut copied)?, median(&mut moved)?))
    }

    fn pass(&self, pieces: usize, size: usize, outstanding: usize) -> Result<()> {
        let mut under_way: VecDeque<Request> = VecDeque::new();
        let mut idle = Idle::default();
        let mut next = 0;
        while next < pieces || !under_way.is_empty() {
            while next < pieces && under_way.len() < outstanding {
                under_way.push_back(self.post(next * size, size)?);
                next += 1;
            }
            if let Some(done) = under_way.front_mut().and_then(Request::poll) {
                done?;
                under_way.pop_front();
            } else {
                self.rig.worker().wait(&mut idle, None)?;
            }
        }
        // A put is over when it has arrived.
        let flush = self.endpoint.flush()?;
        self.rig.finish(flush)?;
        Ok(())
    }

    /// µs of eight bytes, each waited for.
    fn latency(&self) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..1000 {
            let start = Instant::now();
            let request = self.post(0, 8)?;
            self.rig.finish(request)?;
            if self.op == Op::Put {
                let flush = self.endpoint.flush()?;
                self.rig.finish(flush)?;
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        median(&mut times)
    }
}

fn median(samples: &mut [f64]) -> Result<f64> {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().context("nothing was measured")
}
