//! `loopback`, `two-ucx` and `threads`: one process whose workers talk to themselves; one worker per copy of
//! UCX, or one that several threads use at once.

use super::client;
use crate::client::Client;
use crate::matrix::{Case, Op, Plan};
use crate::report::{Report, Verdict};
use crate::session::{Buffers, Session};
use crate::ucp::Ucx;
use crate::watchdog::Watchdog;
use anyhow::{Context, Result, anyhow, ensure};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

fn watchdog(name: &str, plan: &Plan) -> Watchdog {
    Watchdog::start(name, Duration::from_secs_f64(plan.timeout_s))
}

/// One UCX, one worker.
pub fn run(plan: &Plan) -> Result<Report> {
    let watchdog = watchdog("loopback", plan);
    let client = on(plan, plan.ucx.as_deref(), &watchdog)?;
    let report = alone(&client, plan).with_context(|| format!("while: {}", watchdog.current()))?;
    watchdog.step("ucp_cleanup");
    Ok(report)
}

/// Several copies of UCX in this process: first each alone while the others are loaded, then case by case in
/// turn.
pub fn run_copies(plan: &Plan, folders: &[PathBuf]) -> Result<Report> {
    ensure!(folders.len() >= 2, "name at least two UCX folders: --ucx A --ucx B");
    let watchdog = watchdog("two-ucx", plan);
    let clients = folders.iter().map(|folder| on(plan, Some(folder), &watchdog));
    let clients: Vec<Client> = clients.collect::<Result<_>>()?;
    let first = clients[0].ucx().path();
    ensure!(first != clients[1].ucx().path(), "{} was named twice", first.display());
    let mut report = Report::new("");
    for client in &clients {
        report
            .merge(alone(client, plan).with_context(|| format!("while: {}", watchdog.current()))?);
    }
    let turns = in_turn(&clients, plan);
    let turns = turns.with_context(|| format!("taking turns, while: {}", watchdog.current()))?;
    turns.into_iter().for_each(|other| report.merge(other));
    watchdog.step("ucp_cleanup");
    Ok(report)
}

/// Each case on every copy before the next case.
fn in_turn(clients: &[Client], plan: &Plan) -> Result<Vec<Report>> {
    let mut reports: Vec<Report> =
        clients.iter().map(|client| Report::new(client.ucx().version())).collect();
    let mut sessions: Vec<Session<'_>> =
        clients.iter().map(|client| Session::loopback(client, plan)).collect::<Result<_>>()?;
    for (size, cases) in plan.groups() {
        let buffers: Vec<Buffers> =
            sessions.iter_mut().map(|session| session.allocate(size)).collect::<Result<_>>()?;
        for case in cases.into_iter().filter(|case| case.from == 0) {
            for ((session, buffers), report) in sessions.iter_mut().zip(&buffers).zip(&mut reports)
            {
                report.add(case, session.case(case, buffers).with_context(|| case.to_string())?);
            }
        }
    }
    sessions.into_iter().try_for_each(|session| session.close().map(drop))?;
    Ok(reports)
}

fn on(plan: &Plan, folder: Option<&Path>, watchdog: &Watchdog) -> Result<Client> {
    watchdog.step("loading UCX");
    let ucx = Ucx::load(folder)?;
    println!("UCX {} from {}", ucx.version(), ucx.path().display());
    client(plan, ucx, false, watchdog)
}

fn alone(client: &Client, plan: &Plan) -> Result<Report> {
    let mut report = Report::new(client.ucx().version());
    verdicts(client, plan)?.into_iter().for_each(|(case, verdict)| report.add(case, verdict));
    Ok(report)
}

fn verdicts(client: &Client, plan: &Plan) -> Result<Vec<(Case, Verdict)>> {
    let mut verdicts = Vec::new();
    let mut session = Session::loopback(client, plan)?;
    session.run(|case, verdict| {
        verdicts.push((case, verdict));
        Ok(())
    })?;
    session.close()?;
    Ok(verdicts)
}

/// Every thread runs the whole plan on the same worker (UCS_THREAD_MODE_MULTI), each through an endpoint and
/// with tags of its own.
pub fn run_threads(plan: &Plan, count: u8) -> Result<Report> {
    let fits = |op: &Op| matches!(op.group(), Op::Tag | Op::Put | Op::Get);
    ensure!(
        plan.ops.iter().all(fits),
        "threads share one worker, so only tag, put and get can tell their messages apart"
    );
    let watchdog = watchdog("threads", plan);
    let client = client(plan, Ucx::load(plan.ucx.as_deref())?, true, &watchdog)?;
    let mut report = Report::new(client.ucx().version());
    thread::scope(|scope| {
        let start = |n: u8| {
            let (seed, first_case) = (plan.seed ^ u64::from(n) << 56, u64::from(n) << 32);
            let (client, mine) = (client.clone(), Plan { seed, first_case, ..plan.clone() });
            scope.spawn(move || verdicts(&client, &mine))
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        for (n, thread) in threads.into_iter().enumerate() {
            let outcome = thread.join().unwrap_or_else(|_| Err(anyhow!("panicked")));
            let verdicts = outcome.with_context(|| format!("thread {n}"))?;
            verdicts.into_iter().for_each(|(case, verdict)| report.add(case, verdict));
        }
        anyhow::Ok(())
    })?;
    watchdog.step("ucp_cleanup");
    Ok(report)
}
