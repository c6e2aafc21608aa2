//! The subcommands that verify: which cases run in how many processes, threads and copies of UCX.

pub mod asleep;
pub mod atomics;
pub mod cuda_dmabuf;
pub mod endure;
pub mod loopback;
pub mod memory;
pub mod pair;
pub mod peer_errors;
pub mod reconnect;
pub mod recover;
pub mod soak;
pub mod two_hosts;
pub mod usage;
