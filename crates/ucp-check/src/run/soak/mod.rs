//! `soak`: many threads move random messages for a given time, and every byte is checked.
//!
//! Each thread has a worker of its own, which talks to itself and to a second worker of the thread;
//! the last quarter of the threads share one worker in UCS_THREAD_MODE_MULTI. Buffers come and go
//! meanwhile, in host memory also behind UCX's back (see `plots`).

mod dice;
mod plots;
mod thread;

use crate::matrix::{Case, Op, Pair, Sabotage};
use crate::rig::Rig;
use crate::ucp::{Context, Features, Ucx};
use crate::watchdog::Watchdog;
use anyhow::{Context as _, Result, ensure};
use plots::Kind;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread as threads;
use std::time::{Duration, Instant};

/// Who uses which worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Workers {
    /// Every thread its own.
    Own,
    /// One for all.
    Shared,
    /// The last quarter of the threads share one.
    Mixed,
}

impl Workers {
    fn sharing(self, threads: u8) -> u8 {
        match self {
            Workers::Own => 0,
            Workers::Shared => threads,
            Workers::Mixed => threads / 4,
        }
    }
}

/// What to do.
pub struct Options<'a> {
    /// Where UCX is.
    pub ucx: Option<&'a Path>,
    /// How many threads.
    pub threads: u8,
    /// Who uses which worker.
    pub workers: Workers,
    /// For how long.
    pub time: Duration,
    /// The largest message.
    pub max: usize,
    /// Makes everything that is random.
    pub seed: u64,
    /// A step may take this long.
    pub timeout: Duration,
    /// Test of the test.
    pub sabotage: Option<Sabotage>,
}

/// The run ends early after so many wrong messages.
const ENOUGH: u64 = 10;
/// How often the run says where it is.
const EVERY: Duration = Duration::from_secs(5);

/// What all threads did so far.
pub(super) struct Totals {
    start: Instant,
    time: Duration,
    stop: AtomicBool,
    ops: [AtomicU64; Op::PLAIN.len()],
    messages: [AtomicU64; Pair::ALL.len()],
    bytes: [AtomicU64; Pair::ALL.len()],
    made: [AtomicU64; Kind::ALL.len()],
    again: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Totals {
    fn new(time: Duration) -> Totals {
        Totals {
            start: Instant::now(),
            time,
            stop: AtomicBool::new(false),
            ops: Default::default(),
            messages: Default::default(),
            bytes: Default::default(),
            made: Default::default(),
            again: AtomicU64::new(0),
            failures: Mutex::default(),
        }
    }

    fn over(&self) -> bool {
        self.stop.load(Relaxed) || self.start.elapsed() >= self.time
    }

    fn passed(&self, case: &Case) {
        let bump = |counters: &[AtomicU64], at: Option<usize>, by: u64| {
            counters[at.expect("all are listed")].fetch_add(by, Relaxed);
        };
        let pair = Pair::ALL.iter().position(|pair| *pair == case.pair);
        bump(&self.ops, Op::PLAIN.iter().position(|op| *op == case.op.group()), 1);
        bump(&self.messages, pair, 1);
        bump(&self.bytes, pair, case.size as u64);
    }

    fn failed(&self, what: &str) {
        let mut failures = self.failures.lock().unwrap_or_else(|e| e.into_inner());
        eprintln!("FAIL  {what}");
        failures.push(what.to_owned());
        if failures.len() as u64 >= ENOUGH {
            self.stop.store(true, Relaxed);
        }
    }

    fn made(&self, kind: Kind) {
        let at = Kind::ALL.iter().position(|k| *k == kind).expect("all are listed");
        self.made[at].fetch_add(1, Relaxed);
    }

    /// Pages were mapped at the address of pages just given back.
    fn again(&self) {
        self.again.fetch_add(1, Relaxed);
    }

    fn counts(&self) -> (u64, u64) {
        let failed = self.failures.lock().unwrap_or_else(|e| e.into_inner()).len() as u64;
        (sum(&self.ops), failed)
    }

    fn print_progress(&self) {
        let (passed, failed) = self.counts();
        println!(
            "{:>6.0} s  {passed:>10} messages  {:>9.2} GB  {:>8} buffers  {failed} failed",
            self.start.elapsed().as_secs_f64(),
            sum(&self.bytes) as f64 / 1e9,
            sum(&self.made),
        );
    }

    fn print(&self) {
        for (op, count) in Op::PLAIN.iter().zip(&self.ops) {
            println!("{:<34}{:>12} messages", op.to_string(), count.load(Relaxed));
        }
        for ((pair, messages), bytes) in Pair::ALL.iter().zip(&self.messages).zip(&self.bytes) {
            let (messages, bytes) = (messages.load(Relaxed), bytes.load(Relaxed));
            println!("{:<34}{messages:>12} messages {bytes:>18} bytes", pair.to_string());
        }
        for (kind, made) in Kind::ALL.iter().zip(&self.made) {
            println!("{:<34}{:>12} buffers made", kind.name(), made.load(Relaxed));
        }
        println!("{:<34}{:>12} buffers", "of these at a freed address", self.again.load(Relaxed));
    }
}

fn sum(counters: &[AtomicU64]) -> u64 {
    counters.iter().map(|counter| counter.load(Relaxed)).sum()
}

/// Runs it; an error if a byte was wrong or a call of UCX failed.
pub fn run(options: &Options<'_>) -> Result<()> {
    ensure!(options.threads > 0, "a soak without threads moves nothing");
    let dog = Watchdog::start("soak", options.time + options.timeout);
    dog.step("the whole run");
    let ucx = Ucx::load(options.ucx)?;
    let context = Context::new(ucx, Features::ALL, true)?;
    let sharing = options.workers.sharing(options.threads);
    println!(
        "UCX {}: {} threads ({sharing} of them share a worker), {} s, up to {} bytes, seed {}",
        ucx.version(),
        options.threads,
        options.time.as_secs_f64(),
        options.max,
        options.seed,
    );
    let shared = Rig::in_context(&context, true, &dog)?;
    let totals = Totals::new(options.time);
    let outcomes: Vec<Result<()>> = threads::scope(|scope| {
        let running: Vec<_> = (0..options.threads)
            .map(|n| {
                let (context, shared, totals) = (&context, &shared, &totals);
                scope.spawn(move || {
                    let seat = if n < options.threads - sharing {
                        Seat::Own(context)
                    } else {
                        Seat::Shared(shared)
                    };
                    let outcome = one(options, totals, n, &seat);
                    if outcome.is_err() {
                        totals.stop.store(true, Relaxed);
                    }
                    outcome
                })
            })
            .collect();
        let mut said = Instant::now();
        while running.iter().any(|thread| !thread.is_finished()) {
            threads::sleep(Duration::from_millis(100));
            if said.elapsed() >= EVERY {
                said = Instant::now();
                totals.print_progress();
            }
        }
        let end = |thread: threads::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked")))
        };
        running.into_iter().map(end).collect()
    });
    totals.print();
    let (passed, failed) = totals.counts();
    println!(
        "soaked for {:.1} s with seed {}: {passed} passed, {failed} failed",
        totals.start.elapsed().as_secs_f64(),
        options.seed
    );
    for (n, outcome) in outcomes.into_iter().enumerate() {
        outcome.with_context(|| format!("thread {n}"))?;
    }
    ensure!(failed == 0, "{failed} messages were wrong; the same --seed makes the same ones again");
    ensure!(passed > 0, "nothing was moved in that time");
    dog.step("ucp_cleanup");
    Ok(())
}

/// Where a thread's worker comes from.
enum Seat<'a> {
    /// Made by the thread in this context.
    Own(&'a Context),
    /// Used by other threads as well.
    Shared(&'a Rig),
}

fn one(options: &Options<'_>, totals: &Totals, n: u8, seat: &Seat<'_>) -> Result<()> {
    let dog = Watchdog::start(&format!("thread {n}"), options.timeout);
    let (rig, shared) = match seat {
        Seat::Own(context) => (Rig::in_context(context, false, &dog)?, false),
        Seat::Shared(rig) => (rig.watched_by(&dog), true),
    };
    let outcome = thread::Soaker::new(options, totals, &rig, n, shared)?.run();
    drop(rig);
    dog.retire();
    outcome
}
