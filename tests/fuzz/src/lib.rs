//! Fuzz targets: what is read from outside, one function for each input. A target takes any bytes; it panics where a promise is
//! broken, such as a message that is understood only in part, or memory that changes though it was not shared.
//!
//! The test `corpora` runs every input in `corpus/TARGET` and some seconds of mutations of them, on any toolchain.
//! `cargo xtask fuzz` does the same for long, guided by coverage, with AddressSanitizer; `docs/results/fuzzing.md` has the totals.
//!
//! Parsers that no other crate uses are reached through a module `fuzzing` of theirs, behind a feature that only this crate turns on.

mod card;
mod engine;
mod mutation;
mod relay;
mod tool;

use std::path::PathBuf;

pub use mutation::mutated;

/// Something to fuzz.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What one types; its corpus has this name.
    pub name: &'static str,
    /// What it reads.
    pub about: &'static str,
    /// Takes any bytes.
    pub run: fn(&[u8]),
}

const fn target(name: &'static str, about: &'static str, run: fn(&[u8])) -> Target {
    Target { name, about, run }
}

/// All of them.
pub const TARGETS: &[Target] = &[
    target("mapping_table", "GAUDI_MAPPING_TABLE", engine::mapping_table),
    target("key", "remote keys and addresses of gaudi_ipc", gaudi::share::fuzzing::key),
    target("lease", "messages of leases", gaudi::share::fuzzing::lease),
    target("relay_message", "messages of relays", gaudi::share::fuzzing::relay_message),
    target("relay_peer", "a hostile peer at the broker: sockets, rings, requests", relay::peer),
    target(
        "relay_owner",
        "a hostile owner: answers to a relay",
        gaudi::share::fuzzing::relay_owner,
    ),
    target(
        "settings",
        "choice of a card, variables of software devices, fault rules",
        engine::settings,
    ),
    target("sysfs", "files of sysfs", engine::sysfs),
    target("packets", "packets in the command processor", card::packets),
    target(
        "command_stream",
        "command buffers on a software card, through the driver's C functions",
        card::command_stream,
    ),
    target("verbs_frames", "frames between software HCAs", soft_rdma::fuzzing::frames),
    target("verbs_peer", "a hostile peer of a software HCA", soft_rdma::fuzzing::stream),
    target("recording", "files of UCX_GAUDI_TRACE", cli::fuzzing::recording),
    target(
        "report",
        "files of explain --save, check-card --save and bench --save",
        cli::fuzzing::report,
    ),
    target("page", "pages of counters", cli::fuzzing::page),
    target("listing", "logs of UCX, versions of Open MPI, the kernel's log", tool::listing),
];

/// Where inputs are.
pub fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus")
}
