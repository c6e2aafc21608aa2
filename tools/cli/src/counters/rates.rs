//! What happened between two readings of the counters: rates by process and card.

use std::time::Instant;

use serde_json::{Map, Value, json};
use stats_reader::Counters;

use super::cards::{Card, Cards};
use super::{DIRECTIONS, Flow, Process, WAYS, failures};

/// Number of directions and paths.
pub(super) const FLOWS: usize = DIRECTIONS.len() + WAYS.len();

pub(super) fn flows() -> impl Iterator<Item = &'static Flow> {
    DIRECTIONS.iter().chain(&WAYS)
}

/// What a process does with a card, or the sum of several.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Activity {
    /// Bytes a second, in the order of [`flows`].
    pub(super) rates: [f64; FLOWS],
    pub(super) allocated: u64,
    pub(super) in_flight: u64,
    pub(super) dma_errors: u64,
    pub(super) failures: u64,
}

impl Activity {
    /// `past` returns the earlier value of a counter.
    fn since(past: impl Fn(&str) -> Option<u64>, now: &Counters, seconds: f64) -> Self {
        let value = |name: &str| now.get(name).unwrap_or(0);
        let grown = |name: &str| {
            value(name).saturating_sub(past(name).unwrap_or(0)) as f64 / seconds.max(1e-3)
        };
        let mut rates = [0.0; FLOWS];
        for (rate, flow) in rates.iter_mut().zip(flows()) {
            *rate = grown(flow.counter);
        }
        Self {
            rates,
            allocated: value("allocated_bytes"),
            in_flight: value("in_flight"),
            dma_errors: value("dma_errors"),
            failures: failures(now),
        }
    }

    /// Saturates, because a process may write any number into its page.
    pub(super) fn add(&mut self, other: &Self) {
        for (sum, rate) in self.rates.iter_mut().zip(other.rates) {
            *sum += rate;
        }
        for (sum, count) in [
            (&mut self.allocated, other.allocated),
            (&mut self.in_flight, other.in_flight),
            (&mut self.dma_errors, other.dma_errors),
            (&mut self.failures, other.failures),
        ] {
            *sum = sum.saturating_add(count);
        }
    }

    pub(super) fn sum<'a>(all: impl Iterator<Item = &'a Self>) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum.add(one);
            sum
        })
    }

    /// Bytes per second moved in all directions.
    pub(super) fn moved(&self) -> f64 {
        self.rates[..DIRECTIONS.len()].iter().sum()
    }

    fn to_json(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        for (rate, flow) in self.rates.iter().zip(flows()) {
            fields.insert(format!("{}_bytes_per_s", flow.name), json!(rate));
        }
        fields.insert("allocated_bytes".into(), json!(self.allocated));
        fields.insert("in_flight".into(), json!(self.in_flight));
        fields.insert("dma_errors".into(), json!(self.dma_errors));
        fields.insert("failures".into(), json!(self.failures));
        fields
    }
}

/// A process, and what it does with each card.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ProcessRates {
    pub(super) pid: u32,
    pub(super) user: String,
    pub(super) command: String,
    /// By PCI bus id; empty for what belongs to no card, such as relaying.
    pub(super) parts: Vec<(String, Activity)>,
}

impl ProcessRates {
    /// A new process has rates from the next reading on.
    fn between(before: Option<&Process>, now: &Process, seconds: f64) -> Self {
        let before = before.unwrap_or(now);
        let past = |name: &str| before.snapshot.other.get(name);
        let mut parts = vec![(String::new(), Activity::since(past, &now.snapshot.other, seconds))];
        for card in &now.snapshot.cards {
            // A card that was opened since then counts from 0.
            let past = |name: &str| before.snapshot.card(&card.bus_id)?.get(name);
            parts.push((card.bus_id.clone(), Activity::since(past, &card.counters, seconds)));
        }
        let (user, command) = (now.user.clone(), now.command.clone());
        Self { pid: now.pid, user, command, parts }
    }

    pub(super) fn cards(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|(card, _)| card.as_str()).filter(|card| !card.is_empty())
    }

    /// On one card, or in all.
    pub(super) fn activity(&self, card: Option<&str>) -> Activity {
        let parts = self.parts.iter().filter(|(on, _)| card.is_none_or(|card| card == on));
        Activity::sum(parts.map(|(_, activity)| activity))
    }

    fn to_json(&self) -> Value {
        let mut fields = Map::new();
        fields.insert("pid".into(), json!(self.pid));
        fields.insert("user".into(), json!(self.user));
        fields.insert("command".into(), json!(self.command));
        fields.insert("cards".into(), json!(self.cards().collect::<Vec<_>>()));
        fields.extend(self.activity(None).to_json());
        Value::Object(fields)
    }
}

/// Cards and processes at one moment, and what happened since the last one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Look {
    pub(super) seconds: f64,
    pub(super) cards: Vec<Card>,
    pub(super) processes: Vec<ProcessRates>,
}

impl Look {
    /// What all processes together do with a card.
    pub(super) fn on_card(&self, bus_id: &str) -> Activity {
        let parts = self.processes.iter().flat_map(|process| &process.parts);
        Activity::sum(parts.filter(|(card, _)| card == bus_id).map(|(_, activity)| activity))
    }

    pub(super) fn to_json(&self) -> Value {
        let card = |card: &Card| {
            let mut fields = Map::new();
            fields.insert("index".into(), json!(card.index));
            fields.insert("bus_id".into(), json!(card.bus_id));
            fields.insert("name".into(), json!(card.name));
            fields.insert("users".into(), json!(card.users));
            fields.insert("memory_total_bytes".into(), json!(card.memory_total));
            fields.insert("memory_used_bytes".into(), json!(card.memory_used));
            fields.insert("utilization_percent".into(), json!(card.utilization));
            fields.insert("temperature_celsius".into(), json!(card.temperature));
            fields.insert("power_watts".into(), json!(card.power));
            fields.extend(self.on_card(&card.bus_id).to_json());
            Value::Object(fields)
        };
        let cards: Vec<Value> = self.cards.iter().map(card).collect();
        let processes: Vec<Value> = self.processes.iter().map(ProcessRates::to_json).collect();
        json!({ "seconds": self.seconds, "cards": cards, "processes": processes })
    }
}

/// Reads the counters repeatedly.
pub(super) struct Watcher {
    cards: Cards,
    before: Vec<Process>,
    since: Instant,
}

impl Watcher {
    pub(super) fn new() -> Self {
        Self { cards: Cards::find(), before: Process::all(), since: Instant::now() }
    }

    /// What happened since the last reading.
    pub(super) fn look(&mut self) -> Look {
        let (now, seconds) = (Process::all(), self.since.elapsed().as_secs_f64());
        self.since = Instant::now();
        let mut cards = self.cards.look_with_users();
        for process in &now {
            for card in
                process.snapshot.cards.iter().filter(|card| card.counters.get("open") > Some(0))
            {
                // Without a driver library, or with another one, only the processes report their cards.
                let at = cards.iter().position(|known| known.bus_id == card.bus_id);
                let at = at.unwrap_or_else(|| {
                    let (index, bus_id) = (card.index, card.bus_id.clone());
                    cards.push(Card { index, bus_id, ..Card::default() });
                    cards.len() - 1
                });
                cards[at].users.insert(process.user.clone());
            }
        }
        let rates = |process: &Process| {
            let before = self.before.iter().find(|before| before.is_same(process));
            ProcessRates::between(before, process, seconds)
        };
        let processes = now.iter().map(rates).collect();
        self.before = now;
        Look { seconds, cards, processes }
    }
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(super) fn fuzz(before: Option<&Process>, now: &Process) -> String {
    let rates = ProcessRates::between(before.filter(|before| before.is_same(now)), now, 1.0);
    rates.to_json().to_string()
}
