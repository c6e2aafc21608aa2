//! `bench copy|ipc|cliffs --model`: the same on a software card with the times of a Gaudi2 (`SOFT_GAUDI_MODEL`); the floor
//! is the modelled link instead of memcpy.
//!
//! All times of the card are stretched so that this machine can follow; memcpy of the same run, compared with the link,
//! shows whether it could. What the processor does is not stretched.

use anyhow::{Context, Result, ensure};
use e2e::{Device, SoftNode, Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::quiet;
use super::runs::{self, LIMIT};
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

/// A Gaudi2, so slow that two processors move the bytes of three copies in its time, also if others use them as well.
pub(crate) const DEFAULT: &str = "gaudi2,slow=100";

/// The share of the link that copies and messages between host and Gaudi memory should reach, and `gaudi_ipc`.
const OF_LINK: f64 = 0.93;
/// The same where Gaudi memory goes to Gaudi memory through host memory.
const STAGED: f64 = 0.85;

const MIB: usize = 1 << 20;
const QUICK: &[usize] = &[MIB];
const SIZES: &[usize] = &[MIB, 4 * MIB, 16 * MIB];

pub(super) type Environment = [(&'static str, &'static str)];

/// Two cards in time.
pub(super) fn device(spec: &str, lenient: &str) -> Device {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
    let node = node.with("SOFT_GAUDI_MODEL", spec).with("SOFT_GAUDI_LENIENT", lenient);
    // Not stretched, and nobody waits for it here.
    Device::Software(node.with("SOFT_GAUDI_CLOSE_TIME", "10"))
}

/// The link as the card announces it: GB/s, and by how much it is slowed.
fn link(stderr: &str) -> Result<(f64, f64)> {
    let line = stderr.lines().find(|line| line.contains("times are modelled"));
    let line = line.context("the card does not say that its times are modelled")?;
    let numbers: Vec<f64> =
        line.split([' ', ',', ')', ':']).filter_map(|word| word.parse().ok()).collect();
    let [slow, to_device, _] = numbers[..] else { anyhow::bail!("not understood: {line}") };
    Ok((to_device / 1e3, slow))
}

/// What all figures of a run are called, so that no one takes them for a card's.
pub(super) fn named(name: impl std::fmt::Display) -> String {
    format!("modelled Gaudi2: {name}")
}

/// How much faster than the link this machine copies.
fn follows(memcpy: f64, link: f64) -> Record {
    Record::new(named("memcpy of this machine, floor: the link"), memcpy, "GB/s", link, None)
}

fn list(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// `bench copy --model`: copies through UCT.
pub(super) fn copy(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let sizes = if quick { QUICK } else { &[MIB / 4, MIB, 4 * MIB, 16 * MIB] };
    let words =
        format!("measure copies --sizes {}{}", list(sizes), if quick { " --quick" } else { "" });
    let work = Work::start("copies through UCT");
    let tool = bench.ucp_check(Ucx::V1_22).words(&words).plugin();
    let end = tool.device(&device(spec, "ordered,unpinned")).limit(LIMIT).run();
    ensure!(end.success(), "{}", end.report());
    work.done("");
    let (link, slow) = link(&end.stderr)?;
    let measured = runs::parse(&end.stdout)?;
    let mut records = vec![follows(measured.first().context("nothing was measured")?.floor, link)];
    for record in &measured {
        // The model has one queue for copies on the card, and no link.
        if record.unit == "GB/s" && !record.name.starts_with("device to device") {
            let target = record.target.map(|_| OF_LINK);
            records.push(record.against(named(&record.name), link, target));
        } else if record.unit == "ns" {
            // By the model: 5 µs to start and 20 µs to report.
            let what = record.name.split(", floor").next().unwrap_or_default();
            let name = named(format!("{what}, floor: the model's own time"));
            records.push(Record::new(name, record.value / 1e3, "µs", 25.0 * slow, None));
        }
    }
    Ok(records)
}

/// Passes before anything is measured: UCX's fragments are pinned after some ten copies each, and a process that
/// pins copies nothing meanwhile, as on silicon.
const WARM_UP: usize = 14;

/// Messages are measured up to this many times where others use the processors.
const REPEATS: usize = 3;

/// Messages of many sizes, 16 outstanding, over a working set: the best of several runs, and the link.
fn messages(
    bench: &Workbench,
    (spec, kind): (&str, &str),
    (ops, mem): (&str, &str),
    sizes: &[usize],
    environment: &Environment,
) -> Result<(Vec<Record>, f64)> {
    let (set, warm_up) = if sizes.len() == 1 { (16, 0) } else { (128, WARM_UP) };
    let words = format!(
        "measure messages --plain --ops {ops} --mem {mem} --set {set}M --warm-up {warm_up} --sizes {}",
        list(sizes)
    );
    let (mut best, mut by_link): (Vec<Record>, f64) = (Vec::new(), 0.0);
    quiet::repeat(if sizes.len() == 1 { 1 } else { REPEATS }, || {
        let work = Work::start(format!("{ops}, {mem}"));
        let tool = bench.client(Ucx::V1_22, &device(spec, kind), &words).limit(LIMIT);
        let end = tool.envs(environment).run();
        ensure!(end.success(), "{}", end.report());
        work.done("");
        by_link = link(&end.stderr)?.0;
        for record in runs::parse(&end.stdout)?.into_iter().filter(|it| it.unit == "GB/s") {
            match best.iter_mut().find(|best| best.name == record.name) {
                Some(best) => {
                    best.value = best.value.max(record.value);
                    best.floor = best.floor.max(record.floor);
                }
                None => best.push(record),
            }
        }
        Ok(())
    })?;
    Ok((best, by_link))
}

/// `bench ipc --model`: between two processes whose driver imports dma-bufs.
pub(super) fn ipc(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let sizes = if quick { QUICK } else { SIZES };
    let card = (spec, "import,ordered,unpinned");
    let (measured, link) =
        messages(&bench, card, ("tag,am,put,get", "gaudi:gaudi"), sizes, STAGING)?;
    let mut records = vec![follows(measured[0].floor, link)];
    records.extend(measured.iter().map(|record| {
        record.against(named(format!("{}, gaudi_ipc", record.name)), link, Some(OF_LINK))
    }));
    Ok(records)
}

/// `bench cliffs --model`: between two processes, staged through host memory.
///
/// Puts and gets twice: relayed by `gaudi_ipc`, which is the default, and with UCX's pipelines switched on. A get of host
/// memory into Gaudi memory may hang when it is pipelined, and is left out.
pub(super) fn cliffs(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let mut records = Vec::new();
    let pipelined = [STAGING, &[("UCX_RMA_PPLN_ENABLE", "y")]].concat();
    let sizes = if quick { QUICK } else { SIZES };
    for mem in ["host:gaudi", "gaudi:host", "gaudi:gaudi"] {
        let without_get = if mem == "host:gaudi" { "put" } else { "put,get" };
        let ways: [(_, _, _, &Environment); 3] = [
            ("staged", "tag,am", sizes, STAGING),
            ("pipelined", without_get, sizes, &pipelined),
            ("relayed", "put,get", sizes, STAGING),
        ];
        for (way, ops, sizes, environment) in ways {
            let card = (spec, "ordered,unpinned");
            let (measured, link) = messages(&bench, card, (ops, mem), sizes, environment)?;
            if records.is_empty() {
                records.push(follows(measured[0].floor, link));
            }
            records.extend(measured.iter().map(|record| share(record, mem, way, link)));
        }
    }
    Ok(records)
}

/// What a message reaches of the link.
fn share(record: &Record, mem: &str, way: &str, link: f64) -> Record {
    let (op, size) = record.name.split_once(", ").unwrap_or_default();
    let target = match mem {
        "gaudi:gaudi" => (size != size_name(MIB)).then_some(STAGED),
        _ => Some(OF_LINK),
    };
    record.against(named(format!("{op} {mem}, {size}, {way}")), link, target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_what_the_card_announces() {
        let line = "x\nsoft-gaudi: times are modelled (gaudi2, 40 times slower): 650 and 650 MB/s to and from";
        assert_eq!(link(line).expect("understood"), (0.65, 40.0));
        assert!(link("nothing of the kind").is_err());
    }

    #[test]
    fn targets_are_shares_of_the_link() {
        let met = |mem| {
            ["1 MiB", "4 MiB"].map(|size| {
                let record = Record::new(format!("put, {size}"), 0.6, "GB/s", 9.0, None);
                share(&record, mem, "staged", 0.65).met
            })
        };
        assert_eq!(met("host:gaudi"), [Some(false), Some(false)], "0.92 of the link");
        assert_eq!(met("gaudi:gaudi"), [None, Some(true)]);
    }
}
