//! The UCX plugin: Gaudi for an unmodified UCX.
//!
//! Little more than translation between UCX's interface (`uct`) and the engine's (`gaudi`). One
//! library, `libucx_gaudi.so`, serves UCX's module frameworks `uct` and `ucx_perftest`: the files that
//! UCX loads for them pass its call on (crate `plugin-loader`).
//!
//! Loading it registers three components and nothing else: no thread, no hook, no driver library.
//! The driver is looked for when UCX asks for memory domains, and a card is opened when the first
//! byte is allocated on it; then SIGSEGV gets a handler that explains faults at Gaudi addresses (`fault`).
//! Calls of the driver library are hooked only where the application makes
//! such calls itself (`hooks`).

mod addresses;
mod c_errors;
mod cards;
mod carrier;
mod copies;
mod domain;
mod duplicates;
mod environment;
mod estimates;
mod fault;
mod flavour;
mod fragments;
mod hcas;
mod hooks;
mod interface;
mod ipc;
mod lending;
mod memory_api;
mod memory_events;
mod memtype_cache;
mod perftest;
mod queue;
#[cfg(test)]
mod reference;
mod requested;
mod settings;
mod sleeper;
mod status;
mod summary;

use flavour::{GaudiCopy, GaudiGdr};
use uct::{MemoryType, Registration, Status, Ucx, log};

uct::plugin!("ucx-gaudi", register, perftest::offer);

fn register(ucx: &'static Ucx) -> Result<(), Status> {
    settings::early_log_level(ucx);
    settings::early_trace(ucx);
    duplicates::warn(ucx);
    if !ucx.knows_memory_type(MemoryType::GAUDI, c"gaudi") {
        log!(
            ucx,
            Warn,
            "ucx-gaudi: not loaded: UCX {} does not know Gaudi memory; this plugin supports UCX {}",
            ucx.version(),
            uct::SUPPORTED
        );
        return Err(Status::UNSUPPORTED);
    }
    // Set for newer versions of UCX. This one, if a preloaded library loaded us, would warn that nothing uses it.
    ucx.read_variable(c"PLUGIN_PATH");
    // gaudi_copy first: UCX prefers what was registered first for allocation and dma-buf.
    Registration::new(ucx, domain::GaudiComponent::<GaudiCopy>::new())
        .transport::<interface::CopyInterface<GaudiCopy>>()
        .register();
    Registration::new(ucx, domain::GaudiComponent::<GaudiGdr>::new())
        .transport::<interface::CopyInterface<GaudiGdr>>()
        .register();
    Registration::new(ucx, ipc::IpcComponent).transport::<ipc::IpcInterface>().register();
    log!(
        ucx,
        Debug,
        "ucx-gaudi {} registered with UCX {}",
        env!("CARGO_PKG_VERSION"),
        ucx.version()
    );
    Ok(())
}
