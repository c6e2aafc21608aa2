//! Finds what the processes of a round left behind when they ended: they must leave nothing.
//!
//! To find it, the soak runs with its own `/dev/shm`, temporary files and System V shared memory ([`in_namespaces`]).

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use procfs::process::all_processes;

/// How long the remains of a killed process may take to disappear, also on a busy machine.
const SETTLED: Duration = Duration::from_secs(10);
/// Set in a program that runs in its own namespaces.
const INSIDE: &str = "XTASK_SOAK_INSIDE";

/// What exists before a round; whatever is new afterwards was left by the round.
#[derive(Debug)]
pub struct Remains {
    before: BTreeSet<String>,
}

impl Remains {
    /// Records what exists now.
    pub fn before() -> Self {
        Self { before: shared() }
    }

    /// Sockets that `gaudi_ipc` left.
    pub(super) fn sockets(&self) -> Vec<String> {
        let there = if is_inside() { shared() } else { BTreeSet::new() };
        let is_ours = |path: &&String| {
            let name = path.rsplit('/').next().unwrap_or_default();
            name.starts_with("ucx-gaudi-") && name.ends_with(".sock")
        };
        there.difference(&self.before).filter(is_ours).cloned().collect()
    }

    /// What a round left whose processes used this machine.
    pub fn after(&self, machine: &str) -> Vec<String> {
        let deadline = Instant::now() + SETTLED;
        loop {
            let mut left: Vec<String> = processes_on(machine);
            if is_inside() {
                left.extend(shared().difference(&self.before).cloned());
            }
            if left.is_empty() || Instant::now() > deadline {
                return left;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether no other program uses the folders that are searched.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Files in memory, temporary files, System V segments.
fn shared() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for folder in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
        files(&folder, &mut found);
    }
    let segments = std::fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
    found.extend(segments.lines().skip(1).map(|line| format!("System V segment {line}")));
    found
}

fn files(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files(&path, found);
            // All machines of a user share one folder, which stays.
            let stays = entry.file_name().to_string_lossy().starts_with("soft-gaudi-");
            if stays {
                continue;
            }
        }
        found.insert(path.display().to_string());
    }
}

/// Processes with this machine in their environment.
fn processes_on(machine: &str) -> Vec<String> {
    let on = |process: &procfs::process::Process| {
        let variables = process.environ().ok()?;
        (variables.get(&OsString::from("SOFT_GAUDI_NODE"))? == machine).then_some(())
    };
    let all = all_processes().into_iter().flatten().flatten();
    let ended =
        |process: &procfs::process::Process| process.stat().map_or(true, |stat| stat.state == 'Z');
    let found = all.filter(|process| on(process).is_some() && !ended(process));
    found.map(|process| format!("process {}", process.pid)).collect()
}

/// Mounts a file system in memory for this process alone, then runs the program.
const ENTER: &str = r#"mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec "$@""#;

/// The words to put before a program to give it its own `/dev/shm` and System V shared memory; `None` if the system
/// does not allow that.
pub(super) fn words() -> Option<Vec<&'static str>> {
    let entering = |rights: &[&'static str]| {
        [&["unshare"], rights, &["--mount", "--ipc", "sh", "-c", ENTER, "sh"]].concat()
    };
    // Root needs no user namespace.
    let works = |words: &Vec<&'static str>| {
        let tried = Command::new(words[0]).args(&words[1..]).arg("true").output();
        tried.is_ok_and(|output| output.status.success())
    };
    [&[][..], &["--map-root-user"]].into_iter().map(entering).find(works)
}

/// This program again, with its own `/dev/shm`, System V shared memory and temporary files. `None` if this process is
/// already inside, or if the system does not allow it (then nothing searches for files that are left).
pub fn in_namespaces(temporary: &Path) -> Option<Command> {
    if is_inside() {
        return None;
    }
    let words = words()?;
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(std::env::current_exe().ok()?).args(std::env::args_os().skip(1));
    command.env(INSIDE, "yes").env("TMPDIR", temporary);
    Some(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::process::Stdio;

    #[test]
    fn a_process_on_the_machine_is_found() {
        let name = format!("soak-test-{}", std::process::id());
        let mut command = Command::new("sh");
        command.args(["-c", "echo; read line"]).env("SOFT_GAUDI_NODE", &name);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("sh");
        // Until the new program itself runs, its environment may look empty, even after `spawn` has returned.
        let mut line = [0];
        child.stdout.as_mut().expect("a pipe").read_exact(&mut line).expect("a line");
        let found = processes_on(&name);
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert_eq!(found, [format!("process {}", child.id())]);
        assert!(processes_on(&name).is_empty());
    }

    #[test]
    fn files_are_found_in_folders() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("soft-gaudi-0/machine/hbm0");
        std::fs::create_dir_all(file.parent().expect("a parent")).expect("folders");
        std::fs::write(&file, "").expect("a file");
        let mut found = BTreeSet::new();
        files(folder.path(), &mut found);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.contains(&file.display().to_string()));
    }
}
