//! `loopback` and `two-ucx`: one process, one worker per UCX, talking to itself.

use crate::matrix::{Case, Plan};
use crate::report::{Report, Verdict};
use crate::rig::{Rig, RigOptions};
use crate::session::{Buffers, Session};
use crate::ucp::Ucx;
use crate::watchdog::Watchdog;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::time::Duration;

/// One UCX, one worker.
pub fn run(plan: &Plan) -> Result<Report> {
    let dog = Watchdog::start("loopback", Duration::from_secs_f64(plan.timeout_s));
    let rig = rig(plan, plan.ucx.as_deref(), &dog)?;
    let report = alone(&rig, plan).with_context(|| format!("while: {}", dog.current()))?;
    dog.step("ucp_cleanup");
    Ok(report)
}

/// Several copies of UCX in this process: first each alone while the others are loaded, then case by
/// case in turn.
pub fn run_copies(plan: &Plan, folders: &[std::path::PathBuf]) -> Result<Report> {
    ensure!(folders.len() >= 2, "name at least two UCX folders: --ucx A --ucx B");
    let dog = Watchdog::start("two-ucx", Duration::from_secs_f64(plan.timeout_s));
    let rigs: Vec<Rig> =
        folders.iter().map(|folder| rig(plan, Some(folder), &dog)).collect::<Result<_>>()?;
    let paths: Vec<&Path> = rigs.iter().map(|rig| ucx(rig).path()).collect();
    ensure!(paths[0] != paths[1], "{} was named twice", paths[0].display());

    let mut report = Report::new("");
    for rig in &rigs {
        report.merge(alone(rig, plan).with_context(|| format!("while: {}", dog.current()))?);
    }
    let turns =
        in_turn(&rigs, plan).with_context(|| format!("taking turns, while: {}", dog.current()))?;
    turns.into_iter().for_each(|other| report.merge(other));
    dog.step("ucp_cleanup");
    Ok(report)
}

/// Each case on every copy before the next case.
fn in_turn(rigs: &[Rig], plan: &Plan) -> Result<Vec<Report>> {
    let mut reports: Vec<Report> = rigs.iter().map(|rig| Report::new(ucx(rig).version())).collect();
    let mut sessions: Vec<Session<'_>> =
        rigs.iter().map(|rig| Session::loopback(rig, plan)).collect::<Result<_>>()?;
    for (size, cases) in plan.groups() {
        let buffers: Vec<Buffers> =
            sessions.iter_mut().map(|session| session.allocate(size)).collect::<Result<_>>()?;
        for case in cases.into_iter().filter(|case| case.from == 0) {
            for ((session, buffers), report) in sessions.iter_mut().zip(&buffers).zip(&mut reports)
            {
                let verdict = session.case(case, buffers).with_context(|| case.to_string())?;
                add(report, case, verdict);
            }
        }
    }
    sessions.into_iter().try_for_each(|session| session.close().map(drop))?;
    Ok(reports)
}

fn rig(plan: &Plan, folder: Option<&Path>, dog: &Watchdog) -> Result<Rig> {
    dog.step("loading UCX");
    let ucx = Ucx::load(folder)?;
    println!("UCX {} from {}", ucx.version(), ucx.path().display());
    let options = RigOptions { features: plan.features, hint: plan.hint, multi: false };
    Rig::new(ucx, options, dog)
}

fn ucx(rig: &Rig) -> &'static Ucx {
    rig.worker().context().ucx()
}

fn alone(rig: &Rig, plan: &Plan) -> Result<Report> {
    let mut report = Report::new(ucx(rig).version());
    let mut session = Session::loopback(rig, plan)?;
    session.run(|case, verdict| {
        add(&mut report, case, verdict);
        Ok(())
    })?;
    session.close()?;
    Ok(report)
}

fn add(report: &mut Report, case: Case, verdict: Verdict) {
    report.add(case, verdict.error, verdict.timing);
}
