//! `measure messages`: bandwidth of put, get, tag and active message between two processes, with many in flight, over a working
//! set that no cache holds. The floor is memcpy over a working set of the same size, in the same process and run.
//!
//! Process 0 transfers or sends. Process 1 has the other end of the memory, and receives or only progresses.
//!
//! With `--wakeup` both processes sleep while they wait, and it reports their processor time instead of the latency.

use super::processor_time;
use super::record::{Record, size_name};
use super::timing::median;
use crate::client::Client;
use crate::control::Control;
use crate::matrix::{Op, Pair, Plan};
use crate::processes::{Environment, Group, Job, Member, Message, client};
use crate::ucp::{AmMode, Endpoint, Idle, Memory, PackedRegion, Region, RemoteKey, Request, Ucx};
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Operations in flight at any time.
const OUTSTANDING: usize = 16;
/// Barriers at which both processes meet: after each pass of messages, and after they have closed the connection.
const PASS: u64 = 1000;
const CLOSED: u64 = 1001;
/// Tag of the messages to itself with which a process writes its working set.
const FILL: u64 = u64::MAX;

#[derive(Serialize, Deserialize)]
pub struct Rotation {
    /// UCX, features and time limit; operations (put, get, tag, am), one pair, and sizes.
    pub plan: Plan,
    /// Bytes of the working set, on each side.
    pub set: usize,
    /// Passes with the largest size before anything is measured, until the buffers in repeated use are pinned.
    pub warm_up: usize,
    /// Measured passes over the working set, of which the median counts. One more pass goes before them.
    pub passes: usize,
}

impl Rotation {
    /// The transfer sizes of one operation's passes, in order; only the last passes of each size are measured.
    fn passes(&self) -> Vec<usize> {
        let warm_up = self.plan.sizes.iter().max().map(|size| vec![*size; self.warm_up]);
        let measured = self.plan.sizes.iter().flat_map(|size| vec![*size; self.passes + 1]);
        warm_up.into_iter().flatten().chain(measured).collect()
    }

    /// Bytes that all passes of one operation move, in GB.
    fn gigabytes(&self) -> f64 {
        let pass = |size: usize| self.set / size * size;
        self.passes().into_iter().map(pass).sum::<usize>() as f64 / 1e9
    }
}

/// Runs both processes. The first prints the records.
pub(super) fn run(rotation: Rotation, environment: &Environment) -> Result<()> {
    let Rotation { plan, set, .. } = &rotation;
    let timeout = plan.timeout;
    let measured = |op: &Op| op.one_sided() || matches!(op, Op::Tag | Op::Am);
    ensure!(plan.ops.iter().all(measured), "only put, get, tag and am can be measured so");
    ensure!(plan.pairs.len() == 1, "one pair of memories, please");
    let fits = |size: &usize| (1..=*set).contains(size);
    ensure!(plan.sizes.iter().all(fits), "sizes from 1 to the working set's");
    Group::start(&Job::Messages(rotation), 2, timeout, environment)?.print_lines()
}

/// One of the two processes.
pub(crate) fn side(rotation: &Rotation, mut member: Member) -> Result<()> {
    let Rotation { plan, set, .. } = rotation;
    let (rank, control) = (member.rank, &mut member.only_channel()?);
    let client =
        client(plan, member.rank, Ucx::load(plan.ucx.as_deref())?, false, &member.watchdog)?;
    let mut report = |name: String, value: f64, unit, floor: f64| {
        let record = Record::new(name, value, unit, floor, None);
        member.report(&Message::Line(serde_json::to_string(&record)?))
    };
    for &op in &plan.ops {
        let Pair { src, dst } = plan.pairs[0];
        let local_is_source = op != Op::Get;
        let region = client.region(if local_is_source == (rank == 0) { src } else { dst }, *set)?;
        client.step("writing the working set");
        fill(&client, &region)?;
        let address: Vec<u8> = control.exchange(client.worker(), &client.worker().address()?)?;
        // SAFETY: the address of the worker of the other process, which runs the same UCX.
        let endpoint = unsafe { client.connect(&address, false) }?;
        let packed: PackedRegion = control.exchange(client.worker(), &region.pack()?)?;
        if rank == 1 {
            let before = processor_time::seconds()?;
            for size in rotation.passes().into_iter().filter(|_| !op.one_sided()) {
                receive_pass(&client, &region, op, (set / size, size))?;
                control.barrier(client.worker(), PASS)?;
            }
            control.barrier(client.worker(), op as u64)?;
            control.send(&(processor_time::seconds()? - before))?;
        } else {
            // SAFETY: the other process keeps its region until both meet below.
            let key = unsafe { endpoint.unpack(&packed) }?;
            let mut ends = Ends {
                client: &client,
                endpoint: &endpoint,
                region: &region,
                key: &key,
                op,
                control: (!op.one_sided()).then_some(&mut *control),
                used: 0.0,
            };
            for size in rotation.passes().into_iter().take(rotation.warm_up) {
                ends.pass(set / size, size)?;
            }
            for &size in &plan.sizes {
                client.step(format_args!("{op} {size}"));
                let (memcpy, moved) = ends.bandwidth(rotation, size)?;
                report(format!("{op}, {}", size_name(size)), moved, "GB/s", memcpy)?;
            }
            if op.one_sided() && !plan.features.wakeup() {
                client.step(format_args!("{op}, one at a time"));
                let time = ends.latency()?;
                report(format!("{op}, 8 B, one at a time"), time, "µs", time)?;
            }
            let used = ends.used;
            control.barrier(client.worker(), op as u64)?;
            let used = used + control.receive::<f64>(client.worker())?;
            if plan.features.wakeup() {
                let used = used / rotation.gigabytes();
                report(format!("{op}, processor time"), used, "s/GB", used)?;
            }
        }
        client.finish(endpoint.close(false)?)?;
        control.barrier(client.worker(), CLOSED)?;
    }
    Ok(())
}

/// Receives the messages of a pass, each at the offset that it has at its sender.
fn receive_pass(
    client: &Client,
    region: &Arc<Region>,
    op: Op,
    (pieces, size): (usize, usize),
) -> Result<()> {
    let worker = client.worker();
    let mut in_flight: VecDeque<Request> = VecDeque::new();
    let mut idle = Idle::default();
    let (mut begun, mut done) = (0, 0);
    while done < pieces {
        if op == Op::Tag {
            while begun < pieces && in_flight.len() < OUTSTANDING {
                let into = region.span(begun * size, size);
                in_flight.push_back(worker.tag_receive(&into, (begun * size) as u64)?);
                begun += 1;
            }
        } else if let Some(message) = worker.take_message() {
            let at = usize::from_le_bytes(message.header().try_into()?);
            ensure!(at.checked_add(size).is_some_and(|end| end <= region.length()), "header");
            match message.receive(&region.span(at, size))? {
                Some(request) => in_flight.push_back(request),
                None => done += 1,
            }
        }
        match in_flight.front_mut().and_then(Request::poll) {
            Some(ended) => {
                ended?;
                in_flight.pop_front();
                done += 1;
            }
            None => worker.wait(&mut idle, None)?,
        }
    }
    Ok(())
}

/// Writes the whole region, because reads of memory that was never written do not reach memory. It uses messages,
/// because UCX emulates puts to Gaudi memory in small pieces.
fn fill(client: &Client, region: &Arc<Region>) -> Result<()> {
    let piece = client.region(Memory::Host, region.length().min(16 << 20))?;
    piece.write(0, &vec![0x5a; piece.length()]);
    let (worker, to_itself) = (client.worker(), Endpoint::to_itself(client.worker())?);
    for at in (0..region.length()).step_by(piece.length()) {
        let length = piece.length().min(region.length() - at);
        let received = worker.tag_receive(&region.span(at, length), FILL)?;
        client.finish(to_itself.tag_send(&piece.span(0, length), FILL)?)?;
        client.finish(received)?;
    }
    client.finish(to_itself.close(false)?)?;
    Ok(())
}

/// Both ends of the memory, as seen by the process that starts the transfers.
struct Ends<'a> {
    client: &'a Client,
    endpoint: &'a Endpoint,
    region: &'a Arc<Region>,
    key: &'a RemoteKey,
    op: Op,
    /// For messages: the receiver reports here that it has received a whole pass.
    control: Option<&'a mut Control>,
    /// Processor time of all passes so far, in seconds.
    used: f64,
}

impl Ends<'_> {
    fn post(&self, at: usize, size: usize) -> Result<Request> {
        let here = self.region.span(at, size);
        Ok(match self.op {
            Op::Put => self.endpoint.put(&here, self.key, at)?,
            Op::Tag => self.endpoint.tag_send(&here, at as u64)?,
            Op::Am => self.endpoint.am_send(&at.to_le_bytes(), &here, AmMode::Auto)?,
            _ => self.endpoint.get(&here, self.key, at)?,
        })
    }

    /// GB/s of memcpy and of the transfers. Passes of the two alternate, so that other load on the machine affects both
    /// alike; the medians count.
    fn bandwidth(&mut self, rotation: &Rotation, size: usize) -> Result<(f64, f64)> {
        let pieces = rotation.set / size;
        let gbps = |start: Instant| (pieces * size) as f64 / start.elapsed().as_secs_f64() / 1e9;
        let (from, mut to) = (vec![1u8; rotation.set], vec![0u8; rotation.set]);
        let (mut copied, mut moved) = (Vec::new(), Vec::new());
        for pass in 0..=rotation.passes {
            let start = Instant::now();
            for (to, from) in to.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
                black_box(to).copy_from_slice(black_box(from));
            }
            let memcpy = gbps(start);
            let start = Instant::now();
            self.pass(pieces, size)?;
            // The first pass warms up pages and caches.
            if pass > 0 {
                copied.push(memcpy);
                moved.push(gbps(start));
            }
        }
        Ok((median(copied), median(moved)))
    }

    fn pass(&mut self, pieces: usize, size: usize) -> Result<()> {
        let before = processor_time::seconds()?;
        let mut in_flight: VecDeque<Request> = VecDeque::new();
        let mut idle = Idle::default();
        let mut next = 0;
        while next < pieces || !in_flight.is_empty() {
            while next < pieces && in_flight.len() < OUTSTANDING {
                in_flight.push_back(self.post(next * size, size)?);
                next += 1;
            }
            if let Some(done) = in_flight.front_mut().and_then(Request::poll) {
                done?;
                in_flight.pop_front();
            } else {
                self.client.worker().wait(&mut idle, None)?;
            }
        }
        // A pass is over when its bytes have arrived.
        match &mut self.control {
            Some(control) => control.barrier(self.client.worker(), PASS)?,
            None => _ = self.client.finish(self.endpoint.flush()?)?,
        }
        self.used += processor_time::seconds()? - before;
        Ok(())
    }

    /// µs for eight bytes, one transfer at a time: a thousand transfers, or as many as fit into half a second.
    fn latency(&self) -> Result<f64> {
        let (mut times, begun) = (Vec::new(), Instant::now());
        while times.len() < 1000 && begun.elapsed().as_secs_f64() < 0.5 {
            let start = Instant::now();
            self.client.finish(self.post(0, 8)?)?;
            if self.op == Op::Put {
                self.client.finish(self.endpoint.flush()?)?;
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(times))
    }
}
