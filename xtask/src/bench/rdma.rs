//! RDMA on Gaudi memory through UCX's InfiniBand transport and the software HCA: beside host memory on
//! the same HCA in the same run, beside the staged path (dma-bufs off), and two rails beside one.
//!
//! The link is modelled, so that the figures are those of the path and not of this machine's memory.
//! Copies of the card are submissions in a recording of its driver calls, of both processes: what a
//! message costs is the difference between many and few messages.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use e2e::rdma::{Fabric, RC};
use e2e::{Device, SoftNode, Tool, Ucx, Workbench};

use super::figures;
use super::record::Record;
use crate::progress::Work;
use crate::repo::Repo;

/// MB/s of a port, slow enough that two processors are not what bounds it.
const LINK: u64 = 1000;
const MODEL: &str = "bandwidth=1000,latency=5";

/// Bytes, with how they are written.
const SIZES: [(u64, &str); 5] =
    [(4 << 10, "4K"), (64 << 10, "64K"), (1 << 20, "1M"), (16 << 20, "16M"), (64 << 20, "64M")];
const QUICK: [(u64, &str); 1] = [(64 << 10, "64K")];

/// Up to here a message takes some 10 µs: few of them tell more about the machine's other work than about
/// the path. So there are many, and the best of several runs counts.
const SMALL: u64 = 64 << 10;
const SMALL_ITERATIONS: u32 = 200;
const SMALL_RUNS: usize = 8;
const LARGE_RUNS: usize = 2;

/// Sizes that are striped over the rails.
const STRIPED: [(u64, &str); 1] = [(16 << 20, "16M")];

const OF_HOST: f64 = 0.95;
const OF_STAGED: f64 = 1.0;
const OF_ONE_RAIL: f64 = 1.8;

const OPERATIONS: [&str; 3] = ["put", "get", "tag"];

/// Messages in each of two directions for one of the client's `--iters`: one alone, then eight at once.
const MESSAGES_A_REPETITION: usize = 2 * (1 + 8);

/// Runs of each number of rails, in turns: the best counts. Two rails keep two processors busy, so that
/// whatever else runs on the machine shows there first.
const RAIL_RUNS: usize = 3;

/// GB/s by operation, memory and size, the better of the two directions.
type Cells = BTreeMap<(String, String, u64), f64>;

/// One run of the client.
struct Run<'a> {
    bench: &'a Workbench,
    hcas: u32,
    variables: &'a [(&'a str, &'a str)],
}

/// Put and get in pipelines, which UCX does not do by itself: the best that staging can do.
const STAGED: [(&str, &str); 2] = [("UCX_GAUDI_COPY_DMABUF", "no"), ("UCX_RMA_PPLN_ENABLE", "y")];

impl Run<'_> {
    fn tool(&self, fabric: &Fabric, device: &Device, words: &str) -> Tool {
        let tool = self.bench.client(Ucx::Nixl, device, words);
        let tool = fabric.under(tool).env("UCX_TLS", format!("{RC},gaudi_cpy"));
        self.variables.iter().fold(tool, |tool, (name, value)| tool.env(name, value))
    }

    fn fabric(&self) -> Fabric {
        let places = vec!["0"; self.hcas as usize].join(",");
        let fabric = Fabric::new().with("SOFT_RDMA_DEVICES", self.hcas.to_string());
        fabric.with("SOFT_RDMA_PLACES", places).with("SOFT_RDMA_MODEL", MODEL)
    }

    /// Measures so often; the best counts.
    fn measure(
        &self,
        memories: &str,
        sizes: &[(u64, &str)],
        runs: usize,
        iterations: u32,
    ) -> Result<Cells> {
        let mut best = Cells::new();
        for _ in 0..if sizes.is_empty() { 0 } else { runs } {
            self.improve(&mut best, memories, sizes, iterations)?;
        }
        Ok(best)
    }

    /// Measures once more, and keeps what is better.
    fn improve(
        &self,
        best: &mut Cells,
        memories: &str,
        sizes: &[(u64, &str)],
        iterations: u32,
    ) -> Result<()> {
        let (device, fabric) = (machine(), self.fabric());
        let words = pair(&OPERATIONS, memories, sizes, iterations);
        for row in self.tool(&fabric, &device, &words).rows()? {
            let Some(gbps) = row.gbps else { continue };
            let known = best.entry((row.op, row.src, row.size)).or_default();
            *known = known.max(gbps);
        }
        Ok(())
    }

    /// Copies of the card that a message takes, over both processes.
    fn copies(&self, op: &str, size: (u64, &str)) -> Result<f64> {
        let submissions = |iterations| -> Result<usize> {
            let (device, fabric) = (machine(), self.fabric());
            let tool =
                self.tool(&fabric, &device, &pair(&[op], "gaudi:gaudi", &[size], iterations));
            let end = tool.env("UCX_GAUDI_TRACE", fabric.folder().join("trace.%p")).run();
            ensure!(end.success(), "{}", end.report());
            count_submissions(fabric.folder())
        };
        let (few, many) = (submissions(2)?, submissions(12)?);
        Ok((many as f64 - few as f64) / (10 * MESSAGES_A_REPETITION) as f64)
    }
}

fn machine() -> Device {
    Device::Software(SoftNode::lenient().with("SOFT_GAUDI_DEVICES", "2"))
}

fn pair(ops: &[&str], memories: &str, sizes: &[(u64, &str)], iterations: u32) -> String {
    let sizes: Vec<&str> = sizes.iter().map(|(_, text)| *text).collect();
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

fn cell(cells: &Cells, op: &str, memory: &str, size: u64) -> Result<f64> {
    let found = cells.get(&(op.to_owned(), memory.to_owned(), size)).copied();
    found.with_context(|| format!("nothing was measured of {op} {memory}, {size} bytes"))
}

/// Direct beside host memory and beside staging.
fn compared(direct: &Cells, staged: &Cells, sizes: &[(u64, &str)]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for op in OPERATIONS {
        for &(size, text) in sizes {
            let gaudi = cell(direct, op, "gaudi", size)?;
            let host = cell(direct, op, "host", size)?;
            let name = format!("{op}, {text}iB, Gaudi memory beside host memory");
            records.push(Record::at_least(name, gaudi, "GB/s", host, Some(OF_HOST)));
            let through_host = cell(staged, op, "gaudi", size)?;
            let name = format!("{op}, {text}iB, direct beside staged");
            records.push(Record::at_least(name, gaudi, "GB/s", through_host, Some(OF_STAGED)));
        }
    }
    Ok(records)
}

/// First and cached registrations, Gaudi memory beside host memory.
fn registrations(bench: &Workbench) -> Result<Vec<Record>> {
    let (device, run) = (machine(), Run { bench, hcas: 1, variables: &[] });
    let fabric = run.fabric();
    let end = run.tool(&fabric, &device, "costs registration").run();
    ensure!(end.success(), "{}", end.report());
    // UCX logs to standard output, too.
    let lines: Vec<&str> = end.stdout.lines().filter(|line| line.contains('\t')).collect();
    let figures = figures::parse(&lines.join("\n"))?;
    let mut records = Vec::new();
    for mib in [1, 64] {
        for when in ["first", "cached"] {
            let of = |memory| figures::get(&figures, &format!("{memory} {mib} MiB {when}"));
            let name = format!("registering {mib} MiB, {when}, Gaudi beside host memory");
            records.push(Record::at_most(name, of("gaudi")?, "µs", of("host")?, None));
        }
    }
    Ok(records)
}

/// Two HCAs beside one, for messages that are striped.
fn rails(bench: &Workbench) -> Result<Vec<Record>> {
    let variables = [("UCX_MAX_RMA_RAILS", "2")];
    let (mut one, mut two) = (Cells::new(), Cells::new());
    for _ in 0..RAIL_RUNS {
        for (hcas, best) in [(1, &mut one), (2, &mut two)] {
            let run = Run { bench, hcas, variables: &variables };
            run.improve(best, "gaudi:gaudi", &STRIPED, 5)?;
        }
    }
    let mut records = Vec::new();
    for op in OPERATIONS {
        for (size, text) in STRIPED {
            let name = format!("{op}, {text}iB, two rails beside one");
            let (value, floor) = (cell(&two, op, "gaudi", size)?, cell(&one, op, "gaudi", size)?);
            records.push(Record::at_least(name, value, "GB/s", floor, Some(OF_ONE_RAIL)));
        }
    }
    Ok(records)
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::Nixl])?;
    let sizes: &[(u64, &str)] = if quick { &QUICK } else { &SIZES };
    let iterations = if quick { 2 } else { 5 };
    eprintln!("link: {LINK} MB/s, modelled; software HCA and software Gaudi");
    let direct = Run { bench: &bench, hcas: 1, variables: &[] };
    let staged = Run { variables: &STAGED, ..direct };
    let work = Work::start("Gaudi and host memory, direct and staged".to_owned());
    let memories = "host:host,gaudi:gaudi";
    let (small, large) = sizes.split_at(sizes.partition_point(|(size, _)| *size <= SMALL));
    let (runs, many) = if quick { (1, iterations) } else { (SMALL_RUNS, SMALL_ITERATIONS) };
    let mut beside = direct.measure(memories, small, runs, many)?;
    let runs = if quick { 1 } else { LARGE_RUNS };
    beside.extend(direct.measure(memories, large, runs, iterations)?);
    // Ten times slower, and only there to be compared.
    let through_host = staged.measure("gaudi:gaudi", sizes, runs, iterations.div_ceil(5))?;
    work.done("");
    let mut records = compared(&beside, &through_host, sizes)?;
    let work = Work::start("copies of the card".to_owned());
    for op in OPERATIONS {
        let [size] = QUICK;
        let (copies, staging) = (direct.copies(op, size)?, staged.copies(op, size)?);
        let name = format!("{op}, {}iB, copies of the card, direct beside staged", size.1);
        records.push(Record::within(name, copies, "copies", staging, 0.0));
    }
    work.done("");
    if !quick {
        let work = Work::start("registrations, two rails".to_owned());
        records.extend(registrations(&bench)?);
        records.extend(rails(&bench)?);
        work.done("");
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaudi_stands_beside_host_and_staged() {
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
