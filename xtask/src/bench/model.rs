//! `bench copy|ipc|cliffs --model`: the same on a software card with the times of a Gaudi2 (`SOFT_GAUDI_MODEL`),
//! beside the modelled link instead of memcpy.
//!
//! All times of the card are stretched so that this machine can follow; memcpy of the same run, beside the link,
//! shows whether it could. What the processor does is not stretched.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use e2e::{Device, SoftNode, Ucx, Workbench};

use super::figures::{self, Figures, get};
use super::quiet::Watch;
use super::record::Record;
use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;
use crate::units;

/// A Gaudi2, so slow that two processors move the bytes of three copies in its time, also if others use them as well.
pub(crate) const DEFAULT: &str = "gaudi2,slow=100";

/// The share of the link that copies and messages between host and Gaudi memory should reach, and `gaudi_ipc`.
const OF_LINK: f64 = 0.93;
/// The same where Gaudi memory goes to Gaudi memory through host memory.
const STAGED: f64 = 0.85;

const MIB: usize = 1 << 20;
const OPS: [&str; 4] = ["tag", "am", "put", "get"];
const LIMIT: Duration = Duration::from_secs(300);

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

/// `bench copy --model`: copies through UCT.
pub(super) fn copy(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let sizes: &[usize] = if quick { &[MIB] } else { &[MIB / 4, MIB, 4 * MIB, 16 * MIB] };
    let list: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let mut words = format!("costs copies --sizes {}", list.join(","));
    if quick {
        words += " --quick";
    }
    let work = Work::start("copies through UCT");
    let tool = bench.ucp_check(Ucx::V1_22).words(&words).plugin();
    let end = tool.device(&device(spec, "ordered,unpinned")).limit(LIMIT).run();
    ensure!(end.success(), "{}", end.report());
    work.done("");
    let (link, slow) = link(&end.stderr)?;
    copy_records(&figures::parse(&end.stdout)?, sizes, link, slow)
}

fn copy_records(figures: &Figures, sizes: &[usize], link: f64, slow: f64) -> Result<Vec<Record>> {
    let mut records = vec![follows(get(figures, &format!("memcpy {}", sizes[0]))?, link)];
    for (name, people) in [("h2d", "host to device"), ("d2h", "device to host")] {
        for size in sizes {
            let value = get(figures, &format!("{name} {size}"))?;
            let title = named(format!("{people}, {}, 16 outstanding", units::size(*size as u64)));
            let target = (*size >= MIB).then_some(OF_LINK);
            records.push(Record::at_least(title, value, "GB/s", link, target));
        }
    }
    for name in ["put_short", "get_short"] {
        // By the model: 5 µs to start and 20 µs to report.
        let floor = 25.0 * slow;
        let title = named(format!("{name}, 8 B, beside the model's own time"));
        records.push(Record::at_most(title, get(figures, name)? / 1e3, "µs", floor, None));
    }
    Ok(records)
}

/// How much faster than the link this machine copies.
fn follows(memcpy: f64, link: f64) -> Record {
    Record::at_least(named("memcpy of this machine beside the link"), memcpy, "GB/s", link, None)
}

/// Passes before anything is measured: UCX's fragments are pinned after some ten copies each, and a process that
/// pins copies nothing meanwhile, as on silicon.
const WARM_UP: usize = 14;

/// Messages are measured up to this many times, until others had no more of the processors than this.
const REPEATS: usize = 3;
const QUIET: f64 = 0.2;

/// Messages of many sizes, 16 outstanding, over a working set: the best of several runs.
fn rotate(
    bench: &Workbench,
    (ucx, spec, lenient): (Ucx, &str, &str),
    (ops, mem): (&str, &str),
    sizes: &[usize],
    environment: &Environment,
) -> Result<(Figures, f64)> {
    let list: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let (set, warm_up) = if sizes.len() == 1 { (16, 0) } else { (128, WARM_UP) };
    let words = format!(
        "rotate --plain --ops {ops} --mem {mem} --set {set}M --warm-up {warm_up} --sizes {}",
        list.join(",")
    );
    let mut best = Figures::new();
    let mut repeats = 0;
    loop {
        repeats += 1;
        let work = Work::start(format!("UCX {}, {ops}, {mem}", ucx.name()));
        let watch = Watch::start()?;
        let tool = bench.client(ucx, &device(spec, lenient), &words).limit(LIMIT);
        let end = tool.envs(environment).run();
        ensure!(end.success(), "{}", end.report());
        work.done("");
        for (name, value) in figures::parse(&end.stdout)? {
            best.entry(name).and_modify(|best| *best = best.max(value)).or_insert(value);
        }
        if repeats == REPEATS || sizes.len() == 1 || watch.others()? <= QUIET {
            return Ok((best, link(&end.stderr)?.0));
        }
    }
}

fn sizes(quick: bool) -> &'static [usize] {
    if quick { &[MIB] } else { &[MIB, 4 * MIB, 16 * MIB] }
}

/// `bench ipc --model`: between two processes whose driver imports dma-bufs.
pub(super) fn ipc(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let run = (Ucx::V1_22, spec, "import,ordered,unpinned");
    let (figures, link) =
        rotate(&bench, run, ("tag,am,put,get", "gaudi:gaudi"), sizes(quick), STAGING)?;
    let mut records = vec![follows(get(&figures, &format!("put memcpy {MIB}"))?, link)];
    for op in OPS {
        for size in sizes(quick) {
            let value = get(&figures, &format!("{op} {size}"))?;
            let title = named(format!("{op}, {}, gaudi_ipc", units::size(*size as u64)));
            records.push(Record::at_least(title, value, "GB/s", link, Some(OF_LINK)));
        }
    }
    Ok(records)
}

/// `bench cliffs --model`: between two processes, staged through host memory.
///
/// Puts and gets twice: emulated, which is UCX's default, and pipelined, as `docs/performance.md` advises where no program
/// gets host memory into Gaudi memory. That get may hang when it is pipelined, and is left out.
pub(super) fn cliffs(repo: &Repo, spec: &str, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let mut records = Vec::new();
    let run = (Ucx::V1_22, spec, "ordered,unpinned");
    let pipelined = [STAGING, &[("UCX_RMA_PPLN_ENABLE", "y")]].concat();
    for mem in ["host:gaudi", "gaudi:host", "gaudi:gaudi"] {
        let gets: &[&str] = if mem == "host:gaudi" { &["put"] } else { &["put", "get"] };
        let ways: [(_, &[&str], _, &Environment); 3] = [
            ("staged", &["tag", "am"], sizes(quick), STAGING),
            ("pipelined", gets, sizes(quick), &pipelined),
            // Slow, and the share is the same at all sizes.
            ("emulated", &["put", "get"], &[MIB], STAGING),
        ];
        for (way, ops, sizes, environment) in ways {
            let (figures, link) = rotate(&bench, run, (&ops.join(","), mem), sizes, environment)?;
            if records.is_empty() {
                records.push(follows(get(&figures, &format!("tag memcpy {MIB}"))?, link));
            }
            records.extend(shares(&figures, (ops, mem, way), sizes, link)?);
        }
    }
    Ok(records)
}

fn shares(
    figures: &Figures,
    (ops, mem, way): (&[&str], &str, &str),
    sizes: &[usize],
    link: f64,
) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for op in ops {
        for size in sizes {
            let value = get(figures, &format!("{op} {size}"))?;
            let target = match mem {
                "gaudi:gaudi" => (*size >= 4 * MIB).then_some(STAGED),
                _ => Some(OF_LINK),
            };
            let size = units::size(*size as u64);
            let title = named(format!("{op} {mem}, {size}, {way}"));
            records.push(Record::at_least(title, value, "GB/s", link, target));
        }
    }
    Ok(records)
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
        let mut figures = Figures::new();
        for op in OPS {
            figures.insert(format!("{op} {MIB}"), 0.6);
            figures.insert(format!("{op} {}", 4 * MIB), 0.6);
        }
        let met = |mem| -> Vec<Option<bool>> {
            let records = shares(&figures, (&OPS, mem, "staged"), &[MIB, 4 * MIB], 0.65);
            let records = records.expect("all there");
            records.iter().take(2).map(|record| record.met).collect()
        };
        assert_eq!(met("host:gaudi"), [Some(false), Some(false)], "0.92 of the link");
        assert_eq!(met("gaudi:gaudi"), [None, Some(true)]);
    }
}
