//! What no fault may cause, as seen in the processes of a run: wrong bytes, an operation that does not end, a crash.
//! The fault matrix and the soak use it to judge.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;

use ucp_check::processes::STILL_RUNNING;

use crate::Finished;

/// What `ucp-check` (and the example for NIXL) prints about wrong bytes.
const WRONG: [&str; 5] =
    ["message wrong", "violated", "with a wrong header", "wrong bytes", "is wrong"];

/// A panic, caught or not, and what glibc prints before it ends a process with a damaged heap: no fault may cause these.
const DAMAGE: [&str; 7] = [
    "panicked at",
    "internal error in ",
    "free(): ",
    "double free",
    "malloc(): ",
    "corrupted ",
    "stack smashing",
];

/// What the processes of a run printed, and how they ended.
#[derive(Debug)]
pub(crate) struct Observed {
    /// Bytes reported as delivered differ from those sent, or other bytes were changed.
    pub(crate) wrong_bytes: bool,
    /// An operation did not end.
    pub(crate) hung: bool,
    /// A process panicked, or damaged its memory.
    pub(crate) damaged: bool,
    /// A process did not end after another had failed.
    pub(crate) was_stuck: bool,
    /// The signals that processes died of.
    pub(crate) signals: BTreeSet<i32>,
}

impl Observed {
    pub(crate) fn of(end: &Finished) -> Self {
        let text = end.text();
        // Lines that report wrong bytes, and not the plugin's warning that UCX would deliver some.
        let ours = |line: &&str| !line.contains("UCX would go on");
        let wrong_bytes =
            text.lines().filter(ours).any(|line| WRONG.iter().any(|word| line.contains(word)));
        let silent = text.contains("no process said anything");
        let hung =
            end.status.is_none() || silent || text.lines().any(|line| line.starts_with("HUNG "));
        let told = text.split("was killed by signal ").skip(1).filter_map(|rest| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        });
        let signals = told.chain(end.status.and_then(|status| status.signal())).collect();
        let damaged = DAMAGE.iter().any(|words| text.contains(words));
        let was_stuck = text.contains(STILL_RUNNING);
        Self { wrong_bytes, hung, damaged, was_stuck, signals }
    }
}
