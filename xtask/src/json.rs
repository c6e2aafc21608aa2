//! Results that commands write as JSON.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// Writes a file that is readable for people, too.
pub(crate) fn write(file: &Path, results: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(results).context("cannot write JSON")? + "\n";
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
