//! The registration cache in the engine: what a hit costs with 1, 1 024 and 65 536 ranges, what
//! registering a buffer again costs beside the first time, and how a steady loop fares.
//!
//! The figures come from the example `registration_costs` of the crate `gaudi`, which prints a name
//! and a number a line; here each is put beside its floor.

use anyhow::Result;

use super::figures::{self, Effort, Figures};
use super::record::Record;
use crate::repo::Repo;

const ROUNDS: usize = 5;

/// A copy looks up each host side, and takes microseconds: this must not be felt.
const HIT_LIMIT_NS: f64 = 200.0;
/// Registering again may cost this part of the first time.
const AGAIN: f64 = 0.01;
/// Copies in a steady loop that may have to pin, in percent; and the cache's own memory beside what
/// it keeps.
const PERCENT: f64 = 1.0;

/// Each figure beside its floor, the median of the rounds for both.
fn records(rounds: &[Figures]) -> Result<Vec<Record>> {
    let middle = |name: &str| figures::middle(rounds, name);
    let within = |title, name, unit, floor, limit| {
        anyhow::Ok(Record::within(title, middle(name)?, unit, floor, limit))
    };
    let beside = |title, name, floor, target| {
        anyhow::Ok(Record::at_most(title, middle(name)?, "ns", middle(floor)?, target))
    };
    let (call, record) = (middle("floor call")?, middle("floor record 65536")?);
    let of_many = "hit, beside reading one of as many records, 65536 ranges";
    let reading = "reading one of 65536 records beside one of 1024";
    let again = "registering 16 MiB again, beside the first time";
    let one_more = "pinning 80 KiB and giving it back, 65536 ranges beside 1024";
    let told = "hearing of other memory that goes, beside a call,";
    let misses = "misses in a steady loop over 100 buffers";
    let own = "the cache's own memory beside 100 buffers of 256 KiB";
    Ok(vec![
        within("hit, beside a call, 1 range", "hit 1", "ns", call, HIT_LIMIT_NS)?,
        within("hit, beside a call, 1024 ranges", "hit 1024", "ns", call, HIT_LIMIT_NS)?,
        within(of_many, "hit 65536", "ns", record, HIT_LIMIT_NS)?,
        beside(reading, "floor record 65536", "floor record 1024", None)?,
        beside(again, "again", "first", Some(AGAIN))?,
        beside(one_more, "one more 65536", "one more 1024", None)?,
        beside(&format!("{told} 1024 ranges"), "told 1024", "floor call", None)?,
        beside(&format!("{told} 65536 ranges"), "told 65536", "floor call", None)?,
        within(misses, "steady miss rate", "%", 100.0, PERCENT)?,
        within(own, "steady overhead", "%", 100.0, PERCENT)?,
    ])
}

/// Builds the example, runs it a few times, and compares.
pub(super) fn run(repo: &Repo) -> Result<Vec<Record>> {
    records(&figures::of_example(
        repo,
        "registration_costs",
        "costs of registrations",
        Effort::Rounds(ROUNDS),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 14] = [
        "floor call",
        "floor record 1024",
        "floor record 65536",
        "hit 1",
        "hit 1024",
        "hit 65536",
        "first",
        "again",
        "one more 1024",
        "one more 65536",
        "told 1024",
        "told 65536",
        "steady miss rate",
        "steady overhead",
    ];

    fn figures(changes: &[(&str, f64)]) -> Figures {
        let all = NAMES.iter().map(|name| ((*name).to_owned(), 0.5));
        let changes = changes.iter().map(|(name, value)| ((*name).to_owned(), *value));
        all.chain(changes).collect()
    }

    fn unmet(changes: &[(&str, f64)]) -> Vec<String> {
        let records = records(&[figures(changes)]).expect("records");
        records.into_iter().filter(|record| record.met == Some(false)).map(|r| r.name).collect()
    }

    #[test]
    fn each_target_can_be_missed() {
        let good = [("first", 1e6), ("again", 100.0)];
        assert_eq!(unmet(&good), [""; 0]);
        for (name, value, words) in [
            ("hit 1", 201.0, "1 range"),
            ("hit 1024", 201.0, "1024 ranges"),
            ("hit 65536", 201.0, "65536 ranges"),
            ("again", 10_001.0, "again"),
            ("steady miss rate", 1.1, "misses"),
            ("steady overhead", 1.1, "memory"),
        ] {
            let mut changes = good.to_vec();
            changes.push((name, value));
            let unmet = unmet(&changes);
            assert_eq!(unmet.len(), 1, "{name}: {unmet:?}");
            let words: Vec<&str> = words.split(" beside ").collect();
            assert!(words.iter().all(|word| unmet[0].contains(word)), "{name}: {unmet:?}");
        }
    }

    #[test]
    fn a_missing_figure_is_named() {
        let mut incomplete = figures(&[]);
        incomplete.remove("again");
        let error = records(&[incomplete]).expect_err("incomplete");
        assert!(error.to_string().contains("again"), "{error}");
    }
}
