//! The subcommands: who runs which cases, in how many processes, threads and copies of UCX.

pub mod alloc;
pub mod asleep;
pub mod atomics;
pub mod costs;
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
use crate::matrix::Plan;
use crate::ucp::{Ucx, WorkerOptions};
use crate::watchdog::Watchdog;
use anyhow::Result;
use group::Member;
use serde::{Deserialize, Serialize};

/// What one process of a group does, as it is handed over on its command line.
#[derive(Serialize, Deserialize)]
pub(crate) enum Job {
    Cases(pair::Mesh),
    PeerErrors(peer_errors::Scenario),
    Reconnect(reconnect::Rounds),
    Rotate(rotate::Rotation),
    Atomics(atomics::Job),
}

impl Job {
    /// Seconds that one of its steps may take.
    fn timeout_s(&self) -> f64 {
        match self {
            Job::Cases(mesh) => mesh.plan.timeout_s,
            Job::PeerErrors(scenario) => scenario.plan.timeout_s,
            Job::Reconnect(rounds) => rounds.plan.timeout_s,
            Job::Rotate(rotation) => rotation.plan.timeout_s,
            Job::Atomics(atomics) => atomics.timeout_s,
        }
    }

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

pub use group::Side;

/// The client that a plan asks for.
fn client(plan: &Plan, ucx: &'static Ucx, multi: bool, watchdog: &Watchdog) -> Result<Client> {
    Client::new(ucx, plan.features, WorkerOptions { multi, hint: plan.hint }, watchdog)
}
