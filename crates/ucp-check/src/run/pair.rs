//! `pair`: two processes run every case of a plan in both directions.

use super::siblings::{Sibling, Siblings, describe};
use super::surroundings::Surroundings;
use crate::matrix::{Case, Plan};
use crate::report::{Report, Timing, Verdict};
use crate::rig::{Rig, RigOptions};
use crate::session::Session;
use crate::ucp::Ucx;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Name of the hidden subcommand that runs one side.
pub const ROLE: &str = "pair-side";

/// What a process has to say.
#[derive(Serialize, Deserialize)]
pub(super) enum Message {
    Ucx {
        version: String,
    },
    Verdict(Verdict),
    /// The end, with the number of times the worker slept.
    Done {
        sleeps: u64,
    },
    Error(String),
}

/// Starts both processes and collects what they find.
pub fn run(plan: &Plan, around: &Surroundings) -> Result<Report> {
    let twins = Siblings::twins(ROLE, plan, around)?;
    collect(twins, 2, plan, std::slice::from_ref(plan))
}

/// Collects what `count` processes find about the cases of all `plans`, each of which concerns two of
/// them.
pub(super) fn collect(
    mut siblings: Siblings<Message>,
    count: u8,
    plan: &Plan,
    plans: &[Plan],
) -> Result<Report> {
    let cases: BTreeMap<u64, Case> = plans
        .iter()
        .flat_map(Plan::groups)
        .flat_map(|(_, cases)| cases)
        .map(|case| (case.id, case))
        .collect();
    // A step has its own limit in the children; we only guard against all being stopped.
    let limit = Duration::from_secs_f64(plan.timeout_s * 4.0 + 60.0);
    let mut report = Report::new("?");
    let mut half: BTreeMap<u64, Verdict> = BTreeMap::new();
    let mut done = vec![None; usize::from(count)];
    let mut trouble = Vec::new();
    for _ in 0..count {
        let rank = loop {
            match siblings.next(limit)? {
                (_, Some(Message::Ucx { version })) => {
                    if report.counts() == (0, 0) {
                        report = Report::new(version);
                    }
                }
                (_, Some(Message::Verdict(verdict))) => match half.remove(&verdict.case) {
                    None => _ = half.insert(verdict.case, verdict),
                    Some(other) => {
                        let case =
                            cases.get(&verdict.case).context("verdict on an unknown case")?;
                        let (error, timing) = join(verdict, other);
                        report.add(*case, error, timing);
                    }
                },
                (rank, Some(Message::Done { sleeps })) => done[usize::from(rank)] = Some(sleeps),
                (rank, Some(Message::Error(error))) => {
                    trouble.push(format!("process {rank}: {error}"));
                }
                (rank, None) => break rank,
            }
        };
        let status = siblings.ended(rank)?;
        if done[usize::from(rank)].is_none() || !status.success() {
            if trouble.is_empty() {
                trouble.push(describe(rank, status));
            }
            break; // dropping the siblings ends the others
        }
    }
    if !trouble.is_empty() {
        let (passed, failed) = report.counts();
        for line in &trouble {
            println!("FAIL  {line}");
        }
        println!("{passed} passed, {failed} failed, {} not run", cases.len() - passed - failed);
        bail!("the run broke off");
    }
    let (passed, failed) = report.counts();
    ensure!(passed + failed == cases.len(), "{} cases are missing", cases.len() - passed - failed);
    if plan.features.wakeup() {
        let sleeps: Vec<u64> = done.into_iter().flatten().collect();
        println!("times slept until an event, by process: {sleeps:?}");
        let all = sleeps.iter().all(|sleeps| *sleeps > 0);
        ensure!(all, "a worker never slept: the event descriptor was not tested");
    }
    Ok(report)
}

/// Both sides' view of one case.
fn join(one: Verdict, other: Verdict) -> (Option<String>, Option<Timing>) {
    let errors: Vec<String> = [one.error, other.error].into_iter().flatten().collect();
    let error = if errors.is_empty() { None } else { Some(errors.join("; ")) };
    (error, one.timing.or(other.timing))
}

/// One of the two processes; `Ok(false)`: it failed and told the parent.
pub fn side(rank: u8, parent: u32, plan: &Plan) -> Result<bool> {
    let twin = Sibling::begin(rank, parent, Duration::from_secs_f64(plan.timeout_s))?;
    twin.run(Message::Error, |twin| run_side(rank, twin, plan))
}

fn run_side(rank: u8, mut twin: Sibling, plan: &Plan) -> Result<()> {
    let mut parent = twin.reporter()?;
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    parent.tell(&Message::Ucx { version: ucx.version().to_owned() })?;
    let options = RigOptions { features: plan.features, hint: plan.hint, multi: false };
    let rig = Rig::new(ucx, options, &twin.dog)?;
    let mut session = Session::pair(&rig, plan, rank, twin.only_line()?)?;
    session.run(|_, verdict| parent.tell(&Message::Verdict(verdict)))?;
    session.close()?;
    let sleeps = rig.worker().sleeps();
    rig.step("ucp_worker_destroy and ucp_cleanup");
    drop(rig);
    twin.dog.step("leaving");
    parent.tell(&Message::Done { sleeps })
}
