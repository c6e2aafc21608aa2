//! `bench nixl`: GB/s of NIXL between two processes, Gaudi memory on both sides: many small blocks, many blocks of a KV
//! cache, one large one (`examples/kv_cache.py`). NIXL's progress threads are on, as they are by default.
//!
//! The floor is import on the same kind of card: the default card pins host pages as a driver does, and is slower for that.

use anyhow::{Context, Result};
use e2e::nixl::{block_us, kv_cache};
use e2e::rdma::Fabric;
use e2e::{Device, Ucx, Workbench};
use ucp_check::measure::Record;

use super::quiet;
use crate::progress::Work;
use crate::repo::Repo;

/// A machine, and how bytes travel on it.
struct Machine {
    name: &'static str,
    /// The points in which its card is more lenient than one with an upstream driver.
    lenient: &'static str,
    over_hca: bool,
    /// Whether bytes go through the relay.
    relays: bool,
}

/// Grouped by kind of card: each group begins with import, its floor.
#[rustfmt::skip] // a table
const MACHINES: [&[Machine]; 2] = [
    &[
        Machine { name: "import, lenient card", lenient: "import,ordered,unpinned", over_hca: false, relays: false },
        Machine { name: "relay, lenient card", lenient: "ordered,unpinned", over_hca: false, relays: true },
        Machine { name: "software HCA, lenient card", lenient: "ordered,unpinned", over_hca: true, relays: false },
    ],
    &[
        Machine { name: "import, default card", lenient: "import", over_hca: false, relays: false },
        Machine { name: "relay, default card", lenient: "", over_hca: false, relays: true },
    ],
];

/// Blocks of a transfer, and how many bytes each has.
const TRANSFERS: [(u64, u64); 3] = [(1000, 4 << 10), (2000, 45 << 10), (1, 64 << 20)];
const OPERATIONS: [&str; 2] = ["WRITE", "READ"];
/// The target: the relay's share of import's bandwidth, except for blocks of 4 KiB.
const OF_IMPORT: f64 = 0.5;

/// Transfers per run, of which the fastest counts; and the number of runs if other programs use the processors.
const ROUNDS: usize = 7;
const REPEATS: usize = 2;

impl Machine {
    /// GB/s.
    fn measure(&self, operation: &str, (blocks, bytes): (u64, u64), rounds: usize) -> Result<f64> {
        let words = format!(
            "--layers 1 --blocks {blocks} --block-bytes {bytes} --operation {operation} --rounds {rounds}"
        );
        let device = Device::cards(2).lenient(self.lenient);
        let tool = kv_cache(&device, &words).context("this machine's Python cannot load NIXL")?;
        let fabric = Fabric::new();
        let tool = match self.over_hca {
            true => fabric.under(tool).env("UCX_TLS", "rc,gaudi_cpy"),
            false => tool,
        };
        Ok(bytes as f64 / block_us(&tool.run().ok()) / 1e3)
    }
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    Workbench::ready(repo.layout().clone(), &[Ucx::Nixl])?;
    let transfers = if quick { &[(100, 4 << 10)][..] } else { &TRANSFERS };
    let (rounds, repeats) = if quick { (1, 1) } else { (ROUNDS, REPEATS) };
    let mut records = Vec::new();
    for operation in OPERATIONS {
        for &(blocks, bytes) in transfers {
            let what = match blocks {
                1 => format!("{operation}, one of {} MiB", bytes >> 20),
                _ => format!("{operation}, {blocks} of {} KiB", bytes >> 10),
            };
            for machines in MACHINES {
                let mut import = None;
                for machine in machines {
                    let work = Work::start(format!("{what}, {}", machine.name));
                    let mut best = 0.0_f64;
                    quiet::repeat(repeats, || {
                        best = best.max(machine.measure(operation, (blocks, bytes), rounds)?);
                        Ok(())
                    })?;
                    work.done(&format!("{best:.2} GB/s"));
                    let floor = *import.get_or_insert(best);
                    let target = (machine.relays && bytes > 4 << 10).then_some(OF_IMPORT);
                    let name = format!("{what}, {}, floor: import", machine.name);
                    records.push(Record::new(name, best, "GB/s", floor, target));
                }
            }
        }
    }
    Ok(records)
}
