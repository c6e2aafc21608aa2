//! Runs a round: starts its processes, kills or stops one, waits for them with a time limit, and checks what is left.

use std::time::{Duration, Instant};

use procfs::process::Process;
use rustix::process::{Pid, Signal, kill_process};

use super::judge::{Judged, Violation, judge, left};
use super::remains::{Remains, words};
use super::{Fault, Outcome, Round, Way};
use crate::faults::{applied, counted};
use crate::observed::Observed;
use crate::rdma::Fabric;
use crate::{Device, Finished, Layout, Running, SoftNode, Tool, Ucx, Workbench, nixl};

/// The longest time of a round. A step of a process has its own, shorter limit.
const LIMIT: Duration = Duration::from_secs(600);

/// The time limit of a step of `ucp-check`, with reserves for a busy machine.
const STEP: &str = "--timeout 150";

/// The result of a round.
#[derive(Debug)]
pub struct Played {
    /// The verdict.
    pub judged: Judged,
    /// Everything that the processes printed.
    pub report: String,
    /// It could not run here: nothing was played, and the report is empty.
    pub skipped: bool,
}

impl Round {
    /// Runs it with what was built and downloaded; `further` arguments are for tests of the judge.
    pub fn play(&self, bench: &Workbench, further: &str) -> Played {
        let remains = Remains::before();
        let (device, fabric) = (Device::Software(self.machine()), Fabric::new());
        let Device::Software(node) = &device else { unreachable!("made above") };
        let machine = node.name().to_owned();
        let Some(tool) = self.tool(bench, &device, &fabric, further) else {
            let (outcome, violations) = (Outcome::Passed, Vec::new());
            let judged = Judged { outcome, came: None, violations, messages: 0, bytes: 0 };
            return Played { judged, report: String::new(), skipped: true };
        };
        let running = tool.start();
        let meddled = self.meddle(&running, &fabric, bench.layout());
        let end = running.finish(LIMIT);
        let came = self.came(meddled, node, &end);
        let mut judged = judge(self.way, self.fault, came, &end);
        let mut report = end.report();
        // If a process was killed, aborted or got stuck, its sockets stay until the next one that shares memory removes them.
        let ended_themselves = matches!(judged.outcome, Outcome::Passed | Outcome::Error)
            && !Observed::of(&end).was_stuck
            && !matches!(self.fault, Fault::Killed | Fault::PeerDies);
        if ended_themselves {
            judged.violations.extend(left(judged.outcome, remains.sockets()));
        }
        if self.fault != Fault::None
            && let Err(end) = self.use_again(bench, node, &device)
        {
            judged.violations.push(Violation::CardsLost);
            report += &end.report();
        }
        drop((device, fabric, tool));
        judged.violations.extend(left(judged.outcome, remains.after(&machine)));
        Played { judged, report, skipped: false }
    }

    /// The software machine, with its faults.
    fn machine(&self) -> SoftNode {
        let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", &self.cards.to_string());
        let node = node.with("SOFT_GAUDI_LENIENT", if self.imports { "import" } else { "" });
        match self.counted_rules() {
            Some(rules) => node.with_faults(&rules),
            None => node,
        }
    }

    fn counted_rules(&self) -> Option<String> {
        self.rules.as_deref().map(counted)
    }

    /// Whether the fault came, judged by what it left or by the output; `None`: the round had no fault.
    fn came(&self, meddled: bool, node: &SoftNode, end: &Finished) -> Option<bool> {
        if self.fault == Fault::None {
            return None;
        }
        let Some(rules) = self.counted_rules() else {
            return Some(meddled || self.fault.shows(end));
        };
        let left = std::fs::read_to_string(node.faults());
        Some(left.is_ok_and(|left| applied(&rules, &left)))
    }

    fn tool(
        &self,
        bench: &Workbench,
        device: &Device,
        fabric: &Fabric,
        further: &str,
    ) -> Option<Tool> {
        let tool = match self.way {
            Way::Nixl => nixl::kv_cache(device, &self.words)?,
            _ => {
                let tool = bench.client(self.ucx, device, &self.words).words(further);
                if further.contains("--timeout") { tool } else { tool.words(STEP) }
            }
        };
        let tool = if self.way.has_hca() { fabric.under(tool) } else { tool };
        let tool = match self.fault {
            Fault::FewDescriptors => {
                // Two processes need some fifty descriptors with shared memory, and more with an HCA.
                let limit = self.random.clone().u32(28..80);
                tool.arg("--via").arg(format!("1:prlimit --nofile={limit}"))
            }
            _ => tool,
        };
        let variables = self.variables.iter();
        Some(variables.fold(tool, |tool, (name, value)| tool.env(name, value)))
    }

    /// Disturbs the running processes; whether that had an effect (a kill shows in how the process ended).
    fn meddle(&self, running: &Running, fabric: &Fabric, layout: &Layout) -> bool {
        let mut random = self.random.clone();
        let mut pause = |below| std::thread::sleep(Duration::from_millis(random.u64(..below)));
        match self.fault {
            Fault::Killed | Fault::Stopped => {
                // The program, and the processes that it has started.
                let started = std::cell::RefCell::new(Vec::new());
                let all = |pids: &[u32]| {
                    *started.borrow_mut() = pids.to_vec();
                    pids.len() >= 3
                };
                if !running.wait_until(all) {
                    return false;
                }
                // Most rounds take one to three seconds.
                pause(1500);
                let started = started.into_inner();
                let chosen = started[1 + random.usize(..started.len() - 1)];
                let signal = |signal| {
                    let pid = i32::try_from(chosen).ok().and_then(Pid::from_raw);
                    pid.map(|pid| kill_process(pid, signal))
                };
                if self.fault == Fault::Killed {
                    signal(Signal::KILL);
                    return false;
                }
                signal(Signal::STOP);
                // Most stops are short. Some last as long as a stop in a debugger.
                let seconds = if random.u8(..8) == 0 { 30 } else { random.u64(1..6) };
                let until = Instant::now() + Duration::from_secs(seconds);
                let mut has_stopped = false;
                while Instant::now() < until && !running.has_ended() {
                    std::thread::sleep(Duration::from_millis(50));
                    has_stopped |= is_stopped(chosen);
                }
                signal(Signal::CONT);
                has_stopped
            }
            Fault::PortDown => {
                let carried = || fabric.port(layout, 0, "xmit_bytes").unwrap_or(0);
                if !running.wait_until(|_| carried() > 1 << 14) {
                    return false;
                }
                pause(500);
                let port = fabric.folder().join("node/ports-1/softrdma0");
                let set = |state| std::fs::write(&port, state);
                let _ = set("down");
                pause(400);
                // The HCA counts the failure when it notices it.
                let times = fabric.port(layout, 0, "link_downed");
                let _ = set("up");
                times.is_ok_and(|times| times > 0)
            }
            _ => false,
        }
    }

    /// Runs processes on all cards of the machine again, without a fault.
    fn use_again(
        &self,
        bench: &Workbench,
        node: &SoftNode,
        device: &Device,
    ) -> Result<(), Box<Finished>> {
        if self.fault == Fault::Removal {
            // A removed card comes back only with a new machine.
            node.remove();
        }
        let cards = self.cards;
        let words = format!(
            "mesh --processes {cards} --plain --ops put,tag --mem gaudi:gaudi --sizes 64K+1"
        );
        let tool = bench.client(self.ucx, device, &words).words(STEP);
        let tool = tool.env("SOFT_GAUDI_FAULTS", "no");
        let end = tool.limit(LIMIT).run();
        if end.success() { Ok(()) } else { Err(Box::new(end)) }
    }
}

/// Two processes that stay connected for minutes while rounds come and go, without a fault: their use of resources must not grow.
#[derive(Debug)]
pub struct Companion {
    running: Running,
    /// What it does, in words.
    pub title: String,
}

impl Companion {
    /// Starts the `number`th.
    pub fn start(bench: &Workbench, number: u64, seed: u64, seconds: u64) -> Companion {
        let ucx = Ucx::ALL[(number % 2) as usize];
        let ways = [Way::Relay, Way::Import, Way::Staged];
        let way = ways[(number / 2 % 3) as usize];
        let device =
            if way == Way::Import { Device::importing(2) } else { Device::not_importing(2) };
        let words = format!(
            "endure --seconds {seconds} --pause 200 --largest 1M --seed {seed} --timeout 150"
        );
        let client = bench.client(ucx, &device, &words);
        // In separate namespaces, so that its files are not mistaken for a round's.
        let tool = match words_around(bench, ucx, &device) {
            Some(tool) => {
                let command = client.command();
                let tool = tool.arg(command.get_program());
                command.get_args().fold(tool, |tool, word| tool.arg(word)).env("TMPDIR", "/dev/shm")
            }
            None => client,
        };
        let tool = if way == Way::Staged { tool.env("UCX_TLS", "^gaudi_ipc") } else { tool };
        Companion { running: tool.start(), title: format!("{way}, UCX {}", ucx.name()) }
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.running.has_ended()
    }

    /// Waits for its end.
    pub fn finish(self) -> Played {
        let end = self.running.finish(LIMIT);
        let judged = judge(Way::Staged, Fault::None, None, &end);
        Played { judged, report: end.report(), skipped: false }
    }
}

/// Whether the process is stopped, and has not ended.
fn is_stopped(pid: u32) -> bool {
    let process = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok());
    process.and_then(|process| process.stat().ok()).is_some_and(|stat| stat.state == 'T')
}

fn words_around(bench: &Workbench, ucx: Ucx, device: &Device) -> Option<Tool> {
    let words = words()?;
    let tool = bench.program(ucx, words[0]).plugin().device(device);
    Some(words[1..].iter().fold(tool, |tool, word| tool.arg(word)))
}
