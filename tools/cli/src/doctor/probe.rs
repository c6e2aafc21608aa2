//! Checks in a child process: whatever happens there becomes a finding, and does not end the report.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use clap::Subcommand;
use serde::de::DeserializeOwned;

use crate::failure::Exit;

/// Marks the line with the answer: libraries print, too.
const ANSWER: &str = "ucx-gaudi-answer:";

/// What a child is asked to do.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Probe {
    /// Load a UCX and list its components
    Ucx {
        /// Its libucp
        libucp: PathBuf,
    },
    /// Copy on a card
    Card {
        /// Which one
        #[arg(long)]
        card: Option<String>,
    },
}

/// A child that gave no answer.
#[derive(Clone, Debug)]
pub(super) struct NoAnswer {
    pub(super) how: String,
}

/// In the child: prints the answer on standard output.
pub(crate) fn answer(probe: &Probe) -> Exit {
    let text = match probe {
        Probe::Ucx { libucp } => serde_json::to_string(&super::ucx::load(libucp)),
        Probe::Card { card } => serde_json::to_string(&super::card::check(card.as_deref())),
    };
    println!("{ANSWER}{}", text.expect("representable in JSON"));
    // Destructors of a foreign UCX have crashed before: do not run them.
    // SAFETY: ends the process; the output ends in a newline, so it is flushed.
    unsafe { libc::_exit(0) }
}

/// Runs a check in a child with these variables.
pub(super) fn in_child<T: DeserializeOwned>(
    probe: &Probe,
    variables: &[(&str, &std::ffi::OsStr)],
) -> Result<T, NoAnswer> {
    let no = |how: String| NoAnswer { how };
    let program = std::env::current_exe().map_err(|error| no(error.to_string()))?;
    let mut command = Command::new(program);
    command.arg("probe");
    match probe {
        Probe::Ucx { libucp } => command.arg("ucx").arg(libucp),
        Probe::Card { card } => {
            command.arg("card").args(card.iter().flat_map(|card| ["--card", card]))
        }
    };
    command.envs(variables.iter().copied());
    let output = command.stdin(Stdio::null()).output().map_err(|error| no(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix(ANSWER));
    if let Some(answer) = line.and_then(|line| serde_json::from_str(line).ok()) {
        return Ok(answer);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    let last = error.lines().last().unwrap_or("without a word").trim().to_owned();
    Err(no(match output.status.signal() {
        Some(signal) => format!("the process that tried it died of signal {signal} ({last})"),
        None => format!("the process that tried it ended with {} ({last})", output.status),
    }))
}
