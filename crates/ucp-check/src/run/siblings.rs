//! Two or more processes of this program: started together, talking to each other over a socket per
//! pair and to us over a pipe each, and never outliving us.
//!
//! A child's standard input is a socket over which we hand it its lines to the other children; its
//! standard output is the pipe to us, one JSON message per line. What libraries print there is sent to
//! standard error instead.

use super::surroundings::Surroundings;
use crate::control::Control;
use crate::watchdog::{HUNG, Watchdog};
use anyhow::{Context, Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::Signal;
use serde::{Serialize, de::DeserializeOwned};
use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// What comes with every line that is handed over, and what comes when there are no more.
const ANOTHER: u8 = 1;
const NO_MORE: u8 = 0;

/// The children; killed when dropped.
pub(super) struct Siblings<M> {
    children: Vec<Child>,
    messages: mpsc::Receiver<(u8, Option<M>)>,
}

impl<M: DeserializeOwned + Send + 'static> Siblings<M> {
    /// Starts `ucp-check <role> --rank N --parent PID --plan JSON` twice.
    pub(super) fn twins(role: &str, plan: &impl Serialize, around: &Surroundings) -> Result<Self> {
        Self::start(role, 2, plan, around)
    }

    /// The same, `count` times.
    pub(super) fn start(
        role: &str,
        count: u8,
        plan: &impl Serialize,
        around: &Surroundings,
    ) -> Result<Self> {
        let plan = serde_json::to_string(plan)?;
        let exe = std::env::current_exe().context("finding our own program")?;
        let (sender, messages) = mpsc::channel();
        let start = |rank: u8, lines: Vec<UnixStream>| -> Result<Child> {
            let (cradle, theirs) = UnixStream::pair().context("making a socket pair")?;
            hand_over(&cradle, &lines).context("handing over the lines to the others")?;
            let mut child = Command::new(&exe)
                .args([role, "--rank", &rank.to_string(), "--plan", &plan])
                .args(["--parent", &std::process::id().to_string()])
                .args(around.arguments())
                .envs(around.variables(rank))
                .stdin(Stdio::from(OwnedFd::from(theirs)))
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
        // If one cannot start, dropping this ends those that did.
        let mut siblings = Siblings { children: Vec::new(), messages };
        for (rank, lines) in (0..count).zip(lines_of_all(count)?) {
            siblings.children.push(start(rank, lines)?);
        }
        Ok(siblings)
    }

    /// The next message of any child; `None` when that child said its last.
    pub(super) fn next(&mut self, limit: Duration) -> Result<(u8, Option<M>)> {
        match self.messages.recv_timeout(limit) {
            Ok(message) => Ok(message),
            Err(_) => bail!("no process said anything for {} s", limit.as_secs()),
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

impl<M> Drop for Siblings<M> {
    fn drop(&mut self) {
        for child in &mut self.children {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// A socket between every two: for each process its ends, the other processes in order.
fn lines_of_all(count: u8) -> Result<Vec<Vec<UnixStream>>> {
    let mut ends: Vec<Vec<UnixStream>> = (0..count).map(|_| Vec::new()).collect();
    for one in 0..usize::from(count) {
        for other in one + 1..usize::from(count) {
            let (left, right) = UnixStream::pair().context("making a socket pair")?;
            ends[one].push(left);
            ends[other].push(right);
        }
    }
    Ok(ends)
}

fn hand_over(cradle: &UnixStream, lines: &[UnixStream]) -> Result<()> {
    for line in lines {
        let fds = [line.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(cradle, &[IoSlice::new(&[ANOTHER])], &mut control, SendFlags::empty())?;
    }
    let mut nothing = SendAncillaryBuffer::default();
    sendmsg(cradle, &[IoSlice::new(&[NO_MORE])], &mut nothing, SendFlags::empty())?;
    Ok(())
}

fn take_over(cradle: impl AsFd) -> Result<Vec<Control>> {
    let mut lines = Vec::new();
    loop {
        let mut word = [NO_MORE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut data = [IoSliceMut::new(&mut word)];
        let got = recvmsg(&cradle, &mut data, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let line = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        match line {
            Some(line) => lines.push(Control::new(UnixStream::from(line))?),
            None => {
                ensure!(got.bytes == 1 && word == [NO_MORE], "half of our lines to the others");
                return Ok(lines);
            }
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

/// The child's side of [`Siblings`].
pub(super) struct Sibling {
    /// To the other children, in their order.
    pub(super) lines: Vec<Control>,
    /// Already watching.
    pub(super) dog: Watchdog,
    parent: File,
}

impl Sibling {
    /// Takes over what the parent prepared. To be called first thing in the child.
    pub(super) fn begin(rank: u8, parent: u32, limit: Duration) -> Result<Sibling> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .context("asking to die with the parent")?;
        // The parent may have died before we asked.
        if rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(parent as i32) {
            bail!("the process that started us is gone");
        }
        let pipe = rustix::io::dup(rustix::stdio::stdout()).context("our pipe to the parent")?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr()).context("redirecting output")?;
        rustix::io::fcntl_setfd(&pipe, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Sibling {
            lines: take_over(rustix::stdio::stdin()).context("our lines to the others")?,
            dog: Watchdog::start(&format!("process {rank}"), limit),
            parent: File::from(pipe),
        })
    }

    /// The line to the other child, where there is one only.
    pub(super) fn only_line(&mut self) -> Result<Control> {
        let line = self.lines.pop().context("no line to the other process")?;
        ensure!(self.lines.is_empty(), "one of more than two processes");
        Ok(line)
    }

    /// Does the child's work; a failure is told to the parent as a `wrap`ped sentence with the step
    /// it happened in. `Ok(false)`: that was the case.
    pub(super) fn run<M: Serialize>(
        self,
        wrap: fn(String) -> M,
        work: impl FnOnce(Sibling) -> Result<()>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn every_process_has_a_line_to_every_other_in_order() {
        let mut ends = lines_of_all(4).unwrap();
        for (rank, lines) in ends.iter_mut().enumerate() {
            assert_eq!(lines.len(), 3);
            lines.iter_mut().for_each(|line| line.write_all(&[rank as u8]).unwrap());
        }
        for (rank, lines) in ends.iter_mut().enumerate() {
            let others = (0..4).filter(|other| *other != rank);
            for (line, other) in lines.iter_mut().zip(others) {
                let mut name = [9];
                line.read_exact(&mut name).unwrap();
                assert_eq!(name, [other as u8]);
            }
        }
    }

    #[test]
    fn lines_are_handed_over_and_a_lost_parent_is_noticed() {
        for count in [0, 1, 7] {
            let (cradle, theirs) = UnixStream::pair().unwrap();
            let lines: Vec<_> = (0..count).map(|_| UnixStream::pair().unwrap()).collect();
            let near: Vec<UnixStream> = lines.into_iter().map(|(near, _)| near).collect();
            hand_over(&cradle, &near).unwrap();
            assert_eq!(take_over(&theirs).unwrap().len(), count);
            drop(cradle);
            assert!(take_over(&theirs).is_err());
        }
    }
}
