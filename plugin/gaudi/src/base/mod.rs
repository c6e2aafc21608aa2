//! What everything else stands on: errors, options, what a card is, the process, statistics, the machine. Nothing here
//! knows how a card is driven.

pub(crate) mod card;
pub(crate) mod choice;
pub(crate) mod costs;
pub(crate) mod environment;
pub(crate) mod error;
pub(crate) mod options;
pub(crate) mod probes;
pub(crate) mod process;
pub(crate) mod remedy;
pub mod stats;
pub(crate) mod sysfs;
pub mod topology;
