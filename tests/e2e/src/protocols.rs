//! Which protocols UCP chose in a run, from what its processes log with `UCX_PROTO_INFO=y`.

use anyhow::{Context, Result};
use tempfile::TempDir;

pub use ucp_protocols::{Choice, Protocols};

use crate::Tool;

/// A folder into which each process of a tool writes what UCX logs, protocols included.
#[derive(Debug)]
pub struct ProtocolLogs(TempDir);

impl ProtocolLogs {
    /// A new folder, which is removed when this value is dropped.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<Self> {
        Ok(Self(tempfile::tempdir().context("cannot create a temporary folder")?))
    }

    /// Makes a tool write its logs there.
    #[must_use]
    pub fn of(&self, tool: Tool) -> Tool {
        tool.env("UCX_LOG_FILE", self.0.path().join("%p")).env("UCX_PROTO_INFO", "y")
    }

    /// Whether one of its processes logged these words.
    ///
    /// # Errors
    /// When the logs cannot be read.
    pub fn say(&self, words: &str) -> Result<bool> {
        let mut said = false;
        for entry in std::fs::read_dir(self.0.path())? {
            let log = std::fs::read(entry?.path())?;
            said |= String::from_utf8_lossy(&log).contains(words);
        }
        Ok(said)
    }

    /// Everything that its processes logged, one after the other.
    ///
    /// # Errors
    /// When the logs cannot be read.
    pub fn text(&self) -> Result<String> {
        let mut all = String::new();
        for entry in std::fs::read_dir(self.0.path())? {
            all.push_str(&String::from_utf8_lossy(&std::fs::read(entry?.path())?));
        }
        Ok(all)
    }

    /// What its processes chose, combined.
    ///
    /// # Errors
    /// When nothing was written.
    pub fn read(&self) -> Result<Protocols> {
        let all = Protocols::merged(self.each()?);
        anyhow::ensure!(!all.is_empty(), "UCX told of no protocol");
        Ok(all)
    }

    /// What each of its processes chose, without processes that chose nothing.
    ///
    /// # Errors
    /// When the logs cannot be read.
    pub fn each(&self) -> Result<Vec<Protocols>> {
        let mut each = Vec::new();
        for entry in std::fs::read_dir(self.0.path())? {
            let log = std::fs::read(entry?.path())?;
            each.push(Protocols::parse(&String::from_utf8_lossy(&log)));
        }
        each.retain(|protocols| !protocols.is_empty());
        Ok(each)
    }
}
