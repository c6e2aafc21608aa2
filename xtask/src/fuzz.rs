//! `cargo xtask fuzz`: runs the targets of `tests/fuzz` for long, with libFuzzer, guided by coverage, with AddressSanitizer.
//!
//! The stable toolchain builds the program: `RUSTC_BOOTSTRAP=1` permits its sanitizer. libFuzzer itself is C++. Without
//! a C++ compiler the targets run without guidance, as in `cargo xtask test`, but longer.
//!
//! New inputs go to `target/fuzz/corpus`; with `--keep`, small ones that reach new code also go to `tests/fuzz/corpus`. A crash
//! leaves its input in `target/fuzz/crashes`: fix the cause, and add the input to `tests/fuzz/corpus/TARGET` under a new name.
//!
//! Runs add up in `tests/fuzz/totals.json`, from which `docs/results/fuzzing.md` is written. What was found and fixed
//! is added by hand to `tests/fuzz/found.md`, which becomes part of that page.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::bench::report::{head, this_machine, today};
use crate::repo::Repo;
use crate::toolchain::Toolchain;
use crate::{dist, json};

const PAGE: &str = "docs/results/fuzzing.md";
const CORPUS: &str = "tests/fuzz/corpus";
const TOTALS: &str = "tests/fuzz/totals.json";
/// What was found and fixed: lines that begin with [`NOTE`] and name the input.
const FOUND: &str = "tests/fuzz/found.md";
const NOTE: &str = "* `";
/// Longest input to generate.
const MAX_LEN: u32 = 8 << 10;
/// The largest allocation that an input may cause, in MiB.
const MALLOC_LIMIT: u32 = 256;
/// Seconds after which an input counts as a hang. A submission that hangs ends after 30 ms.
const TIMEOUT: u32 = 25;
/// Most inputs that `--keep` adds to a corpus, and the longest.
const MOST_KEPT: usize = 40;
const LONGEST_KEPT: u64 = 2 << 10;

/// Options for LLVM that let libFuzzer see which edges an input takes, and which values are compared.
const COVERAGE: [&str; 7] = [
    "--cfg",
    "fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// All runs of a target.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Total {
    executions: u64,
    seconds: u64,
    /// Most edges that the corpus of any run reached.
    edges: u64,
    /// Most inputs in the corpus of any run.
    inputs: u64,
    /// Runs that an input stopped: by a crash, a hang, or a large allocation.
    found: u64,
}

type Totals = BTreeMap<String, Total>;

/// What one may ask for.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Folders of tests/fuzz/corpus; without any: all
    targets: Vec<String>,
    /// How long each runs
    #[arg(long, default_value_t = 4.0)]
    minutes: f64,
    /// Put small inputs that reach something new into tests/fuzz/corpus
    #[arg(long)]
    keep: bool,
    /// Build nothing: run what was built the last time
    #[arg(long)]
    prebuilt: bool,
}

/// Runs some targets, or all, for this long each.
pub(crate) fn run(repo: &Repo, options: &Options) -> Result<()> {
    let targets = targets(repo, &options.targets)?;
    let seconds = (options.minutes * 60.0).ceil().max(1.0) as u64;
    let Some(sanitizer) = tools()? else {
        eprintln!("no C++ compiler (c++, or CXX): running without coverage");
        let mut cargo = repo.cargo_for_tests();
        cargo.args(["test", "-p", "fuzz", "--release", "--", "--test-threads=1"]).args(&targets);
        let status = cargo.env("FUZZ_SECONDS", seconds.to_string()).status();
        ensure!(status.context("cannot run cargo")?.success(), "a target failed");
        return Ok(());
    };
    let folder = repo.layout().target().join("fuzz");
    let built = folder.join("program");
    if !options.prebuilt {
        let program = build(repo, sanitizer.as_deref())?;
        fs::copy(program, &built).context("cannot keep the program")?;
    }
    ensure!(built.exists(), "nothing is built yet: leave out --prebuilt");
    let mut found = Vec::new();
    for target in &targets {
        let fuzzer = Fuzzer { repo, program: &built, folder: &folder, target };
        let run = fuzzer.run(seconds)?;
        eprintln!(
            "{target}: {} executions in {} s, {} edges, {} inputs{}",
            run.executions,
            run.seconds,
            run.edges,
            run.inputs,
            if run.found > 0 { ", FAILED" } else { "" }
        );
        if run.found > 0 {
            found.push(target.as_str());
        }
        record(repo, target, &run)?;
        if options.keep {
            fuzzer.keep()?;
        }
    }
    if !found.is_empty() {
        let place = repo.shown(&folder).to_string();
        bail!("{}: the inputs are in {place}/crashes", found.join(", "));
    }
    Ok(())
}

/// Every target has a corpus; a test checks that.
fn targets(repo: &Repo, wanted: &[String]) -> Result<Vec<String>> {
    let entries = fs::read_dir(repo.path(CORPUS)).context("no corpora")?;
    let mut all: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().display().to_string()).collect();
    all.sort();
    for name in wanted {
        ensure!(all.contains(name), "{name} is none of the targets {}", all.join(", "));
    }
    Ok(if wanted.is_empty() { all } else { wanted.to_vec() })
}

/// `None` without a C++ compiler; otherwise the toolchain's host, if the toolchain has AddressSanitizer for it.
fn tools() -> Result<Option<Option<String>>> {
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let runs = Command::new(compiler).arg("--version").stdout(Stdio::null()).status();
    if !runs.is_ok_and(|status| status.success()) {
        return Ok(None);
    }
    let toolchain = Toolchain::find()?;
    let has_sanitizer = fs::read_dir(toolchain.for_host("lib"))
        .into_iter()
        .flatten()
        .flatten()
        .any(|file| file.file_name().to_string_lossy().ends_with("_rt.asan.a"));
    Ok(Some(has_sanitizer.then_some(toolchain.host)))
}

/// Builds the program into a separate folder. With `--target`, flags do not apply to build scripts.
fn build(repo: &Repo, sanitizer: Option<&str>) -> Result<PathBuf> {
    let mut flags = COVERAGE.map(str::to_owned).to_vec();
    let mut cargo = repo.cargo();
    match sanitizer {
        Some(host) => {
            flags.push("-Zsanitizer=address".to_owned());
            cargo.env("RUSTC_BOOTSTRAP", "1").args(["build", "--target", host]);
        }
        None => {
            eprintln!("this toolchain has no AddressSanitizer: running without");
            cargo.arg("build");
        }
    }
    cargo.args(["-p", "fuzz", "--features", "libfuzzer", "--bin", "fuzz", "--profile", "fuzz"]);
    cargo.arg("--message-format=json-render-diagnostics");
    cargo.arg("--target-dir").arg(repo.layout().target().join("fuzz"));
    cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    dist::artifact(&dist::messages(&mut cargo)?, "fuzz", "")
}

/// The program with one target.
struct Fuzzer<'a> {
    repo: &'a Repo,
    program: &'a Path,
    folder: &'a Path,
    target: &'a str,
}

impl Fuzzer<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new("nice");
        command.arg("-n").arg("15").arg(self.program).env("FUZZ_TARGET", self.target);
        // Control characters in its output would reach the terminal.
        command.args(["-close_fd_mask=1", "-detect_leaks=0", "-rss_limit_mb=4096"]);
        command.arg(format!("-max_len={MAX_LEN}"));
        command.arg(format!("-malloc_limit_mb={MALLOC_LIMIT}")).arg(format!("-timeout={TIMEOUT}"));
        command
    }

    /// The folder with the inputs of all runs.
    fn corpus(&self) -> Result<PathBuf> {
        let folder = self.folder.join("corpus").join(self.target);
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        Ok(folder)
    }

    fn kept(&self) -> PathBuf {
        self.repo.path(CORPUS).join(self.target)
    }

    fn run(&self, seconds: u64) -> Result<Total> {
        let crashes = self.folder.join("crashes");
        fs::create_dir_all(&crashes).context("cannot make a folder")?;
        let mut command = self.command();
        command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
        command.arg(format!("-artifact_prefix={}/{}-", crashes.display(), self.target));
        command.arg(self.corpus()?).arg(self.kept());
        let start = Instant::now();
        let output = command.stdout(Stdio::null()).output().context("cannot run the fuzzer")?;
        let said = String::from_utf8_lossy(&output.stderr);
        fs::write(self.folder.join(format!("{}.log", self.target)), &*said)?;
        if !output.status.success() {
            let lines: Vec<&str> = said.lines().collect();
            let tail = &lines[lines.len().saturating_sub(60)..];
            eprintln!("{}", tail.join("\n"));
        }
        let mut total = read(&said, start.elapsed().as_secs());
        total.found = u64::from(!output.status.success());
        Ok(total)
    }

    /// Adds small inputs that reach more code than those in the repository.
    fn keep(&self) -> Result<()> {
        let merged = tempfile::tempdir().context("no temporary folder")?;
        for file in fs::read_dir(self.kept())?.flatten() {
            fs::copy(file.path(), merged.path().join(file.file_name()))?;
        }
        let status = self
            .command()
            .arg("-merge=1")
            .arg(merged.path())
            .arg(self.corpus()?)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        ensure!(status.context("cannot run the fuzzer")?.success(), "{}: no merge", self.target);
        let mut new: Vec<(u64, PathBuf)> = fs::read_dir(merged.path())?
            .flatten()
            .filter(|file| !self.kept().join(file.file_name()).exists())
            .map(|file| (file.metadata().map_or(u64::MAX, |data| data.len()), file.path()))
            .collect();
        new.retain(|(len, _)| *len <= LONGEST_KEPT);
        // Short ones and long ones.
        new.sort();
        let step = new.len().div_ceil(MOST_KEPT).max(1);
        for (_, file) in new.into_iter().step_by(step) {
            fs::copy(&file, self.kept().join(file.file_name().context("a name")?))?;
        }
        Ok(())
    }
}

/// libFuzzer's summary after this many seconds; if an input stopped the run, it does not say how long the run was.
fn read(said: &str, seconds: u64) -> Total {
    let word_behind = |word: &str| {
        let line = said.lines().rev().find(|line| line.contains(word))?;
        let number = line.split_once(word)?.1.split_whitespace().next()?;
        number.split('/').next()?.parse().ok()
    };
    Total {
        executions: word_behind("stat::number_of_executed_units:").unwrap_or(0),
        seconds,
        edges: word_behind(" cov: ").unwrap_or(0),
        inputs: word_behind(" corp: ").unwrap_or(0),
        found: 0,
    }
}

/// Adds a run to the totals, and writes the page.
fn record(repo: &Repo, target: &str, run: &Total) -> Result<()> {
    let mut totals = totals(repo)?;
    let total = totals.entry(target.to_owned()).or_default();
    *total = Total {
        executions: total.executions + run.executions,
        seconds: total.seconds + run.seconds,
        found: total.found + run.found,
        edges: run.edges.max(total.edges),
        inputs: run.inputs.max(total.inputs),
    };
    json::write(&repo.path(TOTALS), &totals)?;
    let found = fs::read_to_string(repo.path(FOUND)).with_context(|| format!("no {FOUND}"))?;
    let text = page(&totals, &found, [&today()?, &head(repo)?, &this_machine()?]);
    fs::write(repo.path(PAGE), text).with_context(|| format!("cannot write {PAGE}"))
}

fn totals(repo: &Repo) -> Result<Totals> {
    let text = fs::read_to_string(repo.path(TOTALS)).with_context(|| format!("no {TOTALS}"))?;
    serde_json::from_str(&text).context(TOTALS)
}

/// The lines of [`FOUND`], one for each input.
fn notes(found: &str) -> impl Iterator<Item = &str> {
    found.lines().filter(|line| line.starts_with(NOTE))
}

fn page(totals: &Totals, found: &str, [date, commit, machine]: [&str; 3]) -> String {
    let mut text = format!(
        "# Results: fuzzing\n\n\
         Inputs from outside, mutated with libFuzzer under AddressSanitizer: a target panics where a promise is broken \
         (`tests/fuzz`). All recorded runs since 2026-11-18, added up (`{TOTALS}`); date and commit are the last run's, and the code has changed between them.\n\n\
         | | |\n|---|---|\n\
         | date | {date} |\n\
         | commit | {commit} |\n\
         | machine | {machine} |\n\
         | command | `cargo xtask fuzz` |\n\n\
         *found*: runs that ended because an input crashed, took longer than {TIMEOUT} s or allocated more than {MALLOC_LIMIT} MiB at once. \
         *edges*: those of the whole program that the inputs reach. Every test run repeats the inputs in `tests/fuzz/corpus`.\n\n\
         | target | executions | seconds | inputs | edges | found |\n|---|--:|--:|--:|--:|--:|\n"
    );
    let mut sum = Total::default();
    for (name, total) in totals {
        let Total { executions, seconds, edges, inputs, found } = total;
        text += &format!("| {name} | {executions} | {seconds} | {inputs} | {edges} | {found} |\n");
        sum.executions += executions;
        sum.seconds += seconds;
        sum.found += found;
    }
    text += &format!("| all | {} | {} | | | {} |\n", sum.executions, sum.seconds, sum.found);
    text += &format!("\n## What was found and mended\n\nInputs in `{CORPUS}`, from `{FOUND}`:\n\n");
    notes(found).for_each(|note| text += &format!("{note}\n"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
#2\tINITED cov: 16 ft: 16 corp: 1/1b exec/s: 0 rss: 32Mb
#2408253\tDONE   cov: 24 ft: 25 corp: 5/25b lim: 4096 exec/s: 218932 rss: 222Mb
Done 2408253 runs in 11 second(s)
stat::number_of_executed_units: 2408253
stat::average_exec_per_sec:     218932
";

    #[test]
    fn what_libfuzzer_says_at_the_end_is_read() {
        let total = Total { executions: 2_408_253, seconds: 11, edges: 24, inputs: 5, found: 0 };
        assert_eq!(read(SAID, 11), total);
        let nothing = Total { seconds: 3, ..Total::default() };
        assert_eq!(read("==1==ERROR: libFuzzer: out-of-memory", 3), nothing);
    }

    #[test]
    fn the_page_has_a_row_for_each_target_the_sum_and_what_was_found() {
        let total = read(SAID, 11);
        let totals = Totals::from([("key".to_owned(), total.clone()), ("page".to_owned(), total)]);
        let found = "# Heading\n\nFor editors.\n\n* `page/sums`: an overflow.\n";
        let text = page(&totals, found, ["2026-01-02", "abc1234", "a machine"]);
        assert!(text.contains("| key | 2408253 | 11 | 5 | 24 | 0 |\n"), "{text}");
        assert!(text.contains("| all | 4816506 | 22 | | | 0 |\n"), "{text}");
        assert!(text.ends_with(":\n\n* `page/sums`: an overflow.\n"), "{text}");
        assert!(!text.contains("For editors"), "{text}");
    }

    #[test]
    fn every_target_has_totals() {
        let repo = Repo::find().expect("a checkout");
        let all: Vec<String> = totals(&repo).expect("totals").into_keys().collect();
        assert_eq!(all, targets(&repo, &[]).expect("corpora"));
    }

    #[test]
    fn what_was_found_names_inputs_that_are_in_the_corpus() {
        let repo = Repo::find().expect("a checkout");
        let found = fs::read_to_string(repo.path(FOUND)).expect("what was found");
        assert!(notes(&found).count() > 0);
        for note in notes(&found) {
            let (input, _) = note[NOTE.len()..].split_once("`: ").expect(note);
            assert!(repo.path(CORPUS).join(input).is_file(), "{input}");
        }
    }
}
