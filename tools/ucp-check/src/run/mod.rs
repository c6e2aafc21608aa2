//! The subcommands: who runs which cases, in how many processes, threads and copies of UCX.

pub mod asleep;
pub mod atomics;
pub mod costs;
pub mod cuda_dmabuf;
pub mod environment;
mod group;
pub mod loopback;
pub mod memory;
pub mod pair;
pub mod peer_errors;
mod process;
pub mod reconnect;
pub mod rotate;
pub mod soak;

use crate::client::Client;
use crate::cuda::Cuda;
use crate::matrix::Plan;
use crate::ucp::{Memory, Ucx, WorkerOptions};
use crate::watchdog::Watchdog;
use anyhow::Result;
use group::Member;
pub use group::Side;
use serde::{Deserialize, Serialize};

/// What one process of a group does, as it is handed over on its command line.
#[derive(Serialize, Deserialize)]
enum Job {
    Cases(pair::Mesh),
    PeerErrors(peer_errors::Scenario),
    Reconnect(reconnect::Rounds),
    Rotate(rotate::Rotation),
    Atomics(atomics::Job),
}

impl Job {
    fn run(&self, member: Member) -> Result<()> {
        match self {
            Job::Cases(mesh) => pair::side(mesh, member),
            Job::PeerErrors(scenario) => peer_errors::side(scenario, member),
            Job::Reconnect(rounds) => reconnect::side(rounds, member),
            Job::Rotate(rotation) => rotate::side(rotation, member),
            Job::Atomics(atomics) => atomics::side(atomics, member),
        }
    }
}

/// The client that a plan asks for. CUDA is initialized before UCX, as applications do.
fn client(
    plan: &Plan,
    rank: u8,
    ucx: &'static Ucx,
    multi: bool,
    watchdog: &Watchdog,
) -> Result<Client> {
    if plan.has(Memory::Cuda, rank) {
        watchdog.step("cuInit");
        Cuda::get()?;
    }
    Client::new(ucx, plan.features, WorkerOptions { multi, hint: plan.hint }, watchdog)
}
