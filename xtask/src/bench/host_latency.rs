//! What a program pays that never touches a Gaudi: host-to-host `tag_lat` of stock ucx_perftest
//! between two processes, with the plugin absent (the floor), loaded with and without a device to
//! find. The variants take turns, so that a noisy minute hits all of them.

use anyhow::{Context, Result};
use e2e::{Device, Perftest, Workbench};

use super::record::{Record, median};
use crate::progress::Work;
use crate::repo::Repo;

const ROUNDS: usize = 9;
const SIZES: [usize; 2] = [8, 4096];

/// Mission: host-only traffic within 1 % with the plugin loaded.
const TARGET: f64 = 1.01;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Absent,
    LoadedNoDevice,
    Loaded,
}

impl Variant {
    const ALL: [Variant; 3] = [Variant::Absent, Variant::LoadedNoDevice, Variant::Loaded];

    fn name(self) -> &'static str {
        match self {
            Variant::Absent => "plugin absent",
            Variant::LoadedNoDevice => "plugin loaded, no driver library",
            Variant::Loaded => "plugin loaded, Gaudi found and unused",
        }
    }

    fn apply(self, test: Perftest, device: &Device) -> Perftest {
        match self {
            Variant::Absent => test,
            Variant::LoadedNoDevice => test.plugin(),
            Variant::Loaded => test.plugin().device(device),
        }
    }
}

/// All variants at all sizes.
pub(super) fn run(repo: &Repo) -> Result<Vec<Record>> {
    let bench = Workbench::new(repo.layout().clone());
    let device = Device::hardware_or_software();
    eprintln!("device: {}", device.title());
    let mut records = Vec::new();
    for size in SIZES {
        let work = Work::start(format!("tag_lat, {size} B, {ROUNDS} rounds"));
        let mut samples = [const { Vec::new() }; Variant::ALL.len()];
        for round in 0..ROUNDS {
            for turn in 0..Variant::ALL.len() {
                // Another order each round: whoever runs first must not always be the same.
                let index = (turn + round) % Variant::ALL.len();
                let test = Perftest::new(&bench, "tag_lat", size).iterations(100_000, 10_000);
                let figures = Variant::ALL[index]
                    .apply(test, &device)
                    .run()
                    .and_then(|pair| pair.figures())
                    .with_context(|| Variant::ALL[index].name())?;
                samples[index].push(figures.latency_us);
            }
        }
        work.done("");
        let floor = median(&samples[0]);
        for (variant, samples) in Variant::ALL.iter().zip(&samples) {
            let target = (*variant != Variant::Absent).then_some(TARGET);
            let name = format!("host tag_lat {size} B, {}", variant.name());
            records.push(Record::at_most(name, median(samples), "µs", floor, target));
        }
    }
    Ok(records)
}
