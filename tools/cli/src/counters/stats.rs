//! `ucx-gaudi stats` and `ucx-gaudi top`: the counters of running processes (`docs/statistics.md`).
//!
//! The counters lie in memory that the process shares with processes that may read it; reading them does not disturb
//! it.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Map, Value, json};
use stats_reader::{Counters, Kind, ReadError, Snapshot, read};

use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{print_json, print_table, size, table};

/// Clears a terminal and puts the cursor into its corner.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Options of `stats`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The process; else all processes that this user may look into
    pid: Option<u32>,
    /// Again every SECONDS, only what changed
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true,
          default_missing_value = "1", value_parser = interval)]
    watch: Option<Duration>,
    /// Stop after this many times
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print them in the text format of Prometheus
    #[arg(long, conflicts_with_all = ["watch", "json"])]
    prometheus: bool,
}

/// Options of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopOptions {
    /// Seconds between two looks
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    delay: Duration,
    /// Stop after this many times
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.05..=86400.0).contains(seconds));
    let seconds = seconds.ok_or("give seconds from 0.05 to 86400")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// A process and its counters.
struct Process {
    pid: u32,
    command: String,
    snapshot: Snapshot,
}

/// Shows counters once, or again and again.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let processes = find(options.pid)?;
    if let Some(delay) = options.watch {
        return watch(context, options, delay, processes);
    }
    if options.prometheus {
        print!("{}", prometheus(&processes));
    } else if context.json {
        let all: Vec<Value> = processes.iter().map(to_json).collect();
        print_json(&json!({ "processes": all }));
    } else {
        for Process { pid, command, snapshot } in &processes {
            println!("{command} (pid {pid})\n{snapshot}");
        }
    }
    Ok(Exit::Fine)
}

/// The process asked for, or all that have counters; at least one.
fn find(pid: Option<u32>) -> Result<Vec<Process>, Failure> {
    if let Some(pid) = pid {
        return read(pid)
            .map(|snapshot| vec![process(pid, snapshot)])
            .map_err(|error| unreadable(&error));
    }
    let processes = all();
    if processes.is_empty() {
        return Err(Failure::unable(
            "no process that this user may look into has opened a Gaudi through ucx-gaudi",
            "start one, for example with `ucx-gaudi run -- PROGRAM`; root sees those of all users",
        ));
    }
    Ok(processes)
}

fn unreadable(error: &ReadError) -> Failure {
    let remedy = match error {
        ReadError::NoProcess(_) => {
            "`ucx-gaudi stats` without a number shows the processes there are"
        }
        ReadError::NotAllowed(_) => "run it as the same user, or as root",
        ReadError::NoPage(_) => "a process counts from its first use of a card on",
        ReadError::Inherited { .. } => "read the process that opened the card",
        _ => "is the plugin in that process of another version than this tool?",
    };
    Failure::unable(error.to_string(), remedy)
}

fn all() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut found: Vec<Process> =
        numbers.filter_map(|pid| Some(process(pid, read(pid).ok()?))).collect();
    found.sort_by_key(|process| process.pid);
    found
}

fn process(pid: u32, snapshot: Snapshot) -> Process {
    let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Process { pid, command: command.trim().escape_debug().to_string(), snapshot }
}

fn to_json(process: &Process) -> Value {
    let numbers = |counters: &Counters| -> Map<String, Value> {
        counters.iter().map(|(counter, value)| (counter.name.clone(), json!(value))).collect()
    };
    let cards: Vec<Value> = process
        .snapshot
        .cards
        .iter()
        .map(|card| {
            json!({"bus_id": card.bus_id, "index": card.index, "counters": numbers(&card.counters)})
        })
        .collect();
    json!({
        "pid": process.pid, "command": process.command, "cards": cards,
        "total": numbers(&process.snapshot.total()),
    })
}

/// The text format of Prometheus, one series for each process and card.
fn prometheus(processes: &[Process]) -> String {
    let Some(first) = processes.first() else { return String::new() };
    let mut text = String::new();
    for (at, (counter, _)) in first.snapshot.other.iter().enumerate() {
        // What only grows is a counter, and its name says so.
        let (kind, end) = match counter.kind {
            Kind::Sum => ("counter", "_total"),
            _ => ("gauge", ""),
        };
        let name = format!("ucx_gaudi_{}{end}", counter.name);
        text += &format!("# TYPE {name} {kind}\n");
        for process in processes {
            let command = process.command.replace('\\', "\\\\").replace('"', "\\\"");
            let mut line = |card: &str, counters: &Counters| {
                // Counters are found by name: another process may have another version.
                let same = counters.iter().nth(at).filter(|(other, _)| other.name == counter.name);
                let value = same.map(|(_, value)| value).or_else(|| counters.get(&counter.name));
                if let Some(value) = value {
                    let pid = process.pid;
                    text += &format!(
                        "{name}{{pid=\"{pid}\",command=\"{command}\",card=\"{card}\"}} {value}\n"
                    );
                }
            };
            line("", &process.snapshot.other);
            for card in &process.snapshot.cards {
                line(&card.bus_id, &card.counters);
            }
        }
    }
    text
}

/// What changed, again and again, until the processes have ended.
fn watch(
    context: &Context,
    options: &Options,
    delay: Duration,
    mut before: Vec<Process>,
) -> Result<Exit, Failure> {
    let began = Instant::now();
    for _ in 0..options.count.unwrap_or(u64::MAX) {
        std::thread::sleep(delay);
        let Ok(now) = find(options.pid) else { return Ok(Exit::Fine) };
        let seconds = began.elapsed().as_secs_f64();
        for process in &now {
            let earlier = before.iter().find(|earlier| earlier.pid == process.pid);
            let (total, earlier) =
                (process.snapshot.total(), earlier.map(|one| one.snapshot.total()));
            let past = |name: &str| earlier.as_ref().and_then(|one| one.get(name)).unwrap_or(0);
            let changed = total.iter().filter(|(counter, value)| *value != past(&counter.name));
            let changed: Map<String, Value> = changed
                .map(|(counter, value)| {
                    let change = value as i128 - i128::from(past(&counter.name));
                    (counter.name.clone(), json!([value, change as i64]))
                })
                .collect();
            if context.json {
                // One line a look: a document for each.
                println!("{}", json!({"t": seconds, "pid": process.pid, "changed": changed}));
                continue;
            }
            let words: Vec<String> = changed
                .iter()
                .map(|(name, pair)| {
                    format!("{name} {} ({:+})", pair[0], pair[1].as_i64().unwrap_or(0))
                })
                .collect();
            let words = if words.is_empty() { String::from("no change") } else { words.join(", ") };
            println!("{seconds:8.1} s  {} (pid {}): {words}", process.command, process.pid);
        }
        before = now;
    }
    Ok(Exit::Fine)
}

/// A row for each process, again and again.
pub(crate) fn top(context: &Context, options: &TopOptions) -> Result<Exit, Failure> {
    let on_terminal = std::io::stdout().is_terminal() && !context.json;
    let (mut before, mut since) = (all(), Instant::now());
    for _ in 0..options.count.unwrap_or(u64::MAX) {
        std::thread::sleep(options.delay);
        let (now, seconds) = (all(), since.elapsed().as_secs_f64());
        since = Instant::now();
        let rows: Vec<Row> = now.iter().map(|one| Row::new(one, &before, seconds)).collect();
        if context.json {
            println!("{}", json!(rows.iter().map(Row::to_json).collect::<Vec<_>>()));
        } else {
            if on_terminal {
                print!("{CLEAR}");
            }
            print_rows(&rows);
        }
        before = now;
    }
    Ok(Exit::Fine)
}

/// What `top` shows of a process.
struct Row {
    pid: u32,
    command: String,
    cards: u64,
    allocated: u64,
    in_flight: u64,
    errors: u64,
    /// Bytes a second: to cards, from cards, within and between cards.
    rates: [f64; 3],
}

impl Row {
    fn new(process: &Process, before: &[Process], seconds: f64) -> Self {
        let total = process.snapshot.total();
        let earlier = before.iter().find(|earlier| {
            (earlier.pid, earlier.snapshot.start_time) == (process.pid, process.snapshot.start_time)
        });
        let earlier = earlier.map(|one| one.snapshot.total());
        let value = |name: &str| total.get(name).unwrap_or(0);
        let grown = |name: &str| {
            let past = earlier.as_ref().map_or(value(name), |one| one.get(name).unwrap_or(0));
            value(name).saturating_sub(past) as f64 / seconds.max(1e-3)
        };
        Self {
            pid: process.pid,
            command: process.command.clone(),
            cards: value("open"),
            allocated: value("allocated_bytes"),
            in_flight: value("in_flight"),
            errors: value("dma_errors"),
            rates: [
                grown("h2d_bytes"),
                grown("d2h_bytes"),
                grown("d2d_bytes") + grown("cross_card_bytes"),
            ],
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "pid": self.pid, "command": self.command, "cards": self.cards,
            "allocated_bytes": self.allocated, "in_flight": self.in_flight, "dma_errors": self.errors,
            "to_card_bytes_per_s": self.rates[0], "from_card_bytes_per_s": self.rates[1],
            "between_cards_bytes_per_s": self.rates[2],
        })
    }
}

fn print_rows(rows: &[Row]) {
    if rows.is_empty() {
        println!("no process that this user may look into has opened a Gaudi");
        return;
    }
    let mut shown = table(&[
        "pid",
        "command",
        "cards",
        "memory",
        "to card",
        "from card",
        "on cards",
        "in flight",
        "errors",
    ]);
    for row in rows {
        let rate = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        shown.add_row([
            row.pid.to_string(),
            row.command.clone(),
            row.cards.to_string(),
            size(row.allocated),
            rate(row.rates[0]),
            rate(row.rates[1]),
            rate(row.rates[2]),
            row.in_flight.to_string(),
            row.errors.to_string(),
        ]);
    }
    print_table(&shown);
}

#[cfg(test)]
mod tests {
    use super::interval;

    #[test]
    fn intervals_are_seconds_within_reason() {
        assert_eq!(interval("0.5"), Ok(std::time::Duration::from_millis(500)));
        for wrong in ["0", "-1", "nan", "inf", "1e9", "soon"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
