//! Processor seconds per GB between two processes: RDMA on Gaudi memory, `gaudi_ipc`, staged, beside host memory on
//! the same way.
//!
//! Both processes sleep while they wait: a program that polls keeps its processor busy whatever the transport does.
//! The threads of software devices do not count, because silicon would do their work. What the driver library does
//! in the caller's thread counts as ours.

use anyhow::{Result, ensure};
use e2e::rdma::{Fabric, RC};
use e2e::{Device, Ucx, Workbench};

use super::figures::{self, Figures, get};
use super::record::Record;
use crate::progress::Work;
use crate::repo::Repo;

const OPERATIONS: [&str; 2] = ["tag", "put"];
/// The best of so many runs: other work on the machine only adds, by colder caches.
const RUNS: usize = 3;
const MESSAGE: usize = 4;

/// How bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    name: &'static str,
    over_hca: bool,
    memories: &'static str,
    transports: &'static str,
    dmabuf: &'static str,
}

const fn way(name: &'static str, over_hca: bool, memories: &'static str) -> Way {
    let transports = if over_hca { RC } else { "self,sysv,cma" };
    Way { name, over_hca, memories, transports, dmabuf: "try" }
}

const HOST_RDMA: Way = way("host memory over the HCA", true, "host:host");
const DIRECT: Way = way("RDMA on Gaudi memory", true, "gaudi:gaudi");
const STAGED_RDMA: Way = Way { dmabuf: "no", ..way("staged over the HCA", true, "gaudi:gaudi") };
const HOST_LOCAL: Way = way("host memory by cma", false, "host:host");
const IPC: Way = way("gaudi_ipc", false, "gaudi:gaudi");
const STAGED_LOCAL: Way = way("staged by cma", false, "gaudi:gaudi");

impl Way {
    fn transports(self) -> String {
        let gaudi = match self {
            HOST_RDMA | HOST_LOCAL => "",
            IPC => ",gaudi_cpy,gaudi_ipc",
            _ => ",gaudi_cpy",
        };
        format!("{}{gaudi}", self.transports)
    }

    /// Seconds of both processes per GB, by operation.
    fn measure(self, bench: &Workbench, quick: bool) -> Result<[f64; OPERATIONS.len()]> {
        let work = Work::start(self.name.to_owned());
        let (set, warm_up) = if quick { (4, 0) } else { (64, 2) };
        let words = format!(
            "rotate --plain --wakeup --ops {} --mem {} --sizes {MESSAGE}M --set {set}M --warm-up {warm_up}",
            OPERATIONS.join(","),
            self.memories
        );
        let mut best = [f64::INFINITY; OPERATIONS.len()];
        for _ in 0..if quick { 1 } else { RUNS } {
            let tool = bench.client(Ucx::Nixl, &Device::importing(2), &words);
            let tool = tool.env("UCX_TLS", self.transports());
            let tool = tool.env("UCX_GAUDI_COPY_DMABUF", self.dmabuf);
            let fabric = Fabric::new().with("SOFT_RDMA_POLLERS_WORK", "no");
            let end = if self.over_hca { fabric.under(tool) } else { tool }.run();
            ensure!(end.success(), "{}", end.report());
            let lines: Vec<&str> = end.stdout.lines().filter(|line| line.contains('\t')).collect();
            let figures = figures::parse(&lines.join("\n"))?;
            for (best, op) in best.iter_mut().zip(OPERATIONS) {
                *best = best.min(of_both(&figures, op)?);
            }
        }
        work.done("");
        Ok(best)
    }
}

fn of_both(figures: &Figures, op: &str) -> Result<f64> {
    let of = |rank| get(figures, &format!("{op} processor time {rank}"));
    Ok(of(0)? + of(1)?)
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::Nixl])?;
    let mut records = Vec::new();
    for (host, others) in [(HOST_RDMA, [DIRECT, STAGED_RDMA]), (HOST_LOCAL, [IPC, STAGED_LOCAL])] {
        let floor = host.measure(&bench, quick)?;
        for way in others {
            let measured = way.measure(&bench, quick)?;
            for ((op, value), floor) in OPERATIONS.into_iter().zip(measured).zip(floor) {
                let name = format!("{op}, {MESSAGE} MiB, {}, beside {}", way.name, host.name);
                records.push(Record::at_most(name, value, "s/GB", floor, None));
            }
        }
    }
    Ok(records)
}
