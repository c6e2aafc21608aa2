//! `mesh`: several processes, each connected to each other, and every case of a plan between all of them
//! at once: put, get, tags and streams from and to everybody.
//!
//! Every process has one allocation of a kind, of which each of the others has a part: all of them open
//! the same memory, and who writes beyond his part spoils his neighbour's.

use super::pair::{Message, collect};
use super::siblings::{Sibling, Siblings};
use super::surroundings::Surroundings;
use crate::matrix::{Case, Op, Plan};
use crate::report::Report;
use crate::rig::{Rig, RigOptions};
use crate::session::{Arena, Buffers, Part, Session, cases};
use crate::ucp::Ucx;
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Name of the hidden subcommand that runs one process.
pub const ROLE: &str = "mesh-side";

/// How many processes do what.
#[derive(Clone, Serialize, Deserialize)]
pub struct Mesh {
    /// How many.
    pub processes: u8,
    /// What each two do.
    pub plan: Plan,
}

impl Mesh {
    /// The processes, two by two, with what those two do. Cases have numbers of their own, because
    /// sessions share a worker.
    fn pairs(&self) -> Vec<((u8, u8), Plan)> {
        let all = 0..self.processes;
        let pairs = all.clone().flat_map(|one| all.clone().map(move |other| (one, other)));
        let cases: usize = self.plan.groups().iter().map(|(_, cases)| cases.len()).sum();
        let plan = |number: usize| Plan {
            first_case: (number * cases) as u64,
            seed: self.plan.seed.wrapping_add(number as u64),
            ..self.plan.clone()
        };
        pairs
            .filter(|(one, other)| one < other)
            .enumerate()
            .map(|(number, pair)| (pair, plan(number)))
            .collect()
    }
}

/// Starts all processes and collects what they find.
pub fn run(mesh: &Mesh, around: &Surroundings) -> Result<Report> {
    // Each pair has a socket, all of them opened here.
    ensure!((2..=24).contains(&mesh.processes), "2 to 24 processes, please");
    ensure!(!mesh.plan.one_way, "everybody sends and receives");
    let am = mesh.plan.ops.iter().any(|op| op.group() == Op::Am);
    ensure!(
        !am,
        "active messages are taken in the order in which they come: not with several senders"
    );
    ensure!(mesh.plan.iterations == 0, "nothing is timed when all do it at once");
    let siblings = Siblings::start(ROLE, mesh.processes, mesh, around)?;
    let plans: Vec<Plan> = mesh.pairs().into_iter().map(|(_, plan)| plan).collect();
    collect(siblings, mesh.processes, &mesh.plan, &plans)
}

/// One of the processes; `Ok(false)`: it failed and told the parent.
pub fn side(rank: u8, parent: u32, mesh: &Mesh) -> Result<bool> {
    let limit = Duration::from_secs_f64(mesh.plan.timeout_s);
    let sibling = Sibling::begin(rank, parent, limit)?;
    sibling.run(Message::Error, |sibling| run_side(rank, sibling, mesh))
}

fn run_side(rank: u8, mut sibling: Sibling, mesh: &Mesh) -> Result<()> {
    let mut parent = sibling.reporter()?;
    let ucx = Ucx::load(mesh.plan.ucx.as_deref())?;
    parent.tell(&Message::Ucx { version: ucx.version().to_owned() })?;
    let Plan { features, hint, .. } = mesh.plan;
    let rig = Rig::new(ucx, RigOptions { features, hint, multi: false }, &sibling.dog)?;
    // In the order of the pairs, as everybody's: see `cases`.
    let ours: Vec<((u8, u8), Plan)> = mesh
        .pairs()
        .into_iter()
        .filter(|((one, other), _)| [*one, *other].contains(&rank))
        .collect();
    let mut sessions = Vec::new();
    for (((one, _), plan), line) in ours.iter().zip(std::mem::take(&mut sibling.lines)) {
        sessions.push(Session::pair(&rig, plan, u8::from(rank != *one), line)?);
    }
    let groups: Vec<Vec<(usize, Vec<Case>)>> = ours.iter().map(|(_, plan)| plan.groups()).collect();
    for (group, &size) in mesh.plan.sizes.iter().enumerate() {
        let arena = Arena::new(&rig, &mesh.plan, size, sessions.len(), |_| true)?;
        let buffers: Vec<Buffers> = sessions
            .iter_mut()
            .enumerate()
            .map(|(part, session)| session.part_of(&arena, part))
            .collect::<Result<_>>()?;
        for at in 0..groups[0][group].1.len() {
            let mut parts: Vec<Part<'_, '_>> = sessions
                .iter_mut()
                .zip(&buffers)
                .zip(&groups)
                .map(|((session, buffers), groups)| Part {
                    session,
                    buffers,
                    case: groups[group].1[at],
                })
                .collect();
            for (mut verdict, ((one, other), _)) in cases(&rig, &mut parts)?.into_iter().zip(&ours)
            {
                if let Some(error) = &mut verdict.error {
                    *error = format!("0 is process {one} and 1 process {other}: {error}");
                }
                parent.tell(&Message::Verdict(verdict))?;
            }
        }
        // Keys go first, everybody's, then the memory they are for.
        let memory: Vec<_> = buffers.into_iter().map(Buffers::without_keys).collect();
        meet(&mut sessions, "freeing buffers", u64::MAX - 1)?;
        drop((memory, arena));
    }
    meet(&mut sessions, "closing", u64::MAX)?;
    sessions.into_iter().try_for_each(|session| session.close().map(drop))?;
    let sleeps = rig.worker().sleeps();
    rig.step("ucp_worker_destroy and ucp_cleanup");
    drop(rig);
    sibling.dog.step("leaving");
    parent.tell(&Message::Done { sleeps })
}

fn meet(sessions: &mut [Session<'_>], what: &str, step: u64) -> Result<()> {
    sessions.iter_mut().try_for_each(|session| session.meet(what, step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::Pair;
    use crate::ucp::Features;
    use std::collections::BTreeSet;

    #[test]
    fn everybody_meets_everybody_with_cases_of_their_own() {
        let plan = Plan {
            ucx: None,
            ops: vec![Op::Tag, Op::Put],
            pairs: vec![Pair::HOST],
            sizes: vec![1, 8],
            seed: 7,
            first_case: 0,
            iterations: 0,
            features: Features::ALL,
            peer_errors: false,
            one_way: false,
            hint: false,
            timeout_s: 1.0,
            sabotage: None,
        };
        let pairs = Mesh { processes: 8, plan }.pairs();
        assert_eq!(pairs.len(), 28);
        assert!(pairs.is_sorted_by_key(|(pair, _)| *pair), "one order for everybody");
        let cases = |plan: &Plan| plan.groups().into_iter().flat_map(|(_, cases)| cases);
        let ids: BTreeSet<u64> =
            pairs.iter().flat_map(|(_, plan)| cases(plan)).map(|case| case.id).collect();
        assert_eq!(ids.len(), 28 * 2 * 2 * 2);
        let seeds: BTreeSet<u64> = pairs.iter().map(|(_, plan)| plan.seed).collect();
        assert_eq!(seeds.len(), 28);
    }
}
