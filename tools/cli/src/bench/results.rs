//! Results: the best round for each operation, pair of memories and size, with the floors.

use std::collections::BTreeMap;

use hl_thunk::Library;
use serde::{Deserialize, Serialize};

use crate::output::{print_table, size as in_words, table};

/// The pair of memories that the others are compared with.
pub(super) const FLOOR: &str = "host:host";

/// A row of `ucp-check`.
#[derive(Debug, Deserialize)]
pub(super) struct Row {
    op: String,
    src: String,
    dst: String,
    size: usize,
    ucx: String,
    latency_us: Option<f64>,
    gbps: Option<f64>,
    verified: bool,
}

/// GB/s for people: with more digits for small values.
pub(super) fn gbps(value: f64) -> String {
    if value < 0.1 { format!("{value:.4}") } else { format!("{value:.2}") }
}

/// The results, also as stored in a file of `--save`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Results {
    /// Version of the tool.
    version: String,
    /// Version of UCX.
    pub(super) ucx: String,
    /// Whether the card was the software Gaudi, whose figures say nothing about hardware.
    pub(super) software: bool,
    /// The timing model of the software card, such as `gaudi2,slow=20`, if it has one.
    #[serde(default)]
    model: Option<String>,
    /// The other host, if there is one.
    #[serde(default)]
    pub(super) peer: Option<String>,
    /// The number of rounds that the user asked for.
    rounds: u32,
    /// Whether the run ended before all rounds were done.
    pub(super) interrupted: bool,
    /// Why it ended, in the form of failures in `--json`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<serde_json::Value>,
    /// GB/s of memcpy by size.
    memcpy: BTreeMap<usize, f64>,
    pub(super) cells: Vec<Cell>,
}

/// One operation between two memories with one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Cell {
    pub(super) op: String,
    pub(super) pair: String,
    pub(super) size: usize,
    /// µs of a single message, the shortest of all rounds.
    pub(super) latency_us: f64,
    /// 10⁹ bytes per second with eight messages at once, the highest of all rounds.
    pub(super) gbps: f64,
    /// GB/s of each round.
    rounds: Vec<f64>,
    /// µs of each round; empty in a file of an earlier version.
    #[serde(default)]
    latency_rounds: Vec<f64>,
    /// Whether every byte of every round was right.
    pub(super) verified: bool,
}

impl Cell {
    pub(super) fn key(&self) -> (&str, &str, usize) {
        (&self.op, &self.pair, self.size)
    }

    /// The slowest round, in µs or GB/s; the best one if the file has no rounds.
    pub(super) fn slowest(&self, measure: Measure) -> f64 {
        match measure {
            Measure::Time => self.latency_rounds.iter().copied().fold(self.latency_us, f64::max),
            Measure::Bandwidth => self.rounds.iter().copied().fold(self.gbps, f64::min),
        }
    }
}

/// The figure that matters for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    /// µs of a single message: for small ones.
    Time,
    /// GB/s: for large ones.
    Bandwidth,
}

impl Measure {
    pub(super) fn of(size: usize) -> Self {
        if size < 4096 { Measure::Time } else { Measure::Bandwidth }
    }
}

impl Results {
    /// Results for cards of this driver library; `None` if no library can be loaded.
    pub(super) fn new(library: Option<&Library>, rounds: u32) -> Self {
        let version = library.and_then(Library::version).unwrap_or_default();
        Self {
            version: String::from(env!("CARGO_PKG_VERSION")),
            ucx: String::new(),
            software: library.is_some_and(Library::is_software),
            model: model(version).map(str::to_owned),
            peer: None,
            rounds,
            interrupted: false,
            error: None,
            memcpy: BTreeMap::new(),
            cells: Vec::new(),
        }
    }

    /// The card in words, so that results of different cards are not confused.
    pub(super) fn card(&self) -> String {
        match (self.software, &self.model) {
            (false, _) => String::from("Gaudi"),
            (true, None) => String::from("software Gaudi, no card involved"),
            (true, Some(model)) => {
                format!("software Gaudi with modelled times ({model}), no card involved")
            }
        }
    }

    pub(super) fn add_memcpy(&mut self, size: usize, gbps: f64) {
        let best = self.memcpy.entry(size).or_default();
        *best = best.max(gbps);
    }

    pub(super) fn add(&mut self, row: Row) {
        let pair = format!("{}:{}", row.src, row.dst);
        let gbps = row.gbps.unwrap_or_default();
        let latency_us = row.latency_us.unwrap_or(f64::INFINITY);
        self.ucx = row.ucx;
        let found = self.cells.iter_mut().find(|cell| cell.key() == (&row.op, &pair, row.size));
        match found {
            Some(cell) => {
                cell.gbps = cell.gbps.max(gbps);
                cell.latency_us = cell.latency_us.min(latency_us);
                cell.verified &= row.verified;
                cell.rounds.push(gbps);
                cell.latency_rounds.push(latency_us);
            }
            None => self.cells.push(Cell {
                op: row.op,
                pair,
                size: row.size,
                latency_us,
                gbps,
                rounds: vec![gbps],
                latency_rounds: vec![latency_us],
                verified: row.verified,
            }),
        }
    }

    /// Whether nothing was measured.
    pub(super) fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    pub(super) fn all_verified(&self) -> bool {
        self.cells.iter().all(|cell| cell.verified)
    }

    /// The same operation and size between host memories.
    fn floor(&self, cell: &Cell) -> Option<&Cell> {
        self.cells.iter().find(|other| other.key() == (&cell.op, FLOOR, cell.size))
    }

    pub(super) fn print_table(&self) {
        let mut table = table(&[
            "op",
            "memory",
            "size",
            "µs",
            "GB/s",
            "of host:host",
            "of memcpy",
            "rounds",
            "bytes",
        ]);
        let ratio = |of: Option<f64>, gbps: f64| match of {
            Some(floor) if floor > 0.0 => format!("{:.2}", gbps / floor),
            _ => String::from("–"),
        };
        for cell in &self.cells {
            let floor = self.floor(cell).filter(|_| cell.pair != FLOOR).map(|floor| floor.gbps);
            let (least, most) = (cell.slowest(Measure::Bandwidth), cell.gbps);
            table.add_row([
                cell.op.clone(),
                cell.pair.clone(),
                in_words(cell.size as u64),
                format!("{:.1}", cell.latency_us),
                gbps(cell.gbps),
                ratio(floor, cell.gbps),
                ratio(self.memcpy.get(&cell.size).copied(), cell.gbps),
                format!("{}–{}", gbps(least), gbps(most)),
                String::from(if cell.verified { "verified" } else { "WRONG" }),
            ]);
        }
        for column in 2..8 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(comfy_table::CellAlignment::Right);
            }
        }
        print_table(&table);
        println!("\n{}", self.origin());
    }

    /// UCX, card, and the number of rounds of which the best counts: those measured, not those asked for.
    pub(super) fn origin(&self) -> String {
        let rounds = || self.cells.iter().map(|cell| cell.rounds.len());
        let best = match (rounds().min().unwrap_or(0), rounds().max().unwrap_or(0)) {
            (_, most @ 0..=1) => format!("{most} round"),
            (least, most) if least == most => format!("best of {most} rounds"),
            (least, most) => format!("best of {least} to {most} rounds"),
        };
        let to = self.peer.as_ref().map_or(String::new(), |peer| format!("to {peer}, "));
        format!("UCX {}, {}, {to}{best}", self.ucx, self.card())
    }

    pub(super) fn json(&self) -> String {
        let text = serde_json::to_string_pretty(self);
        text.expect("our types are representable in JSON") + "\n"
    }

    pub(super) fn csv(&self) -> String {
        let mut text = String::from(
            "op,source,destination,size,latency_us,gbps,host_gbps,memcpy_gbps,verified,card\n",
        );
        let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
        let card = self.card();
        for cell in &self.cells {
            let (from, to) = cell.pair.split_once(':').unwrap_or((&cell.pair, ""));
            let floor = number(self.floor(cell).map(|floor| floor.gbps));
            let memcpy = number(self.memcpy.get(&cell.size).copied());
            let Cell { op, size, latency_us, gbps, verified, .. } = cell;
            let line = format!(
                "{op},{from},{to},{size},{latency_us},{gbps},{floor},{memcpy},{verified},\"{card}\"\n"
            );
            text.push_str(&line);
        }
        text
    }
}

/// The timing model, which a software card appends to its library's version.
fn model(version: &str) -> Option<&str> {
    version.rsplit('+').next().filter(|last| last.contains(",slow="))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// `op pair size µs GB/s` a line.
    pub(in super::super) fn results(lines: &str) -> Results {
        let mut results = Results { software: true, ..Results::new(None, 2) };
        for line in lines.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [op, pair, size, latency, gbps] = words[..] else { panic!("{line}") };
            let (src, dst) = pair.split_once(':').unwrap();
            results.add(Row {
                op: op.to_owned(),
                src: src.to_owned(),
                dst: dst.to_owned(),
                size: size.parse().unwrap(),
                ucx: String::from("1.22.0"),
                latency_us: latency.parse().ok(),
                gbps: gbps.parse().ok(),
                verified: true,
            });
        }
        results
    }

    #[test]
    fn the_best_round_counts_and_floors_are_of_the_same_operation_and_size() {
        let mut results = results(
            "tag host:host 8 1.0 2.0\ntag gaudi:gaudi 8 5.0 1.0\ntag gaudi:gaudi 8 4.0 0.5\n\
             tag gaudi:gaudi 64 9.0 3.0",
        );
        let [host, gaudi, large] = &results.cells[..] else { panic!("{results:?}") };
        assert_eq!((gaudi.latency_us, gaudi.gbps, &gaudi.rounds[..]), (4.0, 1.0, &[1.0, 0.5][..]));
        assert_eq!(results.floor(gaudi), Some(host));
        assert_eq!(results.floor(large), None);
        results.add_memcpy(8, 10.0);
        results.add_memcpy(8, 9.0);
        let csv = results.csv();
        assert!(csv.contains("\ntag,gaudi,gaudi,8,4,1,2,10,true,\"software Gaudi"), "{csv}");
        assert!(csv.contains("\ntag,gaudi,gaudi,64,9,3,,,true,\"software Gaudi"), "{csv}");
        let read: Results = serde_json::from_str(&results.json()).unwrap();
        assert_eq!(read, results);
    }

    #[test]
    fn rounds_that_were_not_measured_are_not_counted() {
        let row = "tag host:host 8 1.0 2.0";
        for (rows, words) in [
            (vec![row], "1 round"),
            (vec![row, row, row], "best of 3 rounds"),
            (vec![row, row, "put host:host 8 1.0 2.0"], "best of 1 to 2 rounds"),
        ] {
            let results = Results { rounds: 3, ..results(&rows.join("\n")) };
            let expected = format!("UCX 1.22.0, software Gaudi, no card involved, {words}");
            assert_eq!(results.origin(), expected);
        }
    }

    #[test]
    fn a_modelled_card_is_named_with_its_model() {
        assert_eq!(model("1.10.0-soft-gaudi-0.1.0+gaudi2,slow=20"), Some("gaudi2,slow=20"));
        assert_eq!(model("1.10.0-soft-gaudi-0.1.0+dma=4,128"), None);
        assert_eq!(model("1.10.0-8636f13"), None);
        let mut results = results("tag host:host 8 1.0 2.0");
        assert_eq!(results.card(), "software Gaudi, no card involved");
        results.model = Some(String::from("gaudi2,slow=20"));
        for text in [results.card(), results.json(), results.csv()] {
            assert!(text.contains("gaudi2,slow=20"), "{text}");
        }
        // A file of an earlier version.
        let mut older: serde_json::Value = serde_json::from_str(&results.json()).unwrap();
        older.as_object_mut().unwrap().remove("model");
        let older: Results = serde_json::from_value(older).unwrap();
        assert_eq!(older.card(), "software Gaudi, no card involved");
    }
}
