//! What device memory costs in the engine: allocation, freeing, detection and export with 16, 1 024
//! and 65 536 live allocations, without UCX.
//!
//! The figures come from the example `memory_costs` of the crate `gaudi`, which prints a name and
//! nanoseconds a line; here each is put beside its floor.

use anyhow::Result;

use super::figures::{self, Effort, Figures};
use super::record::Record;
use crate::repo::Repo;

const ROUNDS: usize = 3;
const LIVE: [usize; 3] = [16, 1024, 65536];

/// UCX asks for every pointer it does not know: this must not be felt.
const DETECTION_LIMIT_NS: f64 = 50.0;

/// Name in the output of the example, name for people, floor; whether it is detection.
const COSTS: [(&str, &str, &str, bool); 7] = [
    ("alloc", "allocate 4 KiB, beside malloc", "floor malloc", false),
    ("free", "free 4 KiB, beside free", "floor free", false),
    ("hit", "detect Gaudi memory, beside a call", "floor call", true),
    ("miss host", "detect host memory, beside a call", "floor call", true),
    ("miss window", "detect a range that sticks out, beside a call", "floor call", true),
    ("export", "export a shared dma-buf, beside dup", "floor dup", false),
    ("export alone", "export a dma-buf of its own, beside dup", "floor dup", false),
];

/// Each cost beside its floor, the median of the rounds for both.
fn records(rounds: &[Figures]) -> Result<Vec<Record>> {
    let middle = |name: &str| figures::middle(rounds, name);
    let mut records = Vec::new();
    for (name, title, floor, detection) in COSTS {
        for live in LIVE {
            let title = format!("{title}, {live} live");
            let (value, floor) = (middle(&format!("{name} {live}"))?, middle(floor)?);
            records.push(match detection {
                true => Record::within(title, value, "ns", floor, DETECTION_LIMIT_NS),
                false => Record::at_most(title, value, "ns", floor, None),
            });
        }
    }
    let (counter, call) = (middle("counter")?, middle("floor call")?);
    records.push(Record::at_most("update of a counter, beside a call", counter, "ns", call, None));
    let clock = middle("floor clock")?;
    records.push(Record::at_most("reading the clock, beside a call", clock, "ns", call, None));
    Ok(records)
}

/// Builds the example, runs it a few times, and compares.
pub(super) fn run(repo: &Repo) -> Result<Vec<Record>> {
    records(&figures::of_example(repo, "memory_costs", "costs of memory", Effort::Rounds(ROUNDS))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(hit: f64) -> Figures {
        let mut figures = Figures::new();
        for (name, _, floor, _) in COSTS {
            figures.insert(floor.to_owned(), 2.0);
            for live in LIVE {
                figures.insert(format!("{name} {live}"), hit);
            }
        }
        figures.extend([("counter".to_owned(), 5.0), ("floor clock".to_owned(), 20.0)]);
        figures
    }

    #[test]
    fn costs_stand_beside_their_floors_and_detection_has_a_limit() {
        let records = records(&[figures(40.0), figures(60.0), figures(1000.0)]).expect("records");
        assert_eq!(records.len(), COSTS.len() * LIVE.len() + 2);
        assert!(records.iter().take(21).all(|record| record.value == 60.0));
        let limited = records.iter().filter(|record| record.met.is_some());
        assert_eq!(limited.clone().count(), 9);
        assert!(limited.clone().all(|record| record.met == Some(false) && record.ratio == 30.0));
    }

    #[test]
    fn a_missing_figure_is_named() {
        let mut incomplete = figures(1.0);
        incomplete.remove("hit 1024");
        let error = records(&[incomplete]).expect_err("incomplete");
        assert!(error.to_string().contains("hit 1024"), "{error}");
    }
}
