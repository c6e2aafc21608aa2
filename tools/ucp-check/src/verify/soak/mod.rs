//! `soak`: many threads move random messages for a given time, and every byte is checked.
//!
//! Each thread has its own worker, which talks to itself and to a second worker of the thread. The last quarter of the
//! threads share one worker in UCS_THREAD_MODE_MULTI, or as many as `--shared` says: each of these talks to itself and
//! to the next. Buffers are made and freed meanwhile, in host memory also without telling UCX (see `pool`).

mod pool;
mod thread;

use crate::client::Client;
use crate::matrix::{Case, Sabotage, size};
use crate::report::verified;
use crate::ucp::{Context, Features, Ucx};
use crate::verify::usage::ProcessUsage;
use crate::watchdog::Watchdog;
use anyhow::{Context as _, Result, anyhow, ensure};
use pool::Kind;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    /// How many workers are shared: each by all threads that share
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    shared: u16,
    /// Largest message size
    #[arg(long, default_value = "16M", value_parser = size)]
    max: usize,
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

/// The run ends early after this many wrong messages.
const ENOUGH: u64 = 10;
/// How often the run reports its progress.
const EVERY: Duration = Duration::from_secs(5);

/// The counts of all threads so far.
struct Totals {
    start: Instant,
    time: Duration,
    stop: AtomicBool,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    passed: u64,
    failed: u64,
    bytes: u64,
    buffers: u64,
    /// By operation, memory pair or kind of buffer: the count, and the bytes.
    by_name: BTreeMap<String, (u64, u64)>,
}

impl Counts {
    fn add(&mut self, name: String, bytes: usize) {
        let (count, sum) = self.by_name.entry(name).or_default();
        (*count, *sum) = (*count + 1, *sum + bytes as u64);
    }
}

impl Totals {
    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn over(&self) -> bool {
        self.stop.load(Relaxed) || self.start.elapsed() >= self.time
    }

    fn passed(&self, case: &Case) {
        let mut counts = self.counts();
        (counts.passed, counts.bytes) = (counts.passed + 1, counts.bytes + case.size as u64);
        counts.add(format!("{} messages", case.op.group()), case.size);
        counts.add(format!("{} messages", case.pair), case.size);
    }

    fn failed(&self, what: &str) {
        let mut counts = self.counts();
        // Printed while the counts are locked, so that only one failure is printed at a time.
        eprintln!("FAIL  {what}");
        counts.failed += 1;
        if counts.failed >= ENOUGH {
            self.stop.store(true, Relaxed);
        }
    }

    /// Counts a new buffer; `reused`: its pages are at the address of pages that were just unmapped.
    fn made(&self, kind: Kind, length: usize, reused: bool) {
        let mut counts = self.counts();
        counts.buffers += 1;
        counts.add(format!("buffers of {}", Kind::NAMES[kind as usize]), length);
        if reused {
            counts.add("of these at a freed address".to_owned(), length);
        }
    }

    fn print_progress(&self) {
        let seconds = self.start.elapsed().as_secs_f64();
        let Counts { passed, failed, bytes, buffers, .. } = &*self.counts();
        let gigabytes = *bytes as f64 / 1e9;
        println!(
            "{seconds:>6.0} s  {passed:>10} messages  {gigabytes:>9.2} GB  {buffers:>8} buffers  \
             {failed} failed"
        );
    }
}

/// Runs it; an error if a byte was wrong or a call of UCX failed.
pub fn run(folder: Option<&Path>, options: &Options) -> Result<()> {
    let other = matches!(options.sabotage, Some(Sabotage::Length | Sabotage::Early));
    ensure!(!other, "a soak can damage the message, the guard or the source");
    let time = Duration::from_secs_f64(options.seconds);
    let watchdog = Watchdog::start("soak", options.seconds + options.timeout);
    watchdog.step("the whole run");
    // SAFETY: it only sets the byte that fills new memory, so that memory is zeroed. Stock UCX reads a byte of some
    // requests that it has not written, and streams then fail by chance (docs/upstream/ucx-stream-status.md).
    unsafe { libc::mallopt(libc::M_PERTURB, 0xff) };
    let ucx = Ucx::load(folder)?;
    let context = Context::new(ucx, Features::ALL, true)?;
    let &Options { threads: count, seed, .. } = options;
    let sharing = match options.workers {
        Workers::Own => 0,
        Workers::Shared => count,
        Workers::Mixed => count / 4,
    };
    println!(
        "UCX {}: {count} threads ({sharing} of them share {}), {} s, up to {} bytes, seed {seed}",
        ucx.version(),
        if options.shared == 1 {
            "a worker".to_owned()
        } else {
            format!("{} workers", options.shared)
        },
        options.seconds,
        options.max,
    );
    let usage = |endpoints| ProcessUsage::now(0, true, endpoints)?.line();
    let before = usage(0)?;
    // Endpoints to itself, to the next worker, and back.
    let endpoints = usize::from(sharing) * usize::from(options.shared) * 3;
    let make = |_| Client::in_context(&context, true, &watchdog);
    let shared: Vec<Client> = (0..options.shared).map(make).collect::<Result<_>>()?;
    let (start, counts) = (Instant::now(), Mutex::default());
    let totals = Totals { start, time, stop: AtomicBool::new(false), counts };
    let outcomes: Vec<Result<()>> = threads::scope(|scope| {
        let start = |n: u8| {
            let shared = (n >= count - sharing).then_some(&*shared);
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
        let (mut printed, mut most) = (Instant::now(), None);
        while running.iter().any(|thread| !thread.is_finished()) {
            threads::sleep(Duration::from_millis(100));
            if printed.elapsed() >= EVERY {
                printed = Instant::now();
                totals.print_progress();
                most = usage(endpoints).ok();
            }
        }
        if let Some(most) = most {
            println!("{before}\n{most}");
        }
        let join = |thread: threads::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("panicked")))
        };
        running.into_iter().map(join).collect()
    });
    let Counts { passed, failed, bytes, by_name, .. } = std::mem::take(&mut *totals.counts());
    for (name, (count, bytes)) in by_name {
        println!("{name:<40}{count:>12}{bytes:>18} bytes");
    }
    let seconds = totals.start.elapsed().as_secs_f64();
    println!("{}", verified(passed, bytes));
    println!("soaked for {seconds:.1} s with seed {seed}: {passed} passed, {failed} failed");
    for (n, outcome) in outcomes.into_iter().enumerate() {
        outcome.with_context(|| format!("thread {n}"))?;
    }
    ensure!(failed == 0, "{failed} messages were wrong; the same --seed makes the same ones again");
    ensure!(passed > 0, "nothing was moved in that time");
    watchdog.step("ucp_cleanup");
    Ok(())
}

/// One thread, with its own worker unless it shares one.
fn one(
    options: &Options,
    totals: &Totals,
    n: u8,
    context: &Context,
    shared: Option<&[Client]>,
) -> Result<()> {
    let watchdog = Watchdog::start(&format!("thread {n}"), options.timeout);
    let clients = match shared {
        None => vec![Client::in_context(context, false, &watchdog)?],
        Some(clients) => clients.iter().map(|client| client.watched_by(&watchdog)).collect(),
    };
    let outcome = thread::Soaker::new(options, totals, &clients, n, shared.is_some())?.run();
    drop(clients);
    watchdog.retire();
    outcome
}
