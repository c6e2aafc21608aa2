//! Judges a round by what is promised: no wrong byte is delivered as right, no step takes longer than it may, nothing
//! crashes, and if no fault came, everything passes and is verified.

use std::fmt;

use rustix::process::Signal;

use super::{Fault, Way};
use crate::Finished;
use crate::named::named;
use crate::observed::Observed;

named! {
    /// How a round ended.
    Outcome {
        /// Everything was moved, and every byte was right.
        Passed = "passed",
        /// A process reported an error in words, and no byte was wrong.
        Error = "error",
        /// A copy failed for good: a process ended itself by SIGABRT, with the reason.
        Aborted = "aborted",
        /// The process that was killed is what ended it.
        Killed = "killed",
    }
}

/// A promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// Bytes that were reported as delivered are not those that were sent, or others were changed.
    WrongBytes,
    /// A step of a process, or the round, took longer than it may.
    Hung,
    /// A process panicked, or its heap was damaged.
    Damaged,
    /// A process died of this signal, or without a reason.
    Crashed(i32),
    /// This cannot come of such a fault.
    Unexpected(Outcome),
    /// It did not pass, though its fault never came.
    WithoutFault(Outcome),
    /// It passed, and no message was verified.
    NothingVerified,
    /// Something is left behind.
    Left(String),
    /// The cards of the machine cannot be used again.
    CardsLost,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::WrongBytes => f.write_str("wrong bytes"),
            Violation::Hung => f.write_str("a step took longer than it may"),
            Violation::Damaged => f.write_str("a panic, or a damaged heap"),
            Violation::Crashed(signal) => write!(f, "a process died of signal {signal}"),
            Violation::Unexpected(outcome) => write!(f, "unexpected outcome: {outcome}"),
            Violation::WithoutFault(outcome) => write!(f, "{outcome}, and the fault never came"),
            Violation::NothingVerified => f.write_str("it passed, and nothing was verified"),
            Violation::Left(what) => write!(f, "left behind: {what}"),
            Violation::CardsLost => f.write_str("the cards cannot be used again"),
        }
    }
}

/// What remains of a round after its output is discarded.
#[derive(Debug, Clone)]
pub struct Judged {
    /// How it ended.
    pub outcome: Outcome,
    /// Whether the fault came; `None`: the round had no fault.
    pub came: Option<bool>,
    /// The promises that it broke.
    pub violations: Vec<Violation>,
    /// Messages that were verified.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Fault {
    /// Whether this fault may lead to this outcome.
    fn allows(self, way: Way, outcome: Outcome) -> bool {
        use Outcome::{Aborted, Error, Killed, Passed};
        let allowed: &[Outcome] = match self {
            Fault::None
            | Fault::Slow
            | Fault::LateEnds
            | Fault::Stopped
            | Fault::PeerDies
            | Fault::ImportRefused
            // The copy is repeated.
            | Fault::CopyFailsOnce
            | Fault::PortDown => &[Passed],
            // Lack of memory or descriptors may be temporary: then the HCA's user gets an error. Otherwise UCX stages.
            Fault::ExportRefused if way.has_hca() => &[Passed, Error],
            Fault::ExportRefused => &[Passed],
            // Passed: the run never reached the call that fails, or did not need the memory.
            Fault::AllocationRefused | Fault::OpenBusy | Fault::FewDescriptors => &[Passed, Error],
            // Aborted: a short copy needs a bounce buffer, and UCX ends the process if a short copy fails.
            Fault::MapRefused
            | Fault::CopyFailsForGood
            | Fault::PageFault
            | Fault::Reset
            | Fault::Removal
            | Fault::Hang => &[Passed, Error, Aborted],
            // Passed: the process had ended before.
            Fault::Killed => &[Passed, Killed],
            Fault::Flip => &[Passed],
        };
        allowed.contains(&outcome)
    }

    /// Whether a round can fail only because of this fault. A process may hit the limit of open files without a
    /// message, and the short timeout that comes with a hang may end another submission on a busy machine.
    fn is_only_reason(self) -> bool {
        !matches!(self, Fault::FewDescriptors | Fault::Hang)
    }

    /// Whether the fault came, where only the output of the processes can tell.
    pub(super) fn shows(self, end: &Finished) -> bool {
        let text = end.text();
        let says = |words: &[&str]| words.iter().any(|words| text.contains(words));
        match self {
            Fault::Killed => Observed::of(end).signals.contains(&Signal::KILL.as_raw()),
            Fault::PeerDies => says(&[" ms after the death: ", "the peer died: "]),
            Fault::FewDescriptors => says(&FEW_DESCRIPTORS),
            // Messages were verified, so cards copied, and each of their completions was late.
            Fault::LateEnds => verified(&text).0 > 0,
            _ => false,
        }
    }
}

/// How UCX and the plugin report the limit.
const FEW_DESCRIPTORS: [&str; 4] =
    ["Too many open files", "lacks descriptors", "too many descriptors", "ulimit -n"];

/// The plugin's words when it ends the process. If UCX ends it, a copy has failed before.
const REASONS: [&str; 2] = ["fatal: copy failed", "bytes failed: "];

/// Judges what the processes of a round printed, and how they ended; `came`: whether the fault came.
pub(super) fn judge(way: Way, fault: Fault, came: Option<bool>, end: &Finished) -> Judged {
    let text = end.text();
    let (messages, bytes) = verified(&text);
    let mut violations = Vec::new();
    let Observed { wrong_bytes, hung, damaged, signals, .. } = Observed::of(end);
    if wrong_bytes {
        violations.push(Violation::WrongBytes);
    }
    if hung {
        violations.push(Violation::Hung);
    }
    if damaged {
        violations.push(Violation::Damaged);
    }
    let explained = REASONS.iter().any(|reason| text.contains(reason));
    let abort = Signal::ABORT.as_raw();
    for &signal in &signals {
        let ours = signal == Signal::KILL.as_raw() && fault == Fault::Killed;
        if !(ours || signal == abort && explained) {
            violations.push(Violation::Crashed(signal));
        }
    }
    let outcome = if end.success() {
        Outcome::Passed
    } else if signals.contains(&abort) {
        Outcome::Aborted
    } else if signals.contains(&Signal::KILL.as_raw()) {
        Outcome::Killed
    } else {
        Outcome::Error
    };
    // The example that loses its peer has nothing left to verify.
    let verifies = (way, fault) != (Way::Nixl, Fault::PeerDies);
    let never_came = came == Some(false) && fault.is_only_reason();
    match outcome {
        _ if !violations.is_empty() => {}
        _ if !fault.allows(way, outcome) => violations.push(Violation::Unexpected(outcome)),
        Outcome::Passed if verifies && messages == 0 => {
            violations.push(Violation::NothingVerified);
        }
        Outcome::Passed => {}
        _ if never_came => violations.push(Violation::WithoutFault(outcome)),
        _ => {}
    }
    Judged { outcome, came, violations, messages, bytes }
}

/// What the round left behind, except for what stock UCX leaves. UCX creates a segment of shared memory, fills or attaches it,
/// and then removes its name (`uct_posix_mem_alloc`, `ucs_sysv_alloc`): a process that dies in between leaves it.
pub(super) fn left(outcome: Outcome, mut left: Vec<String>) -> Option<Violation> {
    if matches!(outcome, Outcome::Aborted | Outcome::Killed) {
        let ucx = ["/ucx_shm_posix_", "System V segment"];
        left.retain(|path| !ucx.iter().any(|name| path.contains(name)));
    }
    (!left.is_empty()).then(|| Violation::Left(left.join(", ")))
}

/// Messages and bytes: the sums of the lines `verified: 12 messages, 4096 bytes`, and what the example for NIXL has
/// moved, if it says that every byte is right.
fn verified(text: &str) -> (u64, u64) {
    let number = |word: &str| word.parse::<u64>().ok();
    let line_of_check = |line: &str| {
        let (messages, rest) = line.strip_prefix("verified: ")?.split_once(" messages, ")?;
        Some((number(messages)?, number(rest.strip_suffix(" bytes")?)?))
    };
    // `READ 24 blocks of 46080 bytes: 1.50 us a block, …`
    let is_right = text.lines().any(|line| line == "every byte is right");
    let line_of_example = |line: &str| {
        let (before, rest) = line.split_once(" blocks of ").filter(|_| is_right)?;
        let count = number(before.rsplit(' ').next()?)?;
        Some((count, count * number(rest.split_once(" bytes: ")?.0)?))
    };
    let numbers = text.lines().filter_map(|line| line_of_check(line).or(line_of_example(line)));
    numbers.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    fn end(code: i32, text: &str) -> Finished {
        let status = Some(ExitStatus::from_raw(code << 8));
        Finished { line: String::new(), status, stdout: text.to_owned(), stderr: String::new() }
    }

    const MOVED: &str = "verified: 8 messages, 80 bytes\n";

    #[track_caller]
    fn breaks(fault: Fault, code: i32, text: &str, violation: &Violation) {
        let judged = judge(Way::Staged, fault, Some(true), &end(code, text));
        assert!(judged.violations.contains(violation), "{fault}, {text}: {:?}", judged.violations);
    }

    #[test]
    fn what_is_promised_is_sound() {
        for (fault, came, code, text) in [
            (Fault::None, None, 0, "verified: 8 messages, 80 bytes\n8 passed, 0 failed"),
            (
                Fault::Reset,
                Some(true),
                1,
                "FAIL  process 0: Input/output error\n8 passed, 0 failed, 2 not run",
            ),
            (
                Fault::Reset,
                Some(true),
                1,
                "fatal: copy failed: x (UCX would go on with wrong bytes; y\nFAIL  process 0 was killed by signal 6",
            ),
            (Fault::Killed, Some(true), 1, "FAIL  process 1 was killed by signal 9"),
            (Fault::Killed, Some(false), 0, MOVED),
            (Fault::Reset, Some(false), 0, MOVED),
            // Rounds with these faults may fail for other reasons.
            (Fault::FewDescriptors, Some(false), 1, "FAIL  process 1: x"),
            (Fault::Hang, Some(false), 1, "FAIL  process 1: x"),
        ] {
            let judged = judge(Way::Staged, fault, came, &end(code, text));
            assert_eq!(judged.violations, [], "{fault}, {text}");
            assert_eq!(judged.came, came);
        }
        let text = format!("{MOVED}verified: 1 messages, 7 bytes");
        let judged = judge(Way::Staged, Fault::None, None, &end(0, &text));
        assert_eq!((judged.outcome, judged.messages, judged.bytes), (Outcome::Passed, 9, 87));
    }

    #[test]
    fn blocks_of_nixl_count_when_every_byte_is_right() {
        let moved = "READ 24 blocks of 46080 bytes: 1.50 us a block, 3 GB/s (software), more\n";
        let right = format!("{moved}every byte is right\n");
        let judged = |text: &str| judge(Way::Nixl, Fault::None, None, &end(0, text));
        assert_eq!(judged(&right).violations, []);
        assert_eq!((judged(&right).messages, judged(&right).bytes), (24, 24 * 46080));
        assert_eq!(judged(moved).violations, [Violation::NothingVerified]);
        let died = end(0, "the peer died: NIXL reports x\n");
        let judged = judge(Way::Nixl, Fault::PeerDies, Some(true), &died);
        assert_eq!((judged.violations, judged.messages), (Vec::new(), 0));
    }

    #[test]
    fn a_round_in_which_the_fault_never_came_has_to_pass() {
        for (fault, text, outcome) in [
            (Fault::AllocationRefused, "FAIL  process 0: no memory", Outcome::Error),
            (
                Fault::Reset,
                "fatal: copy failed: x\nFAIL  process 0 was killed by signal 6",
                Outcome::Aborted,
            ),
        ] {
            let judged = |came| judge(Way::Staged, fault, Some(came), &end(1, text)).violations;
            assert_eq!(judged(true), []);
            assert_eq!(judged(false), [Violation::WithoutFault(outcome)]);
        }
    }

    #[test]
    fn processes_tell_of_faults_that_no_rule_counts() {
        for (fault, text, came) in [
            (Fault::Killed, "FAIL  process 1 was killed by signal 9", true),
            (Fault::Killed, "FAIL  process 1 was killed by signal 6", false),
            (Fault::PeerDies, "ok    put 4096: 0.5 ms after the death: operation failed", true),
            (Fault::PeerDies, "the peer died: NIXL reports RuntimeError()", true),
            (Fault::PeerDies, MOVED, false),
            (Fault::FewDescriptors, "socket() failed: Too many open files", true),
            (Fault::FewDescriptors, MOVED, false),
            (Fault::LateEnds, MOVED, true),
            (Fault::LateEnds, "", false),
        ] {
            assert_eq!(fault.shows(&end(0, text)), came, "{fault}: {text}");
        }
    }

    #[test]
    fn what_is_left_counts_unless_ucx_left_it_in_dying() {
        let ucx = || vec!["/dev/shm/ucx_shm_posix_2ac2ac52".to_owned()];
        let ours = || vec!["/dev/shm/ucx-gaudi-1.sock".to_owned()];
        assert_eq!(left(Outcome::Aborted, ucx()), None);
        assert_eq!(left(Outcome::Killed, vec!["System V segment 0 7".to_owned()]), None);
        assert_eq!(left(Outcome::Passed, ucx()), Some(Violation::Left(ucx().remove(0))));
        assert_eq!(left(Outcome::Killed, ours()), Some(Violation::Left(ours().remove(0))));
        assert_eq!(left(Outcome::Passed, Vec::new()), None);
    }

    #[test]
    fn every_promise_can_be_broken() {
        let wrong = "FAIL  tag: destination at 0x1: message wrong: first at offset 0";
        breaks(Fault::Reset, 1, wrong, &Violation::WrongBytes);
        let guard = "guard behind the message violated: first at offset 0";
        breaks(Fault::CopyFailsForGood, 1, guard, &Violation::WrongBytes);
        breaks(Fault::Reset, 1, "HUNG  process 0: waiting", &Violation::Hung);
        breaks(Fault::Reset, 0, "ERROR internal error in x (please report)", &Violation::Damaged);
        breaks(Fault::Reset, 1, "x bytes failed: y\nfree(): invalid pointer", &Violation::Damaged);
        breaks(Fault::Stopped, 1, "no process said anything for 9 s", &Violation::Hung);
        let killed = |signal| format!("FAIL  process 0 was killed by signal {signal}");
        breaks(Fault::Reset, 1, &killed(11), &Violation::Crashed(11));
        // A death without a reason in the log, and a SIGKILL in a round that kills nothing.
        breaks(Fault::Reset, 1, &killed(6), &Violation::Crashed(6));
        breaks(Fault::Reset, 1, &killed(9), &Violation::Crashed(9));
        // An assertion of UCX without the plugin's words may be a mistake of ours.
        let asserted = format!("Assertion `x' failed\n{}", killed(6));
        breaks(Fault::Reset, 1, &asserted, &Violation::Crashed(6));
        let reason = format!("fatal: copy failed: x\n{}", killed(6));
        breaks(Fault::None, 1, &reason, &Violation::Unexpected(Outcome::Aborted));
        breaks(Fault::None, 1, "FAIL  process 0: x", &Violation::Unexpected(Outcome::Error));
        breaks(Fault::Killed, 1, "FAIL  process 0: x", &Violation::Unexpected(Outcome::Error));
        breaks(Fault::None, 0, "0 passed, 0 failed", &Violation::NothingVerified);
        breaks(Fault::Killed, 0, "verified: 0 messages, 0 bytes", &Violation::NothingVerified);
        breaks(
            Fault::CopyFailsOnce,
            1,
            "FAIL  process 0: x",
            &Violation::Unexpected(Outcome::Error),
        );
        let never = Finished { status: None, ..end(0, "") };
        let judged = judge(Way::Relay, Fault::Reset, Some(true), &never);
        assert_eq!(judged.violations, [Violation::Hung]);
    }
}
