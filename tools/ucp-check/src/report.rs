//! What a run found: rows for people, rows for programs, and the verdict.

use crate::matrix::Case;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Timing {
    /// From posting one message until the receiver's one-byte reply (tag, stream, am) or the end of the flush (put), or
    /// until the data has arrived (get).
    pub latency_us: f64,
    /// 10^9 bytes per second with several messages outstanding.
    pub gbps: f64,
}

/// The result of one case in one process.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Verdict {
    pub case: u64,
    /// What was wrong, `None` if nothing.
    pub error: Option<String>,
    /// Only from the process that measured.
    pub timing: Option<Timing>,
}

impl Verdict {
    /// The verdict on a case with these mistakes.
    pub fn new(case: u64, wrong: &[String], timing: Option<Timing>) -> Verdict {
        Verdict { case, error: (!wrong.is_empty()).then(|| wrong.join("; ")), timing }
    }

    pub fn join(self, other: Verdict) -> Verdict {
        let wrong: Vec<String> = [self.error, other.error].into_iter().flatten().collect();
        Verdict::new(self.case, &wrong, self.timing.or(other.timing))
    }
}

/// One case, as listed in the file of `--json FILE`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// `tag`, `stream`, `am`, `put`, `get`, or a variant of one such as `am-rndv`.
    pub op: String,
    /// Memory of the sending side, such as `gaudi`.
    pub src: String,
    pub dst: String,
    pub size: usize,
    /// Rank of the sender: both directions run.
    pub from: u8,
    /// Version of the UCX that ran it.
    pub ucx: String,
    /// Time of one message, if it was measured.
    pub latency_us: Option<f64>,
    pub gbps: Option<f64>,
    /// Whether every byte, and the bytes around, were right.
    pub verified: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Row {
    fn pair(&self) -> String {
        format!("{}:{}", self.src, self.dst)
    }
}

/// The total that was verified, in one line that other programs parse: `verified: 12 messages, 4096 bytes`.
pub fn verified(messages: u64, bytes: u64) -> String {
    format!("verified: {messages} messages, {bytes} bytes")
}

pub struct Report {
    ucx: String,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(ucx: impl Into<String>) -> Report {
        Report { ucx: ucx.into(), rows: Vec::new() }
    }

    /// Adds a case; failures are printed at once.
    pub fn add(&mut self, case: Case, verdict: Verdict) {
        let Verdict { error, timing, .. } = verdict;
        if let Some(error) = &error {
            println!("FAIL  {case}, UCX {}: {error}", self.ucx);
        }
        self.rows.push(Row {
            op: case.op.to_string(),
            src: case.pair.src.to_string(),
            dst: case.pair.dst.to_string(),
            size: case.size,
            from: case.from,
            ucx: self.ucx.clone(),
            latency_us: timing.map(|t| t.latency_us),
            gbps: timing.map(|t| t.gbps),
            verified: error.is_none(),
            error,
        });
    }

    pub fn counts(&self) -> (usize, usize) {
        let passed = self.rows.iter().filter(|row| row.verified).count();
        (passed, self.rows.len() - passed)
    }

    /// The total that was right, in one line.
    pub fn verified(&self) -> String {
        let right = self.rows.iter().filter(|row| row.verified);
        let bytes = right.clone().map(|row| row.size as u64).sum();
        verified(right.count() as u64, bytes)
    }

    /// Prints the verdict; an error if anything failed.
    pub fn conclude(&self, json: Option<&Path>) -> Result<()> {
        self.print_summary();
        self.print_timings();
        json.map_or(Ok(()), |path| self.write_json(path))?;
        println!("{}", self.verified());
        let (passed, failed) = self.counts();
        println!("{passed} passed, {failed} failed");
        ensure!(failed == 0, "{failed} cases failed");
        ensure!(passed > 0, "nothing was run: no operation applies to these sizes");
        Ok(())
    }

    pub fn merge(&mut self, other: Report) {
        self.rows.extend(other.rows);
    }

    /// One line per operation and memory pair.
    fn print_summary(&self) {
        let mut lines: BTreeMap<(&str, String), (usize, usize)> = BTreeMap::new();
        for row in &self.rows {
            let counts = lines.entry((&row.op, row.pair())).or_default();
            if row.verified { counts.0 += 1 } else { counts.1 += 1 }
        }
        for ((op, pair), (passed, failed)) in lines {
            let word = if failed == 0 { "ok  " } else { "FAIL" };
            println!("{word}  {op:<15} {pair:<12} {passed:>4} passed, {failed} failed");
        }
    }

    /// The measured rows as a table; the slower of the two directions counts.
    fn print_timings(&self) {
        let mut lines: BTreeMap<(&str, String, usize), (f64, f64, bool)> = BTreeMap::new();
        for row in &self.rows {
            let (Some(latency), Some(gbps)) = (row.latency_us, row.gbps) else { continue };
            let key = (&*row.op, row.pair(), row.size);
            let line = lines.entry(key).or_insert((0.0, f64::MAX, true));
            *line = (line.0.max(latency), line.1.min(gbps), line.2 && row.verified);
        }
        if lines.is_empty() {
            return;
        }
        println!("{:<8} {:<12} {:>10} {:>12} {:>9}  bytes", "op", "memory", "size", "µs", "GB/s");
        for ((op, pair, size), (latency, gbps, verified)) in lines {
            let word = if verified { "verified" } else { "WRONG" };
            println!("{op:<8} {pair:<12} {size:>10} {latency:>12.2} {gbps:>9.3}  {word}");
        }
    }

    fn write_json(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.rows)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Op, Pair};

    #[test]
    fn a_row_has_the_fields_the_demo_reads() {
        let case = Case { id: 0, op: Op::AmRndv, pair: Pair::ALL[1], size: 8, from: 1 };
        let mut report = Report::new("1.22.0");
        let timing = Some(Timing { latency_us: 1.5, gbps: 2.0 });
        report.add(case, Verdict::new(0, &[], timing));
        report.add(case, Verdict::new(0, &["wrong".into()], None));
        assert_eq!(report.counts(), (1, 1));
        assert_eq!(report.verified(), "verified: 1 messages, 8 bytes");
        let rows = serde_json::to_value(&report.rows).unwrap();
        let good = serde_json::json!({
            "op": "am-rndv", "src": "host", "dst": "gaudi", "size": 8, "from": 1,
            "ucx": "1.22.0", "latency_us": 1.5, "gbps": 2.0, "verified": true
        });
        assert_eq!(rows[0], good);
        assert_eq!(rows[1]["verified"], false);
        assert_eq!(rows[1]["error"], "wrong");
        assert_eq!(serde_json::from_value::<Vec<Row>>(rows).unwrap(), report.rows);
    }
}
