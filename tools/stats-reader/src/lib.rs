//! The counters of a process that uses the plugin, read while it counts.
//!
//! They are in a sealed memory file of the process, which describes itself: its header has sizes and offsets, and
//! counters are found by name (`docs/design/statistics-page.md`). This is an independent parser of that page, which
//! shares no code with the plugin. Anyone may have written a file with the page's name: everything is checked before
//! use, in a private copy that no longer changes.

mod page;
mod process;

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

pub use page::Malformed;
pub use process::{ReadError, is_running, read};

/// How a counter behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Only grows.
    Sum,
    /// The current amount.
    Now,
    /// The highest amount there ever was.
    Most,
}

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Things.
    Number,
    /// Bytes.
    Bytes,
}

/// The counters of a process, each with its value at some moment during [`read`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The process, by the number it has in its own pid namespace.
    pub pid: u32,
    /// When the process started, in clock ticks since boot.
    pub start_time: u64,
    /// When it opened its first card.
    pub created: SystemTime,
    /// Counts that belong to no card, or to a card without a slot in the page.
    pub other: Counters,
    /// The cards that were opened, including those that are closed again.
    pub cards: Vec<CardCounters>,
}

/// The counters of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardCounters {
    /// PCI bus id.
    pub bus_id: String,
    /// Index of the card.
    pub index: u32,
    /// The numbers.
    pub counters: Counters,
}

/// Numbers with their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    descriptions: Arc<[Description]>,
    values: Vec<u64>,
}

/// What a counter is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its name, as in `docs/statistics.md`.
    pub name: String,
    /// How it behaves.
    pub kind: Kind,
    /// What it counts.
    pub unit: Unit,
}

impl Counters {
    /// The value of a counter; `None` if that process does not have it.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.iter().find(|(description, _)| description.name == name).map(|(_, value)| value)
    }

    /// All counters, in the order of the page.
    pub fn iter(&self) -> impl Iterator<Item = (&Description, u64)> {
        self.descriptions.iter().zip(self.values.iter().copied())
    }
}

impl Snapshot {
    /// A counter of the whole process: the sum over its cards, or for a maximum the largest.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.total().get(name)
    }

    /// All counters of the whole process.
    pub fn total(&self) -> Counters {
        let mut total = self.other.clone();
        for card in &self.cards {
            let values = total.values.iter_mut().zip(&card.counters.values);
            for (description, (sum, value)) in total.descriptions.iter().zip(values) {
                *sum = match description.kind {
                    Kind::Sum | Kind::Now => sum.wrapping_add(*value),
                    Kind::Most => (*sum).max(*value),
                };
            }
        }
        total
    }

    /// The counters of a card.
    pub fn card(&self, bus_id: &str) -> Option<&Counters> {
        self.cards.iter().find(|card| card.bus_id == bus_id).map(|card| &card.counters)
    }
}

impl Snapshot {
    /// A table of the counters for which `wanted` is true, given the value for the whole process: one row per counter,
    /// one column for the process and for each card.
    pub fn table(&self, wanted: impl Fn(&Description, u64) -> bool) -> String {
        const WIDTH: usize = 16;
        let total = self.total();
        let other = self.other.values.iter().any(|&value| value != 0).then_some(&self.other);
        let mut columns = vec![("total", &total)];
        columns.extend(self.cards.iter().map(|card| (card.bus_id.as_str(), &card.counters)));
        columns.extend(other.map(|other| ("other", other)));
        let names = total.descriptions.iter().map(|description| description.name.len());
        let first = names.max().unwrap_or(0).max("counter".len());
        let mut text = format!("{:<first$}", format!("process {}", self.pid));
        for (title, _) in &columns {
            text += &format!(" {title:>WIDTH$}");
        }
        for (at, (description, _)) in
            total.iter().enumerate().filter(|(_, (description, value))| wanted(description, *value))
        {
            text += &format!("\n{:<first$}", description.name);
            for (_, counters) in &columns {
                text += &format!(" {:>WIDTH$}", counters.values[at]);
            }
        }
        text
    }
}

impl fmt::Display for Snapshot {
    /// The table of all counters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(|_, _| true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn a_total_adds_up_and_takes_the_largest_maximum() {
        let descriptions: Arc<[Description]> =
            [("a", Kind::Sum), ("b", Kind::Now), ("c", Kind::Most)]
                .map(|(name, kind)| Description { name: name.into(), kind, unit: Unit::Number })
                .into();
        let counters = |values: [u64; 3]| Counters {
            descriptions: Arc::clone(&descriptions),
            values: values.to_vec(),
        };
        let card = |index, values| CardCounters {
            bus_id: format!("0000:0{index}:00.0"),
            index,
            counters: counters(values),
        };
        let snapshot = Snapshot {
            pid: 7,
            start_time: 0,
            created: UNIX_EPOCH,
            other: counters([1, 0, 2]),
            cards: vec![card(0, [10, 3, 5]), card(1, [100, 4, 3])],
        };
        assert_eq!(["a", "b", "c"].map(|name| snapshot.get(name)), [Some(111), Some(7), Some(5)]);
        let table = snapshot.to_string();
        let lines: Vec<Vec<&str>> =
            table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["process", "7", "total", "0000:00:00.0", "0000:01:00.0", "other"]);
        assert_eq!(lines[1], ["a", "111", "10", "100", "1"]);
        assert_eq!(lines[3], ["c", "5", "5", "3", "2"]);
        let large = snapshot.table(|_, value| value > 5);
        assert_eq!((large.lines().count(), large.contains("\nc")), (3, false), "{large}");
    }
}
