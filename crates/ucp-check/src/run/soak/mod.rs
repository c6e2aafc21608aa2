//! `soak`: many threads move random messages for a given time, and every byte is checked.
//!
//! Each thread has a worker of its own, which talks to itself and to a second worker of the thread; the last
//! quarter of the threads share one worker in UCS_THREAD_MODE_MULTI. Buffers come and go meanwhile, in host
//! memory also without UCX being told (see `pool`).

mod pool;
mod random;
mod thread;

use crate::client::Client;
use crate::matrix::{Case, Op, Pair, Sabotage, Size};
use crate::ucp::{Context, Features, Ucx};
use crate::watchdog::Watchdog;
use anyhow::{Context as _, Result, anyhow, ensure};
use pool::Kind;
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

/// What to do.
#[derive(clap::Args)]
pub struct Options {
    /// For how long
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// How many threads
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..))]
    threads: u8,
    /// Every thread its own worker, one shared by all, or the last quarter sharing one
    #[arg(long, value_enum, default_value = "mixed")]
    workers: Workers,
    /// Largest message size
    #[arg(long, default_value = "16M")]
    max: Size,
    /// Makes everything that is random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds that one step may take before it counts as hung
    #[arg(long, default_value_t = 120.0)]
    timeout: f64,
    /// Damage one byte after every transfer: proves that the check can fail
    #[arg(long, value_name = "WHERE")]
    sabotage: Option<Sabotage>,
}

/// The run ends early after so many wrong messages.
const ENOUGH: u64 = 10;
/// How often the run says where it is.
const EVERY: Duration = Duration::from_secs(5);

/// What all threads did so far.
struct Totals {
    start: Instant,
    time: Duration,
    stop: AtomicBool,
    ops: [AtomicU64; Op::PLAIN.len()],
    messages: [AtomicU64; Pair::ALL.len()],
    bytes: [AtomicU64; Pair::ALL.len()],
    made: [AtomicU64; Kind::ALL.len()],
    reused: AtomicU64,
    failed: AtomicU64,
    /// One failure is printed at a time.
    printing: Mutex<()>,
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
            reused: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            printing: Mutex::default(),
        }
    }

    fn over(&self) -> bool {
        self.stop.load(Relaxed) || self.start.elapsed() >= self.time
    }

    fn passed(&self, case: &Case) {
        let op = Op::PLAIN.iter().position(|op| *op == case.op.group());
        let pair = Pair::ALL.iter().position(|pair| *pair == case.pair);
        let (Some(op), Some(pair)) = (op, pair) else { unreachable!("all are listed") };
        self.ops[op].fetch_add(1, Relaxed);
        self.messages[pair].fetch_add(1, Relaxed);
        self.bytes[pair].fetch_add(case.size as u64, Relaxed);
    }

    fn failed(&self, what: &str) {
        let _printing = self.printing.lock();
        eprintln!("FAIL  {what}");
        if self.failed.fetch_add(1, Relaxed) + 1 >= ENOUGH {
            self.stop.store(true, Relaxed);
        }
    }

    fn made(&self, kind: Kind) {
        self.made[kind as usize].fetch_add(1, Relaxed);
    }

    /// Pages were mapped at the address of pages just given back.
    fn reused_an_address(&self) {
        self.reused.fetch_add(1, Relaxed);
    }

    fn counts(&self) -> (u64, u64) {
        (sum(&self.ops), self.failed.load(Relaxed))
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
        for (name, made) in Kind::NAMES.iter().zip(&self.made) {
            println!("{name:<34}{:>12} buffers made", made.load(Relaxed));
        }
        println!("{:<34}{:>12} buffers", "of these at a freed address", self.reused.load(Relaxed));
    }
}

fn sum(counters: &[AtomicU64]) -> u64 {
    counters.iter().map(|counter| counter.load(Relaxed)).sum()
}

/// Runs it; an error if a byte was wrong or a call of UCX failed.
pub fn run(folder: Option<&Path>, options: &Options) -> Result<()> {
    let other = matches!(options.sabotage, Some(Sabotage::Length | Sabotage::Early));
    ensure!(!other, "a soak can damage the message, the guard or the source");
    let time = Duration::from_secs_f64(options.seconds);
    let watchdog = Watchdog::start("soak", time + Duration::from_secs_f64(options.timeout));
    watchdog.step("the whole run");
    let ucx = Ucx::load(folder)?;
    let context = Context::new(ucx, Features::ALL, true)?;
    let &Options { threads: count, seed, .. } = options;
    let sharing = match options.workers {
        Workers::Own => 0,
        Workers::Shared => count,
        Workers::Mixed => count / 4,
    };
    println!(
        "UCX {}: {count} threads ({sharing} of them share a worker), {} s, up to {} bytes, seed {seed}",
        ucx.version(),
        options.seconds,
        options.max.0,
    );
    let shared = Client::in_context(&context, true, &watchdog)?;
    let totals = Totals::new(time);
    let outcomes: Vec<Result<()>> = threads::scope(|scope| {
        let start = |n: u8| {
            let shared = (n >= count - sharing).then_some(&shared);
            let (context, totals) = (&context, &totals);
            scope.spawn(move || {
                let outcome = one(options, totals, n, context, shared);
                if outcome.is_err() {
                    totals.stop.store(true, Relaxed);
                }
                outcome
            })
        };
        let running: Vec<_> = (0..count).map(start).collect();
        let mut printed = Instant::now();
        while running.iter().any(|thread| !thread.is_finished()) {
            threads::sleep(Duration::from_millis(100));
            if printed.elapsed() >= EVERY {
                printed = Instant::now();
                totals.print_progress();
            }
        }
        let join = |thread: threads::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("panicked")))
        };
        running.into_iter().map(join).collect()
    });
    totals.print();
    let (passed, failed) = totals.counts();
    let seconds = totals.start.elapsed().as_secs_f64();
    println!("soaked for {seconds:.1} s with seed {seed}: {passed} passed, {failed} failed");
    for (n, outcome) in outcomes.into_iter().enumerate() {
        outcome.with_context(|| format!("thread {n}"))?;
    }
    ensure!(failed == 0, "{failed} messages were wrong; the same --seed makes the same ones again");
    ensure!(passed > 0, "nothing was moved in that time");
    watchdog.step("ucp_cleanup");
    Ok(())
}

/// One thread, with a worker of its own unless it shares one.
fn one(
    options: &Options,
    totals: &Totals,
    n: u8,
    context: &Context,
    shared: Option<&Client>,
) -> Result<()> {
    let limit = Duration::from_secs_f64(options.timeout);
    let watchdog = Watchdog::start(&format!("thread {n}"), limit);
    let client = match shared {
        None => Client::in_context(context, false, &watchdog)?,
        Some(client) => client.watched_by(&watchdog),
    };
    let outcome = thread::Soaker::new(options, totals, &client, n, shared.is_some())?.run();
    drop(client);
    watchdog.retire();
    outcome
}
