//! `bench copy` and `bench guest`: copies through UCT on stock UCX, and the first `ucp_init` of a process with and
//! without the plugin; copies as a guest of a framework, compared with those on a card of our own.

use anyhow::Result;
use e2e::{Device, SoftNode, Tool, Ucx, Workbench};
use ucp_check::measure::{Record, median};

use super::runs;
use crate::progress::Work;
use crate::repo::Repo;

/// Milliseconds that `ucp_init` may take longer with the plugin.
const INIT_TARGET_MS: f64 = 5.0;
/// Processes that do nothing but `ucp_init`, of each kind.
const INIT_ROUNDS: usize = 9;

fn client(bench: &Workbench, device: &Device, quick: bool) -> Tool {
    let words = if quick { "measure copies --quick" } else { "measure copies" };
    bench.ucp_check(Ucx::V1_22).words(words).plugin().device(device)
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::hardware_or(SoftNode::lenient());
    let mut records = runs::measure("copies through UCT", client(&bench, &device, quick))?;
    records.extend(init(&bench, &device, if quick { 1 } else { INIT_ROUNDS })?);
    Ok(records)
}

/// `ucp_init` without the plugin, with it but without a device, and with a device that is not used.
fn init(bench: &Workbench, device: &Device, rounds: usize) -> Result<[Record; 2]> {
    let client = || bench.ucp_check(Ucx::V1_22).words("measure init");
    let variants = [client(), client().plugin(), client().plugin().device(device)];
    let work = Work::start(format!("ucp_init, {rounds} rounds"));
    let times =
        in_turns(&variants, rounds, |tool| runs::value(&runs::records(tool.clone())?, "ucp_init"))?;
    work.done("");
    let times: Vec<f64> = times.into_iter().map(median).collect();
    let floor = times[0];
    Ok([(1, "no driver library"), (2, "Gaudi there and unused")].map(|(at, what)| {
        let name = format!("ucp_init, plugin loaded, {what} (at most {INIT_TARGET_MS} ms longer)");
        Record::new(name, times[at], "ms", floor, (floor + INIT_TARGET_MS) / floor)
    }))
}

/// The samples of each variant. The variants alternate, in another order each round, so that none always runs first.
pub(super) fn in_turns<T>(
    variants: &[T],
    rounds: usize,
    measure: impl Fn(&T) -> Result<f64>,
) -> Result<Vec<Vec<f64>>> {
    let mut samples = vec![Vec::new(); variants.len()];
    for round in 0..rounds {
        for turn in 0..variants.len() {
            let index = (turn + round) % variants.len();
            samples[index].push(measure(&variants[index])?);
        }
    }
    Ok(samples)
}

/// The cost of being a guest, where all copies go through the framework's streams and bounce buffers.
pub(super) fn guest(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::software();
    let owner = runs::measure("copies on a card of our own", client(&bench, &device, quick))?;
    let framework = client(&bench, &device, quick).libraries(repo.layout().soft_synapse());
    let framework = framework.env("UCP_CHECK_FRAMEWORK", "acquired");
    let guest = runs::measure("copies as a guest of Synapse", framework)?;
    let compare = |guest: &Record| {
        let what = guest.name.split(", floor").next().unwrap_or_default();
        Ok(guest.against(format!("guest, {what}"), runs::value(&owner, &guest.name)?, None))
    };
    guest.iter().map(compare).collect()
}
