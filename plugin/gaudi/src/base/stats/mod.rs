//! What this process does with its Gaudis, counted where permitted processes can read it while it runs.
//!
//! `layout` is the format: a list of named counters and where they lie. `page` is the shared
//! memory of this process, found by others through `/proc/PID/fd` and gone with the process.
//! `count` is what the engine calls: an update is one relaxed atomic addition. Tools read the page with the crate
//! `stats-reader`.
//!
//! Every counter is in use. To count something new, add a counter to the list in `layout`: readers find it by name.

mod count;
mod layout;
mod page;

pub(crate) use count::{Counts, Gauge, GaugeGuard, Path, Tally};
pub(crate) use layout::Counter;
pub use layout::NAMES;
pub use page::why_unreadable;
pub(crate) use page::{is_exiting, start_time};
