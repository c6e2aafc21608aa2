//! Other processes of this program: started together, each with a job, connected to each other.

pub(crate) mod descriptors;
mod environment;
mod group;
mod meeting;

pub use environment::Environment;
pub(crate) use environment::setting;
pub(crate) use group::{Group, MOST, Member, Message, describe, succeeded};
pub use group::{STILL_RUNNING, Side};

use crate::client::Client;
use crate::cuda::Cuda;
use crate::matrix::Plan;
use crate::measure::{messages, sharing};
use crate::ucp::{Memory, Ucx, WorkerOptions};
use crate::verify::{atomics, endure, pair, peer_errors, reconnect, recover};
use crate::watchdog::Watchdog;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// The job of one process of a group, as passed on its command line.
#[derive(Serialize, Deserialize)]
pub(crate) enum Job {
    Cases(pair::Mesh),
    PeerErrors(peer_errors::Scenario),
    Reconnect(reconnect::Rounds),
    Recover(recover::Recovery),
    Endure(endure::Endurance),
    Messages(messages::Rotation),
    Sharing,
    Atomics(atomics::Job),
}

impl Job {
    fn run(&self, member: Member) -> Result<()> {
        match self {
            Job::Cases(mesh) => pair::side(mesh, member),
            Job::PeerErrors(scenario) => peer_errors::side(scenario, member),
            Job::Reconnect(rounds) => reconnect::side(rounds, member),
            Job::Recover(recovery) => recover::side(recovery, member),
            Job::Endure(endurance) => endure::side(endurance, member),
            Job::Messages(rotation) => messages::side(rotation, member),
            Job::Sharing => sharing::side(member),
            Job::Atomics(atomics) => atomics::side(atomics, member),
        }
    }
}

/// The client that a plan asks for. CUDA is initialized before UCX, as applications do.
pub(crate) fn client(
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
