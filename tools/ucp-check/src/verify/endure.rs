//! `endure`: two processes stay connected and move verified messages for a given time. At the end they must use no more
//! resources than after the first passes.
//!
//! A pass is the plan with other sizes, offsets and patterns. The passes repeat in the same order, so that after the
//! first turn every cache is as full as it will ever be: whatever grows after that is a leak.

use super::usage::Usage;
use crate::matrix::{Plan, size};
use crate::pattern::mix;
use crate::processes::{Environment, Group, Job, Member, Message, client};
use crate::report::verified;
use crate::session::Session;
use crate::ucp::Ucx;
use anyhow::{Result, bail, ensure};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Different passes: one turn.
const PASSES: u64 = 12;
/// Sizes of a pass.
const SIZES: usize = 3;
/// How long peers may take to release what was freed, also on a busy machine.
const SETTLED: Duration = Duration::from_secs(5);

#[derive(Clone, Serialize, Deserialize, clap::Args)]
pub struct Options {
    /// For how long; two turns of all passes at least
    #[arg(long, default_value_t = 60.0)]
    seconds: f64,
    /// Milliseconds of rest after each pass
    #[arg(long, default_value_t = 0)]
    pause: u64,
    /// Sizes are drawn up to this
    #[arg(long, default_value = "4M", value_parser = size)]
    largest: usize,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Endurance {
    plan: Plan,
    options: Options,
}

pub fn run(plan: Plan, options: Options, environment: &Environment) -> Result<()> {
    let timeout = plan.timeout;
    let job = Job::Endure(Endurance { plan, options });
    Group::start(&job, 2, timeout, environment)?.print_lines()
}

impl Endurance {
    /// The passes of a turn; both processes have the same.
    fn passes(&self) -> Vec<Plan> {
        let pass = |number| {
            let seed = mix(self.plan.seed ^ mix(number));
            let mut random = Rng::with_seed(seed);
            let power = usize::BITS - self.options.largest.leading_zeros();
            let size = |_| {
                let below = 1 << random.u32(..=power);
                random.usize(..below).min(self.options.largest)
            };
            Plan { seed, sizes: (0..SIZES).map(size).collect(), iters: None, ..self.plan.clone() }
        };
        (0..PASSES).map(pass).collect()
    }
}

/// One of the two processes.
pub(crate) fn side(endurance: &Endurance, mut member: Member) -> Result<()> {
    let Endurance { plan, options } = endurance;
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let client = client(plan, member.rank, ucx, false, &member.watchdog)?;
    let passes = endurance.passes();
    let mut session = Session::pair(&client, &passes[0], member.rank, member.only_channel()?)?;
    let end = Instant::now() + Duration::from_secs_f64(options.seconds);
    let (mut turns, mut messages, mut bytes, mut before) = (0, 0_u64, 0_u64, None);
    while turns < 2 || !session.either(Instant::now() >= end)? {
        for pass in &passes {
            session.follow(pass);
            session.run(|case, verdict| {
                if let Some(error) = verdict.error {
                    bail!("{case}: {error}");
                }
                (messages, bytes) = (messages + 1, bytes + case.size as u64);
                Ok(())
            })?;
            sleep(Duration::from_millis(options.pause));
        }
        turns += 1;
        if turns == 1 {
            before = Some(Usage::now()?);
        }
    }
    let Some(before) = before else { bail!("no turn") };
    // A peer releases what was freed last a moment later.
    let settled = Instant::now() + SETTLED;
    let after = loop {
        let after = Usage::now()?;
        match compare(&before, &after) {
            Ok(()) => break after,
            Err(_) if Instant::now() < settled => sleep(Duration::from_millis(10)),
            Err(grown) => return Err(grown),
        }
    };
    session.close()?;
    drop(client);
    let (rank, version) = (member.rank, ucx.version());
    if rank == 0 {
        member.report(&Message::Line(verified(messages, bytes)))?;
    }
    member.report(&Message::Line(format!(
        "ok    process {rank}, UCX {version}, {turns} turns: {before:?} before, {after:?} after"
    )))
}

/// A cache or an allocator may grow a little for a moment; a leak grows without end. Shared memory is only checked by
/// the number of mappings: UCX fills a pool of some 70 MB there, buffer by buffer, before it reuses one.
fn compare(then: &Usage, now: &Usage) -> Result<()> {
    let grown = |now: usize, then: usize| now.saturating_sub(then);
    ensure!(grown(now.descriptors, then.descriptors) < 4, "descriptors: {then:?}, {now:?}");
    ensure!(grown(now.threads, then.threads) < 2, "threads: {then:?}, {now:?}");
    ensure!(grown(now.mappings, then.mappings) < 32, "mappings: {then:?}, {now:?}");
    let bytes = now.anonymous.saturating_sub(then.anonymous);
    ensure!(bytes < 4 << 20, "memory: {then:?}, {now:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_differ_and_are_the_same_in_both_processes() {
        let options = Options { seconds: 1.0, pause: 0, largest: 1 << 20 };
        let endurance = Endurance { plan: crate::matrix::tests::plan(""), options };
        let passes = endurance.passes();
        assert_eq!(passes, endurance.passes());
        assert!(passes.windows(2).all(|two| two[0].seed != two[1].seed));
        let sizes: Vec<usize> = passes.iter().flat_map(|pass| pass.sizes.clone()).collect();
        assert!(sizes.iter().all(|size| *size <= 1 << 20) && sizes.iter().any(|it| *it > 1 << 16));
    }

    #[test]
    fn a_leak_of_each_kind_is_found() {
        let usage = |descriptors, threads, mappings, anonymous| Usage {
            descriptors,
            threads,
            mappings,
            resident: 200 << 20,
            anonymous,
        };
        let before = usage(30, 3, 200, 100 << 20);
        assert!(compare(&before, &usage(31, 3, 210, 101 << 20)).is_ok());
        for (leak, word) in [
            (usage(40, 3, 200, 100 << 20), "descriptors"),
            (usage(30, 6, 200, 100 << 20), "threads"),
            (usage(30, 3, 300, 100 << 20), "mappings"),
            (usage(30, 3, 200, 160 << 20), "memory"),
        ] {
            let found = compare(&before, &leak).unwrap_err();
            assert!(found.to_string().starts_with(word), "{found}");
        }
    }
}
