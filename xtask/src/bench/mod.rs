//! `cargo xtask bench NAME`: measures something and a floor in the same run; prints a table and,
//! on request, writes JSON or CSV.

mod blocks;
mod choice;
mod cliffs;
mod copy;
mod figures;
mod guest;
mod host_latency;
mod ipc;
mod memory;
pub(crate) mod model;
mod pairs;
mod processor_time;
mod quiet;
mod rcache;
mod rdma;
mod record;
pub(crate) mod report;

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use e2e::Ucx;

use crate::dist::{self, Profile};
use crate::repo::Repo;
use crate::setup;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    /// What a block of a KV cache costs with NIXL, by gaudi_ipc and by the software HCA
    Blocks,
    /// The protocols that UCP chooses compared with those forced by hand (with `--model`)
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
            Name::Cliffs | Name::Pairs => &Ucx::ALL,
            Name::Choice | Name::Copy | Name::Guest | Name::HostLatency | Name::Ipc => {
                &[Ucx::V1_22]
            }
            Name::Blocks | Name::ProcessorTime | Name::Rdma => &[Ucx::Nixl],
            Name::Memory | Name::Rcache | Name::SoftGaudi => &[],
        }
    }

    fn has_quick(self) -> bool {
        !matches!(self, Name::HostLatency | Name::Memory | Name::Rcache | Name::SoftGaudi)
    }
}

/// What the command line asks for besides the name.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Options<'a> {
    /// Where results go as JSON.
    pub(crate) json: Option<&'a Path>,
    /// Where results go as CSV.
    pub(crate) csv: Option<&'a Path>,
    /// Only show that it runs.
    pub(crate) quick: bool,
    /// Measure what is there already: nothing is fetched or built.
    pub(crate) prebuilt: bool,
    /// Where `pairs` writes UCX's tables of protocols.
    pub(crate) logs: Option<&'a Path>,
    /// On a software card with the times of a real one.
    pub(crate) model: Option<&'a str>,
}

/// Measures, prints, writes.
pub(crate) fn run(repo: &Repo, name: Name, options: Options<'_>) -> Result<()> {
    let Options { json, csv, quick, prebuilt, logs, model } = options;
    ensure!(
        !quick || name.has_quick(),
        "--quick is not for `host-latency`, `memory`, `rcache` and `soft-gaudi`"
    );
    ensure!(logs.is_none() || name == Name::Pairs, "--logs is for `bench pairs`");
    let has_model = matches!(name, Name::Choice | Name::Cliffs | Name::Copy | Name::Ipc);
    ensure!(model.is_none() || has_model, "--model is for `bench choice`, `copy`, `cliffs`, `ipc`");
    ensure!(model.is_some() || name != Name::Choice, "`bench choice` needs --model");
    if name == Name::SoftGaudi {
        ensure!(csv.is_none(), "`bench soft-gaudi` writes JSON only");
        // The crate's own bench, which prints and writes by itself.
        return soft_gaudi(repo, json);
    }
    // A smoke test runs on what was fetched and built for the tests.
    if !quick && !prebuilt {
        setup::fetch(repo, name.ucx())?;
        dist::build(repo, Profile::Release)?;
    }
    if let Some(spec) = model {
        eprintln!("device: software Gaudi with modelled times ({spec}); no card involved");
    }
    let mut records = match (name, model) {
        (Name::Copy, Some(spec)) => model::copy(repo, spec, quick)?,
        (Name::Choice, Some(spec)) => choice::run(repo, spec, quick)?,
        (Name::Ipc, Some(spec)) => model::ipc(repo, spec, quick)?,
        (_, Some(spec)) => model::cliffs(repo, spec, quick)?,
        (name, None) => measure(repo, name, (quick, logs))?,
    };
    records.iter_mut().for_each(|record| record.model = model.map(str::to_owned));
    // A map of hundreds of figures was printed as such; what has a target is shown again.
    let shown: Vec<record::Record> = match name {
        Name::Cliffs | Name::Pairs => {
            records.iter().filter(|record| record.target.is_some()).cloned().collect()
        }
        _ => records.clone(),
    };
    println!("{}", record::table(&shown));
    if let Some(path) = json {
        write(path, serde_json::to_string_pretty(&records).context("cannot write JSON")? + "\n")?;
    }
    if let Some(path) = csv {
        write(path, record::csv(&records))?;
    }
    Ok(())
}

/// On the device there is.
fn measure(
    repo: &Repo,
    name: Name,
    (quick, logs): (bool, Option<&Path>),
) -> Result<Vec<record::Record>> {
    Ok(match name {
        Name::Blocks => blocks::run(repo, quick)?,
        Name::Choice => Vec::new(),
        Name::Cliffs => cliffs::run(repo, quick)?,
        Name::Copy => copy::run(repo, quick)?,
        Name::Guest => guest::run(repo, quick)?,
        Name::HostLatency => host_latency::run(repo)?,
        Name::Ipc => ipc::run(repo, quick)?,
        Name::Memory => memory::run(repo)?,
        Name::Pairs => pairs::run(repo, logs, quick)?,
        Name::ProcessorTime => processor_time::run(repo, quick)?,
        Name::Rcache => rcache::run(repo)?,
        Name::Rdma => rdma::run(repo, quick)?,
        Name::SoftGaudi => Vec::new(),
    })
}

fn write(path: &Path, text: String) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("written: {}", path.display());
    Ok(())
}

fn soft_gaudi(repo: &Repo, json: Option<&Path>) -> Result<()> {
    let mut command = repo.cargo();
    command.args(["bench", "--quiet", "--locked", "--package", "soft-gaudi", "--bench", "copies"]);
    if let Some(path) = json {
        // The bench runs in the folder of its crate.
        let path = std::path::absolute(path).context("cannot make the path absolute")?;
        command.args(["--", "--json"]).arg(path);
    }
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "the bench of soft-gaudi: {status}");
    Ok(())
}
