//! `ucx-gaudi bench`: how fast messages move between two processes, for each operation, pair of memories and size.
//! Every byte is compared.
//!
//! `ucp-check`, which is installed with the tool, moves the data ([`runner`]). Every round also measures each operation
//! between host memories, and memcpy in this process: a busy machine slows these floors down, too. The best of several
//! rounds counts. Ctrl-C ends the run after a table of the results so far.

pub(crate) mod compare;
mod results;
mod runner;
mod two_hosts;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hl_thunk::Library;
use indicatif::{ProgressBar, ProgressStyle};

use crate::Context;
use crate::explain::bytes;
use crate::failure::{Exit, Failure};
use crate::interrupt;
use crate::output::{note, print_failure, print_json};
use crate::saved_file;
use results::Results;
use runner::Runner;

/// Options of `bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    measure: Measure,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare two files of --save: exit code 1 if the second is slower
    Compare(compare::Options),
    /// Be the receiving side of `bench --peer` on another host, until Ctrl-C
    Serve(two_hosts::Options),
}

/// What is measured, and where results go.
#[derive(Debug, Args)]
struct Measure {
    /// Operations
    #[arg(long, value_delimiter = ',', value_parser = ["tag", "am", "stream", "put", "get"],
          default_value = "tag,put,get", value_name = "OP,…")]
    ops: Vec<String>,
    /// Memories of sender and receiver; host:host is always measured, as the floor
    #[arg(long = "mem", value_delimiter = ',',
          value_parser = ["host:host", "host:gaudi", "gaudi:host", "gaudi:gaudi"],
          default_value = "host:gaudi,gaudi:host,gaudi:gaudi", value_name = "SRC:DST,…")]
    pairs: Vec<String>,
    /// Sizes, such as 8,64K,4M
    #[arg(long, value_delimiter = ',', value_parser = bytes, default_value = "8,4K,64K,1M,16M",
          value_name = "SIZE,…")]
    sizes: Vec<usize>,
    /// Rounds, of which the best counts
    #[arg(long, short = 'n', default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Messages of each size in a round, each alone and then eight at once
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    iterations: u32,
    /// Folder with libucp, or the prefix of a UCX; default: what the loader path finds
    #[arg(long, value_name = "DIR")]
    ucx: Option<PathBuf>,
    /// Measure to another host, where `ucx-gaudi bench serve HOST:PORT` runs
    #[arg(long, value_name = "HOST:PORT")]
    peer: Option<String>,
    /// With the settings of `run --tuned`, where you set none
    #[arg(long)]
    tuned: bool,
    /// Write the results as JSON, for `bench compare`
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Write the results as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// Measures, or compares.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    match &options.command {
        Some(Command::Compare(options)) => compare::run(context, options),
        Some(Command::Serve(options)) => two_hosts::serve(context, options),
        None => measure(context, &options.measure),
    }
}

fn measure(context: &Context, options: &Measure) -> Result<Exit, Failure> {
    // Check before the measuring, which takes minutes.
    for file in [&options.save, &options.csv].into_iter().flatten() {
        saved_file::check(file)?;
    }
    let mut pairs = options.pairs.clone();
    pairs.retain(|pair| pair != results::FLOOR);
    pairs.insert(0, String::from(results::FLOOR));
    let steps = u64::from(options.rounds) * (options.ops.len() * pairs.len()) as u64;
    let bar = progress(context, steps);
    interrupt::watch();
    let runner = Runner::new(context, options)?;
    // The library says which card it is; without a library the first pair fails with the reason.
    let mut results = Results::new(Library::load().ok().as_deref(), options.rounds);
    results.peer.clone_from(&options.peer);
    let mut failure = None;
    'all: for round in 1..=options.rounds {
        for &size in &options.sizes {
            results.add_memcpy(size, runner::memcpy(size));
        }
        for op in &options.ops {
            for pair in &pairs {
                bar.set_message(format!("round {round} of {}: {op} {pair}", options.rounds));
                match runner.run(op, pair) {
                    Ok(Some(rows)) => rows.into_iter().for_each(|row| results.add(row)),
                    Ok(None) => break 'all,
                    Err(reason) => {
                        failure = Some(reason);
                        break 'all;
                    }
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    results.interrupted = interrupt::interrupted() || failure.is_some();
    let why = if failure.is_some() { "it did not run to the end" } else { "ended by Ctrl-C" };
    if results.is_empty() {
        // Keep the files of an earlier run.
        let stopped = Failure { exit: Exit::Interrupted, ..Failure::unable(why, "") };
        return Err(failure.unwrap_or(stopped));
    }
    results.error = failure.as_ref().map(|failure| failure.to_json()["error"].take());
    if results.interrupted {
        note(&format!("{why}: these are the results until then"));
    }
    let written = publish(context, options, &results);
    if let Some(failure) = failure.or(written.err()) {
        // The results are on standard output.
        print_failure(&failure, false);
        return Ok(failure.exit);
    }
    match (results.interrupted, results.all_verified()) {
        (true, _) => Ok(Exit::Interrupted),
        (false, true) => Ok(Exit::Fine),
        (false, false) => Ok(Exit::Problem),
    }
}

fn publish(context: &Context, options: &Measure, results: &Results) -> Result<(), Failure> {
    if context.json {
        print_json(results);
    } else {
        results.print_table();
    }
    for (file, text) in [(&options.save, results.json()), (&options.csv, results.csv())] {
        let Some(file) = file else { continue };
        saved_file::replace(file, &text)?;
        note(&format!("wrote {}", file.display()));
    }
    Ok(())
}

/// A progress bar, on a terminal only.
fn progress(context: &Context, steps: u64) -> ProgressBar {
    if context.json {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left");
    bar.set_style(style.expect("a fixed template"));
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    bar
}
