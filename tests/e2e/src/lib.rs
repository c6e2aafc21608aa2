//! The harness of the end-to-end tests: it runs *unmodified* programs of stock UCX (and our own
//! verifying client) with a clean environment, a time limit and a software Gaudi of their own.
//!
//! `cargo xtask` uses the same harness for `demo` and `bench`, so that what is shown is what is tested. Nothing here
//! knows the inside of the plugin: the harness uses it as any user does, through `UCX_PLUGIN_PATH`, the loader path and
//! UCX's own output.
//!
//! ```no_run
//! use e2e::{Workbench, Device, Ucx};
//!
//! let bench = Workbench::from_env();
//! let device = Device::software();
//! let listing = bench.tool(Ucx::V1_22, "ucx_info").plugin().device(&device).arg("-d").run();
//! assert!(listing.ok().stdout.contains("Memory domain: gaudi_copy"));
//! ```

mod client;
mod device;
pub mod faults;
mod layout;
mod listing;
mod named;
pub mod nixl;
mod observed;
mod perftest;
mod process;
mod protocols;
pub mod rdma;
pub mod soak;
mod tool;

pub use device::{Device, SoftNode};
pub use layout::{Layout, Ucx};
pub use listing::Listing;
pub use perftest::{Figures, Pair, Perftest};
pub use process::{Finished, Running};
pub use protocols::{Choice, ProtocolLogs, Protocols};
pub use tool::{KEEP, Tool, Workbench, client, is_setting, libucp_to_test, stock};
pub use ucp_check::report::Row;
