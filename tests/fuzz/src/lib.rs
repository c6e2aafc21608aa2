//! Fuzz targets: one function for each input from outside. A target takes any bytes, and panics when a promise is
//! broken, for example if a message is accepted in part, or if memory changes that was not shared.
//!
//! The test `corpora` runs every input in `corpus/TARGET`, and mutations of them for some seconds, on any toolchain. `cargo xtask
//! fuzz` does the same for long, guided by coverage, with AddressSanitizer; `docs/results/fuzzing.md` has the totals.
//!
//! Parsers that no other crate uses are in a module `fuzzing` of their crate, behind a feature that only this crate enables.

mod card;
mod engine;
mod mutation;
mod relay;
mod tool;

use std::path::PathBuf;

pub use mutation::mutated;
pub use relay::answers as relay_answers;

/// Something to fuzz.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name on the command line, and of its corpus.
    pub name: &'static str,
    /// Takes any bytes.
    pub run: fn(&[u8]),
}

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}

/// All targets.
pub const TARGETS: &[Target] = &[
    // GAUDI_MAPPING_TABLE.
    target("mapping_table", engine::mapping_table),
    // Remote keys and addresses of gaudi_ipc; messages of leases and of relays.
    target("key", gaudi::share::fuzzing::key),
    target("lease", gaudi::share::fuzzing::lease),
    target("relay_message", gaudi::share::fuzzing::relay_message),
    // A hostile peer of the broker (sockets, rings, requests), and a hostile owner (answers to a relay).
    target("relay_peer", relay::peer),
    target("relay_owner", gaudi::share::fuzzing::relay_owner),
    // Choice of a card, variables of software devices, fault rules.
    target("settings", engine::settings),
    target("sysfs", engine::sysfs),
    // Packets in the command processor; command buffers on a software card, through the driver's C functions.
    target("packets", card::packets),
    target("command_stream", card::command_stream),
    // Frames between software HCAs, and a hostile peer of an HCA.
    target("verbs_frames", soft_rdma::fuzzing::frames),
    target("verbs_peer", soft_rdma::fuzzing::stream),
    // Files of UCX_GAUDI_TRACE.
    target("recording", cli::fuzzing::recording),
    // Files of explain --save, check-card --save and bench --save.
    target("report", cli::fuzzing::report),
    // Pages of counters.
    target("page", cli::fuzzing::page),
    // Logs of UCX, versions of Open MPI, the kernel's log.
    target("listing", tool::listing),
];

/// The folder with the inputs.
pub fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}
