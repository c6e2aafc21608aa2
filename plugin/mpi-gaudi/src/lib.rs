//! What Open MPI 5 and 6 need to know of Gaudi memory: components of its frameworks `accelerator`, `op` and `coll`.
//!
//! | Open MPI asks | component | answer |
//! |---|---|---|
//! | is this address a card's? copy between the two; allocate | `accelerator` | the engine's |
//! | reduce these two buffers (`MPI_SUM`, …) | `op` | staged in host memory, in chunks, and reduced by the function that Open MPI would have called |
//! | a blocking reduction, a short exchange | `coll` | staged in host memory, while other chunks are copied (`stage`), and done by the function that Open MPI would have called |
//!
//! Datatypes, collectives and windows of Open MPI then work on Gaudi memory: they ask one of these before they touch a
//! buffer. Messages themselves go by UCX and its plugin.
//!
//! All components are this one library, installed under the three names that Open MPI looks for, in a folder that
//! `OMPI_MCA_mca_base_component_path` names. It does not link with Open MPI: the layouts are in `abi`, the few functions
//! needed are looked up (`open_mpi`). The engine is `../libucx_gaudi.so` as seen from here (`engine`), the same copy
//! that UCX loads.

use std::io::Write;

mod abi;
mod accelerator;
mod coll;
mod engine;
mod op;
mod open_mpi;
mod stage;

/// Says why these components do nothing, or what they could not do. Open MPI has no place for such a text.
fn say(text: std::fmt::Arguments<'_>) {
    // In one write, as other ranks write there as well. If it fails, only the line is lost.
    let _ = std::io::stderr().write_all(format!("ucx-gaudi: Open MPI: {text}\n").as_bytes());
}

/// Whether this machine has Gaudis, as far as is known without the driver library.
fn has_gaudi() -> bool {
    std::path::Path::new("/sys/bus/pci/drivers/habanalabs").exists()
        || std::env::vars_os().any(|(name, _)| name.as_encoded_bytes().starts_with(b"SOFT_GAUDI_"))
}
