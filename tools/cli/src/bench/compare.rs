//! `ucx-gaudi bench compare A B`: what became faster and what slower.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::results::{Cell, Results};
use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{GREEN, RED, note, print_json, print_table, size, table};

/// Options of `bench compare`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Results of before
    before: PathBuf,
    /// Results of after
    after: PathBuf,
    /// From how many percent on a loss counts
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    tolerance: f64,
}

/// The same cell in both files.
struct Difference<'a> {
    before: &'a Cell,
    after: &'a Cell,
    /// After divided by before: GB/s, and µs the other way round, so that more is better.
    faster: (f64, f64),
}

impl Difference<'_> {
    fn is_worse(&self, tolerance: f64) -> bool {
        let least = 1.0 - tolerance / 100.0;
        // Of a small message the time counts, of a large one the bandwidth.
        let ratio = if self.after.size < 4096 { self.faster.1 } else { self.faster.0 };
        ratio < least || (self.before.verified && !self.after.verified)
    }
}

pub(super) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let (before, after) = (read(&options.before)?, read(&options.after)?);
    let differences = differences(&before, &after);
    if differences.is_empty() {
        return Err(Failure::unable(
            "the two files have no operation, memories and size in common",
            "measure both with the same --ops, --mem and --sizes",
        ));
    }
    let worse = differences.iter().filter(|it| it.is_worse(options.tolerance)).count();
    if context.json {
        let rows: Vec<_> = differences
            .iter()
            .map(|it| {
                json!({
                    "op": it.after.op, "memory": it.after.pair, "size": it.after.size,
                    "gbps": [it.before.gbps, it.after.gbps],
                    "latency_us": [it.before.latency_us, it.after.latency_us],
                    "worse": it.is_worse(options.tolerance),
                })
            })
            .collect();
        let cards = [before.card(), after.card()];
        print_json(
            &json!({"rows": rows, "worse": worse, "tolerance": options.tolerance, "cards": cards}),
        );
    } else {
        println!("{}\n", after.card());
        print(&differences, options.tolerance);
    }
    if before.card() != after.card() {
        note(&format!(
            "the files are of different cards: {} before, {} after",
            before.card(),
            after.card()
        ));
    }
    let only = before.cells.len() + after.cells.len() - 2 * differences.len();
    if only > 0 {
        note(&format!("{only} results are in one of the files only"));
    }
    Ok(if worse == 0 { Exit::Fine } else { Exit::Problem })
}

fn read(file: &Path) -> Result<Results, Failure> {
    let unable = |why: String| {
        let what = format!("cannot read {}: {why}", file.display());
        Failure::unable(what, "give a file that `ucx-gaudi bench --save FILE` wrote")
    };
    let text = std::fs::read_to_string(file).map_err(|error| unable(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| unable(error.to_string()))
}

fn differences<'a>(before: &'a Results, after: &'a Results) -> Vec<Difference<'a>> {
    let pair = |after: &'a Cell| {
        let before = before.cells.iter().find(|cell| cell.key() == after.key())?;
        let faster = (after.gbps / before.gbps, before.latency_us / after.latency_us);
        Some(Difference { before, after, faster })
    };
    after.cells.iter().filter_map(pair).collect()
}

fn print(differences: &[Difference<'_>], tolerance: f64) {
    let mut table =
        table(&["op", "memory", "size", "GB/s", "", "×", "µs", "", "× faster", "verdict"]);
    let better = |it: &Difference<'_>| it.faster.0 > 1.0 + tolerance / 100.0;
    for it in differences {
        let verdict = match (it.is_worse(tolerance), better(it)) {
            (true, _) if !it.after.verified => "WRONG BYTES",
            (true, _) => "slower",
            (false, true) => "faster",
            (false, false) => "",
        };
        table.add_row([
            it.after.op.clone(),
            it.after.pair.clone(),
            size(it.after.size as u64),
            format!("{:.2}", it.before.gbps),
            format!("{:.2}", it.after.gbps),
            format!("{:.2}", it.faster.0),
            format!("{:.1}", it.before.latency_us),
            format!("{:.1}", it.after.latency_us),
            format!("{:.2}", it.faster.1),
            String::from(verdict),
        ]);
    }
    print_table(&table);
    let worse = differences.iter().filter(|it| it.is_worse(tolerance)).count();
    let style = if worse == 0 { GREEN } else { RED };
    anstream::println!(
        "\n{style}{worse} of {} are slower by more than {tolerance} %{style:#}",
        differences.len()
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::results;

    #[test]
    fn a_loss_beyond_the_tolerance_counts_by_time_for_small_and_by_bandwidth_for_large_messages() {
        let before = results("tag host:host 8 1.0 1.0\ntag host:host 65536 10 10.0");
        let after =
            results("tag host:host 8 1.3 1.0\ntag host:host 65536 20 9.5\nput host:host 8 1 1");
        let found = differences(&before, &after);
        assert_eq!(found.len(), 2, "what both have");
        let worse: Vec<bool> = found.iter().map(|it| it.is_worse(10.0)).collect();
        assert_eq!(worse, [true, false]);
        assert!(!found[0].is_worse(50.0) && found[1].is_worse(4.0));
    }

    #[test]
    fn bytes_that_became_wrong_are_worse_however_fast() {
        let before = results("tag host:host 8 1.0 1.0");
        let mut after = results("tag host:host 8 0.5 2.0");
        after.cells[0].verified = false;
        assert!(differences(&before, &after)[0].is_worse(10.0));
    }
}
