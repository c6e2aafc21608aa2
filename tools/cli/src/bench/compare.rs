//! `ucx-gaudi bench compare A B`: finds what became faster and what slower.
//!
//! The best round of either file counts, as in `bench`. A change counts if it exceeds the tolerance and if the rounds
//! of the two files do not overlap: a difference smaller than that between the rounds of one run is noise.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::results::{Cell, Measure, Results, gbps};
use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{GREEN, RED, note, print_json, print_table, size, table};
use crate::saved_file;

/// Options of `bench compare`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Results of before
    before: PathBuf,
    /// Results of after
    after: PathBuf,
    /// From how many percent on a change counts, if rounds of the two files do not overlap
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0)]
    tolerance: f64,
}

/// The same cell in both files.
struct Difference<'a> {
    before: &'a Cell,
    after: &'a Cell,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Faster,
    Slower,
    /// Beyond the tolerance, but the rounds of the two files overlap.
    Noise,
    WrongBytes,
}

impl Verdict {
    fn is_worse(self) -> bool {
        matches!(self, Verdict::Slower | Verdict::WrongBytes)
    }

    fn word(self) -> &'static str {
        match self {
            Verdict::Same => "",
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::Noise => "within noise",
            Verdict::WrongBytes => "WRONG BYTES",
        }
    }
}

impl Difference<'_> {
    fn measure(&self) -> Measure {
        Measure::of(self.after.size)
    }

    /// The ratio of the speeds: 1.5 means one and a half times the bandwidth, or the messages per second.
    fn speedup(&self) -> f64 {
        match self.measure() {
            Measure::Time => self.before.latency_us / self.after.latency_us,
            Measure::Bandwidth => self.after.gbps / self.before.gbps,
        }
    }

    fn verdict(&self, tolerance: f64) -> Verdict {
        if self.before.verified && !self.after.verified {
            return Verdict::WrongBytes;
        }
        let (speedup, tolerance) = (self.speedup(), tolerance / 100.0);
        let (slow, fast) = match speedup {
            _ if speedup < 1.0 - tolerance => (self.after, self.before),
            _ if speedup > 1.0 + tolerance => (self.before, self.after),
            _ => return Verdict::Same,
        };
        let apart = match self.measure() {
            Measure::Time => slow.latency_us > fast.slowest(Measure::Time),
            Measure::Bandwidth => slow.gbps < fast.slowest(Measure::Bandwidth),
        };
        match (apart, speedup < 1.0) {
            (false, _) => Verdict::Noise,
            (true, true) => Verdict::Slower,
            (true, false) => Verdict::Faster,
        }
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
    let worse = differences.iter().filter(|it| it.verdict(options.tolerance).is_worse()).count();
    if context.json {
        let rows: Vec<_> = differences
            .iter()
            .map(|it| {
                let verdict = it.verdict(options.tolerance);
                json!({
                    "op": it.after.op, "memory": it.after.pair, "size": it.after.size,
                    "gbps": [it.before.gbps, it.after.gbps],
                    "latency_us": [it.before.latency_us, it.after.latency_us],
                    "speedup": it.speedup(), "verdict": verdict.word(), "worse": verdict.is_worse(),
                })
            })
            .collect();
        let cards = [before.card(), after.card()];
        print_json(
            &json!({"rows": rows, "worse": worse, "tolerance": options.tolerance, "cards": cards}),
        );
    } else {
        println!("before: {} ({})", options.before.display(), before.origin());
        println!("after:  {} ({})\n", options.after.display(), after.origin());
        print(&differences, options.tolerance);
    }
    if before.card() != after.card() {
        note(&format!(
            "the files are of different cards: {} before, {} after",
            before.card(),
            after.card()
        ));
    }
    let only = only_in_one(&before, &after);
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
    saved_file::read_report(file).map_err(unable)
}

/// A file of ours has each cell once; in a foreign file the last one counts.
fn by_key(results: &Results) -> BTreeMap<(&str, &str, usize), &Cell> {
    results.cells.iter().map(|cell| (cell.key(), cell)).collect()
}

fn differences<'a>(before: &'a Results, after: &'a Results) -> Vec<Difference<'a>> {
    let before = by_key(before);
    let pair = |after: &'a Cell| Some(Difference { before: *before.get(&after.key())?, after });
    after.cells.iter().filter_map(pair).collect()
}

fn only_in_one(before: &Results, after: &Results) -> usize {
    let (before, after) = (by_key(before), by_key(after));
    let missing = before.keys().filter(|key| !after.contains_key(*key)).count();
    missing + after.keys().filter(|key| !before.contains_key(*key)).count()
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut files = bytes.split(|byte| *byte == 0);
    let mut next = || saved_file::parse_report::<Results>(files.next()?).ok();
    let Some(after) = next() else { return };
    let before = next().unwrap_or_else(|| after.clone());
    let differences = differences(&before, &after);
    for it in &differences {
        let _ = (it.verdict(10.0), it.speedup(), size(it.after.size as u64));
    }
    let _ = only_in_one(&before, &after);
    for text in [before.card(), before.origin(), after.json()] {
        assert!(
            !text.contains(|c: char| c.is_control() && c != '\n'),
            "{text:?} goes to a terminal"
        );
    }
}

fn print(differences: &[Difference<'_>], tolerance: f64) {
    let mut table = table(&["op", "memory", "size", "unit", "before", "after", "speed", "verdict"]);
    for it in differences {
        // The best round, and the slowest.
        let range = |cell: &Cell| match it.measure() {
            Measure::Time => (cell.latency_us, cell.slowest(Measure::Time)),
            Measure::Bandwidth => (cell.gbps, cell.slowest(Measure::Bandwidth)),
        };
        let text = |(best, slowest): (f64, f64)| match it.measure() {
            Measure::Time => format!("{best:.2} ({slowest:.2})"),
            Measure::Bandwidth => format!("{} ({})", gbps(best), gbps(slowest)),
        };
        table.add_row([
            it.after.op.clone(),
            it.after.pair.clone(),
            size(it.after.size as u64),
            String::from(if it.measure() == Measure::Time { "µs" } else { "GB/s" }),
            text(range(it.before)),
            text(range(it.after)),
            format!("×{:.2}", it.speedup()),
            String::from(it.verdict(tolerance).word()),
        ]);
    }
    print_table(&table);
    let count = |wanted: fn(Verdict) -> bool| {
        differences.iter().filter(|it| wanted(it.verdict(tolerance))).count()
    };
    let (worse, noise) = (count(Verdict::is_worse), count(|it| it == Verdict::Noise));
    let style = if worse == 0 { GREEN } else { RED };
    anstream::println!(
        "\nbest round (slowest round); more than ×1 is faster\n\
         {style}{worse} of {} are slower by more than {tolerance} %{style:#}; \
         {noise} differ by more, but so do the rounds of one file",
        differences.len()
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::results;

    fn verdicts(before: &str, after: &str, tolerance: f64) -> Vec<Verdict> {
        let (before, after) = (results(before), results(after));
        differences(&before, &after).iter().map(|it| it.verdict(tolerance)).collect()
    }

    #[test]
    fn a_loss_beyond_the_tolerance_counts_by_time_for_small_and_by_bandwidth_for_large_messages() {
        let before = "tag host:host 8 1.0 1.0\ntag host:host 65536 10 10.0";
        let after = "tag host:host 8 1.3 1.0\ntag host:host 65536 20 9.5\nput host:host 8 1 1";
        assert_eq!(verdicts(before, after, 10.0), [Verdict::Slower, Verdict::Same]);
        assert_eq!(verdicts(before, after, 50.0), [Verdict::Same; 2]);
        assert_eq!(verdicts(before, after, 4.0), [Verdict::Slower; 2]);
        assert_eq!(verdicts(after, before, 10.0)[0], Verdict::Faster, "of a small one as well");
    }

    #[test]
    fn a_change_counts_if_the_rounds_of_the_two_files_do_not_overlap() {
        for (op, noisy, steady, other) in [
            ("tag host:host 8", ["1.0 1", "1.5 1"], ["1.0 1", "1.1 1"], ["1.3 1", "1.4 1"]),
            ("put host:host 65536", ["9 10", "9 6"], ["9 10", "9 9.5"], ["9 8", "9 7"]),
        ] {
            let rounds = |two: [&str; 2]| two.map(|it| format!("{op} {it}")).join("\n");
            let verdict = |a, b| verdicts(&rounds(a), &rounds(b), 10.0)[0];
            assert_eq!(verdict(noisy, other), Verdict::Noise, "{op}");
            assert_eq!(verdict(steady, other), Verdict::Slower, "{op}");
            assert_eq!(verdict(other, noisy), Verdict::Noise, "{op}");
            assert_eq!(verdict(other, steady), Verdict::Faster, "{op}");
        }
    }

    #[test]
    fn bytes_that_became_wrong_are_worse_however_fast() {
        let before = results("tag host:host 8 1.0 1.0");
        let mut after = results("tag host:host 8 0.5 2.0");
        after.cells[0].verified = false;
        assert_eq!(differences(&before, &after)[0].verdict(10.0), Verdict::WrongBytes);
    }
}
