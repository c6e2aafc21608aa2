//! `ucx-gaudi check-card`: tests a card step by step, safest first.
//!
//! Every step relies on the drivers' sources, without confirmation from a card. A child process runs the steps and
//! reports each as a line of JSON: the driver kills users of a card that it resets, and the report must survive that.
//!
//! The steps that work according to sources and vendor tests come first. Odd copies and fills come last, because only
//! assumptions support them: if one hangs an engine, the process ends with a submission in flight, and the driver
//! resets the card. A step that hangs an engine according to the vendor's sources needs `--may-reset`.

mod bench;
mod copies;
mod edma;
mod hca;
pub(crate) mod machine;
mod memory;
mod pattern;
mod queries;
pub(crate) mod reading;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bench::Bench;
use clap::Args;
use hl_thunk::Device;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::Context;
use crate::driver::{Driver, kernel};
use crate::failure::{Exit, Failure};
use crate::info::choice;
use crate::interrupt::{self, ChildGroup};
use crate::output::{DIM, print_failure, print_json};
use crate::redact;
use crate::report::{Finding, Summary, Verdict};
use crate::saved_file::{self, Pending};

/// Options of `check-card`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// The card: an index, module:N or a PCI address. Only software cards have a default, the first free one
    #[arg(long, value_name = "CARD")]
    card: Option<String>,
    /// All lengths from 1 to 4097 at all offsets, ten rounds of open and close instead of one, 1 GiB of host memory
    #[arg(long)]
    thorough: bool,
    /// Go on to the step that hangs an engine by the vendor's sources; the driver then resets the card and kills its
    /// users
    #[arg(long)]
    may_reset: bool,
    /// Also write the JSON report to this file, to send it back: without names of users, of the host and
    /// of processes that hold cards
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Also record every driver call in this file, for `ucx-gaudi trace`
    #[arg(long, value_name = "FILE")]
    trace: Option<String>,
    /// Show a report that `--save` wrote, beside what the software card does; opens no card of the machine
    #[arg(long, value_name = "FILE", conflicts_with_all = ["card", "may_reset", "save", "trace"])]
    read: Option<PathBuf>,
    /// The process that does the work
    #[arg(long, hide = true)]
    child: bool,
    /// The process that opens the card again afterwards
    #[arg(long, hide = true)]
    reopen: bool,
}

/// The checks, in order.
const CHECKS: [&str; 20] = [
    "library",
    "pair",
    "card",
    "machine",
    "hw-info",
    "open",
    "device-memory",
    "host-memory",
    "queues",
    "bulk-copies",
    "in-flight",
    "large-copies",
    "export",
    "import",
    "hca",
    "device-copies",
    "fill",
    "odd-copies",
    "odd-device-copies",
    "odd-fill",
];
/// The last check, only with `--may-reset`.
const EDMA: &str = "edma";
/// Runs in a new process after the one that ran [`EDMA`] has ended.
const REOPEN: &str = "edma-reopen";

/// A line from the child.
#[derive(Debug, Serialize, Deserialize)]
enum Line {
    Begin(String),
    End(Finding),
}

/// Runs the steps and shows what they found.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    if options.child {
        if let Some(file) = &options.trace {
            hl_thunk::trace::start(file)
                .map_err(|error| saved_file::cannot_write(Path::new(file), &error))?;
        }
        match (&options.card, options.reopen) {
            (Some(bus_id), true) => Lines::default().check(REOPEN, || edma::reopen(bus_id)),
            _ => child(options),
        }
        return Ok(Exit::Fine);
    }
    if let Some(file) = &options.read {
        return reading::show(context, file);
    }
    choice(options.card.as_deref())?;
    // Check before the work, not afterwards, that the file can be written.
    options.save.as_deref().map(saved_file::check).transpose()?;
    let trace = options.trace.as_deref().map(hl_thunk::trace::file_name);
    let trace = trace.as_deref().map(Pending::new).transpose()?;
    // After Ctrl-C, results and recording so far are kept.
    interrupt::watch();
    if !context.json {
        anstream::println!("{DIM}{}{DIM:#}\n", announcement(options));
    }
    let began = Instant::now();
    let findings = watch(context, options, trace.as_ref())?;
    // Also if the child was killed: the calls before that are the interesting ones.
    let recorded = trace.map(Pending::keep).transpose();
    let summary = Summary::of(&findings);
    let report = json!({
        "report": "check-card",
        "version": env!("CARGO_PKG_VERSION"),
        "kernel": kernel(),
        "thorough": options.thorough,
        "may_reset": options.may_reset,
        "seconds": began.elapsed().as_secs_f64(),
        "summary": summary,
        "checks": findings,
    });
    if context.json {
        print_json(&report);
    } else {
        summary.print();
        if !options.may_reset && summary.exit() == Exit::Fine {
            anstream::println!(
                "{DIM}not tried: {EDMA}, which may reset the card (--may-reset){DIM:#}"
            );
        }
    }
    let saved = options.save.as_deref().map(|path| redact::save(path, &report)).transpose();
    if let Err(failure) = recorded.and(saved) {
        // The report is on standard output.
        print_failure(&failure, false);
        return Ok(failure.exit);
    }
    Ok(if interrupt::interrupted() { Exit::Interrupted } else { summary.exit() })
}

/// What the run will do, and what that may cost.
fn announcement(options: &Options) -> String {
    let rounds = rounds(options) + 1;
    let opens = format!("Opens and closes the card, {rounds} times. ");
    let resets = "Closing a Gaudi2 resets its engines, which takes seconds; no other process can have it meanwhile. ";
    let copies = "Copies in memory of its own. If an engine hangs in one of the last steps, the driver resets the card \
                  when this ends.";
    let edma = if options.may_reset { " The step edma hangs an engine on purpose." } else { "" };
    opens + resets + copies + edma
}

fn rounds(options: &Options) -> u32 {
    if options.thorough { 10 } else { 1 }
}

/// Runs the checks in a child.
fn watch(
    context: &Context,
    options: &Options,
    trace: Option<&Pending>,
) -> Result<Vec<Finding>, Failure> {
    let mut command = own_child()?;
    command.args(options.card.iter().flat_map(|card| ["--card", card]));
    command.args(trace.iter().flat_map(|file| ["--trace".as_ref(), file.path().as_os_str()]));
    command.args(options.thorough.then_some("--thorough"));
    command.args(options.may_reset.then_some("--may-reset"));
    let mut findings = findings_of(&mut command, context.json, &CHECKS)?;
    let of = |check: &str| findings.iter().find(|finding| finding.check == check);
    let bus_id = of("card").and_then(|card| card.data["bus_id"].as_str().map(str::to_owned));
    // Also if the process died before it could report the result.
    let submitted = of(EDMA)
        .is_some_and(|edma| edma.verdict != Verdict::Skipped && edma.data["submitted"] != false);
    if let Some(bus_id) = bus_id.filter(|_| submitted && !interrupt::interrupted()) {
        let mut command = own_child()?;
        command.args(["--reopen", "--card", &bus_id]);
        findings.extend(findings_of(&mut command, context.json, &[REOPEN])?);
    }
    let of = |check: &str| findings.iter().find(|finding| finding.check == check);
    let node = of("card").and_then(|card| card.data["node"].as_u64());
    if let (Some(node), Some(before), false) = (node, of("machine"), interrupt::interrupted()) {
        let after = machine::compare(Path::new("/"), node as u32, &before.data);
        if !context.json {
            after.print();
        }
        findings.push(after);
    }
    Ok(findings)
}

fn own_child() -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| cannot_start(&error))?);
    command.args(["check-card", "--child"]);
    Ok(command)
}

fn cannot_start(error: &std::io::Error) -> Failure {
    Failure::unable(format!("cannot start the process that does the checks: {error}"), "")
}

/// Runs the child, and prints its findings as they arrive, except with JSON.
fn findings_of(
    command: &mut Command,
    json: bool,
    checks: &[&'static str],
) -> Result<Vec<Finding>, Failure> {
    let child = ChildGroup::start(command.stdin(Stdio::null()).stdout(Stdio::piped()));
    let mut child = child.map_err(|error| cannot_start(&error))?;
    let mut lines = BufReader::new(child.child().stdout.take().expect("piped"));
    let (mut findings, mut running) = (Vec::new(), None);
    // Only shown on a terminal: a thorough check takes minutes.
    let spinner = ProgressBar::new_spinner();
    let take = |findings: &mut Vec<Finding>, finding: Finding| {
        if !json {
            spinner.suspend(|| finding.print());
        }
        findings.push(finding);
    };
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        match serde_json::from_slice(&line) {
            Ok(Line::Begin(check)) => {
                spinner.enable_steady_tick(Duration::from_millis(100));
                spinner.set_message(check.clone());
                running = Some(check);
            }
            Ok(Line::End(finding)) => {
                running = None;
                take(&mut findings, finding);
            }
            // Output of the driver library, in an unknown encoding.
            Err(_) => eprintln!("{}", String::from_utf8_lossy(&line).trim_end_matches('\n')),
        }
        line.clear();
    }
    let status = child.wait().map_err(|error| cannot_start(&error))?;
    spinner.finish_and_clear();
    let mut missing = checks.to_vec();
    missing.retain(|check| findings.iter().all(|finding| finding.check != *check));
    if running.is_none() && status.success() && missing.is_empty() {
        return Ok(findings);
    }
    let step = if running.is_some() { "in this step" } else { "outside a step" };
    let how = match status.signal() {
        Some(libc::SIGKILL) => format!(
            "the process was killed {step}, as the driver kills users of a card that it reset"
        ),
        Some(signal) => format!("the process died of signal {signal} {step}"),
        None => format!("the process ended {step} ({status})"),
    };
    let check = running.as_deref().unwrap_or("process");
    let remedy = "look at the kernel log (dmesg), and send it with the report";
    take(
        &mut findings,
        match status.signal() {
            Some(libc::SIGINT) => Finding::skipped(check, "not tried to the end: Ctrl-C"),
            _ => Finding::bad(check, how, remedy),
        },
    );
    for other in missing.into_iter().filter(|other| *other != check) {
        take(&mut findings, Finding::skipped(other, "not tried: the process ended before"));
    }
    Ok(findings)
}

/// The child: runs the checks, until one fails that later ones need.
fn child(options: &Options) {
    let mut lines = Lines::default();
    let _ = checks(&mut lines, options);
    let missing = CHECKS.iter().filter(|check| !lines.done.contains(check));
    let why = lines.failed.unwrap_or("an earlier check");
    for check in missing {
        say(&Line::End(Finding::skipped(check, format!("not tried: {why} failed"))));
    }
}

/// `None` if it ended early.
fn checks(lines: &mut Lines, options: &Options) -> Option<()> {
    let library = lines.needed("library", queries::library)?;
    lines.check("pair", || Driver::read(Path::new("/")).judge(&library));
    let card = lines.needed("card", || queries::card(&library, options.card.as_deref()))?;
    let bus_id = card.bus_id.as_str();
    lines.check("machine", || machine::record(Path::new("/"), card.node, bus_id));
    lines.check("hw-info", || queries::hw_info(&library, &card));
    let rounds = rounds(options);
    let device = lines.needed("open", || queries::open_and_close(&library, &card, rounds))?;
    let area = lines.needed("device-memory", || memory::device_memory(&device))?;
    lines.check("host-memory", || memory::host_memory(&device, options.thorough));
    let mut bench = if device.generation().accepts_submissions() {
        let queues = lines.needed("queues", || copies::queues(&device, &area));
        let bench = queues.and_then(|mut bench| {
            lines.needed("bulk-copies", || copies::bulk(&mut bench))?;
            lines.needed("in-flight", || copies::in_flight(&mut bench))?;
            lines.needed("large-copies", || copies::large(&mut bench)).map(|()| bench)
        });
        let Some(bench) = bench else {
            // An engine may still use it, so it stays mapped until the process ends.
            std::mem::forget(area);
            return None;
        };
        Some(bench)
    } else {
        no_copies(lines, &device, &["queues", "bulk-copies", "in-flight", "large-copies"]);
        None
    };
    lines.check("export", || memory::export(&device, &area));
    lines.check("import", || memory::import(&device));
    lines.check("hca", || hca::check(&device, &area, bench.as_mut()));
    let Some(mut bench) = bench else {
        no_copies(lines, &device, &COPY_CHECKS.map(|(check, _)| check));
        if options.may_reset {
            no_copies(lines, &device, &[EDMA]);
        }
        return Some(());
    };
    for (check, copy) in COPY_CHECKS {
        lines.check(check, || copy(&mut bench, options.thorough));
        if bench.lost() {
            std::mem::forget(area);
            return None;
        }
    }
    if options.may_reset {
        lines.check(EDMA, || edma::host_command_buffer(&mut bench));
        if bench.lost() {
            std::mem::forget(area);
        }
    }
    Some(())
}

type CopyCheck = fn(&mut Bench, bool) -> Finding;

/// Copies in device memory, followed by copies that only assumptions support.
const COPY_CHECKS: [(&str, CopyCheck); 5] = [
    ("device-copies", |bench, _| copies::within_the_card(bench)),
    ("fill", |bench, _| copies::fill(bench)),
    ("odd-copies", copies::odd),
    ("odd-device-copies", copies::odd_within_the_card),
    ("odd-fill", copies::odd_fill),
];

fn no_copies(lines: &mut Lines, device: &Device, checks: &[&'static str]) {
    for check in checks {
        let why = format!("a {} takes no copies through the kernel", device.generation());
        lines.check(check, || Finding::skipped(check, why));
    }
}

/// Reports results to the parent.
#[derive(Default)]
struct Lines {
    done: Vec<&'static str>,
    failed: Option<&'static str>,
}

impl Lines {
    /// A check that no later check needs.
    fn check(&mut self, check: &'static str, f: impl FnOnce() -> Finding) {
        self.needed(check, || (f(), Some(())));
    }

    /// A check whose result later checks need.
    fn needed<T>(
        &mut self,
        check: &'static str,
        f: impl FnOnce() -> (Finding, Option<T>),
    ) -> Option<T> {
        say(&Line::Begin(check.to_owned()));
        let (finding, brought) = f();
        self.done.push(check);
        let brought = brought.filter(|_| finding.verdict != Verdict::Bad);
        if brought.is_none() {
            self.failed = Some(check);
        }
        say(&Line::End(Finding { check: check.to_owned(), ..finding }));
        brought
    }
}

fn say(line: &Line) {
    let mut text = serde_json::to_string(line).expect("representable");
    text.push('\n');
    let mut out = std::io::stdout().lock();
    // If the output was closed, the line is lost.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The findings of a child that prints this and ends in this way.
    fn findings(lines: &[u8], end: &str) -> Vec<Finding> {
        let text: String = lines.iter().map(|byte| format!("\\{byte:03o}")).collect();
        let mut command = Command::new("sh");
        command.args(["-c", &format!("printf '{text}'; {end}")]);
        findings_of(&mut command, true, &CHECKS).expect("runs")
    }

    fn all_good() -> Vec<u8> {
        let line = |check: &&str| serde_json::to_vec(&Line::End(Finding::good(check, ""))).unwrap();
        CHECKS.iter().map(line).collect::<Vec<_>>().join(&b'\n')
    }

    #[test]
    fn a_child_that_dies_outside_a_step_is_a_bad_finding() {
        assert_eq!(findings(&all_good(), "exit 0").len(), CHECKS.len());
        for end in ["exit 3", "kill -SEGV $$"] {
            let found = findings(&all_good(), end);
            assert_eq!(found.len(), CHECKS.len() + 1, "{end}");
            assert_eq!(Summary::of(&found).exit(), Exit::Problem, "{end}");
        }
    }

    #[test]
    fn checks_that_the_child_does_not_report_are_skipped() {
        for (begun, bad) in [("", "process"), ("{\"Begin\":\"pair\"}\n", "pair")] {
            let lines = serde_json::to_string(&Line::End(Finding::good("library", ""))).unwrap();
            let found = findings(format!("{lines}\n{begun}").as_bytes(), "exit 0");
            let verdict = |check: &str| {
                found.iter().find(|finding| finding.check == check).expect("reported").verdict
            };
            assert_eq!(verdict("library"), Verdict::Good);
            assert_eq!(verdict(bad), Verdict::Bad);
            let skipped = CHECKS.iter().filter(|check| verdict(check) == Verdict::Skipped).count();
            assert_eq!(skipped, CHECKS.len() - if bad == "pair" { 2 } else { 1 });
        }
    }

    #[test]
    fn output_of_the_driver_library_that_is_not_utf8_hides_no_finding() {
        let lines = [b"caf\xe9\n".as_slice(), &all_good()].concat();
        assert_eq!(findings(&lines, "exit 0").len(), CHECKS.len());
    }
}
