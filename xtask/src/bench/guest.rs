//! Copies on the card of a framework (the software Synapse) in the same process, beside those on a card of our own:
//! what it costs to be a guest, all of whose copies go through the framework's streams and bounce buffers.

use anyhow::{Result, ensure};
use e2e::{Device, Tool, Ucx, Workbench};

use super::copy::{DIRECTIONS, SIZES, figures};
use super::figures::{Figures, get};
use super::record::Record;
use crate::progress::Work;
use crate::repo::Repo;
use crate::units;

/// What the terminal and the JSON file show; the floor is what an owner has.
fn records(guest: &Figures, owner: &Figures) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for (name, people) in DIRECTIONS {
        for size in SIZES {
            let both = |figures| get(figures, &format!("{name} {size}"));
            let title = format!("guest, {people}, {}, many outstanding", units::size(size));
            records.push(Record::at_least(title, both(guest)?, "GB/s", both(owner)?, None));
        }
        for size in SIZES {
            let both = |figures| get(figures, &format!("{name} alone {size}"));
            let title = format!("guest, {people}, {}, alone", units::size(size));
            records.push(Record::at_most(title, both(guest)?, "µs", both(owner)?, None));
        }
    }
    for name in ["put_short", "get_short"] {
        let title = format!("guest, {name}, 8 B");
        let (guest, owner) = (get(guest, name)?, get(owner, name)?);
        records.push(Record::at_most(title, guest, "ns", owner, None));
    }
    Ok(records)
}

/// Measures both; `quick` only shows that it runs.
pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::software();
    eprintln!("device: {} (the software Synapse; no card involved)", device.title());
    let words = if quick { "costs copies --quick" } else { "costs copies" };
    let client = || -> Tool { bench.ucp_check(Ucx::V1_22).words(words).plugin().device(&device) };
    let measure = |title: &str, tool: &Tool| {
        let work = Work::start(title.to_owned());
        let measured = figures(tool);
        work.done("");
        measured
    };
    let owner = measure("copies on a card of our own", &client())?;
    let framework =
        client().libraries(repo.layout().soft_synapse()).env("UCP_CHECK_FRAMEWORK", "acquired");
    let guest = measure("copies as a guest of Synapse", &framework)?;
    let records = records(&guest, &owner)?;
    ensure!(!records.is_empty(), "nothing was measured");
    Ok(records)
}
