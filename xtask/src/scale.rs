//! `cargo xtask scale`: many workers and threads in one process, and many processes on one node, with verified bytes;
//! measures the resources of each process, and extrapolates to ten thousand endpoints.
//!
//! The page `docs/results/scale.md` is written by `cargo xtask bench-report scale.json`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::{Device, Ucx, Workbench};
use serde::{Deserialize, Serialize};
use ucp_check::verify::usage::ProcessUsage;

use crate::dist::{self, Profile};
use crate::progress::Work;
use crate::repo::Repo;
use crate::{json, setup};

/// The time limit of one run, for a busy machine.
const LIMIT: Duration = Duration::from_secs(3000);
/// Cards of the software machine.
const CARDS: u8 = 8;
/// Seconds that a step may take when 64 processes share a few processors.
const STEP: u32 = 900;

/// What the command line asks for.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Write results there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fetch and build nothing: use what is in the target directory
    #[arg(long)]
    prebuilt: bool,
    /// Only show that it runs: few workers, few processes
    #[arg(long)]
    quick: bool,
}

/// Results of a run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scale {
    runs: Vec<Run>,
}

/// One program whose bytes were verified.
#[derive(Debug, Serialize, Deserialize)]
struct Run {
    name: String,
    /// The description of the run.
    words: String,
    seconds: f64,
    /// The program's own total: `96768 messages, 6341884416 bytes`.
    verified: String,
    /// The usage of each process in each turn.
    usage: Vec<ProcessUsage>,
}

/// A mesh of this many processes, of which as many as there are cards have one at a time.
fn mesh(processes: u8, all_turns: bool) -> String {
    let turns = processes / CARDS;
    let first = if all_turns { "" } else { " --first" };
    format!(
        "mesh --processes {processes} --turns {turns}{first} --usage --plain --sizes 64K+1 --timeout {STEP}"
    )
}

/// Runs everything, prints, writes.
pub(crate) fn run(repo: &Repo, options: &Options) -> Result<()> {
    if !options.prebuilt {
        setup::fetch(repo, &[Ucx::V1_22])?;
        dist::build(repo, Profile::Shipped)?;
    }
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let (workers, most) = if options.quick { (10, 16) } else { (100, 64) };
    let threads = format!(
        "soak --seconds 60 --threads 8 --workers shared --shared {workers} --max 1M --timeout {STEP}"
    );
    let mut runs = vec![
        one(&bench, &format!("{workers} workers, 8 threads"), &threads, true)?,
        one(&bench, "8 processes", &mesh(8, false), true)?,
        one(&bench, "16 processes", &mesh(16, false), true)?,
        one(&bench, &format!("{most} processes"), &mesh(most, true), true)?,
    ];
    // The usage of UCX by itself.
    let host = |processes| {
        format!(
            "mesh --processes {processes} --usage --plain --mem host:host --sizes 64K+1 --timeout {STEP}"
        )
    };
    for plugin in [true, false] {
        let with = if plugin { "with" } else { "without" };
        for processes in [8, if options.quick { 16 } else { 32 }] {
            let name = format!("{processes} processes, host memory, {with} the plugin");
            runs.push(one(&bench, &name, &host(processes), plugin)?);
        }
    }
    let scale = Scale { runs };
    println!("{}", scale.tables());
    if let Some(file) = &options.json {
        json::write(file, &scale)?;
        eprintln!("written: {}", file.display());
    }
    Ok(())
}

fn one(bench: &Workbench, name: &str, words: &str, plugin: bool) -> Result<Run> {
    let (work, start) = (Work::start(name), Instant::now());
    let device = if plugin { Device::not_importing(CARDS.into()) } else { Device::None };
    let tool = bench.ucp_check(Ucx::V1_22).device(&device).words(words);
    let tool = if plugin { tool.plugin() } else { tool };
    let tool = tool.arg("--ucx").arg(Ucx::V1_22.root(bench.layout()));
    let end = tool.limit(LIMIT).run();
    ensure!(end.success(), "{}", end.report());
    let verified = end.stdout.lines().find_map(|line| line.strip_prefix("verified: "));
    let verified = verified.with_context(|| end.report())?.to_owned();
    work.done(&verified);
    let usage = ProcessUsage::of(&end.stdout);
    ensure!(!usage.is_empty(), "no word of what the processes use: {}", end.report());
    let seconds = start.elapsed().as_secs_f64();
    Ok(Run { name: name.to_owned(), words: words.to_owned(), seconds, verified, usage })
}

/// The median of several processes.
fn median(of: impl Fn(&ProcessUsage) -> u64, among: &[&ProcessUsage]) -> f64 {
    let mut values: Vec<u64> = among.iter().map(|usage| of(usage)).collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0) as f64
}

/// The figures shown for a process: descriptors, threads, mappings, resident memory.
const FIGURES: [fn(&ProcessUsage) -> u64; 4] = [
    |usage| usage.descriptors as u64,
    |usage| usage.threads as u64,
    |usage| usage.mappings as u64,
    |usage| usage.resident,
];

impl Run {
    /// Its processes with a card, or without.
    fn processes(&self, card: bool) -> Vec<&ProcessUsage> {
        self.usage.iter().filter(|usage| usage.card == card).collect()
    }

    /// Endpoints of each process.
    fn endpoints(&self) -> f64 {
        self.usage.last().map_or(0.0, |usage| usage.endpoints as f64)
    }
}

impl Scale {
    fn tables(&self) -> String {
        let mut text = String::from("| run | verified | seconds |\n|---|---|--:|\n");
        for Run { name, seconds, verified, .. } in &self.runs {
            let _ = writeln!(text, "| {name} | {verified} | {seconds:.0} |");
        }
        text += "\n| run | processes | endpoints of each | descriptors | threads | mappings | resident |\n|---|---|--:|--:|--:|--:|--:|\n";
        for run in &self.runs {
            for (card, kind) in [(true, "with a card"), (false, "without")] {
                let among = run.processes(card);
                // In a single process: before and after.
                if run.words.starts_with("soak") {
                    let states = if card { &among[..] } else { &[] };
                    for (usage, state) in states.iter().zip(["before", "in use"]) {
                        row(&mut text, &run.name, state, &[usage]);
                    }
                } else if !among.is_empty() {
                    let host_only = run.words.contains("--mem host:host");
                    row(&mut text, &run.name, if host_only { "all" } else { kind }, &among);
                }
            }
        }
        text + "\n" + &self.per_endpoint()
    }

    /// The cost of one more endpoint: the difference between two runs, divided by the difference in endpoints.
    fn per_endpoint(&self) -> String {
        let mut text = String::from(
            "| one endpoint more, to a process on the same node | descriptors | mappings | resident |\n|---|--:|--:|--:|\n",
        );
        let find = |begin: &str| self.runs.iter().find(|run| run.name == begin);
        let largest = |end: &str| {
            let matching = self.runs.iter().filter(|run| run.name.ends_with(end));
            matching.max_by_key(|run| run.endpoints() as u64)
        };
        for (what, small, large, card) in [
            (
                "host memory, without the plugin",
                find("8 processes, host memory, without the plugin"),
                largest("without the plugin"),
                true,
            ),
            (
                "host memory, with the plugin",
                find("8 processes, host memory, with the plugin"),
                largest("memory, with the plugin"),
                true,
            ),
            (
                "process without a card, some of the peers have one",
                find("16 processes"),
                largest(" processes"),
                false,
            ),
            (
                "process with a card, relays to and from each peer",
                find("8 processes"),
                largest(" processes"),
                true,
            ),
        ] {
            let (Some(small), Some(large)) = (small, large) else { continue };
            let cost = |of| {
                let more = median(of, &large.processes(card)) - median(of, &small.processes(card));
                more / (large.endpoints() - small.endpoints()).max(1.0)
            };
            // The program itself has a socket to each of the others.
            let descriptors = cost(FIGURES[0]) - 1.0;
            let (mappings, resident) = (cost(FIGURES[2]), cost(FIGURES[3]) / 1e3);
            let _ =
                writeln!(text, "| {what} | {descriptors:.1} | {mappings:.1} | {resident:.0} kB |");
        }
        text
    }

    /// The whole page.
    pub(crate) fn page(&self, [date, commit, machine]: [&str; 3]) -> String {
        let commands = self.runs.iter().fold(String::new(), |mut text, run| {
            let _ = writeln!(text, "* {}: `ucp-check {}`", run.name, run.words);
            text
        });
        format!(
            "# Results: scale\n\n\
             Many workers and threads in one process, and many processes on one node with eight software cards. A card is one \
             process's at a time: in a turn every eighth of 64 processes has one, the others use host memory; after eight turns \
             each has had one. All pairs exchange in both directions, by put, get and tags, at once; every byte is verified.\n\n\
             | | |\n|---|---|\n\
             | date | {date} |\n\
             | commit | {commit} |\n\
             | machine | {machine} |\n\
             | command | `cargo xtask scale --json scale.json` |\n\n\
             Written by `cargo xtask bench-report scale.json`. Times are of a machine that may have been busy with other things. \
             Figures of processes are medians, taken while all are connected. Resident memory includes shared memory, and of processes with a \
             card its software HBM. What ten thousand endpoints would take: [performance.md](../performance.md#many-processes-and-endpoints).\n\n\
             {}\n## What was run\n\n{commands}",
            self.tables()
        )
    }
}

fn row(text: &mut String, run: &str, kind: &str, among: &[&ProcessUsage]) {
    let [descriptors, threads, mappings, resident] = FIGURES.map(|of| median(of, among));
    let endpoints = among.last().map_or(0, |usage| usage.endpoints);
    let megabytes = resident / 1e6;
    let _ = writeln!(
        text,
        "| {run} | {kind} | {endpoints} | {descriptors:.0} | {threads:.0} | {mappings:.0} | {megabytes:.1} MB |"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(card: bool, endpoints: usize, descriptors: usize, resident: u64) -> ProcessUsage {
        let (threads, mappings) = (5, 100);
        ProcessUsage { rank: 0, card, endpoints, descriptors, threads, mappings, resident }
    }

    #[test]
    fn the_cost_of_an_endpoint_is_the_slope_less_the_programs_socket() {
        let run = |name: &str, usage| Run {
            name: name.to_owned(),
            words: "mesh".to_owned(),
            seconds: 1.0,
            verified: "1 messages, 1 bytes".to_owned(),
            usage,
        };
        let runs = vec![
            run("8 processes", vec![usage(true, 7, 40, 10_000_000)]),
            run(
                "16 processes",
                vec![usage(true, 15, 64, 18_000_000), usage(false, 15, 30, 5_000_000)],
            ),
            run(
                "64 processes",
                vec![usage(true, 63, 208, 66_000_000), usage(false, 63, 78, 9_800_000)],
            ),
        ];
        let text = Scale { runs }.page(["2026-01-02", "abc1234", "a machine"]);
        for row in [
            "| process with a card, relays to and from each peer | 2.0 | 0.0 | 1000 kB |",
            "| process without a card, some of the peers have one | 0.0 | 0.0 | 100 kB |",
            "| 64 processes | with a card | 63 | 208 | 5 | 100 | 66.0 MB |",
            "* 64 processes: `ucp-check mesh`",
        ] {
            assert!(text.contains(row), "{row}\n{text}");
        }
    }
}
