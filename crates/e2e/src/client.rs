//! The rows that `ucp-check pair --json` prints, one JSON object a line.

use anyhow::{Context, Result};
use serde::Deserialize;

/// One operation between two memory kinds at one size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Row {
    /// `tag`, `stream`, `am`, `put`, `get`.
    pub op: String,
    /// Memory of the sending side: `host` or `gaudi`.
    pub src: String,
    /// Memory of the receiving side.
    pub dst: String,
    /// Bytes.
    pub size: u64,
    /// Version of the UCX that ran it.
    pub ucx: String,
    /// Median time of one operation in microseconds.
    pub latency_us: f64,
    /// Bandwidth in GB/s (10^9).
    pub gbps: f64,
    /// Whether every byte, and the bytes around, were checked and right.
    pub verified: bool,
}

/// Reads all rows; other lines are none of ours.
///
/// # Errors
/// When a line that looks like a row is not one.
pub fn parse_rows(stdout: &str) -> Result<Vec<Row>> {
    stdout
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("not a result row: {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = r#"{"op":"tag","src":"host","dst":"gaudi","size":8,"ucx":"1.22.0","latency_us":1.5,"gbps":0.005,"verified":true}"#;

    #[test]
    fn rows_are_read_and_chatter_is_passed_over() {
        let rows = parse_rows(&format!("hello\n{ROW}\n")).expect("well formed");
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].op.as_str(), rows[0].size, rows[0].verified), ("tag", 8, true));
    }

    #[test]
    fn broken_row_is_an_error_that_quotes_it() {
        let error = parse_rows("{\"op\":\"tag\"}").expect_err("fields are missing");
        assert!(format!("{error:#}").contains("{\"op\":\"tag\"}"));
    }
}
