//! `bench copy|ipc|cliffs --model`: the same benches on a software card with the times of a Gaudi2
//! (`SOFT_GAUDI_MODEL`); the floor is the modelled link instead of memcpy.
//!
//! All times of the card are stretched so that this machine can keep up; memcpy in the same run, compared with the
//! link, shows whether it did. The CPU's own work is not stretched.

use anyhow::{Context, Result, ensure};
use e2e::{Device, SoftNode, Tool, Ucx, Workbench};
use ucp_check::measure::{Record, size_name};

use super::quiet;
use super::runs::{self, LIMIT};
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

/// A Gaudi2 slowed so that two processors keep up with three copies, even if other programs use them, too.
pub(crate) const DEFAULT: &str = "gaudi2,slow=100";

/// Targets: the share of the link that copies and messages between host and Gaudi memory should reach, and `gaudi_ipc`.
const OF_LINK: f64 = 0.93;
/// The target if Gaudi memory goes to Gaudi memory through host memory.
const STAGED: f64 = 0.85;

pub(super) const MIB: usize = 1 << 20;
const QUICK: &[usize] = &[MIB];
const SIZES: &[usize] = &[MIB, 4 * MIB, 16 * MIB];

pub(super) type Environment = [(&'static str, &'static str)];

/// Two cards with modelled times.
pub(super) fn device(spec: &str, lenient: &str) -> Device {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
    let node = node.with("SOFT_GAUDI_MODEL", spec).with("SOFT_GAUDI_LENIENT", lenient);
    // This delay is not stretched, and nothing here waits for it.
    Device::Software(node.with("SOFT_GAUDI_CLOSE_TIME", "10"))
}

/// The link as the card reports it: GB/s, and the factor by which it is slowed.
fn link(stderr: &str) -> Result<(f64, f64)> {
    let line = stderr.lines().find(|line| line.contains("times are modelled"));
    let line = line.context("the card does not say that its times are modelled")?;
    let numbers: Vec<f64> =
        line.split([' ', ',', ')', ':']).filter_map(|word| word.parse().ok()).collect();
    let [slow, to_device, _] = numbers[..] else { anyhow::bail!("not understood: {line}") };
    Ok((to_device / 1e3, slow))
}

/// The name of a figure from a modelled card, which nobody can mistake for a real card's.
pub(super) fn named(name: impl std::fmt::Display) -> String {
    format!("modelled Gaudi2: {name}")
}

/// memcpy of this machine compared with the link: whether this machine can keep up.
pub(super) fn follows(memcpy: f64, link: f64) -> Record {
    Record::new(named("memcpy of this machine, floor: the link"), memcpy, "GB/s", link, None)
}

pub(super) fn list(sizes: &[usize]) -> String {
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

/// Passes before the measurement: UCX's fragments are pinned after some ten copies each, and a process that pins does
/// not copy meanwhile, as on a real card.
const WARM_UP: usize = 14;

/// How often messages are measured at most if other programs use the processors.
pub(super) const REPEATS: usize = 3;

/// Messages of many sizes, 16 outstanding, over a working set: the best of several runs, and the link.
fn messages(
    bench: &Workbench,
    (spec, kind): (&str, &str),
    (ops, mem): (&str, &str),
    sizes: &[usize],
) -> Result<(Vec<Record>, f64)> {
    let (set, warm_up) = if sizes.len() == 1 { (16, 0) } else { (128, WARM_UP) };
    let words = format!(
        "measure messages --plain --ops {ops} --mem {mem} --set {set}M --warm-up {warm_up} --sizes {}",
        list(sizes)
    );
    let tool = bench.client(Ucx::V1_22, &device(spec, kind), &words).envs(STAGING);
    let repeats = if sizes.len() == 1 { 1 } else { REPEATS };
    let (mut records, link) = best(&format!("{ops}, {mem}"), repeats, &tool)?;
    records.retain(|record| record.unit == "GB/s");
    Ok((records, link))
}

/// The best figures of several runs (as many as this if other programs use the processors), and the link.
pub(super) fn best(what: &str, repeats: usize, tool: &Tool) -> Result<(Vec<Record>, f64)> {
    let (mut best, mut by_link): (Vec<Record>, f64) = (Vec::new(), 0.0);
    quiet::repeat(repeats, || {
        let work = Work::start(what);
        let end = tool.clone().limit(LIMIT).run();
        ensure!(end.success(), "{}", end.report());
        work.done("");
        by_link = link(&end.stderr)?.0;
        for record in runs::parse(&end.stdout)? {
            let better = if record.unit == "GB/s" { f64::max } else { f64::min };
            match best.iter_mut().find(|best| best.name == record.name) {
                Some(best) => {
                    best.value = better(best.value, record.value);
                    best.floor = better(best.floor, record.floor);
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
    let (measured, link) = messages(&bench, card, ("tag,am,put,get", "gaudi:gaudi"), sizes)?;
    let mut records = vec![follows(measured[0].floor, link)];
    records.extend(measured.iter().map(|record| {
        record.against(named(format!("{}, gaudi_ipc", record.name)), link, Some(OF_LINK))
    }));
    Ok(records)
}

/// `bench cliffs --model`: between two processes, staged through host memory. Puts and gets: `bench one-sided`.
pub(super) fn cliffs(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let mut records = Vec::new();
    let sizes = if quick { QUICK } else { SIZES };
    for mem in ["host:gaudi", "gaudi:host", "gaudi:gaudi"] {
        let card = (spec, "ordered,unpinned");
        let (measured, link) = messages(&bench, card, ("tag,am", mem), sizes)?;
        if records.is_empty() {
            records.push(follows(measured[0].floor, link));
        }
        records.extend(measured.iter().map(|record| share(record, mem, link)));
    }
    Ok(records)
}

/// The share of the link that a message reaches.
fn share(record: &Record, mem: &str, link: f64) -> Record {
    let (op, size) = record.name.split_once(", ").unwrap_or_default();
    let target = match mem {
        "gaudi:gaudi" => (size != size_name(MIB)).then_some(STAGED),
        _ => Some(OF_LINK),
    };
    record.against(named(format!("{op} {mem}, {size}, staged")), link, target)
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
                let record = Record::new(format!("tag, {size}"), 0.6, "GB/s", 9.0, None);
                share(&record, mem, 0.65).met
            })
        };
        assert_eq!(met("host:gaudi"), [Some(false), Some(false)], "0.92 of the link");
        assert_eq!(met("gaudi:gaudi"), [None, Some(true)]);
    }
}
