//! `bench choice --model`: whether UCP chooses well on a card with the times of a Gaudi2.
//!
//! It measures the time of one message for every operation, pair of memories and size: with the protocol that UCP
//! chooses, and with protocols that are forced, of which the best counts. All times of the card are stretched, so that
//! this machine's noise is small in comparison, and the least of several times counts.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::{Row, Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::model::{Environment, device, named};
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

/// If it were slower, messages that are forced to be eager would take longer than the bench waits.
pub(super) const DEFAULT: &str = "gaudi2,slow=20";

/// The target: the time with UCP's choice compared with the best forced one.
const TARGET: f64 = 1.2;
const ITERATIONS: u32 = 10;
const LIMIT: Duration = Duration::from_secs(120);

/// Settings that make UCP choose another protocol. A message that does not run with a setting is not measured.
type Forced = (&'static str, &'static Environment);
const MESSAGES: &[Forced] = &[
    ("eager", &[("UCX_RNDV_THRESH", "inf")]),
    ("rendezvous", &[("UCX_RNDV_THRESH", "0")]),
    ("rendezvous, read", &[("UCX_RNDV_THRESH", "0"), ("UCX_RNDV_SCHEME", "get_ppln")]),
    ("rendezvous, write", &[("UCX_RNDV_THRESH", "0"), ("UCX_RNDV_SCHEME", "put_ppln")]),
    ("rendezvous, messages", &[("UCX_RNDV_THRESH", "0"), ("UCX_RNDV_SCHEME", "am")]),
    ("zero-copy from 0", &[("UCX_ZCOPY_THRESH", "0")]),
    ("no zero-copy", &[("UCX_ZCOPY_THRESH", "inf")]),
    ("without cma", &[("UCX_TLS", "^cma")]),
    ("without gaudi_ipc", &[("UCX_TLS", "^gaudi_ipc")]),
];
const ONE_SIDED: &[Forced] = &[
    ("zero-copy from 0", &[("UCX_ZCOPY_THRESH", "0")]),
    ("no zero-copy", &[("UCX_ZCOPY_THRESH", "inf")]),
    ("without cma", &[("UCX_TLS", "^cma")]),
    ("without gaudi_ipc", &[("UCX_TLS", "^gaudi_ipc")]),
];

/// Not for gets of host memory into Gaudi memory, which may hang with it (docs/upstream).
const PIPELINED: Forced = ("pipelined", &[("UCX_RMA_PPLN_ENABLE", "y")]);

/// Operations and pairs that are measured together, with their settings. Streams have only one protocol.
type Group = (&'static str, &'static str, &'static [Forced], &'static [Forced]);
const GROUPS: [Group; 4] = [
    ("tag,am", "host:gaudi,gaudi:host,gaudi:gaudi", MESSAGES, &[]),
    ("put", "host:gaudi,gaudi:host,gaudi:gaudi", ONE_SIDED, &[PIPELINED]),
    ("get", "gaudi:host,gaudi:gaudi", ONE_SIDED, &[PIPELINED]),
    ("get", "host:gaudi", ONE_SIDED, &[]),
];

/// Operation, memories, size.
type Cell = (String, [String; 2], usize);
/// The shortest time of a message, in µs.
type Times = BTreeMap<Cell, f64>;

/// The measurements of one kind of card.
#[derive(Debug, Default)]
struct Measured {
    chosen: Times,
    forced: Vec<(&'static str, Times)>,
}

pub(super) fn run(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let mut records = Vec::new();
    let kinds = [("ordered,unpinned", "no import"), ("import,ordered,unpinned", "import")];
    for (kind, people) in kinds {
        let mut measured = Measured::default();
        for (ops, mem, forced, more) in GROUPS {
            let measure = |name: &str, environment: &Environment| -> Result<Times> {
                let work = Work::start(format!("{ops}, {people}: {name}"));
                let times = times(&bench, (spec, kind), (ops, mem), quick, environment);
                work.done(if times.is_empty() { "nothing could be measured" } else { "" });
                Ok(times)
            };
            let chosen = measure("UCP's own choice", &[])?;
            ensure!(!chosen.is_empty(), "{ops}, {people}: nothing was measured");
            measured.chosen.extend(chosen);
            let forced = forced.iter().chain(more).take(if quick { 1 } else { usize::MAX });
            for (name, environment) in forced {
                measured.forced.push((*name, measure(name, environment)?));
            }
        }
        records.extend(measured.records(people));
    }
    Ok(records)
}

/// Operations that a forced protocol cannot do are not measured.
fn times(
    bench: &Workbench,
    (spec, kind): (&str, &str),
    (ops, mem): (&str, &str),
    quick: bool,
    environment: &Environment,
) -> Times {
    let list = if quick { "64,1M" } else { "8,8K,64K,1M,4M" };
    let iterations = if quick { 1 } else { ITERATIONS };
    let words =
        format!("pair --plain --least --ops {ops} --mem {mem} --sizes {list} --iters {iterations}");
    let tool = bench.client(Ucx::V1_22, &device(spec, kind), &words).limit(LIMIT);
    let rows = tool.envs(STAGING).envs(environment).rows().unwrap_or_default();
    let mut times = Times::new();
    for Row { op, src, dst, size, latency_us, .. } in rows {
        let Some(time) = latency_us else { continue };
        // From either process.
        let least = times.entry((op, [src, dst], size)).or_insert(f64::INFINITY);
        *least = least.min(time);
    }
    times
}

impl Measured {
    /// The fastest forced protocol, with its name; UCP's choice if none is faster.
    fn best(&self, cell: &Cell, chosen: f64) -> (&str, f64) {
        let times = self.forced.iter().filter_map(|(name, times)| Some((*name, *times.get(cell)?)));
        let fastest = times.min_by(|(_, one), (_, other)| one.total_cmp(other));
        fastest.filter(|(_, time)| *time < chosen).unwrap_or(("itself", chosen))
    }

    fn records(&self, people: &str) -> Vec<Record> {
        let record = |(cell, time): (&Cell, &f64)| {
            let (name, least) = self.best(cell, *time);
            let (op, mem, size) = cell;
            let (mem, size) = (mem.join(":"), size_name(*size));
            let title = format!("{op} {mem}, {size}, {people}: UCP's choice compared with {name}");
            Record::new(named(title), *time, "µs", least, TARGET)
        };
        self.chosen.iter().map(record).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_compared_with_the_best_forced_one() {
        let cell = |size| ("tag".to_owned(), ["host", "gaudi"].map(str::to_owned), size);
        let chosen = Times::from([(cell(8), 10.0), (cell(16), 30.0)]);
        let forced = vec![
            ("eager", Times::from([(cell(8), 12.0), (cell(16), 20.0)])),
            ("rendezvous", Times::from([(cell(8), 11.0)])),
        ];
        let measured = Measured { chosen, forced };
        let records = measured.records("staged");
        assert_eq!((records[0].ratio, records[0].met), (1.0, Some(true)));
        assert_eq!((records[1].ratio, records[1].met), (1.5, Some(false)));
        assert!(
            records[1].name.ends_with("UCP's choice compared with eager"),
            "{}",
            records[1].name
        );
    }
}
