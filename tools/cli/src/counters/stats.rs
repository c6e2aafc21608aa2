//! `ucx-gaudi stats`: the counters of running processes, once or as they change.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Map, Value, json};
use stats_reader::{Counters, ReadError, read};

use super::{Process, interval};
use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::print_json;

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
    /// Show also counters that are 0
    #[arg(long, conflicts_with_all = ["watch", "json"])]
    all: bool,
}

/// Shows counters once, or repeatedly.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let processes = find(options.pid)?;
    if let Some(delay) = options.watch {
        return watch(context, options, delay, processes);
    }
    if context.json {
        let all: Vec<Value> = processes.iter().map(to_json).collect();
        print_json(&json!({ "processes": all }));
    } else {
        for process in &processes {
            show(process, options.all);
        }
    }
    Ok(Exit::Fine)
}

/// Prints the counters of a process; with `all` also those that are 0.
fn show(Process { pid, user, command, snapshot }: &Process, all: bool) {
    println!("{command} (pid {pid}, user {user})");
    let total = snapshot.total();
    let zero = total.iter().filter(|(_, value)| *value == 0).count();
    if all || zero == 0 {
        println!("{snapshot}");
    } else {
        println!("{}\n({zero} more counters are 0: --all)", snapshot.table(|_, value| value > 0));
    }
}

/// The process that was asked for, or all with counters; at least one.
fn find(pid: Option<u32>) -> Result<Vec<Process>, Failure> {
    if let Some(pid) = pid {
        return read(pid)
            .map(|snapshot| vec![Process::new(pid, snapshot)])
            .map_err(|error| unreadable(&error));
    }
    let processes = Process::all();
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

pub(super) fn to_json(process: &Process) -> Value {
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
        "pid": process.pid, "user": process.user, "command": process.command, "cards": cards,
        "total": numbers(&process.snapshot.total()),
    })
}

/// Prints what changed, repeatedly, until the processes have ended.
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
                // One JSON document per line for each reading.
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
