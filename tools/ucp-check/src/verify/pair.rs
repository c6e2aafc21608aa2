//! `pair` and `mesh`: two or more processes, all connected to each other, run every case of a plan in both directions.
//! Put, get, tags and streams run between all of them at once.
//!
//! In a mesh every process has one allocation per kind of memory, and each peer has a part of it: all peers open the
//! same memory, and a process that writes beyond its part damages its neighbour's.

use crate::client::Client;
use crate::matrix::{Case, Op, Plan};
use crate::processes::{Environment, Group, Job, MOST, Member, Message, client, succeeded};
use crate::report::{Report, Verdict};
use crate::session::{Arena, Buffers, Part, Session, cases};
use crate::ucp::Ucx;
use crate::verify::usage::ProcessUsage;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How many processes run which plan, pair by pair.
#[derive(Serialize, Deserialize)]
pub(crate) struct Mesh {
    processes: u8,
    plan: Plan,
    turns: Turns,
}

/// Who of many processes has a card when.
#[derive(Clone, Copy, Serialize, Deserialize, clap::Args)]
pub struct Turns {
    /// In how many turns the processes have cards: in each, every so-many-th process has one and the others take host memory;
    /// a turn begins with contexts of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    turns: u8,
    /// Run the first of the turns only
    #[arg(long)]
    first: bool,
    /// Print what each process uses while all are connected
    #[arg(long)]
    usage: bool,
}

impl Turns {
    /// Every process has a card all the time, and prints no usage.
    pub const ONE: Turns = Turns { turns: 1, first: false, usage: false };

    fn all(&self) -> std::ops::Range<u8> {
        0..if self.first { 1 } else { self.turns }
    }

    fn has_card(&self, turn: u8, rank: u8) -> bool {
        rank % self.turns == turn
    }
}

impl Mesh {
    /// All pairs of processes, each with its plan in this turn. Case numbers differ between pairs, because sessions
    /// share a worker.
    fn pairs(&self, turn: u8) -> Vec<((u8, u8), Plan)> {
        let all = 0..self.processes;
        let pairs = all.clone().flat_map(|one| (one + 1..all.end).map(move |other| (one, other)));
        let cases = self.plan.cases().count();
        let before = usize::from(turn) * pairs.clone().count();
        let plan = |number: usize| Plan {
            first_case: ((before + number) * cases) as u64,
            seed: self.plan.seed.wrapping_add(number as u64),
            ..self.plan.clone()
        };
        pairs.enumerate().map(|(number, pair)| (pair, plan(number))).collect()
    }
}

/// Starts all processes and prints their results; an error if anything is wrong.
pub fn run(processes: u8, plan: Plan, turns: Turns, environment: &Environment) -> Result<()> {
    // Each pair has a socket, and this process opens all of them.
    ensure!((2..=MOST).contains(&processes), "2 to {MOST} processes, please");
    if processes > 2 {
        ensure!(!plan.one_way, "everybody sends and receives");
        ensure!(plan.iters.is_none(), "nothing is timed when all do it at once");
        let am = plan.ops.iter().any(|op| op.group() == Op::Am);
        ensure!(!am, "active messages arrive in any order: not with several senders");
    }
    let mesh = Mesh { processes, plan, turns };
    let plans = turns.all().flat_map(|turn| mesh.pairs(turn)).map(|(_, plan)| plan);
    let mut cases: BTreeMap<u64, Case> =
        plans.flat_map(|plan| plan.cases().collect::<Vec<_>>()).map(|it| (it.id, it)).collect();
    let mut report = Report::new("?");
    let mut half: BTreeMap<u64, Verdict> = BTreeMap::new();
    let mut slept = BTreeMap::new();
    let Plan { json, timeout, features, .. } = mesh.plan.clone();
    let group = Group::start(&Job::Cases(mesh), processes, timeout, environment)?;
    let met = environment.meeting().is_some();
    let on = |_: &mut Group, rank, message| {
        match message {
            Message::Ucx(version) if report.counts() == (0, 0) => {
                cases.retain(|_, case| case.runs_on(&version));
                report = Report::new(version);
            }
            Message::Verdict(verdict) => match half.remove(&verdict.case) {
                // The run that we met reports the other half.
                None if met => {
                    let case = cases.get(&verdict.case).context("verdict on an unknown case")?;
                    report.add(*case, verdict);
                }
                None => _ = half.insert(verdict.case, verdict),
                Some(other) => {
                    let case = cases.get(&verdict.case).context("verdict on an unknown case")?;
                    report.add(*case, verdict.join(other));
                }
            },
            Message::Line(line) if processes == 2 || line.starts_with(ProcessUsage::PREFIX) => {
                println!("{line}");
            }
            Message::Done(sleeps) => _ = slept.insert(rank, sleeps),
            _ => {}
        }
        Ok(())
    };
    let outcome = group.collect(on, succeeded);
    let (passed, failed) = report.counts();
    if let Err(error) = outcome {
        println!("FAIL  {error:#}");
        println!("{}", report.verified());
        println!("{passed} passed, {failed} failed, {} not run", cases.len() - passed - failed);
        bail!("the run broke off");
    }
    let ours = if met { 1 } else { processes };
    ensure!(slept.len() == usize::from(ours), "a process ended too early");
    ensure!(passed + failed == cases.len(), "{} cases are missing", cases.len() - passed - failed);
    if features.wakeup() {
        let slept: Vec<u64> = slept.into_values().collect();
        println!("times slept until an event, by process: {slept:?}");
        let all = slept.iter().all(|slept| *slept > 0);
        ensure!(all, "a worker never slept: the event descriptor was not tested");
    }
    report.conclude(json.as_deref())
}

/// One of the processes.
pub(crate) fn side(mesh: &Mesh, mut member: Member) -> Result<()> {
    let ucx = Ucx::load(mesh.plan.ucx.as_deref())?;
    member.report(&Message::Ucx(ucx.version().to_owned()))?;
    let mut slept = 0;
    for turn in mesh.turns.all() {
        slept += self::turn(mesh, turn, ucx, &mut member)?;
    }
    member.report(&Message::Done(slept))
}

/// One turn of one process; returns how often its worker slept. A card is opened only after all processes have closed
/// theirs of the turn before: a process first waits for the addresses of the others' new workers.
fn turn(mesh: &Mesh, turn: u8, ucx: &'static Ucx, member: &mut Member) -> Result<u64> {
    let client = client(&mesh.plan, member.rank, ucx, false, &member.watchdog)?;
    // In the order of the pairs, which is the same in all processes: see `cases`.
    let rank = member.rank;
    let mut ours = mesh.pairs(turn);
    ours.retain(|((one, other), _)| [*one, *other].contains(&rank));
    let mut sessions = Vec::new();
    for (((one, _), plan), channel) in ours.iter().zip(std::mem::take(&mut member.channels)) {
        sessions.push(Session::pair(&client, plan, u8::from(rank != *one), channel)?);
    }
    if let [session] = &mut sessions[..] {
        session.run(|_, verdict| member.report(&Message::Verdict(verdict)))?;
    } else {
        all_at_once(&client, (mesh, turn), &ours, &mut sessions, member)?;
    }
    if mesh.turns.usage {
        let usage = ProcessUsage::now(rank, mesh.turns.has_card(turn, rank), sessions.len())?;
        member.report(&Message::Line(usage.line()?))?;
    }
    meet(&mut sessions, "closing", u64::MAX)?;
    for session in sessions {
        member.channels.extend(session.close()?);
    }
    let slept = client.worker().waiting().slept;
    member.report(&Message::Line(ways(rank)))?;
    client.step("ucp_worker_destroy and ucp_cleanup");
    Ok(slept)
}

/// The paths between processes that the plugin in this process has used.
pub(super) fn ways(rank: u8) -> String {
    let counted = stats_reader::read(std::process::id()).ok();
    let of = |name| counted.as_ref().and_then(|it| it.get(name)).unwrap_or(0);
    let (imported, relayed) = (of("ipc_handles_opened"), of("ipc_relay_bytes"));
    format!("process {rank}: gaudi_ipc imported {imported} allocations and relayed {relayed} bytes")
}

/// Runs the cases of all sessions, number by number.
fn all_at_once(
    client: &Client,
    (mesh, turn): (&Mesh, u8),
    ours: &[((u8, u8), Plan)],
    sessions: &mut [Session<'_>],
    member: &mut Member,
) -> Result<()> {
    let groups: Vec<Vec<(usize, Vec<Case>)>> = ours.iter().map(|(_, plan)| plan.groups()).collect();
    for (group, &size) in mesh.plan.sizes.iter().enumerate() {
        let cards = mesh.turns.has_card(turn, member.rank);
        let arena = Arena::new(client, &mesh.plan, size, sessions.len(), |_| true, cards)?;
        let parts = sessions.iter_mut().enumerate();
        let buffers: Vec<Buffers> =
            parts.map(|(part, session)| session.part_of(&arena, part)).collect::<Result<_>>()?;
        for at in 0..groups[0][group].1.len() {
            let each = sessions.iter_mut().zip(&buffers).zip(&groups);
            let mut parts: Vec<Part<'_, '_>> = each
                .map(|((session, buffers), all)| Part { session, buffers, case: all[group].1[at] })
                .collect();
            for (mut verdict, ((one, other), _)) in cases(client, &mut parts)?.into_iter().zip(ours)
            {
                if let Some(error) = &mut verdict.error {
                    *error = format!("0 is process {one} and 1 process {other}: {error}");
                }
                member.report(&Message::Verdict(verdict))?;
            }
        }
        // Drop the keys of all sessions first, then the memory they refer to.
        let memory: Vec<_> = buffers.into_iter().map(Buffers::without_keys).collect();
        meet(sessions, "freeing buffers", u64::MAX - 1)?;
        drop((memory, arena));
    }
    Ok(())
}

fn meet(sessions: &mut [Session<'_>], what: &str, step: u64) -> Result<()> {
    sessions.iter_mut().try_for_each(|session| session.meet(what, step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_process_has_a_card_in_one_turn() {
        let turns = Turns { turns: 8, ..Turns::ONE };
        for rank in 0..64 {
            assert_eq!(turns.all().filter(|turn| turns.has_card(*turn, rank)).count(), 1);
        }
        for turn in turns.all() {
            assert_eq!((0..64).filter(|rank| turns.has_card(turn, *rank)).count(), 8);
        }
        assert!(Turns::ONE.has_card(0, 7));
    }

    #[test]
    fn each_two_processes_have_cases_of_their_own() {
        let plan = crate::matrix::tests::plan("--plain --ops tag,put --mem host:host --sizes 1,8");
        let turns = Turns { turns: 2, ..Turns::ONE };
        let mesh = Mesh { processes: 8, plan, turns };
        let pairs = mesh.pairs(0);
        assert_eq!(pairs.len(), 28);
        assert!(pairs.is_sorted_by_key(|(pair, _)| *pair), "one order for everybody");
        let plans = pairs.iter().map(|(_, plan)| plan);
        let later = mesh.pairs(1);
        let ids: BTreeSet<u64> = (plans.clone().chain(later.iter().map(|(_, plan)| plan)))
            .flat_map(|plan| plan.cases().map(|it| it.id).collect::<Vec<_>>())
            .collect();
        assert_eq!(ids.len(), 2 * 28 * 2 * 2 * 2);
        assert_eq!(plans.map(|plan| plan.seed).collect::<BTreeSet<u64>>().len(), 28);
    }
}
