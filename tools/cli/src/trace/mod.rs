//! `ucx-gaudi trace`: shows, compares and exports recordings of driver calls.

mod diff;
mod export;
mod recording;
mod resources;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{DIM, GREEN, RED, note, print_json, print_table, size, table};
use crate::saved_file::{self, Unreadable};
use diff::{Difference, compare, errno_name};
use recording::{Call, Recording, parse};

/// How many differences of one kind are shown individually.
const SHOWN: usize = 3;
/// Largest file to read: a call takes thirteen times as much memory as in the file.
const LARGEST: u64 = 512 << 20;
/// Longest text of a call's arguments on a terminal.
const ARGUMENTS: usize = 100;

/// Options of `trace`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show a recording's calls
    Show {
        /// What UCX_GAUDI_TRACE wrote
        file: PathBuf,
        /// Only calls that failed
        #[arg(long)]
        failed: bool,
        /// Only calls of this function
        #[arg(long, value_name = "NAME")]
        call: Option<String>,
        /// How often each function was called, and how long it took
        #[arg(long)]
        summary: bool,
    },
    /// Show where two recordings differ, such as one of a card and one of the software Gaudi
    Diff {
        /// One recording
        a: PathBuf,
        /// The other one
        b: PathBuf,
    },
    /// Write a timeline for ui.perfetto.dev or chrome://tracing
    Export {
        /// What UCX_GAUDI_TRACE wrote, of one or several processes
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Where to write it, instead of standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

/// Shows or compares.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    match &options.command {
        Command::Show { file, failed, call, summary } => {
            let recording = read(file)?;
            let wanted = |one: &&Call| {
                (!failed || one.errno.is_some())
                    && call.as_ref().is_none_or(|name| one.name == *name)
            };
            let calls: Vec<&Call> = recording.calls.iter().filter(wanted).collect();
            if call.is_some() && calls.is_empty() && !failed {
                return Err(no_such_call(&recording, call.as_deref().unwrap_or_default()));
            }
            show(context, &recording, &calls, *summary);
            Ok(Exit::Fine)
        }
        Command::Diff { a, b } => {
            let (one, other) = (read(a)?, read(b)?);
            Ok(show_difference(context, (a, &one), (b, &other)))
        }
        Command::Export { files, out } => {
            let mut recordings = Vec::new();
            for file in files {
                recordings.extend(read_all(file)?);
            }
            let text = format!("{}\n", export::timeline(&recordings));
            match out {
                Some(file) => saved_file::replace(file, &text)?,
                None => print!("{text}"),
            }
            Ok(Exit::Fine)
        }
    }
}

fn no_such_call(recording: &Recording, name: &str) -> Failure {
    let names: std::collections::BTreeSet<&str> =
        recording.calls.iter().map(|call| &*call.name).collect();
    Failure {
        exit: Exit::Usage,
        ..Failure::unable(
            format!("the recording has no call of {name}"),
            format!("it has {}", names.into_iter().collect::<Vec<_>>().join(", ")),
        )
    }
}

/// The content of a file.
fn content(path: &Path) -> Result<Vec<u8>, Failure> {
    let shown = path.display();
    saved_file::read(path, LARGEST).map_err(|why| match why {
        Unreadable::Failed(error) => Failure::unable(
            format!("cannot read {shown}: {error}"),
            "record one with UCX_GAUDI_TRACE=FILE in the program's environment",
        ),
        Unreadable::NotAFile => Failure::unable(
            format!("{shown} is no regular file"),
            "give a file that UCX_GAUDI_TRACE=FILE wrote; save what comes from a pipe",
        ),
        Unreadable::TooLong { len, most } => Failure::unable(
            format!("{shown} has {}, of at most {}", size(len), size(most)),
            format!(
                "cut it: `(head -n 1 {shown}; tail -n 1000000 {shown}) > part` keeps the last million calls"
            ),
        ),
    })
}

/// The last recording in a file.
fn read(path: &Path) -> Result<Recording, Failure> {
    let mut recordings = read_all(path)?;
    if recordings.len() > 1 {
        let count = recordings.len();
        note(&format!("{} holds {count} recordings; this is the last one", path.display()));
    }
    Ok(recordings.pop().expect("a file has one"))
}

/// All recordings in a file; there is at least one.
fn read_all(path: &Path) -> Result<Vec<Recording>, Failure> {
    let shown = path.display();
    let recordings = parse(&String::from_utf8_lossy(&content(path)?));
    let Some(last) = recordings.last() else {
        return Err(Failure::unable(
            format!("{shown} is no recording of driver calls in a format that this version knows"),
            "give a file that UCX_GAUDI_TRACE=FILE wrote (share/doc/ucx-gaudi/docs/trace.md)",
        ));
    };
    if let [first, rest @ ..] = &*last.unreadable {
        let count = rest.len() + 1;
        note(&format!("{shown}: {count} lines are unreadable, the first is line {first}"));
    }
    Ok(recordings)
}

/// Count, total and median time of one function's calls.
struct Times {
    count: usize,
    failed: usize,
    total: f64,
    median: f64,
}

fn times<'a>(calls: impl Iterator<Item = &'a Call>) -> BTreeMap<&'a str, Times> {
    let mut all: BTreeMap<&str, (Vec<f64>, usize)> = BTreeMap::new();
    for call in calls.filter(|call| call.is_call()) {
        let (times, failed) = all.entry(&call.name).or_default();
        times.push(call.micros);
        *failed += usize::from(call.errno.is_some());
    }
    let summed = all.into_iter().map(|(name, (mut times, failed))| {
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        (name, Times { count: times.len(), failed, total: times.iter().sum(), median })
    });
    summed.collect()
}

fn show(context: &Context, recording: &Recording, calls: &[&Call], summary: bool) {
    if context.json && summary {
        let times = times(calls.iter().copied());
        let functions = times.iter().map(|(name, times)| {
            json!({
                "call": name, "count": times.count, "failed": times.failed,
                "total_us": times.total, "median_us": times.median,
            })
        });
        let functions: Vec<_> = functions.collect();
        return print_json(&json!({"recording": described(recording), "functions": functions}));
    }
    if context.json {
        let calls = calls.iter().map(|call| {
            json!({
                "line": call.line, "t": call.at, "thread": call.thread, "call": call.name,
                "args": call.args, "ret": call.ret, "errno": call.errno, "us": call.micros,
            })
        });
        let calls: Vec<_> = calls.collect();
        return print_json(&json!({"recording": described(recording), "calls": calls}));
    }
    println!("{}", title(recording));
    if summary {
        let mut rows = table(&["call", "count", "failed", "median µs", "total ms"]);
        for (name, times) in times(calls.iter().copied()) {
            rows.add_row([
                name.to_owned(),
                times.count.to_string(),
                times.failed.to_string(),
                format!("{:.1}", times.median),
                format!("{:.2}", times.total / 1e3),
            ]);
        }
        return print_table(&rows);
    }
    let threads = recording.threads();
    for call in calls {
        let thread = threads.iter().position(|thread| *thread == call.thread).unwrap_or(0) + 1;
        let errno = call.errno.map_or(String::new(), |errno| format!(" {}", errno_name(errno)));
        let style = if call.errno.is_some() { RED } else { anstyle::Style::new() };
        anstream::println!(
            "{DIM}{:>12.6} t{thread}{DIM:#} {style}{}({}) = {}{errno}{style:#} {DIM}{:.1} µs{DIM:#}",
            call.at,
            call.name,
            arguments(call),
            call.ret,
            call.micros
        );
    }
}

/// The arguments on one line of limited length.
fn arguments(call: &Call) -> String {
    let words: Vec<String> =
        call.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let text = words.join(", ").replace('"', "");
    match text.char_indices().nth(ARGUMENTS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn title(recording: &Recording) -> String {
    format!(
        "{} (pid {}), kernel {}, library {}: {} calls in {} threads",
        recording.program,
        recording.pid,
        recording.kernel,
        recording.library.as_deref().unwrap_or("not loaded"),
        recording.calls.iter().filter(|call| call.is_call()).count(),
        recording.threads().len()
    )
}

fn described(recording: &Recording) -> serde_json::Value {
    json!({
        "program": recording.program, "pid": recording.pid, "kernel": recording.kernel,
        "library": recording.library, "threads": recording.threads().len(),
        "calls": recording.calls.iter().filter(|call| call.is_call()).count(),
        "unreadable_lines": recording.unreadable.len(),
    })
}

fn show_difference(
    context: &Context,
    (path_a, a): (&Path, &Recording),
    (path_b, b): (&Path, &Recording),
) -> Exit {
    let comparison = compare(a, b);
    let differs = !comparison.differences.is_empty();
    let (times_a, times_b) = (times(a.calls.iter()), times(b.calls.iter()));
    let names: Vec<&str> =
        times_a.keys().filter(|name| times_b.contains_key(*name)).copied().collect();
    let ratio = |name: &str| times_a[name].median / times_b[name].median.max(0.1);
    if context.json {
        let times = names.iter().map(|name| {
            json!({
                "call": name, "median_us_a": times_a[name].median, "median_us_b": times_b[name].median,
                "ratio": ratio(name),
            })
        });
        let times: Vec<_> = times.collect();
        print_json(&json!({
            "a": described(a), "b": described(b), "same": !differs, "compared": comparison.compared,
            "differences": comparison.differences, "more": comparison.more, "times": times,
        }));
        return if differs { Exit::Problem } else { Exit::Fine };
    }
    println!("A  {}: {}", path_a.display(), title(a));
    println!("B  {}: {}\n", path_b.display(), title(b));
    if differs {
        print_differences(&comparison.differences);
        if comparison.more > 0 {
            println!("… and {} more differences", comparison.more);
        }
    } else {
        // Waits that the titles above count and that were not compared.
        let waits = [a, b].map(|it| it.calls.iter().filter(|call| call.is_idle_wait()).count());
        let without = match waits {
            [0, 0] => String::new(),
            [a, b] => format!("; waits that timed out ({a} in A, {b} in B) are left out"),
        };
        anstream::println!("{GREEN}✓{GREEN:#} {} calls are the same{without}", comparison.compared);
    }
    let mut rows = table(&["call", "count A", "count B", "median A µs", "median B µs", "A / B"]);
    for name in names {
        rows.add_row([
            name.to_owned(),
            times_a[name].count.to_string(),
            times_b[name].count.to_string(),
            format!("{:.1}", times_a[name].median),
            format!("{:.1}", times_b[name].median),
            format!("{:.2}", ratio(name)),
        ]);
    }
    println!();
    print_table(&rows);
    if differs { Exit::Problem } else { Exit::Fine }
}

/// Groups differences, as the same one may occur a thousand times.
fn print_differences(differences: &[Difference]) {
    let mut groups: Vec<(&Difference, Vec<&Difference>)> = Vec::new();
    for one in differences {
        let same = |(first, _): &&mut (&Difference, Vec<&Difference>)| {
            (first.thread, &first.call, &first.what) == (one.thread, &one.call, &one.what)
        };
        match groups.iter_mut().find(same) {
            Some((_, others)) => others.push(one),
            None => groups.push((one, vec![one])),
        }
    }
    for (first, all) in groups {
        let lines: Vec<String> = all.iter().take(SHOWN).map(|one| places(one)).collect();
        let more = if all.len() > SHOWN {
            format!(" and {} more", all.len() - SHOWN)
        } else {
            String::new()
        };
        anstream::println!(
            "{RED}✗{RED:#} thread {}  {}: {} {DIM}({}{more}){DIM:#}",
            first.thread,
            first.call,
            first.what,
            lines.join(", ")
        );
    }
}

/// Where a difference is in the files.
fn places(difference: &Difference) -> String {
    match (difference.line_a, difference.line_b) {
        (Some(a), Some(b)) => format!("A:{a} B:{b}"),
        (Some(a), None) => format!("A:{a}"),
        (None, Some(b)) => format!("B:{b}"),
        (None, None) => String::new(),
    }
}

/// For the crate `fuzz`: all that is done with a recording, but for printing it.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let recordings = parse(&String::from_utf8_lossy(bytes));
    for recording in &recordings {
        let texts = [title(recording), described(recording).to_string()];
        let calls = recording.calls.iter().map(arguments);
        for text in texts.into_iter().chain(calls) {
            assert!(!text.contains(char::is_control), "{text:?} goes to a terminal");
        }
        let times = times(recording.calls.iter());
        assert!(times.values().all(|times| times.failed <= times.count));
        let same = compare(recording, recording);
        assert!(same.differences.is_empty(), "{:?}", same.differences);
        let _ = compare(recording, &recordings[0]);
    }
    let _ = export::timeline(&recordings).to_string();
}
