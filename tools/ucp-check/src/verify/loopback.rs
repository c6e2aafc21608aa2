//! `loopback`, `two-ucx` and `threads`: one process whose workers talk to themselves, with one worker per copy of UCX,
//! or with one that several threads use at once.

use crate::client::Client;
use crate::matrix::{Op, Plan};
use crate::processes::client;
use crate::report::Report;
use crate::session::{Buffers, Session};
use crate::ucp::Ucx;
use crate::watchdog::Watchdog;
use anyhow::{Context, Result, anyhow, ensure};
use std::path::{Path, PathBuf};
use std::thread;

/// One copy of UCX, with one worker.
pub fn run(plan: &Plan) -> Result<()> {
    let watchdog = Watchdog::start("loopback", plan.timeout);
    let client = on(plan, plan.ucx.as_deref(), &watchdog)?;
    let mut report = Report::new(client.ucx().version());
    alone(&client, plan, &mut report).with_context(|| format!("while: {}", watchdog.current()))?;
    watchdog.step("ucp_cleanup");
    drop(client);
    report.conclude(plan.json.as_deref())
}

/// Several copies of UCX in this process: first each by itself while the others are loaded, then all of them in turn,
/// case by case.
pub fn run_copies(plan: &Plan, folders: &[PathBuf]) -> Result<()> {
    ensure!(folders.len() >= 2, "name at least two UCX folders: --ucx A --ucx B");
    let watchdog = Watchdog::start("two-ucx", plan.timeout);
    let clients = folders.iter().map(|folder| on(plan, Some(folder), &watchdog));
    let clients: Vec<Client> = clients.collect::<Result<_>>()?;
    let first = clients[0].ucx().path();
    ensure!(first != clients[1].ucx().path(), "{} was named twice", first.display());
    let mut reports: Vec<Report> =
        clients.iter().map(|client| Report::new(client.ucx().version())).collect();
    let mut each = clients.iter().zip(&mut reports);
    each.try_for_each(|(client, report)| alone(client, plan, report))
        .and_then(|()| in_turn(&clients, plan, &mut reports).context("taking turns"))
        .with_context(|| format!("while: {}", watchdog.current()))?;
    watchdog.step("ucp_cleanup");
    let mut all = Report::new("");
    reports.into_iter().for_each(|report| all.merge(report));
    all.conclude(plan.json.as_deref())
}

/// Runs each case on every copy before the next case.
fn in_turn(clients: &[Client], plan: &Plan, reports: &mut [Report]) -> Result<()> {
    let mut sessions: Vec<Session<'_>> =
        clients.iter().map(|client| Session::loopback(client, plan)).collect::<Result<_>>()?;
    for (size, cases) in plan.groups() {
        let buffers: Vec<Buffers> =
            sessions.iter_mut().map(|session| session.allocate(size)).collect::<Result<_>>()?;
        for case in cases.into_iter().filter(|case| case.from == 0) {
            let each = sessions.iter_mut().zip(&buffers).zip(&mut *reports);
            for ((session, buffers), report) in each {
                if !case.runs_on(session.version()) {
                    continue;
                }
                report.add(case, session.case(case, buffers).with_context(|| case.to_string())?);
            }
        }
    }
    sessions.into_iter().try_for_each(|session| session.close().map(drop))
}

fn on(plan: &Plan, folder: Option<&Path>, watchdog: &Watchdog) -> Result<Client> {
    watchdog.step("loading UCX");
    let ucx = Ucx::load(folder)?;
    println!("UCX {} from {}", ucx.version(), ucx.path().display());
    client(plan, 0, ucx, false, watchdog)
}

fn alone(client: &Client, plan: &Plan, report: &mut Report) -> Result<()> {
    let mut session = Session::loopback(client, plan)?;
    session.run(|case, verdict| {
        report.add(case, verdict);
        Ok(())
    })?;
    session.close().map(drop)
}

/// Every thread runs the whole plan on the same worker (UCS_THREAD_MODE_MULTI), through its own endpoint and with its
/// own tags.
pub fn run_threads(plan: &Plan, count: u8) -> Result<()> {
    ensure!(
        plan.ops.iter().all(|op| Op::KEYED.contains(&op.group())),
        "threads share one worker, so only tag, put and get can tell their messages apart"
    );
    let watchdog = Watchdog::start("threads", plan.timeout);
    let client = client(plan, 0, Ucx::load(plan.ucx.as_deref())?, true, &watchdog)?;
    let mut report = Report::new(client.ucx().version());
    thread::scope(|scope| {
        let start = |n: u8| {
            let (seed, first_case) = (plan.seed ^ u64::from(n) << 56, u64::from(n) << 32);
            let (client, mine) = (client.clone(), Plan { seed, first_case, ..plan.clone() });
            scope.spawn(move || {
                let mut report = Report::new(client.ucx().version());
                alone(&client, &mine, &mut report).map(|()| report)
            })
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        for (n, thread) in threads.into_iter().enumerate() {
            let outcome = thread.join().unwrap_or_else(|_| Err(anyhow!("panicked")));
            report.merge(outcome.with_context(|| format!("thread {n}"))?);
        }
        anyhow::Ok(())
    })?;
    watchdog.step("ucp_cleanup");
    drop(client);
    report.conclude(plan.json.as_deref())
}
