//! `bench ipc`: Gaudi memory between two processes by `gaudi_ipc`. Floors from the same run: UCX's own `cma` and
//! `posix` between host memories, and memcpy.
//!
//! Bandwidth is that of put and get with 16 outstanding, over a working set larger than the caches. To find cliffs, it
//! measures every operation and pair of memories over the buffers of `ucp-check pair`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use e2e::{Device, SoftNode, Tool, Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::runs::{LIMIT, measure, medians, value};
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

const OF_CMA: f64 = 1.5;
const OF_MEMCPY: f64 = 0.90;
/// Targets: the worst operation compared with the best, and streams compared with those of host memory.
const NO_CLIFF: f64 = 0.5;
/// Runs of `measure sharing`.
const OPENING_ROUNDS: usize = 3;

/// GB/s by operation, memories and size.
type Cells = BTreeMap<(String, String, usize), f64>;

fn client(bench: &Workbench, words: &str) -> Tool {
    let device = Device::Software(SoftNode::lenient().with("SOFT_GAUDI_DEVICES", "2"));
    bench.client(Ucx::V1_22, &device, words).limit(LIMIT)
}

/// GB/s of every operation and pair at 1 MiB and more, the better of the two directions.
fn cells(bench: &Workbench, quick: bool) -> Result<Cells> {
    let (sizes, iterations) = if quick { ("1M", 2) } else { ("1M,4M,16M", 10) };
    let words = format!("pair --plain --sizes {sizes} --iters {iterations}");
    let mut best = Cells::new();
    for row in client(bench, &words).envs(STAGING).rows()? {
        let Some(gbps) = row.gbps else { continue };
        let name = (row.op.clone(), format!("{}:{}", row.src, row.dst), row.size);
        let known: &mut f64 = best.entry(name).or_default();
        *known = known.max(gbps);
    }
    Ok(best)
}

/// The worst of put, get, tag and active message, and every stream.
fn cliffs(cells: &Cells) -> Result<Vec<Record>> {
    let mut sizes: Vec<usize> = cells.keys().map(|(_, _, size)| *size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut records = Vec::new();
    for size in sizes {
        let name = size_name(size);
        let of_size = || cells.iter().filter(|((_, _, other), _)| *other == size);
        let plain = || of_size().filter(|((op, _, _), _)| op != "stream");
        let by_speed = |a: &(_, &f64), b: &(_, &f64)| a.1.total_cmp(b.1);
        let ((op, pair, _), worst) = plain().min_by(by_speed).context("nothing was measured")?;
        let (_, best) = plain().max_by(by_speed).context("nothing was measured")?;
        let title = format!("{name}: the worst operation ({op} {pair}) compared with the best");
        records.push(Record::new(title, *worst, "GB/s", *best, NO_CLIFF));
        let streams = || of_size().filter(|((op, _, _), _)| op == "stream");
        let host = streams().find(|((_, pair, _), _)| pair == "host:host");
        let (_, host) = host.context("no stream between host memories")?;
        for ((_, pair, _), gbps) in streams().filter(|((_, pair, _), _)| pair != "host:host") {
            let title = format!("{name}: stream {pair}, floor: host:host");
            records.push(Record::new(title, *gbps, "GB/s", *host, NO_CLIFF));
        }
    }
    Ok(records)
}

/// Figures of `gaudi_ipc` with each of their floors.
fn compared(ipc: &[Record], cma: &[Record], posix: &[Record]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for record in ipc {
        let name = &record.name;
        let rate = record.unit == "GB/s";
        if rate {
            records.push(record.against(
                format!("{name}, floor: memcpy"),
                record.floor,
                Some(OF_MEMCPY),
            ));
        }
        let title = format!("{name}, floor: cma between host memories");
        records.push(record.against(title, value(cma, name)?, rate.then_some(OF_CMA)));
        if rate {
            let title = format!("{name}, floor: posix between host memories");
            records.push(record.against(title, value(posix, name)?, None));
        }
    }
    Ok(records)
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let sizes = if quick { "1M" } else { "1M,4M,16M" };
    let client_of =
        |mem: &str| client(&bench, &format!("measure messages --mem {mem} --sizes {sizes}"));
    let host = |tls: &str| client_of("host:host").env("UCX_TLS", tls);
    let ipc = measure("gaudi_ipc", client_of("gaudi:gaudi"))?;
    let cma = measure("cma between host memories", host("self,sysv,cma"))?;
    let posix = measure("posix between host memories", host("self,posix"))?;
    let mut records = compared(&ipc, &cma, &posix)?;
    let opening = || {
        let device = Device::hardware_or(SoftNode::lenient());
        let tool = bench.ucp_check(Ucx::V1_22).words("measure sharing");
        measure("opening memory of a peer", tool.device(&device))
    };
    let rounds = if quick { 1 } else { OPENING_ROUNDS };
    records.extend(medians(&(0..rounds).map(|_| opening()).collect::<Result<Vec<_>>>()?)?);
    let work = Work::start("every operation and pair of memories".to_owned());
    records.extend(cliffs(&cells(&bench, quick)?)?);
    work.done("");
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cliff_is_found_and_named() {
        let cell = |op: &str, pair: &str, gbps| ((op.to_owned(), pair.to_owned(), 1 << 20), gbps);
        let cells = BTreeMap::from([
            cell("get", "gaudi:gaudi", 10.0),
            cell("put", "gaudi:host", 1.0),
            cell("stream", "host:host", 4.0),
            cell("stream", "gaudi:gaudi", 3.0),
        ]);
        let records = cliffs(&cells).expect("complete");
        assert_eq!(records.len(), 2);
        assert!(records[0].name.contains("put gaudi:host"), "{}", records[0].name);
        assert_eq!((records[0].ratio, records[0].met), (0.1, Some(false)));
        assert_eq!((records[1].ratio, records[1].met), (0.75, Some(true)));
    }
}
