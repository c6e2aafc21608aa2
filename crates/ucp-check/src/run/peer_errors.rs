//! `peer-errors`: one of two processes is killed in the middle of its transfers; the other must get
//! an error, get rid of the endpoint, and go on working.
//!
//! Two things are not asked, because stock UCX 1.22 and 1.23 do not do them even with host memory:
//! being the passive side of a dead peer's emulated put or get (UCX aborts in its reply), and ending
//! a receive whose data was on its way (UCX keeps some of them for ever). The first is left out, the
//! second is reported. So is any operation that never ends, unless `--direct` says that it goes
//! straight to or from the peer's memory: then nothing excuses it, and it fails. A rendezvous may wait
//! until its memory is unmapped, as UCX has it (`docs/ipc.md`).

use super::siblings::{Sibling, Siblings, describe};
use super::surroundings::Surroundings;
use crate::matrix::{Case, Op, Plan};
use crate::ops::Activity;
use crate::pattern::mix;
use crate::report::Report;
use crate::rig::{Rig, RigOptions};
use crate::session::{Buffers, Session};
use crate::ucp::{Features, Idle, Ucx};
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Name of the hidden subcommand that runs one side.
pub const ROLE: &str = "peer-errors-side";

/// Rank of the process that lives.
const SURVIVOR: u8 = 0;

/// One death.
#[derive(Clone, Serialize, Deserialize)]
pub struct Scenario {
    /// One operation, one pair, one size.
    plan: Plan,
    /// Rank of the sender.
    from: u8,
    /// The survivor waits to be killed, with its card open, instead of ending.
    stays: bool,
    /// What is asked of the survivor's operation.
    must_end: MustEnd,
}

/// Whether an operation has to end once its peer is dead and its endpoint closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum MustEnd {
    /// UCX keeps some for ever.
    No,
    /// UCX waits until the memory of a rendezvous is not registered any more.
    WithItsMemory,
    ByItself,
}

/// What else is asked of a survivor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// With every case, that a third process gets the dead one's card while the survivor still has
    /// its own: there must be two cards only.
    pub heir: bool,
    /// Everything goes straight to or from the peer's memory: UCX must end the survivor's operation, puts
    /// and gets by themselves, others at the latest when the memory is unmapped.
    pub direct: bool,
    /// How often each case is run, each time with another point of death.
    pub times: u32,
}

#[derive(Serialize, Deserialize)]
enum Message {
    /// The victim's last word.
    Dying {
        at: Moment,
    },
    /// The UCX, how the error showed and when.
    Survived {
        version: String,
        how: String,
        at: Moment,
    },
    Error(String),
}

/// A time that two processes of one machine can compare.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Moment(Duration);

impl Moment {
    fn now() -> Moment {
        Moment(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }
}

/// Runs every case of `plan`, with the victim receiving and sending.
pub fn run(plan: &Plan, around: &Surroundings, options: Options) -> Result<Report> {
    let mut report = Report::new("?");
    // UCX warns of every message and request that a dead peer leaves behind: expected here.
    let around = around.with("UCX_LOG_LEVEL", "error");
    let cases = plan.groups().into_iter().flat_map(|(_, cases)| cases);
    let cases: Vec<Case> =
        cases.filter(|case| Op::PLAIN.contains(&case.op) && !survivor_is_passive(case)).collect();
    let deaths = (0..u64::from(options.times)).flat_map(|time| {
        cases.iter().map(move |case| Case { id: case.id + (time << 32), ..*case })
    });
    for case in deaths {
        let scenario = Scenario {
            plan: only(plan, case),
            from: case.from,
            stays: options.heir,
            must_end: match case.op {
                _ if !options.direct => MustEnd::No,
                Op::Put | Op::Get => MustEnd::ByItself,
                _ => MustEnd::WithItsMemory,
            },
        };
        let outcome = one(&scenario, &around);
        if let Ok((version, how)) = &outcome {
            if report.counts() == (0, 0) {
                report = Report::new(version);
            }
            println!("ok    {case}: {how}");
        }
        report.add(case, outcome.err().map(|error| format!("{error:#}")), None);
    }
    Ok(report)
}

fn survivor_is_passive(case: &Case) -> bool {
    match case.op {
        Op::Put => case.to() == SURVIVOR,
        Op::Get => case.from == SURVIVOR,
        _ => false,
    }
}

/// The plan for one case.
fn only(plan: &Plan, case: Case) -> Plan {
    Plan {
        ops: vec![case.op],
        pairs: vec![case.pair],
        sizes: vec![case.size],
        seed: plan.seed ^ mix(case.id),
        iterations: 0,
        features: Features::ALL,
        peer_errors: true,
        ..plan.clone()
    }
}

fn one(scenario: &Scenario, around: &Surroundings) -> Result<(String, String)> {
    let mut twins: Siblings<Message> = Siblings::twins(ROLE, scenario, around)?;
    let limit = Duration::from_secs_f64(scenario.plan.timeout_s * 4.0 + 60.0);
    let mut survived = None;
    let mut death = None;
    let mut ends = 0;
    while ends < 2 {
        match twins.next(limit)? {
            (_, Some(Message::Dying { at })) => death = Some(at),
            (rank, Some(Message::Survived { version, how, at })) => {
                survived = Some((version, how, at));
                if scenario.stays {
                    inherit(&scenario.plan, around)?;
                    twins.kill(rank)?;
                }
            }
            (rank, Some(Message::Error(error))) => bail!("process {rank}: {error}"),
            (rank, None) => {
                ends += 1;
                let status = twins.ended(rank)?;
                let as_planned = if rank == SURVIVOR && !scenario.stays {
                    status.success()
                } else {
                    status.signal() == Some(Signal::KILL.as_raw())
                };
                ensure!(as_planned, "{}", describe(rank, status));
            }
        }
    }
    let (version, how, error) = survived.context("the survivor ended without a word")?;
    let death = death.context("the victim ended without a word")?;
    // For people: how long it takes depends on the machine, and nothing is asked of it.
    let after = error.0.saturating_sub(death.0).as_secs_f64() * 1e3;
    Ok((version, format!("{after:.1} ms after the death: {how}")))
}

/// A third process allocates on a card: of two, one is the survivor's, so the dead one's must be free.
fn inherit(plan: &Plan, around: &Surroundings) -> Result<()> {
    let exe = std::env::current_exe().context("finding our own program")?;
    let mut command = std::process::Command::new(exe);
    command.args(["alloc", "--count", "1", "--max", "64K"]);
    if let Some(ucx) = &plan.ucx {
        command.arg("--ucx").arg(ucx);
    }
    command.envs(around.variables(u8::MAX));
    let end = command.output().context("starting the heir")?;
    let said = String::from_utf8_lossy(&end.stderr);
    ensure!(end.status.success(), "the dead process's card is not free again: {}", said.trim());
    Ok(())
}

/// One of the two processes; `Ok(false)`: it failed and told the parent.
pub fn side(rank: u8, parent: u32, scenario: &Scenario) -> Result<bool> {
    let twin = Sibling::begin(rank, parent, Duration::from_secs_f64(scenario.plan.timeout_s))?;
    twin.run(Message::Error, |twin| run_side(rank, twin, scenario))
}

fn run_side(rank: u8, mut twin: Sibling, scenario: &Scenario) -> Result<()> {
    let Scenario { plan, from, stays, must_end } = scenario;
    let mut parent = twin.reporter()?;
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let options = RigOptions { features: plan.features, hint: plan.hint, multi: false };
    let rig = Rig::new(ucx, options, &twin.dog)?;
    let mut session = Session::pair(&rig, plan, rank, twin.only_line()?)?;
    // First a healthy round, verified: what dies is a working connection.
    session.run(|case, verdict| match verdict.error {
        Some(error) => bail!("before anybody died: {case}: {error}"),
        None => Ok(()),
    })?;
    let (op, pair, size) = (plan.ops[0], plan.pairs[0], plan.sizes[0]);
    let case = Case { id: u64::from(u32::MAX), op, pair, size, from: *from };
    let buffers = session.allocate(size)?;
    if rank != SURVIVOR {
        let last_word = || parent.tell(&Message::Dying { at: Moment::now() });
        die_transferring(&rig, &session, case, &buffers, mix(plan.seed), last_word)?;
    }
    let (how, at) = survive(&rig, &session, case, &buffers, *must_end)?;
    if *stays {
        // With endpoints, keys and buffers as an application would still have them.
        parent.tell(&Message::Survived { version: ucx.version().to_owned(), how, at })?;
        twin.dog.step("waiting to be killed");
        loop {
            std::thread::park();
        }
    }
    drop(buffers);
    drop(session);
    rig.step("working on after the peer's death");
    while rig.worker().take_message().is_some() {} // what the dead still had to say
    let after = Plan { peer_errors: false, sizes: vec![1, 65537], ..plan.clone() };
    let mut alone = Session::loopback(&rig, &after)?;
    alone.run(|case, verdict| match verdict.error {
        Some(error) => bail!("after the peer's death: {case}: {error}"),
        None => Ok(()),
    })?;
    alone.close()?;
    rig.step("ucp_worker_destroy and ucp_cleanup");
    drop(rig);
    twin.dog.step("leaving");
    parent.tell(&Message::Survived { version: ucx.version().to_owned(), how, at })
}

/// The victim: transfers until, somewhere inside the second one or later, it is killed.
fn die_transferring(
    rig: &Rig,
    session: &Session<'_>,
    case: Case,
    buffers: &Buffers,
    random: u64,
    last_word: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut left = 1 + random % 300;
    let mut finished = 0;
    let mut activity = session.start(case, buffers, session.plays(case.from), false)?;
    loop {
        if activity.poll()? {
            finished += 1;
            rig.step(format_args!("{case}: {finished} done, and then death"));
            activity = session.start(case, buffers, session.plays(case.from), false)?;
        }
        rig.worker().progress();
        left -= u64::from(finished > 0);
        if left == 0 {
            last_word()?;
            return kill_process(getpid(), Signal::KILL).context("killing ourselves");
        }
    }
}

/// The survivor: transfers until an error shows, then closes the endpoint by force. Returns how the
/// error showed, and when.
fn survive(
    rig: &Rig,
    session: &Session<'_>,
    case: Case,
    buffers: &Buffers,
    must_end: MustEnd,
) -> Result<(String, Moment)> {
    let endpoint = session.endpoint();
    let mut idle = Idle::default();
    let mut activity: Option<Box<dyn Activity>> = None;
    let how = loop {
        match activity.as_mut().map_or(Ok(true), |activity| activity.poll()) {
            Err(error) => break format!("operation failed: {error:#}"),
            Ok(false) => {}
            Ok(true) => match session.start(case, buffers, session.plays(case.from), true) {
                Ok(next) => {
                    // A slow device may take long until the peer dies: hung is who moves nothing.
                    rig.step(format_args!("{case}: waiting for the peer's death to show"));
                    activity = Some(next);
                }
                Err(error) => break format!("operation refused: {error:#}"),
            },
        }
        if let Some(error) = endpoint.failure() {
            break format!("endpoint failed: {error}");
        }
        rig.worker().wait(&mut idle, None)?;
    };
    let at = Moment::now();
    rig.step(format_args!("{case}: closing the dead endpoint by force"));
    let closing = endpoint.close(true)?;
    rig.finish(closing)?;
    rig.step(format_args!("{case}: waiting for the doomed operation to end"));
    let Some(activity) = activity else { return Ok((how, at)) };
    let end = end(rig, activity, buffers, must_end);
    Ok((format!("{how}{end}"), at))
}

/// How long UCX has to end an operation that it may keep. For one that must end the watchdog has the clock.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lets UCX end the doomed operation, with whatever status; where it holds on to it for the sake of our
/// memory, by taking the memory away. Returns what there is to say about it. The memory of an operation that
/// never ended is never freed.
fn end(rig: &Rig, mut activity: Box<dyn Activity>, buffers: &Buffers, must: MustEnd) -> String {
    let ends = |activity: &mut Box<dyn Activity>, limit: Duration| {
        let start = Instant::now();
        while start.elapsed() < limit {
            if !matches!(activity.poll(), Ok(false)) {
                return true;
            }
            rig.worker().progress();
        }
        false
    };
    activity.cancel();
    let patience = if must == MustEnd::ByItself { Duration::MAX } else { PATIENCE };
    if ends(&mut activity, patience) {
        return String::new();
    }
    let call = activity.waits_for().unwrap_or("the operation");
    if must == MustEnd::No {
        return format!("; UCX never ended {call}");
    }
    rig.step(format_args!("waiting for {call} to end, now that its memory is unmapped"));
    // SAFETY: the peer is dead and the endpoint closed by force: nothing moves any more.
    unsafe { buffers.unmap() };
    ends(&mut activity, Duration::MAX);
    format!("; {call} ended with ucp_mem_unmap")
}
