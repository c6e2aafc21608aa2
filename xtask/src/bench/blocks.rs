//! The cost per block when NIXL moves many blocks in one transfer, as serving does with a KV cache
//! (`examples/kv_cache.py`): by gaudi_ipc, with import and by relay, and by the software HCA. The floor is the same
//! bytes in few large blocks.

use anyhow::{Result, ensure};
use e2e::nixl::{block_us, kv_cache};
use e2e::rdma::Fabric;
use e2e::{Device, SoftNode, Ucx, Workbench};
use ucp_check::measure::Record;

use crate::progress::Work;
use crate::repo::Repo;

/// Blocks in one transfer.
struct Blocks {
    count: u64,
    /// Blocks of the cache, of which some are moved several times.
    cache: u64,
    bytes: u64,
    /// How often; the best counts.
    runs: usize,
}

const SMALL: Blocks = Blocks { count: 10_000, cache: 10_000, bytes: 4096, runs: 3 };
/// A run takes some seconds, so few runs are enough.
const MANY: Blocks = Blocks { count: 100_000, cache: 2000, bytes: 46_080, runs: 2 };
/// For a card with modelled times, which is slower.
const SOME: Blocks = Blocks { count: 5000, cache: 1000, bytes: 46_080, runs: 1 };
const QUICK: Blocks = Blocks { count: 200, cache: 200, bytes: 4096, runs: 1 };

/// The target: the cost of a block of 45 KiB over a relay, compared with its share of one large block.
const OF_ONE_BLOCK: f64 = 1.3;

/// Times of a Gaudi2, stretched so that two processors can keep up.
const MODEL: &str = "gaudi2,slow=20";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Ipc,
    ModelledIpc,
    Relay,
    ModelledRelay,
    Rdma,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Ipc => "import",
            Way::ModelledIpc => "import, modelled card",
            Way::Relay => "relay",
            Way::ModelledRelay => "relay, modelled card",
            Way::Rdma => "rc",
        }
    }

    /// Microseconds per block; `None` if NIXL does not load.
    fn measure(self, blocks: &Blocks) -> Option<f64> {
        let node = SoftNode::lenient().with("SOFT_GAUDI_DEVICES", "2");
        let node = match self {
            Way::ModelledIpc | Way::ModelledRelay => {
                node.with("SOFT_GAUDI_MODEL", MODEL).with("SOFT_GAUDI_CLOSE_TIME", "10")
            }
            _ => node,
        };
        let node = match self {
            Way::Relay | Way::ModelledRelay => node.with("SOFT_GAUDI_LENIENT", "ordered,unpinned"),
            _ => node,
        };
        let words = format!(
            "--layers 1 --blocks {} --block-bytes {} --descriptors {}",
            blocks.cache, blocks.bytes, blocks.count
        );
        let (device, fabric) = (Device::Software(node), Fabric::new());
        let tool = kv_cache(&device, &words)?;
        let tool = match self {
            Way::Rdma => fabric.under(tool).env("UCX_TLS", "rc,gaudi_cpy"),
            _ => tool,
        };
        Some(block_us(&tool.run().ok()))
    }
}

fn best(way: Way, blocks: &Blocks) -> Option<f64> {
    let measured: Option<Vec<f64>> = (0..blocks.runs).map(|_| way.measure(blocks)).collect();
    measured?.into_iter().reduce(f64::min)
}

pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    Workbench::ready(repo.layout().clone(), &[Ucx::Nixl])?;
    let cases: &[(Way, Blocks)] = if quick {
        &[(Way::Ipc, QUICK), (Way::Relay, QUICK), (Way::Rdma, QUICK)]
    } else {
        &[
            (Way::Ipc, SMALL),
            (Way::Ipc, MANY),
            (Way::Relay, SMALL),
            (Way::Relay, MANY),
            (Way::Rdma, SMALL),
            (Way::Rdma, MANY),
            (Way::ModelledIpc, SMALL),
            (Way::ModelledIpc, SOME),
            (Way::ModelledRelay, SMALL),
            (Way::ModelledRelay, SOME),
        ]
    };
    let mut records = Vec::new();
    for (way, blocks) in cases {
        let kib = blocks.bytes / 1024;
        let work = Work::start(format!("{} blocks of {kib} KiB, {}", blocks.count, way.name()));
        // The same number of bytes: the whole cache as one block, repeatedly.
        let whole = blocks.cache * blocks.bytes;
        let count = (blocks.count / blocks.cache).max(1);
        let few = Blocks { count, cache: 1, bytes: whole, runs: blocks.runs };
        let (each, whole) = (best(*way, blocks), best(*way, &few));
        ensure!(each.is_some() && whole.is_some(), "this machine's Python cannot load NIXL");
        let (each, whole) = (each.unwrap_or(0.0), whole.unwrap_or(0.0));
        let name = format!(
            "{}, {} blocks of {kib} KiB, time of a block, floor: one large block",
            way.name(),
            blocks.count
        );
        let share = whole / blocks.cache as f64;
        work.done(&format!("{each:.1} µs a block, {share:.1} µs of one large block"));
        let relays = matches!(way, Way::Relay | Way::ModelledRelay);
        let target = (relays && blocks.bytes == MANY.bytes).then_some(OF_ONE_BLOCK);
        records.push(Record::new(name, each, "µs", share, target));
    }
    Ok(records)
}
