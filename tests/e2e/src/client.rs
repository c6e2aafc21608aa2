//! The rows that `ucp-check pair --json FILE` writes.

use anyhow::{Context, Result, ensure};
use ucp_check::report::Row;

use crate::Tool;

impl Tool {
    /// Runs our client, which has to succeed, and reads its rows.
    ///
    /// # Errors
    /// With everything that it said.
    pub fn rows(self) -> Result<Vec<Row>> {
        let file = tempfile::NamedTempFile::new().context("cannot create a temporary file")?;
        let end = self.arg("--json").arg(file.path()).run();
        ensure!(end.success(), "{}", end.report());
        let text = std::fs::read_to_string(file.path())?;
        serde_json::from_str(&text).with_context(|| end.report())
    }
}
