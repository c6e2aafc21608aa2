//! Runs `ucp-check measure`, and combines the figures of several runs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::Tool;
use ucp_check::measure::{Record, median};

use crate::progress::Work;

/// The time limit of one run, for a busy machine.
pub(super) const LIMIT: Duration = Duration::from_secs(600);

/// The figures of one run; `what` describes the measurement.
pub(super) fn measure(what: &str, tool: Tool) -> Result<Vec<Record>> {
    let work = Work::start(what.to_owned());
    let records = records(tool)?;
    work.done("");
    Ok(records)
}

/// The figures of one run.
pub(super) fn records(tool: Tool) -> Result<Vec<Record>> {
    let end = tool.limit(LIMIT).run();
    ensure!(end.success(), "{}", end.report());
    parse(&end.stdout).with_context(|| end.report())
}

/// Parses one line of JSON per figure, and skips UCX's log, which also goes to standard output.
pub(super) fn parse(text: &str) -> Result<Vec<Record>> {
    let lines = text.lines().filter(|line| line.starts_with('{'));
    let records = lines.map(serde_json::from_str).collect::<Result<Vec<Record>, _>>()?;
    ensure!(!records.is_empty(), "nothing was measured");
    Ok(records)
}

/// The figure with this name in another run.
pub(super) fn value(records: &[Record], name: &str) -> Result<f64> {
    let record = records.iter().find(|record| record.name == name);
    Ok(record.with_context(|| format!("no figure for {name:?}"))?.value)
}

/// Combines several runs: the medians of each figure's values and floors.
pub(super) fn medians(runs: &[Vec<Record>]) -> Result<Vec<Record>> {
    let first = runs.first().context("no run")?;
    let all = |name: &str, of: fn(&Record) -> f64| {
        let same = runs.iter().flatten().filter(|record| record.name == name);
        median(same.map(of).collect())
    };
    let middle = |record: &Record| {
        let floor = all(&record.name, |it| it.floor);
        // A limit of the value becomes a limit of the ratio, by the figure's own floor.
        let limit =
            record.name.contains("(at most").then(|| record.target.map(|it| it * record.floor));
        let target = limit.map_or(record.target, |limit| limit.map(|limit| limit / floor));
        Record { value: all(&record.name, |it| it.value), ..record.clone() }.against(
            &record.name,
            floor,
            target,
        )
    };
    Ok(first.iter().map(middle).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_found_among_what_ucx_logs() {
        let record = Record::new("put, 1 MiB", 9.0, "GB/s", 10.0, None);
        let json = serde_json::to_string(&record).expect("JSON");
        let records = parse(&format!("[1] UCX WARN x\n{json}\n")).expect("one record");
        assert_eq!(records, [record]);
        assert_eq!(value(&records, "put, 1 MiB").expect("there"), 9.0);
        let error = value(&records, "get, 1 MiB").expect_err("not there");
        assert!(error.to_string().contains("get, 1 MiB"), "{error}");
        assert!(parse("[1] UCX WARN x\n").is_err() && parse("{\"name\":1}").is_err());
    }

    #[test]
    fn medians_are_of_values_and_of_floors_and_limits_stay() {
        let run = |value, floor| {
            vec![
                Record::new("a", value, "ns", floor, 2.0),
                Record::within("b", value, "ns", floor, 50.0),
            ]
        };
        let records = medians(&[run(40.0, 1.0), run(60.0, 2.0), run(900.0, 4.0)]).expect("three");
        assert_eq!((records[0].value, records[0].floor, records[0].met), (60.0, 2.0, Some(false)));
        assert_eq!((records[1].ratio, records[1].target), (30.0, Some(25.0)));
        assert_eq!((&*records[1].name, records[1].met), ("b (at most 50 ns)", Some(false)));
    }
}
