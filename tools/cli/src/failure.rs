//! How a command fails: one message, one remedy, one exit code.

use std::fmt;

use gaudi::Remedy;
use serde_json::json;

/// The exit codes of the tool. `run` ends with the code of the program it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Done, and nothing is wrong.
    Fine = 0,
    /// Done, and something is wrong: a check failed, recordings differ.
    Problem = 1,
    /// The command line makes no sense (clap uses the same code).
    Usage = 2,
    /// Could not be done: no card, card busy, file not readable.
    Unable = 3,
    /// `run`: the program is there and cannot be run.
    NotRunnable = 126,
    /// `run`: no such program.
    NotFound = 127,
    /// Ended by Ctrl-C, with the results until then.
    Interrupted = 130,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        std::process::ExitCode::from(exit as u8)
    }
}

/// Why a command gave up.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) what: String,
    pub(crate) remedy: String,
    pub(crate) exit: Exit,
}

impl Failure {
    /// It could not be done.
    pub(crate) fn unable(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        let what = what.into();
        let remedy = out_of_descriptors(&what).unwrap_or_else(|| remedy.into());
        Self { what, remedy, exit: Exit::Unable }
    }

    /// The command line is wrong, in the words of clap: what, and after an empty line what would be right.
    pub(crate) fn usage(text: &str) -> Self {
        let text = text.trim_start_matches("error: ");
        let (what, remedy) = text.split_once("\n\n").unwrap_or((text, ""));
        let (what, remedy) = (what.trim().to_owned(), remedy.trim().to_owned());
        Self { what, remedy, exit: Exit::Usage }
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        json!({"error": {"what": self.what, "remedy": self.remedy, "exit": self.exit as u8}})
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, " ({})", self.remedy) }
    }
}

impl From<gaudi::Error> for Failure {
    fn from(error: gaudi::Error) -> Self {
        let mut what = String::new();
        // Writing to a string cannot fail.
        let _ = error.explain(&mut what, "");
        Self::unable(what, words(error.remedy()))
    }
}

/// What to do about EMFILE.
pub(crate) fn out_of_descriptors(what: &str) -> Option<String> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    what.contains("Too many open files").then(|| {
        let limit = limit.map_or(String::from("any number of"), |limit| limit.to_string());
        format!(
            "a process may open {limit} files here, which is too few: `ulimit -n 1024` raises it, beyond \
             `ulimit -Hn` an administrator in /etc/security/limits.conf"
        )
    })
}

/// The remedy in the words of this tool.
fn words(remedy: Remedy) -> String {
    match remedy {
        Remedy::ChooseAnotherCard => {
            "wait for its owner or end it, or choose another card with --card".to_owned()
        }
        Remedy::CheckCard => "run `ucx-gaudi doctor`, which says what is missing; without a card, \
             add --soft for the software one"
            .to_owned(),
        other => other.words().to_owned(),
    }
}
