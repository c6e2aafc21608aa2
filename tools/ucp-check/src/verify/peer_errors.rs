//! `peer-errors`: one of two processes is killed in the middle of its transfers. The other must get an error, close the
//! endpoint, and work on.
//!
//! Stock UCX 1.22 and 1.23 fail at two things even with host memory, so they are not required: being the passive side
//! of a dead peer's emulated put or get (UCX aborts in its reply), and ending a receive whose data was in flight (UCX
//! keeps some for ever). The first is left out, the second is reported. Any other operation that never ends is only
//! reported, too, unless `--direct` says that it accesses the peer's memory directly: then it fails the check. UCX may
//! delay the end of a rendezvous until its memory is unmapped (`docs/ipc.md`).

use super::pair::ways;
use crate::client::Client;
use crate::matrix::{Case, Op, Plan};
use crate::ops::Activity;
use crate::pattern::mix;
use crate::processes::{Environment, Group, Job, Member, Message, client, describe};
use crate::report::{Report, Verdict};
use crate::session::{Buffers, Session};
use crate::ucp::{Features, Idle, Ucx};
use anyhow::{Context, Result, ensure};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Rank of the process that survives.
const SURVIVOR: u8 = 0;

/// One run in which a process dies.
#[derive(Serialize, Deserialize)]
pub(crate) struct Scenario {
    /// One operation, one pair, one size.
    plan: Plan,
    /// Rank of the sender.
    from: u8,
    /// The survivor does not end: it waits to be killed, with its card open.
    stays: bool,
    /// Whether the survivor's operation must end.
    must_end: MustEnd,
    /// The other process is only stopped: no error shows, and the survivor gives up.
    stops: bool,
}

/// Whether an operation must end after its peer died and its endpoint was closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum MustEnd {
    /// No: UCX keeps some for ever.
    No,
    /// Yes, at the latest when its memory is unmapped: UCX ends a rendezvous only then.
    WithItsMemory,
    ByItself,
}

/// What else is asked of a survivor.
#[derive(clap::Args)]
pub struct Options {
    /// A third process must get the dead one's card while the survivor lives; needs exactly two cards
    #[arg(long)]
    reuse_card: bool,
    /// Everything goes straight to or from the peer's memory: the survivor's operation must end, put and get
    /// by themselves, others at the latest when the memory is unmapped
    #[arg(long)]
    direct: bool,
    /// The peer is stopped, not killed: the survivor closes the endpoint by force after two seconds
    #[arg(long)]
    stop: bool,
    /// How often to run each case, each time with another point of death
    #[arg(long, default_value_t = 1)]
    times: u32,
}

/// A time that two processes on one machine can compare.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Moment(Duration);

impl Moment {
    fn now() -> Moment {
        Moment(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }
}

/// Runs every case of `plan`, with the victim receiving and sending.
pub fn run(plan: &Plan, environment: &Environment, options: &Options) -> Result<()> {
    let mut report = Report::new("?");
    // UCX warns about every message and request that a dead peer leaves behind: expected here.
    let environment = environment.with("UCX_LOG_LEVEL", "error");
    let passive = |case: &Case| match case.op {
        Op::Put => case.to() == SURVIVOR,
        Op::Get => case.from == SURVIVOR,
        _ => false,
    };
    let cases: Vec<Case> =
        plan.cases().filter(|case| Op::PLAIN.contains(&case.op) && !passive(case)).collect();
    let deaths = (0..u64::from(options.times)).flat_map(|time| {
        cases.iter().map(move |case| Case { id: case.id + (time << 32), ..*case })
    });
    for case in deaths {
        let scenario = Scenario {
            plan: Plan {
                ops: vec![case.op],
                pairs: vec![case.pair],
                sizes: vec![case.size],
                seed: plan.seed ^ mix(case.id),
                iters: None,
                least: false,
                features: Features::ALL,
                peer_errors: true,
                ..plan.clone()
            },
            from: case.from,
            stays: options.reuse_card,
            stops: options.stop,
            must_end: match case.op {
                _ if !options.direct => MustEnd::No,
                Op::Put | Op::Get => MustEnd::ByItself,
                _ => MustEnd::WithItsMemory,
            },
        };
        let mut version = None;
        let outcome = one(scenario, &environment, &mut version);
        if let (Some(version), (0, 0)) = (version, report.counts()) {
            report = Report::new(version);
        }
        let wrong: Vec<String> =
            outcome.as_ref().err().map(|it| format!("{it:#}")).into_iter().collect();
        if let Ok(how) = outcome {
            println!("ok    {case}: {how}");
        }
        report.add(case, Verdict::new(case.id, &wrong, None));
    }
    report.conclude(plan.json.as_deref())
}

fn one(scenario: Scenario, environment: &Environment, ucx: &mut Option<String>) -> Result<String> {
    let (folder, timeout) = (scenario.plan.ucx.clone(), scenario.plan.timeout);
    let Scenario { stays, stops, .. } = scenario;
    let group = Group::start(&Job::PeerErrors(scenario), 2, timeout, environment)?;
    let (mut survived, mut death) = (None, None);
    let on = |group: &mut Group, rank, message| {
        match message {
            Message::Ucx(version) => *ucx = Some(version),
            Message::Line(line) => println!("{line}"),
            Message::Dying(at) => death = Some(at),
            Message::Survived(how, at) => {
                survived = Some((how, at));
                if stops {
                    group.kill(1 - SURVIVOR)?;
                }
                if stays {
                    allocate_in_a_third(folder.as_deref(), environment)?;
                    group.kill(rank)?;
                }
            }
            _ => {}
        }
        Ok(())
    };
    group.collect(on, |rank, status| {
        let killed = status.signal() == Some(Signal::KILL.as_raw());
        let as_planned = if rank == SURVIVOR && !stays { status.success() } else { killed };
        ensure!(as_planned, "{}", describe(rank, status));
        Ok(())
    })?;
    let (how, error) = survived.context("the survivor ended without a word")?;
    let death = death.context("the victim ended without a word")?;
    // For information only: the time depends on the machine, and has no limit.
    let after = error.0.saturating_sub(death.0).as_secs_f64() * 1e3;
    Ok(format!("{after:.1} ms after the death: {how}"))
}

/// A third process allocates on a card. The survivor has one of two cards, so the dead process's card must be free.
fn allocate_in_a_third(folder: Option<&std::path::Path>, environment: &Environment) -> Result<()> {
    let exe = std::env::current_exe().context("finding our own program")?;
    let mut command = Command::new(exe);
    command.args("loopback --plain --ops put --mem gaudi:gaudi --sizes 64K".split(' '));
    command.args(folder.iter().flat_map(|folder| ["--ucx".as_ref(), folder.as_os_str()]));
    command.envs(environment.variables(u8::MAX));
    let end = command.output().context("starting the third process")?;
    let said = String::from_utf8_lossy(&end.stderr);
    ensure!(end.status.success(), "the dead process's card is not free again: {}", said.trim());
    Ok(())
}

/// One of the two processes.
pub(crate) fn side(scenario: &Scenario, mut member: Member) -> Result<()> {
    let Scenario { plan, from, stays, must_end, stops } = scenario;
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    member.report(&Message::Ucx(ucx.version().to_owned()))?;
    let client = client(plan, member.rank, ucx, false, &member.watchdog)?;
    let mut session = Session::pair(&client, plan, member.rank, member.only_channel()?)?;
    // First a verified round without a fault, so that a working connection dies.
    session.run_strictly("before anybody died: ")?;
    let (op, pair, size) = (plan.ops[0], plan.pairs[0], plan.sizes[0]);
    let case = Case { id: u64::from(u32::MAX), op, pair, size, from: *from };
    let buffers = session.allocate(size)?;
    if member.rank != SURVIVOR {
        transfer_until(&client, &session, case, &buffers, 1 + mix(plan.seed) % 300)?;
        member.report(&Message::Line(ways(member.rank)))?;
        member.report(&Message::Dying(Moment::now()))?;
        let signal = if *stops { Signal::STOP } else { Signal::KILL };
        return kill_process(getpid(), signal).context("killing ourselves");
    }
    let patience = stops.then_some(GIVE_UP);
    let (how, at) = survive(&client, &session, case, &buffers, (*must_end, patience))?;
    member.report(&Message::Line(ways(member.rank)))?;
    let survived = Message::Survived(how, at);
    if *stays {
        // Keep endpoints, keys and buffers, as an application would.
        member.report(&survived)?;
        client.step("waiting to be killed");
        loop {
            std::thread::park();
        }
    }
    drop(buffers);
    drop(session);
    client.step("working on after the peer's death");
    while client.worker().take_message().is_some() {} // what the dead process had sent
    let after = Plan { peer_errors: false, sizes: vec![1, 65537], ..plan.clone() };
    let mut alone = Session::loopback(&client, &after)?;
    alone.run_strictly("after the peer's death: ")?;
    alone.close()?;
    client.step("ucp_worker_destroy and ucp_cleanup");
    drop(client);
    member.report(&survived)
}

/// The victim: completes at least one transfer, then keeps transferring for `rounds` more rounds of progress.
fn transfer_until(
    client: &Client,
    session: &Session<'_>,
    case: Case,
    buffers: &Buffers,
    mut rounds: u64,
) -> Result<()> {
    let mut finished = 0;
    let start = || session.start(case, buffers, session.plays(case.from), false);
    let mut activity = start()?;
    while rounds > 0 {
        if activity.poll()? {
            finished += 1;
            client.step(format_args!("{case}: {finished} done, and then death"));
            activity = start()?;
        }
        client.worker().progress();
        rounds -= u64::from(finished > 0);
    }
    // It stays in flight until the process is killed.
    std::mem::forget(activity);
    Ok(())
}

/// The survivor: transfers until an error shows, then closes the endpoint by force. Returns how and when the error
/// showed.
fn survive(
    client: &Client,
    session: &Session<'_>,
    case: Case,
    buffers: &Buffers,
    (must_end, patience): (MustEnd, Option<Duration>),
) -> Result<(String, Moment)> {
    let endpoint = session.endpoint();
    let (mut idle, mut moved) = (Idle::default(), Instant::now());
    let mut activity: Option<Box<dyn Activity>> = None;
    let how = loop {
        match activity.as_mut().map_or(Ok(true), |activity| activity.poll()) {
            Err(error) => break format!("operation failed: {error:#}"),
            Ok(false) => {}
            Ok(true) => match session.start(case, buffers, session.plays(case.from), true) {
                Ok(next) => {
                    // A new step per transfer: with a slow device this takes long, and only a run that moves nothing hangs.
                    client.step(format_args!("{case}: waiting for the peer's death to show"));
                    (activity, moved) = (Some(next), Instant::now());
                }
                Err(error) => break format!("operation refused: {error:#}"),
            },
        }
        if let Some(error) = endpoint.failure() {
            break format!("endpoint failed: {error}");
        }
        if patience.is_some_and(|patience| moved.elapsed() > patience) {
            break String::from("nothing moved any more");
        }
        client.worker().wait(&mut idle, None)?;
    };
    let at = Moment::now();
    client.step(format_args!("{case}: closing the dead endpoint by force"));
    client.finish(endpoint.close(true)?)?;
    client.step(format_args!("{case}: waiting for the last operation to end"));
    let end = activity.map(|activity| end(client, activity, buffers, must_end));
    Ok((how + &end.unwrap_or_default(), at))
}

/// How long nothing must move before the survivor gives up a stopped peer.
const GIVE_UP: Duration = Duration::from_secs(2);
/// Time for UCX to end an operation that it may keep. For one that must end, only the watchdog's limit counts.
const PATIENCE: Duration = Duration::from_secs(1);

/// Lets UCX end the last operation, with any status. If UCX waits for our memory, unmaps the memory. Returns a remark
/// about it for the report. The memory of an operation that never ended is never freed.
fn end(
    client: &Client,
    mut activity: Box<dyn Activity>,
    buffers: &Buffers,
    must: MustEnd,
) -> String {
    let ends = |activity: &mut Box<dyn Activity>, limit: Duration| {
        let start = Instant::now();
        while start.elapsed() < limit {
            if !matches!(activity.poll(), Ok(false)) {
                return true;
            }
            client.worker().progress();
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
    client.step(format_args!("waiting for {call} to end, now that its memory is unmapped"));
    // SAFETY: the peer is dead and the endpoint was closed by force: no bytes move any more.
    unsafe { buffers.unmap() };
    ends(&mut activity, Duration::MAX);
    format!("; {call} ended with ucp_mem_unmap")
}
