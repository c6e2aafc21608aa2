//! `bench one-sided`: put and get between two processes on a card with the times of a Gaudi2, by every path. The floor
//! is the modelled link; for eight bytes, one at a time, it is the model's time of one copy.
//!
//! | way | what it needs |
//! |---|---|
//! | relay | nothing: `gaudi_ipc` on a driver that imports no dma-bufs, which is every upstream one |
//! | import | `gaudi_ipc` on a driver that imports them; host memory of a peer is relayed there too, and not measured again |
//! | RDMA | an HCA that reaches the cards: the software one, with a port of 200 Gb/s that is slowed as the card is |
//! | pipelined | no `gaudi_ipc`, and `UCX_RMA_PPLN_ENABLE=y`: UCX stages as it does messages. A get of host memory into Gaudi memory may hang then, and is left out |
//! | emulated | no `gaudi_ipc`, and nothing set: so slow that one size has to do |
//!
//! Latency is measured on a card that is not slowed: there are not enough bytes to overload this machine.

use anyhow::{Context, Result};
use e2e::rdma::Fabric;
use e2e::{Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::model::{self, Environment, MIB, device, follows, named};
use crate::repo::Repo;

/// A Gaudi2 slowed so that two processors can keep up: a relay moves the bytes three times.
pub(super) const DEFAULT: &str = "gaudi2,slow=50";
const UNSLOWED: &str = "gaudi2";
/// µs of a copy of few bytes, by the model: 5 to start and 20 to report.
const COPY_US: f64 = 25.0;

const SIZES: [usize; 6] = [MIB / 16, MIB / 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB];
const PAIRS: [&str; 3] = ["gaudi:gaudi", "gaudi:host", "host:gaudi"];
const OPS: [&str; 2] = ["put", "get"];

/// MB/s and µs of the HCA's port.
const PORT: (f64, f64) = (25_000.0, 2.0);

struct Way {
    name: &'static str,
    ucx: Ucx,
    over_hca: bool,
    imports: bool,
    environment: &'static Environment,
    /// Sizes, working set in MiB, passes before the measurement, and measured passes.
    plan: (&'static [usize], usize, usize, usize),
    /// Whether this path supports an operation between these memories.
    does: fn(op: &str, pair: &str) -> bool,
}

const RELAY: Way = Way {
    name: "relay",
    ucx: Ucx::V1_22,
    over_hca: false,
    imports: false,
    environment: &[],
    plan: (&SIZES, 128, 2, 3),
    does: |_, _| true,
};

const WAYS: [Way; 5] = [
    RELAY,
    Way { name: "import", imports: true, does: |op, pair| is_gaudi_there(op, pair), ..RELAY },
    Way {
        name: "RDMA",
        ucx: Ucx::Nixl,
        over_hca: true,
        environment: &[("UCX_TLS", "rc_verbs,ud_verbs:aux,gaudi_cpy")],
        ..RELAY
    },
    Way {
        name: "pipelined",
        environment: &[("UCX_TLS", "^gaudi_ipc"), ("UCX_RMA_PPLN_ENABLE", "y")],
        // UCX's fragments are pinned after some ten copies each.
        plan: (&SIZES, 128, 14, 3),
        does: |op, pair| (op, pair) != ("get", "host:gaudi"),
        ..RELAY
    },
    Way {
        name: "emulated",
        environment: &[("UCX_TLS", "^gaudi_ipc")],
        plan: (&[MIB], 4, 0, 1),
        ..RELAY
    },
];

/// Whether the peer's memory is Gaudi memory: the destination of a put, the source of a get.
fn is_gaudi_there(op: &str, pair: &str) -> bool {
    if op == "put" { pair.ends_with("gaudi") } else { pair.starts_with("gaudi") }
}

/// The factor by which a card is slowed.
fn slowed(spec: &str) -> f64 {
    spec.split_once("slow=").and_then(|(_, factor)| factor.parse().ok()).unwrap_or(1.0)
}

impl Way {
    /// The best figures of its operations between two memories, and the link.
    fn measure(
        &self,
        bench: &Workbench,
        (spec, pair): (&str, &str),
        (sizes, set, warm_up, passes): (&[usize], &str, usize, usize),
        repeats: usize,
    ) -> Result<(Vec<Record>, f64)> {
        let ops: Vec<&str> = OPS.into_iter().filter(|op| (self.does)(op, pair)).collect();
        if ops.is_empty() {
            return Ok((Vec::new(), f64::NAN));
        }
        let (ops, list) = (ops.join(","), model::list(sizes));
        let words = format!(
            "measure messages --plain --ops {ops} --mem {pair} --sizes {list} --set {set} \
             --warm-up {warm_up} --passes {passes}"
        );
        let kind = if self.imports { "import,ordered,unpinned" } else { "ordered,unpinned" };
        let tool = bench.client(self.ucx, &device(spec, kind), &words).envs(self.environment);
        let (bandwidth, latency) = (PORT.0 / slowed(spec), PORT.1 * slowed(spec));
        let port = format!("bandwidth={bandwidth:.0},latency={latency:.0}");
        let fabric = Fabric::new().with("SOFT_RDMA_MODEL", port);
        let tool = if self.over_hca { fabric.under(tool) } else { tool };
        model::best(&format!("{}, {ops} {pair}, {spec}", self.name), repeats, &tool)
    }
}

/// The target: the relay's share of the link.
fn target(way: &str, size: usize) -> Option<f64> {
    match size {
        _ if way != RELAY.name => None,
        MIB => Some(0.7),
        size => (size >= 4 * MIB).then_some(0.85),
    }
}

/// The target for a size, in the order of the table.
type Figure = (usize, usize, usize, usize, Record);

fn figure(pair: usize, size: usize, way: usize, record: &Record, link: f64) -> Result<Figure> {
    let op = record.name.split(',').next().unwrap_or_default();
    let place = OPS.iter().position(|it| *it == op).context("an operation of another kind")?;
    let (name, memories) = (WAYS[way].name, PAIRS[pair]);
    let record = if record.unit == "GB/s" {
        let title = named(format!("{op} {memories}, {}, {name}", size_name(size)));
        record.against(title, link, target(name, size))
    } else {
        let title = format!("{op} {memories}, 8 B one at a time, not slowed, {name}");
        record.against(named(title), COPY_US, None)
    };
    Ok((place, pair, size, way, record))
}

pub(super) fn run(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &Ucx::ALL)?;
    let (mut first, mut figures) = (None, Vec::new());
    let repeats = if quick { 1 } else { model::REPEATS };
    for (way_at, way) in WAYS.iter().enumerate() {
        for (pair_at, pair) in PAIRS.iter().enumerate().take(if quick { 1 } else { PAIRS.len() }) {
            let (sizes, set, warm_up, passes) = way.plan;
            let plan = match quick {
                true => (&[MIB][..], "4M", 0, 1),
                false => (sizes, &*format!("{set}M"), warm_up, passes),
            };
            let (measured, link) = way.measure(&bench, (spec, pair), plan, repeats)?;
            for record in measured.iter().filter(|record| record.unit == "GB/s") {
                first.get_or_insert_with(|| follows(record.floor, link));
                let size = record.name.split_once(", ").map(|(_, size)| size).unwrap_or_default();
                let size = plan.0.iter().find(|it| size_name(**it) == size);
                let size = *size.context("a size that was not asked for")?;
                figures.push(figure(pair_at, size, way_at, record, link)?);
            }
            let (measured, _) =
                way.measure(&bench, (UNSLOWED, pair), (&[8], "1K", 0, 1), repeats)?;
            for record in measured.iter().filter(|record| record.unit == "µs") {
                figures.push(figure(pair_at, 8, way_at, record, 0.0)?);
            }
        }
    }
    figures.sort_by_key(|(op, pair, size, way, _)| (*op, *pair, *size, *way));
    Ok(first.into_iter().chain(figures.into_iter().map(|figure| figure.4)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_relay_has_targets_and_from_1_mib_on() {
        let targets = SIZES.map(|size| target("relay", size));
        assert_eq!(targets, [None, None, Some(0.7), Some(0.85), Some(0.85), Some(0.85)]);
        assert_eq!(target("import", 4 * MIB), None);
    }

    #[test]
    fn figures_are_shares_of_the_link_or_copies_of_the_model() {
        let bytes = Record::new("get, 4 MiB", 0.39, "GB/s", 9.0, None);
        let (op, .., record) = figure(1, 4 * MIB, 0, &bytes, 0.52).expect("a get");
        assert_eq!((op, record.ratio, record.met), (1, 0.75, Some(false)));
        assert_eq!(record.name, "modelled Gaudi2: get gaudi:host, 4 MiB, relay");
        let one = Record::new("put, 8 B, one at a time", 50.0, "µs", 50.0, None);
        assert_eq!(figure(0, 8, 1, &one, 0.0).expect("a put").4.ratio, 2.0);
    }

    #[test]
    fn the_hca_is_slowed_as_the_card() {
        assert_eq!(["gaudi2,slow=50", "gaudi2"].map(slowed), [50.0, 1.0]);
        assert!(is_gaudi_there("put", "host:gaudi") && is_gaudi_there("get", "gaudi:host"));
        assert!(!is_gaudi_there("put", "gaudi:host") && !is_gaudi_there("get", "host:gaudi"));
    }
}
