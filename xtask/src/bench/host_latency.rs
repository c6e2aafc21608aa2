//! `bench host-latency`: the plugin's cost for a program that only moves host memory between two processes.
//!
//! * Stock `ucx_perftest -t tag_lat`: without the plugin (the floor), with the plugin but no driver library, and with a
//!   Gaudi that is not used.
//! * Our client: without the plugin (the floor), and with a Gaudi in use. It moves Gaudi memory first, then host memory
//!   with the card still open. `ucx_perftest` cannot do both in one context.

use anyhow::{Context, Result};
use e2e::{Device, Perftest, SoftNode, Ucx, Workbench};
use ucp_check::measure::Record;

use super::copy::in_turns;
use crate::progress::Work;
use crate::repo::Repo;

const ROUNDS: usize = 9;
const SIZES: [usize; 2] = [8, 4096];

/// The target for host-only traffic with the plugin loaded: within 1 %. With a Gaudi in use the cost is reported, but
/// has no limit: UCX then has to check every pointer.
const TARGET: f64 = 1.01;

/// A program, and whether it loads the plugin and has a device.
struct Variant {
    name: &'static str,
    perftest: bool,
    plugin: bool,
    device: bool,
}

#[rustfmt::skip] // a table
const VARIANTS: [Variant; 5] = [
    Variant { name: "ucx_perftest, plugin absent", perftest: true, plugin: false, device: false },
    Variant { name: "ucx_perftest, plugin loaded, no driver library", perftest: true, plugin: true, device: false },
    Variant { name: "ucx_perftest, plugin loaded, Gaudi there and unused", perftest: true, plugin: true, device: true },
    Variant { name: "ucp-check, plugin absent", perftest: false, plugin: false, device: false },
    Variant { name: "ucp-check, Gaudi in use", perftest: false, plugin: true, device: true },
];

impl Variant {
    /// Median latency of one run in microseconds.
    fn measure(&self, bench: &Workbench, device: &Device, size: usize, quick: bool) -> Result<f64> {
        let device = if self.device { device } else { &Device::None };
        if self.perftest {
            let (count, warm_up) = if quick { (100, 10) } else { (100_000, 10_000) };
            let test = Perftest::new(bench, "tag_lat", size).iterations(count, warm_up);
            let test = if self.plugin { test.plugin() } else { test };
            return Ok(test.device(device).run()?.figures()?.latency_us);
        }
        let mem = if self.plugin { "gaudi:gaudi,host:host" } else { "host:host" };
        let words = format!("pair --plain --ops tag --iters 500 --sizes {size} --mem {mem}");
        let tool = bench.ucp_check(Ucx::V1_22).words(&words).device(device);
        let rows = if self.plugin { tool.plugin() } else { tool }.rows()?;
        let host = rows.iter().filter(|row| row.src == "host" && row.dst == "host");
        // The better of the two directions.
        let best = host.filter_map(|row| row.latency_us).min_by(f64::total_cmp);
        best.context("no time was measured")
    }
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::hardware_or(SoftNode::lenient());
    let rounds = if quick { 1 } else { ROUNDS };
    let mut records = Vec::new();
    for size in SIZES {
        let work = Work::start(format!("host tag latency, {size} B, {rounds} rounds"));
        let times = in_turns(&VARIANTS, rounds, |variant| {
            variant.measure(&bench, &device, size, quick).with_context(|| variant.name)
        })?;
        work.done("");
        // Not the median: other load on the machine can make a round take three times as long.
        let least = |times: Vec<f64>| times.into_iter().fold(f64::INFINITY, f64::min);
        let times: Vec<f64> = times.into_iter().map(least).collect();
        for (variant, time) in VARIANTS.iter().zip(&times) {
            let name = format!("host tag latency {size} B: {}", variant.name);
            let floor = if variant.perftest { times[0] } else { times[3] };
            let target = (variant.perftest && variant.plugin).then_some(TARGET);
            records.push(Record::new(name, *time, "µs", floor, target));
        }
    }
    Ok(records)
}
