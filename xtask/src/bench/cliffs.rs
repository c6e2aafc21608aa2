//! Gaudi memory between two processes: every operation, pair of memories and size, with the protocol
//! that UCP chose, and its bandwidth.
//!
//! Floors of the same run: memcpy of the same size, and the same operation between host memories. If
//! others used the processors meanwhile, a size is measured again; the best counts, for floors and
//! operations alike.
//! The device cannot import dma-bufs here, like most drivers in the field, so Gaudi memory is staged
//! through host memory. Variants: UCX with its defaults, with the settings that `docs/performance.md`
//! recommends, and large tag messages with small fragments, which suit the software card.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use e2e::{Device, ProtocolLogs, Protocols, Row, SoftNode, Ucx, Workbench};

use super::quiet::Watch;
use super::record::{Record, median};
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;
use crate::units;

pub(super) const OPS: [&str; 5] = ["tag", "stream", "am", "put", "get"];
const PAIRS: [[&str; 2]; 4] =
    [["host", "host"], ["host", "gaudi"], ["gaudi", "host"], ["gaudi", "gaudi"]];

/// Sizes that are measured together, and how often.
const SIZES: [(&[usize], u32); 3] = [
    (&[1, 1 << 10, 8 << 10, 64 << 10, 256 << 10], 40),
    (&[1 << 20, 16 << 20], 9),
    (&[64 << 20], 3),
];
const QUICK_SIZES: [(&[usize], u32); 1] = [(&[64, 1 << 20], 2)];

/// Sizes are measured up to this many times, until others had no more of the processors than this.
const REPEATS: usize = 2;
const QUIET: f64 = 0.2;

/// One run of the client, on a machine that is busy with other things.
const LIMIT: Duration = Duration::from_secs(600);

/// From this size on the bandwidth of staged tag messages is held against memcpy.
const LARGE: usize = 1 << 20;
const STAGED_TARGET: f64 = 0.4;

/// How UCX is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    AsItComes,
    Recommended,
    SmallFragments,
}

impl Variant {
    const ALL: [Variant; 3] = [Variant::AsItComes, Variant::Recommended, Variant::SmallFragments];

    fn name(self) -> &'static str {
        match self {
            Variant::AsItComes => "as it comes",
            Variant::Recommended => "as recommended",
            Variant::SmallFragments => "fragments of 64 KiB",
        }
    }

    fn variables(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Variant::AsItComes => &[],
            Variant::Recommended => STAGING,
            Variant::SmallFragments => &[("UCX_RNDV_FRAG_SIZE", "host:64K")],
        }
    }

    /// What is measured of it.
    fn covers(self, op: &str, size: usize) -> bool {
        self != Variant::SmallFragments || (op == "tag" && size >= LARGE)
    }
}

/// One operation between two memories at one size.
#[derive(Debug, Clone, PartialEq)]
struct Cell {
    op: &'static str,
    pair: [&'static str; 2],
    size: usize,
    latency_us: f64,
    gbps: f64,
    /// memcpy of the same size, in GB/s.
    memcpy: f64,
    protocol: String,
}

impl Cell {
    /// The ratio of bandwidths, or of latencies for small messages.
    fn against(&self, host: &Cell) -> f64 {
        if self.size < 4096 { host.latency_us / self.latency_us } else { self.gbps / host.gbps }
    }

    fn name(&self) -> String {
        format!("{} {}:{} {}", self.op, self.pair[0], self.pair[1], units::size(self.size as u64))
    }
}

/// The protocol that UCP chose for a message, in UCP's words.
pub(super) fn protocol(
    protocols: &Protocols,
    op: &str,
    [src, dst]: [&str; 2],
    size: usize,
) -> String {
    let local =
        |memory: &str| if memory == "host" { "host memory".to_owned() } else { memory.into() };
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
    // The sender of a rendezvous does not know the receiver's memory; the receiver decides.
    let fetch = format!("rendezvous data fetch into {} from {src}", local(dst));
    let fetched = protocols.choice("intra-node", &fetch, size);
    match (choice.depends && !matches!(op, "put" | "get"), fetched) {
        (true, Some(fetched)) => {
            with_transport("rendezvous ", &fetched.protocol, &fetched.transports)
        }
        _ => with_transport("", &choice.protocol, &choice.transports),
    }
}

fn with_transport(kind: &str, protocol: &str, transports: &str) -> String {
    let transport = transports.split('/').next().unwrap_or_default();
    match transport {
        "" => format!("{kind}{protocol}"),
        transport => format!("{kind}{protocol} ({transport})"),
    }
}

/// What bounds the bandwidth of a protocol.
fn bound(protocol: &str) -> &'static str {
    let is = |words: &str| protocol.contains(words);
    if is("emulation") || is("multi-frag") || is("fragmented") {
        "one segment of the transport at a time, each copied by a short copy that is waited for"
    } else if is("copy to attached") {
        "two copies through the receiver's host memory, one by each process"
    } else if is("frag host") {
        "two copies: by the card to or from host fragments, and by cma"
    } else if is("eager") || is("copy-in") || is("short") {
        "short copies that are waited for, at the ends with Gaudi memory"
    } else if is("zero-copy") || is("mapped") {
        "one copy"
    } else {
        "not known"
    }
}

/// memcpy between two buffers of this size, in GB/s: as hot or cold as ucp-check's buffers are.
fn memcpy(size: usize) -> f64 {
    let (from, mut to) = (vec![1u8; size], vec![0u8; size]);
    let repeat = (1 << 16) / size.max(1) + 1;
    let samples: Vec<f64> = (0..15)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..repeat {
                black_box(&mut to).copy_from_slice(black_box(&from));
            }
            (repeat * size) as f64 / start.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    median(&samples)
}

/// What was measured of one UCX and variant.
struct Measured {
    cells: Vec<Cell>,
    /// How many processors others had in the quietest run of each group of sizes, at most.
    others: f64,
}

/// All cells of one UCX and variant.
fn measure(bench: &Workbench, ucx: Ucx, variant: Variant, quick: bool) -> Result<Measured> {
    let mut measured = Measured { cells: Vec::new(), others: 0.0 };
    let plan: &[(&[usize], u32)] = if quick { &QUICK_SIZES } else { &SIZES };
    let ops: Vec<&str> = OPS.into_iter().filter(|op| variant.covers(op, usize::MAX)).collect();
    for (sizes, iterations) in plan {
        let covered = |size: &usize| variant.covers(ops[0], *size);
        let sizes: Vec<usize> = sizes.iter().copied().filter(covered).collect();
        if sizes.is_empty() {
            continue;
        }
        let mut rows = Vec::new();
        let mut floors = BTreeMap::<usize, f64>::new();
        let mut quietest = f64::INFINITY;
        let protocols = loop {
            let watch = Watch::start()?;
            for size in &sizes {
                let floor = floors.entry(*size).or_default();
                *floor = floor.max(memcpy(*size));
            }
            let (more, protocols) = run_client(bench, ucx, variant, (&ops, &sizes), *iterations)?;
            rows.push(more);
            quietest = quietest.min(watch.others()?);
            if quick || quietest <= QUIET || rows.len() == REPEATS {
                break protocols;
            }
        };
        measured.others = measured.others.max(quietest);
        let rows = rows.concat();
        for op in &ops {
            for pair in PAIRS {
                for size in &sizes {
                    measured.cells.push(cell(&rows, &protocols, op, pair, *size, floors[size])?);
                }
            }
        }
    }
    Ok(measured)
}

/// Two processes with a card each, these operations between all pairs of memories.
fn run_client(
    bench: &Workbench,
    ucx: Ucx,
    variant: Variant,
    (ops, sizes): (&[&str], &[usize]),
    iterations: u32,
) -> Result<(Vec<Row>, Protocols)> {
    let device = Device::Software(
        SoftNode::unique()
            .with("SOFT_GAUDI_DEVICES", "2")
            .with("SOFT_GAUDI_LENIENT", "ordered,unpinned"),
    );
    let logs = ProtocolLogs::new()?;
    let list: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let words = format!(
        "pair --plain --ops {} --sizes {} --iters {iterations}",
        ops.join(","),
        list.join(",")
    );
    let tool = bench.client(ucx, &device, &words).limit(LIMIT).envs(variant.variables());
    let rows = logs.of(tool).rows()?;
    Ok((rows, logs.read()?))
}

/// The best of both directions and of all runs.
fn cell(
    rows: &[Row],
    protocols: &Protocols,
    op: &'static str,
    pair: [&'static str; 2],
    size: usize,
    memcpy: f64,
) -> Result<Cell> {
    let fits =
        |row: &&Row| row.op == op && [&*row.src, &*row.dst] == pair && row.size == size as u64;
    let rows = || rows.iter().filter(fits);
    let latency = rows().filter_map(|row| row.latency_us).min_by(f64::total_cmp);
    let gbps = rows().filter_map(|row| row.gbps).max_by(f64::total_cmp);
    let (Some(latency_us), Some(gbps)) = (latency, gbps) else {
        return Err(anyhow::anyhow!("no time for {op} {pair:?} {size}"));
    };
    let protocol = protocol(protocols, op, pair, size);
    Ok(Cell { op, pair, size, latency_us, gbps, memcpy, protocol })
}

/// A line for each operation and pair, a column for each size.
fn map(cells: &[Cell]) -> Result<Table> {
    let mut sizes: Vec<usize> = cells.iter().map(|cell| cell.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let head = sizes.iter().map(|bytes| units::size(*bytes as u64));
    table.set_header(["operation".to_owned(), "memory".into()].into_iter().chain(head));
    for op in OPS.into_iter().filter(|op| cells.iter().any(|cell| cell.op == *op)) {
        for pair in PAIRS {
            let mut line = vec![op.to_owned(), pair.join(":")];
            for size in &sizes {
                let cell = find(cells, op, pair, *size)?;
                let host = find(cells, op, PAIRS[0], *size)?;
                line.push(if pair == PAIRS[0] {
                    if *size < 4096 {
                        format!("{:.1} µs", cell.latency_us)
                    } else {
                        format!("{:.1} GB/s", cell.gbps)
                    }
                } else {
                    format!("{:.2}", cell.against(host))
                });
            }
            table.add_row(line);
        }
    }
    Ok(table)
}

fn find<'a>(cells: &'a [Cell], op: &str, pair: [&str; 2], size: usize) -> Result<&'a Cell> {
    let fits = |cell: &&Cell| cell.op == op && cell.pair == pair && cell.size == size;
    cells.iter().find(fits).with_context(|| format!("nothing measured for {op} {pair:?} {size}"))
}

/// The cells that are slowest against host memory, with why.
fn worst(cells: &[Cell], count: usize) -> Result<String> {
    let mut ranked = Vec::new();
    for cell in cells.iter().filter(|cell| cell.pair != PAIRS[0]) {
        ranked.push((cell.against(find(cells, cell.op, PAIRS[0], cell.size)?), cell));
    }
    ranked.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let mut text = String::new();
    for (ratio, cell) in ranked.iter().take(count) {
        let (protocol, bound) = (&cell.protocol, bound(&cell.protocol));
        writeln!(text, "{ratio:.2}  {}: {protocol}\n      {bound}", cell.name())?;
    }
    Ok(text)
}

fn records(ucx: Ucx, variant: Variant, cells: &[Cell]) -> Vec<Record> {
    let where_from = format!("UCX {}, {}", ucx.name(), variant.name());
    let record = |cell: &Cell| {
        let name = format!("{}, {where_from}: {}", cell.name(), cell.protocol);
        let staged = cell.op == "tag" && cell.pair != PAIRS[0] && cell.size >= LARGE;
        let target = staged.then_some(STAGED_TARGET);
        Record::at_least(name, cell.gbps, "GB/s", cell.memcpy, target)
    };
    cells.iter().map(record).collect()
}

/// The map of both versions of UCX in both variants.
pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
    let mut all = Vec::new();
    for ucx in Ucx::ALL {
        for variant in Variant::ALL {
            let work = Work::start(format!("UCX {}, {}", ucx.name(), variant.name()));
            let Measured { cells, others } = measure(&bench, ucx, variant, quick)?;
            work.done(&format!("others had up to {others:.1} processors"));
            println!("\nUCX {}, {}: bandwidth (below 4 KiB: latency)", ucx.name(), variant.name());
            println!("of host:host, and in ratio to it where Gaudi memory takes part");
            println!("{}\n\nworst:\n{}", map(&cells)?, worst(&cells, 8)?);
            all.extend(records(ucx, variant, &cells));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells() -> Vec<Cell> {
        let mut cells = Vec::new();
        for op in OPS {
            for (at, pair) in PAIRS.into_iter().enumerate() {
                for size in [64, 1 << 20] {
                    let gbps = 10.0 / (at + 1) as f64;
                    let protocol = if op == "put" { "software emulation" } else { "zero-copy" };
                    cells.push(Cell {
                        op,
                        pair,
                        size,
                        latency_us: 1.0 + at as f64,
                        gbps: if op == "put" && at == 3 { 0.1 } else { gbps },
                        memcpy: 10.0,
                        protocol: protocol.into(),
                    });
                }
            }
        }
        cells
    }

    #[test]
    fn the_worst_cell_comes_first_with_its_protocol_and_reason() {
        let text = worst(&cells(), 1).expect("ranked");
        assert!(text.starts_with("0.01  put gaudi:gaudi 1 MiB: software emulation"), "{text}");
        assert!(text.contains("short copy that is waited for"), "{text}");
    }

    #[test]
    fn only_staged_tag_messages_have_a_target() {
        let records = records(Ucx::V1_22, Variant::AsItComes, &cells());
        let targets: Vec<&Record> =
            records.iter().filter(|record| record.target.is_some()).collect();
        assert_eq!((records.len(), targets.len()), (40, 3));
        let met: Vec<(&str, Option<bool>)> = targets
            .iter()
            .map(|record| (record.name.split(" 1 MiB").next().unwrap(), record.met))
            .collect();
        let expected = [
            ("tag host:gaudi", Some(true)),
            ("tag gaudi:host", Some(false)),
            ("tag gaudi:gaudi", Some(false)),
        ];
        assert_eq!(met, expected);
    }

    #[test]
    fn the_map_has_a_line_for_every_operation_and_pair() {
        let text = map(&cells()).expect("complete").to_string();
        assert_eq!(text.lines().count(), 1 + OPS.len() * PAIRS.len());
        let mut incomplete = cells();
        incomplete.pop();
        assert!(map(&incomplete).is_err());
        let tag: Vec<Cell> = cells().into_iter().filter(|cell| cell.op == "tag").collect();
        let text = map(&tag).expect("all of one operation").to_string();
        assert_eq!(text.lines().count(), 1 + PAIRS.len());
    }

    #[test]
    fn small_fragments_are_for_large_tag_messages() {
        assert!(Variant::SmallFragments.covers("tag", LARGE));
        assert!(!Variant::SmallFragments.covers("tag", LARGE - 1));
        assert!(!Variant::SmallFragments.covers("put", LARGE));
        assert!(OPS.iter().all(|op| Variant::Recommended.covers(op, 1)));
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
