//! `reconnect`: two processes connect, move verified messages, disconnect, many times over; what they
//! hold afterwards is what they held after the first rounds.
//!
//! Within one worker only descriptors are counted, and TCP is left out: stock UCX keeps the mappings of
//! the peer's shared memory (and with TCP, connections) for as long as the worker lives, also with host
//! memory and without any plugin. With a worker per round everything is counted.

use super::process;
use super::siblings::{Sibling, Siblings, describe};
use super::surroundings::Surroundings;
use crate::control::Control;
use crate::matrix::Plan;
use crate::rig::{Rig, RigOptions};
use crate::session::Session;
use crate::ucp::Ucx;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Name of the hidden subcommand that runs one side.
pub const ROLE: &str = "reconnect-side";

/// Rounds until everything that is kept on purpose has been made.
const WARM_UP: u32 = 20;

/// What to do, how often.
#[derive(Clone, Serialize, Deserialize)]
pub struct Rounds {
    /// The messages of one round.
    pub plan: Plan,
    /// Rounds that count, after the first few.
    pub count: u32,
    /// Each round has a context and a worker of its own.
    pub fresh: bool,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Done { ucx: String, held: String },
    Error(String),
}

/// Runs both processes.
pub fn run(rounds: &Rounds, around: &Surroundings) -> Result<()> {
    let mut twins: Siblings<Message> = Siblings::twins(ROLE, rounds, around)?;
    let limit = Duration::from_secs_f64(rounds.plan.timeout_s * 4.0 + 600.0);
    let mut ended = 0;
    while ended < 2 {
        match twins.next(limit)? {
            (rank, Some(Message::Done { ucx, held })) => {
                println!("ok    process {rank}, UCX {ucx}, {} rounds: {held}", rounds.count);
            }
            (rank, Some(Message::Error(error))) => bail!("process {rank}: {error}"),
            (rank, None) => {
                let status = twins.ended(rank)?;
                ensure!(status.success(), "{}", describe(rank, status));
                ended += 1;
            }
        }
    }
    Ok(())
}

/// One of the two processes; `Ok(false)`: it failed and told the parent.
pub fn side(rank: u8, parent: u32, rounds: &Rounds) -> Result<bool> {
    let twin = Sibling::begin(rank, parent, Duration::from_secs_f64(rounds.plan.timeout_s))?;
    twin.run(Message::Error, |twin| run_side(rank, twin, rounds))
}

fn run_side(rank: u8, mut twin: Sibling, rounds: &Rounds) -> Result<()> {
    let mut parent = twin.reporter()?;
    let mut control = Some(twin.only_line()?);
    let ucx = Ucx::load(rounds.plan.ucx.as_deref())?;
    let features = rounds.plan.features;
    let make = || Rig::new(ucx, RigOptions { features, hint: false, multi: false }, &twin.dog);
    let kept = if rounds.fresh { None } else { Some(make()?) };
    let mut round = || -> Result<()> {
        let fresh;
        let rig = match &kept {
            Some(rig) => rig,
            None => {
                fresh = make()?;
                &fresh
            }
        };
        let line = control.take().context("no line to the other process")?;
        control = one_round(rig, rank, &rounds.plan, line)?;
        Ok(())
    };
    (0..WARM_UP).try_for_each(|_| round())?;
    let before = Held::now()?;
    (0..rounds.count).try_for_each(|_| round())?;
    let after = Held::now()?;
    after.compare(&before, rounds)?;
    drop(kept);
    twin.dog.step("leaving");
    let held = format!("{before:?} before, {after:?} after");
    parent.tell(&Message::Done { ucx: ucx.version().to_owned(), held })
}

fn one_round(rig: &Rig, rank: u8, plan: &Plan, line: Control) -> Result<Option<Control>> {
    let mut session = Session::pair(rig, plan, rank, line)?;
    session.run(|case, verdict| match verdict.error {
        Some(error) => bail!("{case}: {error}"),
        None => Ok(()),
    })?;
    session.close()
}

/// What a process holds.
#[derive(Debug)]
struct Held {
    descriptors: usize,
    mappings: usize,
    resident: u64,
}

impl Held {
    fn now() -> Result<Held> {
        Ok(Held {
            descriptors: process::descriptors()?,
            mappings: process::mappings()?.len(),
            resident: process::resident()?,
        })
    }

    fn compare(&self, before: &Held, rounds: &Rounds) -> Result<()> {
        // A cache may hold something at one moment and not at the next; a leak grows with the rounds.
        let few = (rounds.count as usize / 10).max(8);
        let grown = |now: usize, then: usize| now.saturating_sub(then);
        let (then, now) = (before, self);
        ensure!(grown(now.descriptors, then.descriptors) < few, "descriptors: {then:?}, {now:?}");
        if !rounds.fresh {
            return Ok(());
        }
        ensure!(grown(now.mappings, then.mappings) < few.max(32), "mappings: {then:?}, {now:?}");
        let bytes = now.resident.saturating_sub(then.resident);
        ensure!(bytes < (4 << 20) + u64::from(rounds.count) * 4096, "memory: {then:?}, {now:?}");
        Ok(())
    }
}
