//! `ucx-gaudi top`: cards, and what running processes do with them.
//!
//! On a terminal it is an interactive view ([`app`] has its state and keys, [`draw`] draws it); otherwise, and with
//! `--once`, it prints lists.

mod app;
mod draw;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};

use super::interval;
use super::rates::{Look, Watcher};
use crate::failure::{Exit, Failure};
use crate::output::{print_json, print_table, size, table};
use crate::{Context, interrupt};
use app::App;

/// Options of `top`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Seconds between two looks
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    delay: Duration,
    /// Stop after this many times
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print lists after one look, of --delay seconds
    #[arg(long, conflicts_with = "count")]
    once: bool,
}

/// Shows them repeatedly.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let on_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if on_terminal && !context.json && !options.once && options.count.is_none() {
        return interactive(options.delay).map_err(|error| {
            let remedy = "`ucx-gaudi top --once` prints lists instead";
            Failure::unable(format!("the terminal cannot be used: {error}"), remedy)
        });
    }
    let mut watcher = Watcher::new();
    for _ in 0..if options.once { 1 } else { options.count.unwrap_or(u64::MAX) } {
        std::thread::sleep(options.delay);
        let look = watcher.look();
        match (context.json, options.once) {
            (true, true) => print_json(&look.to_json()),
            // One JSON document per line.
            (true, false) => println!("{}", look.to_json()),
            (false, _) => print_lists(&look),
        }
    }
    Ok(Exit::Fine)
}

fn interactive(delay: Duration) -> io::Result<Exit> {
    // A signal ends the loop, which restores the terminal.
    interrupt::watch();
    let mut terminal = ratatui::try_init()?;
    let ended = view(&mut terminal, delay);
    ratatui::try_restore()?;
    ended
}

fn view(terminal: &mut DefaultTerminal, delay: Duration) -> io::Result<Exit> {
    /// How long it may take until a signal is noticed.
    const PATIENCE: Duration = Duration::from_millis(200);
    let (mut watcher, mut app) = (Watcher::new(), App::new(delay));
    let mut next = Instant::now() + delay.min(PATIENCE);
    while !interrupt::interrupted() {
        terminal.draw(|frame| draw::draw(frame, &app))?;
        // Checks for keys in each round, even if reading and drawing take longer than the delay.
        if event::poll(PATIENCE.min(next.saturating_duration_since(Instant::now())))?
            && let Event::Key(key) = event::read()?
            && app.press(key)
        {
            break;
        }
        if Instant::now() >= next {
            if !app.is_paused() {
                app.show(watcher.look());
            }
            next = Instant::now() + delay;
        }
    }
    Ok(Exit::Fine)
}

/// Bytes per second for people.
fn rate(bytes_per_s: f64) -> String {
    const UNITS: [(&str, f64); 3] = [("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)];
    let unit = UNITS.into_iter().find(|(_, one)| bytes_per_s >= *one);
    match unit {
        Some((unit, one)) => {
            let (value, digits) = (bytes_per_s / one, usize::from(bytes_per_s < 99.95 * one));
            format!("{value:.digits$} {unit}")
        }
        None if bytes_per_s > 0.0 => format!("{bytes_per_s:.0} B/s"),
        None => String::from("-"),
    }
}

/// Used and total memory, as far as known.
fn memory(used: Option<u64>, total: Option<u64>) -> String {
    match (used, total) {
        (Some(used), Some(total)) => format!("{} of {}", size(used), size(total)),
        (None, Some(total)) => format!("of {}", size(total)),
        _ => String::from("-"),
    }
}

/// A value that not every driver reports.
fn told(value: Option<f64>, unit: &str) -> String {
    value.map_or_else(|| String::from("-"), |value| format!("{value:.0} {unit}"))
}

fn print_lists(look: &Look) {
    let moves = ["to card", "from card", "within", "between", "in flight", "errors"];
    let cells = |activity: &super::rates::Activity| {
        let rates = activity.rates[..4].iter().map(|&bytes| rate(bytes));
        let counts = [activity.in_flight, activity.dma_errors + activity.failures];
        rates.chain(counts.map(|count| count.to_string())).collect::<Vec<_>>()
    };
    let mut cards =
        table(&[&["card", "PCI", "user", "memory", "busy", "temp", "power"][..], &moves].concat());
    for card in &look.cards {
        let users: Vec<&str> = card.users.iter().map(String::as_str).collect();
        let mut row = vec![
            card.index.to_string(),
            card.bus_id.clone(),
            if users.is_empty() { String::from("-") } else { users.join(" ") },
            memory(card.memory_used, card.memory_total),
            told(card.utilization.map(f64::from), "%"),
            told(card.temperature, "°C"),
            told(card.power, "W"),
        ];
        row.extend(cells(&look.on_card(&card.bus_id)));
        cards.add_row(row);
    }
    if !look.cards.is_empty() {
        print_table(&cards);
        println!();
    }
    if look.processes.is_empty() {
        println!("no process that this user may look into has opened a Gaudi");
        return;
    }
    let mut processes =
        table(&[&["pid", "user", "command", "cards", "memory"][..], &moves].concat());
    for process in &look.processes {
        let activity = process.activity(None);
        let mut row = vec![
            process.pid.to_string(),
            process.user.clone(),
            process.command.clone(),
            process.cards().count().to_string(),
            size(activity.allocated),
        ];
        row.extend(cells(&activity));
        processes.add_row(row);
    }
    print_table(&processes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_short() {
        let shown = [0.0, 12.0, 1500.0, 250.3e6, 98.76e9, 99.99e9].map(rate);
        assert_eq!(shown, ["-", "12 B/s", "1.5 kB/s", "250 MB/s", "98.8 GB/s", "100 GB/s"]);
    }
}
