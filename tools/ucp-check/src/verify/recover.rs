//! `recover`: the software card's fault rules fail a card during the transfers of two processes. The initiator gets an
//! error, both close everything, and new contexts in the same processes move verified messages again. This repeats, and
//! must leak nothing.

use super::usage::Usage;
use crate::client::Client;
use crate::matrix::{Case, Op, Plan};
use crate::processes::{Environment, Group, Job, Member, Message, client};
use crate::session::Session;
use crate::ucp::{Idle, Ucx};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// Rank of the process that starts the operations, and gets the errors.
const INITIATOR: u8 = 0;
/// Descriptors that may be kept for later contexts, in addition to those left after the first failure.
const KEPT: usize = 3;

/// Until when everything is closed, also on a busy machine.
const SETTLED: Duration = Duration::from_secs(5);

/// What to do, how often.
#[derive(Serialize, Deserialize)]
pub struct Recovery {
    /// One operation: put or get.
    pub plan: Plan,
    /// Number of failures.
    pub count: u32,
}

pub fn run(recovery: Recovery, environment: &Environment) -> Result<()> {
    let timeout = recovery.plan.timeout;
    // UCX warns about requests that a failed endpoint leaves behind.
    let environment = environment.with("UCX_LOG_LEVEL", "error");
    Group::start(&Job::Recover(recovery), 2, timeout, &environment)?.print_lines()
}

/// One of the two processes.
pub(crate) fn side(recovery: &Recovery, mut member: Member) -> Result<()> {
    let Recovery { plan, count } = recovery;
    let plan = &Plan { iters: None, ..plan.clone() };
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let mut control = Some(member.only_channel()?);
    let mut before = None;
    for round in 0..*count {
        let client = client(plan, member.rank, ucx, false, &member.watchdog)?;
        let channel = control.take().context("no channel to the other process")?;
        let mut session = Session::pair(&client, plan, member.rank, channel)?;
        session.run_strictly(&format!("after {round} failures: "))?;
        let shown = fail(&client, &mut session, plan, member.rank)?;
        control = session.abandon()?;
        drop(client);
        if let Some(error) = shown {
            member.report(&Message::Line(format!("ok    failure {round}: {error}")))?;
        }
        before.get_or_insert(Usage::now()?);
    }
    let client = client(plan, member.rank, ucx, false, &member.watchdog)?;
    let channel = control.take().context("no channel to the other process")?;
    let mut session = Session::pair(&client, plan, member.rank, channel)?;
    session.run_strictly("after the last failure: ")?;
    session.close()?;
    drop(client);
    let before = before.context("no failure was asked for")?;
    // Threads close what the other process has left a moment later.
    let deadline = Instant::now() + SETTLED;
    let after = loop {
        let after = Usage::now()?;
        let grown = after.descriptors.saturating_sub(before.descriptors);
        if grown <= KEPT {
            break after;
        }
        ensure!(Instant::now() < deadline, "descriptors: {before:?}, {after:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    let rank = member.rank;
    let line = format!("ok    process {rank} works after {count} failures: {before:?}, {after:?}");
    member.report(&Message::Line(line))
}

/// The initiator transfers until an error shows, and returns it; the other process waits for that.
fn fail(
    client: &Client,
    session: &mut Session<'_>,
    plan: &Plan,
    rank: u8,
) -> Result<Option<String>> {
    let (op, pair, size) = (plan.ops[0], plan.pairs[0], plan.sizes[0]);
    let from = match op {
        Op::Put => INITIATOR,
        Op::Get => 1 - INITIATOR,
        _ => bail!("put or get"),
    };
    let case = Case { id: u64::from(u32::MAX), op, pair, size, from };
    let buffers = session.allocate(size)?;
    let mut shown = None;
    if rank == INITIATOR {
        let (mut activity, mut idle) = (None, Idle::default());
        shown = Some(loop {
            match activity
                .as_mut()
                .map_or(Ok(true), |it: &mut Box<dyn crate::ops::Activity>| it.poll())
            {
                Err(error) => break format!("{error:#}"),
                Ok(false) => {}
                Ok(true) => match session.start(case, &buffers, session.plays(from), true) {
                    Ok(next) => activity = Some(next),
                    Err(error) => break format!("{error:#}"),
                },
            }
            if let Some(error) = session.endpoint().failure() {
                break format!("endpoint failed: {error}");
            }
            client.step(format_args!("{case}: waiting for the failure to show"));
            client.worker().wait(&mut idle, None)?;
        });
        if let Some(mut activity) = activity {
            client.step(format_args!("{case}: waiting for the last operation to end"));
            while matches!(activity.poll(), Ok(false)) {
                client.worker().progress();
            }
        }
    }
    session.meet("the failure", u64::MAX - 3)?;
    Ok(shown)
}
