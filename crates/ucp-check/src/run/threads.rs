//! `threads`: one worker in UCS_THREAD_MODE_MULTI, used by several threads at once.

use crate::matrix::{Case, Op, Plan};
use crate::report::{Report, Verdict};
use crate::rig::{Rig, RigOptions};
use crate::session::Session;
use crate::ucp::Ucx;
use crate::watchdog::Watchdog;
use anyhow::{Context, Result, ensure};
use std::thread;
use std::time::Duration;

/// Every thread runs the whole plan in loopback on the same worker, each through an endpoint and
/// with tags of its own.
pub fn run(plan: &Plan, count: u8) -> Result<Report> {
    let fits = |op: &Op| matches!(op.group(), Op::Tag | Op::Put | Op::Get);
    ensure!(
        plan.ops.iter().all(fits),
        "threads share one worker, so only tag, put and get can tell their messages apart"
    );
    let dog = Watchdog::start("threads", Duration::from_secs_f64(plan.timeout_s));
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let options = RigOptions { features: plan.features, hint: plan.hint, multi: true };
    let rig = Rig::new(ucx, options, &dog)?;
    let outcomes: Vec<Result<Vec<(Case, Verdict)>>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|n| {
                let rig = rig.clone();
                scope.spawn(move || one(&rig, plan, n))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked"))))
            .collect()
    });
    let mut report = Report::new(ucx.version());
    for (n, outcome) in outcomes.into_iter().enumerate() {
        for (case, verdict) in outcome.with_context(|| format!("thread {n}"))? {
            report.add(case, verdict.error, verdict.timing);
        }
    }
    dog.step("ucp_cleanup");
    Ok(report)
}

fn one(rig: &Rig, plan: &Plan, n: u8) -> Result<Vec<(Case, Verdict)>> {
    let mut mine = plan.clone();
    mine.seed ^= u64::from(n) << 56;
    mine.first_case = u64::from(n) << 32;
    let mut verdicts = Vec::new();
    let mut session = Session::loopback(rig, &mine)?;
    session.run(|case, verdict| {
        verdicts.push((case, verdict));
        Ok(())
    })?;
    session.close()?;
    Ok(verdicts)
}
