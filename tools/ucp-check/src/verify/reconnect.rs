//! `reconnect`: two processes connect, move verified messages and disconnect, many times. Afterwards they must use no
//! more resources than after the first rounds.
//!
//! With one worker for all rounds, only descriptors are checked, and TCP is left out: stock UCX keeps the mappings of
//! the peer's shared memory (and with TCP, connections) as long as the worker lives, even with host memory and without
//! a plugin. With a new worker per round everything is checked.

use super::usage::Usage;
use crate::matrix::Plan;
use crate::processes::{Environment, Group, Job, Member, Message, client};
use crate::report::verified;
use crate::session::Session;
use crate::ucp::Ucx;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Rounds after which everything exists that is kept on purpose.
const WARM_UP: u32 = 20;
/// How long peers may take to release what was freed, also on a busy machine.
const SETTLED: Duration = Duration::from_secs(5);

/// What to do, how often.
#[derive(Serialize, Deserialize)]
pub struct Rounds {
    pub plan: Plan,
    /// Rounds to check, after the warm-up.
    pub count: u32,
    /// Each round has a new context and worker.
    pub fresh: bool,
}

pub fn run(rounds: Rounds, environment: &Environment) -> Result<()> {
    let timeout = rounds.plan.timeout;
    Group::start(&Job::Reconnect(rounds), 2, timeout, environment)?.print_lines()
}

/// One of the two processes.
pub(crate) fn side(rounds: &Rounds, mut member: Member) -> Result<()> {
    let Rounds { plan, count, fresh } = rounds;
    let mut control = Some(member.only_channel()?);
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let make = || client(plan, member.rank, ucx, false, &member.watchdog);
    let kept = if *fresh { None } else { Some(make()?) };
    let mut round = || -> Result<()> {
        let client = kept.clone().map_or_else(make, Ok)?;
        let channel = control.take().context("no channel to the other process")?;
        let mut session = Session::pair(&client, plan, member.rank, channel)?;
        session.run_strictly("")?;
        control = session.close()?;
        Ok(())
    };
    (0..WARM_UP).try_for_each(|_| round())?;
    let before = Usage::now()?;
    (0..*count).try_for_each(|_| round())?;
    // A peer releases what was freed last a moment later.
    let end = Instant::now() + SETTLED;
    let after = loop {
        let after = Usage::now()?;
        match compare(&before, &after, rounds) {
            Ok(()) => break after,
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
            Err(grown) => return Err(grown),
        }
    };
    drop(kept);
    let (rank, version) = (member.rank, ucx.version());
    if rank == 0 {
        let (times, cases) = (u64::from(WARM_UP + count), plan.cases());
        let cases: Vec<u64> = cases.map(|case| case.size as u64).collect();
        let line = verified(times * cases.len() as u64, times * cases.iter().sum::<u64>());
        member.report(&Message::Line(line))?;
    }
    member.report(&Message::Line(format!(
        "ok    process {rank}, UCX {version}, {count} rounds: {before:?} before, {after:?} after"
    )))
}

fn compare(then: &Usage, now: &Usage, rounds: &Rounds) -> Result<()> {
    // A cache may hold more at one moment than at the next, and a new thread has its own heap.
    let grown = |now: usize, then: usize| now.saturating_sub(then);
    ensure!(grown(now.descriptors, then.descriptors) <= 3, "descriptors: {then:?}, {now:?}");
    if rounds.fresh {
        ensure!(grown(now.mappings, then.mappings) <= 16, "mappings: {then:?}, {now:?}");
        let bytes = now.resident.saturating_sub(then.resident);
        ensure!(bytes < (4 << 20) + u64::from(rounds.count) * 4096, "memory: {then:?}, {now:?}");
    }
    Ok(())
}
