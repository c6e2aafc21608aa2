//! Host, Gaudi and CUDA memory between two processes: every operation and pair of memories, beside the
//! same operation between host memory and each of the two kinds.
//!
//! A message from one kind of device memory to another passes through host memory, so it cannot be faster
//! than the slower of its two halves, and need not be much slower where they overlap. Those halves, measured
//! in the same run, are the floor: `gaudi:host` and `host:cuda` for `gaudi:cuda`. Each pair has two processes
//! of its own; one of them has the one memory, the other the other, and every byte is verified.
//!
//! Where there is no CUDA, the pairs without it are measured. The device cannot import dma-bufs here, like
//! most drivers in the field.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use e2e::{Device, ProtocolLogs, Row, SoftNode, Ucx, Workbench};

use super::cliffs::{OPS, protocol};
use super::record::Record;
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;
use crate::units;

const MEMORIES: [&str; 3] = ["host", "gaudi", "cuda"];
const HOST: &str = "host";

/// Sizes that are measured together, and how often.
const SIZES: [(&[usize], u32); 2] =
    [(&[8, 64 << 10, 1 << 20], 30), (&[4 << 20, 16 << 20, 64 << 20], 5)];
const QUICK_SIZES: [(&[usize], u32); 1] = [(&[8, 1 << 20], 2)];

/// From this size on mixed pairs have a target, the goal that was set for them.
const LARGE: usize = 1 << 20;
const MIXED_TARGET: f64 = 0.5;

/// One run of the client.
const LIMIT: Duration = Duration::from_secs(120);

type Settings = &'static [(&'static str, &'static str)];
const PIPELINED: Settings = &[("UCX_RMA_PPLN_ENABLE", "y")];
const VARIANTS: [(&str, [Settings; 2]); 2] =
    [("as it comes", [&[], &[]]), ("tuned, puts and gets pipelined", [STAGING, PIPELINED])];

type Pair = [&'static str; 2];

/// One operation between two memories at one size.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    op: &'static str,
    pair: Pair,
    size: usize,
    latency_us: f64,
    gbps: f64,
    protocol: String,
}

/// The pairs of these memories.
fn pairs(memories: &[&'static str]) -> Vec<Pair> {
    let with = |from: &'static str| memories.iter().map(move |to| [from, *to]);
    memories.iter().flat_map(|from| with(from)).collect()
}

/// The two halves of a pair of which neither is host memory.
fn halves([from, to]: Pair) -> Option<[Pair; 2]> {
    (from != HOST && to != HOST).then_some([[from, HOST], [HOST, to]])
}

fn is_mixed(pair: Pair) -> bool {
    pair[0] != pair[1] && halves(pair).is_some()
}

/// The cells of one pair, and the tables in which UCX says which protocols it chose.
fn measure(
    bench: &Workbench,
    ucx: Ucx,
    variables: &[(&str, &str)],
    pair: Pair,
    quick: bool,
) -> Result<(Vec<Cell>, String)> {
    let (mut cells, mut tables) = (Vec::new(), String::new());
    let plan: &[(&[usize], u32)] = if quick { &QUICK_SIZES } else { &SIZES };
    for (sizes, iterations) in plan {
        let device = Device::Software(
            SoftNode::unique()
                .with("SOFT_GAUDI_DEVICES", "2")
                .with("SOFT_GAUDI_LENIENT", "ordered,unpinned"),
        );
        let list: Vec<String> = sizes.iter().map(usize::to_string).collect();
        let words = format!(
            "pair --one-way --plain --ops {} --mem {} --sizes {} --iters {iterations}",
            OPS.join(","),
            pair.join(":"),
            list.join(","),
        );
        let logs = ProtocolLogs::new()?;
        let tool = bench.client(ucx, &device, &words).cuda().limit(LIMIT).envs(variables);
        let rows = logs.of(tool).rows()?;
        let protocols = logs.read()?;
        for op in OPS {
            for &size in *sizes {
                let row = find_row(&rows, op, size)?;
                let (Some(latency_us), Some(gbps)) = (row.latency_us, row.gbps) else {
                    anyhow::bail!("no time for {op} {pair:?} {size}");
                };
                let protocol = protocol(&protocols, op, pair, size);
                cells.push(Cell { op, pair, size, latency_us, gbps, protocol });
            }
        }
        tables.push_str(&logs.text()?);
    }
    Ok((cells, tables))
}

fn find_row<'a>(rows: &'a [Row], op: &str, size: usize) -> Result<&'a Row> {
    let row = rows.iter().find(|row| row.op == op && row.size == size as u64);
    row.with_context(|| format!("nothing measured for {op} {size}"))
}

/// The bandwidth of the slower half of a cell's pair, or of the cell itself where it has no halves.
fn floor(cells: &[Cell], cell: &Cell) -> f64 {
    let of = |pair: Pair| {
        let fits = |it: &&Cell| it.op == cell.op && it.pair == pair && it.size == cell.size;
        cells.iter().find(fits).map_or(f64::NAN, |half| half.gbps)
    };
    halves(cell.pair)
        .map_or(cell.gbps, |halves| halves.map(of).into_iter().fold(f64::MAX, f64::min))
}

fn records(ucx: Ucx, variant: &str, cells: &[Cell]) -> Vec<Record> {
    let record = |cell: &Cell| {
        let Cell { op, pair, size, gbps, protocol, .. } = cell;
        let size_name = units::size(*size as u64);
        let name = format!(
            "{op} {} {size_name}, UCX {}, {variant}: {protocol}",
            pair.join(":"),
            ucx.name()
        );
        let target = (is_mixed(*pair) && *size >= LARGE).then_some(MIXED_TARGET);
        Record::at_least(name, *gbps, "GB/s", floor(cells, cell), target)
    };
    cells.iter().map(record).collect()
}

/// A line for each operation and pair, a column for each size: GB/s (below 4 KiB: microseconds), and the ratio
/// to the slower half where there are two.
fn map(cells: &[Cell]) -> Table {
    let mut sizes: Vec<usize> = cells.iter().map(|cell| cell.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    let head = sizes.iter().map(|bytes| units::size(*bytes as u64));
    table.set_header(["operation".to_owned(), "memory".into()].into_iter().chain(head));
    for op in OPS {
        for pair in pairs(&MEMORIES) {
            let its: Vec<&Cell> =
                cells.iter().filter(|cell| cell.op == op && cell.pair == pair).collect();
            if its.is_empty() {
                continue;
            }
            let mut line = vec![op.to_owned(), pair.join(":")];
            for size in &sizes {
                let cell = its.iter().find(|cell| cell.size == *size);
                line.push(cell.map_or_else(String::new, |cell| figure(cells, cell)));
            }
            table.add_row(line);
        }
    }
    table
}

fn figure(cells: &[Cell], cell: &Cell) -> String {
    match halves(cell.pair) {
        _ if cell.size < 4096 => format!("{:.1} µs", cell.latency_us),
        Some(_) => format!("{:.1} ({:.2})", cell.gbps, cell.gbps / floor(cells, cell)),
        None => format!("{:.1}", cell.gbps),
    }
}

/// The memories there are: CUDA if a message to it arrives.
fn memories(bench: &Workbench, ucx: Ucx) -> &'static [&'static str] {
    let words = "pair --one-way --plain --ops tag --mem host:cuda --sizes 1";
    let end = bench.client(ucx, &Device::None, words).cuda().limit(LIMIT).run();
    if end.success() {
        return &MEMORIES;
    }
    let reason = no_cuda(&end.report());
    println!("skipped: UCX {}, the pairs with CUDA memory: {reason}", ucx.name());
    &MEMORIES[..2]
}

/// Why a run of the client had no CUDA. A line tells of both processes; the other one only lost its peer.
fn no_cuda(report: &str) -> String {
    let mut reasons = report.lines().flat_map(|line| line.split("; "));
    let reason = reasons.find_map(|reason| Some(&reason[reason.find("no CUDA")?..]));
    reason.unwrap_or(report).trim().to_owned()
}

/// The map of both versions of UCX in both variants. UCX's own tables of protocols go to `logs`, a file for
/// each pair.
pub(super) fn run(repo: &Repo, logs: Option<&Path>, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
    let mut all = Vec::new();
    for ucx in Ucx::ALL {
        let pairs = pairs(memories(&bench, ucx));
        for (variant, variables) in VARIANTS {
            let work = Work::start(format!("UCX {}, {variant}", ucx.name()));
            let mut cells = Vec::new();
            for &pair in &pairs {
                let (more, tables) = measure(&bench, ucx, &variables.concat(), pair, quick)
                    .with_context(|| format!("UCX {}, {variant}, {pair:?}", ucx.name()))?;
                cells.extend(more);
                if let Some(folder) = logs {
                    let name = format!("{}-{variant}-{}.txt", ucx.name(), pair.join("-"));
                    let path = folder.join(name.replace(' ', "-"));
                    std::fs::create_dir_all(folder)
                        .and_then(|()| std::fs::write(&path, tables))
                        .with_context(|| format!("cannot write {}", path.display()))?;
                }
            }
            work.done("");
            println!("\nUCX {}, {variant}: GB/s, and beside it the ratio to the", ucx.name());
            println!("slower of the two halves through host memory\n{}", map(&cells));
            all.extend(records(ucx, variant, &cells));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells() -> Vec<Cell> {
        let figure = |pair: Pair| match pair {
            ["gaudi", "host"] => 8.0,
            ["host", "cuda"] => 40.0,
            ["gaudi", "cuda"] => 4.0,
            _ => 20.0,
        };
        let cell = |pair, size| Cell {
            op: "tag",
            pair,
            size,
            latency_us: 1.5,
            gbps: figure(pair),
            protocol: "zero-copy".into(),
        };
        let sizes = [8, LARGE];
        pairs(&MEMORIES).into_iter().flat_map(|pair| sizes.map(|size| cell(pair, size))).collect()
    }

    #[test]
    fn mixed_pairs_are_held_against_the_slower_half() {
        let records = records(Ucx::V1_22, "as it comes", &cells());
        let with_target: Vec<&Record> =
            records.iter().filter(|record| record.target.is_some()).collect();
        assert_eq!(with_target.len(), 2, "gaudi:cuda and cuda:gaudi, not below 1 MiB");
        let slow = with_target.iter().find(|record| record.name.contains("gaudi:cuda"));
        let slow = slow.expect("it is there");
        assert_eq!((slow.floor, slow.ratio, slow.met), (8.0, 0.5, Some(true)));
    }

    #[test]
    fn the_reason_without_cuda_is_that_of_the_process_that_has_none() {
        let report = "`ucp-check` → exit status: 1\n--- stdout ---\nFAIL  process 0: the other process is gone: \
            Broken pipe (while: exchanging); process 1: no CUDA: no libcuda.so.1 (while: cuInit)\n0 passed";
        assert_eq!(no_cuda(report), "no CUDA: no libcuda.so.1 (while: cuInit)");
        assert_eq!(
            no_cuda("killed: it ran past its time limit\n"),
            "killed: it ran past its time limit"
        );
    }

    #[test]
    fn the_map_has_the_pairs_that_were_measured() {
        let all = map(&cells()).to_string();
        assert!(all.contains("gaudi:cuda") && all.contains("4.0 (0.50)"), "{all}");
        assert!(all.contains("1.5 µs"), "{all}");
        let mut without = cells();
        without.retain(|cell| !cell.pair.contains(&"cuda"));
        let text = map(&without).to_string();
        assert!(!text.contains("cuda") && text.contains("gaudi:gaudi"), "{text}");
    }
}
