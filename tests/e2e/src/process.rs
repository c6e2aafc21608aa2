//! Child processes with a time limit: output captured, the whole process tree killed when the limit
//! is reached or the handle is dropped, so that a hanging test leaves nothing behind.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use procfs::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use soft_gaudi::testing::Machine;

/// A child that is running. Dropping it kills it and its descendants.
#[derive(Debug)]
pub struct Running {
    line: String,
    child: Child,
    pidfd: OwnedFd,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
    reaped: bool,
    /// The software machine that it uses. Declared last, so that it is dropped last.
    machine: Option<Arc<Machine>>,
}

/// The result of a child that has ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The command, as it would be typed.
    pub line: String,
    /// How it ended; `None` if the time limit ended it.
    pub status: Option<ExitStatus>,
    /// Everything it wrote to standard output.
    pub stdout: String,
    /// Everything it wrote to standard error.
    pub stderr: String,
}

impl Running {
    /// Starts `command` and captures its output. `line` is its name in messages.
    pub fn start(mut command: Command, line: String) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start `{line}`"))?;
        let pid = Pid::from_child(&child);
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error).with_context(|| format!("cannot watch `{line}` (pidfd_open)"));
            }
        };
        let stdout = child.stdout.take().map(drain);
        let stderr = child.stderr.take().map(drain);
        Ok(Self { line, child, pidfd, stdout, stderr, reaped: false, machine: None })
    }

    /// Keeps the software machine that the child uses alive.
    pub(crate) fn on(mut self, machine: Option<Arc<Machine>>) -> Self {
        self.machine = machine;
        self
    }

    /// Process id of the child.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether the child has ended (perhaps nobody has waited for it yet).
    pub fn has_ended(&self) -> bool {
        self.poll(Duration::ZERO)
    }

    /// Waits until `condition` holds for the process ids of the child and its descendants; `false` if
    /// the child ended, or 100 seconds passed, before it did.
    pub fn wait_until(&self, condition: impl Fn(&[u32]) -> bool) -> bool {
        let deadline = Instant::now() + Duration::from_secs(100);
        while !self.has_ended() && Instant::now() < deadline {
            let mut pids = vec![self.id()];
            pids.extend(descendants(self.id()));
            if condition(&pids) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// Waits until the child ends or `limit` has passed; in the latter case kills it.
    pub fn finish(mut self, limit: Duration) -> Finished {
        let ended = self.poll(limit);
        if !ended {
            self.kill_tree();
        }
        let status = self.child.wait().ok();
        self.reaped = true;
        Finished {
            line: self.line.clone(),
            status: status.filter(|_| ended),
            stdout: collect(self.stdout.take()),
            stderr: collect(self.stderr.take()),
        }
    }

    /// Sends a signal to the child alone.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    fn poll(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    fn kill_tree(&self) {
        // Children first: once the parent is gone, its children have another parent, and cannot be found any more.
        for pid in descendants(self.child.id()) {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        self.signal(Signal::KILL);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.reaped {
            self.kill_tree();
            let _ = self.child.wait();
        }
    }
}

impl Finished {
    /// Whether it ended by itself with exit status 0.
    pub fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// Returns itself if the child succeeded; panics with everything it printed otherwise.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert!(self.success(), "{}", self.report());
        self
    }

    /// Everything worth reading after a failure.
    pub fn report(&self) -> String {
        let end = match self.status {
            Some(status) => status.to_string(),
            None => "killed: it ran past its time limit".to_owned(),
        };
        format!(
            "`{}` → {end}\n--- stdout ---\n{}\n--- stderr ---\n{}\n",
            self.line,
            self.stdout.trim_end(),
            self.stderr.trim_end()
        )
    }

    /// Everything it wrote.
    pub fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    /// Whether a line of its output contains all these words.
    pub fn says(&self, words: &[&str]) -> bool {
        self.text().lines().any(|line| words.iter().all(|word| line.contains(word)))
    }

    /// Returns itself if the child failed without dying of a signal; panics with everything it printed otherwise.
    #[track_caller]
    pub fn refused(self) -> Self {
        assert!(!self.success() && !self.crashed(), "{}", self.report());
        self
    }

    /// Whether it died of a signal (a crash) rather than exited with a code.
    pub fn crashed(&self) -> bool {
        use std::os::unix::process::ExitStatusExt;
        self.status.is_some_and(|status| status.signal().is_some())
    }
}

fn drain(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes);
        bytes
    })
}

fn collect(reader: Option<JoinHandle<Vec<u8>>>) -> String {
    let bytes = reader.and_then(|handle| handle.join().ok()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// All processes below `pid`, deepest last.
fn descendants(pid: u32) -> Vec<u32> {
    let (mut found, mut queue) = (Vec::new(), vec![pid]);
    while let Some(parent) = queue.pop() {
        let tasks = Process::new(parent as i32).and_then(|process| process.tasks());
        let children =
            tasks.into_iter().flatten().flatten().filter_map(|task| task.children().ok());
        let children: Vec<u32> = children.flatten().collect();
        found.extend(&children);
        queue.extend(&children);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Running {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Running::start(command, format!("sh -c '{script}'")).expect("sh starts")
    }

    #[test]
    fn output_and_exit_code_are_kept_apart() {
        let finished = shell("echo out; echo err >&2; exit 3").finish(Duration::from_secs(10));
        assert_eq!(finished.status.and_then(|s| s.code()), Some(3));
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
        assert!(!finished.success() && !finished.crashed());
    }

    #[test]
    fn time_limit_kills_the_whole_tree() {
        // The grandchild holds the pipe open: if it had survived, reading the output would hang.
        let finished = shell("sleep 600 & sleep 600").finish(Duration::from_millis(300));
        assert!(finished.status.is_none(), "{}", finished.report());
        assert!(finished.report().contains("time limit"));
    }

    #[test]
    fn death_by_signal_counts_as_crash() {
        let finished = shell("kill -SEGV $$").finish(Duration::from_secs(10));
        assert!(finished.crashed(), "{}", finished.report());
    }

    #[test]
    fn dropped_child_is_gone() {
        let running = shell("sleep 600");
        let pid = running.id();
        drop(running);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
}
