//! `cargo xtask bench NAME`: runs `ucp-check` to measure something, with a floor in the same run; prints a table and,
//! on request, writes JSON.

mod blocks;
mod choice;
mod copy;
mod host_latency;
mod ipc;
mod matrix;
pub(crate) mod model;
mod mpi;
mod nixl;
mod one_sided;
mod plot;
mod processor_time;
mod quiet;
mod rdma;
pub(crate) mod report;
mod runs;

use std::path::Path;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;
use e2e::{Device, SoftNode, Ucx, Workbench};
use ucp_check::measure::Record;

use crate::dist::{self, Profile};
use crate::repo::Repo;
use crate::{json, setup};

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// What a block of a KV cache costs with NIXL: by import, by relay and by the software HCA
    Blocks,
    /// The protocols that UCP chooses compared with those forced by hand (always with `--model`)
    Choice,
    /// Every operation between two processes with Gaudi memory staged: protocols and bandwidth
    Cliffs,
    /// Copies through UCT compared with memcpy, short ones with the driver alone, ucp_init with and without the plugin
    Copy,
    /// Copies as a guest of Synapse compared with those on a card of our own (software Synapse)
    Guest,
    /// Host-only latency of stock UCX with the plugin absent, loaded, and in use
    HostLatency,
    /// Gaudi memory between two processes by gaudi_ipc, compared with cma, posix and memcpy
    Ipc,
    /// Allocation, detection and export with few and many live allocations
    Memory,
    /// Allreduce and Alltoall of Open MPI with Gaudi buffers, compared with copies to host memory and back by hand
    Mpi,
    /// Blocks and large transfers with NIXL: import, relay and the software HCA, on the lenient and on the default card
    Nixl,
    /// Put and get between two processes: relayed, imported, by RDMA, pipelined, emulated (always with `--model`)
    OneSided,
    /// Every operation between host, Gaudi and CUDA memory of two processes
    Pairs,
    /// Processor seconds per GB: RDMA, gaudi_ipc and staged, compared with host memory over the same transport
    ProcessorTime,
    /// The registration cache: hits with few and many regions, registering again, a steady loop
    Rcache,
    /// RDMA on Gaudi memory compared with host memory, staging, and one rail (software HCA, modelled link)
    Rdma,
    /// The software card itself: latency and bandwidth of submissions compared with memcpy and a futex
    SoftGaudi,
}

impl Name {
    /// The stock UCXes it runs on.
    fn ucx(self) -> &'static [Ucx] {
        match self {
            Name::Cliffs | Name::OneSided | Name::Pairs => &Ucx::ALL,
            Name::Choice | Name::Copy | Name::Guest | Name::HostLatency | Name::Ipc | Name::Mpi => {
                &[Ucx::V1_22]
            }
            Name::Blocks | Name::Nixl | Name::ProcessorTime | Name::Rdma => &[Ucx::Nixl],
            Name::Memory | Name::Rcache | Name::SoftGaudi => &[],
        }
    }

    /// The model for benches that only run on a modelled card.
    fn model(self) -> Option<&'static str> {
        match self {
            Name::Choice => Some(choice::DEFAULT),
            Name::OneSided => Some(one_sided::DEFAULT),
            _ => None,
        }
    }

    fn has_quick(self) -> bool {
        !matches!(self, Name::Memory | Name::Rcache | Name::SoftGaudi)
    }
}

/// Further parameters from the command line.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Options<'a> {
    /// Where results go as JSON.
    pub(crate) json: Option<&'a Path>,
    /// Only shows that it runs.
    pub(crate) quick: bool,
    /// Measures what is there already: fetches and builds nothing.
    pub(crate) prebuilt: bool,
    /// Uses a software card with the times of a real one.
    pub(crate) model: Option<&'a str>,
}

/// Measures, prints, writes.
pub(crate) fn run(repo: &Repo, name: Name, options: Options<'_>) -> Result<()> {
    let Options { json, quick, prebuilt, model } = options;
    ensure!(!quick || name.has_quick(), "--quick is not for `memory`, `rcache` and `soft-gaudi`");
    let model = model.or(name.model());
    let has_model =
        name.model().is_some() || matches!(name, Name::Cliffs | Name::Copy | Name::Ipc | Name::Mpi);
    ensure!(
        model.is_none() || has_model,
        "--model is for `bench choice`, `copy`, `cliffs`, `ipc`, `mpi`, `one-sided`"
    );
    // A smoke test uses what was fetched and built for the tests.
    if !quick && !prebuilt {
        setup::fetch(repo, name.ucx())?;
        dist::build(repo, Profile::Shipped)?;
    }
    let device = Device::hardware_or(SoftNode::lenient());
    match model {
        Some(spec) => {
            eprintln!("device: software Gaudi with modelled times ({spec}); no card involved")
        }
        None => eprintln!("device: {}", device.title()),
    }
    if quick {
        eprintln!("quick: it shows that everything runs, the figures mean nothing");
    }
    let mut records = match (name, model) {
        (Name::Choice, Some(spec)) => choice::run(repo, spec, quick)?,
        (Name::OneSided, Some(spec)) => one_sided::run(repo, spec, quick)?,
        (Name::Mpi, model) => mpi::run(repo, model, quick)?,
        (Name::Copy, Some(spec)) => model::copy(repo, spec, quick)?,
        (Name::Ipc, Some(spec)) => model::ipc(repo, spec, quick)?,
        (_, Some(spec)) => model::cliffs(repo, spec, quick)?,
        (Name::Choice | Name::OneSided, None) => bail!("it has a model"),
        (Name::Blocks, None) => blocks::run(repo, quick)?,
        (Name::Cliffs, None) => matrix::CLIFFS.run(repo, quick)?,
        (Name::Copy, None) => copy::run(repo, quick)?,
        (Name::Guest, None) => copy::guest(repo, quick)?,
        (Name::HostLatency, None) => host_latency::run(repo, quick)?,
        (Name::Ipc, None) => ipc::run(repo, quick)?,
        (Name::Memory, None) => medians(repo, "memory", &device, 3)?,
        (Name::Nixl, None) => nixl::run(repo, quick)?,
        (Name::Pairs, None) => matrix::PAIRS.run(repo, quick)?,
        (Name::ProcessorTime, None) => processor_time::run(repo, quick)?,
        (Name::Rcache, None) => medians(repo, "rcache", &device, 5)?,
        (Name::Rdma, None) => rdma::run(repo, quick)?,
        (Name::SoftGaudi, None) => {
            let node = SoftNode::unique().with("SOFT_GAUDI_LENIENT", "ordered,unpinned");
            medians(repo, "card", &Device::Software(node), 1)?
        }
    };
    records.iter_mut().for_each(|record| record.model = model.map(str::to_owned));
    // The hundreds of figures of a map were printed already: show only those with a target again.
    let map = model.is_none() && matches!(name, Name::Cliffs | Name::Pairs);
    let shown = records.iter().filter(|record| !map || record.target.is_some()).cloned();
    println!("{}", report::terminal(&shown.collect::<Vec<_>>()));
    if let Some(path) = json {
        json::write(path, &records)?;
        eprintln!("written: {}", path.display());
    }
    Ok(())
}

/// The medians of several runs of `ucp-check measure WHAT`, which needs no UCX.
fn medians(repo: &Repo, what: &str, device: &Device, rounds: usize) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[])?;
    let tool = bench.ucp_check(Ucx::V1_22).words(&format!("measure {what}")).device(device);
    let round = |round| runs::measure(&format!("{what}, round {round} of {rounds}"), tool.clone());
    runs::medians(&(1..=rounds).map(round).collect::<Result<Vec<_>>>()?)
}
