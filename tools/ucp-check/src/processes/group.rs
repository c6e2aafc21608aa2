//! Two or more processes of this program. They start together, talk to each other over one socket per pair and to us
//! over one pipe each, and never outlive us.
//!
//! A child's standard input is a socket over which it receives its control channels to the other children. Its standard
//! output is the pipe to us, with one JSON message per line. Output of libraries goes to standard error instead.

use super::environment::{Environment, Refusal};
use super::{Job, descriptors, meeting};
use crate::control::{Control, GONE};
use crate::report::Verdict;
use crate::verify::peer_errors::Moment;
use crate::watchdog::{HUNG, Watchdog};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Name of the hidden subcommand that runs one process of a group.
const ROLE: &str = "side";

/// What a process reports.
#[derive(Serialize, Deserialize)]
pub(crate) enum Message {
    /// The version of its UCX.
    Ucx(String),
    Verdict(Verdict),
    /// A line to be printed.
    Line(String),
    /// A check of the given name, and what was wrong.
    Checked(String, Option<String>),
    /// The process is about to be killed.
    Dying(Moment),
    /// How and when the error showed.
    Survived(String, Moment),
    /// The process is done; the worker slept this many times.
    Done(u64),
    /// The process failed.
    Error(String),
}

/// Most processes of a group: each gets its channels to the others in one message.
pub(crate) const MOST: u8 = descriptors::MOST as u8 + 1;

/// How long the other processes may take to end after one has failed.
const AFTERMATH: Duration = Duration::from_secs(10);

/// The message about a process that did not end in that time.
pub const STILL_RUNNING: &str = "was still running when the group was broken off";

/// The children; killed when dropped.
pub(crate) struct Group {
    children: BTreeMap<u8, Child>,
    messages: mpsc::Receiver<(u8, Option<Message>)>,
    limit: Duration,
}

impl Group {
    /// Starts `count` processes with the same job, each step of which may take `timeout` seconds; starts only one if
    /// the other process is one that we meet.
    pub(crate) fn start(
        job: &Job,
        count: u8,
        timeout: f64,
        environment: &Environment,
    ) -> Result<Group> {
        let text = serde_json::to_string(job)?;
        let exe = std::env::current_exe().context("finding our own program")?;
        let (sender, messages) = mpsc::channel();
        // The children enforce the limit of each step; this limit only matters if all of them are stopped.
        let limit = Duration::from_secs_f64(timeout * 4.0 + 60.0);
        // If one cannot start, dropping the group kills those that did.
        let mut group = Group { children: BTreeMap::new(), messages, limit };
        let members: Vec<_> = match environment.meeting() {
            None => (0..count).zip(channels_of_all(count)?).collect(),
            Some(file) => {
                ensure!(count == 2, "two processes can meet, not {count}");
                let (rank, channel) = meeting::meet(file, Duration::from_secs_f64(timeout))?;
                vec![(rank, vec![channel])]
            }
        };
        for (rank, channels) in members {
            let (ours, theirs) = UnixStream::pair().context("making a socket pair")?;
            hand_over(&ours, &channels).context("handing over the channels to the others")?;
            let mut child = environment
                .command(rank, &exe)
                .args([ROLE, "--rank", &rank.to_string(), "--job", &text])
                .args(["--parent", &std::process::id().to_string()])
                .args(["--timeout", &timeout.to_string()])
                .args(environment.arguments())
                .envs(environment.variables(rank))
                .stdin(Stdio::from(OwnedFd::from(theirs)))
                .stdout(Stdio::piped())
                .spawn()
                .with_context(|| format!("starting {}", exe.display()))?;
            let pipe = BufReader::new(child.stdout.take().context("no pipe")?);
            group.children.insert(rank, child);
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
        }
        Ok(group)
    }

    /// Passes every message to `on` until all processes have ended; `ended` judges each exit. An error of `on`, of
    /// `ended` or of a process ends the run.
    pub(crate) fn collect(
        mut self,
        mut on: impl FnMut(&mut Group, u8, Message) -> Result<()>,
        mut ended: impl FnMut(u8, ExitStatus) -> Result<()>,
    ) -> Result<()> {
        let mut left: BTreeSet<u8> = self.children.keys().copied().collect();
        let mut errors: BTreeMap<u8, String> = BTreeMap::new();
        let mut first_failure: Option<Instant> = None;
        while !left.is_empty() {
            // Processes that lose their peer may report before the one that failed: collect errors for a while.
            let left_of_it = |then: Instant| AFTERMATH.saturating_sub(then.elapsed());
            let limit = first_failure.map_or(self.limit, left_of_it);
            match self.messages.recv_timeout(limit) {
                Err(_) if first_failure.is_some() => break,
                Err(_) => bail!("no process said anything for {} s", limit.as_secs()),
                Ok((rank, Some(Message::Error(error)))) => {
                    errors.insert(rank, format!("process {rank}: {error}"));
                }
                Ok((rank, Some(message))) => on(&mut self, rank, message)?,
                Ok((rank, None)) => {
                    let child = self.children.get_mut(&rank).context("a message of a stranger")?;
                    let status = child.wait().context("waiting for a process")?;
                    if let Err(error) = ended(rank, status) {
                        errors.entry(rank).or_insert(format!("{error:#}"));
                    }
                    left.remove(&rank);
                }
            }
            if !errors.is_empty() {
                first_failure.get_or_insert_with(Instant::now);
            }
        }
        if let Some(then) = first_failure {
            for rank in left {
                eprintln!("process {rank} {STILL_RUNNING}");
            }
            eprintln!("broken off {} ms after the first failure", then.elapsed().as_millis());
        }
        let errors: Vec<String> = causes(errors.into_values().collect());
        ensure!(errors.is_empty(), "{}", errors.join("; "));
        Ok(())
    }

    /// Prints the lines of processes that must all succeed.
    pub(crate) fn print_lines(self) -> Result<()> {
        let print = |_: &mut Group, _, message| {
            if let Message::Line(line) = message {
                println!("{line}");
            }
            Ok(())
        };
        self.collect(print, succeeded)
    }

    pub(crate) fn kill(&mut self, rank: u8) -> Result<()> {
        let child = self.children.get_mut(&rank).context("a process to kill is not ours")?;
        child.kill().context("killing a process")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// The errors without those that only say that another process is gone, if another error says why.
fn causes(errors: Vec<String>) -> Vec<String> {
    let (gone, causes): (Vec<_>, Vec<_>) = errors.into_iter().partition(|it| it.contains(GONE));
    if causes.is_empty() { gone } else { causes }
}

/// An error unless a process ended well.
pub(crate) fn succeeded(rank: u8, status: ExitStatus) -> Result<()> {
    ensure!(status.success(), "{}", describe(rank, status));
    Ok(())
}

/// What an exit status means, in words.
pub(crate) fn describe(rank: u8, status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(HUNG), _) => format!("process {rank} hung (its step is named above)"),
        (Some(code), _) => format!("process {rank} ended with status {code}"),
        (None, Some(signal)) => format!("process {rank} was killed by signal {signal}"),
        (None, None) => format!("process {rank} ended for an unknown reason"),
    }
}

/// One socket per pair. Each process gets its ends in the order of the other processes.
fn channels_of_all(count: u8) -> Result<Vec<Vec<UnixStream>>> {
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

fn hand_over(to: &UnixStream, channels: &[UnixStream]) -> Result<()> {
    descriptors::send(to, &[0], &channels.iter().map(UnixStream::as_fd).collect::<Vec<_>>())
}

fn take_over(from: impl AsFd) -> Result<Vec<Control>> {
    descriptors::receive(from)?.into_iter().map(|fd| Control::new(UnixStream::from(fd))).collect()
}

/// The command line of one process of a group.
#[derive(clap::Args)]
pub struct Side {
    #[arg(long)]
    rank: u8,
    #[arg(long)]
    parent: u32,
    #[arg(long)]
    timeout: f64,
    #[arg(long)]
    job: String,
    #[arg(long, value_enum)]
    refuse: Option<Refusal>,
}

impl Side {
    /// Does the work of one process. Reports a failure to the parent with the step that failed, and then returns
    /// `Ok(false)`.
    pub fn run(&self) -> Result<bool> {
        self.refuse.map_or(Ok(()), Refusal::impose)?;
        let job: Job = serde_json::from_str(&self.job)?;
        let member = Member::begin(self)?;
        let (mut parent, watchdog) = (member.parent.try_clone()?, member.watchdog.clone());
        let outcome = job.run(member);
        if let Err(error) = &outcome {
            let text = format!("{error:#} (while: {})", watchdog.current());
            report(&mut parent, &Message::Error(text))?;
        }
        watchdog.step("leaving");
        Ok(outcome.is_ok())
    }
}

/// The child's side of a [`Group`].
pub(crate) struct Member {
    pub(crate) rank: u8,
    /// Channels to the other children, in the order of their ranks.
    pub(crate) channels: Vec<Control>,
    /// It is already running.
    pub(crate) watchdog: Watchdog,
    parent: File,
}

impl Member {
    /// Takes over what the parent prepared. Must be the first call in the child.
    fn begin(side: &Side) -> Result<Member> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .context("asking to die with the parent")?;
        // The parent may have died before we asked for the signal.
        let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
        ensure!(parent == Some(side.parent as i32), "the process that started us is gone");
        let pipe = rustix::io::dup(rustix::stdio::stdout()).context("our pipe to the parent")?;
        rustix::stdio::dup2_stdout(rustix::stdio::stderr()).context("redirecting output")?;
        rustix::io::fcntl_setfd(&pipe, rustix::io::FdFlags::CLOEXEC)?;
        Ok(Member {
            rank: side.rank,
            channels: take_over(rustix::stdio::stdin()).context("our channels to the others")?,
            watchdog: Watchdog::start(&format!("process {}", side.rank), side.timeout),
            parent: File::from(pipe),
        })
    }

    /// The channel to the other child, if there is only one.
    pub(crate) fn only_channel(&mut self) -> Result<Control> {
        let channel = self.channels.pop().context("no channel to the other process")?;
        ensure!(self.channels.is_empty(), "one of more than two processes");
        Ok(channel)
    }

    pub(crate) fn report(&mut self, message: &Message) -> Result<()> {
        report(&mut self.parent, message)
    }
}

fn report(parent: &mut File, message: &Message) -> Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    parent.write_all(&line).context("the parent is gone")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn the_cause_is_told_and_not_that_its_victim_lost_a_peer() {
        let gone = format!("process 0: {GONE} (while: exchanging remote keys)");
        let cause = String::from("process 1: no card");
        assert_eq!(causes(vec![gone.clone(), cause.clone()]), [cause]);
        assert_eq!(causes(vec![gone.clone()]), [gone]);
        assert!(causes(Vec::new()).is_empty());
    }

    #[test]
    fn every_process_has_a_channel_to_every_other_in_order() {
        let mut ends = channels_of_all(4).unwrap();
        for (rank, channels) in ends.iter_mut().enumerate() {
            assert_eq!(channels.len(), 3);
            channels.iter_mut().for_each(|channel| channel.write_all(&[rank as u8]).unwrap());
        }
        for (rank, channels) in ends.iter_mut().enumerate() {
            let others = (0..4).filter(|other| *other != rank);
            for (channel, other) in channels.iter_mut().zip(others) {
                let mut name = [9];
                channel.read_exact(&mut name).unwrap();
                assert_eq!(name, [other as u8]);
            }
        }
    }

    #[test]
    fn channels_are_handed_over_and_a_lost_parent_is_noticed() {
        for count in [1, descriptors::MOST] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let near: Vec<UnixStream> = (0..count).map(|_| UnixStream::pair().unwrap().0).collect();
            hand_over(&ours, &near).unwrap();
            assert_eq!(take_over(&theirs).unwrap().len(), count);
            drop(ours);
            assert!(take_over(&theirs).is_err());
        }
    }
}
