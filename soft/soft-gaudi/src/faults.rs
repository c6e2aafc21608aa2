//! Faults on demand: rules in a file of the machine's folder make the next matching call or
//! transfer go wrong.
//!
//! They apply only to processes with `SOFT_GAUDI_FAULTS=yes`. The test writes the rules into the file `faults` of the
//! machine's folder, one per line:
//!
//! ```text
//! <point> <action> [after=N] [times=N]
//! ```
//!
//! *point*: a C function (`hlthunk_device_memory_alloc`), `submission` or `transfer`.
//! *action*: `fail:ERRNO` (a call; a transfer faults), `slow:MILLISECONDS`, `hang` (a submission
//! never ends by itself), `late:N` (a submission's end is reported after N others have ended),
//! `reset`, `remove` (both: every card this process has open), `flip:N` (after its first 256 KiB, or at its end if it
//! is shorter, a transfer flips a bit of the byte N bytes after the start of its destination, even outside of it;
//! a transfer that swaps bytes does not).
//! `after=N` skips the first N matches; `times=N` repeats (default 1, 0 is for ever).
//! A rule that is used up disappears from the file, so a test can see that it was hit.

use std::collections::BTreeSet;
use std::io::{Read, Seek, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use rustix::io::Errno;

use crate::ownership;

/// What happens at a match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Fail(Errno),
    Slow(Duration),
    Hang,
    Late(u64),
    Reset,
    Remove,
    Flip(u64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    point: String,
    action: Action,
    after: u64,
    /// 0: for ever.
    times: u64,
}

const ERRNOS: [(&str, Errno); 15] = [
    ("EPERM", Errno::PERM),
    ("ENOENT", Errno::NOENT),
    ("EIO", Errno::IO),
    ("ENXIO", Errno::NXIO),
    ("EAGAIN", Errno::AGAIN),
    ("ENOMEM", Errno::NOMEM),
    ("EACCES", Errno::ACCESS),
    ("EFAULT", Errno::FAULT),
    ("EBUSY", Errno::BUSY),
    ("ENODEV", Errno::NODEV),
    ("EINVAL", Errno::INVAL),
    ("ENFILE", Errno::NFILE),
    ("EMFILE", Errno::MFILE),
    ("ENOTTY", Errno::NOTTY),
    ("ETIMEDOUT", Errno::TIMEDOUT),
];

fn parse(line: &str) -> Result<Rule, String> {
    let mut words = line.split_whitespace();
    let (Some(point), Some(action)) = (words.next(), words.next()) else {
        return Err(format!("'{line}': want <point> <action>"));
    };
    let (name, value) = action.split_once(':').unwrap_or((action, ""));
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{line}': no number"));
    let action = match name {
        "fail" => {
            let known = ERRNOS.iter().find(|(name, _)| *name == value);
            Action::Fail(known.ok_or_else(|| format!("'{line}': unknown errno"))?.1)
        }
        "slow" => Action::Slow(Duration::from_millis(number(value)?)),
        "hang" => Action::Hang,
        "late" => Action::Late(number(value)?),
        "reset" => Action::Reset,
        "remove" => Action::Remove,
        "flip" => Action::Flip(number(value)?),
        _ => return Err(format!("'{line}': unknown action")),
    };
    let mut rule = Rule { point: point.to_owned(), action, after: 0, times: 1 };
    for word in words {
        match word.split_once('=') {
            Some(("after", n)) => rule.after = number(n)?,
            Some(("times", n)) => rule.times = number(n)?,
            _ => return Err(format!("'{line}': unknown '{word}'")),
        }
    }
    Ok(rule)
}

fn print(rule: &Rule) -> String {
    let action = match rule.action {
        Action::Fail(errno) => {
            let name = ERRNOS.iter().find(|(_, e)| *e == errno).map_or("EIO", |(name, _)| name);
            format!("fail:{name}")
        }
        Action::Slow(time) => format!("slow:{}", time.as_millis()),
        Action::Hang => "hang".to_owned(),
        Action::Late(n) => format!("late:{n}"),
        Action::Reset => "reset".to_owned(),
        Action::Remove => "remove".to_owned(),
        Action::Flip(at) => format!("flip:{at}"),
    };
    format!("{} {action} after={} times={}\n", rule.point, rule.after, rule.times)
}

/// For tests: a line of the file as it is written back, or what is wrong with it.
pub(crate) fn normalized(line: &str) -> Result<String, String> {
    parse(line).map(|rule| print(&rule))
}

/// One match of `point`: what happens, and the rules that are left.
fn step(rules: &[Rule], point: &str) -> (Option<Action>, Vec<Rule>) {
    let mut left = rules.to_vec();
    let Some(at) = left.iter().position(|rule| rule.point == point) else { return (None, left) };
    let rule = &mut left[at];
    if rule.after > 0 {
        rule.after -= 1;
        return (None, left);
    }
    let action = rule.action;
    match rule.times {
        0 => {}
        1 => drop(left.remove(at)),
        _ => rule.times -= 1,
    }
    (Some(action), left)
}

/// Malformed lines that were reported.
static REPORTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The action of the first rule that matches this point, if it is due; uses the rule up.
pub(crate) fn next_action(file: &Path, point: &str) -> Option<Action> {
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(file).ok()?;
    while ownership::lock(file.as_fd()) == Err(Errno::AGAIN) {
        std::thread::sleep(Duration::from_micros(100));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    let mut rules = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#')) {
        match parse(line) {
            Ok(rule) => rules.push(rule),
            // The file is read at every call: report a line once.
            Err(reason) => {
                let mut reported = REPORTED.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                if reported.insert(line.to_owned()) {
                    eprintln!(
                        "soft-gaudi: faults: {reason}; the line is ignored (a rule is: \
                         <point> <action> [after=N] [times=N])"
                    );
                }
            }
        }
    }
    let (action, left) = step(&rules, point);
    if left != rules {
        let text: String = left.iter().map(print).collect();
        file.rewind().ok()?;
        file.set_len(0).ok()?;
        file.write_all(text.as_bytes()).ok()?;
    }
    action
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_survive_being_written_back() {
        for line in [
            "hlthunk_open fail:EBUSY after=2 times=0\n",
            "submission late:3 after=0 times=1\n",
            "transfer slow:20 after=0 times=5\n",
            "transfer flip:7 after=0 times=1\n",
            "hlthunk_wait_for_cs remove after=0 times=1\n",
        ] {
            assert_eq!(print(&parse(line).unwrap()), line);
        }
        for bad in ["x", "x explode", "x fail:EWHAT", "x slow:soon", "x flip", "x hang often"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rule_waits_fires_and_disappears() {
        let mut rules = vec![parse("a hang after=1 times=2").unwrap(), parse("b reset").unwrap()];
        let mut seen = Vec::new();
        for _ in 0..4 {
            let (action, left) = step(&rules, "a");
            rules = left;
            seen.push(action);
        }
        assert_eq!(seen, [None, Some(Action::Hang), Some(Action::Hang), None]);
        assert_eq!(rules.len(), 1);
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_a_rule_or_a_reason(line in ".{0,40}") {
            let _ = parse(&line);
        }
    }
}
