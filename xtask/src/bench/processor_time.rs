//! `bench processor-time`: processor seconds per GB between two processes: RDMA on Gaudi memory, `gaudi_ipc`, staged. The
//! floor is host memory over the same transport.
//!
//! Both processes sleep while they wait: a program that polls keeps its processor busy with any transport. Threads of
//! software devices do not count, because hardware would do their work. The driver library's work in the caller's
//! thread counts as ours.

use anyhow::Result;
use e2e::rdma::{Fabric, RC};
use e2e::{Device, Ucx, Workbench};
use ucp_check::measure::Record;

use super::runs;
use crate::repo::Repo;

const OPERATIONS: [&str; 2] = ["tag", "put"];
/// The best of several runs: other load on the machine can only add time, for example by colder caches.
const RUNS: usize = 3;
const LOCAL: &str = "self,sysv,cma";

/// How bytes travel.
struct Way {
    name: &'static str,
    over_hca: bool,
    memories: &'static str,
    /// Settings in addition to those of the HCA or the machine.
    transports: &'static str,
    dmabuf: &'static str,
}

#[rustfmt::skip] // a table
const WAYS: [[Way; 3]; 2] = [
    [
        Way { name: "host memory over the HCA", over_hca: true, memories: "host:host", transports: "", dmabuf: "try" },
        Way { name: "RDMA on Gaudi memory", over_hca: true, memories: "gaudi:gaudi", transports: ",gaudi_cpy", dmabuf: "try" },
        Way { name: "staged over the HCA", over_hca: true, memories: "gaudi:gaudi", transports: ",gaudi_cpy", dmabuf: "no" },
    ],
    [
        Way { name: "host memory by cma", over_hca: false, memories: "host:host", transports: "", dmabuf: "try" },
        Way { name: "gaudi_ipc", over_hca: false, memories: "gaudi:gaudi", transports: ",gaudi_cpy,gaudi_ipc", dmabuf: "try" },
        Way { name: "staged by cma", over_hca: false, memories: "gaudi:gaudi", transports: ",gaudi_cpy", dmabuf: "try" },
    ],
];

impl Way {
    /// Seconds of both processes per GB, by operation.
    fn measure(&self, bench: &Workbench, quick: bool) -> Result<[f64; OPERATIONS.len()]> {
        let (set, warm_up) = if quick { (4, 0) } else { (64, 2) };
        let words = format!(
            "measure messages --plain --wakeup --ops {} --mem {} --sizes 4M --set {set}M --warm-up {warm_up}",
            OPERATIONS.join(","),
            self.memories
        );
        let mut best = [f64::INFINITY; OPERATIONS.len()];
        for _ in 0..if quick { 1 } else { RUNS } {
            let transports = if self.over_hca { RC } else { LOCAL };
            let tool = bench.client(Ucx::Nixl, &Device::importing(2), &words);
            let tool = tool.env("UCX_TLS", format!("{transports}{}", self.transports));
            let tool = tool.env("UCX_GAUDI_COPY_DMABUF", self.dmabuf);
            let fabric = Fabric::new().with("SOFT_RDMA_POLLERS_WORK", "no");
            let tool = if self.over_hca { fabric.under(tool) } else { tool };
            let records = runs::measure(self.name, tool)?;
            for (best, op) in best.iter_mut().zip(OPERATIONS) {
                *best = best.min(runs::value(&records, &format!("{op}, processor time"))?);
            }
        }
        Ok(best)
    }
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::Nixl])?;
    let mut records = Vec::new();
    for [host, others @ ..] in &WAYS {
        let floors = host.measure(&bench, quick)?;
        for way in others {
            for ((op, value), floor) in
                OPERATIONS.iter().zip(way.measure(&bench, quick)?).zip(floors)
            {
                let name = format!("{op}, 4 MiB, {}, floor: {}", way.name, host.name);
                records.push(Record::new(name, value, "s/GB", floor, None));
            }
        }
    }
    Ok(records)
}
