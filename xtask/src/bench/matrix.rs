//! `bench cliffs` and `bench pairs`: the bandwidth of every operation, pair of memories and size between two processes,
//! with the protocol that UCP chose.
//!
//! * `cliffs`: host and Gaudi memory; the floor is memcpy of the same size.
//! * `pairs`: CUDA memory as well, where there is a GPU. A message from one kind of device memory to another passes through
//!   host memory, so it cannot be faster than the slower of its two halves, and need not be much slower where they overlap.
//!   Those halves are the floor: `gaudi:host` and `host:cuda` for `gaudi:cuda`.
//!
//! Two processes run for each pair, one with the one memory and one with the other; every byte is verified. If other
//! programs used the processors meanwhile, sizes are measured again; the best counts, for floors and operations alike.
//! The device cannot import dma-bufs here, like most drivers in the field: messages are staged through host memory, or
//! `gaudi_ipc` relays them, depending on UCX's estimates.

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use e2e::{Device, ProtocolLogs, Protocols, SoftNode, Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::quiet;
use super::runs::{self, LIMIT};
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

const OPS: [&str; 5] = ["tag", "stream", "am", "put", "get"];
const MEMORIES: [&str; 3] = ["host", "gaudi", "cuda"];
const HOST: &str = "host";

/// The smallest size with targets.
const LARGE: usize = 1 << 20;

/// A size that runs first and does not count: on a busy machine two new processes share a processor for a while.
const WARM_UP: usize = (1 << 20) + 1;

/// How often sizes are measured at most if other programs use the processors.
const REPEATS: usize = 2;

/// Sizes that are measured together, and how often.
type Sizes = (&'static [usize], u32);
type Pair = [&'static str; 2];
type Settings = &'static [(&'static str, &'static str)];

/// How UCX is configured.
struct Variant {
    name: &'static str,
    settings: [Settings; 2],
    /// Only tag messages of [`LARGE`] sizes are measured.
    large_tags: bool,
}

const fn variant(name: &'static str, settings: [Settings; 2]) -> Variant {
    Variant { name, settings, large_tags: false }
}

/// What one of the two benches measures.
pub(super) struct Matrix {
    cuda: bool,
    sizes: &'static [Sizes],
    quick: Sizes,
    variants: &'static [Variant],
    floor: fn(&[Cell], &Cell) -> f64,
    target: fn(&Cell) -> Option<f64>,
}

pub(super) const CLIFFS: Matrix = Matrix {
    cuda: false,
    sizes: &[
        (&[1, 1 << 10, 8 << 10, 64 << 10, 256 << 10], 40),
        (&[1 << 20, 16 << 20], 9),
        (&[64 << 20], 3),
    ],
    quick: (&[64, 1 << 20], 2),
    variants: &[
        variant("as it comes", [&[], &[]]),
        variant("as recommended", [STAGING, &[]]),
        // Settings that suit the software card.
        Variant {
            large_tags: true,
            ..variant("fragments of 64 KiB", [&[("UCX_RNDV_FRAG_SIZE", "host:64K")], &[]])
        },
    ],
    floor: |_, cell| cell.memcpy,
    // A share of memcpy's bandwidth.
    target: |cell| {
        (cell.op == "tag" && cell.pair != [HOST; 2] && cell.size >= LARGE).then_some(0.4)
    },
};

pub(super) const PAIRS: Matrix = Matrix {
    cuda: true,
    sizes: &[(&[8, 64 << 10, 1 << 20], 30), (&[4 << 20, 16 << 20, 64 << 20], 5)],
    quick: (&[8, 1 << 20], 2),
    variants: &[
        variant("as it comes", [&[], &[]]),
        variant("tuned, puts and gets pipelined", [STAGING, &[("UCX_RMA_PPLN_ENABLE", "y")]]),
    ],
    floor: slower_half,
    // A share of the slower half's bandwidth: the goal for mixed pairs.
    target: |cell| {
        let mixed = halves(cell.pair).is_some() && cell.pair[0] != cell.pair[1];
        (mixed && cell.size >= LARGE).then_some(0.5)
    },
};

/// One operation between two memories at one size.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    op: &'static str,
    pair: Pair,
    size: usize,
    latency_us: f64,
    gbps: f64,
    /// memcpy of the same size, in GB/s.
    memcpy: f64,
    protocol: String,
}

/// The two halves of a pair without host memory.
fn halves([from, to]: Pair) -> Option<[Pair; 2]> {
    (from != HOST && to != HOST).then_some([[from, HOST], [HOST, to]])
}

/// The bandwidth of the slower half of a cell's pair, or of the cell itself if it has no halves.
fn slower_half(cells: &[Cell], cell: &Cell) -> f64 {
    let of = |pair: Pair| {
        let fits = |it: &&Cell| (it.op, it.pair, it.size) == (cell.op, pair, cell.size);
        cells.iter().find(fits).map_or(f64::NAN, |half| half.gbps)
    };
    halves(cell.pair).map_or(cell.gbps, |[one, other]| of(one).min(of(other)))
}

/// The protocol that UCP chose for a message, in UCP's words.
fn protocol(protocols: &Protocols, op: &str, [src, dst]: Pair, size: usize) -> String {
    let local = |memory: &'static str| if memory == HOST { "host memory" } else { memory };
    let asked = match op {
        "tag" => format!("tagged message by ucp_tag_send* from {}", local(src)),
        "stream" => format!("stream message by ucp_stream_send* from {}", local(src)),
        "am" => format!("active message by ucp_am_send* from {}", local(src)),
        "put" => format!("remote memory write by ucp_put* from {} to {dst}", local(src)),
        _ => format!("remote memory read by ucp_get* into {} from {src}", local(dst)),
    };
    let Some(choice) = protocols.choice("intra-node", &asked, size) else {
        return "not reported".into();
    };
    // The sender of a rendezvous does not know the receiver's memory, so the receiver decides.
    let fetch = format!("rendezvous data fetch into {} from {src}", local(dst));
    let fetched = protocols.choice("intra-node", &fetch, size);
    let (kind, choice) = match (choice.depends && !matches!(op, "put" | "get"), fetched) {
        (true, Some(fetched)) => ("rendezvous ", fetched),
        _ => ("", choice),
    };
    match choice.transports.split('/').next().unwrap_or_default() {
        "" => format!("{kind}{}", choice.protocol),
        transport => format!("{kind}{} ({transport})", choice.protocol),
    }
}

/// The cells of one pair.
fn measure(
    bench: &Workbench,
    (ucx, variant): (Ucx, &Variant),
    pair: Pair,
    plan: &[Sizes],
    quick: bool,
) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = Vec::new();
    let ops: &[&str] = if variant.large_tags { &["tag"] } else { &OPS };
    for (sizes, iterations) in plan {
        let covered = |size: &&usize| !variant.large_tags || **size >= LARGE;
        let sizes: Vec<usize> = sizes.iter().filter(covered).copied().collect();
        let list = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let repeats = if quick { 1 } else { REPEATS };
        if sizes.is_empty() {
            continue;
        }
        quiet::repeat(repeats, || {
            let memcpy = bench.ucp_check(ucx).words(&format!("measure memcpy --sizes {list}"));
            let floors = runs::records(memcpy)?;
            let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
            let device = Device::Software(node.with("SOFT_GAUDI_LENIENT", "ordered,unpinned"));
            let words = format!(
                "pair --one-way --plain --ops {} --mem {} --sizes {WARM_UP},{list} --iters {iterations}",
                ops.join(","),
                pair.join(":"),
            );
            let logs = ProtocolLogs::new()?;
            let tool = bench.client(ucx, &device, &words).cuda().limit(LIMIT);
            let rows = logs.of(tool.envs(&variant.settings.concat())).rows()?;
            let protocols = logs.read()?;
            for &op in ops {
                for &size in &sizes {
                    let row = rows.iter().find(|row| row.op == op && row.size == size);
                    let times = row.and_then(|row| Some((row.latency_us?, row.gbps?)));
                    let (latency_us, gbps) =
                        times.with_context(|| format!("no time for {op} {pair:?} {size}"))?;
                    let memcpy = runs::value(&floors, &size_name(size))?;
                    let protocol = protocol(&protocols, op, pair, size);
                    add(&mut cells, Cell { op, pair, size, latency_us, gbps, memcpy, protocol });
                }
            }
            Ok(())
        })?;
    }
    Ok(cells)
}

/// Adds a cell, or the better figures of one that was measured before.
fn add(cells: &mut Vec<Cell>, cell: Cell) {
    match cells.iter_mut().find(|known| (known.op, known.size) == (cell.op, cell.size)) {
        Some(known) => {
            known.latency_us = known.latency_us.min(cell.latency_us);
            known.gbps = known.gbps.max(cell.gbps);
            known.memcpy = known.memcpy.max(cell.memcpy);
        }
        None => cells.push(cell),
    }
}

impl Matrix {
    fn records(&self, ucx: Ucx, variant: &str, cells: &[Cell]) -> Vec<Record> {
        let record = |cell: &Cell| {
            let Cell { op, pair, size, protocol, .. } = cell;
            let (pair, size, ucx) = (pair.join(":"), size_name(*size), ucx.name());
            let name = format!("{op} {pair} {size}, UCX {ucx}, {variant}: {protocol}");
            Record::new(name, cell.gbps, "GB/s", (self.floor)(cells, cell), (self.target)(cell))
        };
        cells.iter().map(record).collect()
    }

    /// A line for each operation and pair, a column for each size: GB/s (below 4 KiB: microseconds), and the ratio to the
    /// floor.
    fn table(&self, cells: &[Cell]) -> Table {
        let mut sizes: Vec<usize> = cells.iter().map(|cell| cell.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut lines: Vec<(&str, Pair)> = cells.iter().map(|cell| (cell.op, cell.pair)).collect();
        lines.sort_by_key(|(op, _)| OPS.iter().position(|other| other == op));
        lines.dedup();
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        let head = sizes.iter().map(|size| size_name(*size));
        table.set_header(["operation".to_owned(), "memory".into()].into_iter().chain(head));
        for (op, pair) in lines {
            let cell = |size: &usize| {
                let of = |it: &&Cell| (it.op, it.pair, it.size) == (op, pair, *size);
                cells.iter().find(of).map_or_else(String::new, |cell| match cell.size {
                    ..4096 => format!("{:.1} µs", cell.latency_us),
                    _ => format!("{:.1} ({:.2})", cell.gbps, cell.gbps / (self.floor)(cells, cell)),
                })
            };
            let names = [op.to_owned(), pair.join(":")];
            table.add_row(names.into_iter().chain(sizes.iter().map(cell)));
        }
        table
    }

    /// The available memories: CUDA only if a message to it arrives.
    fn memories(&self, bench: &Workbench, ucx: Ucx) -> &'static [&'static str] {
        if !self.cuda {
            return &MEMORIES[..2];
        }
        let words = "pair --one-way --plain --ops tag --mem host:cuda --sizes 1";
        let end = bench.client(ucx, &Device::None, words).cuda().limit(LIMIT).run();
        if end.success() {
            return &MEMORIES;
        }
        let reason = no_cuda(&end.report());
        println!("skipped: UCX {}, the pairs with CUDA memory: {reason}", ucx.name());
        &MEMORIES[..2]
    }

    /// Both versions of UCX in all variants.
    pub(super) fn run(&self, repo: &Repo, quick: bool) -> Result<Vec<Record>> {
        let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
        let plan = if quick { std::slice::from_ref(&self.quick) } else { self.sizes };
        let mut all = Vec::new();
        for ucx in Ucx::ALL {
            let memories = self.memories(&bench, ucx);
            for variant in self.variants {
                let title = format!("UCX {}, {}", ucx.name(), variant.name);
                let work = Work::start(title.clone());
                let mut cells = Vec::new();
                for from in memories {
                    for to in memories {
                        let measured = measure(&bench, (ucx, variant), [from, to], plan, quick);
                        cells.extend(measured.with_context(|| format!("{title}, {from}:{to}"))?);
                    }
                }
                work.done("");
                println!("\n{title}: GB/s (below 4 KiB: latency), and the ratio to the floor");
                println!("{}", self.table(&cells));
                all.extend(self.records(ucx, variant.name, &cells));
            }
        }
        Ok(all)
    }
}

/// Why a run of the client had no CUDA. A line has both processes' errors; the other process only lost its peer.
fn no_cuda(report: &str) -> String {
    let mut reasons = report.lines().flat_map(|line| line.split("; "));
    let reason = reasons.find_map(|reason| Some(&reason[reason.find("no CUDA")?..]));
    reason.unwrap_or(report).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells() -> Vec<Cell> {
        let cell = |op, pair: Pair, size| {
            let gbps = match pair {
                ["gaudi", "host"] => 8.0,
                ["host", "cuda"] => 40.0,
                ["gaudi", "cuda"] => 4.0,
                _ => 20.0,
            };
            Cell { op, pair, size, latency_us: 1.5, gbps, memcpy: 10.0, protocol: "zcopy".into() }
        };
        let pairs = MEMORIES.iter().flat_map(|from| MEMORIES.iter().map(|to| [*from, *to]));
        let ops = pairs.flat_map(|pair| ["tag", "put"].map(|op| (op, pair)));
        ops.flat_map(|(op, pair)| [8, LARGE].map(|size| cell(op, pair, size))).collect()
    }

    fn with_target(matrix: &Matrix) -> Vec<(String, f64, Option<bool>)> {
        let records = matrix.records(Ucx::V1_22, "x", &cells());
        let records = records.into_iter().filter(|record| record.target.is_some());
        let first = |name: String| name.split(" 1 MiB").next().unwrap_or_default().to_owned();
        records.map(|it| (first(it.name), it.floor, it.met)).collect()
    }

    #[test]
    fn staged_tag_messages_are_compared_with_memcpy() {
        let mut found = with_target(&CLIFFS);
        found.retain(|(name, ..)| !name.contains("cuda"));
        let found: Vec<_> =
            found.iter().map(|(name, floor, met)| (&**name, *floor, *met)).collect();
        let expected = [
            ("tag host:gaudi", 10.0, Some(true)),
            ("tag gaudi:host", 10.0, Some(true)),
            ("tag gaudi:gaudi", 10.0, Some(true)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn mixed_pairs_are_compared_with_the_slower_half() {
        let found = with_target(&PAIRS);
        assert_eq!(found.len(), 4, "gaudi:cuda and cuda:gaudi, not below 1 MiB: {found:?}");
        assert!(found.contains(&("tag gaudi:cuda".to_owned(), 8.0, Some(true))), "{found:?}");
    }

    #[test]
    fn a_cell_that_is_measured_again_keeps_the_better_figures() {
        let [old, new] = [(3.0, 5.0), (2.0, 4.0)].map(|(latency_us, gbps)| Cell {
            latency_us,
            gbps,
            ..cells().remove(0)
        });
        let mut known = vec![old];
        add(&mut known, new);
        assert_eq!((known.len(), known[0].latency_us, known[0].gbps), (1, 2.0, 5.0));
    }

    #[test]
    fn the_table_has_a_line_for_every_operation_and_pair() {
        let all = PAIRS.table(&cells()).to_string();
        assert_eq!(all.lines().count(), 1 + 2 * 9, "{all}");
        assert!(all.contains("4.0 (0.50)") && all.contains("1.5 µs"), "{all}");
    }

    #[test]
    fn the_reason_without_cuda_is_that_of_the_process_that_has_none() {
        let report = "`ucp-check` → exit status: 1\n--- stdout ---\nFAIL  process 0: the other process is gone: \
            Broken pipe (while: exchanging); process 1: no CUDA: no libcuda.so.1 (while: cuInit)\n0 passed";
        assert_eq!(no_cuda(report), "no CUDA: no libcuda.so.1 (while: cuInit)");
        assert_eq!(no_cuda("killed: past its time limit\n"), "killed: past its time limit");
    }

    #[test]
    fn the_receiver_of_a_rendezvous_decides_on_the_protocol() {
        let log = "\
[1] [vm:1:0]   | ucp_context_0 intra-node cfg#2 |
[1] [vm:1:0]   | tagged message by ucp_tag_send* from gaudi/GAUDI_1 |
[1] [vm:1:0]   | 0..8 | eager copy-in copy-out | sysv/memory |
[1] [vm:1:0]   | 9..inf | (?) rendezvous gaudi_cpy, copy to attached | |
[1] [vm:1:0]   | ucp_context_0 intra-node cfg#2 |
[1] [vm:1:0]   | rendezvous data fetch into host memory from gaudi |
[1] [vm:1:0]   | 0..inf | gaudi_cpy, flushed write to remote, frag host | cma/memory |
";
        let protocols = Protocols::parse(log);
        let of = |size, dst| protocol(&protocols, "tag", ["gaudi", dst], size);
        assert_eq!(of(8, "host"), "eager copy-in copy-out (sysv)");
        assert_eq!(of(9, "host"), "rendezvous gaudi_cpy, flushed write to remote, frag host (cma)");
        assert_eq!(of(9, "gaudi"), "rendezvous gaudi_cpy, copy to attached");
        assert_eq!(protocol(&protocols, "put", ["gaudi", "host"], 9), "not reported");
    }
}
