//! What a program pays for the plugin when it moves host memory only, between two processes.
//!
//! * Stock `ucx_perftest -t tag_lat`, with the plugin absent (the floor), loaded without a driver
//!   library, and loaded with a Gaudi there and not used.
//! * Our client, with the plugin absent (the floor) and with a Gaudi in use: it moves Gaudi memory
//!   first, then host memory with the card still open. `ucx_perftest` cannot do both in one context.
//!
//! The variants take turns, so that a noisy minute hits all of them.

use anyhow::{Context, Result};
use e2e::{Device, Perftest, Ucx, Workbench};

use super::record::{Record, median};
use crate::progress::Work;
use crate::repo::Repo;

const ROUNDS: usize = 9;
const SIZES: [usize; 2] = [8, 4096];

/// Host-only traffic stays within 1 % with the plugin loaded. With a Gaudi in use the cost is
/// reported, not bounded: UCX then has to look at every pointer.
const TARGET: f64 = 1.01;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Absent,
    LoadedNoDevice,
    Loaded,
    ClientAbsent,
    ClientInUse,
}

impl Variant {
    const ALL: [Variant; 5] = [
        Variant::Absent,
        Variant::LoadedNoDevice,
        Variant::Loaded,
        Variant::ClientAbsent,
        Variant::ClientInUse,
    ];

    fn name(self) -> &'static str {
        match self {
            Variant::Absent => "ucx_perftest, plugin absent",
            Variant::LoadedNoDevice => "ucx_perftest, plugin loaded, no driver library",
            Variant::Loaded => "ucx_perftest, plugin loaded, Gaudi there and unused",
            Variant::ClientAbsent => "ucp-check, plugin absent",
            Variant::ClientInUse => "ucp-check, Gaudi in use",
        }
    }

    fn floor(self) -> Variant {
        match self {
            Variant::Absent | Variant::LoadedNoDevice | Variant::Loaded => Variant::Absent,
            Variant::ClientAbsent | Variant::ClientInUse => Variant::ClientAbsent,
        }
    }

    fn target(self) -> Option<f64> {
        matches!(self, Variant::LoadedNoDevice | Variant::Loaded).then_some(TARGET)
    }

    /// Median latency of one run in microseconds.
    fn measure(self, bench: &Workbench, device: &Device, size: usize) -> Result<f64> {
        let perftest = Perftest::new(bench, "tag_lat", size).iterations(100_000, 10_000);
        let perftest = match self {
            Variant::Absent => perftest,
            Variant::LoadedNoDevice => perftest.plugin(),
            Variant::Loaded => perftest.plugin().device(device),
            Variant::ClientAbsent => return client(bench, None, size),
            Variant::ClientInUse => return client(bench, Some(device), size),
        };
        Ok(perftest.run()?.figures()?.latency_us)
    }
}

/// Our client's host-to-host time, the better of the two directions.
fn client(bench: &Workbench, device: Option<&Device>, size: usize) -> Result<f64> {
    let client = bench.ucp_check(Ucx::V1_22).words("pair --plain --ops tag --iters 500 --sizes");
    let client = client.arg(size.to_string()).arg("--mem");
    let client = match device {
        None => client.arg("host:host"),
        Some(device) => client.arg("gaudi:gaudi,host:host").plugin().device(device),
    };
    client
        .rows()?
        .iter()
        .filter(|row| row.src == "host" && row.dst == "host")
        .filter_map(|row| row.latency_us)
        .min_by(f64::total_cmp)
        .context("no time was measured")
}

/// All variants at all sizes.
pub(super) fn run(repo: &Repo) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::hardware_or_software();
    eprintln!("device: {}", device.title());
    let mut records = Vec::new();
    for size in SIZES {
        let work = Work::start(format!("host tag latency, {size} B, {ROUNDS} rounds"));
        let mut samples = [const { Vec::new() }; Variant::ALL.len()];
        for round in 0..ROUNDS {
            for turn in 0..Variant::ALL.len() {
                // Another order each round, so that none always runs first.
                let index = (turn + round) % Variant::ALL.len();
                let variant = Variant::ALL[index];
                let sample = variant.measure(&bench, &device, size);
                samples[index].push(sample.with_context(|| variant.name())?);
            }
        }
        work.done("");
        let medians = Variant::ALL.map(|variant| median(&samples[variant as usize]));
        for variant in Variant::ALL {
            let name = format!("host tag latency {size} B: {}", variant.name());
            let (value, floor) = (medians[variant as usize], medians[variant.floor() as usize]);
            records.push(Record::at_most(name, value, "µs", floor, variant.target()));
        }
    }
    Ok(records)
}
