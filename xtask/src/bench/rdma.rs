//! `bench rdma`: RDMA on Gaudi memory through UCX's InfiniBand transport and the software HCA, compared with host memory
//! on the same HCA, with the staged path (dma-bufs off), and two rails with one.
//!
//! The link is modelled, so that the figures describe the path and not this machine's memory. The number of copies on
//! the card comes from recordings of the driver calls of both processes: the cost of a message is the difference
//! between many and few messages.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::rdma::{Fabric, RC};
use e2e::{Device, SoftNode, Tool, Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::runs;
use crate::progress::Work;
use crate::repo::Repo;

/// A port so slow that two processors are not the bottleneck: MB/s, µs.
const MODEL: &str = "bandwidth=1000,latency=5";

const QUICK: [usize; 1] = [64 << 10];
/// Up to 64 KiB a message takes some 10 µs, so the time of a few messages mostly shows the machine's other load. So
/// there are many, and the best of several runs counts.
const SMALL: [usize; 2] = [4 << 10, 64 << 10];
const SMALL_ITERATIONS: u32 = 200;
const SMALL_RUNS: usize = 8;
const LARGE: [usize; 3] = [1 << 20, 16 << 20, 64 << 20];
const LARGE_ITERATIONS: u32 = 5;
const LARGE_RUNS: usize = 2;
/// A size that is striped over the rails.
const STRIPED: usize = 16 << 20;

const OF_HOST: f64 = 0.95;
const OF_STAGED: f64 = 1.0;
const OF_ONE_RAIL: f64 = 1.8;

const OPERATIONS: [&str; 3] = ["put", "get", "tag"];

/// Messages in each of two directions for one of the client's `--iters`: one alone, then eight at once.
const MESSAGES_A_REPETITION: usize = 2 * (1 + 8);

/// Runs of each number of rails, alternating: the best counts. Two rails keep two processors busy, so other load on the
/// machine affects them first.
const RAIL_RUNS: usize = 3;

/// GB/s by operation, memory and size, the better of the two directions.
type Cells = BTreeMap<(String, String, usize), f64>;

/// One run of the client.
struct Run<'a> {
    bench: &'a Workbench,
    hcas: usize,
    variables: &'a [(&'a str, &'a str)],
}

/// Put and get with pipelining, which UCX does not use by default: the best that staging can do.
const STAGED: [(&str, &str); 2] = [("UCX_GAUDI_COPY_DMABUF", "no"), ("UCX_RMA_PPLN_ENABLE", "y")];

impl Run<'_> {
    fn tool(&self, fabric: &Fabric, words: &str) -> Tool {
        let device = Device::Software(SoftNode::lenient().with("SOFT_GAUDI_DEVICES", "2"));
        let tool = fabric.under(self.bench.client(Ucx::Nixl, &device, words));
        tool.env("UCX_TLS", format!("{RC},gaudi_cpy")).envs(self.variables)
    }

    fn fabric(&self) -> Fabric {
        let places = vec!["0"; self.hcas].join(",");
        let fabric = Fabric::new().with("SOFT_RDMA_DEVICES", self.hcas.to_string());
        fabric.with("SOFT_RDMA_PLACES", places).with("SOFT_RDMA_MODEL", MODEL)
    }

    /// Measures once more, and keeps the better figures.
    fn improve(
        &self,
        best: &mut Cells,
        memories: &str,
        sizes: &[usize],
        iterations: u32,
    ) -> Result<()> {
        let fabric = self.fabric();
        for row in self.tool(&fabric, &pair(&OPERATIONS, memories, sizes, iterations)).rows()? {
            let Some(gbps) = row.gbps else { continue };
            let known = best.entry((row.op, row.src, row.size)).or_default();
            *known = known.max(gbps);
        }
        Ok(())
    }

    /// Copies of the card that a message takes, over both processes.
    fn copies(&self, op: &str, size: usize) -> Result<f64> {
        let submissions = |iterations| -> Result<usize> {
            let fabric = self.fabric();
            let tool = self.tool(&fabric, &pair(&[op], "gaudi:gaudi", &[size], iterations));
            let end = tool.env("UCX_GAUDI_TRACE", fabric.folder().join("trace.%p")).run();
            ensure!(end.success(), "{}", end.report());
            count_submissions(fabric.folder())
        };
        let (few, many) = (submissions(2)?, submissions(12)?);
        Ok((many as f64 - few as f64) / (10 * MESSAGES_A_REPETITION) as f64)
    }
}

fn pair(ops: &[&str], memories: &str, sizes: &[usize], iterations: u32) -> String {
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let (sizes, ops) = (sizes.join(","), ops.join(","));
    format!("pair --plain --ops {ops} --mem {memories} --sizes {sizes} --iters {iterations}")
}

/// Submissions in all recordings of a folder.
fn count_submissions(folder: &Path) -> Result<usize> {
    let (mut count, mut recordings) = (0, 0);
    for entry in std::fs::read_dir(folder)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("trace.") {
            let text = std::fs::read_to_string(entry.path())?;
            recordings += 1;
            count += text.matches("\"call\":\"hlthunk_command_submission\"").count();
        }
    }
    ensure!(recordings == 2, "{recordings} of 2 processes recorded their driver calls");
    Ok(count)
}

fn cell(cells: &Cells, op: &str, memory: &str, size: usize) -> Result<f64> {
    let found = cells.get(&(op.to_owned(), memory.to_owned(), size)).copied();
    found.with_context(|| format!("nothing was measured of {op} {memory}, {size} bytes"))
}

/// Direct transfers compared with host memory, and with staging.
fn compared(direct: &Cells, staged: &Cells, sizes: &[usize]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for op in OPERATIONS {
        for &size in sizes {
            let gaudi = cell(direct, op, "gaudi", size)?;
            let mut add = |what: &str, floor, target: f64| {
                let name = format!("{op}, {}, {what}", size_name(size));
                records.push(Record::new(name, gaudi, "GB/s", floor, target));
            };
            add("Gaudi memory, floor: host memory", cell(direct, op, "host", size)?, OF_HOST);
            add("direct compared with staged", cell(staged, op, "gaudi", size)?, OF_STAGED);
        }
    }
    Ok(records)
}

/// Two HCAs compared with one, for messages that are striped.
fn rails(bench: &Workbench) -> Result<Vec<Record>> {
    let variables = [("UCX_MAX_RMA_RAILS", "2")];
    let (mut one, mut two) = (Cells::new(), Cells::new());
    for _ in 0..RAIL_RUNS {
        for (hcas, best) in [(1, &mut one), (2, &mut two)] {
            let run = Run { bench, hcas, variables: &variables };
            run.improve(best, "gaudi:gaudi", &[STRIPED], LARGE_ITERATIONS)?;
        }
    }
    let record = |op| {
        let [value, floor] = [&two, &one].map(|cells| cell(cells, op, "gaudi", STRIPED));
        let name = format!("{op}, {}, two rails compared with one", size_name(STRIPED));
        Ok(Record::new(name, value?, "GB/s", floor?, OF_ONE_RAIL))
    };
    OPERATIONS.map(record).into_iter().collect()
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::Nixl])?;
    eprintln!("link: {MODEL}; software HCA and software Gaudi");
    let direct = Run { bench: &bench, hcas: 1, variables: &[] };
    let staged = Run { variables: &STAGED, ..direct };
    let plan: &[(&[usize], usize, u32)] = if quick {
        &[(&QUICK, 1, 2)]
    } else {
        &[(&SMALL, SMALL_RUNS, SMALL_ITERATIONS), (&LARGE, LARGE_RUNS, LARGE_ITERATIONS)]
    };
    let work = Work::start("Gaudi and host memory, direct and staged".to_owned());
    let (mut by_rdma, mut through_host) = (Cells::new(), Cells::new());
    for (sizes, runs, iterations) in plan {
        for _ in 0..*runs {
            direct.improve(&mut by_rdma, "host:host,gaudi:gaudi", sizes, *iterations)?;
        }
        // This setting is ten times slower, and serves only as a comparison.
        for _ in 0..LARGE_RUNS.min(*runs) {
            staged.improve(&mut through_host, "gaudi:gaudi", sizes, 1)?;
        }
    }
    work.done("");
    let sizes: Vec<usize> = plan.iter().flat_map(|(sizes, ..)| *sizes).copied().collect();
    let mut records = compared(&by_rdma, &through_host, &sizes)?;
    let work = Work::start("copies of the card".to_owned());
    for op in OPERATIONS {
        let (copies, staging) = (direct.copies(op, QUICK[0])?, staged.copies(op, QUICK[0])?);
        let name = format!(
            "{op}, {}, copies of the card, direct compared with staged",
            size_name(QUICK[0])
        );
        records.push(Record::within(name, copies, "copies", staging, 0.0));
    }
    work.done("");
    if !quick {
        let fabric = direct.fabric();
        records
            .extend(runs::measure("registrations", direct.tool(&fabric, "measure registration"))?);
        let work = Work::start("two rails".to_owned());
        records.extend(rails(&bench)?);
        work.done("");
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaudi_is_compared_with_host_and_staged() {
        let cells = |rows: &[(&str, f64)]| -> Cells {
            let each = rows.iter().flat_map(|(memory, gbps)| {
                OPERATIONS.map(|op| ((op.to_owned(), (*memory).to_owned(), 65536), *gbps))
            });
            each.collect()
        };
        let direct = cells(&[("host", 1.0), ("gaudi", 0.9)]);
        let records = compared(&direct, &cells(&[("gaudi", 0.3)]), &QUICK).expect("complete");
        assert_eq!(records.len(), 6);
        assert_eq!((records[0].met, records[1].met), (Some(false), Some(true)));
        assert!((records[1].ratio - 3.0).abs() < 1e-9);
        assert!(compared(&direct, &Cells::new(), &QUICK).is_err());
    }
}
