//! Gaudi memory between two processes by `gaudi_ipc`, beside what the machine does without a card: UCX's
//! own `cma` and `posix` between host memories, and memcpy. All in one run.
//!
//! Bandwidth is that of put and get with 16 outstanding over a working set beyond the caches. Whether
//! there are cliffs is asked of every operation and pair of memories, over the buffers of `ucp-check`.
//! What it costs to open memory of another process comes from the example `share_costs` of the crate
//! `gaudi`, beside the bare hand-over of the descriptor and import.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use e2e::{Device, SoftNode, Tool, Ucx, Workbench};

use super::figures::{self, Effort, Figures, get};
use super::record::Record;
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

/// Sizes in MiB whose bandwidth is held against the floors.
const SIZES: [usize; 3] = [1, 4, 16];
const QUICK: [usize; 1] = [1];

const OF_CMA: f64 = 1.5;
const OF_MEMCPY: f64 = 0.90;
/// The worst operation beside the best, and streams beside those of host memory.
const NO_CLIFF: f64 = 0.5;

/// A cold open beside a bare round trip with a descriptor, and import.
const COLD_OPEN: f64 = 2.0;
const COLD_OPEN_ROUNDS: usize = 3;

fn client(bench: &Workbench, words: &str) -> Tool {
    let device = Device::Software(SoftNode::lenient().with("SOFT_GAUDI_DEVICES", "2"));
    let tool = bench.client(Ucx::V1_22, &device, words);
    tool.limit(std::time::Duration::from_secs(600))
}

/// Put and get over a working set that no cache holds.
fn rotate(bench: &Workbench, mem: &str, tls: Option<&str>, sizes: &[usize]) -> Result<Figures> {
    let sizes: Vec<String> = sizes.iter().map(|size| format!("{size}M")).collect();
    let words = format!("rotate --mem {mem} --sizes {}", sizes.join(","));
    let tool = client(bench, &words);
    let end = tls.iter().fold(tool, |tool, tls| tool.env("UCX_TLS", tls)).run();
    ensure!(end.success(), "{}", end.report());
    figures::parse(&end.stdout)
}

/// GB/s of every operation and pair at 1 MiB and more, the better of the two directions.
fn matrix(bench: &Workbench, quick: bool) -> Result<BTreeMap<(String, String, u64), f64>> {
    let (sizes, iterations) = if quick { ("1M", 2) } else { ("1M,4M,16M", 10) };
    let words = format!("pair --plain --sizes {sizes} --iters {iterations}");
    let mut best = BTreeMap::new();
    for row in client(bench, &words).envs(STAGING).rows()? {
        let Some(gbps) = row.gbps else { continue };
        let name = (row.op.clone(), format!("{}:{}", row.src, row.dst), row.size);
        let known: &mut f64 = best.entry(name).or_default();
        *known = known.max(gbps);
    }
    Ok(best)
}

/// The worst of put, get, tag and active message beside the best, and streams beside host streams.
fn cliffs(cells: &BTreeMap<(String, String, u64), f64>) -> Result<Vec<Record>> {
    let mut sizes: Vec<u64> = cells.keys().map(|(_, _, size)| *size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut records = Vec::new();
    for size in sizes {
        let mib = size >> 20;
        let of_size = || cells.iter().filter(|((_, _, other), _)| *other == size);
        let plain = || of_size().filter(|((op, _, _), _)| op != "stream");
        let by_speed = |a: &(_, &f64), b: &(_, &f64)| a.1.total_cmp(b.1);
        let ((op, pair, _), worst) = plain().min_by(by_speed).context("nothing was measured")?;
        let (_, best) = plain().max_by(by_speed).context("nothing was measured")?;
        let name = format!("{mib} MiB: the worst operation ({op} {pair}) beside the best");
        records.push(Record::at_least(name, *worst, "GB/s", *best, Some(NO_CLIFF)));
        let streams = || of_size().filter(|((op, _, _), _)| op == "stream");
        let host = streams().find(|((_, pair, _), _)| pair == "host:host");
        let (_, host) = host.context("no stream between host memories")?;
        for ((_, pair, _), gbps) in streams().filter(|((_, pair, _), _)| pair != "host:host") {
            let name = format!("{mib} MiB: stream {pair} beside host:host");
            records.push(Record::at_least(name, *gbps, "GB/s", *host, Some(NO_CLIFF)));
        }
    }
    Ok(records)
}

/// `gaudi_ipc` beside its floors.
fn beside(ipc: &Figures, cma: &Figures, posix: &Figures, sizes: &[usize]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for op in ["get", "put"] {
        for size in sizes {
            let bytes = size << 20;
            let value = get(ipc, &format!("{op} {bytes}"))?;
            let mut held = |floor: f64, what: &str, target| {
                let name = format!("{op}, {size} MiB, beside {what}");
                records.push(Record::at_least(name, value, "GB/s", floor, target));
            };
            held(get(ipc, &format!("{op} memcpy {bytes}"))?, "memcpy", Some(OF_MEMCPY));
            held(get(cma, &format!("{op} {bytes}"))?, "cma between host memories", Some(OF_CMA));
            held(get(posix, &format!("{op} {bytes}"))?, "posix between host memories", None);
        }
        let latency = |from: &Figures| get(from, &format!("{op} latency"));
        let name = format!("{op}, 8 bytes, one at a time, beside cma");
        records.push(Record::at_most(name, latency(ipc)?, "µs", latency(cma)?, None));
    }
    Ok(records)
}

/// Opening memory of another process beside what it cannot do without.
fn opening(rounds: &[Figures]) -> Result<Vec<Record>> {
    let beside = |title: &str, value: &str, floor: &str, target| {
        let figure = |name| figures::middle(rounds, name).map(|ns| ns / 1e3);
        anyhow::Ok(Record::at_most(title, figure(value)?, "µs", figure(floor)?, target))
    };
    let (floor, median) = ("SCM_RIGHTS and import", "SCM_RIGHTS and import, median");
    let first = "first open ever, beside SCM_RIGHTS and import (medians)";
    Ok(vec![
        beside("cold open, beside SCM_RIGHTS and import", "cold open", floor, Some(COLD_OPEN))?,
        beside(first, "first open, median", median, Some(COLD_OPEN))?,
        beside("warm open, beside SCM_RIGHTS and import", "warm open", floor, None)?,
    ])
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let sizes: &[usize] = if quick { &QUICK } else { &SIZES };
    let work = Work::start("gaudi_ipc, cma, posix".to_owned());
    let ipc = rotate(&bench, "gaudi:gaudi", None, sizes)?;
    let cma = rotate(&bench, "host:host", Some("self,sysv,cma"), sizes)?;
    let posix = rotate(&bench, "host:host", Some("self,posix"), sizes)?;
    work.done("");
    let work = Work::start("every operation and pair of memories".to_owned());
    let cells = matrix(&bench, quick)?;
    work.done("");
    let effort = if quick { Effort::Quick } else { Effort::Rounds(COLD_OPEN_ROUNDS) };
    let opens = figures::of_example(repo, "share_costs", "opening memory of a peer", effort)?;
    let mut records = beside(&ipc, &cma, &posix, sizes)?;
    records.extend(opening(&opens)?);
    records.extend(cliffs(&cells)?);
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_stand_beside_the_bare_calls() {
        let printed = "SCM_RIGHTS and import\t10000\nSCM_RIGHTS and import, median\t10000\n\
                       cold open\t19000\nfirst open, median\t21000\nwarm open\t100\n";
        let round = figures::parse(printed).expect("figures");
        let records = opening(std::slice::from_ref(&round)).expect("complete");
        let met: Vec<_> = records.iter().map(|record| record.met).collect();
        assert_eq!(met, [Some(true), Some(false), None]);
        let mut incomplete = round;
        incomplete.remove("warm open");
        assert!(opening(&[incomplete]).is_err());
    }

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
