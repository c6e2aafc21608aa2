//! `cargo xtask soak --hours N`: runs rounds of verified messages with random faults until the time is over (`e2e::soak` has the
//! rounds and the judge), next to a pair of processes that stays connected; prints a table at the end.

pub(crate) mod tally;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::builder::PossibleValuesParser;
use e2e::soak::{Companion, Fault, Played, Round, Way, in_namespaces, is_inside};
use e2e::{Ucx, Workbench};

use crate::dist::{self, Profile};
use crate::progress::Work;
use crate::repo::Repo;
use crate::setup;
use crate::units;
use tally::Tally;

/// How long a pair stays connected before a new pair replaces it.
const TOGETHER: Duration = Duration::from_secs(600);
/// How often the run reports its progress without a terminal.
const EVERY: Duration = Duration::from_secs(60);

/// What the command line asks for.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// For how many hours
    #[arg(long, default_value_t = 0.0)]
    hours: f64,
    /// For how many minutes (more)
    #[arg(long, default_value_t = 0.0)]
    minutes: f64,
    /// Makes all rounds; default: another one each time
    #[arg(long)]
    seed: Option<u64>,
    /// Only this round of the seed
    #[arg(long, requires = "seed")]
    round: Option<u64>,
    /// Only this way
    #[arg(long, value_parser = PossibleValuesParser::new(Way::ALL.map(Way::name)))]
    way: Option<String>,
    /// Only this fault
    #[arg(long, value_parser = PossibleValuesParser::new(Fault::ALL.map(Fault::name)))]
    fault: Option<String>,
    /// Write results there, after every round
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Go on with the results that are there
    #[arg(long, requires = "json")]
    add: bool,
    /// Fetch and build nothing: use what is in the target directory
    #[arg(long)]
    prebuilt: bool,
    /// Further arguments of `ucp-check` in every round, such as `--sabotage message`: shows that the judge can fail
    #[arg(long, value_name = "WORDS", allow_hyphen_values = true, default_value = "")]
    with: String,
}

impl Options {
    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.hours * 3600.0 + self.minutes * 60.0)
    }

    fn ways(&self) -> Vec<Way> {
        let named = |way: &Way| self.way.as_deref() == Some(way.name());
        Way::ALL.into_iter().filter(named).collect()
    }

    fn faults(&self) -> Vec<Fault> {
        let named = |fault: &Fault| self.fault.as_deref() == Some(fault.name());
        Fault::ALL.into_iter().filter(named).collect()
    }

    /// The command that repeats one round.
    fn repeat(&self, seed: u64, round: u64) -> String {
        format!("cargo xtask soak --seed {seed} --round {round}{}", self.choice())
    }

    /// The command line, as far as it affects what runs.
    fn command(&self, seed: u64) -> String {
        let mut line = String::from("cargo xtask soak");
        for (option, value) in [("hours", self.hours), ("minutes", self.minutes)] {
            if value > 0.0 {
                line += &format!(" --{option} {value}");
            }
        }
        line + &format!(" --seed {seed}{}", self.choice())
    }

    /// Options that are needed to repeat a round.
    fn choice(&self) -> String {
        let mut words = String::new();
        for (option, value) in [("way", &self.way), ("fault", &self.fault)] {
            if let Some(value) = value {
                words += &format!(" --{option} {value}");
            }
        }
        if !self.with.is_empty() {
            words += &format!(" --with '{}'", self.with);
        }
        words
    }
}

/// Runs the rounds; an error if a promise was broken.
pub(crate) fn run(repo: &Repo, options: &Options) -> Result<()> {
    ensure!(
        options.round.is_some() || !options.time().is_zero(),
        "for how long? --hours, --minutes, or one --round"
    );
    if !options.prebuilt {
        setup::fetch(repo, &Ucx::ALL)?;
        dist::build(repo, Profile::Shipped)?;
    }
    let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
    let temporary = tempfile::tempdir().context("cannot create a temporary folder")?;
    if let Some(mut again) = in_namespaces(temporary.path()) {
        // This program has built everything; the same program inside the namespaces need not build again.
        if !options.prebuilt {
            again.arg("--prebuilt");
        }
        let end = again.status().context("cannot start the soak in its namespaces")?;
        ensure!(end.success(), "the soak failed");
        return Ok(());
    }
    soak(repo, options, &bench)
}

fn soak(repo: &Repo, options: &Options, bench: &Workbench) -> Result<()> {
    let seed = options.seed.unwrap_or_else(|| std::process::id().into());
    let logs = repo.layout().target().join("soak");
    std::fs::create_dir_all(&logs).context("cannot create a folder for reports")?;
    let mut tally = Tally::new(repo, options.command(seed), is_inside());
    if let Some(file) = options.json.as_deref().filter(|_| options.add) {
        tally = tally.added_to(file)?;
    }
    let (start, mut said) = (Instant::now(), Instant::now());
    let before = tally.seconds;
    let work = Work::start(format!("soak with seed {seed}"));
    if let Some(round) = options.round {
        one(options, bench, &mut tally, &logs, seed, round)?;
    } else {
        let (mut number, mut companions) = (0, 0);
        let mut companion: Option<Companion> = None;
        while start.elapsed() < options.time() {
            if companion.as_ref().is_none_or(Companion::has_ended) {
                if let Some(ended) = companion.take() {
                    accompanied(&mut tally, ended, &logs, companions)?;
                }
                let left = options.time().saturating_sub(start.elapsed());
                let seconds = TOGETHER.min(left).as_secs();
                companion = Some(Companion::start(bench, companions, seed + companions, seconds));
                companions += 1;
            }
            one(options, bench, &mut tally, &logs, seed, number)?;
            number += 1;
            tally.seconds = before + start.elapsed().as_secs_f64();
            tally.write(options.json.as_deref())?;
            work.note(&tally.summary());
            if said.elapsed() > EVERY && !work.is_shown() {
                eprintln!("{}: {}", units::seconds(start.elapsed()), tally.summary());
                said = Instant::now();
            }
        }
        if let Some(last) = companion {
            accompanied(&mut tally, last, &logs, companions)?;
        }
    }
    tally.seconds = before + start.elapsed().as_secs_f64();
    tally.write(options.json.as_deref())?;
    work.done(&tally.summary());
    println!("{}", tally.terminal());
    for violation in &tally.violations {
        println!("VIOLATION  {}: {}\n    {}", violation.title, violation.what, violation.repeat);
    }
    ensure!(tally.violations.is_empty(), "{} promises were broken", tally.violations.len());
    Ok(())
}

/// Runs one round and counts it. Keeps the output of a round that broke a promise.
fn one(
    options: &Options,
    bench: &Workbench,
    tally: &mut Tally,
    logs: &Path,
    seed: u64,
    number: u64,
) -> Result<()> {
    let round = Round::draw(mix(seed, number), &options.ways(), &options.faults());
    let played = round.play(bench, &options.with);
    let title = format!("round {number}: {}, {}, UCX {}", round.way, round.fault, round.ucx.name());
    if options.round.is_some() {
        println!("{title}\n{}", played.report);
    }
    let broken = tally.add(round.way.name(), round.fault.name(), &played);
    if broken {
        let file = logs.join(format!("seed-{seed}-round-{number}.txt"));
        keep(tally, &played, title, options.repeat(seed, number), &file)?;
    }
    Ok(())
}

fn accompanied(tally: &mut Tally, ended: Companion, logs: &Path, number: u64) -> Result<()> {
    let title = format!("connected pair {number}: {}", ended.title);
    let played = ended.finish();
    if tally.add("connected", Fault::None.name(), &played) {
        let file = logs.join(format!("{}-connected-{number}.txt", std::process::id()));
        let repeat = played.report.lines().next().unwrap_or_default().to_owned();
        keep(tally, &played, title, repeat, &file)?;
    }
    Ok(())
}

fn keep(
    tally: &mut Tally,
    played: &Played,
    title: String,
    repeat: String,
    file: &Path,
) -> Result<()> {
    for violation in &played.judged.violations {
        eprintln!("VIOLATION  {title}: {violation} ({})", file.display());
        tally.violated(&title, violation, &repeat);
    }
    let text = format!("{title}\n{:?}\n{}", played.judged, played.report);
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// The seed of a round: SplitMix64.
fn mix(seed: u64, number: u64) -> u64 {
    let mut z = seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn the_command_of_a_violation_repeats_that_round_alone() {
        let line = Line::parse_from("soak --hours 2 --way relay".split(' '));
        let repeat = line.options.repeat(7, 12);
        assert_eq!(repeat, "cargo xtask soak --seed 7 --round 12 --way relay");
        let words = repeat.split(' ').skip(2);
        let again = Line::parse_from(words).options;
        assert_eq!((again.seed, again.round, again.ways()), (Some(7), Some(12), vec![Way::Relay]));
        assert_eq!(line.options.command(7), "cargo xtask soak --hours 2 --seed 7 --way relay");
    }
}
