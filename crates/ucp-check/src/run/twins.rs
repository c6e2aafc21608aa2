//! Two processes of this program: started together, talking to each other over one socket and to
//! us over a pipe each, and never outliving us.
//!
//! A child's standard input is its socket to the other child; its standard output is the pipe to
//! us, one JSON message per line. What libraries print there is sent to standard error instead.

use crate::control::Control;
use crate::watchdog::{HUNG, Watchdog};
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde::{Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A variable for the children.
pub(super) type Variable = (String, String);

/// The two children; killed when dropped.
pub(super) struct Twins<M> {
    children: [Child; 2],
    messages: mpsc::Receiver<(u8, Option<M>)>,
}

impl<M: DeserializeOwned + Send + 'static> Twins<M> {
    /// Starts `ucp-check <role> --rank N --parent PID --plan JSON` twice.
    pub(super) fn start(role: &str, plan: &impl Serialize, env: &[Variable]) -> Result<Twins<M>> {
        let plan = serde_json::to_string(plan)?;
        let exe = std::env::current_exe().context("finding our own program")?;
        let (left, right) = UnixStream::pair().context("making a socket pair")?;
        let (sender, messages) = mpsc::channel();
        let start = |rank: u8, socket: UnixStream| -> Result<Child> {
            let mut child = Command::new(&exe)
                .args([role, "--rank", &rank.to_string(), "--plan", &plan])
                .args(["--parent", &std::process::id().to_string()])
                .envs(env.iter().map(|(k, v)| (k, v)))
                .stdin(Stdio::from(OwnedFd::from(socket)))
                .stdout(Stdio::piped())
                .spawn()
                .with_context(|| format!("starting {}", exe.display()))?;
            let pipe = BufReader::new(child.stdout.take().context("no pipe")?);
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in pipe.lines().map_while(Result::ok) {
                    match serde_json::from_str(&line) {
                        Ok(message) => _ = sender.send((rank, Some(message))),
                        Err(_) => eprintln!("process {rank}: {line}"),
                    }
                }
                _ = sender.send((rank, None));
            });
            Ok(child)
        };
        // If the second cannot start, the first finds its socket closed and ends.
        let children = [start(0, left)?, start(1, right)?];
        Ok(Twins { children, messages })
    }

    /// The next message of either child; `None` when that child said its last.
    pub(super) fn next(&mut self, limit: Duration) -> Result<(u8, Option<M>)> {
        match self.messages.recv_timeout(limit) {
            Ok(message) => Ok(message),
            Err(_) => bail!("neither process said anything for {} s", limit.as_secs()),
        }
    }

    /// Kills a child that waits for it.
    pub(super) fn kill(&mut self, rank: u8) -> Result<()> {
        self.children[usize::from(rank)].kill().context("killing a process")
    }

    /// Waits for a child that closed its pipe.
    pub(super) fn ended(&mut self, rank: u8) -> Result<ExitStatus> {
        self.children[usize::from(rank)].wait().context("waiting for a process")
    }
}

impl<M> Drop for Twins<M> {
    fn drop(&mut self) {
        for child in &mut self.children {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// What an exit status means, in words.
pub(super) fn describe(rank: u8, status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(HUNG), _) => format!("process {rank} hung (its step is named above)"),
        (Some(code), _) => format!("process {rank} ended with status {code}"),
        (None, Some(signal)) => format!("process {rank} was killed by signal {signal}"),
        (None, None) => format!("process {rank} ended strangely"),
    }
}

/// The child's side of [`Twins`].
pub(super) struct Twin {
    /// To the other child.
    pub(super) control: Control,
    /// Already watching.
    pub(super) dog: Watchdog,
    parent: File,
}

impl Twin {
    /// Takes over what the parent prepared. To be called first thing in the child.
    pub(super) fn begin(rank: u8, parent: u32, limit: Duration) -> Result<Twin> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .context("asking to die with the parent")?;
        // The parent may have died before we asked.
        if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent as i32) {
            bail!("the process that started us is gone");
        }
        let pipe = rustix::io::dup(rustix::stdio::stdout()).context("our pipe to the parent")?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr()).context("redirecting output")?;
        let socket = rustix::io::dup(rustix::stdio::stdin()).context("our socket to the twin")?;
        rustix::io::fcntl_setfd(&pipe, rustix::io::FdFlags::CLOEXEC)?;
        rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Twin {
            control: Control::new(UnixStream::from(socket))?,
            dog: Watchdog::start(&format!("process {rank}"), limit),
            parent: File::from(pipe),
        })
    }

    /// Does the child's work; a failure is told to the parent as a `wrap`ped sentence with the step
    /// it happened in. `Ok(false)`: that was the case.
    pub(super) fn run<M: Serialize>(
        self,
        wrap: fn(String) -> M,
        work: impl FnOnce(Twin) -> Result<()>,
    ) -> Result<bool> {
        let (mut parent, dog) = (self.reporter()?, self.dog.clone());
        let outcome = work(self);
        if let Err(error) = &outcome {
            parent.tell(&wrap(format!("{error:#} (while: {})", dog.current())))?;
        }
        Ok(outcome.is_ok())
    }

    /// A way to tell the parent things.
    pub(super) fn reporter(&self) -> Result<Reporter> {
        Ok(Reporter(self.parent.try_clone().context("our pipe to the parent")?))
    }
}

/// Sends messages to the parent.
pub(super) struct Reporter(File);

impl Reporter {
    /// One message.
    pub(super) fn tell(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.0.write_all(&line).context("the parent is gone")
    }
}
