//! The rows that `ucp-check pair --json FILE` writes: a JSON list, one object per case.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::Tool;

/// One operation between two memory kinds at one size.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Row {
    /// `tag`, `stream`, `am`, `put`, `get`, or a variant of one such as `am-rndv`.
    pub op: String,
    /// Memory of the sending side: `host` or `gaudi`.
    pub src: String,
    /// Memory of the receiving side.
    pub dst: String,
    /// Bytes.
    pub size: u64,
    /// Version of the UCX that ran it.
    pub ucx: String,
    /// Time of one operation in microseconds, where it was measured.
    pub latency_us: Option<f64>,
    /// Bandwidth in GB/s (10^9), where it was measured.
    pub gbps: Option<f64>,
    /// Whether every byte, and the bytes around, were checked and right.
    pub verified: bool,
    /// What was wrong, if something was.
    #[serde(default)]
    pub error: Option<String>,
}

impl Tool {
    /// Runs our client, which has to succeed, and reads its rows.
    ///
    /// # Errors
    /// With everything that it said.
    pub fn rows(self) -> Result<Vec<Row>> {
        let file = tempfile::NamedTempFile::new().context("cannot create a temporary file")?;
        let end = self.arg("--json").arg(file.path()).run();
        ensure!(end.success(), "{}", end.report());
        Row::parse(&std::fs::read_to_string(file.path())?).with_context(|| end.report())
    }
}

impl Row {
    fn parse(text: &str) -> Result<Vec<Row>> {
        serde_json::from_str(text).context("these are not ucp-check's results")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_with_and_without_timing_are_read() {
        let rows = Row::parse(
            r#"[{"op":"tag","src":"host","dst":"gaudi","size":8,"from":1,"ucx":"1.22.0",
                 "latency_us":1.5,"gbps":0.005,"verified":true},
                {"op":"am-rndv","src":"host","dst":"host","size":0,"from":0,"ucx":"1.22.0",
                 "latency_us":null,"gbps":null,"verified":false,"error":"wrong"}]"#,
        )
        .expect("well formed");
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].op.as_str(), rows[0].latency_us), ("tag", Some(1.5)));
        assert_eq!((rows[1].verified, rows[1].error.as_deref()), (false, Some("wrong")));
    }

    #[test]
    fn missing_fields_are_an_error() {
        assert!(Row::parse(r#"[{"op":"tag"}]"#).is_err());
        assert!(Row::parse("").is_err());
    }
}
